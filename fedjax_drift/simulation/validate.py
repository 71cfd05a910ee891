"""Checks the model, the data, the local training, the cohort and the state, and that they fit together.

A check that fails raises ConfigurationError. The checks run before a round is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_drift import checks, factors
from fedjax_drift.batch_norm import Statistics
from fedjax_drift.data.federated import FederatedData, integers_as_int32
from fedjax_drift.devices.memory import memory_of
from fedjax_drift.local import LocalTraining
from fedjax_drift.masks import takes_mask
from fedjax_drift.model import FUNCTIONS, Model, cross_entropy
from fedjax_drift.participation import Participation
from fedjax_drift.participation.cohorts import short_name
from fedjax_drift.round.aggregation import Aggregation
from fedjax_drift.round.engine import Engine
from fedjax_drift.round.sources import functions_of
from fedjax_drift.round.traffic import summed_message
from fedjax_drift.shift.rule import Owner, Shift
from fedjax_drift.simulation.ascent import check_optimizer
from fedjax_drift.tree import check_layout, layout, nbytes
from fedjax_drift.types import THREEFRY, Algorithm, Params, ServerState


def check_types(model: Any, data: Any, algorithm: Any, local: Any) -> None:
    """Checks the types of these arguments. A factory, such as `fedavg` without parentheses, is rejected."""
    models = "fd.models.lenet5(), fd.Model(init, apply) or fd.Model.from_linen(module, input_shape)"
    for name, value, kind, hint in (
        ("model", model, Model, models),
        ("data", data, FederatedData, "fd.datasets.load(...) or fd.FederatedData.from_clients(...)"),
        ("algorithm", algorithm, Algorithm, "fd.algorithms.fedavg() (with the parentheses)"),
        ("local", local, LocalTraining, "fd.LocalTraining(...)"),
    ):
        if not isinstance(value, kind):
            if name == "model" and "equinox" in {base.__module__.partition(".")[0] for base in type(value).__mro__}:
                hint = "fd.Model(init, apply), made from the arrays and the function of the Equinox module"
            checks.refuse(f"{name} must be of type {kind.__name__}", type(value).__name__, f"pass {hint}")
    checks.fields(model)
    checks.fields(algorithm)
    for name, takes in {**FUNCTIONS, "loss": 2}.items():
        if (function := getattr(model, name)) is not None:
            checks.function(f"Model.{name}", function, "or with a last argument mask", takes + takes_mask(function))
    if model.statistics is not None and not isinstance(model.statistics, Statistics):
        fix = 'pass the option to Model.from_linen(module, input_shape, statistics="average"), or leave it out'
        checks.refuse("Model.statistics must be of type Statistics", checks.shown(model.statistics), fix)


MISSING = {
    "features": "pass Model(features=...), the representation before the classifier; the models of fd.models have it",
    "head": "pass Model(head=...), the classifier without the other layers; the models of fd.models have it",
    "extractor": "pass Model(extractor=...), the input of the projection head; fd.models.simple_cnn() has it",
    "cosine": "use a model of fd.models with cosine=True; in your own model, end apply with fd.models.cosine_logits "
    "and pass Model(cosine=True)",
}


def check_requirements(algorithm: Algorithm, model: Model, local: LocalTraining, has_test: bool) -> None:
    """Checks that the model, the local training and the data meet the requirements of the algorithm."""
    needs = algorithm.requires
    if needs.epochs and (local.steps is not None or local.epochs < needs.epochs):
        given = local.epochs if local.steps is None else f"{local.steps} steps"
        fix = f"pass LocalTraining(epochs={needs.epochs}), or --epochs {needs.epochs} on the command line"
        checks.refuse(f"{algorithm.name} needs at least {needs.epochs} epochs", given, fix)
    for name, fix in MISSING.items():
        if getattr(needs, name) and not getattr(model, name):
            needed = "whose logits are cosines" if name == "cosine" else f"with {name}"
            checks.refuse(f"{algorithm.name} needs a model {needed}", "one without", fix)
    if needs.adapters and not has_adapters(model):
        fix = "pass fd.models.lora(model, rank=8)"
        checks.refuse(f"{algorithm.name} needs a model that trains low-rank adapters, A and B", "one without", fix)
    if needs.classifier and model.loss is not cross_entropy:
        what = f"{algorithm.name} needs a classifier with the default loss (softmax cross-entropy)"
        checks.refuse(what, "a model with another loss", "leave Model(loss=...) out")
    if needs.optimizer == "sgd" and (local.optimizer is not None or checks.used(local.momentum)):
        fix = "leave momentum and optimizer out of LocalTraining"
        checks.refuse(f"{algorithm.name} needs plain local SGD", repr(local), fix)
    if needs.optimizer == "sgd or momentum" and local.optimizer is not None:
        fix = "leave optimizer out of LocalTraining"
        checks.refuse(f"{algorithm.name} needs local SGD, with or without momentum", repr(local), fix)
    if algorithm.observe is not None and not has_test:
        fix = "pass test=(x, y)"
        checks.refuse(f"{algorithm.name} evaluates the model in every round and needs a test set", "none", fix)


def check_params(params: Params, known: Params) -> None:
    """Checks the first parameters of a run. known: those of a state, whose adapters may have arrays w."""
    expected = known if factors.split(params)[1] else factors.split(known)[0]
    check_layout(params, expected, "params must be shaped like model.init's")


def has_adapters(model: Model) -> bool:
    """Whether the parameters have low-rank adapters with both factors."""
    key = jax.random.key(0, impl=THREEFRY)
    return model.products is not None and bool(factors.adapters(jax.eval_shape(model.init, key)))


def check_statistics(kept: str, algorithm: Algorithm, aggregation: Aggregation) -> None:
    """Checks that the algorithm and the aggregation can work with running statistics. kept: as in `Statistics`."""
    if kept != "frozen" and algorithm.requires.one_model:
        what = f"{algorithm.name} trains more than one model, which would share their running statistics"
        checks.refuse(what, f"statistics={kept!r}", 'use statistics="frozen", or GroupNorm instead of BatchNorm')
    if kept == "local" and algorithm.observe is not None:
        got = 'statistics="local", with which only the clients have running statistics'
        checks.refuse(f"{algorithm.name} uses the accuracy of the global model", got, 'use statistics="average"')
    if kept == "average" and aggregation.noise_multiplier is not None:
        what = f"the noise of {aggregation.name} can make a running variance negative"
        fix = 'use statistics="local" or "frozen", or GroupNorm instead of BatchNorm'
        checks.refuse(what, 'statistics="average"', fix)


def warn_of_initial_statistics(models: Sequence[Model]) -> None:
    """Warns if a global model is evaluated with its initial running statistics, because only the clients update
    them."""
    if any(model.statistics is not None and model.statistics.kept == "local" for model in models):
        checks.warn(
            'with statistics="local" the global model has only the initial running statistics, so its scores say '
            "little: use sim.evaluate_clients(state), which evaluates each client with its own, and eval_every=0"
        )


def check_scores(algorithm: Algorithm, t: int, scores: dict[str, Any]) -> None:
    """Checks that the scores that the algorithm uses in its updates are finite. t: the round."""
    for name, value in scores.items():
        if not np.isfinite(value):
            what = f"round {t}: the evaluation that {algorithm.name} uses must be finite"
            fix = "the model has diverged; lower lr or set clip_norm, and start from an earlier state"
            checks.refuse(what, f"a {name} of {value}", fix)


def check_aggregation(
    aggregation: Any, algorithm: Algorithm, participation: Participation, over_selected: bool, data: FederatedData
) -> None:
    """Checks the aggregation rule. For a private rule, the privacy accounting must hold for the participation and the
    data."""
    if not isinstance(aggregation, Aggregation):
        fix = "pass fd.aggregation.clipped(1.0), for example; None means the weighted mean"
        what = "aggregation must be an fd.aggregation.Aggregation"
        checks.refuse(what, checks.shown(aggregation), checks.place_of(aggregation) or fix)
    checks.fields(aggregation, "see fd.aggregation.Aggregation")
    if algorithm.requires.weights and (participation.weights == "uniform" or participation.expected):
        what = f"{algorithm.name} needs a participation rule that keeps the weights of the clients"
        checks.refuse(what, participation.name, 'pass weighting="uniform"')
    if aggregation.noise_multiplier is not None and algorithm.requires.weights:
        what = f"{algorithm.name} needs an aggregation that keeps the weights of the clients"
        checks.refuse(what, f"{aggregation.name}, which weights all by 1", 'pass weighting="uniform"')
    joint = aggregation.joint
    if joint is not None and algorithm.requires.weights:
        what = f"{algorithm.name} needs an aggregation that keeps the weights of the clients"
        checks.refuse(what, f"{aggregation.name}, which weights all by 1", 'pass weighting="uniform"')
    if joint is not None and participation.expected:
        what = f"{participation.name} divides by the expected weight of the clients that it selects"
        checks.refuse(what, f"{aggregation.name}, which weights all by 1", "use another participation rule")
    if joint is not None and algorithm.survey is not None and jax.tree.leaves(joint.init({"w": jnp.zeros(1)})):
        what = f"{aggregation.name} keeps a state for the one message of a client"
        checks.refuse(what, f"{algorithm.name}, whose clients send two", "use another rule")
    if participation.expected and (over_selected or aggregation.noise_multiplier is not None):
        given, reason = aggregation.name, "weighs all clients by 1"
        if over_selected:
            given, reason = "over_selection", "drops the slowest of the clients that the rule counts"
        what = f"{participation.name} divides by the expected weight of the clients that it selects"
        checks.refuse(what, f"{given}, which {reason}", "use another participation rule, or leave it out")
    if aggregation.noise_multiplier is not None and algorithm.survey is not None:
        what = f"the privacy accounting of {aggregation.name} is that of one message per client and round"
        fix = "use another algorithm, such as fd.algorithms.mimelite()"
        checks.refuse(what, f"{algorithm.name}, whose clients send two", fix)
    if aggregation.poisson and short_name(participation) != "bernoulli":
        what = f'sampling must be "bernoulli" for the privacy accounting of {aggregation.name}'
        checks.refuse(what, repr(participation.name), 'pass sampling="bernoulli"')
    if aggregation.noise_multiplier is not None and (over_selected or data.redeal is not None):
        source = "over_selection" if over_selected else "data.redealt()"
        what = f"the privacy accounting of {aggregation.name} needs clients that do not influence each other"
        got = f"{source}, with which one client changes the messages of others or whether they are aggregated"
        checks.refuse(what, got, "leave it out")


def check_rule(aggregation: Aggregation, message: Callable[[], Any], K: int) -> None:
    """Checks that the functions of an aggregation rule fit each other and the messages of the algorithm.

    message: ``message()`` returns the shapes of what one client adds to the sum.
    """
    if aggregation.check is not None:
        aggregation.check(K)
    if aggregation.recipe is not None and not aggregation.recipe.replaced(aggregation):
        return  # a rule of the library

    def mean(sent: Any) -> tuple:
        state, weight = aggregation.init(), jnp.ones(())
        part, weight = aggregation.contribute(state, sent, weight)
        return aggregation.combine(state, part, weight, jax.random.key(0, impl=THREEFRY), K), (sent, state)

    form = "contribute(state, message, weight) -> (part, weight) and "
    form += "combine(state, total, weight, key, K) -> (mean, state)"
    what = f"{aggregation.name} must have the functions {form}"
    found, needed = ([name for name, *_ in layout(each)] for each in checks.shapes_of(what, mean, message()))
    if found != needed:
        got = f"{checks.listed(found)} instead of {checks.listed(needed)}"
        checks.refuse(f"{what}, where mean has the structure of a message", got)


def check_stack(engine: Engine, params: Params) -> None:
    """Checks that the messages of a round fit into the memory of a device, if a source sees all of them at once."""
    seeing = functions_of(engine.sources, "together")
    if not seeing:
        return
    source, K = seeing[0][0], engine.most_clients
    if engine.receivers is not None:
        topology = next(each for each in engine.sources if each.receivers is not None)
        what = f"a topology with one server, fd.topology.star(), is needed by {source.described}"
        checks.refuse(what, topology.title, "leave topology= out")
    of_one, room = nbytes(summed_message(engine, params)), memory_of(engine.mesh)
    if 2 * K * of_one > room:  # what sees them makes another copy
        what = (
            f"{source.described} needs all messages of a round at once, twice {of_one / 2**20:.1f} MiB for each client"
        )
        most = int(room // (2 * of_one))
        fix = f"pass cohort_size={most}, for example" if most else "use a smaller model"
        checks.refuse(f"{what}, so a device with {room / 2**30:.1f} GiB has room for at most {most} clients", K, fix)


def check_key(key: Any) -> jax.Array:
    """Checks a key, and returns it as a typed key. A raw key, uint32 [2], is wrapped."""
    if isinstance(key, jax.Array) and key.dtype == jnp.uint32 and key.shape == (2,):
        key = jax.random.wrap_key_data(key, impl=THREEFRY)
    if not (isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
        checks.refuse("key must be a JAX key such as jax.random.key(0)", checks.shown(key))
    if key.shape != ():
        fix = "jax.vmap(sim.init)(keys) makes many states"
        checks.refuse("key must be a single key", f"an array of keys {list(key.shape)}", fix)
    if str(jax.random.key_impl(key)) != THREEFRY:
        fix = f'pass jax.random.key(0, impl="{THREEFRY}")'
        checks.refuse(f"key must be a key of JAX's generator {THREEFRY}", jax.random.key_impl(key), fix)
    return key


def check_state(state: Any) -> None:
    """Checks that the state is a `ServerState`."""
    if not isinstance(state, ServerState):
        fix = "sim.init(key) returns one; round_fn and run return a pair whose first element is the state"
        checks.refuse("state must be a ServerState", type(state).__name__, fix)


def x64() -> bool:
    """Whether JAX computes in 64 bits (``jax_enable_x64``)."""
    return jax.dtypes.canonicalize_dtype(np.float64) == np.float64


def check_x64(before: bool) -> None:
    """Checks that JAX's precision is still that of the simulation, whose data are on the devices already."""
    if x64() != before:
        fix = "create the simulation again after the change"
        checks.refuse(f"jax_enable_x64 must be {before}, as when the simulation was created", not before, fix)


