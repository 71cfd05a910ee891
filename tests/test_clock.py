"""Virtual time and asynchronous rounds: against an event queue in plain Python, limits, and combinations."""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import slow
from small import assert_equal, rounds, thorough
from test_participation import LOCAL as ONE_EPOCH
from test_participation import MODEL, K, N, leaves, model
from test_participation import data as data
from test_trajectories import CLASSES, FEATURES, LOCAL, SIZES, label_skewed_clients, library_order

import fedjax_drift as fd
from fedjax_drift import cli
from fedjax_drift.participation import Clients
from fedjax_drift.round.engine import round_keys
from fedjax_drift.round.speed import DEVICE_SPEEDS

DEVICES = fd.Devices(speed_spread=0.8, up=1e3, down=4e3, seconds_per_step=0.1)
ASYNCHRONOUS = fd.clock.asynchronous(6, "polynomial", max_staleness=4)
FEDBUFF = ASYNCHRONOUS.recipe.again(ASYNCHRONOUS.recipe.arguments | {"starts": "report"})


def simulate(data, rule=None, algorithm=None, **options) -> fd.Simulation:
    mesh = fd.clients_mesh(jax.devices()[:1])
    algorithm = fd.algorithms.scaffold() if algorithm is None else algorithm
    options = {"local": ONE_EPOCH, "cohort_size": K, "mesh": mesh, "participation": rule} | options
    return fd.Simulation(MODEL, data, algorithm, **options)


# --- an event queue ---------------------------------------------------------------------------------------------------


def updates_of(
    M: int, K: int, T: int, duration: Callable[[int], float], start: Callable[[int, int, set[int]], list[int]]
) -> Iterator[tuple[float, list[tuple[int, int]]]]:
    """Yields the time of each of T updates of the server, and its clients: (client, round in which it started).

    duration(i): the seconds that client i needs. start(t, count, busy): the clients that start in round t.
    """
    queue = [(duration(i), slot, i, 0) for slot, i in enumerate(start(0, M, set()))]
    heapq.heapify(queue)
    for t in range(T):
        arrived = [heapq.heappop(queue) for _ in range(K)]
        now = arrived[-1][0]
        arrived.sort(key=lambda event: event[1])
        yield now, [(i, version) for _, _, i, version in arrived]
        new = start(t + 1, K, {i for _, _, i, _ in queue})
        for (_, slot, _, _), i in zip(arrived, new, strict=True):
            heapq.heappush(queue, (now + duration(i), slot, i, t + 1))


def updates_at_reports(
    M: int, K: int, T: int, duration: Callable[[int], float], start: Callable[[int, int, set[int]], list[int]]
) -> Iterator[tuple[float, list[tuple[int, int]]]]:
    """Like `updates_of`, as in FedBuff: another client starts as soon as one reports.

    The clients that start in a round are drawn when it begins: K - 1 in its course, and one at the end of the round
    before it.
    """
    first = start(0, M + K - 1, set())
    queue, waiting, now = [(duration(i), slot, i, 0) for slot, i in enumerate(first[:M])], first[M:], 0.0
    heapq.heapify(queue)
    slots = [*range(M, M + K - 1)]  # of those that wait
    for t in range(T):
        arrived = []
        for k in range(K):
            arrived.append(heapq.heappop(queue))
            now = arrived[-1][0]
            if k < K - 1:
                heapq.heappush(queue, (now + duration(waiting[k]), slots[k], waiting[k], t))
        arrived.sort(key=lambda event: event[1])
        yield now, [(i, version) for _, _, i, version in arrived]
        empty = [slot for _, slot, _, _ in arrived]
        new = start(t + 1, K, {i for _, _, i, _ in queue})
        heapq.heappush(queue, (now + duration(new[0]), empty[0], new[0], t + 1))
        waiting, slots = new[1:], empty[1:]


class Server(dict):
    """The variables of a server, by the letters of the papers."""

    __getattr__ = dict.__getitem__


def fedavg(fed: slow.Federation, t: int, i: int, sent: Server, own: dict) -> tuple[dict, float]:
    return {"D": fed.train(t, i, sent.w) - sent.w}, fed.size(i)


def scaffold(fed: slow.Federation, t: int, i: int, sent: Server, own: dict) -> tuple[dict, float]:
    c_i = own.get("c", 0.0)
    D = fed.train(t, i, sent.w, slow.corrected(sent.c - c_i)) - sent.w
    own["c"] = c_i - sent.c - D / fed.path(t, i)
    return {"D": D, "dc": own["c"] - c_i}, 1.0


