"""Runs the Python examples of the README and of every page, checks the commands, and runs the notebooks."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import abuse
import jax
import numpy as np
import pytest

import fedjax_drift as fd
from experiments.agreement_with_others import __main__ as compare_again
from experiments.agreement_with_others import page as agreement
from experiments.leaderboard.entrants import ENTRANTS
from experiments.tables import __main__ as tables
from fedjax_drift.algorithms import ALGORITHMS
from fedjax_drift.cli import commands
from fedjax_drift.cli.commands import parse

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LONG = {  # pages whose examples take 4 s or more, except the first page
    "monitoring.md", "models.md", "scale.md", "getting_started.md", "sources_of_drift.md", "concepts.md",
    "algorithms.md", "language_models.md", "command_line.md",
}  # fmt: skip
BLOCK = re.compile(r"(?:<!-- needs: (\w+) -->\n+)?```python\n(.*?)```", re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str]]:
    """Returns (the package that it needs or "", its source) for every Python block."""
    return BLOCK.findall(page.read_text())


ELSEWHERE = [(page, *block) for page in PAGES for block in blocks(page) if block[0]]


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, cache) -> None:
    """The pages share the data that they generate."""
    monkeypatch.setenv("FEDJAX_DRIFT_CACHE", str(cache))


def some(paths: list[Path], long: set[str]) -> list:
    """Returns parameters of a test. The files with these names are for thorough tests."""
    marks = [pytest.mark.thorough]
    return [pytest.param(path, marks=marks * (path.name in long), id=str(path.relative_to(ROOT))) for path in paths]


@pytest.mark.parametrize("page", some(PAGES, LONG))
def test_a_pages_examples_run(page, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fd, "use_cpu_devices", lambda n=None: n)  # JAX has already started, with two devices
    one_device = fd.clients_mesh(jax.devices()[:1])  # programs for one device compile faster
    monkeypatch.setattr("fedjax_drift.simulation.placement.clients_mesh", lambda *_: one_device)
    monkeypatch.setattr(fd, "use_compilation_cache", lambda path=None: path)
    names: dict = {"__name__": "__main__"}
    with jax.numpy_rank_promotion("allow"):  # JAX's default
        for needs, source in blocks(page):
            if not needs:
                exec(compile(source, page, "exec"), names)


@pytest.mark.thorough
@pytest.mark.parametrize(("page", "needs", "source"), ELSEWHERE, ids=[f"{p.stem}-{n}" for p, n, _ in ELSEWHERE])
def test_an_example_with_another_package_runs(page, needs, source, tmp_path) -> None:
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{page.name} has an example for {needs}, which is not installed")
    alone = {"WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": "file:./runs", "MLFLOW_ALLOW_FILE_STORE": "true"}
    env = os.environ | {"PYTHONPATH": str(ROOT), **alone}
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr


def test_the_readmes_example_is_short() -> None:
    ((_, example),) = blocks(ROOT / "README.md")
    assert len(example.replace("\n\n", "\n").strip().splitlines()) <= 12


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_pages_commands_parse(page) -> None:
    text = page.read_text()
    shown = re.findall(r"^```(?:bash|sh)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = "\n".join(shown).replace("\\\n", " ").splitlines() + re.findall(r"`([^`\n]+)`", text)
    for line in lines:
        if command := re.search(r"(?:^|&& )fedjax-drift (.*)", line):
            argv = shlex.split(command[1], comments=True)
            if "--resume" in argv:  # the folder contains these settings
                argv += ["--dataset", "glyphs", "--algorithm", "fedavg"]
            try:
                parse(argv)
            except SystemExit as end:
                assert end.code == 0, line  # --help
        if command := re.search(r"^python -m experiments\.tables (.*)", line):
            tables._parser().parse_args(shlex.split(command[1], comments=True))


def test_all_links_to_files_exist() -> None:
    """Also in the pages of results. docs/check_site.py checks the links of the built site, with their anchors."""
    pages = [
        *ROOT.glob("*.md"),
        *(page for folder in ("docs", "experiments") for page in (ROOT / folder).rglob("*.md")),
    ]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text())]
    assert len(links) > 100
    assert not [(page.name, link) for page, link in links if not (page.parent / link).exists()]


def test_the_page_of_the_architecture_names_files_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    names = set(re.findall(r"`([\w/]+\.(?:py|md)|\w+/)`", page))
    assert len(names) > 30
    assert not [name for name in names if not any((place / name).exists() for place in (ROOT, ROOT / "fedjax_drift"))]
    first = re.findall(r"^\d\. `(fedjax_drift/[\w/]+\.py)`", page, re.MULTILINE)
    assert len(first) == 3
    assert sum(len((ROOT / name).read_text().splitlines()) for name in first) <= 500


@pytest.mark.parametrize("module", ["data.partition", "shift", "compression", "clock", "round.aggregation"])
def test_the_reference_has_all_names_of_a_module(module) -> None:
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    (members,) = re.findall(rf"^::: fedjax_drift\.{module}\n +options: {{[^}}]*members: \[(.*?)\]", pages, re.M | re.S)
    assert set(importlib.import_module(f"fedjax_drift.{module}").__all__) <= set(re.split(r",\s+", members))


def test_the_design_page_links_all_deviations() -> None:
    files = (ROOT / "fedjax_drift" / "algorithms").glob("*.py")
    deviating = {path.stem for path in files if "\nDeviations:" in path.read_text()}
    linked = re.findall(r"\[(\w+)\]\(fedjax_drift/algorithms/\1\.py\)", (ROOT / "BUILD_NOTES.md").read_text())
    assert set(linked) == deviating and len(linked) == len(deviating)


def test_every_table_has_a_header() -> None:
    """An empty line within a table ends it, and the rows after it are shown as text."""
    tables = [rows for page in PAGES for rows in re.findall(r"(?:^\|.*\n)+", page.read_text(), re.MULTILINE)]
    assert len(tables) > 100
    assert not [rows for rows in tables if not re.match(r".*\n\|[ :|-]+\n", rows)]


def errors() -> list[tuple[str, str]]:
    return re.findall(r"^\| `(.*?)` \| `(.*)` \|$", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def wrong() -> dict:
    """Returns the names that the calls on the page of errors use."""
    (_, source), *_ = blocks(ROOT / "docs" / "errors.md")
    names: dict = {}
    exec(source, names)
    return names


def test_thirty_wrong_calls_are_shown() -> None:
    assert len(errors()) >= 30


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
@pytest.mark.parametrize(("call", "says"), errors(), ids=[call[:60] for call, _ in errors()])
def test_a_wrong_call_raises_the_documented_error(wrong, call, says) -> None:
    with pytest.raises(ValueError) as error:
        eval(call, wrong)
    assert str(error.value) == says


def test_the_algorithms_page_lists_every_factory_with_its_state() -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text()
    rows = re.findall(r"^\| \[`(\w+)`\]\(#([\w-]+)\) \|[^|]*\| ([\d,]+) \|[^|]*\| (\d+) \|$", page, re.MULTILINE)
    assert [name for name, *_ in rows] == list(ALGORITHMS)
    assert fd.algorithms.__all__ == ["ALGORITHMS", *ALGORITHMS]
    given = {"mu": 0.1, "alpha": 0.1, "beta": 0.9, "server_lr": 0.1}
    given |= {"unlabelled": [[0.0]], "classes": 62, "features": 84}
    models = {"lenet5": fd.models.lenet5(62), "cosine": fd.models.lenet5(62, cosine=True)}
    models |= {"resnet18": fd.models.resnet18(), "adapted": fd.models.lora(models["lenet5"])}
    shapes = {name: jax.eval_shape(model.init, jax.random.key(0)) for name, model in models.items()}

    def size(tree) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    for name, anchor, client_bytes, server_models in rows:
        factory = ALGORITHMS[name]
        needed = [key for key, p in inspect.signature(factory).parameters.items() if p.default is p.empty]
        algorithm = factory(**{key: given[key] for key in needed})
        own = inspect.signature(factory).parameters.get("personal")
        has_norm = own is not None and "norm" in own.default  # LeNet-5 has no normalisation layer
        needs = "adapted" if algorithm.requires.adapters else "cosine" if algorithm.requires.cosine else "lenet5"
        params = shapes["resnet18" if has_norm else needs]
        client, server = (jax.eval_shape(init, params) for init in (algorithm.init_client, algorithm.init_server))
        assert client_bytes == f"{size(client):,}", name
        assert int(server_models) == size(server) // size(params), name
        headings = re.findall(r"^## (.*)$", page, re.MULTILINE)
        assert anchor in [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings], anchor


@pytest.mark.parametrize(
    ("heading", "kind"), [("a state", fd.ServerState), ("`work`", fd.Work), ("`context`", fd.Round)]
)
def test_concepts_lists_the_fields(heading, kind) -> None:
    page = (ROOT / "docs" / "concepts.md").read_text()
    (table,) = re.findall(rf"^\| field of {heading} \| .*\n\|---\|---\|\n((?:\|.*\n)+)", page, re.MULTILINE)
    listed = {name for row in table.splitlines() for name in re.findall(r"`(\w+)", row.split("|")[1])}
    fields = set(getattr(kind, "_fields", None) or kind.__dataclass_fields__)
    assert all(hasattr(kind, name) or name in fields for name in listed)
    assert kind is fd.Work or listed == fields  # the engine needs more fields of a work


def test_counts_in_prose_are_those_of_the_code() -> None:
    """A count that the code changes is either here, or not in the prose."""
    groups = {**fd.Failures.__dataclass_fields__, **fd.Placement.__dataclass_fields__}
    counts = {
        ("README.md", r"The library has (\d+) algorithms"): len(ALGORITHMS),
        ("BUILD_NOTES.md", r"`fd.Failures` and `fd.Placement` group (\d+) options"): len(groups),
        ("docs/algorithms.md", r"A leaderboard compares (\d+) algorithms"): len(ENTRANTS),
        ("docs/algorithms.md", r"among the (\d+) algorithms without personal models"): sum(
            not entrant.personal for entrant in ENTRANTS.values()
        ),
    }
    for (page, pattern), number in counts.items():
        written = re.findall(pattern.replace(" ", r"\s+"), (ROOT / page).read_text())
        assert list(map(int, written)) == [number], f"{page}: {pattern}"
    scale = (ROOT / "docs" / "scale.md").read_text()
    table = re.findall(r"^\| `(\w+)=", scale[scale.index("## Clients that fail") :], re.MULTILINE)
    assert "first five options" in scale and set(table[:5]) == {*fd.Failures.__dataclass_fields__}
    first = (commands.__doc__ or "").partition("\n")[0].replace("fedjax-drift ", "")
    assert re.findall(r"`(\w+)`", first) == [*commands.COMMANDS]


def test_the_page_of_agreement_shows_its_results_and_its_calls_are_valid() -> None:
    results = json.loads(agreement.RESULTS.read_text())
    assert agreement.PAGE.read_text() == agreement.rendered(results), "write it again: agreement.write()"
    names = {**vars(fd.algorithms), "unlabelled": np.zeros((4, 3))}
    for row in (row for source in results.values() for row in source["rows"]):
        assert isinstance(eval(row["algorithm"], names), fd.Algorithm), row["algorithm"]
        assert row["difference"] < agreement.ROUNDING or row["cause"], "a difference needs its cause"
    algorithms, repositories = len(agreement.algorithms(results)), len(results)
    assert f"{algorithms} of them against other people's code" in (ROOT / "README.md").read_text()
    counted = f"{algorithms} algorithms were compared with the code of {repositories} repositories"
    assert counted in " ".join((ROOT / "docs" / "faq.md").read_text().split())


def test_the_page_of_models_lists_the_operations_of_pytorch() -> None:
    spec = importlib.util.spec_from_file_location("operations", ROOT / "docs" / "operations.py")
    assert spec is not None and spec.loader is not None
    written = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(written)
    page = written.PAGE.read_text()
    assert page == written.rendered(page), "write it again: python docs/operations.py"
    assert "`addmm`" in page and "`conv2d`" in page


def test_a_changed_row_of_the_page_of_agreement_is_printed_with_its_old_value(tmp_path, monkeypatch) -> None:
    row = {"algorithm": "fedavg()", "lines": [], "setting": "", "default": 0.14, "cause": "", "difference": 2e-16}
    assert agreement.changes([row], [row | {"difference": 5e-16, "default": 0.1401}]) == []
    (tmp_path / "FL-Simulator" / ".git").mkdir(parents=True)
    monkeypatch.setattr(agreement, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(agreement, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(compare_again, "git", lambda _, command, *__: "abc 2026-11-28" if command == "log" else "")
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path), "--only", "fl_simulator"])
    monkeypatch.setattr(compare_again, "run", lambda *_: [row])
    compare_again.main()
    monkeypatch.setattr(compare_again, "run", lambda *_: [row | {"difference": 3e-4, "default": None}])
    with pytest.raises(SystemExit) as ended:
        compare_again.main()
    assert ended.value.code.splitlines() == [  # text: Python prints it, and the status is 1
        "fl_simulator: fedavg(): difference 3e-04, was 2e-16", "fl_simulator: fedavg(): default none, was 0.14",
    ]  # fmt: skip
    monkeypatch.setattr(compare_again, "run", lambda *_: [])
    with pytest.raises(SystemExit, match="difference none, was 3e-04"):
        compare_again.main()


def test_import_does_not_import_heavy_packages() -> None:
    heavy = ("tensorflow", "tensorflow_datasets", "matplotlib", "PIL", "tqdm", "orbax", "pandas", "scipy.stats")
    heavy += ("datasets", "flwr_datasets", "pyarrow", "torch", "requests", "flax.nnx")
    program = f"import fedjax_drift, sys; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


SMALL = {  # values for the cell with the tag "parameters", so that the notebooks take less time
    "01_one_round.ipynb": {"WRITERS": 10, "ROUNDS": 1},
    "02_watching_drift.ipynb": {"WRITERS": 4, "CLIENTS": 8, "ROUNDS": 1, "EVERY": 1, "SEEDS": 2},
    "03_own_algorithm.ipynb": {"ROUNDS": 1, "EVERY": 1},
    "04_all_writers.ipynb": {"WRITERS": 10, "ROUNDS": 1, "SEEDS": 2},
    "05_to_a_tpu_slice.ipynb": {"ROUNDS": 1},
    "06_adapters.ipynb": {"CLIENTS": 8, "COHORT": 4, "ROUNDS": 1, "PRETRAINING": 1},
    "08_rounds_seconds_megabytes.ipynb": {
        "WRITERS": 4,
        "CLIENTS": 8,
        "ROUNDS": 2,
        "SEEDS": 1,
        "COHORT": 1,
        "TARGET": 0.01,
    },
    "09_language_model.ipynb": {
        "PRETRAINING": 1,
        "CLIENTS": 4,
        "ROUNDS": 1,
        "TUNING_ROUNDS": 1,
        "SEEDS": 1,
        "NAMES": ["FFA-LoRA"],
        "LOW_RANK": ["FedEx-LoRA"],
        "LOW_RANK_ROUNDS": 1,
    },
    "07_sources_of_drift.ipynb": {"WRITERS": 4, "CLIENTS": 8, "ROUNDS": 2, "SEEDS": 1, "NAMES": ["FedAvg"], "LAST": 1},
}


NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_stored_as_jupyter_lab_saves_it(path) -> None:
    """Lab writes the kernel's metadata when it opens a notebook. If they are complete, git sees no change."""
    import nbformat
    from ipykernel.ipkernel import IPythonKernel
    from ipykernel.kernelspec import get_kernel_dict

    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.read_text() == nbformat.writes(notebook) + "\n" and notebook.nbformat_minor >= 5
    kernel = {name: get_kernel_dict()[name] for name in ("display_name", "language")}
    assert notebook.metadata.kernelspec == kernel | {"name": "python3"}
    assert notebook.metadata.language_info | {"version": ""} == IPythonKernel.language_info | {"version": ""}