def check_cohort(cohort: Any, N: int, what: str = "cohort") -> jax.Array:
    """Checks that the ids of a cohort are different and in 0..N-1, and returns them as int32 [K]."""
    try:
        ids = np.asarray(cohort)
    except Exception as error:  # ragged lists, or an object of an unknown type
        checks.refuse(f"{what} must be a one-dimensional list of client ids", checks.shown(cohort), cause=error)
    if ids.ndim != 1 or len(ids) == 0 or not np.issubdtype(ids.dtype, np.integer):
        got = f"{ids.dtype}{list(ids.shape)}"
        checks.refuse(f"{what} must be a one-dimensional list of at least 1 integer client id", got)
    if ids.min() < 0 or ids.max() >= N:
        bad = ids[(ids < 0) | (ids >= N)][0]
        checks.refuse(f"{what} must contain client ids in 0..{N - 1}", bad)
    values, counts = np.unique(ids, return_counts=True)
    if counts.max() > 1:
        got = f"client {values[counts.argmax()]} {counts.max()} times"
        checks.refuse(f"{what} must contain each client at most once", got)
    return jnp.asarray(ids, jnp.int32)


def check_local(local: LocalTraining, params: Params, max_size: int) -> None:
    """Checks that the local steps fit in int32, and that the optimizer can be used."""
    if local.num_steps(max_size) >= 2**31:
        checks.refuse("epochs must give each client fewer than 2**31 local steps", local.epochs, "use fewer epochs")
    if local.optimizer is not None:
        check_optimizer(local.optimizer, local.direction, params)


