"""Tests of augmentation: images and a round against NumPy, and results with lanes, streaming and two devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_trajectories import library_order

import fedjax_drift as fd

pytestmark = pytest.mark.thorough

SIZES = (3, 10, 7, 25, 1, 16)  # as in test_trajectories, because library_order uses those
SHAPE, CLASSES, B, EPOCHS, LR = (6, 5, 2), 3, 4, 2, 0.1


def numpy_crop_and_flip(key: jax.Array, image: np.ndarray, padding: int, crop: float, flip: float) -> np.ndarray:
    """Crops and flips the padded image pixel by pixel. Only the random numbers come from the library."""
    offset_key, crop_key, flip_key = jax.random.split(key, 3)
    top, left = np.asarray(jax.random.randint(offset_key, (2,), 0, 2 * padding + 1))
    if not jax.random.bernoulli(crop_key, crop):
        top = left = padding
    mirrored = bool(jax.random.bernoulli(flip_key, flip))
    H, W, _ = image.shape
    result = np.zeros_like(image)
    for i in range(H):
        for j in range(W):
            y, x = i + top - padding, (W - 1 - j if mirrored else j) + left - padding
            if 0 <= y < H and 0 <= x < W:
                result[i, j] = image[y, x]
    return result


@pytest.mark.parametrize("padding, crop, flip", [(4, 1.0, 0.5), (2, 0.5, 0.5), (0, 1.0, 1.0), (3, 1.0, 0.0)])
def test_images_are_cropped_and_flipped_as_in_numpy(padding: int, crop: float, flip: float) -> None:
    images = np.random.default_rng(0).normal(size=(40, *SHAPE)).astype("f4")
    keys = jax.random.split(jax.random.key(1), len(images))
    got = jax.vmap(fd.augment.crop_and_flip(padding, crop, flip))(keys, images)
    for key, image, result in zip(keys, images, np.asarray(got), strict=True):
        np.testing.assert_array_equal(result, numpy_crop_and_flip(key, image, padding, crop, flip))


def test_every_position_is_equally_likely() -> None:
    image = jnp.arange(1.0, 10.0).reshape(3, 3, 1)
    images = jax.vmap(fd.augment.crop_and_flip(1), (0, None))(jax.random.split(jax.random.key(0), 18_000), image)
    _, counts = np.unique(np.asarray(images).reshape(len(images), -1), axis=0, return_counts=True)
    assert len(counts) == 18  # nine positions, mirrored or not
    assert abs(counts / 1000 - 1).max() < 0.15  # about five standard deviations


def federation() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(3)
    return [(rng.integers(0, 256, (n, *SHAPE), np.uint8), rng.integers(0, CLASSES, n)) for n in SIZES]


def logits(w, x):
    return x.reshape(len(x), -1) @ w


def simulation(**options) -> fd.Simulation:
    model = fd.Model(init=lambda key: jnp.zeros((np.prod(SHAPE), CLASSES)), apply=logits)
    local = fd.LocalTraining(epochs=EPOCHS, batch_size=B, lr=LR, augment=fd.augment.crop_and_flip(2))
    data, algorithm = fd.FederatedData.from_clients(federation()), fd.algorithms.fedavg()
    return fd.Simulation(model, data, algorithm, local=local, **{"cohort_size": 3} | options)


def test_a_round_matches_a_numpy_loop_over_augmented_images() -> None:
    sim, cohort = simulation(mesh=fd.clients_mesh(jax.devices()[:1])), (1, 3, 5)
    state = sim.init(jax.random.key(0))
    _, round_key = jax.random.split(jax.random.fold_in(state.key, 0))
    models = []
    for i in cohort:
        x, y = federation()[i]
        w = np.zeros((np.prod(SHAPE), CLASSES))
        for e in range(EPOCHS):
            augment_key = jax.random.split(jax.random.fold_in(jax.random.fold_in(round_key, i), e), 3)[2]
            order = library_order(state.key, 0, i, e)
            for k in range(-(-SIZES[i] // B)):
                examples = order[k * B : (k + 1) * B]
                keys = jax.random.split(jax.random.fold_in(augment_key, k), B)
                images = [numpy_crop_and_flip(keys[j], x[n] / 255, 2, 1.0, 0.5) for j, n in enumerate(examples)]
                inputs = np.stack(images).reshape(len(examples), -1)
                p = np.exp(inputs @ w)
                error = p / p.sum(1, keepdims=True) - np.eye(CLASSES)[y[examples]]
                w -= LR * inputs.T @ error / len(examples)
        models.append(w)
    want = np.average(models, axis=0, weights=[SIZES[i] for i in cohort])
    got = sim.round_fn(state, cohort=cohort)[0].params
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", [{"lanes": 1}, {"lanes": 3}, {"stream": True}, {"lanes": 2}], ids=str)
def test_results_do_not_depend_on_lanes_streaming_or_devices(options: dict) -> None:
    """The augmentation of an example only depends on the key of its client."""

    def after_two_rounds(sim: fd.Simulation) -> np.ndarray:
        state = sim.init(jax.random.key(0))
        for cohort in ((1, 3, 5), (0, 3, 2)):
            state, _ = sim.round_fn(state, cohort=cohort)
        return np.asarray(state.params)

    one_device = {"mesh": fd.clients_mesh(jax.devices()[:1]), "lanes": 1}
    np.testing.assert_allclose(
        after_two_rounds(simulation(**options)), after_two_rounds(simulation(**one_device)), atol=1e-5
    )


def test_evaluation_and_full_gradients_do_not_augment() -> None:
    """An augmentation that makes all images black stops training, but changes neither evaluation nor full gradients."""
    x, y = federation()[3]
    local = fd.LocalTraining(batch_size=B, lr=LR, augment=lambda key, image: image * 0)
    data = fd.FederatedData.from_clients(federation(), test=(x, y))
    model = fd.Model(init=lambda key: jnp.zeros((np.prod(SHAPE), CLASSES)), apply=logits)
    runs = []
    for each in (local, fd.LocalTraining(batch_size=B, lr=LR)):
        sim = fd.Simulation(model, data, fd.algorithms.fedavg(), local=each, cohort_size=3, measure="gradients")
        state = sim.init(jax.random.key(0))
        trained, _ = sim.round_fn(state)
        state = state._replace(server=state.server._replace(params=jnp.ones_like(state.params) / 100))
        runs.append((trained.params, sim.evaluate(state), sim.measure(state)["gradient_norm"]))
    (black, scores, gradients), (trained, scores_, gradients_) = runs
    assert not np.asarray(black).any() and np.asarray(trained).any()
    np.testing.assert_array_equal(scores["loss"], scores_["loss"])
    np.testing.assert_array_equal(gradients, gradients_)


@pytest.mark.parametrize(
    "augment, words",
    [
        ("flip", "augment must be a function"),
        (lambda x: x, "augment must be a function .key, example. -> example, got <lambda>.x."),
        (
            lambda key, x: x + x[0, 0, 5:],
            "augment must be a function .key, x. -> x of one example, float32.6, 5, 2., got one that fails",
        ),
        (lambda key, x: x[1:], "augment must keep the shapes .* of an example: the value: float32.5, 5, 2. instead of"),
    ],
)
def test_a_wrong_augmentation_raises_before_compilation(augment, words: str) -> None:
    data = fd.FederatedData.from_clients(federation())
    model = fd.Model(init=lambda key: jnp.zeros((np.prod(SHAPE), CLASSES)), apply=logits)
    with pytest.raises(ValueError, match=words):
        fd.Simulation(model, data, fd.algorithms.fedavg(), local=fd.LocalTraining(augment=augment), cohort_size=2)


def test_crops_need_images() -> None:
    data = fd.FederatedData.from_clients([(np.eye(2, dtype="f4"), np.array([0, 1]))] * 2)
    local = fd.LocalTraining(augment=fd.augment.crop_and_flip())
    with pytest.raises(ValueError, match=r"needs images \[height, width, channels\], got examples of shape \[2\]"):
        fd.Simulation(fd.models.linear((2,), num_classes=2), data, fd.algorithms.fedavg(), local=local, cohort_size=2)
    with pytest.raises(ValueError, match=r"crop must be a probability in 0\.\.1"):
        fd.augment.crop_and_flip(crop=2)


def test_the_command_line_passes_the_augmentation_on() -> None:
    words = "--dataset synthetic --algorithm fedavg --augment crop_and_flip:padding=2,crop=0.5"
    with pytest.raises(ValueError, match="needs images"):
        fd.parse_run(words.split())
