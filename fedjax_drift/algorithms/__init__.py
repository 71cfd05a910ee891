"""The algorithms: one file per algorithm, and `ALGORITHMS`, a dict from name to factory.

The docstring of each file contains the equations of the algorithm. The number at the end of an equation, such as (2),
is repeated in a comment at the line of code that implements it. The docstring then lists the deviations from the paper.

The files import `local`, `tree`, `leaves`, `factors`, `types`, `model`, `checks`, `errors` and each other.
"""

from collections.abc import Callable

from fedjax_drift.algorithms.adabest import adabest
from fedjax_drift.algorithms.agnostic import agnostic
from fedjax_drift.algorithms.apfl import apfl
from fedjax_drift.algorithms.constrained import constrained
from fedjax_drift.algorithms.ditto import ditto
from fedjax_drift.algorithms.exact_lora import fedex_lora, flora
from fedjax_drift.algorithms.fedacg import fedacg
from fedjax_drift.algorithms.fedadamw import fedadamw
from fedjax_drift.algorithms.fedadc import fedadc
from fedjax_drift.algorithms.fedau import fedau
from fedjax_drift.algorithms.fedavg import fedavg
from fedjax_drift.algorithms.fedavgm import fedavgm
from fedjax_drift.algorithms.fedcm import fedcm
from fedjax_drift.algorithms.feddc import feddc
from fedjax_drift.algorithms.feddecorr import feddecorr
from fedjax_drift.algorithms.feddf import feddf
from fedjax_drift.algorithms.feddyn import feddyn
from fedjax_drift.algorithms.fedeve import fedeve
from fedjax_drift.algorithms.fedexp import fedexp
from fedjax_drift.algorithms.fedgamma import fedgamma
from fedjax_drift.algorithms.fedgm import fedgm
from fedjax_drift.algorithms.fedgmt import fedgmt
from fedjax_drift.algorithms.fedgvr import fedgvr
from fedjax_drift.algorithms.fedgvrgm import fedgvrgm
from fedjax_drift.algorithms.fedlc import fedlc
from fedjax_drift.algorithms.fedlesam import fedlesam
from fedjax_drift.algorithms.fednova import fednova
from fedjax_drift.algorithms.fedntd import fedntd
from fedjax_drift.algorithms.fedopt import fedadagrad, fedadam, fedyogi
from fedjax_drift.algorithms.fedper import fedbabu, fedbn, fedper, fedrep, fedsa_lora, lg_fedavg
from fedjax_drift.algorithms.fedproto import fedproto
from fedjax_drift.algorithms.fedprox import fedprox
from fedjax_drift.algorithms.fedreg import fedreg
from fedjax_drift.algorithms.fedsam import fedsam, mofedsam
from fedjax_drift.algorithms.fedsmoo import fedsmoo
from fedjax_drift.algorithms.fedsol import fedsol
from fedjax_drift.algorithms.fedspeed import fedspeed
from fedjax_drift.algorithms.fedswa import fedmoswa, fedswa
from fedjax_drift.algorithms.fedvarp import fedvarp
from fedjax_drift.algorithms.flexlora import flexlora
from fedjax_drift.algorithms.ghbm import fedhbm, ghbm, localghbm
from fedjax_drift.algorithms.ifca import hypcluster, ifca
from fedjax_drift.algorithms.lfd import lfd
from fedjax_drift.algorithms.mifa import mifa
from fedjax_drift.algorithms.mime import mime, mimelite
from fedjax_drift.algorithms.moon import moon
from fedjax_drift.algorithms.partly_shared import partly_shared
from fedjax_drift.algorithms.perfedavg import perfedavg
from fedjax_drift.algorithms.pfedme import pfedme
from fedjax_drift.algorithms.qfedavg import qfedavg
from fedjax_drift.algorithms.rolora import rolora
from fedjax_drift.algorithms.scaffold import scaffold
from fedjax_drift.algorithms.slowmo import slowmo
from fedjax_drift.algorithms.vrl_sgd import vrl_sgd
from fedjax_drift.types import Algorithm

__all__ = [  # a literal list, because type checkers read it
    "ALGORITHMS",
    "fedavg", "fedprox", "fedavgm", "fedadam", "fedyogi", "fedadagrad", "slowmo", "fedadc",
    "scaffold", "vrl_sgd", "feddyn", "feddc", "fedeve", "fedgvr", "fedgm", "fedgvrgm",
    "moon", "lfd", "fedreg", "constrained",
    "fednova", "fedcm", "fedsam", "mofedsam", "fedacg", "fedntd", "fedlc", "fedexp",
    "fedspeed", "fedsmoo", "fedlesam", "fedadamw",
    "feddecorr", "fedgamma", "mime", "mimelite", "adabest", "fedswa", "fedmoswa",
    "ghbm", "localghbm", "fedhbm", "fedgmt", "fedsol", "qfedavg", "agnostic",
    "fedvarp", "mifa", "fedau", "feddf",
    "ditto", "pfedme", "apfl", "perfedavg", "ifca", "hypcluster", "fedproto",
    "partly_shared", "fedper", "fedrep", "fedbabu", "lg_fedavg", "fedbn",
    "rolora", "fedsa_lora", "fedex_lora", "flora", "flexlora",
]  # fmt: skip
__dir__ = __all__.copy

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {name: globals()[name] for name in __all__[1:]}