def check_augment(local: LocalTraining, data: FederatedData, decode: Callable) -> None:
    """Checks that the augmentation returns one example like the one that it gets. decode: see `check_model`."""
    if local.augment is not None:
        key, x, _ = _one_example(data, decode)
        _check_keeps(("augment", "augment"), "(key, x) -> x", local.augment, (key, x), x)


def check_shift(option: str, shift: Shift, data: FederatedData) -> None:
    """Checks that the shift, which is the option of this name, returns one example like the one that it gets."""
    key, x, y = _one_example(data, data.decoding)

    def change(key: jax.Array, number: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        return shift.change(key, number, Owner(number, data.num_clients, num_classes=data.num_classes), x, y)

    arguments = (key, jax.ShapeDtypeStruct((), jnp.int32), x, y)
    _check_keeps((option, shift.name), "(key, t, client, x, y) -> (x, y)", change, arguments, (x, y))


def _one_example(data: FederatedData, decode: Callable) -> tuple[Any, Any, Any]:
    """The shapes and dtypes of a key, and of the input and the label of one example."""
    stored = jax.ShapeDtypeStruct(data.x.shape[1:], jax.dtypes.canonicalize_dtype(data.x.dtype))
    label = jax.eval_shape(lambda: jnp.asarray(integers_as_int32(data.y[:1]))[0])
    return jax.eval_shape(lambda: jax.random.key(0, impl=THREEFRY)), jax.eval_shape(decode, stored), label


def _check_keeps(names: tuple[str, str], form: str, function: Callable, arguments: tuple, example: Any) -> None:
    """Checks that a function of one example returns arrays with the shapes and the dtypes of ``example``.

    names: of the option, and of the function.
    """
    option, name = names
    shown = " and ".join(f"{a.dtype}{[*a.shape]}" for a in jax.tree.leaves(example))
    result = checks.shapes_of(f"{option} must be a function {form} of one example, {shown}", function, *arguments)
    check_layout(result, example, f"{name} must keep the shapes and the dtypes of an example")
