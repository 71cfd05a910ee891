"""Tests of the structure of the package: which modules import which, and which names are public."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import fedjax_drift as fd
from experiments import code_figures

ROOT = Path(fd.__file__).parent
MODULES = {
    ".".join(["fedjax_drift", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
}
FLOORS = [
    {
        "errors",
        "types",
        "needs",
        "untraceable",
        "message",
        "wrapping",
        "model",
        "recipes",
        "tree",
        "leaves",
        "factors",
        "checks",
        "spec",
    }
    | {"adapters", "axes", "batch_norm", "masks", "version", "disk", "reprs", "schedules", "convolution", "pytorch"},
    {"data", "models", "shift"},
    {"local", "devices", "clock", "participation", "robust", "topology"},
    {"round", "adversaries", "algorithms", "compression"},
    {"measures", "storage"},
    {"simulation"},
    {"plots", "logs", "track", "records", "run_folder", "paper_table", "statistics", "testing", "tuning"},
    {"cli"},
]


def imports(module: str) -> set[str]:
    """Returns the modules of the package that a module imports, also inside functions and for annotations."""
    path, found = MODULES[module], set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            while name and name not in MODULES:  # fedjax_drift.tree.dot -> fedjax_drift.tree
                name = name.rpartition(".")[0]
            found |= {name} - {"", module}
    return found


def room(module: str) -> str:
    return (module.split(".") + [""])[1]


GRAPH = {module: imports(module) for module in MODULES}


def test_there_are_no_circular_imports() -> None:
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join([*above[above.index(module) :], module])
        if module not in done:
            for other in GRAPH[module]:
                visit(other, (*above, module))
            done.add(module)

    for module in GRAPH:
        visit(module, ())


def test_modules_import_only_from_their_own_or_lower_layers() -> None:
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    inside = [module for module in MODULES if room(module)]
    assert {room(module) for module in inside} == set(floor), "a room without a floor"
    for module in inside:
        for other in GRAPH[module]:
            if other != "fedjax_drift":  # only the command line may import the package itself
                assert floor[room(other)] <= floor[room(module)], f"{module} imports {other}"
            else:
                assert room(module) == "cli", f"{module} imports the package itself"
    for module in inside:
        if room(module) == "algorithms" and module != "fedjax_drift.algorithms":
            below = {room(other) for other in GRAPH[module]}
            assert below <= {
                "types",
                "needs",
                "wrapping",
                "message",
                "model",
                "tree",
                "leaves",
                "axes",
                "factors",
                "local",
                "checks",
                "spec",
                "errors",
                "algorithms",
                "data",
            }, f"{module}: {below}"


def test_the_package_does_not_import_the_command_line() -> None:
    """`fd.parse_run` imports it when it is first used."""
    program = "import sys, fedjax_drift as fd; print('fedjax_drift.cli' in sys.modules, fd.parse_run, fd.ParsedRun)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("False <function parse_run")


def test_the_code_is_counted(tmp_path) -> None:
    package = tmp_path / "package"
    (package / "simulation").mkdir(parents=True)
    (package / "a.py").write_text('"""One.\n\nTwo."""\n# why\n\nfrom package.simulation import b  # up\n')
    nine = ", ".join("abcdefghi")
    source = f"class B:\n    def f(self, {nine}):\n        raise ValueError\nimport package.a\n"
    (package / "simulation" / "b.py").write_text(source)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_house.py").write_text('FLOORS = [{"a"}, {"simulation"}]\n')
    assert code_figures.figures(package) == {
        "code lines (all lines)": "5 (10)",
        "- modules": "1 (6)",
        "- simulation": "4 (4)",
        "raises per 1,000 code lines": "200.0",
        "lines that are only a comment": "10.0 %",
        "functions with more than 8 arguments": "1<br>simulation/b.py: B.f (9)",
        "longest files": "a.py 6<br>simulation/b.py 4",
        "classes in simulation/": 1,
        "imports that go up or in circles": 2,
    }
    assert "| imports that go up or in circles | 0 | 2 |" in code_figures.table([ROOT, package])


def test_every_subpackage_has_a_docstring() -> None:
    for path in MODULES.values():
        if path.name == "__init__.py":
            text = ast.get_docstring(ast.parse(path.read_text()))
            assert text and text.count("\n") >= 2, path


def test_no_code_uses_private_attributes_of_a_simulation() -> None:
    for folder in (ROOT, ROOT.parent / "tests", ROOT.parent / "experiments"):
        for path in folder.rglob("*.py"):
            if path == ROOT / "simulation/simulation.py":
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                    reached = node.value
                    name = reached.id if isinstance(reached, ast.Name) else getattr(reached, "attr", "")
                    assert name not in ("sim", "simulation"), f"{path}:{node.lineno}: {name}.{node.attr}"


def test_namespaces_list_their_public_names_only() -> None:
    namespaces = [fd, *(value for name in fd.__all__ if inspect.ismodule(value := getattr(fd, name)))]
    assert len(namespaces) > 15
    for namespace in namespaces:
        assert dir(namespace) == sorted(namespace.__all__), namespace.__name__
        assert all(hasattr(namespace, name) for name in namespace.__all__)
        modules = [name for name in namespace.__all__ if inspect.ismodule(getattr(namespace, name))]
        assert namespace is fd or set(modules) <= {"names"}, "a module of the package has the name of a function"


@pytest.mark.thorough
def test_values_are_shown_without_arrays_and_addresses() -> None:
    """Notebooks show the value of a cell's last line."""
    rows = [(np.ones((n, 3), np.float32), np.arange(n) % 2) for n in (2, 5, 4)]
    local = fd.LocalTraining(lr=0.3, optimizer=optax.scale_by_adam(), augment=lambda key, x: x)
    data = fd.FederatedData.from_clients(rows, test=rows[0])
    sim = fd.Simulation(fd.models.linear((3,), 2), data, fd.algorithms.feddyn(alpha=0.2), local=local, cohort_size=2)
    state, history = sim.run(sim.init(jax.random.key(0)), 2, progress=False)
    assert repr(state) == (
        "ServerState(round=2, server=Server(params=8 numbers, h=8 numbers, client_mean=8 numbers), "
        "clients=Client(h=24 numbers))"
    )
    assert "alpha=0.2" in repr(sim) and "lr=0.3" in repr(sim) and "scale_by_adam(...)" in repr(sim)
    settings = {"algorithm": "feddyn", "alpha": 0.2, "lr": 0.3, "optimizer": "scale_by_adam(...)", "cohort_size": 2}
    assert settings.items() <= sim.settings.items()
    runs = sim.sweep(1, seeds=[0, 1], progress=False)
    private = fd.aggregation.private(1.0, 0.5)
    values = (
        data,
        sim,
        state,
        sim.run(state, 1, progress=False),
        history,
        runs,
        sim.algorithm,
        local,
        sim.model,
        private,
    )
    for value in values:
        assert len(repr(value)) < 500 and "0x" not in repr(value) and "Array" not in repr(value)
    traced = []
    jax.eval_shape(lambda state: traced.append(repr(state)) or sim.round_fn(state), state)
    assert traced[0].startswith("ServerState(round=1 numbers")
    assert jax.tree.leaves(history) == jax.tree.leaves(list(history)) and json.loads(json.dumps(history)) == history
    for value in (data, history, runs):
        assert value._repr_html_().count("<tr>") >= 2
    assert "<td" in history._repr_html_() and "feddyn" in runs._repr_html_()
    assert "12 records, the last 10 evaluations<" in type(history)([*history[:1]] * 12)._repr_html_()