def feddc(fed: slow.Federation, t: int, i: int, sent: Server, own: dict) -> tuple[dict, float]:
    c_i, h, a = own.get("c", 0.0), own.get("h", 0.0), 0.1
    D = fed.train(t, i, sent.w, slow.corrected(sent.c - c_i, a, sent.w - h)) - sent.w
    own["c"], own["h"] = c_i - sent.c - D / fed.path(t, i), h + D
    return {"D": D, "dc": own["c"] - c_i}, 1.0


def step(name: str, server: Server, mean: dict, share: float) -> Server:
    """The variables after an update. share: |S| / N."""
    w, D = server.w, mean["D"]
    if name == "fedavgm":
        v = 0.9 * server.v - D
        return Server(w=w - 0.5 * v, v=v)
    if name == "fedavg":
        return Server(w=w + D)
    c = server.c + share * mean["dc"]
    if name == "scaffold":
        return Server(w=w + D, c=c)
    h = server.h + share * D
    return Server(w=w + D + h, c=c, h=h)


CLIENTS = {"fedavg": fedavg, "fedavgm": fedavg, "scaffold": scaffold, "feddc": feddc}
OPTIONS = {"fedavgm": {"server_lr": 0.5}, "feddc": {"alpha": 0.1}}
VECTORS = {"fedavg": 1, "fedavgm": 1, "scaffold": 2, "feddc": 2}  # sent in each direction, of the size of the model


@pytest.mark.parametrize(
    ("name", "starts"),
    [("scaffold", None), ("fedavg", "report"), thorough("fedavg", None), thorough("scaffold", "report")]
    + [thorough(name, starts) for name in ("fedavgm", "feddc") for starts in (None, "report")],
)
def test_asynchronous_rounds_are_those_of_an_event_queue(name, starts) -> None:
    """The same events, and in float64 the same models, over 30 updates with log-normal speeds."""
    M, buffer, T, most = {None: (5, 2, 30, 2), "report": (3, 3, 30, 1)}[starts]
    with jax.enable_x64(True):
        examples, rng = label_skewed_clients(np.float64), np.random.default_rng(1)
        params = {"w": rng.normal(size=(FEATURES, CLASSES)), "b": rng.normal(size=CLASSES)}
        sim = fd.Simulation(
            fd.Model(init=lambda key: jax.tree.map(jnp.asarray, params), apply=lambda p, x: x @ p["w"] + p["b"][None]),
            fd.FederatedData.from_clients(examples),
            getattr(fd.algorithms, name)(**OPTIONS.get(name, {})),
            local=fd.LocalTraining(**LOCAL),
            cohort_size=buffer,
            clock=fd.clock.asynchronous(M, "hinge", hinge=(2, 1), max_staleness=most, starts=starts),
            devices=DEVICES,
            mesh=fd.clients_mesh(jax.devices()[:1]),
        )
        state = sim.init(jax.random.key(0))
        key, rule, sizes = state.key, fd.participation.uniform(), jnp.asarray(SIZES, jnp.int32)
        infos, models = [], []
        for _ in range(T):
            state, info = sim.round_fn(state)
            infos.append(jax.device_get(info))
            models.append(slow.pack(jax.device_get(state.params)))

        fed = slow.Federation(examples, [], lambda *which: library_order(key, *which), slow.Local(**LOCAL))
        w = slow.pack(params)
        speeds = jax.random.fold_in(key, DEVICE_SPEEDS)
        bytes_sent = VECTORS[name] * w.nbytes

        def duration(i: int) -> float:
            slowness = math.exp(0.8 * float(jax.random.normal(jax.random.fold_in(speeds, i))))
            return bytes_sent / 4e3 + fed.num_steps(i) * 0.1 * slowness + bytes_sent / 1e3

        def start(t: int, count: int, busy: set[int]) -> list[int]:
            free = jnp.asarray([i not in busy for i in range(len(SIZES))])
            clients = Clients(sizes, lambda ids: ids, free if t else None)
            return np.asarray(rule.select((), round_keys(key, t)[0], jnp.int32(t), count, clients)[0]).tolist()

        zeros = np.zeros_like(w)
        servers, owns, stale = [Server(w=w, v=zeros, c=zeros, h=zeros)], [{} for _ in SIZES], set()
        events = updates_of if starts is None else updates_at_reports
        for t, (now, reports) in enumerate(events(M, buffer, T, duration, start)):
            kept = [(i, v) for i, v in reports if t - v <= most]
            assert infos[t]["cohort"].tolist() == [i if t - v <= most else -1 for i, v in reports], t
            assert infos[t]["staleness"].tolist() == [t - v for _, v in reports], t
            assert infos[t]["too_stale"] == len(reports) - len(kept)
            np.testing.assert_allclose(infos[t]["time"], now, rtol=1e-12)
            total: dict[str, Any] = {}
            weights = 0.0
            for i, v in kept:
                distance = np.linalg.norm(servers[v].w - servers[t].w)
                here = infos[t]["cohort"].tolist().index(i)
                np.testing.assert_allclose(infos[t]["start_distance"][here], distance, rtol=1e-9, atol=1e-12)
                message, weight = CLIENTS[name](fed, v, i, servers[v], owns[i])
                s = 1 / (2 * max(t - v - 1, 0) + 1)
                for part, value in message.items():
                    total[part] = total.get(part, 0.0) + s * weight * value
                weights += weight
                stale.add(t - v)
            mean = {part: value / weights for part, value in total.items()}
            servers.append(step(name, servers[t], mean, len(kept) / len(SIZES)) if kept else servers[t])
            error = np.linalg.norm(models[t] - servers[-1].w) / np.linalg.norm(servers[-1].w)
            assert error < 1e-9, (t, error)
        assert stale == {*range(most + 1)} and sum(info["too_stale"] for info in infos) > 0


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule", [None, thorough(fd.participation.cyclic(2)), thorough(fd.participation.power_of_choice(5))]
)
@pytest.mark.parametrize(
    "clock", [fd.clock.asynchronous(K, "polynomial"), fd.clock.asynchronous(1, "polynomial", starts="report")]
)
def test_if_all_clients_start_with_the_present_variables_rounds_are_synchronous(data, rule, clock) -> None:
    """Bit for bit, with all speeds: the server waits for all, or one client trains at a time."""
    plain, infos = rounds(simulate(data, rule), 4)
    state, timed = rounds(simulate(data, rule, clock=clock, devices=DEVICES), 4)
    assert_equal(leaves(plain), leaves(state))
    assert [i["cohort"].tolist() for i in infos] == [i["cohort"].tolist() for i in timed]
    assert all((info["staleness"] == 0).all() for info in timed) and jax.tree.leaves(state.clock.past) == []


