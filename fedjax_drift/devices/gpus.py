"""Descriptions of GPUs, with which XLA can compile programs for a GPU that is not here.

The numbers are from NVIDIA's data sheets and from XLA's own descriptions of these devices.
"""

from __future__ import annotations

import os
from typing import NamedTuple


class Gpu(NamedTuple):
    """One kind of GPU."""

    name: str
    capability: tuple[int, int]  # CUDA's compute capability
    multiprocessors: int
    arithmetic_units: int  # for float32, in each multiprocessor
    shared_memory: int  # bytes in each multiprocessor
    l2: int  # bytes
    gigahertz: float
    bandwidth: float  # bytes per second
    memory: int  # bytes

    def __str__(self) -> str:
        """The description in the text format of XLA's GpuTargetConfigProto."""
        major, minor = self.capability
        return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  core_count: {self.multiprocessors}
  fpus_per_core: {self.arithmetic_units}
  clock_rate_ghz: {self.gigahertz}
  memory_bandwidth: {self.bandwidth:.0f}
  device_memory_size: {self.memory}
  l2_cache_size: {self.l2}
  shared_memory_per_core: {self.shared_memory}
  shared_memory_per_block: {48 * 2**10}
  shared_memory_per_block_optin: {self.shared_memory - 2**10}
  registers_per_core_limit: {2**16}
  registers_per_block_limit: {2**16}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: {2**16 - 1}
  block_dim_limit_z: {2**16 - 1}
}}
platform_name: "CUDA"
runtime_version {{ major: 12 minor: 9 }}
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{self.name}"
"""


GPUS = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 164 * 2**10, 40 * 2**20, 1.41, 2.039e12, 85100068864),
    "a100-40gb": Gpu("NVIDIA A100-SXM4-40GB", (8, 0), 108, 64, 164 * 2**10, 40 * 2**20, 1.41, 1.555e12, 42505273344),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 228 * 2**10, 50 * 2**20, 1.98, 3.352e12, 84978434048),
    "h200": Gpu("NVIDIA H200", (9, 0), 132, 128, 228 * 2**10, 50 * 2**20, 1.98, 4.8e12, 150 * 10**9),
    "b200": Gpu("NVIDIA B200", (10, 0), 148, 128, 228 * 2**10, 132644864, 1.965, 7.672e12, 191514411008),
}
# The memory in bytes of the kinds of GPUs that `described.described_mesh` has described.
MEMORY = {gpu.name: gpu.memory for gpu in GPUS.values()}


def share_of_jax() -> float:
    """The share of a GPU's memory that JAX uses. It is 0.75, unless the user has changed it."""
    names = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
    return float(next((os.environ[name] for name in names if os.environ.get(name)), 0.75))
