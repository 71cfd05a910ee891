"""The results do not depend on the layout in which a network keeps its parameters (`Model.output_axes`)."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from small import thorough

import fedjax_drift as fd
from fedjax_drift import axes
from fedjax_drift.algorithms import ALGORITHMS
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.leaves import path_of

SHAPES = {"query": (4, 2, 3), "query_bias": (2, 3), "hidden": (6, 5), "bias": (5,), "classifier": (5, 3)}
OUTPUTS = {"query": (1, 2), "query_bias": (0, 1), "hidden": 1, "bias": 0, "classifier": 1}
ORDERS = {"query": (2, 0, 1), "query_bias": (1, 0), "hidden": (1, 0), "bias": (0,), "classifier": (1, 0)}


def moved(params: Any, back: bool = False) -> Any:
    """The parameters with their axes in another order, or back in the first one."""
    orders = {name: np.argsort(order) if back else order for name, order in ORDERS.items()}
    return {name: value.transpose(orders[name]) for name, value in params.items()}


def initial(key: jax.Array) -> Any:
    keys = jax.random.split(key, len(SHAPES))
    return {name: jax.random.normal(k, shape) / 2 for k, (name, shape) in zip(keys, SHAPES.items(), strict=True)}


def network(is_moved: bool) -> fd.Model:
    """A network that meets the requirements of all algorithms. LfD requires `cosine`, and also runs without cosines."""

    def own(params: Any) -> Any:
        return moved(params, back=True) if is_moved else params

    def hidden(params: Any, x: jax.Array) -> jax.Array:
        p = own(params)
        y = jnp.tanh(jnp.einsum("bi,ihd->bhd", x, p["query"]) + p["query_bias"][None])
        return jnp.tanh(y.reshape(len(x), -1) @ p["hidden"] + p["bias"][None])

    def head(params: Any, features: jax.Array) -> jax.Array:
        return features @ own(params)["classifier"]

    places = {name: (a,) if isinstance(a, int) else a for name, a in OUTPUTS.items()}
    where = {name: tuple(ORDERS[name].index(axis) for axis in each) for name, each in places.items()}
    return fd.Model(
        lambda key: moved(initial(key)) if is_moved else initial(key),
        lambda params, x: head(params, hidden(params, x)),
        features=hidden,
        head=head,
        extractor=hidden,
        cosine=True,
        output_axes=where if is_moved else OUTPUTS,
    )


def federation() -> fd.FederatedData:
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(n, 4)), rng.integers(0, 3, n).astype(np.int32)) for n in (5, 8, 3)]
    return fd.FederatedData.from_clients(clients, test=clients[0])


def after(algorithm: fd.Algorithm, model: fd.Model, rounds: int = 3, data: fd.FederatedData | None = None) -> Any:
    """The global model after some rounds."""
    mesh, local = fd.clients_mesh(jax.devices()[:1]), fd.LocalTraining(epochs=2, batch_size=4, lr=0.3)
    sim = fd.Simulation(model, data or federation(), algorithm, local=local, cohort_size=2, mesh=mesh)
    return sim.run(sim.init(jax.random.key(1)), rounds, eval_every=0, progress=False)[0].params


def made(factory: Any, model: fd.Model) -> fd.Algorithm:
    """The algorithm with 0.1 for each required number. First models are given, because they are drawn in a layout.

    The classifier is personal, whatever the default, because this network has no normalisation.
    """
    parameters = inspect.signature(factory).parameters.values()
    options: dict[str, Any] = {each.name: 0.1 for each in parameters if each.default is each.empty}
    of_shapes = {"unlabelled": np.ones((4, 4)), "classes": 3, "features": SHAPES["classifier"][0]}
    options |= {name: value for name, value in of_shapes.items() if name in options}
    if any(each.name == "models" for each in parameters):
        options["models"] = [*map(model.init, jax.random.split(jax.random.key(2)))]
    if any(each.name == "personal" for each in parameters):
        options["personal"] = "classifier"
    return factory(**options)


def alone(factory: Any, model: fd.Model) -> tuple[fd.Algorithm, fd.Model]:
    return made(factory, model), model


def with_adapters(factory: Any, model: fd.Model) -> tuple[fd.Algorithm, fd.Model]:
    return alone(factory, fd.models.lora(model, 1, "hidden|classifier", whole="query|bias"))


def with_some(factory: Any, model: fd.Model) -> tuple[fd.Algorithm, fd.Model]:
    return alone(factory, fd.models.trainable(model, "query|hidden|^bias"))


def partly_shared(factory: Any, model: fd.Model) -> tuple[fd.Algorithm, fd.Model]:
    algorithm, model = with_adapters(factory, model)
    return fd.algorithms.partly_shared(algorithm, "classifier"), model


USES = {use.__name__: use for use in (alone, partly_shared, with_adapters, with_some)}
CASES = [("fedsol", "partly_shared")]  # it has adapters, too
CASES += [thorough("fedsol", use) for use in USES if use != "partly_shared"]
CASES += [thorough(name, use) for name in ALGORITHMS for use in ("alone", "partly_shared") if name != "fedsol"]
CASES += [thorough(name, "with_adapters") for name in ("rolora", "fedsa_lora", "fedex_lora", "flora", "flexlora")]


@pytest.mark.parametrize(("name", "use"), CASES)
def test_the_layout_has_no_influence(name, use) -> None:
    results = []
    with jax.enable_x64(True):
        for is_moved in (False, True):
            try:
                algorithm, model = USES[use](ALGORITHMS[name], network(is_moved))
                params = after(algorithm, model)
            except ConfigurationError as error:  # algorithms with personal models, for instance, are not partly shared
                if is_moved:
                    raise  # and the first layout was not refused
                pytest.skip(f"refused: {error}")
            results.append(params if model.merged is None else fd.models.merge(model, params))
    one, other = results[0], moved(results[1], back=True)
    for leaf in SHAPES:
        np.testing.assert_allclose(other[leaf], one[leaf], rtol=1e-9, atol=1e-11, err_msg=leaf)


# --- the axes of networks ---------------------------------------------------------------------------------------------


class Layers(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = linen.MultiHeadDotProductAttention(2, name="attention")(linen.Embed(9, 4, name="table")(x))
        x = linen.ConvTranspose(5, (3,), transpose_kernel=True, name="up")(x)
        return linen.Dense(3, name="dense")(linen.ConvTranspose(5, (3,), name="plain")(x).mean(1))


class NnxLayers(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(9, 4, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 4, 4, decode=False, rngs=rngs)
        self.up = nnx.ConvTranspose(4, 5, (3,), transpose_kernel=True, rngs=rngs)
        self.plain = nnx.ConvTranspose(5, 5, (3,), rngs=rngs)
        self.dense = nnx.Linear(5, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dense(self.plain(self.up(self.attention(self.table(x)))).mean(1))


def by_path(model: fd.Model) -> dict[str, tuple[int, ...]]:
    params = jax.eval_shape(model.init, jax.random.key(0))
    named = jax.tree_util.tree_map_with_path(lambda path, leaf: path_of(path), params)
    return dict(
        zip(
            jax.tree.leaves(named),
            jax.tree.leaves(axes.outputs(model.output_axes, params), is_leaf=is_axes),
            strict=True,
        )
    )


def is_axes(value: Any) -> bool:
    return isinstance(value, tuple)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_the_layers_of_flax(kind) -> None:
    ids = {"input_dtype": jnp.int32}
    made = fd.Model.from_linen(Layers(), (6,), **ids) if kind == "linen" else fd.Model.from_nnx(NnxLayers, (6,), **ids)
    found = by_path(made)
    heads = {f"attention/{name}/{leaf}" for name in ("query", "key", "value") for leaf in ("kernel", "bias")}
    several = {path: (1, 2) if path.endswith("kernel") else (0, 1) for path in heads}
    expected = several | {"table/embedding": (0,), "up/kernel": (1,), "plain/kernel": (2,), "dense/kernel": (1,)}
    expected |= {"attention/out/kernel": (2,), "dense/bias": (0,)}
    assert {path: found[path] for path in expected} == expected


def test_the_tables_of_our_networks() -> None:
    assert by_path(fd.models.encoder())["tokens"] == (0,)
    assert by_path(fd.models.text_classifier(width=4))["encoder/Embedding_0/table"] == (0,)
    assert fd.models.lenet5().output_axes is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dense": 0}, "Model.output_axes must have paths of parameters .*got 'dense'"),
        ({"hidden": 2}, r"Model.output_axes of hidden must be in -2..1, got 2: pass output_axes=\{"),
        ({"hidden": "rows"}, "Model.output_axes of hidden must be in -2..1, got 'rows'"),
        ({"hidden": ()}, r"Model.output_axes of hidden must be an axis or several axes, got \(\)"),
        (1, "Model.output_axes of bias must be in -1..0, got 1"),
    ],
)
def test_wrong_axes_are_refused(given, message) -> None:
    model = network(False)._replace(output_axes=given)
    with pytest.raises(ConfigurationError, match=message):
        fd.Simulation(model, federation(), fd.algorithms.fedavg(), cohort_size=2)


def test_one_axis_for_all_parameters() -> None:
    assert by_path(fd.models.linear()._replace(output_axes=0)) == {
        "classifier/dense/bias": (0,),
        "classifier/dense/kernel": (0,),
    }


# --- PyTorch ----------------------------------------------------------------------------------------------------------


class Flax(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = linen.relu(linen.Conv(4, (3, 3), padding="VALID", name="conv")(x))
        return linen.Dense(3, name="dense")(linen.tanh(linen.Dense(5, name="hidden")(x.mean((1, 2)))))


def torch_network() -> Any:
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.hidden, self.dense = nn.Conv2d(2, 4, 3), nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: Any) -> Any:
            return self.dense(self.hidden(self.conv(x).relu().mean((2, 3))).tanh())

    return Net()


def in_torch(params: Any) -> Any:
    order = {1: (0,), 2: (1, 0), 4: (3, 2, 0, 1)}
    names = {"kernel": "weight", "bias": "bias"}
    return {n: {names[k]: v.transpose(order[v.ndim]) for k, v in layer.items()} for n, layer in params.items()}


@pytest.mark.thorough
def test_fedsol_is_the_same_from_flax_and_from_pytorch() -> None:
    pytest.importorskip("torch", reason="needs PyTorch")
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(n, 6, 6, 2)), rng.integers(0, 3, n).astype(np.int32)) for n in (5, 8, 3)]
    data, results = fd.FederatedData.from_clients(clients), []
    with jax.enable_x64(True):
        flax = fd.Model.from_linen(Flax(), (6, 6, 2))
        start = jax.tree.map(lambda a: a.astype(jnp.float64), flax.init(jax.random.key(0)))
        torch = fd.Model.from_torch(torch_network().double(), (6, 6, 2), input_dtype=jnp.float64)
        for model, params in ((flax, start), (torch, in_torch(start))):
            model = model._replace(init=lambda key, params=params: params)
            results.append(after(fd.algorithms.fedsol(), model, 7, data))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-11), results[1], in_torch(results[0]))


@pytest.mark.thorough
def test_weights_of_pytorch_that_are_stored_the_other_way() -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    nn = torch.nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.up, self.dense = nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 6, 3), nn.Linear(5, 3)
            self.w, self.v, self.b = (nn.Parameter(torch.ones(shape)) for shape in ((6, 5), (5, 5), (5,)))

        def forward(self, x: Any) -> Any:
            x = self.up(self.conv(x)).mean((2, 3)) @ self.w
            return self.dense(torch.addmm(self.b, x, self.v))

    found = by_path(fd.Model.from_torch(Net, (8, 8, 3)))
    assert {path for path, axis in found.items() if axis == (1,)} == {"up/weight", "w", "v"}
    assert {*found.values()} == {(0,), (1,)}
