"""Tests of the contract that every algorithm must fulfil.

There are also tests of the FedAvg family: rounds that were computed by hand, limit cases and bad input.
"""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import models_after

import fedjax_drift as fd
from fedjax_drift.algorithms import ALGORITHMS
from fedjax_drift.testing import CHECKS, check_contract, contract_simulation
from fedjax_drift.types import Needs


# After two steps with learning rate 1/2 towards a, a quarter of the distance is left: theta = w / 4 + 3 a / 4, and
# D = 3 (a - w) / 4. The mean of the targets, weighted by examples, is (2 + 3 * 8) / 4 = 6.5, so D = 4.875 in round 0.
def test_fedavg_by_hand() -> None:
    assert models_after(fd.algorithms.fedavg()) == pytest.approx([4.875, 4.875 / 4 + 4.875])
    assert models_after(fd.algorithms.fedavg(server_lr=0.5), 1) == pytest.approx([4.875 / 2])
    assert models_after(fd.algorithms.fedavg(weighting="uniform"), 1) == pytest.approx([3 * 5 / 4])


def test_fedprox_by_hand() -> None:
    # mu = 1/2 and w = 0. The first step leads to a / 2. The second step leads to
    # theta - ((theta - a) + theta / 2) / 2 = a / 2 + a / 4 - a / 8.
    assert models_after(fd.algorithms.fedprox(mu=0.5), 1) == pytest.approx([6.5 * 5 / 8])


def test_fedavgm_by_hand() -> None:
    first, second = 4.875, 0.75 * (6.5 - 4.875)
    assert models_after(fd.algorithms.fedavgm(beta=0.5)) == pytest.approx([first, first + 0.5 * first + second])
    half = first / 2
    second = 0.75 * (6.5 - half)
    damped = models_after(fd.algorithms.fedavgm(beta=0.5, damped=True))
    assert damped == pytest.approx([half, half + 0.5 * half + 0.5 * second])


def test_fedopt_by_hand() -> None:
    D, tau, lr = 4.875, 0.5, 0.1
    m, v = 0.1 * D, 0.99 * tau**2 + 0.01 * D**2
    assert models_after(fd.algorithms.fedadam(lr, tau=tau), 1) == pytest.approx([lr * m / (v**0.5 + tau)])
    v = tau**2 + 0.01 * D**2  # sign(tau^2 - D^2) = -1
    assert models_after(fd.algorithms.fedyogi(lr, tau=tau), 1) == pytest.approx([lr * m / (v**0.5 + tau)])
    v = tau**2 + D**2
    assert models_after(fd.algorithms.fedadagrad(lr, tau=tau), 1) == pytest.approx([lr * D / (v**0.5 + tau)])
    from_zero = fd.algorithms.fedadam(lr, tau=tau, v_0=0)  # as in the library of FedEve's authors
    assert models_after(from_zero, 1) == pytest.approx([lr * m / (0.1 * D + tau)])


def test_limit_cases() -> None:
    fedavg = models_after(fd.algorithms.fedavg(), 4)
    assert models_after(fd.algorithms.fedprox(mu=0), 4) == fedavg
    assert models_after(fd.algorithms.fedavgm(beta=0), 4) == pytest.approx(fedavg, rel=1e-6)
    # With a large tau = sqrt(v_0), adaptive methods equal FedAvg with server learning rate server_lr / (2 tau).
    half = models_after(fd.algorithms.fedavg(server_lr=0.5), 3)
    for name in ("fedadam", "fedyogi", "fedadagrad"):
        assert models_after(ALGORITHMS[name](1e3, b1=0.0, b2=0.9999, tau=1e3), 3) == pytest.approx(half, rel=1e-3)
    # If |D| is much larger than tau, the first update of FedAdagrad is server_lr, independent of the scale of D.
    assert models_after(fd.algorithms.fedadagrad(0.1, tau=1e-6), 1) == pytest.approx([0.1], rel=1e-5)


