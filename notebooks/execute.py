"""Executes the notebooks in place, with their outputs and pictures: python notebooks/execute.py [NAME...]"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent


def main() -> None:
    os.environ["CI"] = "true"  # no progress bars in what is kept
    for path in sorted(HERE.glob("*.ipynb")):
        if sys.argv[1:] and not any(path.name.startswith(name) for name in sys.argv[1:]):
            continue
        notebook, start = nbformat.read(path, as_version=4), time.perf_counter()
        NotebookClient(
            notebook, kernel_name="python3", resources={"metadata": {"path": HERE}}, record_timing=False
        ).execute()
        # All that the kernel says about the language, as Jupyter saves it: opening a notebook then changes no line.
        notebook.metadata = {name: notebook.metadata[name] for name in ("kernelspec", "language_info")}
        nbformat.write(notebook, path)
        print(f"{path.name}: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
