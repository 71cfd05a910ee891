"""Federated fine-tuning of a language model: the clients follow instructions, and train LoRA adapters of a decoder.

    python -m experiments.language_model [--checkpoint gpt2] [--rounds 32] [--seeds 2] [--output DIR]

Without ``--checkpoint``, a decoder with 0.4 million parameters is pretrained here, on Python's language reference and
on generated exercises. ``--checkpoint`` takes a causal language model of Hugging Face, by its name or as a folder,
with its own tokenizer. If it is not a GPT-2, this needs transformers and PyTorch.

Clients have pairs of an instruction and an answer. A client has a mix of tasks of its own. The loss is that of the
answers' tokens. Every method tries the same number of learning rates. Needs tokenizers and safetensors.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import fedjax_drift as fd

END = "<|endoftext|>"  # the token that ends an answer, as in GPT-2's vocabulary
ENDS = (END, "</s>", "<|end_of_text|>", "<eos>")  # the same in other vocabularies
LENGTH = 64  # of the sequences for a checkpoint that is not a GPT-2, in tokens
COHORT = 8  # clients of a round
TESTED = 64  # examples that are evaluated together, so that the logits of a large vocabulary fit in memory
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
    return Question(f"Last of {asked}", given[-1], f"the end of {asked} is {given[-1]}")


def opposite(rng: np.random.Generator) -> Question:
    word = str(rng.choice(list(OPPOSITES)))
    return Question(f"Opposite of {word}", OPPOSITES[word], f"{word} is not {OPPOSITES[word]}")


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
    params: Any
    length: int | None = None  # of its inputs; None: any


def general_texts(exercises: int, seed: int = 0) -> list[str]:
    """The chapters of Python's language reference, which Python comes with, and exercises in plain words."""
    from pydoc_data.topics import topics

    rng, tasks = np.random.default_rng(seed), list(TASKS.values())
    plain = [tasks[rng.integers(len(tasks))](rng).plain for _ in range(exercises)]
    return [" " + re.sub(r"\s+", " ", text).strip() for text in [*topics.values(), *plain]]


def trained_tokenizer(texts: list[str], vocabulary: int = 512) -> Tokenizer:
    """A tokenizer of GPT-2's kind, byte-pair encoding, that is trained on texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def pretrained(
    rounds: int = 50, exercises: int = 16_000, width: int = 96, depth: int = 3, length: int = 32, seed: int = 0
) -> Base:
    """Pretrains a decoder on `general_texts`. An END follows each of them, as in GPT-2's pretraining.

    Two workers, one per core, train on halves of the text, and average their parameters after every 32 steps.
    """
    texts = general_texts(exercises, seed)
    tokenizer = trained_tokenizer(texts)
    end = tokenizer.token_to_id(END)
    ids = np.array([token for text in tokenizer.encode_batch(texts) for token in (*text.ids, end)], np.int32)
    rows = ids[: len(ids) // (length + 1) * (length + 1)].reshape(-1, length + 1)
    halves = np.array_split(np.random.default_rng(seed).permutation(rows), 2)
    data = fd.FederatedData.from_clients([(half[:, :-1], half[:, 1:]) for half in halves], name="general text")
    model = fd.models.decoder(tokenizer.get_vocab_size(), length, width, depth)
    schedule = optax.cosine_decay_schedule(3e-3, rounds, 0.1)
    local = fd.LocalTraining(lr=schedule, batch_size=16, steps=32, optimizer=optax.scale_by_adam())
    sim = fd.Simulation(model, data, fd.algorithms.fedavg(), local=local, cohort_size=2)
    state, _ = sim.run(sim.init(jax.random.key(seed)), rounds, progress=False)
    return Base(tokenizer, model, jax.device_get(state.params))


def checkpoint(name: str) -> Base:
    """A causal language model of Hugging Face: a folder with its configuration, tokenizer.json and parameters, or a
    name. A GPT-2 becomes `fd.models.decoder`, and another one is translated from PyTorch."""
    if Path(name).is_dir():
        found = Path(name)
    else:
        from huggingface_hub import snapshot_download

        found = Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
    config = json.loads((found / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(found / "tokenizer.json"))
    if config["model_type"] == "gpt2":
        model = fd.models.decoder(
            *(config[key] for key in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"))
        )
        params = fd.models.load_params(model, found / "model.safetensors", names=fd.models.names.GPT2)
        return Base(tokenizer, model, params)
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(found, dtype="float32", use_cache=False)
    model = fd.Model.from_torch(module, (LENGTH,), input_dtype=jnp.int32)
    return Base(tokenizer, model, model.init(jax.random.key(0)), LENGTH)


# Data


def tokens(tokenizer: Tokenizer, question: Question) -> tuple[list[int], list[int]]:
    """The token ids of the prompt, and those of the answer with its end."""
    answer = tokenizer.encode(f" {question.answer}").ids
    return tokenizer.encode(f"Q: {question.instruction}\nA:").ids, [*answer, end_of(tokenizer)]


def end_of(tokenizer: Tokenizer) -> int:
    """The id of the token that ends an answer."""
    return next(i for i in map(tokenizer.token_to_id, ENDS) if i is not None)


def padded(pairs: Iterable[tuple[list[int], list[int]]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids int32 [M, T], and the next token at each position of an answer, int32 [M, T], elsewhere IGNORED."""
    x, y = [], []
    for prompt, answer in pairs:
        padding = [answer[-1]] * (length - len(prompt + answer) + 1)  # no token sees it, because it comes later
        x.append([*prompt, *answer[:-1], *padding])
        y.append([IGNORED] * (len(prompt) - 1) + answer + [IGNORED] * len(padding))
    return np.array(x, np.int32), np.array(y, np.int32)


