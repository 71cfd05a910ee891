"""Two CPU devices for every test, and shape mistakes made loud: ``[K] * [K, d]`` raises."""

import os
import shutil
import tempfile

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_numpy_rank_promotion", "raise")

# Nearly all of the time is compiling: unoptimised machine code is made in two thirds of it. Only for this process.
# (--xla_cpu_use_fusion_emitters=false takes another third off the suite, but programs as users run them have these
# emitters, and without them sweeps, and states on the host, are not bit for bit what they are elsewhere.)
given = os.environ.get("XLA_FLAGS")
os.environ["XLA_FLAGS"] = f"{given or ''} --xla_backend_optimization_level=0"
jax.devices()
if given is None:
    del os.environ["XLA_FLAGS"]
else:
    os.environ["XLA_FLAGS"] = given

# What one test has compiled the others need not, in this run of the tests alone, also in processes that tests start.
CACHE = "JAX_COMPILATION_CACHE_DIR"
owner = CACHE not in os.environ
if owner:
    os.environ[CACHE] = tempfile.mkdtemp(prefix="compiled-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"
jax.config.update("jax_compilation_cache_dir", os.environ[CACHE])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def pytest_unconfigure() -> None:
    if owner:  # not a process of pytest-xdist
        shutil.rmtree(os.environ[CACHE], ignore_errors=True)