@pytest.mark.thorough
@pytest.mark.parametrize("clock", [ASYNCHRONOUS, FEDBUFF])
def test_a_client_is_never_in_two_slots(data, clock) -> None:
    sim = simulate(data, fd.participation.diurnal(5.0), clock=clock, devices=DEVICES)
    state, in_flight = sim.init(jax.random.key(3)), []
    for t in range(12):
        ids = np.asarray(state.clock.slots.id)
        present = ids[ids < N]
        in_flight.append(len(present))
        assert len({*present}) == len(present)
        np.testing.assert_array_equal(np.isinf(state.clock.slots.wait), ids == N)
        state, info = sim.round_fn(state)
        assert {*info["cohort"].tolist()} - {-1} <= {*present.tolist()}, t
    assert min(in_flight) < 6 and max(in_flight[1:]) > 3  # slots stay empty at night, and are filled again


@pytest.mark.thorough
def test_with_one_report_a_round_both_kinds_of_start_are_the_same(data) -> None:
    sims = [simulate(data, clock=clock, devices=DEVICES, cohort_size=1) for clock in (ASYNCHRONOUS, FEDBUFF)]
    (state, _), (other, _) = (rounds(sim, 6) for sim in sims)
    assert_equal(leaves(state), leaves(other))


@pytest.mark.parametrize(
    "clock, expected",
    [
        (fd.clock.asynchronous(9), [1, 1, 1, 1]),
        (fd.clock.asynchronous(9, "polynomial"), [1, 2**-0.5, 6**-0.5, 10**-0.5]),
        (fd.clock.asynchronous(9, "polynomial", exponent=1), [1, 1 / 2, 1 / 6, 1 / 10]),
        (fd.clock.asynchronous(9, "hinge"), [1, 1, 1 / 11, 1 / 51]),
        (fd.clock.asynchronous(9, "hinge", hinge=(2, 0)), [1, 1 / 3, 1 / 11, 1 / 19]),
    ],
)
def test_discounts(clock, expected) -> None:
    np.testing.assert_allclose(clock.discount(jnp.asarray([0.0, 1.0, 5.0, 9.0])), expected, rtol=1e-6)