def federation(
    tokenizer: Tokenizer, clients: int = 40, alpha: float = 0.5, seed: int = 0, length: int | None = None
) -> tuple[fd.FederatedData, fd.FederatedData]:
    """Clients that have 16 to 48 training examples and 16 test examples, and a test set for each task.

    The shares of the tasks at a client are a draw of Dirichlet(alpha). Sequences are padded to ``length``,
    by default that of the longest one.
    """
    rng = np.random.default_rng([seed, 1])

    def examples(shares: np.ndarray, number: int) -> list[tuple[list[int], list[int]]]:
        names = rng.choice(list(TASKS), number, p=shares)
        return [tokens(tokenizer, TASKS[name](rng)) for name in names]

    shares = rng.dirichlet(np.full(len(TASKS), alpha), clients)
    train = [examples(of_client, int(rng.integers(16, 49))) for of_client in shares]
    tests = [examples(of_client, 16) for of_client in shares]
    tasks = [examples(of_task, 64) for of_task in np.eye(len(TASKS))]
    length = length or max(len(prompt + answer) - 1 for part in train + tests + tasks for prompt, answer in part)
    clients_x_y, tests_x_y, tasks_x_y = ([padded(part, length) for part in parts] for parts in (train, tests, tasks))
    of_task = dict(zip(TASKS, tasks_x_y, strict=True))
    return (
        fd.FederatedData.from_clients(clients_x_y, test_clients=tests_x_y, name="instructions"),
        fd.FederatedData.from_clients(of_task, test_clients=of_task, name="tasks"),
    )


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


NAMES = ("FedAvg", "SCAFFOLD", "FedIT", "FFA-LoRA")
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
    adapted = fd.models.lora(on_answers(base.model), rank, "attention|attn|mlp", alpha=2 * rank, base=base.params)
    only_b = fd.models.trainable(adapted, "/b$")
    fedavg, scaffold = fd.algorithms.fedavg(), fd.algorithms.scaffold(option="I", weighting="examples")
    of_sgd, of_adamw = (0.03, 0.1, 0.3, 0.9), (2e-3, 6e-3, 1.8e-2, 5.4e-2)
    chosen = (
        Method(adapted, fedavg, sgd, of_sgd),
        Method(adapted, scaffold, sgd, of_sgd),
        Method(adapted, fedavg, adamw, of_adamw),
        Method(only_b, fedavg, adamw, of_adamw),
    )
    return dict(zip(NAMES, chosen, strict=True))


