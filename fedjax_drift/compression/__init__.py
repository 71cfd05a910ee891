"""Compression: coarse messages, as a value that every algorithm can be combined with.

    compressed = fd.compression.compressed(fd.algorithms.fedavg(), fd.compression.top_k(0.01))

Codecs: `qsgd`, `top_k`, `random_k`, `sign`, `drive`, `cast`, `none`. `compressed` sends the messages of an algorithm
through a codec, with error feedback. `downlink` does it for the model that clients get.
"""

from fedjax_drift.compression.codec import Codec
from fedjax_drift.compression.compressed import compressed
from fedjax_drift.compression.downlink import downlink
from fedjax_drift.compression.quantized import cast, drive, none, qsgd, sign
from fedjax_drift.compression.sparse import random_k, top_k
from fedjax_drift.recipes import recorded as codec

__all__ = ["Codec", "cast", "codec", "compressed", "downlink", "drive", "none", "qsgd", "random_k", "sign", "top_k"]
__dir__ = __all__.copy
