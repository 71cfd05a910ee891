"""Tests of `Model.scores`, and of the tasks without images: MovieLens with DIN, AG News, BindingDB."""

from __future__ import annotations

import json
import os
import re
from contextlib import nullcontext
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

import fedjax_drift as fd
from fedjax_drift import cli
from fedjax_drift.data import bindingdb, movielens
from fedjax_drift.data.datasets import RECORDS
from fedjax_drift.data.sources import Request
from fedjax_drift.models import layers
from fedjax_drift.simulation.records import nonfinite_message

pytestmark = pytest.mark.thorough

# ---------------------------------------------------------------- scores


def test_auc_counts_all_pairs_and_ties_as_one_half() -> None:
    rng = np.random.default_rng(0)
    z, y = rng.integers(0, 9, 300).astype("f4"), rng.integers(0, 2, 300)
    z[:2], y[:3] = np.inf, 1
    difference = np.sign(np.subtract.outer(z[y == 1], z[y == 0]))
    assert float(jax.jit(fd.ranking.auc)(z, y)) == pytest.approx((difference + 1).mean() / 2, rel=1e-6)
    assert np.isnan(fd.ranking.auc(np.append(z[:-1], np.nan), y))
    assert np.isnan(fd.ranking.auc(z, np.ones(300)))


def test_ranking_metrics_use_the_rank_of_the_first_example_of_each_block() -> None:
    z = jnp.array([[3.0, 1, 2, 0], [1, 2, 3, 0], [0, 1, 2, 3], [1, 1, 0, 0], [np.nan, 0, 0, 0]]).reshape(-1, 1)
    assert fd.ranking.ranks(z, 4).tolist() == [1, 3, 4, 2, 4]  # ties and NaN give a worse rank
    assert float(fd.ranking.hit_rate(z, 2, group=4)) == pytest.approx(2 / 5)
    assert float(fd.ranking.ndcg(z, 3, group=4)) == pytest.approx((1 + 1 / np.log2(4) + 1 / np.log2(3)) / 5)
    found = fd.ranking.scores(4, (1, 3))(z, jnp.tile(jnp.array([1, 0, 0, 0]), 5))
    assert list(found) == ["auc", "hr@1", "hr@3", "ndcg@1", "ndcg@3"]
    with pytest.raises(ValueError, match="group must divide the number of test examples, got 3 for 20 examples"):
        fd.ranking.ranks(z, 3)
    with pytest.raises(ValueError, match=r"k must be in 1\.\.4, got 5"):
        fd.ranking.scores(4, (5,))


def by_place(logits: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
    """Checksums that change if an example is missing, padded or moved."""
    place = jnp.arange(1, len(y) + 1)
    return {"logits": (logits[:, 0] * place).sum(), "labels": (y * place).sum(), "rows": jnp.asarray(len(y))}


def scored(scores: object, test_rows: int = 11, **options: object) -> fd.Simulation:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30 + test_rows, 4)).astype("f4"), rng.integers(0, 3, 30 + test_rows)
    data = fd.FederatedData(x[:30], y[:30], np.full(6, 5), x[30:], y[30:])
    model = fd.models.linear((4,), 3)._replace(scores=scores)
    return fd.Simulation(model, data, fd.algorithms.feddyn(0.1), cohort_size=2, eval_batch_size=3, **options)


def test_scores_receive_all_test_examples_in_order() -> None:
    sim = scored(by_place)
    assert sim.mesh.size == 2
    state, history = sim.run(sim.init(jax.random.key(3)), rounds=2, eval_every=2, progress=False)
    expected = by_place(sim.model.apply(state.params, sim.data.x_test), sim.data.y_test)
    assert abs(float(expected["logits"])) > 0.1
    for found in (sim.evaluate(state), history[-1]):
        for name, value in expected.items():
            assert found[name] == pytest.approx(float(value), rel=1e-5)
    mean = by_place(sim.model.apply(state.server.client_mean, sim.data.x_test), sim.data.y_test)
    assert history[-1]["client_mean_logits"] == pytest.approx(float(mean["logits"]), rel=1e-5)

    runs = sim.sweep(rounds=2, seeds=[3, 4, 5], eval_every=2, progress=False)
    assert runs[0].history[-1]["logits"] == pytest.approx(float(expected["logits"]), rel=1e-4)
    assert sim.model.computing_in(jnp.bfloat16).scores is by_place


