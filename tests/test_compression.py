"""Tests of codecs, of compressed algorithms, and of the bytes that a round sends."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import hadamard
from small import random_clients, rounds, thorough

import fedjax_drift as fd
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.message import summed
from fedjax_drift.round.traffic import exchanged
from fedjax_drift.testing import check_contract

c, a = fd.compression, fd.algorithms
CODECS = {
    "none": c.none(), "cast": c.cast("bfloat16"), "qsgd": c.qsgd(4), "top_k": c.top_k(0.1), "random_k": c.random_k(0.1),
    "unbiased random_k": c.random_k(0.3, scale=True), "sign": c.sign(), "signSGD": c.sign("none"), "drive": c.drive(),
}  # fmt: skip
UNBIASED = ("none", "qsgd", "unbiased random_k")


def sent(codec: c.Codec, x: np.ndarray, key: int = 0) -> tuple[np.ndarray, float]:
    decoded, bits = jax.jit(codec.send)(jax.random.key(key), jnp.asarray(x))
    return np.asarray(decoded), float(bits)


def array(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype("f4")


# --- codecs: the bits that an encoder writes, and what a decoder reads from them --------------------------------------


def to_bits(values: np.ndarray, width: int) -> str:
    return "".join(format(int(v), f"0{width}b") for v in values) if width else ""


def float_bits(values: np.ndarray) -> str:
    return to_bits(np.asarray(values, "f4").reshape(-1).view("u4"), 32)


def read_floats(bits: str) -> np.ndarray:
    return np.array([int(bits[i : i + 32], 2) for i in range(0, len(bits), 32)], "u4").view("f4")


def encode_sparse(decoded: np.ndarray, k: int) -> str:
    d, width = decoded.size, math.ceil(math.log2(decoded.size))
    places = np.sort(np.argsort(-np.abs(decoded.ravel()), kind="stable")[:k])
    indices, bitmap = to_bits(places, width), to_bits(np.isin(np.arange(d), places), 1)
    return float_bits(decoded.ravel()[places]) + min(bitmap, indices, key=len)


def decode_sparse(bits: str, d: int, k: int) -> np.ndarray:
    width, values, places = math.ceil(math.log2(d)), read_floats(bits[: 32 * k]), bits[32 * k :]
    if len(places) == d:
        index = [j for j in range(d) if places[j] == "1"]
    else:
        index = [int(places[width * j : width * (j + 1)], 2) for j in range(k)]
    x = np.zeros(d, "f4")
    x[index] = values
    return x


@pytest.mark.parametrize("shape", [(7, 13), (64,), (5,)])
@pytest.mark.parametrize("fraction", [0.02, 0.1, 0.5, 1.0])
def test_sparse_messages_have_the_bits_of_an_encoder(shape, fraction) -> None:
    x = array(*shape)
    k = math.ceil(round(fraction * x.size, 9))
    for codec in (c.top_k(fraction), c.random_k(fraction)):
        decoded, bits = sent(codec, x)
        written = encode_sparse(decoded, k)
        assert len(written) == bits and (decoded != 0).sum() == k
        np.testing.assert_array_equal(decode_sparse(written, x.size, k).reshape(shape), decoded)
    largest = np.sort(np.abs(x.ravel()))[-k:]
    np.testing.assert_array_equal(np.sort(np.abs(sent(c.top_k(fraction), x)[0][np.abs(x) >= largest[0]])), largest)


def test_of_equal_magnitudes_the_first_are_sent() -> None:
    decoded, _ = sent(c.top_k(0.5), np.float32([1, -2, 2, 1, -1, 0]))
    np.testing.assert_array_equal(decoded, [1, -2, 2, 0, 0, 0])


@pytest.mark.parametrize("d", [1, 10, 30, 1000, 3000, 44_426])
def test_the_fraction_is_exact_in_a_compiled_round(d) -> None:
    """There the fraction is a float32 number: 0.001 * 3000 is more than 3."""
    for fraction in (0.001, 0.01, 0.1, 0.3, 0.7, 1.0):
        _, bits = jax.jit(lambda f: c.top_k(f).send(jax.random.key(0), jnp.ones(d)))(fraction)
        k = math.ceil(round(fraction * d, 9))
        assert bits == 32 * k + min(k * math.ceil(math.log2(d)), d)


@pytest.mark.parametrize("levels", [1, 4, 7, 255])
def test_qsgd_has_the_bits_of_an_encoder(levels) -> None:
    x, width = array(9, 5), math.ceil(math.log2(levels + 1))
    decoded, bits = sent(c.qsgd(levels), x)
    norm = np.sqrt((x * x).sum())
    level = np.rint(np.abs(decoded) * levels / norm)
    written = float_bits(norm) + to_bits(x.ravel() < 0, 1) + to_bits(level.ravel(), width)
    assert len(written) == bits and level.max() <= levels
    signs = np.where([bit == "1" for bit in written[32 : 32 + x.size]], -1, 1)
    read = [int(written[32 + x.size + width * j :][:width], 2) for j in range(x.size)]
    np.testing.assert_allclose(read_floats(written[:32]) * signs * read / levels, decoded.ravel(), rtol=1e-6)
    assert (np.abs(level - np.abs(x) * levels / norm) < 1 + 1e-5).all()


def test_signs_casts_and_drive_have_the_bits_of_an_encoder() -> None:
    x = array(9, 5)
    scale = np.abs(x).mean()
    for codec, expected, bits in (
        (c.sign(), np.where(x >= 0, scale, -scale), 32 + x.size),
        (c.sign("none"), np.where(x >= 0, 1, -1), x.size),
        (c.cast("float16"), x.astype("f2").astype("f4"), 16 * x.size),
        (c.none(), x, 32 * x.size),
    ):
        decoded, found = sent(codec, x)
        assert found == bits
        np.testing.assert_allclose(decoded, expected, rtol=1e-6)
    diagonal = np.asarray(jax.random.rademacher(jax.random.key(0), (64,), jnp.float32))  # 45 values are padded to 64
    rotation = hadamard(64) @ np.diag(diagonal) / 8
    rotated = rotation[:, :45] @ x.ravel()
    expected = (x * x).sum() / np.abs(rotated).sum() * (rotation.T @ np.where(rotated >= 0, 1, -1))[:45]
    decoded, bits = sent(c.drive(), x)
    assert bits == 32 + 64
    np.testing.assert_allclose(decoded.ravel(), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose((decoded * x).sum(), (x * x).sum(), rtol=1e-5)


@pytest.mark.parametrize("name", CODECS)
def test_zeros_single_values_and_other_dtypes(name) -> None:
    for x in (
        np.zeros(5, "f4"),
        np.float32([-3.0]),
        np.float32(2.0),
        np.zeros((3, 1), "f2"),
        jnp.ones(4, jnp.bfloat16),
    ):
        decoded, bits = sent(CODECS[name], x)
        assert decoded.shape == np.shape(x) and decoded.dtype == x.dtype and bits > 0 and np.isfinite(decoded).all()
    if name not in ("signSGD", "unbiased random_k"):
        assert not sent(CODECS[name], np.zeros(5, "f4"))[0].any()
        np.testing.assert_allclose(sent(CODECS[name], np.float32([-3.0]))[0], [-3.0], rtol=1e-6)


@pytest.mark.parametrize("name", UNBIASED)
def test_unbiased_codecs(name) -> None:
    x, draws = jnp.asarray(array(40)), 10_000
    decoded = np.asarray(
        jax.jit(jax.vmap(lambda key: CODECS[name].send(key, x)[0]))(jax.random.split(jax.random.key(0), draws))
    )
    error = decoded.std(0, dtype=float) / draws**0.5
    assert (np.abs(decoded.mean(0, dtype=float) - x) <= 4 * error + 1e-6).all()


def test_the_mean_of_drive_is_near_its_argument() -> None:
    x = jnp.asarray(array(64))
    decoded = jax.jit(jax.vmap(lambda key: c.drive().send(key, x)[0]))(jax.random.split(jax.random.key(0), 10_000))
    assert np.linalg.norm(decoded.mean(0) - x) < 0.05 * np.linalg.norm(x)


# --- compressed algorithms --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data() -> fd.FederatedData:
    rows = random_clients([3, 10, 7, 5, 1, 6], 6, 3, seed=1)
    return fd.FederatedData.from_clients(rows, test=rows[1])


LINEAR = fd.models.linear((6,), num_classes=3)


def simulate(data, algorithm, **options) -> fd.Simulation:
    local, one_device = fd.LocalTraining(epochs=2, batch_size=4, lr=0.1), fd.clients_mesh(jax.devices()[:1])
    return fd.Simulation(LINEAR, data, algorithm, **{"local": local, "cohort_size": 3, "mesh": one_device} | options)


@pytest.mark.parametrize("make", [a.fedavg, *map(thorough, (a.scaffold, a.fednova, a.fedeve, a.vrl_sgd))])
def test_whole_messages_give_the_same_bits(make, data) -> None:
    """In SCAFFOLD, XLA fuses other operations, so the last bit may differ."""
    equal = (
        partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
        if make is a.scaffold
        else np.testing.assert_array_equal
    )
    base, _ = rounds(simulate(data, make()), 3)
    for codec, feedback in ((c.none(), True), (c.top_k(1.0), True), (c.random_k(1.0, scale=True), False)):
        state, infos = rounds(simulate(data, c.compressed(make(), codec, error_feedback=feedback)), 3)
        jax.tree.map(equal, state.server, base.server)
        jax.tree.map(equal, state.clients.base if feedback else state.clients, base.clients)
        assert not any(info["compression_error"].any() for info in infos)


@pytest.mark.parametrize("name", CODECS)
def test_what_was_sent_and_the_residual_add_up_to_the_messages(name) -> None:
    def update(server, client, work) -> fd.ClientResult:
        keys = jax.random.split(work.key)
        message = {"w": jax.random.normal(keys[0], (6, 5)), "n": (jax.random.normal(keys[1]), jnp.int32(3))}
        return fd.ClientResult(message, 1.0, client, {})

    base = a.fedavg()._replace(client_update=update)
    algorithm, server = c.compressed(base, CODECS[name]), SimpleNamespace(params=None)
    n = 5 if name == "unbiased random_k" else 20  # its residual grows without a bound

    @jax.jit
    def sent_after(keys: jax.Array) -> tuple:
        messages = jax.vmap(lambda key: update(None, (), SimpleNamespace(key=key)).message)(keys)
        zeros = jax.tree.map(lambda leaf: jnp.zeros_like(leaf[0]), messages)

        def one(state, key):
            result = algorithm.client_update(server, state, SimpleNamespace(key=key))
            return result.state, summed(result.message)

        state, parts = jax.lax.scan(one, algorithm.complete(algorithm.init_client(None), zeros), keys)
        return [jax.tree.map(lambda a: a.sum(0), each) for each in (parts, messages)], state.residual

    (total, expected), residual = sent_after(jax.random.split(jax.random.key(0), n))
    assert int(total["n"][1]) == 3 * n  # integers are sent as they are
    for leaf, left, whole in zip(*map(jax.tree.leaves, (total, residual, expected)), strict=True):
        np.testing.assert_allclose(leaf + left, whole, atol=1e-4 if "random" in name else 1e-5)


def test_error_feedback_converges_on_quadratics_and_without_it_does_not() -> None:
    """F_i(w) = |w - a_i|^2 / 2 in ten dimensions; one of ten values is sent."""
    targets = np.random.default_rng(0).normal(size=(4, 10)).astype("f4") * 3
    data = fd.FederatedData.from_clients([(target[None], np.zeros(1, np.int32)) for target in targets])
    model = fd.Model(lambda key: jnp.zeros(10), lambda w, x: w[None] - x, loss=lambda z, y: (z * z).sum(-1) / 2)
    distance = {}
    for feedback in (True, False):
        algorithm = c.compressed(a.fedavg(), c.top_k(0.1), error_feedback=feedback)
        sim = fd.Simulation(model, data, algorithm, local=fd.LocalTraining(lr=0.02), cohort_size=4)
        state, _ = sim.run(sim.init(jax.random.key(0)), 1500, progress=False)
        distance[feedback] = float(np.abs(np.asarray(state.params) - targets.mean(0)).max())
    assert distance[True] < 0.2 < 1 < distance[False], distance


@pytest.mark.thorough
def test_parts_of_a_message_that_are_not_parameters_are_sent_as_they_are(data) -> None:
    for parts in ("all", "params"):
        _, (info,) = rounds(simulate(data, c.compressed(a.fednova(), c.sign(), parts=parts)), 1)
        message = 32 + 18 + 32 + 3  # the kernel and the bias, each with a scale
        rest = 32 + 1 if parts == "all" else 32  # the number of steps
        assert (info["uplink_bytes"] == (message + rest) / 8).all()


def test_a_compressed_algorithm_keeps_the_contract() -> None:
    check_contract(c.compressed(a.scaffold(0.7), c.top_k(0.5)))


@pytest.mark.parametrize(
    "algorithm",
    [
        thorough(c.compressed(a.feddc(0.1), c.top_k(0.3))),
        thorough(c.compressed(a.vrl_sgd(), c.qsgd(7), error_feedback=False)),
        a.partly_shared(c.compressed(a.fedavg(), c.sign()), "bias", new_clients="mean"),
        thorough(c.compressed(c.compressed(a.ditto(), c.top_k(0.5)), c.qsgd(15))),
    ],
    ids=lambda algorithm: algorithm.name,
)
def test_compression_with_every_placement(algorithm, data, tmp_path) -> None:
    expected, _ = rounds(simulate(data, algorithm), 3)
    for i, options in enumerate((
        {"bank": "host"}, {"bank": tmp_path / "folder"}, {"bank": "sharded"}, {"stream": True, "lanes": 2},
    )):  # fmt: skip
        state, _ = rounds(simulate(data, algorithm, mesh=fd.clients_mesh(), **options), 3)
        for one, other in zip(*map(jax.tree.leaves, (state.server, expected.server)), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6, err_msg=str(i))


def test_an_algorithm_is_compressed_before_jax_has_started() -> None:
    """`use_cpu_devices` must come before JAX's devices are used."""
    program = (
        "import fedjax_drift as fd; fd.compression.compressed(fd.algorithms.fedavg(), fd.compression.top_k(0.1)); "
        "fd.use_cpu_devices(2); import jax; print(jax.device_count())"
    )
    environment = {
        name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    }
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "2"


