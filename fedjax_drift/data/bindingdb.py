"""BindingDB as a classification task: whether a ligand binds a protein."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedjax_drift import checks
from fedjax_drift.data import files
from fedjax_drift.data.sources import Request, Samples
from fedjax_drift.spec import Count

FILENAME = "BindingDB_All.tsv"
COLUMNS = (
    ("Ligand SMILES",),
    ("BindingDB Target Chain Sequence", "BindingDB Target Chain Sequence 1"),  # older and newer dumps
    ("Kd (nM)",),
)
BINDS_BELOW = 30.0  # nM
KD = re.compile(r"([<>]?)\s*(\d+\.?\d*(?:[eE][+-]?\d+)?)")
CODES = bytes(byte - 32 if 32 < byte < 127 else 0 for byte in range(256))  # printable ASCII becomes 1..94


def load(request: Request, *, ligand: Count = 100, protein: Count = 1000) -> Samples:
    """BindingDB: whether a ligand binds a protein. 2 classes (1: Kd < 30 nM, our choice), int8 [ligand + protein].

    An example has the first `ligand` characters of the SMILES string and the first `protein` characters of the sequence
    of the first chain. Characters are encoded as 1..94 in ASCII order, and 0 is padding. There is one example per pair.
    A random 20 % of the pairs (`seed`) are test examples. Reading all of `BindingDB_All.tsv` takes a few minutes.
    Lines without a Kd value are skipped. (Liu et al., "BindingDB", Nucleic Acids Research 2007.)
    """
    path = request.path()
    pairs = measurements(path)
    if len(pairs) < 2:
        checks.refuse(f"cannot use {path}: at least 2 pairs must have a Kd", len(pairs), "use the whole file")
    ligands, proteins = zip(*pairs, strict=True)
    x = np.concatenate([encoded(ligands, ligand), encoded(proteins, protein)], 1)
    y = np.array(list(pairs.values()), np.int32)
    tests = np.zeros(len(y), bool)
    tests[np.random.default_rng(request.seed).permutation(len(y))[: max(1, round(0.2 * len(y)))]] = True
    return Samples((x[~tests], y[~tests]), (x[tests], y[tests]))


def measurements(path: Path) -> dict[tuple[str, str], bool]:
    """A dict (SMILES, protein sequence) -> whether Kd < 30 nM. The first conclusive measurement of a pair is used.

    Lines without a SMILES string, a sequence or a Kd value are skipped. Lines with an inconclusive bound such as "<100"
    are skipped, too.
    """
    binds_of: dict[tuple[str, str], bool] = {}
    with files.opened_text(path, "latin-1") as file:
        header = file.readline().rstrip("\r\n").split("\t")
        places = [next((header.index(name) for name in names if name in header), None) for names in COLUMNS]
        columns = [place for place in places if place is not None]
        if len(columns) < len(COLUMNS):
            wanted = f"a header with {', '.join(names[0] for names in COLUMNS)}"
            files.wrong_line(1, wanted, "\t".join(header))
        for number, line in enumerate(file, 2):
            fields = line.rstrip("\r\n").split("\t", max(columns) + 1)
            if not line.endswith("\n"):
                files.wrong_line(number, "a complete line with a line end", line)
            if len(fields) <= max(columns):
                files.wrong_line(number, f"at least {max(columns) + 1} values, like the header", line)
            smiles, protein, kd = (fields[column].strip() for column in columns)
            if not (smiles and protein and kd):
                continue
            match = KD.fullmatch(kd)
            if match is None or math.isinf(float(match[2])):
                files.wrong_line(number, 'a Kd such as 12.5, ">10000" or none', kd)
            if (binds := binding(match[1], float(match[2]))) is not None:
                binds_of.setdefault((smiles, protein.replace(" ", "").upper()), binds)
    return binds_of


def binding(bound: str, kd: float) -> bool | None:
    """Whether Kd < 30 nM, given a value or a bound ("<" or ">"). None if the bound is inconclusive.

    >>> binding("", 29.9), binding(">", 10000.0), binding("<", 30.0), binding("<", 100.0)
    (True, False, True, None)
    """
    if bound == "<":
        return True if kd <= BINDS_BELOW else None
    if bound == ">":
        return False if kd >= BINDS_BELOW else None
    return kd < BINDS_BELOW


def encoded(texts: Sequence[str], length: int) -> np.ndarray:
    """int8 [M, length]: the first characters of each text, as 1..94 (printable ASCII without space); 0 is padding."""
    cut = b"".join(text[:length].encode("ascii", "replace").ljust(length, b"\0") for text in texts)
    return np.frombuffer(cut.translate(CODES), np.int8).reshape(len(texts), length)