def test_fedasync_mixes_models(data) -> None:
    """w <- (1 - alpha s) w + alpha s theta_i (Xie et al. 2019), where theta_i was trained from a stale model."""
    alpha, clock = 0.6, fd.clock.asynchronous(4, "polynomial", exponent=1.0, mixes="models")
    sim = simulate(data, None, fd.algorithms.fedavg(server_lr=alpha), cohort_size=1, clock=clock, devices=DEVICES)
    plain = simulate(data, None, fd.algorithms.fedavg(), cohort_size=1)
    states, stale = [sim.init(jax.random.key(0))], set()
    for t in range(8):
        new, info = sim.round_fn(states[-1])
        (i,), (tau,) = info["cohort"].tolist(), info["staleness"].tolist()
        started = plain.init(jax.random.key(0), states[t - tau].params)._replace(round=jnp.int32(t - tau))
        theta, _ = plain.round_fn(started, cohort=[i])
        mixing = alpha / (1 + tau)
        np.testing.assert_allclose(
            model(new), (1 - mixing) * model(states[-1]) + mixing * model(theta), rtol=1e-5, atol=1e-6
        )
        states.append(new)
        stale.add(tau)
    assert len(stale) > 2


# --- synchronous rounds -----------------------------------------------------------------------------------------------


def seconds_by_hand(state: fd.ServerState, devices: fd.Devices, ids, steps, up: float, down: float) -> np.ndarray:
    z = [jax.random.normal(jax.random.fold_in(jax.random.fold_in(state.key, DEVICE_SPEEDS), i)) for i in ids]
    per_step = np.broadcast_to(devices.seconds_per_step, N)[ids]
    rates = [np.broadcast_to(rate, N)[ids] for rate in (devices.up, devices.down)]
    return up / rates[0] + down / rates[1] + steps * per_step * np.exp(devices.speed_spread * np.array(z))


def test_a_synchronous_round_ends_with_its_slowest_client(data) -> None:
    rng = np.random.default_rng(0)
    devices = fd.Devices(0.5, up=rng.uniform(1e2, 1e3, N), down=500.0, seconds_per_step=rng.uniform(0.1, 1, N))
    sim = simulate(data, None, devices=devices)
    state, infos = rounds(sim, 3)
    expected = 0.0
    for info in infos:
        ids = info["cohort"]
        sent = 2 * 4 * 15  # SCAFFOLD sends two vectors of 15 numbers in float32, in each direction
        expected += seconds_by_hand(state, devices, ids, info["client_steps"], sent, sent).max()
        np.testing.assert_allclose(info["time"], expected, rtol=1e-5)
    plain, _ = rounds(simulate(data, None), 3)
    np.testing.assert_array_equal(model(state), model(plain))  # time changes nothing


