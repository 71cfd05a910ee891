from __future__ import annotations

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

import fedjax_drift as fd
from fedjax_drift.models import load_params, save_params

pytestmark = pytest.mark.thorough

KEY = jax.random.key(3)
W, H, VOCABULARY, LENGTH, LAYERS = 8, 2, 11, 6, 3
RNG = np.random.default_rng(0)
DRAWN = lambda *shape: RNG.normal(0, 0.5, shape).astype("f4")  # noqa: E731


def same(one, other) -> bool:
    return jax.tree.all(jax.tree.map(lambda a, b: a.dtype == b.dtype and bool((a == b).all()), one, other))


def test_saved_parameters_are_loaded_unchanged(tmp_path):
    models = {
        "named": fd.models.linear((4,), num_classes=2),
        "bare": fd.Model(init=lambda key: jax.random.normal(key, (3,)), apply=lambda w, x: x @ w),
        "listed": fd.Model(init=lambda key: [jnp.ones(2), (jnp.zeros((1, 2)),)], apply=lambda w, x: x),
    }
    for name, model in models.items():
        params = model.init(KEY)
        save_params(params, tmp_path / name)
        assert same(load_params(model, tmp_path / name), params)


@pytest.mark.parametrize("ending", ["npz", "safetensors"])
@pytest.mark.parametrize(
    "how", [{}, {"mean": 0.3, "std": 0.2}, {"mean": [0.1, 0.2, 0.3], "std": [0.5, 1, 2]}, {"dtype": np.float32}]
)
def test_a_file_says_which_inputs_its_model_expects(ending, how, tmp_path):
    if ending == "safetensors":
        pytest.importorskip("safetensors")
    x = np.random.default_rng(0).integers(0, 256, (6, 4, 4, 3)).astype(how.pop("dtype", np.uint8))
    data = fd.FederatedData(x, np.zeros(6, int), [6], **how)
    model = fd.models.linear((4, 4, 3), num_classes=2)
    save_params(model.init(KEY), file := tmp_path / f"model.{ending}", data)
    if ending == "npz":
        saved = np.load(file)
    else:
        saved = __import__("safetensors.numpy").numpy.load_file(file)
    inputs = (x / saved["inputs/divided_by"] - saved["inputs/mean"]) / saved["inputs/std"]
    np.testing.assert_allclose(inputs, data.decode(x), rtol=1e-5, atol=1e-6)
    assert same(load_params(model, file), model.init(KEY))
    assert same(fd.models.load(file), model.init(KEY))


def test_a_file_that_does_not_fit_is_refused(tmp_path):
    small, large = fd.models.linear((4,), num_classes=2), fd.models.linear((5,), num_classes=2)
    save_params(small.init(KEY), tmp_path / "small.npz")
    np.savez(tmp_path / "fewer.npz", np.zeros(3))
    np.savez(tmp_path / "more.npz", **dict(np.load(tmp_path / "small.npz")), another=np.zeros(3))
    np.save(tmp_path / "one.npy", np.zeros(3))
    (tmp_path / "text.npz").write_text("no archive")
    (tmp_path / "empty.npz").write_bytes(b"")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "small.npz").read_bytes()[:-40])
    for model, name, said in (
        (large, "small.npz", r"got shape \[4, 2\] for .*kernel, which is shape \[5, 2\] in the model .1 arrays"),
        (small, "fewer.npz", "got nothing for classifier/dense/bias, which is"),
        (small, "more.npz", r"got shape \[3\] for another, which is nothing in the model"),
        (small, "one.npy", "which is no npz .*: make one .*numpy.savez; a PyTorch file becomes one by safetensors"),
        *((small, name, "which is no npz") for name in ("text.npz", "empty.npz", "cut.npz")),
        (small, "none.npz", "none.npz"),
    ):
        with pytest.raises(FileNotFoundError if name == "none.npz" else ValueError, match=said):
            load_params(model, tmp_path / name)


# --- torchvision's ResNet-18 ------------------------------------------------------------------------------------------


def torchvision(blocks: int = 2) -> dict[str, np.ndarray]:
    """Returns arrays with the names and shapes of ``resnet18().state_dict()``. Each array has its own constant value.

    blocks: the number of blocks per stage, 2 for resnet18. Deeper networks such as resnet34 have more.
    """
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
    """Returns a ResNet-18 whose initial parameters are all -1."""
    model = fd.models.resnet18(**options)
    shapes = jax.eval_shape(model.init, KEY)
    return model._replace(init=lambda key: jax.tree.map(lambda leaf: -jnp.ones(leaf.shape, leaf.dtype), shapes))


