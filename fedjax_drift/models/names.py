"""The names of parameters in files of Hugging Face's transformers, for `load_params(model, path, names=...)`.

A table goes from the paths of our parameters to names in the file, as `load_params` describes:

- `VIT`: for `vit`, the files of ViT and DeiT (without a distillation token)
- `BERT`: for ``encoder(bert=True)``, the files of BERT. The embedding of token type 0 is added to the positions.
- `GPT2`: for `decoder`, the files of GPT-2

The model must have the sizes of the file, including ``length`` and ``depth``. It accepts shorter sequences. A file
without a classifier, or with another number of classes, needs ``fresh="classifier"``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np


def _norm(path: str, name: str) -> dict[str, Any]:
    return {f"{path}/scale": f"{name}.(weight|gamma)", f"{path}/bias": f"{name}.(bias|beta)"}


def _linear(path: str, name: str) -> dict[str, Any]:
    """A linear layer of PyTorch, whose weight is [out, in]."""
    return {f"{path}/kernel": (f"{name}.weight", np.transpose), f"{path}/bias": f"{name}.bias"}


def _conv1d(path: str, name: str) -> dict[str, Any]:
    """A dense layer of GPT-2, whose weight is [in, out]."""
    return {f"{path}/kernel": f"{name}.weight", f"{path}/bias": f"{name}.bias"}


def _third(i: int, array: np.ndarray) -> np.ndarray:
    """Query, key or value of GPT-2, which are one layer in the file."""
    return np.split(array, 3, -1)[i]


def _patches(kernel: np.ndarray) -> np.ndarray:
    """A convolution's kernel [W, channels, p, p] as the matrix [p * p * channels, W]."""
    return kernel.transpose(2, 3, 1, 0).reshape(-1, len(kernel))


VIT: dict[str, Any] = {
    "class_token": ("embeddings.cls_token", np.ravel),
    "positions": ("embeddings.position_embeddings", lambda array: array[0]),
    "patches/kernel": ("embeddings.patch_embeddings.projection.weight", _patches),
    "patches/bias": "embeddings.patch_embeddings.projection.bias",
    **_linear("blocks/attention/query", "encoder.layer.{layer}.attention.attention.query"),
    **_linear("blocks/attention/key", "encoder.layer.{layer}.attention.attention.key"),
    **_linear("blocks/attention/value", "encoder.layer.{layer}.attention.attention.value"),
    **_linear("blocks/attention/out", "encoder.layer.{layer}.attention.output.dense"),
    **_linear("blocks/mlp/up", "encoder.layer.{layer}.intermediate.dense"),
    **_linear("blocks/mlp/down", "encoder.layer.{layer}.output.dense"),
    **_norm("blocks/attention_norm", "encoder.layer.{layer}.layernorm_before"),
    **_norm("blocks/mlp_norm", "encoder.layer.{layer}.layernorm_after"),
    **_norm("norm", "layernorm"),
    **_linear("classifier/dense", "classifier"),
}

BERT: dict[str, Any] = {
    "tokens": "embeddings.word_embeddings.weight",
    "positions": (
        "embeddings.position_embeddings.weight",
        "embeddings.token_type_embeddings.weight",
        lambda positions, types: positions + types[0],
    ),
    **_norm("norm", "embeddings.LayerNorm"),
    **_linear("blocks/attention/query", "encoder.layer.{layer}.attention.self.query"),
    **_linear("blocks/attention/key", "encoder.layer.{layer}.attention.self.key"),
    **_linear("blocks/attention/value", "encoder.layer.{layer}.attention.self.value"),
    **_linear("blocks/attention/out", "encoder.layer.{layer}.attention.output.dense"),
    **_norm("blocks/attention_norm", "encoder.layer.{layer}.attention.output.LayerNorm"),
    **_linear("blocks/mlp/up", "encoder.layer.{layer}.intermediate.dense"),
    **_linear("blocks/mlp/down", "encoder.layer.{layer}.output.dense"),
    **_norm("blocks/mlp_norm", "encoder.layer.{layer}.output.LayerNorm"),
    **_linear("pooler", "pooler.dense"),
    **_linear("classifier/dense", "classifier"),
}

GPT2: dict[str, Any] = {
    "tokens": "wte.weight",
    "positions": "wpe.weight",
    **{
        f"blocks/attention/{part}/{ours}": (f"h.{{layer}}.attn.c_attn.{theirs}", partial(_third, i))
        for i, part in enumerate(("query", "key", "value"))
        for ours, theirs in (("kernel", "weight"), ("bias", "bias"))
    },
    **_conv1d("blocks/attention/out", "h.{layer}.attn.c_proj"),
    **_conv1d("blocks/mlp/up", "h.{layer}.mlp.c_fc"),
    **_conv1d("blocks/mlp/down", "h.{layer}.mlp.c_proj"),
    **_norm("blocks/attention_norm", "h.{layer}.ln_1"),
    **_norm("blocks/mlp_norm", "h.{layer}.ln_2"),
    **_norm("norm", "ln_f"),
}