def test_a_deadline_is_in_seconds_with_devices(data) -> None:
    devices = fd.Devices(speed_spread=1.0, seconds_per_step=2.0)
    sim = simulate(data, None, devices=devices, deadline=4.0, cohort_size=N)
    state, infos = rounds(sim, 2)
    steps = -(-np.asarray(sim.data.sizes) // 4)
    times = seconds_by_hand(state, devices, np.arange(N), steps, 0, 0)
    assert (times > 4).any() and (times <= 4).any()
    for t, info in enumerate(infos):
        np.testing.assert_array_equal(info["cohort"] >= 0, times <= 4)
        assert info["time"] == 4 * (t + 1)  # the server waits until the deadline
    sim = simulate(data, None, devices=devices, over_selection=2.0)
    state, (info,) = rounds(sim, 1)
    chosen = info["selected"]
    times = seconds_by_hand(state, devices, chosen, steps[chosen], 0, 0)
    assert {*info["cohort"]} == {*chosen[np.argsort(times)[:K]]}
    np.testing.assert_allclose(info["time"], np.sort(times)[K - 1], rtol=1e-5)


@pytest.mark.thorough
def test_a_full_round_ends_before_its_deadline(data) -> None:
    """With over-selection, a round is full with K reports, although others were selected."""
    devices = fd.Devices(speed_spread=1.0)
    _, infos = rounds(simulate(data, None, devices=devices, over_selection=2.0, deadline=1000.0), 2)
    assert 0 < infos[1]["time"] < 1000 and all((info["cohort"] >= 0).all() for info in infos)


@pytest.mark.thorough
def test_a_straggler_reports_early(data) -> None:
    devices = fd.Devices(speed_spread=0.5)
    for clock in (fd.clock.synchronous(), fd.clock.asynchronous(K)):
        state, infos = rounds(simulate(data, None, devices=devices, clock=clock, stragglers=0.9), 4)
        expected = [seconds_by_hand(state, devices, info["cohort"], info["client_steps"], 0, 0).max() for info in infos]
        np.testing.assert_allclose([info["time"] for info in infos], np.cumsum(expected), rtol=1e-5)


@pytest.mark.thorough
def test_a_codec_shortens_the_upload(data) -> None:
    devices = fd.Devices(up=1.0, seconds_per_step=1e-6)
    for codec, sent in ((fd.compression.none(), 4 * 15), (fd.compression.sign(), None)):
        sim = simulate(data, None, fd.compression.compressed(fd.algorithms.fedavg(), codec), devices=devices)
        _, (info,) = rounds(sim, 1)
        np.testing.assert_allclose(info["time"], sent or info["uplink_bytes"][0], rtol=1e-5)
    assert info["uplink_bytes"][0] < 4 * 15


# --- combinations -----------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_rules_of_users_may_leave_entries_empty(data) -> None:
    """Every second entry is empty, so that half of the slots are filled."""
    uniform = fd.participation.uniform()

    def select(state, key, t, count, clients):
        ids, _ = uniform.select(state, key, t, count, clients)
        return jnp.where(jnp.arange(count) % 2 == 0, N, ids), None

    rule = uniform._replace(select=select, available=lambda state, key, t, N: jnp.ones(N, bool), name="every second")
    sim = simulate(data, rule, clock=ASYNCHRONOUS, devices=DEVICES)
    state = sim.init(jax.random.key(0))
    assert (state.clock.slots.id < N).tolist() == [True] * 3 + [False] * 3
    state, info = sim.round_fn(state)
    assert (info["cohort"] >= 0).sum() == 3 and (state.clock.slots.id < N).sum() == 3


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        ({"clock": fd.clock.asynchronous(2)}, "concurrency must be in 3..8"),
        ({"clock": fd.clock.asynchronous(9)}, "concurrency must be in 3..8"),
        (
            {"clock": fd.clock.asynchronous(7, starts="report")},
            "concurrency must be in 1..6, got 7: a round begins with",
        ),
        ({"clock": ASYNCHRONOUS, "sampling": "bernoulli"}, "got bernoulli"),
        ({"clock": ASYNCHRONOUS, "deadline": 2.0}, "deadline must be left out"),
        ({"clock": ASYNCHRONOUS, "over_selection": 1.5}, "over_selection must be left out"),
        ({"devices": fd.Devices(up=np.ones(3))}, "each of the 8 clients"),
        ({"devices": fd.Devices(), "speed_spread": 0.5, "deadline": 1.0}, "speed_spread is an option of fd.Devices"),
    ],
)
def test_what_cannot_be_combined_is_refused(data, options, message) -> None:
    with pytest.raises(fd.errors.ConfigurationError, match=message):
        simulate(data, **options)


def test_a_cohort_cannot_be_given_and_models_are_mixed_only_as_updates_of_models(data) -> None:
    sim = simulate(data, None, clock=ASYNCHRONOUS)
    with pytest.raises(fd.errors.ConfigurationError, match="cohort must be None"):
        sim.round_fn(sim.init(jax.random.key(0)), cohort=[1, 2, 3])
    with pytest.raises(fd.errors.ConfigurationError, match="mixes must be"):
        simulate(data, None, clock=fd.clock.asynchronous(6, mixes="models"))
    other = simulate(data, None)
    with pytest.raises(fd.errors.ConfigurationError, match="clock"):
        other.round_fn(sim.init(jax.random.key(0)))


# --- seconds and megabytes --------------------------------------------------------------------------------------------


def run_of(accuracies: list[float], seconds: list[float], up: float) -> list[dict]:
    """The records of a run that is evaluated in every second round. A client receives as many bytes as it sends."""
    rows = enumerate(zip(accuracies, seconds, strict=True), 1)
    return [
        {"round": t, "time": time, "uplink_bytes": up, "downlink_bytes": up} | ({"accuracy": a} if t % 2 == 0 else {})
        for t, (a, time) in rows
    ]