def leaves(params) -> dict[str, jax.Array]:
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in jax.tree.leaves_with_path(params)}


def test_parameters_of_torchvisions_resnet18_are_loaded(tmp_path):
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


# --- PyTorch's layout -------------------------------------------------------------------------------------------------


def torch_conv2d(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, padding: int) -> np.ndarray:
    """Computes torch.nn.functional.conv2d in NumPy, for images [B, C, H, W] and a weight [out, in, k, k]."""
    x = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    windows = np.lib.stride_tricks.sliding_window_view(x, weight.shape[2:], (2, 3))  # [B, C, H, W, k, k]
    return np.einsum("bchwij,ocij->bohw", windows, weight) + bias[:, None, None]


def test_to_torch_uses_pytorchs_layouts_and_flattening():
    model = fd.models.lenet5(10)
    params = model.init(KEY)
    state = fd.models.to_torch(params)
    images = RNG.normal(size=(3, 28, 28, 1)).astype("f4")
    x = images.transpose(0, 3, 1, 2)
    for i, padding in enumerate((2, 0)):
        x = np.maximum(torch_conv2d(x, state[f"convs_{i}.weight"], state[f"convs_{i}.bias"], padding), 0)
        B, C, height, width = x.shape
        x = x.reshape(B, C, height // 2, 2, width // 2, 2).max((3, 5))
    x = x.reshape(3, -1)  # flatten(1)
    for name in ("denses_0", "denses_1"):
        x = np.maximum(linear(x, state, name), 0)
    np.testing.assert_allclose(linear(x, state, "classifier.dense"), model.apply(params, images), rtol=1e-4, atol=1e-5)


def test_to_torch_unstacks_blocks_and_returns_copies():
    params = fd.models.vit(5, (6, 4, 3), 2, width=W, depth=LAYERS, heads=H).init(KEY)
    state = fd.models.to_torch(params)
    query = params["blocks"]["attention"]["query"]["kernel"]
    np.testing.assert_array_equal(state["blocks.2.attention.query.weight"], query[2].T)
    np.testing.assert_array_equal(state["blocks.0.mlp_norm.weight"], params["blocks"]["mlp_norm"]["scale"][0])
    assert sum(array.size for array in state.values()) == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert all(array.flags.c_contiguous and array.flags.writeable for array in state.values())
    resnet = fd.models.to_torch(fd.models.resnet18().init(KEY))
    assert resnet["blocks_2.Conv_2.weight"].shape == (128, 64, 1, 1) and "norm.weight" in resnet
    listed = fd.models.to_torch({"blocks": [{"kernel": np.ones((2, 3))}]})  # blocks of a user's model are not stacked
    assert {name: array.shape for name, array in listed.items()} == {"blocks.0.weight": (3, 2)}


# --- safetensors ------------------------------------------------------------------------------------------------------


def test_safetensors_files_keep_every_dtype(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    params = {
        "a": {"kernel": jnp.arange(6.0).reshape(2, 3), "bias": jnp.ones(3, jnp.bfloat16) / 3},
        "turned": np.asfortranarray(np.arange(6.0, dtype="f4").reshape(2, 3)),
        "number": jnp.float32(2.5),
    }
    model = fd.Model(init=lambda key: params, apply=lambda p, x: x)
    save_params(params, tmp_path / "a.safetensors")
    assert same(load_params(model, tmp_path / "a.safetensors"), params)
    assert set(numpy.load_file(tmp_path / "a.safetensors")) == {"a/kernel", "a/bias", "turned", "number"}
    with pytest.raises(ValueError, match="of the dtype bfloat16 must be saved as safetensors.* a.safetensors"):
        save_params(params, tmp_path / "a.npz")


def test_a_missing_safetensors_package_is_reported_with_its_pip_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    model = fd.models.linear((4,), num_classes=2)
    (tmp_path / "a.safetensors").write_bytes(b"")
    for call in (
        lambda: load_params(model, tmp_path / "a.safetensors"),
        lambda: save_params(model.init(KEY), tmp_path / "a.safetensors"),
    ):
        with pytest.raises(ImportError, match="pip install safetensors"):
            call()


# --- transformers of other programs, compared with a forward pass in NumPy -------------------------------------------


def torch_linear(name: str, inputs: int, outputs: int) -> dict[str, np.ndarray]:
    return {f"{name}.weight": DRAWN(outputs, inputs), f"{name}.bias": DRAWN(outputs)}


def torch_norm(name: str, scale: str = "weight", bias: str = "bias") -> dict[str, np.ndarray]:
    return {f"{name}.{scale}": 1 + DRAWN(W), f"{name}.{bias}": DRAWN(W)}


def gpt2_file() -> dict[str, np.ndarray]:
    """Returns arrays with the names and shapes of GPT-2's model.safetensors. Weights of dense layers are [in, out]."""
    file = {"wte.weight": DRAWN(VOCABULARY, W), "wpe.weight": DRAWN(LENGTH, W), **torch_norm("ln_f")}
    for i in range(LAYERS):
        file |= torch_norm(f"h.{i}.ln_1") | torch_norm(f"h.{i}.ln_2")
        file[f"h.{i}.attn.bias"] = np.tril(np.ones((1, 1, LENGTH, LENGTH), "f4"))  # a buffer, not a parameter
        for name, inputs, outputs in (
            ("attn.c_attn", W, 3 * W),
            ("attn.c_proj", W, W),
            ("mlp.c_fc", W, 4 * W),
            ("mlp.c_proj", 4 * W, W),
        ):
            file |= {f"h.{i}.{name}.weight": DRAWN(inputs, outputs), f"h.{i}.{name}.bias": DRAWN(outputs)}
    return file


def encoder_layers(prefix: str, parts: tuple[str, ...], norms: tuple[str, ...]) -> dict[str, np.ndarray]:
    file = {}
    for layer in (f"{prefix}.{i}" for i in range(LAYERS)):
        for part in (*parts, "output.dense"):
            file |= torch_linear(f"{layer}.attention.{part}", W, W)
        file |= torch_linear(f"{layer}.intermediate.dense", W, 4 * W) | torch_linear(f"{layer}.output.dense", 4 * W, W)
        file |= torch_norm(f"{layer}.{norms[0]}") | torch_norm(f"{layer}.{norms[1]}")
    return file


def bert_file() -> dict[str, np.ndarray]:
    """Returns arrays with the names and shapes of BERT's model.safetensors.

    The first layer normalisation has the old names of its parameters, "gamma" and "beta".
    """
    file = {
        "bert.embeddings.word_embeddings.weight": DRAWN(VOCABULARY, W),
        "bert.embeddings.position_embeddings.weight": DRAWN(LENGTH, W),
        "bert.embeddings.token_type_embeddings.weight": DRAWN(2, W),
        **torch_norm("bert.embeddings.LayerNorm", "gamma", "beta"),
        **torch_linear("bert.pooler.dense", W, W),
        **torch_linear("cls.seq_relationship", W, 2),
    }
    parts, norms = ("self.query", "self.key", "self.value"), ("attention.output.LayerNorm", "output.LayerNorm")
    return file | encoder_layers("bert.encoder.layer", parts, norms)


def vit_file() -> dict[str, np.ndarray]:
    """Returns arrays with the names and shapes of the model.safetensors of ViTForImageClassification.

    The images have 6x4 pixels, and the patches 2x2.
    """
    file = {
        "vit.embeddings.cls_token": DRAWN(1, 1, W),
        "vit.embeddings.position_embeddings": DRAWN(1, 7, W),
        "vit.embeddings.patch_embeddings.projection.weight": DRAWN(W, 3, 2, 2),
        "vit.embeddings.patch_embeddings.projection.bias": DRAWN(W),
        **torch_norm("vit.layernorm"),
        **torch_linear("classifier", W, 5),
    }
    parts = ("attention.query", "attention.key", "attention.value")
    return file | encoder_layers("vit.encoder.layer", parts, ("layernorm_before", "layernorm_after"))


def linear(x: np.ndarray, file: dict, name: str) -> np.ndarray:
    return x @ file[f"{name}.weight"].T + file[f"{name}.bias"]


def normed(x: np.ndarray, scale: np.ndarray, bias: np.ndarray, epsilon: float) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon) * scale + bias


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + scipy.special.erf(x / 2**0.5))


