"""Data: `FederatedData` (federated.py), partitioners (partition.py), and data sets to load (datasets.py).

These modules only import `checks`, `errors` and each other. The readers of other libraries' data are also names of this
package: `fd.data.from_huggingface` is `fd.datasets.from_huggingface`.
"""

from fedjax_drift.data.federated_files import from_fedjax, from_leaf, from_tff
from fedjax_drift.data.flower import from_flwr
from fedjax_drift.data.frames import from_pandas
from fedjax_drift.data.huggingface import from_huggingface
from fedjax_drift.data.pairs import from_torch

__all__ = ["from_fedjax", "from_flwr", "from_huggingface", "from_leaf", "from_pandas", "from_tff", "from_torch"]


def __dir__() -> list[str]:
    return list(__all__)
