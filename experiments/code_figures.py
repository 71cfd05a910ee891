"""Counts the code of one or two versions of a package, and prints the counts as a Markdown table.

    python -m experiments.code_figures fedjax_drift
    git worktree add /tmp/before REVISION
    python -m experiments.code_figures /tmp/before/fedjax_drift fedjax_drift

A line is code unless it is blank, a docstring, or only a comment. A room is a folder of the package; the modules
beside the folders are one room. The order of the rooms is that of FLOORS in tests/test_house.py beside the package.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path


def docstring_lines(nodes: list[ast.AST]) -> set[int]:
    """The lines of all strings that are statements, so also of the docstrings of attributes."""
    strings = [node for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    return {line for node in strings for line in range(node.lineno, (node.end_lineno or 0) + 1)}


def arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many arguments a function has, without self and cls."""
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def imported(tree: ast.Module, module: str, modules: set[str]) -> set[str]:
    """The modules of the package that a module imports, also inside functions and for annotations."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    found = set()
    for name in names:
        while name and name not in modules:  # package.tree.dot -> package.tree
            name = name.rpartition(".")[0]
        found |= {name} - {"", module}
    return found


def floors(package: Path) -> dict[str, int]:
    """The floor of every room, or {} if there is no tests/test_house.py beside the package."""
    test = package.parent / "tests" / "test_house.py"
    for node in ast.parse(test.read_text()).body if test.exists() else []:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLOORS":
            sets = eval(ast.unparse(node.value))  # a list of sets of strings
            return {name: number for number, names in enumerate(sets) for name in names}
    return {}


def wrong_imports(package: Path, graph: dict[str, set[str]]) -> int:
    """How many imports go to a room on a higher floor, or are part of a circle."""
    floor = floors(package)

    def reached(module: str) -> set[str]:
        seen, left = set[str](), [module]
        while left:
            new = graph[left.pop()] - seen
            seen |= new
            left += new
        return seen

    def goes_up(module: str, other: str) -> bool:
        here, there = ((name.split(".") + [""])[1] for name in (module, other))
        return bool(here) and floor.get(here, 0) < floor.get(there, 0)

    return sum(goes_up(a, b) or a in reached(b) for a, others in graph.items() for b in others)


def figures(package: Path) -> dict[str, object]:
    """What is printed for one package, by name."""
    files = {path: path.read_text() for path in sorted(package.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in files.items()}
    code, total, many, longest = Counter[str](), Counter[str](), [], []
    raises = comments = classes = 0
    for path, text in files.items():
        nodes, lines = list(ast.walk(trees[path])), text.splitlines()
        inside = path.relative_to(package)
        room = inside.parts[0] if len(inside.parts) > 1 else "modules"
        only_comment = [line.strip().startswith("#") for line in lines]
        without = docstring_lines(nodes)
        numbered = zip(range(1, len(lines) + 1), lines, only_comment, strict=True)
        code[room] += sum(bool(line.strip()) and not comment and n not in without for n, line, comment in numbered)
        total[room] += len(lines)
        comments += sum(only_comment)
        raises += sum(isinstance(node, ast.Raise) for node in nodes)
        classes += sum(isinstance(node, ast.ClassDef) for node in nodes) if room == "simulation" else 0
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        owner = {f: f"{c.name}." for c in nodes if isinstance(c, ast.ClassDef) for f in c.body}
        many += [f"{inside}: {owner.get(f, '')}{f.name} ({n})" for f in functions if (n := arguments(f)) > 8]
        longest.append((len(lines), str(inside)))
    names = {path: ".".join([package.name, *path.relative_to(package).with_suffix("").parts]) for path in files}
    names = {path: name.removesuffix(".__init__") for path, name in names.items()}
    graph = {name: imported(trees[path], name, set(names.values())) for path, name in names.items()}
    return {
        "code lines (all lines)": f"{code.total():,} ({total.total():,})",
        **{f"- {room}": f"{code[room]:,} ({total[room]:,})" for room in sorted(code)},
        "raises per 1,000 code lines": f"{1000 * raises / code.total():.1f}",
        "lines that are only a comment": f"{100 * comments / total.total():.1f} %",
        "functions with more than 8 arguments": "<br>".join([str(len(many)), *many]),
        "longest files": "<br>".join(f"{name} {n}" for n, name in sorted(longest, reverse=True)[:10]),
        "classes in simulation/": classes,
        "imports that go up or in circles": wrong_imports(package, graph),
    }


def table(packages: list[Path]) -> str:
    columns = [figures(package.resolve()) for package in packages]
    rows = list(dict.fromkeys(name for column in columns for name in column))
    lines = [["", *map(str, packages)], ["---"] * (len(columns) + 1)]
    lines += [[name, *(str(column.get(name, "-")) for column in columns)] for name in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3:
        sys.exit(__doc__)
    print(table([Path(folder) for folder in sys.argv[1:]]))
