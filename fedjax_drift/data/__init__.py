"""Data: the clients of a federation and their examples, how examples are assigned to clients, and where they come from.

These modules only import `checks`, `errors`, `disk`, `reprs` and each other. In the order in which to read them:

- federated.py: `FederatedData`. joining.py checks the arrays that it gets, and joins those of the clients. decoding.py:
  what reaches the model.
- partition.py: the partitioners, made of the steps in assignment.py. redeal.py: redistribution in every round.
- datasets.py: `load`. catalogue.py: the record of every data set. sources.py: what a record, a loader and its result
  are. downloading.py: downloads.
- Loaders: synthetic.py, glyphs.py, dialogue.py, images.py, femnist.py, movielens.py, agnews.py, bindingdb.py. They read
  files with files.py, image_files.py and tfds.py.
- Other libraries' data: tables.py makes federations of what huggingface.py, flower.py, frames.py and pairs.py read.
- Other libraries' files: federated_files.py (LEAF, FedJAX), tff_files.py (TensorFlow Federated) and benchmark_files.py
  (PFLlib, FL-bench, NIID-Bench). pickles.py reads pickles without executing code.
- augment.py: random changes of images. reading.py: the rows of many clients, also from memory-mapped files.

The readers of other libraries' data are also names of this package: `fd.data.from_huggingface` is
`fd.datasets.from_huggingface`.
"""

from fedjax_drift.data.benchmark_files import from_fl_bench, from_niid_bench, from_pfllib
from fedjax_drift.data.federated_files import from_fedjax, from_leaf
from fedjax_drift.data.flower import from_flwr
from fedjax_drift.data.frames import from_pandas
from fedjax_drift.data.huggingface import from_huggingface
from fedjax_drift.data.pairs import from_torch
from fedjax_drift.data.tff_files import from_tff

__all__ = [
    "from_fedjax",
    "from_fl_bench",
    "from_flwr",
    "from_huggingface",
    "from_leaf",
    "from_niid_bench",
    "from_pandas",
    "from_pfllib",
    "from_tff",
    "from_torch",
]
__dir__ = __all__.copy