@pytest.mark.thorough
@pytest.mark.parametrize("path", some(NOTEBOOKS, {path.name for path in NOTEBOOKS[1:]}))
def test_notebooks_run(path, monkeypatch) -> None:
    """Every cell runs as it is. A cell with smaller values follows the notebook's cell of parameters."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count and not any(o.output_type == "error" for o in cell.outputs) for cell in code)
    kept = pictures(notebook)
    (parameters,) = [cell for cell in code if "parameters" in cell.metadata.get("tags", ())]
    assert set(SMALL[path.name]) <= set(re.findall(r"^(\w+) = ", parameters.source, re.MULTILINE))
    smaller = "\n".join(f"{name} = {value}" for name, value in SMALL[path.name].items())
    notebook.cells.insert(notebook.cells.index(parameters) + 1, nbformat.v4.new_code_cell(smaller))
    monkeypatch.setenv("XLA_FLAGS", os.environ["FEDJAX_DRIFT_TESTS_XLA_FLAGS"])  # programs compile in half of the time
    resources = {"metadata": {"path": path.parent}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    assert pictures(notebook) == kept


def pictures(notebook) -> int:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return sum("image/png" in output.get("data", {}) for output in outputs)


RANGE = re.compile(r"(?<![\w)])(>=? \d+|in \[0, 1\)|in \(0, 1\]|in 0\.\.1)(?![\w.*^])")


def test_docstrings_and_declarations_have_the_same_ranges() -> None:
    """A range in the first sentence about an argument is the one that is checked."""
    compared, wrong = 0, []
    for name, function in abuse.public("fd", fd):
        arguments = function.declared.arguments if hasattr(function, "declared") else {}
        for found in re.finditer(r"^  ([\w, ]+): (.+(?:\n    .+)*)", inspect.getdoc(function) or "", re.MULTILINE):
            said = RANGE.search(found[2].partition(". ")[0].replace("in [0, 1]", "in 0..1"))
            for argument in found[1].split(", "):
                declared = arguments[argument].spec if argument in arguments else None
                if said and declared and declared.allowed and declared.kind in ("number", "integer"):
                    allowed = re.sub(r"^a (finite )?(number|probability) |\.\.\d{2,}$", "", declared.allowed)
                    compared += 1
                    if allowed not in (said[1], said[1].replace(">= ", "in ")):
                        wrong.append(f"{name}({argument}): {said[1]} in the docstring, {declared.allowed} is checked")
    assert not wrong
    assert compared > 100
