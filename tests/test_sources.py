"""Sources of drift: those of one's own, against calculations by hand; and all pairs of the library's."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import assert_close, assert_equal, forgetting, models_of, quadratics, thorough

import fedjax_drift as fd
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.measures import measure
from fedjax_drift.round.sources import Moment, Received, Source, Start
from fedjax_drift.storage.identity import differences
from fedjax_drift.testing import _data

TARGETS, SIZES = [2.0, 8.0, -4.0, 6.0], [1, 3, 2, 2]


@fd.sources.rule
def flipping(factor: float) -> Source:
    """Client 0 sends its message times -factor."""

    def send(state: Any, message: Any, weight: jax.Array, client: Any, moment: Moment) -> tuple[Any, jax.Array]:
        return jax.tree.map(lambda m: jnp.where(client.id == 0, -factor * m, m), message), weight

    return Source("flipping", send=send)


@fd.sources.rule
def drifting(step: float) -> Source:
    """The server receives a sum to which a growing number is added, and clients weigh 1."""

    def combine(state: jax.Array, received: Received, moment: Moment) -> tuple[Received, jax.Array]:
        total = jax.tree.map(lambda s: s + received.weight * state, received.total)
        return received._replace(total=total), state + step

    def weigh(weight: jax.Array, client: Any) -> jax.Array:
        return jnp.ones_like(weight)

    return Source("drifting", init=lambda moment: jnp.zeros(()), weigh=weigh, combine=combine)


@fd.sources.rule
def offset(by: float) -> Source:
    """A client starts with the model plus ``by``, and its inputs are larger by ``by``, too."""

    def receive(state: Any, start: Start, client: Any, moment: Moment) -> Start:
        return start._replace(server=start.server._replace(params=start.server.params + by))

    return Source("offset", receive=receive, example=lambda key, t, client, x, y: (x.at[0].add(by), y))


def simulation(*sources: Source, **options: Any) -> fd.Simulation:
    data, model = options.pop("data", None) or quadratics(TARGETS, SIZES)
    local = fd.LocalTraining(epochs=1, batch_size=10, lr=0.5)
    options = {"mesh": fd.clients_mesh(jax.devices()[:1]), "cohort_size": 4} | options
    return fd.Simulation(model, data, fd.algorithms.fedavg(), local=local, sources=[*sources], **options)


def test_a_client_that_forgets_by_hand() -> None:
    """All clients are selected in every round, so all forget every third one."""
    half = lambda w: w + 0.5 * (np.average(TARGETS, weights=SIZES) - w)  # noqa: E731
    one, two = half(0), half(half(0))
    assert models_of(simulation(forgetting(3)), 4) == pytest.approx([one, two, two, half(two)])
    sim = simulation(forgetting(3), dropout=0.5)  # a client that drops out was selected, too
    state = sim.init(jax.random.key(1))
    for t in range(6):
        state, info = sim.round_fn(state)
        reported = (info["cohort"] >= 0).sum()
        assert int(info["forgot"]) == 4 - reported and (reported == 0 or t % 3 < 2)
    np.testing.assert_array_equal(state.sources["forgetting"], [6, 6, 6, 6])


def test_messages_weights_and_sums_by_hand() -> None:
    n, a = np.array(SIZES), np.array(TARGETS)
    flipped = (n * [-2, 1, 1, 1] * a / 2).sum() / n.sum()
    assert models_of(simulation(flipping(2.0)), 1) == pytest.approx([flipped])
    first = a.mean() / 2  # equal weights, and nothing is added
    second = first + (a - first).mean() / 2 + 0.25
    assert models_of(simulation(drifting(0.25)), 2) == pytest.approx([first, second])
    # The message of the other source is flipped first, and then summed with the weight 1.
    both = ([-2, 1, 1, 1] * a / 2).mean()
    assert models_of(simulation(flipping(2.0), drifting(0.25)), 1) == pytest.approx([both])


def test_a_start_and_an_example_by_hand() -> None:
    """Model and targets are moved by the same number, so the updates are those of the plain round."""
    assert models_of(simulation(offset(3.0)), 3) == pytest.approx(models_of(simulation(), 3))
    sim = simulation(offset(3.0))
    state = sim.init(jax.random.key(0), params=jnp.asarray(2.0))
    # The test set is that of client 0, with the target 2. Its examples are moved, and w is not.
    assert sim.evaluate(state)["loss"] == pytest.approx(3.0**2 / 2)


def test_sources_that_change_nothing_give_the_same_bits() -> None:
    same = Source(
        "same",
        init=lambda moment: jnp.zeros(3),
        select=lambda state, cohort, moment: cohort,
        receive=lambda state, start, client, moment: start,
        weigh=lambda weight, client: weight,
        send=lambda state, message, weight, client, moment: (message, weight),
        combine=lambda state, received, moment: (received, state),
        after=lambda state, outcome, moment: (state, {}),
    )
    algorithm = C.compressed(fd.algorithms.mime(), C.top_k(0.5))  # with a first phase and states of clients
    sims = [combined({"sources": sources}, algorithm=algorithm) for sources in ([], [same])]
    plain, other = (sim.round_fn(sim.round_fn(sim.init(jax.random.key(1)))[0])[0] for sim in sims)
    assert plain.sources == {} and set(other.sources) == {"same"}
    assert_equal((plain.server, plain.clients), (other.server, other.clients))


def test_keys_of_a_source_depend_on_its_name_the_round_and_the_client() -> None:
    def noisy(name: str) -> Source:
        def send(state: Any, message: Any, weight: jax.Array, client: Any, moment: Moment) -> tuple[Any, jax.Array]:
            return jax.tree.map(lambda m: m + jax.random.normal(moment.key), message), weight

        return Source(name, send=send)

    alone = models_of(simulation(noisy("a")), 2)
    assert models_of(simulation(noisy("a")), 2) == alone
    assert models_of(simulation(noisy("b")), 2) != alone
    assert models_of(simulation(flipping(-1.0), noisy("a")), 2) == pytest.approx(alone)  # other sources change no key


def test_bad_sources() -> None:
    def message(sources: Any, run: bool = False) -> str:
        with pytest.raises((ConfigurationError, TypeError)) as error:
            data, model = quadratics(TARGETS, SIZES)
            sim = fd.Simulation(model, data, fd.algorithms.fedavg(), cohort_size=4, sources=sources)
            if run:
                sim.round_fn(sim.init(jax.random.key(0)))
        return str(error.value)

    assert "sources must be a list of fd.sources.Source" in message(flipping(1.0))
    assert "sources[0] must be of type Source" in message([flipping])
    assert "names of sources must be different" in message([flipping(1.0), flipping(2.0)])
    assert "names of sources must be different" in message([Source("clock")])
    wrong = Source("wrong", send=lambda state, message, weight, client, moment: (jnp.zeros(3), weight))
    assert "send of Source(wrong) must keep the structure and the shapes" in message([wrong], run=True)
    grows = Source("grows", init=lambda m: jnp.zeros(2), after=lambda s, o, m: (jnp.zeros(3), {}))
    assert "the state of the source grows must have the structure" in message([grows], run=True)
    twice = Source("twice", after=lambda s, o, m: (s, {"lr": m.t}))
    assert "the name of a metric must not be used already" in message([twice], run=True)
    sim = simulation(forgetting(3))
    other = simulation()
    with pytest.raises(ConfigurationError, match="state must have the state of the source forgetting"):
        sim.round_fn(other.init(jax.random.key(0)))
    with pytest.raises(ConfigurationError, match="state must be of a simulation with the source forgetting"):
        other.round_fn(sim.init(jax.random.key(0)))


# --- the library's sources --------------------------------------------------------------------------------------------


@fd.shift.rule
def moved_by_client(step: float) -> Any:
    return lambda key, t, client, x, y: (x + step * client, y)


@fd.shift.rule
def moved_by_round(step: float) -> Any:
    return lambda key, t, client, x, y: (x + step * t, y)


@fd.sources.rule
def brighter(step: float) -> Source:
    return Source("brighter", example=lambda key, t, client, x, y: (x + step * t, y))


def everything(step: float) -> list[Source]:
    return [forgetting(3), flipping(0.5), drifting(step), brighter(0.1)]


def adaptive(norm: float) -> fd.aggregation.Aggregation:
    return fd.aggregation.private(norm, 0.1, target_quantile=0.5)


P, G, T, C, L = fd.participation, fd.aggregation, fd.topology, fd.compression, fd.adversaries
MODEL, STEPS = fd.models.linear((5,), 3), fd.LocalTraining(steps=7, batch_size=4)
# Of each value: the options of a simulation for a number, the number, and another one. The argument of the function has
# the name that the number has in a checkpoint.
VALUES: dict[str, list[tuple[Callable[[Any], dict[str, Any]], Any, Any]]] = {
    "participation": [
        (lambda up: {"participation": P.markov(up, 0.2, P.power_of_choice(4))}, 0.6, 0.5),
        (lambda floor: {"participation": P.cyclic(2, base=P.diurnal(5.0, floor=floor))}, 0.4, 0.5),
    ],
    "failures": [
        (lambda dropout: {"dropout": dropout, "stragglers": 0.5}, 0.4, 0.5),
        (lambda deadline: {"deadline": deadline, "speed_spread": 0.5, "local": STEPS}, 1.2, 1.1),
    ],
    "clock": [
        (lambda speed_spread: {"devices": fd.Devices(speed_spread, down=1e3)}, 0.5, 0.7),
        (lambda exponent: {"clock": fd.clock.asynchronous(4, "polynomial", exponent)}, 0.5, 0.7),
    ],
    "shift": [
        (lambda step: {"data": lambda data: data.shifted(moved_by_client(step))}, 0.1, 0.2),
        (lambda step: {"data": lambda data: data.shifted(moved_by_round(step), "both")}, 0.01, 0.02),
    ],
    "redeal": [
        (lambda redeal: {"data": lambda data: data.redealt(redeal)}, None, 0.5),
        (lambda redeal: {"data": lambda data: data.redealt(redeal)}, 0.5, 0.6),
    ],
    "aggregation": [
        (lambda norm: {"aggregation": G.clipped(norm)}, 0.5, 0.4),
        (lambda noise_multiplier: {"aggregation": G.private_ftrl(0.5, noise_multiplier, 4)}, 0.1, 0.2),
        # in no pair, because it has a participation rule of its own
        (lambda clip_norm: {"aggregation": adaptive(clip_norm), "participation": P.bernoulli()}, 0.5, 0.4),
    ],
    "robust": [
        (lambda tau: {"aggregation": G.robust(fd.robust.centered_clipping(tau))}, 0.5, 0.4),
        (lambda nu: {"aggregation": G.robust(fd.robust.geometric_median(nu), [fd.robust.arc(1)])}, 0.1, 0.2),
    ],
    "adversaries": [
        (lambda tau: {"sources": [L.share(0.4, L.ipm(tau))]}, 1.5, 2.0),
        (lambda share: {"sources": [L.share(share, L.alie())]}, 0.2, 0.4),
    ],
    "codec": [
        (lambda fraction: {"codec": C.top_k(fraction)}, 0.5, 0.4),
        (lambda levels: {"codec": C.qsgd(levels)}, 7, 8),
    ],
    "topology": [
        (lambda every: {"topology": T.groups([0, 1, 1, 0, 2, 1], every)}, 2, 3),
        (lambda W: {"topology": T.graph(W(6)), "cohort_size": 6}, T.ring, T.complete),
    ],
    "own": [
        (lambda fraction: {"sources": [C.downlink(C.top_k(fraction))]}, 0.5, 0.4),
        (lambda step: {"sources": everything(step)}, 1e-3, 2e-3),
    ],
}
ALL = [(source, which) for source, values in VALUES.items() for which in range(len(values))]


def made(source: str, which: int) -> dict[str, Any]:
    options, number, _ = VALUES[source][which]
    return options(number)


def combined(*values: dict[str, Any], algorithm: fd.Algorithm | None = None) -> fd.Simulation:
    """SCAFFOLD, or another algorithm, with six clients. A program for one device is compiled faster."""
    options: dict[str, Any] = {"local": fd.LocalTraining(epochs=2, batch_size=4), "cohort_size": 3, "lanes": 2}
    options |= {"mesh": fd.clients_mesh(jax.devices()[:1])}
    algorithm, data = algorithm or fd.algorithms.scaffold(weighting="uniform"), _data()
    for value in values:
        options |= {name: given for name, given in value.items() if name not in ("data", "codec")}
        data = value["data"](data) if "data" in value else data
        algorithm = C.compressed(algorithm, value["codec"]) if "codec" in value else algorithm
    return fd.Simulation(MODEL, data, algorithm, **options)


def run(sim: fd.Simulation, state: fd.ServerState, rounds: int = 4, **options: Any) -> fd.ServerState:
    return sim.run(state, rounds, eval_every=0, progress=False, **options)[0]


def assert_same(one: fd.ServerState, other: fd.ServerState) -> None:
    assert_close(*((state.server, state.sources) for state in (one, other)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("source", "which"), ALL)
def test_another_number_compiles_nothing_and_is_another_run(source, which) -> None:
    """Other integers and other graphs are other programs, because shapes may depend on them."""
    options, number, other = VALUES[source][which]
    one, same, another = (combined(options(each)) for each in (number, number, other))
    identity = one.specification.identity
    assert not differences(identity, same.specification.identity)[0]
    (changed,) = differences(identity, another.specification.identity)[0]
    assert [changed.split(".")[-1]] == [*inspect.signature(options).parameters]
    assert (one.executor.programs.compiled is another.executor.programs.compiled) == isinstance(number, float)
    assert one.settings != another.settings or source not in ("failures", "clock", "aggregation")  # those of logs


@pytest.mark.thorough
@pytest.mark.parametrize(("source", "which"), ALL)
def test_updates_are_measured_from_where_the_clients_have_started(source, which, monkeypatch) -> None:
    """If a measure keeps no updates, the clients train a second time, which gives the same values."""
    measured = []
    for kept_bytes, lanes in ((measure.KEPT_BYTES, 1), (0, 2)):  # with other lanes, they share no program
        monkeypatch.setattr(measure, "KEPT_BYTES", kept_bytes)
        sim = combined(made(source, which), {"lanes": lanes})
        state = sim.init(jax.random.key(1))
        for _ in range(3):
            state, _ = sim.round_fn(state)
        measured.append(sim.measure(state, "updates"))
    assert_close(*measured, rtol=1e-3, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(("first", "second"), [*itertools.combinations(VALUES, 2)])
def test_every_pair_of_sources_agrees_by_three_routes(first, second, which, tmp_path) -> None:
    """A run, the rounds one by one, and a resumed run. Pairs that exclude each other say so."""
    values = made(first, which), made(second, which)
    try:
        sim = combined(*values)
    except ConfigurationError as error:
        assert (first, second, which) in EXCLUDED, str(error)
        return
    assert (first, second, which) not in EXCLUDED
    start = sim.init(jax.random.key(2))
    whole, state = run(sim, start), start
    for _ in range(4):
        state, _ = sim.round_fn(state)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state.server, state.clients)))
    checkpoints = fd.Checkpoints(tmp_path / "run", every=2)
    run(sim, start, 2, checkpoints=checkpoints)
    again = combined(*values)
    for other in (state, run(again, checkpoints.restore(again)[0], 2)):
        assert_close(other._replace(key=()), whole._replace(key=()), rtol=1e-4, atol=1e-5)


EXCLUDED = {
    ("failures", "clock", 1),  # a deadline needs synchronous rounds
    ("clock", "redeal", 1),
    ("clock", "aggregation", 1),
    ("redeal", "aggregation", 1),  # one client changes the messages of others
    ("clock", "topology", 1),
    ("aggregation", "topology", 1),
    ("topology", "own", 0),  # a state of one server
    ("topology", "own", 1),
    ("robust", "topology", 0),
    ("robust", "topology", 1),
    ("adversaries", "topology", 0),
    ("adversaries", "topology", 1),
}


# --- placements, resumed runs and sweeps of every source --------------------------------------------------------------

TWO = fd.clients_mesh(jax.devices()[:2])
PLACES: dict[str, dict[str, Any]] = {
    "two devices": {"lanes": 1, "mesh": TWO},
    "sharded": {"lanes": 1, "bank": "sharded", "shard_data": True, "mesh": TWO},
    "files": {"stream": True, "mesh": TWO},
    "sweep": {},
}
REFUSED = {("sharded", "redeal", 0), ("sharded", "redeal", 1)}  # the examples of a cohort are pooled
CORE = [("files", "clock, own", 1), ("sweep", "participation, topology", 0)]
PLACED = [*CORE, thorough("sharded", "participation, topology", 0)]
PLACED += [thorough(place, source, which) for place in PLACES for source, which in ALL]


@pytest.mark.parametrize(("place", "sources", "which"), PLACED)
def test_a_placement_a_resumed_run_and_a_sweep_do_not_change_a_source(place, sources, which, tmp_path) -> None:
    first, *others = sources.split(", ")
    options, number, other = VALUES[first][which]

    def plain(number: Any = number, **placed: Any) -> fd.Simulation:
        return combined(options(number), *(made(each, which) for each in others), {"lanes": 1} | placed)

    def placed(folder: str) -> fd.Simulation:
        return plain(**PLACES[place] | ({"bank": str(tmp_path / folder)} if place == "files" else {}))

    if place == "sweep":
        runs = fd.sweep(plain, 4, [1, 2], fd.grid(number=[number, other]), eval_every=0, progress=False)
        for each in runs:
            sim = plain(each.setting["number"])
            assert_same(run(sim, sim.init(jax.random.key(each.seed))), each.state)
        return
    try:
        sim = placed("whole")
    except ConfigurationError as error:
        assert (place, sources, which) in REFUSED, str(error)
        return
    assert (place, sources, which) not in REFUSED
    whole, alone = run(sim, sim.init(jax.random.key(1))), plain()
    assert_same(run(alone, alone.init(jax.random.key(1))), whole)
    sim, checkpoints = placed("parts"), fd.Checkpoints(tmp_path / "run", every=2)
    run(sim, sim.init(jax.random.key(1)), 2, checkpoints=checkpoints)
    again = placed("parts")
    resumed = run(again, checkpoints.restore(again)[0], 2)
    assert_equal((resumed.server, resumed.sources), (whole.server, whole.sources))


@pytest.mark.parametrize(("source", "which"), [ALL[0], *(thorough(*each) for each in ALL[1:])])
def test_scanned_rounds_are_those_of_a_run(source, which) -> None:
    sim = combined(made(source, which))
    start = sim.init(jax.random.key(1))
    assert_same(run(sim, start), jax.lax.scan(lambda state, _: sim.round_fn(state), start, length=4)[0])


# --- the way down -----------------------------------------------------------------------------------------------------


def test_a_coded_way_down_by_hand() -> None:
    """The codec rounds to integers and sends 3 bits. All targets are 10, and a step goes half of the way."""
    codec = fd.compression.Codec(lambda key, x: (jnp.round(x), 3.0), "rounding")
    data = quadratics([10.0, 10.0])
    for memory in (True, False):
        sources = [fd.compression.downlink(codec, memory)]
        sim = simulation(
            *sources, data=data, devices=fd.Devices(down=1.0, up=1e9, seconds_per_step=1e-9), cohort_size=2
        )
        state, w, copy, time = sim.init(jax.random.key(0), params=jnp.asarray(0.5)), 0.5, 0.5, 0.0
        for t in range(4):
            state, info = sim.round_fn(state)
            w = w + (10 - copy) / 2  # the update of a client that starts from the copy
            copy = copy + np.round(w - copy) if memory else np.round(w)
            received = 4 if t == 0 else 3 / 8
            time += received  # bytes, with one byte a second
            assert float(state.params) == pytest.approx(w)
            assert float(state.sources["downlink"].params) == pytest.approx(copy)
            assert float(info["downlink_bytes"]) == received and float(info["time"]) == pytest.approx(time, rel=1e-5)
            assert float(info["downlink_error"]) == pytest.approx((w - copy) ** 2 / w**2, rel=1e-4)


def test_a_way_down_without_loss_changes_nothing() -> None:
    lossless = {"sources": [C.downlink(C.none())]}
    (one, records), (other, others) = (
        sim.run(sim.init(jax.random.key(1)), 4, eval_every=0, progress=False)
        for sim in (combined({"lanes": 1}), combined({"lanes": 1}, lossless))
    )
    assert_close(other.server, one.server)
    assert [r["downlink_bytes"] for r in records] == [r["downlink_bytes"] for r in others]
    with pytest.raises(ConfigurationError, match="the source downlink needs synchronous rounds"):
        combined(lossless, {"clock": fd.clock.asynchronous(4)})
    with pytest.raises(ConfigurationError, match="a topology with one server"):
        combined(lossless, {"topology": T.groups([0, 1, 0, 1, 0, 1])})
