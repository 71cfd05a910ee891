"""Two CPU devices for every test, and shape mistakes made loud: ``[K] * [K, d]`` raises."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import pytest

sys.path.append(str(Path(__file__).parents[1]))  # of experiments/; the last, so that an installed library is tested

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_numpy_rank_promotion", "raise")

# Nearly all of the time is compiling: unoptimised machine code is made in two thirds of it, here and in processes that
# tests start, and without XLA's fusion emitters in half of it. That is for this process alone: tests of bits have one
# with the emitters, as programs of users do. XLA ends a process that sets a flag which its version does not know, so
# each is tried in a child process first.
AS_USERS, QUICK = "FEDJAX_DRIFT_TESTS_AS_USERS", "FEDJAX_DRIFT_TESTS_XLA_FLAGS"
UNOPTIMISED, EMITTERS = "--xla_backend_optimization_level=0", "--xla_cpu_use_fusion_emitters=false"


def known_to_xla(flag: str) -> bool:
    """Whether a process with this flag starts."""
    program = "import jax; jax.config.update('jax_platforms', 'cpu'); jax.devices()"
    env = os.environ | {"XLA_FLAGS": flag}
    return subprocess.run([sys.executable, "-c", program], env=env, capture_output=True).returncode == 0


if QUICK not in os.environ:  # asked once for all processes of pytest-xdist
    os.environ[QUICK] = " ".join(filter(known_to_xla, [UNOPTIMISED, EMITTERS]))
known = os.environ[QUICK].split()
for_children = " ".join([os.environ.get("XLA_FLAGS", ""), *(flag for flag in known if flag != EMITTERS)])
here = [EMITTERS] if EMITTERS in known and AS_USERS not in os.environ else []
os.environ["XLA_FLAGS"] = " ".join([for_children, *here])
jax.devices()
os.environ["XLA_FLAGS"] = for_children

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


def pytest_configure(config) -> None:
    config.addinivalue_line("markers", "as_users: in a process whose programs have XLA's fusion emitters")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem) -> bool | None:
    """A test that is to run as_users: in a process of its own, without which sweeps, and states on the host, are not
    bit for bit what they are elsewhere. Where XLA has emitters whatever one says, this process will do."""
    has_emitters = AS_USERS in os.environ or EMITTERS not in known
    if pyfuncitem.get_closest_marker("as_users") is None or has_emitters:
        return None
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", pyfuncitem.nodeid]
    env, root = os.environ | {AS_USERS: "1"}, pyfuncitem.config.rootpath
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    return True


def pytest_unconfigure() -> None:
    if owner:  # not a process of pytest-xdist
        shutil.rmtree(os.environ[CACHE], ignore_errors=True)
