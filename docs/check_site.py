"""Checks the links of the built site, with their anchors: python docs/check_site.py SITE

Links to other sites are not followed. The exit status is 1 if a link is broken, or if SITE has no page.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit


class Page(HTMLParser):
    """The anchors and the links of a page."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.anchors, self.links = {"", "__top"}, set[str]()
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {name for name in (values.get("id"), values.get("name")) if name}
        self.links |= {link for link in (values.get("href"), values.get("src")) if link}


def broken_links(site: Path) -> list[str]:
    """The links that lead nowhere, as "page: link"."""
    pages = {file.resolve(): Page(file) for file in site.rglob("*.html")}
    broken = [] if pages else [f"{site} has no page"]
    for file, page in pages.items():
        if file.name == "404.html":
            continue  # its links are absolute
        for link in sorted(page.links):
            if urlsplit(link).scheme or link.startswith("//"):
                continue
            path, anchor = urldefrag(link)
            target = (file.parent / unquote(urlsplit(path).path)).resolve() if path else file
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                broken.append(f"{file.relative_to(site.resolve())}: {link} is not there")
            elif target in pages and unquote(anchor) not in pages[target].anchors:
                broken.append(f"{file.relative_to(site.resolve())}: {link} has no such anchor")
    return broken


if __name__ == "__main__":
    found = broken_links(Path(sys.argv[1]))
    print("\n".join(found) or "all links lead somewhere")
    sys.exit(bool(found))