RUN = run_of([0, 0.2, 0, 0.5, 0, 0.8], [1.5, 2.0, 5.0, 7.5, 8.0, 20.0], up=3e6)


def test_targets_are_counted_in_rounds_seconds_or_megabytes() -> None:
    for by, round_, after in (("round", 4, 2), ("time", 7.5, 2.0), ("megabytes", 24.0, 12.0)):
        ((reached,),) = fd.rounds_to_target(RUN, 0.5, by=by).values()
        assert reached == (round_, after)
        figure = fd.plots.rounds_to_target(RUN, 0.5, by=by)
        assert f"{round_:g}" in [text.get_text() for text in figure.axes[0].texts]
    ((missed,),) = fd.rounds_to_target(RUN, 0.9, by="time").values()
    assert missed == (None, 20.0)
    assert "| seconds to 50 % |" in fd.table(RUN, target=0.5, by="time") and "7.5" in fd.table(
        RUN, target=0.5, by="time"
    )
    assert "megabytes_to_target" in fd.table(RUN, target=0.5, by="megabytes", format="csv")
    (line,) = fd.plots.curves(RUN, x="time").axes[0].lines
    np.testing.assert_allclose(line.get_xdata(), [2.0, 7.5, 20.0])
    without = [{"round": 1, "accuracy": 0.5}]
    for by, said in (
        ("time", "records must have a time"),
        ("megabytes", "uplink_bytes"),
        ("hours", "by must be one of"),
    ):
        with pytest.raises(fd.errors.ConfigurationError, match=said):
            fd.rounds_to_target(without, 0.5, by=by)


def test_a_run_ends_at_a_time_or_after_an_amount(data) -> None:
    for rule, ends in ((fd.until.time(7.5), 4), (fd.until.time(7.4), 4), (fd.until.megabytes(24), 4)):
        assert [rule(RUN[:t]) for t in range(1, 7)] == [t >= ends for t in range(1, 7)]
    sim = simulate(data, None, clock=ASYNCHRONOUS, devices=DEVICES)
    _, history = sim.run(sim.init(jax.random.key(0)), 50, eval_every=1, until=fd.until.time(1.0), progress=False)
    assert history[-2]["time"] < 1.0 <= history[-1]["time"]
    with pytest.raises(fd.errors.ConfigurationError, match="needs records with a time"):
        fd.until.time(3.0)([{"round": 1}])


@pytest.mark.thorough
def test_the_command_line_has_virtual_time(tmp_path, capsys) -> None:
    command = "run --dataset synthetic:num_clients=8,num_rows=20 --algorithm fedavg --cohort 2 --rounds 9 --no-progress"
    timing = "--clock asynchronous:4,hinge=2+1 --speed-spread 0.5 --up 1e4 --until-time 3 --target 0.1 --by time"
    folder = tmp_path / "out"
    assert cli.main([*command.split(), *timing.split(), f"--output={folder}"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "options speed-spread 0.5, clock asynchronous:4,hinge=2+1, up 10000.0 devices" in said
    assert "s to 10 %" in said
    records = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert records[-2]["time"] < 3 <= records[-1]["time"] and len(records) < 9 and "staleness" in records[0]
    config = json.loads((folder / "config.json").read_text())
    assert config["speeds"] == {"speed_spread": 0.5, "up": 1e4, "seconds_per_step": 1.0}
    assert config["failures"]["speed_spread"] == 0 and "seconds_to_target" in (folder / "summary.csv").read_text()
    plain = fd.parse_run(
        "--dataset synthetic:num_clients=8 --algorithm fedavg --cohort 2 --deadline 2 --speed-spread 1"
    )
    (sim,) = plain.simulations.values()
    assert sim.setup.options.devices is None and sim.settings["speed_spread"] == 1.0


def test_options_of_other_values_are_pointed_at(data) -> None:
    for name, said in (
        ("concurrency", r"pass clock=fd.clock.asynchronous\(concurrency="),
        ("up", "pass devices=fd.Devices"),
    ):
        with pytest.raises(TypeError, match=said):
            simulate(data, None, **{name: 3})
    assert "3 clients a round of 6 in flight" in repr(simulate(data, None, clock=ASYNCHRONOUS))