def test_the_command_line() -> None:
    words = "--dataset synthetic:num_clients=3 --algorithm fedavg --algorithm scaffold --cohort 2 --compress top_k:0.5"
    for feedback in ("", " --error-feedback no"):
        run = fd.parse_run(words + feedback)
        assert [sim.algorithm.name for sim in run.simulations.values()] == ["fedavg+top_k", "scaffold+top_k"]
        assert all((sim.algorithm.complete is None) == bool(feedback) for sim in run.simulations.values())
    with pytest.raises(ConfigurationError, match=r"fraction must be in \(0, 1\]"):
        fd.parse_run(words.replace("0.5", "2"))


def test_invalid_codecs() -> None:
    for wrong, message in (
        (lambda: c.compressed(a.fedavg(), c.Codec(lambda key, x: x)), r"must return \(decoded, bits\)"),
        (lambda: c.compressed(a.fedavg(), c.Codec(lambda key, x: (x[:1], 1))), "the shape of what is sent"),
        (lambda: c.compressed(a.fedavg(), c.Codec(lambda key, x: (x, x))), "bits of codec must be a scalar"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            wrong()


def test_the_sign_of_zero_is_positive() -> None:
    for codec, expected in ((c.sign(), [1.0, 1.0, -1.0, 1.0]), (c.sign("none"), [1.0, 1.0, -1.0, 1.0])):
        decoded, _ = codec.send(jax.random.key(0), jnp.array([0.0, 2.0, -2.0, 0.0]))
        np.testing.assert_array_equal(decoded, expected)


# --- bytes ------------------------------------------------------------------------------------------------------------

MODEL = 4 * (6 * 3 + 3)  # bytes of the linear model
BIAS = 4 * 3


@pytest.mark.parametrize(
    ("make", "up", "down"),
    [
        (a.fedavg, MODEL, MODEL),
        (a.fedavgm, MODEL, MODEL),
        (a.scaffold, 2 * MODEL, 2 * MODEL),  # the update and the change of c_i; w and c
        (lambda: a.feddc(0.1), 2 * MODEL, 2 * MODEL),
        (a.fedeve, 2 * MODEL + 8, MODEL),  # n_i Delta_i, Delta_i, n_i and the squared norm; w_hat
        (a.fednova, MODEL + 4, MODEL),  # the update and the number of steps
        (a.ditto, MODEL, MODEL),
        (lambda: a.partly_shared(personal="bias"), MODEL - BIAS, MODEL - BIAS),
    ],
)
def test_bytes_by_hand(make, up, down, data) -> None:
    setup = simulate(data, make()).setup
    assert exchanged(setup.engine, setup.state.server) == (up, down)


def test_a_history_has_the_bytes_of_all_clients(data) -> None:
    sim = simulate(data, a.scaffold(), dropout=0.3)
    _, history = sim.run(sim.init(jax.random.key(0)), 3, progress=False)
    up = down = 2 * MODEL
    reported = [record["clients"] for record in history]
    assert [record["uplink_bytes"] for record in history] == [up * n for n in reported] and min(reported) < 3
    assert [record["downlink_bytes"] for record in history] == [3 * down] * 3  # those that drop out have received it


def test_curves_over_megabytes() -> None:
    def history(models: int) -> list[dict]:
        sent = {"uplink_bytes": 3 * models * MODEL, "downlink_bytes": 3 * models * MODEL}
        return [{"round": t, "accuracy": 0.5, "train_loss": 1.0} | sent for t in range(1, 5)]

    histories = {"fedavg": [history(1)] * 2, "scaffold": [history(2)] * 2}
    _, axes = fd.plots.curves(histories, x="megabytes").axes
    for line, models in zip(axes.lines, (1, 2), strict=True):  # three clients, both ways
        np.testing.assert_allclose(line.get_xdata(), np.arange(1, 5) * 6 * models * MODEL / 1e6)
    assert axes.get_xlabel().startswith("Megabytes sent and received")
    with pytest.raises(ConfigurationError, match="uplink_bytes and downlink_bytes in every round"):
        fd.plots.curves([{"round": 1, "accuracy": 0.5, "train_loss": 1.0}], x="megabytes")


def test_only_the_trained_parameters_of_lora_are_sent(data) -> None:
    model = fd.models.lora(LINEAR, 2, "kernel", whole="bias")
    sim = fd.Simulation(model, data, a.fedavg(), cohort_size=3)
    _, info = sim.round_fn(sim.init(jax.random.key(0)))
    trained = 4 * (2 * (6 + 3) + 3)
    assert (info["uplink_bytes"] == trained).all() and info["downlink_bytes"] == trained
