"""How docstrings that are written to be read in the source look on a page; a griffe extension."""

import importlib
import re
from textwrap import indent

import griffe

from fedjax_drift import spec

DOCTEST = re.compile(r"(?:^>>> .*\n?(?:^(?!>>> |\s*$).*\n?)*)+", re.MULTILINE)
BOUND = re.compile(r"^(\s*(?:[\w, ]+: )?)>(?=[ =])", re.MULTILINE)  # "lr: > 0", which Markdown takes for a quotation


def words(name: str, argument: spec.Argument) -> str:
    """What is allowed for an argument, such as ``> 0 or None``. "" if its type says it."""
    of = argument.spec
    if of is None or not (of.allowed or of.kind == "word"):
        return ""
    first = " or ".join(f'"{word}"' for word in of.right) if of.kind == "word" else of.allowed
    first = re.sub("^a (finite )?number (?=[><])", "", first)
    return " or ".join([first, *(f'"{other}"' if isinstance(other, str) else str(other) for other in argument.others)])


class AsWritten(griffe.Extension):
    """Fields are listed with their class, a comment beside one being its docstring; equations and doctests keep their
    lines."""

    def on_instance(self, *, obj: griffe.Object, **_) -> None:
        if obj.docstring is None:
            return
        text = BOUND.sub(r"\1\\>", obj.docstring.value)
        if obj.is_module and obj.parent is not None and obj.parent.path == "fedjax_drift.algorithms":
            text = f"```text\n{text}\n```"
        obj.docstring.value = DOCTEST.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", text)

    def on_attribute(self, *, attr: griffe.Attribute, **_) -> None:
        if attr.path == f"fedjax_drift.spec.{attr.name}" and hasattr(value := getattr(spec, attr.name), "__metadata__"):
            of = value.__metadata__[0]
            attr.docstring = griffe.Docstring(f"{of.kind}, {of.allowed}".rstrip(", "), parent=attr)

    def on_function(self, *, func: griffe.Function, **_) -> None:
        if func.docstring is None or func.name.startswith("_"):
            return
        value = importlib.import_module(func.module.path)
        for name in func.path.removeprefix(f"{func.module.path}.").split("."):
            value = getattr(value, name)
        if not callable(value):  # a property
            return
        allowed = [
            f"`{name}` {text}"
            for name, argument in spec.Declared(value).arguments.items()
            if (text := words(name, argument))
        ]
        if allowed:
            func.docstring.value += f"\n\nAllowed: {'; '.join(allowed)}."

    def on_class_members(self, *, cls: griffe.Class, **_) -> None:
        lines = cls.module.lines_collection[cls.module.filepath]
        fields = []
        for field in cls.attributes.values():
            comment = re.search(r"  # (.*)", lines[field.lineno - 1])
            if (
                field.name.startswith("_")
                or field.annotation is None
                or not (field.docstring or comment)
                or "property" in field.labels
            ):
                continue
            text = field.docstring.value if field.docstring else BOUND.sub(r"\1\\>", comment[1])
            default = "" if field.value is None else f" Default `{field.value}`."
            fields.append(f"{field.name}: {indent(text.rstrip('.'), '    ').strip()}.{default}")
            field.docstring = None
        if fields and cls.docstring:
            cls.docstring.value += "\n\nAttributes:\n" + indent("\n".join(fields), "  ")