def attention(query: np.ndarray, key: np.ndarray, value: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Computes the attention of one example, one head after another.

    query, key, value: [T, W]. seen: bool [T, T], whether position i sees position j.
    """
    heads = []
    for columns in np.split(np.arange(W), H):
        scores = query[:, columns] @ key[:, columns].T / (W / H) ** 0.5
        weights = np.exp(scores - scores.max(1, keepdims=True)) * seen
        heads.append(weights / weights.sum(1, keepdims=True) @ value[:, columns])
    return np.concatenate(heads, 1)


def gpt2(file: dict, ids: np.ndarray) -> np.ndarray:
    x = file["wte.weight"][ids] + file["wpe.weight"][: len(ids)]
    conv1d = lambda x, name: x @ file[f"{name}.weight"] + file[f"{name}.bias"]  # noqa: E731
    norm = lambda x, name: normed(x, file[f"{name}.weight"], file[f"{name}.bias"], 1e-5)  # noqa: E731
    for i in range(LAYERS):
        parts = np.split(conv1d(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn"), 3, axis=-1)
        x = x + conv1d(attention(*parts, np.tri(len(ids), dtype=bool)), f"h.{i}.attn.c_proj")
        up = conv1d(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        up = 0.5 * up * (1 + np.tanh((2 / np.pi) ** 0.5 * (up + 0.044715 * up**3)))
        x = x + conv1d(up, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ file["wte.weight"].T


def bert(file: dict, ids: np.ndarray) -> np.ndarray:
    """Returns the pooled output."""
    tables = [file[f"bert.embeddings.{kind}_embeddings.weight"] for kind in ("word", "position", "token_type")]
    x = tables[0][ids] + tables[1][: len(ids)] + tables[2][0]
    first = "bert.embeddings.LayerNorm"
    x = normed(x, file[f"{first}.gamma"], file[f"{first}.beta"], 1e-12)
    for i in range(LAYERS):
        layer = f"bert.encoder.layer.{i}"
        parts = (linear(x, file, f"{layer}.attention.self.{part}") for part in ("query", "key", "value"))
        mixed = attention(*parts, np.broadcast_to(ids != 0, (len(ids), len(ids))))
        for y, norm in (
            (lambda x, m=mixed, n=layer: linear(m, file, f"{n}.attention.output.dense"), "attention.output.LayerNorm"),
            (
                lambda x, n=layer: linear(gelu(linear(x, file, f"{n}.intermediate.dense")), file, f"{n}.output.dense"),
                "output.LayerNorm",
            ),
        ):
            x = normed(x + y(x), file[f"{layer}.{norm}.weight"], file[f"{layer}.{norm}.bias"], 1e-12)
    return np.tanh(linear(x[0], file, "bert.pooler.dense"))


def vit(file: dict, image: np.ndarray) -> np.ndarray:
    kernel = file["vit.embeddings.patch_embeddings.projection.weight"]
    patches = [
        (kernel * image[i : i + 2, j : j + 2].transpose(2, 0, 1)).sum((1, 2, 3))
        for i in range(0, 6, 2)
        for j in range(0, 4, 2)
    ] + file["vit.embeddings.patch_embeddings.projection.bias"]
    x = np.concatenate([file["vit.embeddings.cls_token"][0], patches]) + file["vit.embeddings.position_embeddings"][0]
    norm = lambda x, name: normed(x, file[f"{name}.weight"], file[f"{name}.bias"], 1e-12)  # noqa: E731
    for i in range(LAYERS):
        layer = f"vit.encoder.layer.{i}"
        y = norm(x, f"{layer}.layernorm_before")
        parts = (linear(y, file, f"{layer}.attention.attention.{part}") for part in ("query", "key", "value"))
        x = x + linear(attention(*parts, np.ones((7, 7), bool)), file, f"{layer}.attention.output.dense")
        up = gelu(linear(norm(x, f"{layer}.layernorm_after"), file, f"{layer}.intermediate.dense"))
        x = x + linear(up, file, f"{layer}.output.dense")
    return linear(norm(x, "vit.layernorm")[0], file, "classifier")


SIZES = {"width": W, "depth": LAYERS, "heads": H}
IDS = np.array([[3, 1, 4, 1, 5, 0], [9, 2, 6, 0, 0, 0], [5, 3, 5, 8, 9, 7]])


def test_gpt2_matches_numpy(tmp_path):
    file = gpt2_file()
    np.savez(tmp_path / "gpt2.npz", **file)
    model = fd.models.decoder(VOCABULARY, LENGTH, **SIZES)
    params = load_params(model, tmp_path / "gpt2.npz", names=fd.models.names.GPT2)
    for ids in (IDS, IDS[:, :4]):
        np.testing.assert_allclose(model.apply(params, ids), [gpt2(file, row) for row in ids], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"as many layers as the model, 2, got more for blocks/attention/"):
        load_params(
            fd.models.decoder(VOCABULARY, LENGTH, **SIZES | {"depth": 2}), tmp_path / "gpt2.npz", fd.models.names.GPT2
        )
    with pytest.raises(
        ValueError, match=r"got nothing for blocks/attention/key/bias, .* .16 arrays don't fit: .* and 9 more"
    ):
        load_params(
            fd.models.decoder(VOCABULARY, LENGTH, **SIZES | {"depth": 4}), tmp_path / "gpt2.npz", fd.models.names.GPT2
        )
    with pytest.raises(ValueError, match=r"got shape \[6, 8\] for positions, which is shape \[5, 8\]"):
        load_params(fd.models.decoder(VOCABULARY, 5, **SIZES), tmp_path / "gpt2.npz", fd.models.names.GPT2)


def test_bert_matches_numpy(tmp_path):
    file = bert_file()
    np.savez(tmp_path / "bert.npz", **file)
    model = fd.models.encoder(4, VOCABULARY, LENGTH, **SIZES, bert=True)
    with pytest.raises(
        ValueError,
        match=r"nothing for classifier/dense/bias, .*\(2 arrays don't fit: classifier/dense/bias, \S*/kernel.*fresh=",
    ):
        load_params(model, tmp_path / "bert.npz", fd.models.names.BERT)
    params = load_params(model, tmp_path / "bert.npz", fd.models.names.BERT, fresh="classifier")
    assert same(params["classifier"], model.init(jax.random.key(0))["classifier"])
    np.testing.assert_allclose(model.features(params, IDS), [bert(file, row) for row in IDS], rtol=1e-4, atol=1e-4)


def test_vit_matches_numpy(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    file = vit_file()
    numpy.save_file(file, tmp_path / "vit.safetensors")
    model = fd.models.vit(5, (6, 4, 3), 2, **SIZES)
    params = load_params(model, tmp_path / "vit.safetensors", fd.models.names.VIT)
    images = DRAWN(3, 6, 4, 3)
    expected = [vit(file, image) for image in images]
    np.testing.assert_allclose(model.apply(params, images), expected, rtol=1e-4, atol=1e-4)


def test_custom_names_select_the_arrays_of_a_file(tmp_path):
    model = fd.models.linear((4,), num_classes=2)
    weight, bias = DRAWN(2, 4), DRAWN(2)
    np.savez(tmp_path / "fc.npz", **{"net.fc.weight": weight, "net.fc.bias": bias, "net.other.bias": bias})
    kernel, offset = "classifier/dense/kernel", "classifier/dense/bias"
    params = load_params(model, tmp_path / "fc.npz", {kernel: ("fc.weight", np.transpose), offset: "fc.bias"})
    np.testing.assert_array_equal(params["classifier"]["dense"]["kernel"], weight.T)
    for names, said in (
        (
            {kernel: "fc.weight", offset: "bias"},
            "names must find one array each .* net.fc.bias, net.other.bias for 'bias'",
        ),
        ({kernel: "fc.weight", offset: "fc.bias"}, r"got shape \[2, 4\] for classifier/dense/kernel"),
        ({kernel: 3}, "each value of names must be a name or a tuple of names and a function, got 3"),
        ({kernel: "("}, "must be a regular expression"),
        ({kernel: ("fc.weight", lambda a: a[9])}, "got an error for classifier/dense/kernel from the shapes"),
        ([kernel], "names must be of type Mapping"),
    ):
        with pytest.raises(ValueError, match=said):
            load_params(model, tmp_path / "fc.npz", names)


@pytest.mark.parametrize(
    "params, message",
    [
        ({"file": np.ones(2)}, "can't have an array with the name file"),
        ({"a/b": np.ones(2), "a": {"b": np.ones(2)}}, "must have different paths"),
        ({"a": np.ones(2), "a/b": np.ones(2)}, "must not begin with the name of another array"),
    ],
)
def test_reserved_or_ambiguous_array_names_are_refused(tmp_path: Path, params: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fd.models.save(tmp_path / "model.npz", params)
        fd.models.load(tmp_path / "model.npz")