def test_local_options_by_hand() -> None:
    one_client = {"algorithm": fd.algorithms.fedavg(weighting="uniform"), "rounds": 1, "lr": 0.5}
    # Momentum 1/2: first v = -a and theta = a / 2, then v = -a/2 - a/2 = -a and theta = a. The mean target is 5.
    assert models_after(**one_client, momentum=0.5) == pytest.approx([5.0])
    # With gradients clipped to norm 1, both steps have length 1/2.
    assert models_after(**one_client, clip_norm=1.0) == pytest.approx([1.0])
    # From w = 4 with weight decay 1/4, clipped to norm 1: the steps of client 0 are (1 + 1) / 2 and (1 + 3/4) / 2, so
    # it ends at 2.125. The direction of client 1 is -1 + 1 = 0, so it stays at 4.
    assert models_after(**one_client, start=4.0, clip_norm=1.0, weight_decay=0.25) == pytest.approx([(2.125 + 4) / 2])
    # eta_t = 1/2 and 1/4: in round 0 a quarter of the distance is left, and in round 1 (3/4)^2 of it.
    decayed = models_after(fd.algorithms.fedavg(), lr=0.5, lr_decay=0.5)
    assert decayed == pytest.approx([4.875, 6.5 - (6.5 - 4.875) * 9 / 16])


def small(factory):
    """Returns the algorithm with 0.1 for every hyper-parameter that has no default.

    Its weight decay is 0, because weight decay changes a model even if all gradients are 0.
    """
    parameters = inspect.signature(factory).parameters
    required = [p.name for p in parameters.values() if p.default is p.empty]
    return factory(**dict.fromkeys(required, 0.1), **({"weight_decay": 0.0} if "weight_decay" in parameters else {}))


@pytest.fixture(scope="module", params=list(ALGORITHMS))
def simulation(request) -> fd.Simulation:
    return contract_simulation(small(ALGORITHMS[request.param]))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(simulation, check) -> None:
    check(simulation)


TIMINGS = {"synchronous": {}, "asynchronous": {"clock": fd.clock.asynchronous(4, "polynomial", max_staleness=1)}}


@pytest.mark.thorough
@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_two_devices_give_the_results_of_one(name, timing) -> None:
    """Sampled cohorts, client states sharded over the devices, and clients that drop out or stop early."""
    algorithm, states = small(ALGORITHMS[name]), []
    if TIMINGS[timing] and (algorithm.survey is not None or Needs.of(algorithm.requires).one_version):
        pytest.skip("its rounds are synchronous")
    for devices, bank in ((1, "device"), (2, "sharded")):
        mesh = fd.clients_mesh(jax.devices()[:devices])
        sim = contract_simulation(algorithm, mesh=mesh, bank=bank, lanes=1, **TIMINGS[timing])
        state, _ = sim.run(sim.init(jax.random.key(5)), 4, eval_every=0, progress=False)
        states.append(jax.device_get((state.server, jax.tree.map(lambda a: a[:6], state.clients), state.clock)))
    for one, two in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-3, atol=1e-5 * np.abs(one).max(initial=1))


def test_the_contract_is_checked() -> None:
    """Each fault breaks another part of the contract."""
    fedavg = fd.algorithms.fedavg()

    def restless(server, mean, context):
        return server._replace(params=jax.tree.map(lambda w, D: w + D + 0.01, server.params, mean))

    def ascending(server, mean, context):
        return server._replace(params=jax.tree.map(lambda w, D: w - 100 * D, server.params, mean))

    def per_batch(server, client, work):
        result = fedavg.client_update(server, client, work)
        return result._replace(metrics=result.metrics | {"size": jnp.ones(2)})

    faults = {
        "the loss must decrease": {"server_update": ascending},
        "the model must not move": {"server_update": restless},
        "size.* scalar": {"client_update": per_batch},
    }
    for message, fault in faults.items():
        with pytest.raises((AssertionError, ValueError), match=message):
            check_contract(fedavg._replace(**fault, name="faulty"))
    with pytest.raises(ValueError, match=r"call the factory, such as fd.algorithms.fedavg\(\)"):
        check_contract(fd.algorithms.fedavg)


def test_the_name_of_the_algorithm_is_registered(simulation) -> None:
    assert simulation.algorithm.name in ALGORITHMS
