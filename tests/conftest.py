"""Gives every test two CPU devices. Implicit rank promotion, such as ``[K] * [K, d]``, raises an error."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import jax
import pytest

sys.path.append(str(Path(__file__).parents[1]))  # for experiments/; appended, so that an installed library comes first

signal.signal(signal.SIGINT, signal.default_int_handler)  # a script starts its background jobs with SIGINT ignored

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_numpy_rank_promotion", "raise")

# Most of the time of the tests is compilation. These flags reduce it to less than half. The first two are also set in
# the processes that tests start. Without fusion emitters, some results differ in their last bits from those of users'
# programs, so tests that compare bits run in processes with the emitters. A process that sets a flag which its version
# of XLA does not have is aborted, so each flag is first tried in a child process.
AS_USERS, QUICK = "FEDJAX_DRIFT_TESTS_AS_USERS", "FEDJAX_DRIFT_TESTS_XLA_FLAGS"
FOR_CHILDREN = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
EMITTERS = "--xla_cpu_use_fusion_emitters=false"


def known_to_xla(flag: str) -> bool:
    """Whether this version of XLA has the flag."""
    program = "import jax; jax.config.update('jax_platforms', 'cpu'); jax.devices()"
    env = os.environ | {"XLA_FLAGS": flag}
    return subprocess.run([sys.executable, "-c", program], env=env, capture_output=True).returncode == 0


if QUICK not in os.environ:  # the processes of pytest-xdist inherit it
    os.environ[QUICK] = " ".join(filter(known_to_xla, [*FOR_CHILDREN, EMITTERS]))
known = os.environ[QUICK].split()
for_children = " ".join([os.environ.get("XLA_FLAGS", ""), *(flag for flag in known if flag != EMITTERS)])
here = [EMITTERS] if EMITTERS in known and AS_USERS not in os.environ else []
os.environ["XLA_FLAGS"] = " ".join([for_children, *here])
jax.devices()
os.environ["XLA_FLAGS"] = for_children

# Tests, and the processes that they start, share compiled programs in a temporary cache.
CACHE = "JAX_COMPILATION_CACHE_DIR"
owner = CACHE not in os.environ
if owner:
    os.environ[CACHE] = tempfile.mkdtemp(prefix="compiled-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"
jax.config.update("jax_compilation_cache_dir", os.environ[CACHE])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
PART = os.environ.get("FEDJAX_DRIFT_TESTS_PART")  # "2/6": of the thorough tests, only part 2 of the parts 0..5 is run
ended = itertools.count(1)  # numbers the tests in the order in which they end
MAPS = Path("/proc/self/maps")


def pytest_collection_modifyitems(config, items) -> None:
    """Leaves out all thorough tests but those of one part if `PART` is given."""
    if PART is None:
        return
    part, parts = map(int, PART.split("/"))
    if not 0 <= part < parts:
        raise pytest.UsageError(f"FEDJAX_DRIFT_TESTS_PART must be one of 0/{parts} to {parts - 1}/{parts}, got {PART}")
    thorough = [item for item in items if item.get_closest_marker("thorough")]
    left_out = {item for item in thorough if zlib.crc32(item.nodeid.encode()) % parts != part}
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem) -> bool | None:
    """Runs a test with the marker as_users in a new process, whose programs are compiled as those of users.

    Such tests compare bits of sweeps, or of states on the host. No new process is needed if this version of XLA does
    not have the flag EMITTERS.
    """
    has_emitters = AS_USERS in os.environ or EMITTERS not in known
    if pyfuncitem.get_closest_marker("as_users") is None or has_emitters:
        return None
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "", pyfuncitem.nodeid]
    env, root = os.environ | {AS_USERS: "1"}, pyfuncitem.config.rootpath
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    return True


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Forgets the compiled programs when the process has many memory maps.

    Linux allows a process 65,530 memory maps, and a compiled program has several. Without this, all tests together come
    near this limit. The maps are counted after every tenth test. Where they cannot be counted, the programs are
    forgotten after every two hundredth test.
    """
    number = next(ended)
    if number % 200 == 0 if not MAPS.exists() else number % 10 == 0 and MAPS.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()


def pytest_unconfigure() -> None:
    if owner:  # the processes of pytest-xdist do not own the folder
        shutil.rmtree(os.environ[CACHE], ignore_errors=True)
