"""Federated fine-tuning of a language model: the clients follow instructions, and train LoRA adapters of a decoder.

    python experiments/language_model.py [--checkpoint gpt2] [--rounds 24] [--seeds 2] [--output DIR]

Without ``--checkpoint``, a decoder with 0.4 million parameters is pretrained here, on Python's language reference and
on generated exercises. ``--checkpoint`` takes a GPT-2 of Hugging Face, by its name or as a folder, with its own
tokenizer.

Clients have pairs of an instruction and an answer. A client has a mix of tasks of its own. The loss is that of the
answers' tokens. Every method tries the same number of learning rates. Needs tokenizers and safetensors.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import fedjax_drift as fd

END = "<|endoftext|>"  # the token that ends an answer, as in GPT-2's vocabulary
IGNORED = -1  # the label of a position that is not in the answer
WORDS = "class code file index item key line list method module name number object set string text type value".split()
PAIRS = (
    "hot cold, big small, up down, in out, on off, old new, left right, day night, fast slow, high low, true false, "
    "first last, open close, start stop, before after, more less, read write, push pull, yes no, good bad, hard easy, "
    "long short, same different, inside outside, black white, wet dry, full empty, early late"
)
OPPOSITES = {a: b for pair in PAIRS.split(", ") for a, b in (pair.split(), pair.split()[::-1])}

# Tasks


class Question(NamedTuple):
    instruction: str
    answer: str
    plain: str  # the same fact as the general text has it, without an instruction


def words(rng: np.random.Generator, number: int) -> list[str]:
    return list(rng.choice(WORDS, number, replace=False))


def add(rng: np.random.Generator) -> Question:
    a, b = rng.integers(10, size=2)
    return Question(f"Add {a} and {b}", f"{a + b}", f"{a} + {b} = {a + b}")


def capitalise(rng: np.random.Generator) -> Question:
    given = words(rng, 2)
    asked, answer = " ".join(given), " ".join(word.capitalize() for word in given)
    return Question(f"Capitalise {asked}", answer, f"the title of {asked} is {answer}")


def count(rng: np.random.Generator) -> Question:
    (word,), number = words(rng, 1), rng.integers(1, 7)
    asked = " ".join([word] * number)
    return Question(f"Count {asked}", f"{number}", f"{asked} : {number} words")


def last(rng: np.random.Generator) -> Question:
    given = words(rng, rng.integers(2, 5))
    asked = " ".join(given)
    return Question(f"Give the last word of {asked}", given[-1], f"the end of {asked} is {given[-1]}")


def opposite(rng: np.random.Generator) -> Question:
    word = str(rng.choice(list(OPPOSITES)))
    return Question(f"Give the opposite of {word}", OPPOSITES[word], f"{word} is not {OPPOSITES[word]}")


def repeat(rng: np.random.Generator) -> Question:
    asked = " ".join(words(rng, 2))
    return Question(f"Repeat {asked}", f"{asked} {asked}", f"{asked} , and again {asked}")


def reverse(rng: np.random.Generator) -> Question:
    given = words(rng, 3)
    asked, answer = " ".join(given), " ".join(given[::-1])
    return Question(f"Reverse {asked}", answer, f"{asked} backwards is {answer}")


def sort(rng: np.random.Generator) -> Question:
    given = rng.integers(10, size=3)
    asked, answer = (" ".join(map(str, numbers)) for numbers in (given, sorted(given)))
    return Question(f"Sort {asked}", answer, f"{asked} in order is {answer}")


TASKS: dict[str, Callable[[np.random.Generator], Question]] = {
    task.__name__: task for task in (add, capitalise, count, last, opposite, repeat, reverse, sort)
}

# The base model: pretrained here, or a checkpoint


class Base(NamedTuple):
    """A pretrained language model."""

    tokenizer: Tokenizer
    model: fd.Model
    params: fd.models.Params


def general_text(exercises: int, seed: int = 0) -> str:
    """Python's language reference, which Python comes with, followed by exercises in plain words."""
    from pydoc_data.topics import topics

    rng = np.random.default_rng(seed)
    plain = [rng.choice(list(TASKS.values()))(rng).plain for _ in range(exercises)]  # type: ignore[arg-type]
    return re.sub(r"\s+", " ", " ".join(topics.values())) + " " + " . ".join(plain)


