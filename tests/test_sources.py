"""Sources of drift: those of one's own, against calculations by hand; and all pairs of the library's."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import forgetting, quadratics

import fedjax_drift as fd
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.round.sources import Moment, Received, Source, Start
from fedjax_drift.testing import _data, contract_simulation

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


def params(sim: fd.Simulation, rounds: int) -> list[float]:
    state, models = sim.init(jax.random.key(0), params=jnp.zeros(())), []
    for _ in range(rounds):
        state, _ = sim.round_fn(state)
        models.append(float(state.params))
    return models


def test_a_client_that_forgets_by_hand() -> None:
    """All clients are selected in every round, so all forget every third one."""
    half = lambda w: w + 0.5 * (np.average(TARGETS, weights=SIZES) - w)  # noqa: E731
    one, two = half(0), half(half(0))
    assert params(simulation(forgetting(3)), 4) == pytest.approx([one, two, two, half(two)])
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
    assert params(simulation(flipping(2.0)), 1) == pytest.approx([flipped])
    first = a.mean() / 2  # equal weights, and nothing is added
    second = first + (a - first).mean() / 2 + 0.25
    assert params(simulation(drifting(0.25)), 2) == pytest.approx([first, second])
    # The message of the other source is flipped first, and then summed with the weight 1.
    both = ([-2, 1, 1, 1] * a / 2).mean()
    assert params(simulation(flipping(2.0), drifting(0.25)), 1) == pytest.approx([both])


def test_a_start_and_an_example_by_hand() -> None:
    """Model and targets are moved by the same number, so the updates are those of the plain round."""
    assert params(simulation(offset(3.0)), 3) == pytest.approx(params(simulation(), 3))
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
    for algorithm in (fd.algorithms.scaffold(), fd.algorithms.mime()):
        states = []
        for sources in ([], [same]):
            sim = contract_simulation(algorithm, sources=sources)
            states.append(sim.run(sim.init(jax.random.key(1)), 3, progress=False)[0])
        plain, other = states
        assert plain.sources == {} and set(other.sources) == {"same"}
        jax.tree.map(np.testing.assert_array_equal, (plain.server, plain.clients), (other.server, other.clients))


def test_keys_of_a_source_depend_on_its_name_the_round_and_the_client() -> None:
    def noisy(name: str) -> Source:
        def send(state: Any, message: Any, weight: jax.Array, client: Any, moment: Moment) -> tuple[Any, jax.Array]:
            return jax.tree.map(lambda m: m + jax.random.normal(moment.key), message), weight

        return Source(name, send=send)

    alone = params(simulation(noisy("a")), 2)
    assert params(simulation(noisy("a")), 2) == alone
    assert params(simulation(noisy("b")), 2) != alone
    assert params(simulation(flipping(-1.0), noisy("a")), 2) == pytest.approx(alone)  # other sources change no key


def test_numbers_of_a_source_are_arguments_of_the_program() -> None:
    sims = [simulation(flipping(factor)) for factor in (2.0, 3.0)]
    assert sims[0].executor.programs.compiled is sims[1].executor.programs.compiled
    assert params(sims[0], 1) != params(sims[1], 1)


def everything() -> list[Source]:
    brighter = Source("brighter", example=lambda key, t, client, x, y: (x + 0.1 * t, y))
    return [forgetting(3), flipping(0.5), drifting(1e-3), brighter]


def test_a_sweep_over_a_number_of_a_source() -> None:
    data = quadratics(TARGETS, SIZES)
    settings = fd.grid(factor=[1.0, 2.0])
    runs = fd.sweep(lambda factor: simulation(flipping(factor), data=data), 2, settings=settings, progress=False)
    for run in runs:
        sim = simulation(flipping(run.setting["factor"]))
        alone, _ = sim.run(sim.init(jax.random.key(0)), 2, progress=False)
        np.testing.assert_allclose(run.state.params, alone.params, rtol=1e-6)


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


# --- all pairs of the library's sources -------------------------------------------------------------------------------

P, G = fd.participation, fd.aggregation
VALUES: dict[str, list[dict[str, Any]]] = {
    "participation": [{"participation": P.cyclic(2)}, {"participation": P.power_of_choice(5)}],
    "failures": [{"dropout": 0.4, "stragglers": 0.5}, {"deadline": 1.2, "speed_spread": 0.5}],
    "clock": [{"devices": fd.Devices(speed_spread=0.5)}, {"clock": fd.clock.asynchronous(4, "polynomial")}],
    "shift": [{"data": lambda data: data.shifted(fd.shift.rule(lambda: lambda key, t, i, x, y: (x + 0.1 * i, y))())}]
    + [{"data": lambda data: data.shifted(lambda key, t, i, x, y: (x + 0.01 * t, y), test="both")}],
    "redeal": [{"data": lambda data: data.redealt()}, {"data": lambda data: data.redealt(0.5)}],
    "aggregation": [{"aggregation": G.clipped(0.5)}, {"aggregation": G.private_ftrl(0.5, 0.1, 4)}],
    "codec": [{"codec": fd.compression.top_k(0.5)}, {"codec": fd.compression.qsgd(7)}],
    "topology": [
        {"topology": fd.topology.groups([0, 1, 1, 0, 2, 1], every=2)},
        {"topology": fd.topology.graph(fd.topology.ring(6)), "cohort_size": 6},
    ],
    "own": [{"sources": [fd.compression.downlink(fd.compression.top_k(0.5))]}, {"sources": everything()}],
}


def combined(*values: dict[str, Any]) -> fd.Simulation:
    options: dict[str, Any] = {"dropout": 0.0, "stragglers": 0.0}
    algorithm, data = fd.algorithms.scaffold(weighting="uniform"), _data()
    for value in values:
        options |= {name: given for name, given in value.items() if name not in ("data", "codec")}
        data = value["data"](data) if "data" in value else data
        algorithm = fd.compression.compressed(algorithm, value["codec"]) if "codec" in value else algorithm
    return contract_simulation(algorithm, data=data, **options)


PAIRS = [
    pytest.param(a, b, i, id=f"{a}, {b}, {i}", marks=() if (a, b, i) == ("clock", "own", 1) else pytest.mark.thorough)
    for a, b in itertools.combinations(VALUES, 2)
    for i in (0, 1)
]


@pytest.mark.parametrize(("first", "second", "which"), PAIRS)
def test_every_pair_of_sources_agrees_by_three_routes(first, second, which, tmp_path) -> None:
    """A run, the rounds one by one, and a resumed run. Pairs that exclude each other say so."""
    values = VALUES[first][which], VALUES[second][which]
    try:
        sim = combined(*values)
    except ConfigurationError as error:
        assert (first, second, which) in EXCLUDED, str(error)
        return
    assert (first, second, which) not in EXCLUDED
    start = sim.init(jax.random.key(2))
    run, _ = sim.run(start, 4, eval_every=0, progress=False)
    state = start
    for _ in range(4):
        state, info = sim.round_fn(state)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state.server, state.clients)))
    checkpoints = fd.Checkpoints(tmp_path / "run", every=2)
    sim.run(start, 2, eval_every=0, progress=False, checkpoints=checkpoints)
    again = combined(*values)
    resumed, _ = again.run(checkpoints.restore(again)[0], 2, eval_every=0, progress=False)
    for other in (state, resumed):
        for a, b in zip(*map(jax.tree.leaves, (run._replace(key=()), other._replace(key=()))), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5)


EXCLUDED = {
    ("failures", "clock", 1),  # a deadline needs synchronous rounds
    ("clock", "redeal", 1),
    ("clock", "aggregation", 1),
    ("redeal", "aggregation", 1),  # one client changes the messages of others
    ("participation", "topology", 1),  # a graph needs all clients, and the rule has five candidates
    ("clock", "topology", 1),
    ("aggregation", "topology", 1),
    ("topology", "own", 0),  # a state of one server
    ("topology", "own", 1),
}


# --- placements, resumed runs and sweeps of every source --------------------------------------------------------------

TWO = fd.clients_mesh(jax.devices()[:2])
PLACES: dict[str, dict[str, Any]] = {
    "two devices": {"lanes": 1, "mesh": TWO},
    "sharded": {"lanes": 1, "bank": "sharded", "shard_data": True, "mesh": TWO},
    "files": {"stream": True},
    "sweep": {},
}
REFUSED = {("sharded", "redeal", 0), ("sharded", "redeal", 1)}  # the examples of a cohort are pooled
QUICK = {("files", "own", 1), ("sharded", "topology", 0), ("sweep", "topology", 0)}
PLACED = [
    pytest.param(*case, id="{}, {}, {}".format(*case), marks=() if case in QUICK else pytest.mark.thorough)
    for case in itertools.product(PLACES, VALUES, (0, 1))
]


@pytest.mark.parametrize(("place", "source", "which"), PLACED)
def test_a_placement_a_resumed_run_and_a_sweep_do_not_change_a_source(place, source, which, tmp_path) -> None:
    value, seeds = VALUES[source][which], [1, 2]

    def placed(folder: str) -> fd.Simulation:
        return combined(value, PLACES[place] | ({"bank": str(tmp_path / folder)} if place == "files" else {}))

    def run(sim: fd.Simulation, state: fd.ServerState, rounds: int, **options: Any) -> Any:
        state, _ = sim.run(state, rounds, eval_every=0, progress=False, **options)
        return state.server, state.sources

    plain = combined(value, {"lanes": 1})
    wanted = [run(plain, plain.init(jax.random.key(seed)), 4) for seed in seeds]
    if place == "sweep":
        runs = plain.sweep(4, seeds, eval_every=0, progress=False)
        got = [(run.state.server, run.state.sources) for run in runs]
    else:
        try:
            sim = placed("whole")
        except ConfigurationError as error:
            assert (place, source, which) in REFUSED, str(error)
            return
        got = [run(sim, sim.init(jax.random.key(1)), 4)]
        sim, checkpoints = placed("parts"), fd.Checkpoints(tmp_path / "run", every=2)
        run(sim, sim.init(jax.random.key(1)), 2, checkpoints=checkpoints)
        again = placed("parts")
        resumed = run(again, checkpoints.restore(again)[0], 2)
        jax.tree.map(np.testing.assert_array_equal, resumed, got[0])
    assert (place, source, which) not in REFUSED
    for one, other in zip(wanted, got, strict=False):
        for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5)


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
    plain, coded = (
        contract_simulation(fd.algorithms.scaffold(), sources=sources)
        for sources in ([], [fd.compression.downlink(fd.compression.none())])
    )
    states = [sim.run(sim.init(jax.random.key(1)), 4, eval_every=0, progress=False)[0] for sim in (plain, coded)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *(s.server for s in states))
    infos = [sim.round_fn(state)[1] for sim, state in zip((plain, coded), states, strict=True)]
    assert float(infos[0]["downlink_bytes"]) == float(infos[1]["downlink_bytes"])
    with pytest.raises(ConfigurationError, match="the source downlink needs synchronous rounds"):
        contract_simulation(
            fd.algorithms.fedavg(),
            sources=[fd.compression.downlink(fd.compression.none())],
            clock=fd.clock.asynchronous(4),
        )
    with pytest.raises(ConfigurationError, match="a topology with one server"):
        contract_simulation(
            fd.algorithms.fedavg(),
            sources=[fd.compression.downlink(fd.compression.none())],
            topology=fd.topology.groups([0, 1, 0, 1, 0, 1]),
        )
