"""Tests of experiments/language_model.py: the answers' labels, loss and scores, and the script with a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_drift as fd
from fedjax_drift.models.pretrained import save_params

pytest.importorskip("tokenizers")
from experiments import language_model as lm
from experiments import low_rank

WIDTH, DEPTH, LENGTH = 16, 2, 48


@pytest.fixture(scope="module")
def tokenizer():
    return lm.trained_tokenizer(lm.general_texts(exercises=200))


def test_the_labels_are_the_tokens_of_the_answers(tokenizer) -> None:
    data, by_task = lm.federation(tokenizer, clients=3)
    assert data.num_clients == 3 and by_task.client_names == tuple(lm.TASKS)
    rng = np.random.default_rng(0)
    for task in lm.TASKS.values():
        question = task(rng)
        (x,), (y,) = lm.padded([lm.tokens(tokenizer, question)], LENGTH)
        answer = y != lm.IGNORED
        text = f"Q: {question.instruction}\nA: {question.answer}"
        assert tokenizer.decode(x[: answer.nonzero()[0][-1] + 1]) == text
        assert tokenizer.decode(y[answer], skip_special_tokens=False) == f" {question.answer}{lm.END}"
        np.testing.assert_array_equal(x[1:][answer[:-1]], y[:-1][answer[:-1]])


@pytest.mark.thorough
def test_the_accuracy_is_the_exact_match_of_greedy_decoding(tokenizer) -> None:
    """Half of the answers are what the model decodes. In the others, one token differs."""
    vocabulary, prompt, answer = tokenizer.get_vocab_size(), 5, 4
    model = lm.on_answers(fd.models.decoder(vocabulary, 8, WIDTH, DEPTH))
    params = jax.tree.map(lambda leaf: 10 * leaf, model.init(jax.random.key(0)))
    ids = np.random.default_rng(0).integers(vocabulary, size=(6, prompt)).tolist()
    for _ in range(answer):
        for row in ids:
            row.append(int(model.apply(params, jnp.array([row]))[0, -1].argmax()))
    for row, place in zip(ids[3:], (prompt, prompt + 1, -1), strict=True):
        row[place] = (row[place] + 1) % vocabulary
    x, y = lm.padded([(row[:prompt], row[prompt:]) for row in ids], 8)
    logits = model.apply(params, x)
    scores = model.scores(logits, y)
    assert scores["accuracy"].tolist() == [True] * 3 + [False] * 3

    logs = np.asarray(jax.nn.log_softmax(logits))
    of_answers = [[logs[i, prompt - 1 + j, ids[i][prompt + j]] for j in range(answer)] for i in range(6)]
    np.testing.assert_allclose(model.loss(logits, y), -np.mean(of_answers, 1), rtol=1e-5)
    means = {name: np.mean(values) for name, values in scores.items()}
    np.testing.assert_allclose(lm.perplexity(means), np.exp(-np.mean(of_answers)), rtol=1e-5)


def saved_checkpoint(folder: Path, tokenizer) -> None:
    """A GPT-2 with random parameters, as Hugging Face's transformers saves it."""
    vocabulary, rng = tokenizer.get_vocab_size(), np.random.default_rng(0)
    sizes = {"vocab_size": vocabulary, "n_positions": LENGTH, "n_embd": WIDTH, "n_layer": DEPTH, "n_head": 4}
    shapes = {"wte.weight": (vocabulary, WIDTH), "wpe.weight": (LENGTH, WIDTH)}
    for layer in range(DEPTH):
        shapes |= {f"h.{layer}.ln_{i}.weight": (WIDTH,) for i in (1, 2)}
        dense = {"attn.c_attn": (1, 3), "attn.c_proj": (1, 1), "mlp.c_fc": (1, 4), "mlp.c_proj": (4, 1)}
        shapes |= {f"h.{layer}.{name}.weight": (a * WIDTH, b * WIDTH) for name, (a, b) in dense.items()}
        shapes |= {f"h.{layer}.{name}.bias": (b * WIDTH,) for name, (_, b) in dense.items()}
        shapes |= {f"h.{layer}.ln_{i}.bias": (WIDTH,) for i in (1, 2)}
    shapes |= {"ln_f.weight": (WIDTH,), "ln_f.bias": (WIDTH,)}
    arrays = {name: rng.normal(0, 0.02, shape).astype("f4") for name, shape in shapes.items()}
    save_params(arrays, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"} | sizes))
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.thorough
def test_a_checkpoint_of_another_architecture_is_translated(tokenizer, tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, vocab_size=tokenizer.get_vocab_size(), num_key_value_heads=2)
    module = transformers.LlamaForCausalLM(config)
    module.save_pretrained(tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    base = lm.checkpoint(str(tmp_path))
    x = np.random.default_rng(0).integers(0, tokenizer.get_vocab_size(), (2, lm.LENGTH)).astype("int32")
    expected = module.eval()(torch.from_numpy(x).long()).logits.detach()
    np.testing.assert_allclose(base.model.apply(base.params, x), expected, atol=1e-5)
    data, _ = lm.federation(tokenizer, 3, length=base.length)
    assert data.x.shape[1:] == (lm.LENGTH,)
    for name, method in lm.methods(base, rank=2).items():
        (run,) = lm.runs_of(method, data, method.rates[:1], 1, [0])
        assert np.isfinite(run.history[-1]["perplexity"]), name


@pytest.mark.thorough
def test_the_script_fine_tunes_a_checkpoint(tokenizer, tmp_path) -> None:
    saved_checkpoint(tmp_path, tokenizer)
    options = "--clients 3 --rounds 1 --tuning-rounds 1 --seeds 1 --methods FFA-LoRA"
    lm.main(["--checkpoint", str(tmp_path), "--output", str(tmp_path), *options.split()])
    (result,) = json.loads((tmp_path / "results.json").read_text()).values()
    assert np.isfinite(result["perplexity"]).all() and len(result["exact match by task"]) == len(lm.TASKS)
    assert (tmp_path / "curves.png").exists() and (tmp_path / "clients.png").exists()


@pytest.mark.thorough
def test_algorithms_for_adapters_are_compared(tokenizer, monkeypatch) -> None:
    """The clients of FedSA-LoRA have models of their own, FedEx-LoRA's drift is rounding, and FedIT's is not."""
    model = fd.models.decoder(tokenizer.get_vocab_size(), LENGTH, WIDTH, DEPTH)
    base = lm.Base(tokenizer, model, model.init(jax.random.key(0)))
    method, (data, _) = lm.methods(base)["FedIT"], lm.federation(tokenizer, 3)
    monkeypatch.setattr(low_rank, "setting", lambda: (method, data))
    monkeypatch.setattr(low_rank, "TUNING_ROUNDS", 1)
    made = {name: low_rank.compute(2, name)["runs"] for name in ("FedIT", "FedEx-LoRA", "FedSA-LoRA")}
    assert all(run["aggregation drift"][1] > 1e-4 for run in made["FedIT"])
    assert all(max(run["aggregation drift"]) < 1e-5 for run in made["FedEx-LoRA"])
    untrained = fd.Simulation(method.model, data, fd.algorithms.fedavg(), cohort_size=1)
    start = low_rank.scores(untrained, untrained.init(jax.random.key(0)))["perplexity"]
    for own, shared in zip(made["FedSA-LoRA"], made["FedIT"], strict=True):
        assert own["aggregation drift"] == [] and own["megabytes sent"] < shared["megabytes sent"]
        assert 1 < own["perplexity"] < 0.99 * start


def test_the_page_of_adapters_is_that_of_the_results() -> None:
    found = low_rank.EXPERIMENT.read(low_rank.RESULTS / "low_rank.json")
    assert list(found) == low_rank.EXPERIMENT.cells
    assert low_rank.report(found)["low_rank.md"] + "\n" == (low_rank.RESULTS / "low_rank.md").read_text()
