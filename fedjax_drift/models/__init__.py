"""The networks of the papers, and three transformers, as `fd.Model`s.

With ``cosine=True``, the last layer has no bias and returns the cosines between features and class weights (LfD). The
weights of the papers' networks use PyTorch's default initialisation, as in the papers' code. The docstrings give the
number of parameters, and the tests check it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypedDict, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_drift import checks, spec, tree
from fedjax_drift.model import Model
from fedjax_drift.models import names, ranking
from fedjax_drift.models.adapted import lora, merge, trainable
from fedjax_drift.models.layers import cosine_logits
from fedjax_drift.models.networks import CNN, DIN, MLP, LigandAndTarget, MeanOfTokens, Projected, ResNet18, SimpleCNN
from fedjax_drift.models.pretrained import load, load_params, save, save_params
from fedjax_drift.models.torch_layout import to_torch
from fedjax_drift.recipes import recorded
from fedjax_drift.spec import Count, Fix, Flag, Fraction, Shape, checked

Classes = Annotated[int, spec.integer(1, 2**31 - 1)]
Vocabulary = Annotated[int, spec.integer(2)]
Stem = Annotated[int, spec.integer(3, 7), Fix("3 is 3x3 without pooling, 7 is 7x7 with pooling")]
Sizes = Annotated[
    Sequence[int],
    spec.array(
        "six integers >= 1 (the numbers of users, genders, ages, occupations, zips and items)",
        lambda sizes: sizes.shape == (6,) and sizes.dtype.kind in "iu" and sizes.min() >= 1,
    ),
    Fix("pass fedjax_drift.data.movielens.sizes(data)"),
]


@checked
def linear(input_shape: Shape = (30,), num_classes: Classes = 5, cosine: Flag = False) -> Model:
    """Multinomial logistic regression, initialised to zero.

    It has 155 parameters for the synthetic data of FedDyn and FedDC. With ``cosine=True`` the weights are random.
    """
    return _model(MLP((), num_classes, zero_init=not cosine, cosine=cosine), input_shape)


@checked
def mnist_2nn(num_classes: Classes = 10, input_shape: Shape = (28, 28, 1), cosine: Flag = False) -> Model:
    """McMahan et al.'s 2NN with layers 784-200-200-10 (199,210 parameters). FedDyn and FedDC use it for MNIST."""
    return _model(MLP((200, 200), num_classes, cosine=cosine), input_shape)


@checked
def emnist_nn(num_classes: Classes = 10, input_shape: Shape = (28, 28, 1), cosine: Flag = False) -> Model:
    """FedDyn's and FedDC's network for EMNIST-L, with layers 784-100-100-10 (89,610 parameters)."""
    return _model(MLP((100, 100), num_classes, cosine=cosine), input_shape)


@checked
def cifar_cnn(num_classes: Classes = 10, cosine: Flag = False) -> Model:
    """FedDyn's and FedDC's CIFAR network: two 5x5 convolutions with 64 filters, dense layers with 384 and 192 units.

    It has 797,962 parameters for 10 classes, and 815,332 for 100 classes.
    """
    network = CNN(((64, 5, "VALID", 2), (64, 5, "VALID", 2)), (384, 192), num_classes, cosine=cosine)
    return _model(network, (32, 32, 3))


@checked
def mnist_cnn(
    num_classes: Classes = 10,
    cosine: Flag = False,
    filters: Annotated[tuple[int, int], spec.shape(2)] = (32, 64),
    units: Count = 512,
    padding: Literal["SAME", "VALID"] = "SAME",
) -> Model:
    """McMahan et al.'s MNIST CNN: two 5x5 convolutions with 32 and 64 filters, a dense layer with 512 units.

    It has 1,663,370 parameters. ``filters`` and ``units`` change the widths. With ``padding="VALID"`` it is the CNN of
    PFLlib, with 582,026 parameters.
    """
    layers = tuple((width, 5, padding, 2) for width in filters)
    return _model(CNN(layers, (units,), num_classes, cosine=cosine), (28, 28, 1))


@checked
def lenet5(num_classes: Classes = 62, input_shape: Shape = (28, 28, 1), cosine: Flag = False) -> Model:
    """LeNet-5 with ReLU and max-pooling for 28x28 images (66,126 parameters for 62 classes)."""
    network = CNN(((6, 5, "SAME", 2), (16, 5, "VALID", 2)), (120, 84), num_classes, cosine=cosine)
    return _model(network, input_shape)


