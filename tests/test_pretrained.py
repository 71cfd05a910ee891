from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_drift as fd
from fedjax_drift.models import load_params, save_params

KEY = jax.random.key(3)


def same(one, other) -> bool:
    return jax.tree.all(jax.tree.map(lambda a, b: a.dtype == b.dtype and bool((a == b).all()), one, other))


def test_parameters_come_back_from_their_file(tmp_path):
    models = {
        "named": fd.models.linear((4,), num_classes=2),
        "bare": fd.Model(init=lambda key: jax.random.normal(key, (3,)), apply=lambda w, x: x @ w),
        "listed": fd.Model(init=lambda key: [jnp.ones(2), (jnp.zeros((1, 2)),)], apply=lambda w, x: x),
    }
    for name, model in models.items():
        params = model.init(KEY)
        save_params(params, tmp_path / name)
        assert same(load_params(model, tmp_path / name), params)


def test_a_file_that_does_not_fit_is_refused(tmp_path):
    small, large = fd.models.linear((4,), num_classes=2), fd.models.linear((5,), num_classes=2)
    save_params(small.init(KEY), tmp_path / "small.npz")
    with pytest.raises(
        ValueError, match=r"got shape \[4, 2\] for .*kernel, which is shape \[5, 2\] in the model .1 arrays"
    ):
        load_params(large, tmp_path / "small.npz")
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(
        ValueError, match="it is a safetensors file, not an npz: .*safetensors.numpy.load_file"
    ) as error:
        load_params(small, tmp_path / "a.safetensors")
    assert "pickle" not in str(error.value)
    np.savez(tmp_path / "fewer.npz", np.zeros(3))
    with pytest.raises(ValueError, match="got nothing for classifier/dense/bias, which is"):
        load_params(small, tmp_path / "fewer.npz")
    np.savez(tmp_path / "more.npz", **dict(np.load(tmp_path / "small.npz")), another=np.zeros(3))
    with pytest.raises(ValueError, match=r"got shape \[3\] for another, which is nothing in the model"):
        load_params(small, tmp_path / "more.npz")
    with pytest.raises(FileNotFoundError):
        load_params(small, tmp_path / "none.npz")
    np.save(tmp_path / "one.npy", np.zeros(3))
    (tmp_path / "text.npz").write_text("no archive")
    (tmp_path / "empty.npz").write_bytes(b"")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "small.npz").read_bytes()[:-40])
    for name in ("one.npy", "text.npz", "empty.npz", "cut.npz"):
        with pytest.raises(ValueError, match=f"{name}: it is no npz"):
            load_params(small, tmp_path / name)


# --- torchvision's ResNet-18 ------------------------------------------------------------------------------------------


def torchvision(blocks: int = 2) -> dict[str, np.ndarray]:
    """Shaped and named as ``resnet18().state_dict()`` (resnet34's has more blocks), a number of its own in each."""
    shapes: dict[str, tuple[int, ...]] = {}

    def layer(name: str, norm: str, outputs: int, inputs: int, size: int) -> None:
        shapes[f"{name}.weight"] = (outputs, inputs, size, size)
        shapes.update({f"{norm}.{what}": (outputs,) for what in ("weight", "bias", "running_mean", "running_var")})
        shapes[f"{norm}.num_batches_tracked"] = ()

    layer("conv1", "bn1", 64, 3, 7)
    inputs = 64
    for stage in range(1, 5):
        width = 64 * 2 ** (stage - 1)
        for block in range(blocks):
            place = f"layer{stage}.{block}"
            layer(f"{place}.conv1", f"{place}.bn1", width, inputs, 3)
            layer(f"{place}.conv2", f"{place}.bn2", width, width, 3)
            if inputs != width:
                layer(f"{place}.downsample.0", f"{place}.downsample.1", width, inputs, 1)
            inputs = width
    shapes |= {"fc.weight": (1000, 512), "fc.bias": (1000,)}
    return {name: np.full(shape, i + 1, np.float32) for i, (name, shape) in enumerate(shapes.items())}


def resnet18(**options) -> fd.Model:
    """Whose initial parameters are all -1."""
    model = fd.models.resnet18(**options)
    shapes = jax.eval_shape(model.init, KEY)
    return model._replace(init=lambda key: jax.tree.map(lambda leaf: -jnp.ones(leaf.shape, leaf.dtype), shapes))


def leaves(params) -> dict[str, jax.Array]:
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in jax.tree.leaves_with_path(params)}


def test_torchvisions_resnet18_fills_ours(tmp_path):
    state = torchvision()
    state["conv1.weight"][5, 2, 1, 4] = 0.5
    np.savez(tmp_path / "resnet18.npz", **state)
    model = resnet18(num_classes=7, input_shape=(64, 64, 3), stem=7)
    found, fresh = leaves(load_params(model, tmp_path / "resnet18.npz")), leaves(model.init(KEY))
    assert {name: x.shape for name, x in found.items()} == {name: x.shape for name, x in fresh.items()}
    assert found["conv/kernel"][1, 4, 2, 5] == 0.5  # [height, width, in, out]
    for ours, theirs in {
        "norm/scale": "bn1.weight",
        "blocks_0/Conv_0/kernel": "layer1.0.conv1.weight",
        "blocks_1/Conv_1/kernel": "layer1.1.conv2.weight",
        "blocks_2/GroupNorm_2/bias": "layer2.0.downsample.1.bias",
        "blocks_6/Conv_2/kernel": "layer4.0.downsample.0.weight",
        "blocks_7/GroupNorm_1/scale": "layer4.1.bn2.weight",
    }.items():
        assert found[ours].min() == state[theirs].min(), ours
    drawn = {name for name in found if found[name].min() == -1}
    assert drawn == {name for name in found if "classifier" in name}
    kept = [name for name in state if not re.search("running|tracked|fc", name)]
    assert len({float(x.max()) for name, x in found.items() if name not in drawn}) == len(kept)

    small_stem = leaves(load_params(resnet18(), tmp_path / "resnet18.npz"))
    assert {name for name in small_stem if small_stem[name].min() == -1} == {"conv/kernel", *drawn}


def test_a_deeper_resnet_is_refused(tmp_path: Path):
    np.savez(tmp_path / "resnet34.npz", **torchvision(blocks=3))
    with pytest.raises(ValueError, match=r"for layer1.2.conv1.weight, which is nothing in the model"):
        load_params(resnet18(stem=7), tmp_path / "resnet34.npz")