def trained_tokenizer(text: str, vocabulary: int = 512) -> Tokenizer:
    """A tokenizer of GPT-2's kind, byte-pair encoding, that is trained on a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def pretrained(
    epochs: int = 6, exercises: int = 12_000, width: int = 96, depth: int = 3, length: int = 32, seed: int = 0
) -> Base:
    """Pretrains a decoder on `general_text`.

    Two workers train on halves of the text, one per core, and their parameters are averaged eight times per epoch.
    """
    text = general_text(exercises, seed)
    tokenizer = trained_tokenizer(text)
    ids = np.array(tokenizer.encode(text).ids, np.int32)
    rows = ids[: len(ids) // (length + 1) * (length + 1)].reshape(-1, length + 1)
    halves = np.array_split(np.random.default_rng(seed).permutation(rows), 2)
    data = fd.FederatedData.from_clients([(half[:, :-1], half[:, 1:]) for half in halves], name="general text")
    model = fd.models.decoder(tokenizer.get_vocab_size(), length, width, depth)
    rounds, batch = 8 * epochs, 16
    local = fd.LocalTraining(
        lr=optax.cosine_decay_schedule(3e-3, rounds, 0.1),
        batch_size=batch,
        steps=-(-len(halves[0]) // (8 * batch)),
        optimizer=optax.scale_by_adam(),
    )
    sim = fd.Simulation(model, data, fd.algorithms.fedavg(), local=local, cohort_size=2)
    state, _ = sim.run(sim.init(jax.random.key(seed)), rounds, progress=False)
    return Base(tokenizer, model, jax.device_get(state.params))


def checkpoint(name: str) -> Base:
    """A GPT-2 of Hugging Face: a folder with config.json, tokenizer.json and model.safetensors, or a name."""
    if Path(name).is_dir():
        found = Path(name)
    else:
        from huggingface_hub import snapshot_download

        files = ["config.json", "tokenizer.json", "model.safetensors"]
        found = Path(snapshot_download(name, allow_patterns=files))
    config = json.loads((found / "config.json").read_text())
    if config["model_type"] != "gpt2":
        raise ValueError(f"{name} must be a GPT-2, got {config['model_type']}: fd.models.decoder has GPT-2's layers")
    sizes = (config[key] for key in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"))
    model = fd.models.decoder(*sizes)
    params = fd.models.load_params(model, found / "model.safetensors", names=fd.models.names.GPT2)
    return Base(Tokenizer.from_file(str(found / "tokenizer.json")), model, params)


# Data


def encoded(tokenizer: Tokenizer, questions: Iterable[Question], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids int32 [M, T], and the next token at each position of an answer, int32 [M, T], elsewhere IGNORED."""
    x, y = [], []
    end = tokenizer.token_to_id(END)
    for question in questions:
        prompt = tokenizer.encode(f"Q: {question.instruction}\nA:").ids
        ids = [*prompt, *tokenizer.encode(f" {question.answer}").ids, end]
        if len(ids) > length + 1:
            raise ValueError(f"length must be at least {len(ids) - 1} for {question.instruction!r}, got {length}")
        padding = length + 1 - len(ids)
        x.append(ids[:-1] + [end] * padding)  # no token sees the padding, because it comes later
        y.append([IGNORED] * (len(prompt) - 1) + ids[len(prompt) :] + [IGNORED] * padding)
    return np.array(x, np.int32), np.array(y, np.int32)