@checked
def simple_fl_lenet(num_classes: Classes = 62, cosine: Flag = False) -> Model:
    """FedEve's "LeNet5", from the authors' library simple-FL.

    The network has two 3x3 convolutions with 6 and 10 filters, and a dense layer with 100 units. Dropout 0.5 comes
    before and after the dense layer. It has 31,972 parameters for 62 classes.
    """
    convolutions = ((6, 3, "VALID", 2), (10, 3, "VALID", 2))
    return _model(CNN(convolutions, (100,), num_classes, 0.5, 0.5, cosine), (28, 28, 1))


@checked
def fedadc_cnn(
    num_classes: Classes = 10,
    convolutions: Annotated[tuple[int, int, int, int], spec.shape(4)] = (32, 32, 64, 64),
    dense: Annotated[tuple[int, int, int], spec.shape(3)] = (512, 256, 128),
    cosine: Flag = False,
) -> Model:
    """FedADC's CIFAR-10 network: four convolutions and four dense layers, including the classifier.

    It has 2,328,746 parameters. The paper gives no widths, so the defaults are our choice. The kernels are 3x3, with
    pooling after the second and the fourth convolution. ``convolutions`` are the numbers of filters. ``dense`` are the
    numbers of units of the first three dense layers.
    """
    layers = tuple((width, 3, "SAME", 1 + i % 2) for i, width in enumerate(convolutions))
    return _model(CNN(layers, dense, num_classes, cosine=cosine), (32, 32, 3))


@checked
def emnist_cnn(num_classes: Classes = 62, cosine: Flag = False) -> Model:
    """Reddi et al.'s EMNIST CNN.

    The layers are two 3x3 convolutions with 32 and 64 filters, max-pooling, dropout 0.25, a dense layer with 128 units,
    dropout 0.5 and the classifier. The network has 1,206,590 parameters for 62 classes.
    """
    convolutions = ((32, 3, "VALID", 1), (64, 3, "VALID", 2))
    return _model(CNN(convolutions, (128,), num_classes, 0.25, 0.5, cosine), (28, 28, 1))


@checked
def simple_cnn(
    num_classes: Classes = 10,
    input_shape: Shape = (32, 32, 3),
    projection: Flag = True,
    cosine: Flag = False,
) -> Model:
    """MOON's and LfD's simple CNN with a projection head.

    For 10 classes it has 92,626 parameters, 92,616 with ``cosine=True``, and 62,006 with ``projection=False`` (without
    the projection head).
    """
    return _model(SimpleCNN(num_classes, projection, cosine), input_shape)


@checked
def resnet18(
    num_classes: Classes = 10, input_shape: Shape = (32, 32, 3), stem: Stem = 3, cosine: Flag = False
) -> Model:
    """ResNet-18 with GroupNorm(2) instead of BatchNorm.

    - ``stem=3`` (default) starts with a 3x3 convolution without pooling. The network has 11,220,132 parameters for 100
      classes.
    - ``stem=7`` starts with the ImageNet stem, that is, a 7x7 convolution with stride 2, and max-pooling. The network
      has 11,181,642 parameters for 10 classes. FedDyn and FedDC use it.
    """
    if stem not in (3, 7):
        checks.refuse("stem must be 3 (3x3 without pooling) or 7 (7x7 with pooling)", stem)
    return _model(ResNet18(num_classes, stem, cosine), input_shape)


@checked
def din(sizes: Sizes = (6041, 3, 8, 22, 3440, 3953), test_negatives: Annotated[int, spec.integer(9)] = 99) -> Model:
    """FedEve's deep interest network (DIN) for click-through prediction on MovieLens (205,398 parameters for ML-1M).

    The network returns one logit per example. The loss is the binary cross-entropy with labels 0 and 1. An example has
    the ids [user, gender, age, occupation, zip, candidate, history...], as in the data set `movielens`. The evaluation
    also reports the metrics of `fd.ranking.scores()`.

    Args:
      sizes: vocabulary sizes of the first six columns, including id 0 (missing). Default: those of ML-1M. For other
        data use `fedjax_drift.data.movielens.sizes(data)`.
      test_negatives: the number of negative examples in each block of the test set, >= 9 for HR@10. A block also has
        one positive example. Use the same value for the data set.
    """
    sizes = tuple(map(int, sizes))
    options: dict[str, Any] = {"loss": binary_cross_entropy, "scores": ranking.scores(1 + test_negatives)}
    return Model.from_linen(DIN(sizes), (7,), input_dtype=jnp.int32, vocabulary=sizes, **options)


