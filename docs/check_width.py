"""Checks that no page of the built site scrolls sideways on a phone: python docs/check_width.py SITE CHROMIUM

CHROMIUM is the command of Chrome or Chromium. Every page is shown in a frame of 390 pixels. Tables, code and equations
may be wider, because they scroll inside their own box. The exit status is 1 if a page is wider than the frame.
"""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
import tempfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

WIDTH = 390  # CSS pixels
FRAME = """<iframe style="width: WIDTHpx; height: 844px; border: 0"></iframe><script>
const pages = PAGES, wide = {}, frame = document.querySelector("iframe")
let i = 0
frame.onload = () => setTimeout(() => {  // scripts put tables into boxes
    const page = frame.contentDocument.documentElement
    if (page.scrollWidth > page.clientWidth) wide[pages[i]] = page.scrollWidth - page.clientWidth
    if (++i < pages.length) frame.src = pages[i]
    else document.title = JSON.stringify({checked: i, wide})
}, 200)
frame.src = pages[0]
</script>"""


def too_wide(site: Path, chromium: str) -> dict[str, int]:
    """The pages that are wider than the frame, and by how many pixels."""
    pages = sorted(str(file.relative_to(site)) for file in site.rglob("*.html") if file.name != "404.html")
    check = (FRAME.replace("WIDTH", str(WIDTH)).replace("PAGES", json.dumps([f"/{page}" for page in pages]))).encode()

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/check":
                return super().do_GET()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(check)
            return None

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=site)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        with tempfile.TemporaryDirectory() as profile:
            flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--dump-dom"]
            flags += ["--virtual-time-budget=600000", f"http://127.0.0.1:{server.server_port}/check"]
            shown = subprocess.run([chromium, *flags], capture_output=True, text=True, timeout=600, check=True).stdout
        server.shutdown()
    found = re.search(r"<title>(\{.*\})</title>", shown)
    result = json.loads(html.unescape(found[1])) if found else {"checked": 0}
    if result["checked"] != len(pages) or not pages:
        raise RuntimeError(f"the browser has shown {result['checked']} of {len(pages)} pages")
    return result["wide"]


if __name__ == "__main__":
    found = too_wide(Path(sys.argv[1]).resolve(), sys.argv[2])
    lines = [f"{page} is {pixels} pixels too wide" for page, pixels in found.items()]
    print("\n".join(lines) or "no page scrolls sideways")
    sys.exit(bool(found))