@pytest.mark.parametrize(
    "scores, message",
    [
        (lambda z, y: z.mean(), "must return a dict of numbers .* got a ShapeDtypeStruct"),
        (
            lambda z, y: {"auc": z.mean(0)},
            r"must return a number or one number per example, \[11\] .* got \[3\] for 'auc'",
        ),
        (lambda z, y: {"loss": z.mean()}, "must not return .loss."),
        (
            lambda z, y: {"right": z[:, 0], "n": z[:5, 0]},
            r"a number or one number per example, \[11\] .* got \[5\] for 'n'",
        ),
        (
            lambda z, y: {"right": jnp.resize(z, 11)},
            r"one number per example .* for 7 examples: right \[11\]|any number of rows",
        ),
        (lambda z, y: {"auc": float(z.mean())}, r"must accept logits \[11, 3\] with labels \[11\], got one that fails"),
        (fd.ranking.scores(), "a ranking needs one logit per example"),
    ],
)
def test_scores_are_checked_before_compilation(scores: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scored(scores)


def test_scores_per_example_are_averaged_over_all_examples_and_per_client() -> None:
    """All functions report the accuracy that the scores of a binary classifier with one logit define."""
    rng = np.random.default_rng(0)
    sizes, tests = [5, 9, 3, 12], [4, 0, 3, 6]
    clients = [(rng.normal(size=(n, 3)).astype("f4"), rng.integers(0, 2, n)) for n in sizes]
    own = [(rng.normal(size=(n, 3)).astype("f4"), rng.integers(0, 2, n)) for n in tests]
    data = fd.FederatedData.from_clients(clients, test_clients=own)
    model = fd.Model(
        init=lambda key: jax.random.normal(key, (3,)),
        apply=lambda w, x: x @ w,
        loss=fd.models.binary_cross_entropy,
        scores=lambda z, y: {"accuracy": (z > 0) == (y == 1), "auc": fd.ranking.auc(z, y)},
    )
    # FedGVR needs the accuracy.
    sim = fd.Simulation(model, data, fd.algorithms.fedgvr(), cohort_size=2, eval_batch_size=4)
    state, history = sim.run(sim.init(jax.random.key(0)), 2, eval_every=1, progress=False)
    z = data.x_test @ np.asarray(state.params)
    right, ends = (z > 0) == data.y_test, np.cumsum(tests)
    scores, each = sim.evaluate(state), sim.evaluate_clients(state, fine_tune=1)
    assert scores["accuracy"] == history[-1]["accuracy"] == pytest.approx(right.mean())
    assert scores["auc"] == pytest.approx(float(fd.ranking.auc(z, data.y_test)))
    assert set(each) == {"loss", "accuracy", "personal_loss", "personal_accuracy"}  # auc has no value per client
    for i, (n, end) in enumerate(zip(tests, ends, strict=True)):
        assert each["accuracy"][i] == pytest.approx(right[end - n : end].mean()) if n else np.isnan(each["accuracy"][i])
    assert sim.sweep(2, [0], progress=False)[0].history[-1]["accuracy"] == pytest.approx(right.mean())
    # A scalar with the name "accuracy" replaces a classifier's accuracy, and there is no accuracy per client.
    top = fd.models.linear((3,), 2)._replace(scores=lambda z, y: {"accuracy": jnp.asarray(0.25)})
    replaced = fd.Simulation(top, data, fd.algorithms.fedavg(), cohort_size=2)
    start = replaced.init(jax.random.key(0))
    assert replaced.evaluate(start)["accuracy"] == 0.25 and "accuracy" not in replaced.evaluate_clients(start)


# ---------------------------------------------------------------- MovieLens and DIN


@pytest.fixture
def ml_1m(tmp_path: Path) -> Path:
    """Writes the ratings of 12 users in the format of ML-1M and returns the folder.

    There are up to 40 films, none with an id that is a multiple of 3. The ratings are not sorted by time.
    """
    rng = np.random.default_rng(0)
    lines = []
    for user in range(1, 13):
        films = rng.choice(np.setdiff1d(np.arange(1, 61), np.arange(0, 61, 3)), rng.integers(2, 9), replace=False)
        seconds = 978_300_000 + rng.choice(1000, len(films), replace=False)
        lines += [f"{user}::{film}::{rng.integers(1, 6)}::{time}" for film, time in zip(films, seconds, strict=True)]
    people = [f"{i}::{'MF'[i % 2]}::{movielens.AGES[i % 7]}::{i + 8}::{i % 5}0{i % 5}-é" for i in range(12, 0, -1)]
    (tmp_path / "ml-1m").mkdir()
    (tmp_path / "ml-1m" / "ratings.dat").write_text("\n".join(lines) + "\n", "latin-1")
    (tmp_path / "ml-1m" / "users.dat").write_text("\r\n".join(people), "latin-1")
    return tmp_path


def test_movielens_tests_on_the_latest_rating_and_draws_unrated_films(ml_1m: Path) -> None:
    data = fd.datasets.load("movielens", data_dir=ml_1m, history=3, test_negatives=9)
    rated: dict[int, list[tuple[int, int]]] = {}
    for line in (ml_1m / "ml-1m" / "ratings.dat").read_text().split():
        user, film, _, time = map(int, line.split("::"))
        rated.setdefault(user, []).append((time, film))
    known = {film for films in rated.values() for _, film in films}
    assert data.num_clients == 12 and data.test_sizes is not None and data.test_sizes.tolist() == [10] * 12
    assert data.x.dtype == np.int16 and data.x.shape[1] == 9
    for i in range(12):
        films = [film for _, film in sorted(rated[i + 1])]
        x, y = data.client(i)
        assert y.tolist() == [1, 0, 0, 0, 0] * (len(films) - 1)
        assert x[::5, 5].tolist() == films[:-1]
        test = data.x_test[10 * i : 10 * i + 10]
        assert test[0, 5] == films[-1] and data.y_test[10 * i : 10 * i + 10].tolist() == [1] + [0] * 9
        assert len(set(test[:, 5].tolist())) == 10
        for j, block in enumerate([*np.split(x, len(films) - 1), test]):
            assert (block[:, 6:] == [0] * (3 - j) + films[max(0, j - 3) : j]).all()
            assert set(block[1:, 5].tolist()) <= known - set(films)
            # The ids of the user, gender (F is 1, M is 2), age group, occupation and zip code.
            n = i + 1
            assert (block[:, :5] == [n, 2 - n % 2, 1 + n % 7, n + 9, 1 + n % 5]).all()
    assert movielens.sizes(data) == (13, 3, 8, 22, 6, max(known) + 1)
    assert (fd.datasets.load("movielens", None, ml_1m, history=3, test_negatives=9, seed=1).x != data.x).any()


def test_all_unrated_films_are_equally_likely_negative_examples(tmp_path: Path) -> None:
    users, films = np.repeat([7, 9], 3), np.array([900, 20, 31, 31, 5, 6])
    times = np.array([5, 5, 4, 1, 2, 3])
    np.savez(tmp_path / "movielens_latest_small.npz", user_id=users, movie_id=films, timestamp=times)
    data = fd.datasets.load(
        "movielens", None, tmp_path, size="latest-small", history=2, negatives=3000, test_negatives=2
    )
    x, y = data.client(0)
    assert x[0].tolist() == [7, 0, 0, 0, 0, 4, 0, 0]  # films 5, 6, 20, 31, 900 have the ids 1 to 5
    assert data.x_test[0].tolist() == [7, 0, 0, 0, 0, 3, 4, 5]  # ratings of the same second keep the file's order
    drawn = np.bincount(x[y == 0, 5], minlength=6)
    assert (drawn[1:3] > 2800).all() and drawn.sum() == drawn[1:3].sum() == 6000
    with pytest.raises(ValueError, match="at most 2, the number of films that user 7 never rated in .*, got 3"):
        fd.datasets.load("movielens", None, tmp_path, size="latest-small", test_negatives=3)


def test_missing_or_damaged_movielens_files_are_reported(ml_1m: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"read from ml-1m.ratings\.dat in \S*elsewhere, which does not"):
        fd.datasets.load("movielens", data_dir=tmp_path / "elsewhere")
    ratings = ml_1m / "ml-1m" / "ratings.dat"
    lines = ratings.read_text().splitlines()
    for line, message in (
        ("1::7::5", r"ratings\.dat: line 5 must be user::movie::stars::seconds as in ML-1M, got '1::7::5"),
        ("0::7::5::978300760", "line 5 must be user::movie"),
        ("1::-7::5::978300760", "line 5 must be user::movie"),
        ("1::7::5::97830076", r"ratings\.dat: line 5 must be user::movie::stars::seconds"),
        ("99::7::5::978300760", r"the user 99 of line 5 is not in .*users\.dat"),
    ):
        ratings.write_text("\n".join([*lines[:4], line, *lines[5:]]))
        with pytest.raises(ValueError, match=message):
            fd.datasets.load("movielens", data_dir=ml_1m)
    (ml_1m / "ml-1m" / "users.dat").write_text("1::M::17::3::55455")
    with pytest.raises(ValueError, match=r"users\.dat: line 1 must be user::gender::age"):
        fd.datasets.load("movielens", data_dir=ml_1m)


def test_din_matches_its_equations() -> None:
    sizes = (5, 3, 8, 22, 6, 30)
    model = fd.models.din(sizes)
    given = jax.jit(model.init)(jax.random.key(0))
    params = jax.tree.map(lambda a: np.asarray(a, np.float64), given)
    rng = np.random.default_rng(0)
    x = np.stack([rng.integers(0, [*sizes, 30, 30, 30, 30]) for _ in range(6)]).astype(np.int16)
    x[0, 6:], x[1, 6:8] = 0, 0  # no history, and a short one

    def dense(name: str, v: np.ndarray) -> np.ndarray:
        return v @ params[name]["kernel"] + params[name]["bias"]

    def logit(row: np.ndarray) -> float:
        tables = [params[f"embeddings_{i}"]["table"] for i in range(6)]
        t = tables[5][row[5]]
        seen = [tables[5][item] for item in row[6:] if item]
        weight = [dense("attention_1", np.maximum(dense("attention_0", np.r_[t, s, t - s, t * s]), 0)) for s in seen]
        weight = np.exp(weight) / np.sum(np.exp(weight))
        interest = sum((w * s for w, s in zip(weight, seen, strict=True)), np.zeros(15))
        v = np.concatenate([table[i] for table, i in zip(tables, row, strict=False)] + [interest])
        v = np.maximum(dense("denses_1", np.maximum(dense("denses_0", v), 0)), 0)
        return float(dense("denses_2", v)[0])

    apply = jax.jit(model.apply)
    np.testing.assert_allclose(apply(given, x), [logit(row) for row in x], rtol=2e-4, atol=1e-5)
    np.testing.assert_allclose(model.loss(jnp.array([0.0, 3.0]), jnp.array([1, 0])), [np.log(2), 3.048587], rtol=1e-5)
    gradient = jax.jit(jax.grad(lambda p: model.apply(p, x).sum()))(given)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))
    x[0, 0] = 5  # an id beyond the embedding table
    assert np.isnan(apply(given, x)).tolist() == [True] + [False] * 5


