"""What is shown is run: the README's Python, its commands' flags, and the notebooks."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fedjax_drift import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("FEDJAX_DRIFT_CACHE", str(tmp_path))
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"  # compiling takes longest
    monkeypatch.setenv("XLA_FLAGS", flags)


def test_the_readmes_examples_run(tmp_path) -> None:
    examples = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(examples[0].strip().splitlines()) <= 14
    small = "fd.models.linear((28, 28, 1), num_classes=62)"  # LeNet-5 is compiled in the first example, and only there
    later = [example.replace("fd.models.lenet5()", small) for example in examples[1:]]
    program = "\n".join([examples[0], *later, "assert figure.axes"]).replace("num_writers=50", "num_writers=16")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout


def test_the_readmes_commands_are_understood() -> None:
    commands = re.findall(
        r"^\s*(fedjax-drift (?:run|quickstart|data|experiment|report)\b.*?[^\\])$", README, re.MULTILINE | re.DOTALL
    )
    assert len(commands) >= 3
    for command in commands:
        cli._parse(shlex.split(command.replace("\\\n", " "), comments=True)[1:])


def test_importing_imports_nothing_heavy() -> None:
    heavy = ("tensorflow", "tensorflow_datasets", "matplotlib", "PIL", "tqdm", "orbax", "pandas", "scipy.stats")
    program = f"import fedjax_drift, sys; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.name)
def test_notebooks_run(path) -> None:
    if not os.environ.get("FEDJAX_DRIFT_DATA"):
        pytest.skip("FEDJAX_DRIFT_DATA is not set: the notebooks read MNIST from there")
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.source = re.sub(r"\brounds=\d+", "rounds=6", cell.source)
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    pictures = [o for cell in notebook.cells for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
    assert pictures
