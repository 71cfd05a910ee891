"""What MkDocs does beyond its plugins: equations become MathML, notebooks have their place in the nav and a link to
Colab, the pages of experiments/ are on the site, and links between its folders and from the README are kept."""

import html
import re
from pathlib import Path

from latex2mathml.converter import convert
from markdown import Extension
from markdown.preprocessors import Preprocessor
from mkdocs.structure.files import File

EQUATION = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
LINKS = {"](docs/": "](", "](../docs/": "](../", "](../experiments/": "](experiments/"}  # in the project: on the site
MARKS = re.compile(r"<!--= .*?\s-->|<!--/-->", re.DOTALL)  # of experiments/pages.py


class Links(Extension, Preprocessor):
    """On the site, the pages of docs/ are at the root, and experiments/ is a folder of it. Marks of numbers go."""

    def extendMarkdown(self, md):
        md.preprocessors.register(self, "links", 31.5)  # after snippets, which have 32 and include parts of the README

    def run(self, lines):
        text = MARKS.sub("", "\n".join(lines))
        for begin, on_site in LINKS.items():
            text = text.replace(begin, on_site)
        return text.split("\n")


def on_config(config):
    """The nav's last part but one: the notebooks that there are, by their numbers."""
    config.markdown_extensions.append(Links())
    found = sorted(Path(config.docs_dir, "notebooks").glob("*.ipynb"))
    config.nav.insert(-1, {"Notebooks": [f"notebooks/{path.name}" for path in found]})
    return config


def on_files(files, config):
    """The pages and pictures of experiments/, beside those of docs/."""
    folder = Path(config.docs_dir).parent / "experiments"
    for path in sorted([*folder.rglob("*.md"), *folder.rglob("*.png")]):
        files.append(File.generated(config, str(path.relative_to(folder.parent)), abs_src_path=str(path)))
    return files


def on_page_content(content, page, config, **_):
    """Equations that need neither a script nor the network, and links between notebooks that work on the site.

    If the address of the repository is known (REPOSITORY_URL, which the release sets), notebooks also open in Colab.
    """
    if page.file.src_path.endswith(".ipynb"):  # served as a folder
        content = re.sub(r'href="(\w+)\.ipynb(#[^"]*)?"', r'href="../\1/\2"', content)
        content = re.sub(r'href="\.\./docs/([\w/]+)\.md(#[^"]*)?"', r'href="../../\1/\2"', content)
        if config.repo_url:
            repository = config.repo_url.rstrip("/").removeprefix("https://github.com/")
            address = f"https://colab.research.google.com/github/{repository}/blob/main/{page.file.src_uri}"
            how = "run <code>%pip install fedjax-drift</code> in its first cell"
            content = f'<p><a href="{address}">Open in Colab</a> and {how}.</p>{content}'

    def mathml(found):
        display = "block" if found[1] == "div" else "inline"
        return convert(html.unescape(found[2]), display=display)

    return EQUATION.sub(mathml, content)