def test_the_command_line_derives_the_sizes_of_din_from_the_data(
    ml_1m: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    arguments = ["run", "--dataset", "movielens:history=3,test_negatives=9", "--data-dir", str(ml_1m)]
    arguments += ["--algorithm", "fedavg", "--rounds", "2", "--cohort", "3", "--output", str(tmp_path / "out")]
    assert cli.main([*arguments, "--no-progress"]) == 0
    last = json.loads((tmp_path / "out" / "rounds.jsonl").read_text().splitlines()[-1])
    assert {"auc", "hr@5", "hr@10", "ndcg@5", "ndcg@10", "loss"} <= last.keys() and 0 <= last["auc"] <= 1
    model = json.loads((tmp_path / "out" / "config.json").read_text())["model"]
    assert model["sizes"][:4] == [13, 3, 8, 22] and model["test_negatives"] == 9


def test_real_movielens() -> None:
    if not os.environ.get("FEDJAX_DRIFT_DATA"):
        pytest.skip("FEDJAX_DRIFT_DATA does not name the folder of the real data sets")
    data = fd.datasets.load("movielens", size="latest-small")
    assert data.num_clients == 610 and len(data.x_test) == 61_000 and len(data.x) == 5 * (100_836 - 610)


# ---------------------------------------------------------------- AG News


def test_agnews_gives_ids_to_the_most_frequent_words(tmp_path: Path) -> None:
    (tmp_path / "ag_news_csv").mkdir()
    train = tmp_path / "ag_news_csv" / "train.csv"
    train.write_text('"3","Oil up, up","Oil ""rose"" \\$40"\n"1","Up!","x"\n"2","Oil","é"\n')
    train.with_name("test.csv").write_text('"4","Gold","up 40 oil zebra oil oil oil"\n')
    data = fd.datasets.load("agnews", fd.partition.iid(1), tmp_path, vocabulary=5, length=6)
    # "oil" and "up" occur three times each. "40" is the next word, because it sorts before "rose" and "x". The other
    # words are unknown.
    rows = {tuple(x): int(y) for x, y in zip(data.x.tolist(), data.y, strict=True)}
    assert rows == {(2, 3, 3, 2, 1, 4): 2, (3, 1, 0, 0, 0, 0): 0, (2, 0, 0, 0, 0, 0): 1}
    assert data.x_test.tolist() == [[1, 3, 4, 2, 1, 2]] and data.y_test.tolist() == [3]

    with pytest.raises(FileNotFoundError, match=r"read from ag_news_csv.train\.csv .*download AG's News"):
        fd.datasets.load("agnews", data_dir=tmp_path / "elsewhere")
    for line, message in (('"5","a","b"', ": line 4 must be .* got '5,a,b'"), ('"1","a', " is damaged.*end of data")):
        train.write_text('"3","a","b\nc"\n"1","a","b"\n' + line + "\n")
        with pytest.raises(ValueError, match=rf"train\.csv{message}"):
            fd.datasets.load("agnews", data_dir=tmp_path)


# ---------------------------------------------------------------- BindingDB


HEADER = ["Reactant ID", "Ligand SMILES", "Kd (nM)", "Organism", "BindingDB Target Chain Sequence"]


def binding_file(folder: Path, rows: list[tuple[str, str, str]], header: list[str] = HEADER) -> Path:
    lines = ["\t".join(header)] + [
        f"{i}\t{smiles}\t{kd}\tMöuse\t{protein}\t" for i, (smiles, kd, protein) in enumerate(rows)
    ]
    path = folder / bindingdb.FILENAME
    path.write_text("\n".join(lines) + "\n", "latin-1")
    return path


def test_bindingdb_uses_pairs_with_a_conclusive_kd(tmp_path: Path) -> None:
    rows = [("CCO", " 12.5", "MKV"), ("CCO", "99", "MKV"), ("C=O", ">10000", "mk v"), ("N", "<100", "MKV")]
    rows += [("N", "", "MKV"), ("", "5", "MKV"), ("N", "5", ""), ("O", "30", "MKV"), ("[Na+]", "<1e1", "M" * 9)]
    path = binding_file(tmp_path, rows)
    telling = {("CCO", "MKV"): True, ("C=O", "MKV"): False, ("O", "MKV"): False, ("[Na+]", "M" * 9): True}
    assert bindingdb.measurements(path) == telling
    binding_file(tmp_path, rows, [*HEADER[:4], "BindingDB Target Chain Sequence 1"])
    assert bindingdb.measurements(path) == telling

    request = Request(RECORDS["bindingdb"], tmp_path, seed=0, by_writer=False)
    (x, y), (x_test, y_test), *_ = bindingdb.load(request, ligand=4, protein=5)
    assert len(y) == 3 and len(y_test) == 1 and x.dtype == np.int8
    text = ["".join(chr(c + 32) if c else "." for c in row) for row in [*x, *x_test]]
    assert dict(zip(text, [*y, *y_test], strict=True)) == {
        "CCO.MKV..": 1,
        "C=O.MKV..": 0,
        "O...MKV..": 0,
        "[Na+MMMMM": 1,
    }
    assert (bindingdb.load(request, ligand=4, protein=5).train[0] == x).all()

    with pytest.raises(FileNotFoundError, match=r"read from BindingDB_All\.tsv .*download all of BindingDB"):
        fd.datasets.load("bindingdb", data_dir=tmp_path / "elsewhere")
    path.write_text(path.read_text("latin-1").replace(" 12.5", "12,5"), "latin-1")
    with pytest.raises(ValueError, match=r"BindingDB_All\.tsv: line 2 must be a Kd such as 12\.5.*got '12,5'"):
        fd.datasets.load("bindingdb", data_dir=tmp_path)
    path.write_text("\t".join(HEADER) + "\n0\tCCO\t5\n")
    with pytest.raises(ValueError, match="line 2 must be at least 5 values"):
        fd.datasets.load("bindingdb", data_dir=tmp_path)
    binding_file(tmp_path, rows, ["Kd", *HEADER[1:2], *HEADER[3:], "x"])
    with pytest.raises(ValueError, match=re.escape("line 1 must be a header with Ligand SMILES")):
        fd.datasets.load("bindingdb", data_dir=tmp_path)


# ---------------------------------------------------------------- text_classifier and drug_target


def small(name: str, cosine: bool) -> tuple[fd.Model, np.ndarray]:
    rng = np.random.default_rng(0)
    if name == "text_classifier":
        return fd.models.text_classifier(3, vocabulary=20, width=8, cosine=cosine), rng.integers(1, 20, (4, 6))
    model = fd.models.drug_target(3, ligand=16, vocabulary=20, width=4, filters=2, cosine=cosine)
    return model, rng.integers(0, 20, (4, 40), np.int8)


@pytest.mark.parametrize("name", ["text_classifier", "drug_target"])
def test_text_and_drug_models_meet_the_requirements_of_moon_and_lfd(name: str) -> None:
    model, x = small(name, cosine=True)
    params = jax.jit(model.init)(jax.random.key(0))
    logits, features, gradient = jax.jit(
        lambda x: (
            model.apply(params, x),
            model.features(params, x),
            jax.grad(lambda p: model.apply(p, x).sum())(params),
        )
    )(x)
    assert features.shape == (4, 256) and abs(logits).max() <= 1
    np.testing.assert_allclose(model.head(params, features), logits, rtol=1e-4, atol=1e-6)
    assert all(np.isfinite(g).all() and g.any() for g in jax.tree.leaves(gradient))
    data = fd.FederatedData.from_clients([(x, np.arange(4) % 3)] * 2)
    for algorithm in (
        fd.algorithms.moon(),
        fd.algorithms.lfd(),
        fd.algorithms.constrained(0.1, "feature", "extractor"),
    ):
        fd.Simulation(model, data, algorithm, cohort_size=2)  # traces the model's functions
    assert not small(name, cosine=False)[0].cosine


class Tokens(nn.Module):
    """The table of the tokens has 20 rows, that of the positions 6."""

    @nn.compact
    def __call__(self, x):
        positions = nn.Embed(6, 4)(jnp.broadcast_to(jnp.arange(x.shape[-1]), x.shape))
        return nn.Dense(3)((nn.Embed(20, 4)(x) + positions).mean(1))


class NnxTokens(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table, self.dense = nnx.Embed(20, 4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.dense(self.table(x).mean(1))


def test_token_ids_are_checked_like_labels() -> None:
    """JAX reads NaN for an id that is too large, and the last row for the id -1."""
    ids = np.arange(24, dtype=np.int32).reshape(4, 6) % 20
    encoder = fd.models.encoder(3, vocabulary=20, length=6, width=4, heads=1, depth=1)
    models = [
        small("text_classifier", cosine=False)[0],
        encoder,
        fd.models.lora(encoder, rank=1),
        encoder.computing_in(jnp.bfloat16),
        fd.Model.from_linen(Tokens(), (6,), input_dtype=jnp.int32),
        fd.Model.from_nnx(NnxTokens, (6,), input_dtype=jnp.int32),
    ]

    def simulate(model: fd.Model, x: np.ndarray, test: np.ndarray = ids) -> None:
        data = fd.FederatedData.from_clients([(x, np.arange(4) % 3)] * 2, test=(test, np.arange(4) % 3))
        fd.Simulation(model, data, fd.algorithms.fedavg(), cohort_size=2)

    for model in models:
        simulate(model, ids)
        for wrong in (ids + 1, ids - 1):
            with pytest.raises(
                ValueError, match=r"training inputs must be ids in 0..19, .* got (1..20|-1..18): use a mod"
            ):
                simulate(model, wrong)
            with pytest.raises(ValueError, match=r"test inputs must be ids in 0..19"):
                simulate(model, ids, wrong)
        simulate(model._replace(vocabulary=None), ids + 1)
    data = fd.FederatedData.from_clients([(ids, np.arange(4) % 3)] * 2)
    for vocabulary, hint in ((20, False), (None, True)):
        sim = fd.Simulation(encoder._replace(vocabulary=vocabulary), data, fd.algorithms.fedavg(), cohort_size=2)
        info = {"cohort": np.arange(2), "bad_leaf": np.array([-1, 0])}
        assert ("Model.vocabulary" in nonfinite_message(3, info, sim.setup)) == hint
    positions = np.array([[4, 2, 7, 3, 2, 19, 0, 19]] * 4, np.int16)
    din = fd.models.din((5, 3, 8, 4, 3, 20))._replace(scores=None)
    for position, size in ((None, 0), (1, 3), (7, 20)):
        x = positions.copy()
        if position is not None:
            x[2, position] = size
        data = fd.FederatedData.from_clients([(x, np.array([0, 1, 1, 0]))])
        outcome = (
            pytest.raises(ValueError, match=f"ids in 0..{size - 1} at position {position}") if size else nullcontext()
        )
        with outcome:
            fd.Simulation(din, data, fd.algorithms.fedavg(), cohort_size=1)


def test_padding_does_not_count_as_a_word() -> None:
    model, x = small("text_classifier", cosine=False)
    params = jax.jit(model.init)(jax.random.key(0))
    x[1:, 4:] = 0
    apply = jax.jit(model.apply)
    np.testing.assert_allclose(apply(params, np.pad(x, ((0, 0), (0, 3)))), apply(params, x), rtol=1e-4, atol=1e-6)
    assert np.isfinite(apply(params, 0 * x)).all()


def test_a_convolution_along_a_sequence_matches_lax_conv() -> None:
    x = jax.random.normal(jax.random.key(0), (3, 9, 5))  # [B, length, C]
    conv = layers.Conv(4, (3, 1))
    params = conv.init(jax.random.key(1), x.transpose(2, 1, 0)[:, :, None])
    out = conv.apply(params, x.transpose(2, 1, 0)[:, :, None])[:, :, 0].transpose(2, 1, 0)
    kernel, bias = params["params"]["kernel"][:, 0], params["params"]["bias"]
    expected = lax.conv_general_dilated(x, kernel, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"))
    np.testing.assert_allclose(out, expected + bias[None, None], rtol=1e-4, atol=1e-5)