def binary_cross_entropy(logits: jax.Array, y: jax.Array) -> jax.Array:
    """Binary cross-entropy, [B], from logits [B] and labels 0 or 1 (integer or floating)."""
    return optax.sigmoid_binary_cross_entropy(logits, y.astype(logits.dtype))


@checked
def text_classifier(
    num_classes: Classes = 4, vocabulary: Vocabulary = 20_000, width: Count = 64, cosine: Flag = False
) -> Model:
    """A text classifier: the mean embedding of the tokens, a dense layer, and MOON's projection head.

    An example has token ids in 0..vocabulary-1, where 0 is padding. ``width`` is the size of the embeddings. The model
    has 1,305,988 parameters, and 1,305,984 with ``cosine=True``. LfD does not specify a network for AG News, so the
    network is our choice.
    """
    network = Projected(MeanOfTokens(vocabulary, width), num_classes, cosine)
    return _model(network, (1,), input_dtype=jnp.int32, vocabulary=vocabulary)


@checked
def drug_target(
    num_classes: Classes = 2,
    ligand: Annotated[int, spec.integer(16)] = 100,
    vocabulary: Vocabulary = 95,
    width: Count = 64,
    filters: Count = 32,
    cosine: Flag = False,
) -> Model:
    """Predicts whether a ligand binds a protein: two encoders as in DeepDTA, and MOON's projection head.

    An example has character ids in 0..vocabulary-1. The first ``ligand`` ids are the SMILES string of the ligand, the
    others are the sequence of the protein. Both are padded with 0. Each encoder has embeddings of size ``width`` and
    three convolutions with 1, 2 and 3 times ``filters`` channels. The kernels have 4, 6 and 8 characters for the
    ligand, and 4, 8 and 12 characters for the protein. The maximum over all positions and a dense layer follow.

    The network has 214,146 parameters, and 214,144 with ``cosine=True``. LfD does not specify a network for BindingDB,
    so the network is our choice.

    ``ligand`` must be at least 16, the receptive field of the convolutions. The padded sequence of a protein needs at
    least 22 characters.
    """
    network = Projected(LigandAndTarget(ligand, vocabulary, width, filters), num_classes, cosine)
    return _model(network, (ligand + 1000,), input_dtype=jnp.int32, vocabulary=vocabulary)


class _Flags(TypedDict, total=False):
    """The last arguments of `vit` and `encoder`."""

    cosine: Flag
    remat: Flag


@checked
def vit(
    num_classes: Classes = 10,
    input_shape: Annotated[tuple[int, int, int], spec.shape(3)] = (32, 32, 3),
    patch: Count = 4,
    width: Count = 192,
    depth: Count = 6,
    heads: Count = 3,
    dropout: Fraction = 0.0,
    **flags: Unpack[_Flags],
) -> Model:
    """A vision transformer (Dosovitskiy et al., ICLR 2021) with pre-norm blocks and a class token.

    The default has 2,693,578 parameters: the width and the heads of DeiT-tiny, and half of its blocks. With
    ``depth=12``, which is DeiT-tiny's, it has 5,362,762 parameters.

    Args:
      num_classes: number of classes C.
      input_shape: (height, width, channels) of the images.
      patch: side of the square patches in pixels. It must divide height and width. For 28x28 images use 4 or 7.
      width: width W of the blocks. A multiple of ``heads``.
      depth: number of blocks.
      heads: number of attention heads.
      dropout: dropout rate of the embeddings, and of the outputs of attention and MLP, in [0, 1). Default: 0.
      cosine: as for the other models.
      remat: if True, the backward pass computes each block again instead of keeping its intermediate values. A step
        then needs less memory, and computes about a third more.

    Raises:
      ValueError: ``patch`` does not divide the image, or ``heads`` does not divide ``width``.
    """
    sides = input_shape[:2]
    if any(side % patch for side in sides):
        checks.refuse(
            "patch must divide the height and the width of the images",
            f"{patch} for {sides[0]}x{sides[1]}",
            f"use patch={math.gcd(*sides)}, or a divisor of it",
        )
    blocks = {"image": input_shape, "patch": patch} | _blocks(width, depth, heads, dropout)
    return _transformer("ViT", input_shape, **blocks, num_classes=num_classes, **flags)