def runs_of(
    method: Method, data: fd.FederatedData, rates: Iterable[float], rounds: int, seeds: Iterable[int]
) -> list[fd.Run]:
    """The runs of all rates and seeds. The records of evaluated rounds have a perplexity."""

    def build(lr: float) -> fd.Simulation:
        cohort, local = min(COHORT, data.num_clients), method.local(lr)
        return fd.Simulation(
            method.model, data, method.algorithm, local=local, cohort_size=cohort, eval_batch_size=TESTED
        )

    runs = fd.sweep(build, rounds, seeds, fd.grid(lr=rates), eval_every=max(1, rounds // 8), progress=False)
    for record in (record for run in runs for record in run.history if "nats" in record):
        record["perplexity"] = float(perplexity(record))
    return runs


def tuned(method: Method, data: fd.FederatedData, rounds: int) -> float:
    """The learning rate with the lowest perplexity on a quarter of the training examples, which is held out."""
    runs = runs_of(method, data.with_validation(0.25), method.rates, rounds, fd.tuning.SEEDS[:1])
    return min(runs, key=lambda run: np.nan_to_num(run.history[-1]["perplexity"], nan=np.inf)).setting["lr"]


def compared(
    methods: dict[str, Method], data: fd.FederatedData, tuning_rounds: int, rounds: int, seeds: int
) -> dict[str, list[fd.Run]]:
    """The runs of each method with its tuned rate, one per seed."""
    return {
        name: runs_of(method, data, [tuned(method, data, tuning_rounds)], rounds, range(seeds))
        for name, method in methods.items()
    }


def client_scores(method: Method, data: fd.FederatedData, runs: list[fd.Run]) -> dict[str, np.ndarray]:
    """The scores of each client of ``data``, the mean over the runs, and the perplexity."""
    sim = fd.Simulation(method.model, data, fd.algorithms.fedavg(), cohort_size=1, eval_batch_size=TESTED)
    each = [sim.evaluate_clients(sim.init(jax.random.key(0), params=run.state.params)) for run in runs]
    scores = {name: np.mean([one[name] for one in each], 0) for name in each[0]}
    return scores | {"perplexity": np.mean([perplexity(one) for one in each], 0)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--checkpoint", help="a causal language model of Hugging Face: a folder, or a name such as gpt2"
    )
    parser.add_argument("--pretraining", type=int, default=50, help="rounds, without --checkpoint")
    parser.add_argument("--clients", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=32)
    parser.add_argument("--tuning-rounds", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--methods", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--output", type=Path, default=Path("runs/language_model"))
    args = parser.parse_args(arguments)
    fd.use_cpu_devices()
    base = checkpoint(args.checkpoint) if args.checkpoint else pretrained(args.pretraining)
    data, by_task = federation(base.tokenizer, args.clients, length=base.length)
    every = methods(base)
    every = {name: every[name] for name in args.methods}
    runs = compared(every, data, args.tuning_rounds, args.rounds, args.seeds)
    results = {
        name: {
            "lr": of_method[0].setting["lr"],
            "exact match": [run.history[-1]["accuracy"] for run in of_method],
            "perplexity": [run.history[-1]["perplexity"] for run in of_method],
            "exact match by task": client_scores(every[name], by_task, of_method)["accuracy"].tolist(),
        }
        for name, of_method in runs.items()
    }
    print(json.dumps({"tasks": list(TASKS)} | results, indent=1))
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    fd.plots.curves(runs, args.output / "curves.png", y=PANELS, style=fd.plots.Style(band="range"))
    fairness = {name: client_scores(every[name], data, of_method) for name, of_method in runs.items()}
    fd.plots.fairness(fairness, args.output / "clients.png")


if __name__ == "__main__":
    main()