def federation(tokenizer: Tokenizer, clients: int = 40, alpha: float = 0.5, length: int = 32, seed: int = 0):
    """Clients with 16 to 48 training examples and 16 test examples. A mix of tasks is a draw of Dirichlet(alpha)."""
    rng = np.random.default_rng([seed, 1])

    def examples(mix: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
        chosen = rng.choice(list(TASKS), number, p=mix)
        return encoded(tokenizer, [TASKS[name](rng) for name in chosen], length)

    mixes = rng.dirichlet(np.full(len(TASKS), alpha), clients)
    train = [examples(mix, rng.integers(16, 49)) for mix in mixes]
    tests = [examples(mix, 16) for mix in mixes]
    tasks = {name: encoded(tokenizer, [task(rng) for _ in range(64)], length) for name, task in TASKS.items()}
    data = fd.FederatedData.from_clients(train, test_clients=tests, name="instructions")
    by_task = fd.FederatedData.from_clients(tasks, test_clients=tasks, name="tasks")
    return data, by_task


# Loss and scores of the answers


def token_losses(logits: jax.Array, y: jax.Array) -> jax.Array:
    """The losses of the answers' tokens, and 0 elsewhere, [B, T]."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(y, 0))
    return jnp.where(y != IGNORED, losses, 0)


def on_answers(model: fd.Model) -> fd.Model:
    """The model with the loss and the scores of the answers.

    An example's loss is the mean over its answer's tokens. Its accuracy is 1 if all of them are predicted. Greedy
    decoding then gives this answer, and otherwise another one, because both see the same tokens up to the first error.
    """

    def loss(logits: jax.Array, y: jax.Array) -> jax.Array:
        return token_losses(logits, y).sum(1) / (y != IGNORED).sum(1)

    def scores(logits: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
        correct = (logits.argmax(-1) == y) | (y == IGNORED)
        return {"accuracy": correct.all(1), "nats": token_losses(logits, y).sum(1), "tokens": (y != IGNORED).sum(1)}

    return model._replace(loss=loss, scores=scores)


def perplexity(scores: dict) -> np.ndarray:
    """exp of the mean loss of a token, from means over examples."""
    return np.exp(np.asarray(scores["nats"]) / scores["tokens"])


PANELS = {"accuracy": "Exact match of held-out answers", "perplexity": "Perplexity of held-out answers"}

# Methods


class Method(NamedTuple):
    model: fd.Model
    algorithm: fd.Algorithm
    local: Callable[[float], fd.LocalTraining]
    rates: tuple[float, ...]


def sgd(lr: float) -> fd.LocalTraining:
    return fd.LocalTraining(lr=lr, epochs=2, batch_size=8, momentum=0.9, clip_norm=1.0)


def adamw(lr: float) -> fd.LocalTraining:
    optimizer = optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(0.01))
    return fd.LocalTraining(lr=lr, epochs=2, batch_size=8, optimizer=optimizer)


def methods(base: Base, rank: int = 8) -> dict[str, Method]:
    adapted = fd.models.lora(on_answers(base.model), rank, "attention|mlp", alpha=2 * rank, base=base.params)
    only_b = fd.models.trainable(adapted, "/b$")
    fedavg, scaffold = fd.algorithms.fedavg(), fd.algorithms.scaffold(option="I", weighting="examples")
    of_sgd, of_adamw = (0.1, 0.2, 0.4), (2.5e-3, 5e-3, 1e-2)
    return {
        "FedAvg": Method(adapted, fedavg, sgd, of_sgd),
        "SCAFFOLD": Method(adapted, scaffold, sgd, of_sgd),
        "FedIT": Method(adapted, fedavg, adamw, of_adamw),
        "FFA-LoRA": Method(only_b, fedavg, adamw, of_adamw),
    }


def runs_of(method: Method, data: fd.FederatedData, rates: Iterable[float], rounds: int, seeds: Iterable[int]):
    """The runs of all rates and seeds. The records of evaluated rounds have a perplexity."""

    def build(lr: float) -> fd.Simulation:
        local = method.local(lr)
        return fd.Simulation(method.model, data, method.algorithm, local=local, cohort_size=min(8, data.num_clients))

    every = max(1, rounds // 8)
    runs = fd.sweep(build, rounds, seeds, fd.grid(lr=rates), eval_every=every, progress=False)
    for run in runs:
        for record in run.history:
            if "nats" in record:
                record["perplexity"] = float(perplexity(record))
    return runs


def tuned(method: Method, data: fd.FederatedData, rounds: int) -> float:
    """The learning rate with the lowest perplexity on training examples that are held out."""
    runs = runs_of(method, data.with_validation(0.25), method.rates, rounds, fd.tuning.SEEDS[:1])
    return min(runs, key=lambda run: np.nan_to_num(run.history[-1]["perplexity"], nan=np.inf)).setting["lr"]


def client_scores(method: Method, data: fd.FederatedData, runs: list[fd.Run]) -> dict[str, np.ndarray]:
    """The scores of each client of ``data``, the mean over the runs, and the perplexity."""
    sim = fd.Simulation(method.model, data, fd.algorithms.fedavg(), cohort_size=1)
    each = [sim.evaluate_clients(sim.init(jax.random.key(0), params=run.state.params)) for run in runs]
    scores = {name: np.mean([one[name] for one in each], 0) for name in each[0]}
    return scores | {"perplexity": np.mean([perplexity(one) for one in each], 0)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--checkpoint", help="a GPT-2 of Hugging Face: a folder, or a name such as gpt2")
    parser.add_argument("--epochs", type=int, default=6, help="of pretraining, without --checkpoint")
    parser.add_argument("--clients", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--tuning-rounds", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("runs/language_model"))
    args = parser.parse_args(arguments)
    fd.use_cpu_devices()
    base = checkpoint(args.checkpoint) if args.checkpoint else pretrained(args.epochs)
    data, by_task = federation(base.tokenizer, args.clients)
    histories, clients, results = {}, {}, {}
    for name, method in methods(base).items():
        lr = tuned(method, data, args.tuning_rounds)
        runs = runs_of(method, data, [lr], args.rounds, range(args.seeds))
        histories[name] = [run.history for run in runs]
        clients[name] = client_scores(method, data, runs)
        tasks = client_scores(method, by_task, runs)["accuracy"]
        last = [history[-1] for history in histories[name]]
        results[name] = {
            "lr": lr,
            "exact match": [record["accuracy"] for record in last],
            "perplexity": [record["perplexity"] for record in last],
            "exact match of tasks": dict(zip(TASKS, tasks.tolist(), strict=True)),
            "bytes sent by a client and round": last[0]["uplink_bytes"] / min(8, args.clients),
        }
        print(name, json.dumps(results[name]), flush=True)
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    fd.plots.curves(histories, args.output / "curves.png", y=PANELS)
    fd.plots.fairness(clients, args.output / "clients.png")


if __name__ == "__main__":
    main()