@checked
def encoder(
    num_classes: Classes = 4,
    vocabulary: Vocabulary = 20_000,
    length: Count = 64,
    width: Count = 128,
    depth: Count = 2,
    heads: Count = 2,
    dropout: Fraction = 0.0,
    bert: Flag = False,
    **flags: Unpack[_Flags],
) -> Model:
    """A transformer that classifies texts. An example has token ids in 0..vocabulary-1, where 0 is padding.

    The default has the sizes of BERT-tiny and 2,965,508 parameters. Padding is masked.

    Args:
      num_classes: number of classes C.
      vocabulary: number of token ids, >= 2.
      length: the largest number of tokens of an example.
      width, depth, heads, dropout, remat: as in `vit`.
      bert: if True, the architecture is BERT's (Devlin et al., NAACL 2019): post-norm blocks, and the features are a
        dense layer with tanh of the first token's output. `names.BERT` then loads its weights. If False (default), the
        blocks have pre-norm, which trains without warm-up, and the features are the mean over all tokens.
      cosine: as for the other models.

    Raises:
      ValueError: ``heads`` does not divide ``width``.
    """
    blocks = {"bert": bert} | _blocks(width, depth, heads, dropout)
    options = {"num_classes": num_classes, "vocabulary": vocabulary, "length": length}
    return _transformer("Encoder", (length,), **blocks, **options, **flags)


@checked
def decoder(
    vocabulary: Vocabulary = 28,
    length: Count = 64,
    width: Count = 128,
    depth: Count = 4,
    heads: Count = 4,
    dropout: Fraction = 0.0,
    remat: Flag = False,
) -> Model:
    """A language model with GPT-2's architecture: token ids [B, T] -> logits [B, T, vocabulary] of the next tokens.

    The label of a position is the id of the next token, so labels are [B, T]. The default fits the data set `dialogue`
    and has 805,120 parameters. The output layer shares the table of the token embeddings.

    Args:
      vocabulary: number of token ids, >= 2.
      length: the largest number of tokens T of an example.
      width, depth, heads, dropout, remat: as in `vit`.

    Raises:
      ValueError: ``heads`` does not divide ``width``.
    """
    blocks = _blocks(width, depth, heads, dropout)
    return _transformer("Decoder", (length,), **blocks, remat=remat, vocabulary=vocabulary, length=length)


def _blocks(width: int, depth: int, heads: int, dropout: float) -> dict[str, Any]:
    """The options that all transformers have."""
    if width % heads:
        checks.refuse("heads must divide width", f"{heads} for width={width}", "use heads=1, for example")
    return {"width": width, "depth": depth, "heads": heads, "dropout": dropout}


@recorded
def _transformer(name: str, input_shape: tuple[int, ...], **options: Any) -> Model:
    from fedjax_drift.models import transformers  # flax.nnx would take a tenth of the time to import fedjax_drift

    input_dtype = jnp.float32 if len(input_shape) == 3 else jnp.int32
    network, of_blocks = getattr(transformers, name), transformers.Blocks._fields
    blocks = transformers.Blocks(**{name: options[name] for name in of_blocks})
    others = {name: value for name, value in options.items() if name not in of_blocks}
    make = lambda rngs: network(**others, blocks=blocks, rngs=rngs)  # noqa: E731
    model = Model.from_nnx(make, input_shape, input_dtype=input_dtype)
    return model._replace(cosine=options.get("cosine", False), vocabulary=options.get("vocabulary"))


def _model(network: Any, input_shape: tuple[int, ...], **options: Any) -> Model:
    model = Model.from_linen(network, input_shape, **options)
    drops = getattr(network, "dropout_flat", 0) or getattr(network, "dropout_hidden", 0)
    return model if drops else model._replace(train_apply=None)  # without dropout, training uses `apply`


MODELS: dict[str, Any] = {
    make.__name__: make
    for make in (
        *(linear, mnist_2nn, emnist_nn, cifar_cnn, mnist_cnn, lenet5, simple_fl_lenet, fedadc_cnn, emnist_cnn),
        *(simple_cnn, resnet18, din, text_classifier, drug_target, vit, encoder, decoder),
    )
}

TRAINED: dict[str, Any] = {"lora": lora, "trainable": trainable}  # functions of a model that train a part of it


def num_parameters(model: Model) -> int:
    """d, the number of parameters of a model."""
    return tree.size(jax.eval_shape(lambda: model.init(jax.random.key(0))))


__all__ = ["MODELS", "cosine_logits", "load", "load_params", "lora", "merge", "names", "save", "save_params"]
__all__ += ["to_torch", "trainable", *MODELS]
__dir__ = __all__.copy
