"""How docstrings that are written to be read in the source look on a page; a griffe extension."""

import re
from textwrap import indent

import griffe

DOCTEST = re.compile(r"(?:^>>> .*\n?(?:^(?!>>> |\s*$).*\n?)*)+", re.MULTILINE)
BOUND = re.compile(r"^(\s*(?:[\w, ]+: )?)>(?=[ =])", re.MULTILINE)  # "lr: > 0", which Markdown takes for a quotation


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
