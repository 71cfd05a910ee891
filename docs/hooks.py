"""What MkDocs does beyond its plugins: equations become MathML, and every notebook has its place in the nav."""

import html
import re
from pathlib import Path

from latex2mathml.converter import convert

EQUATION = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_config(config):
    """The nav's last part but one: the notebooks that there are, by their numbers."""
    found = sorted(Path(config.docs_dir, "notebooks").glob("*.ipynb"))
    config.nav.insert(-1, {"Notebooks": [f"notebooks/{path.name}" for path in found]})
    return config


def on_page_content(content, page, **_):
    """Equations that need neither a script nor the network, and links between notebooks that work on the site."""
    if page.file.src_path.endswith(".ipynb"):  # served as a folder
        content = re.sub(r'href="(\w+)\.ipynb(#[^"]*)?"', r'href="../\1/\2"', content)
        content = re.sub(r'href="\.\./docs/([\w/]+)\.md(#[^"]*)?"', r'href="../../\1/\2"', content)

    def mathml(found):
        display = "block" if found[1] == "div" else "inline"
        return convert(html.unescape(found[2]), display=display)

    return EQUATION.sub(mathml, content)
