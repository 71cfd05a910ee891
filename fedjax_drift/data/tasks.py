"""The data sets that are not images: click-through prediction, news, and binding of ligands to proteins."""

from __future__ import annotations

from fedjax_drift.data import bindingdb, files, movielens, text
from fedjax_drift.data.sources import DataDir, Samples


def load_movielens(
    data_dir: DataDir,
    seed: int,
    natural: bool,
    *,
    size: str = "1m",
    history: int = 30,
    negatives: int = 4,
    test_negatives: int = 99,
) -> Samples:
    """MovieLens as click-through prediction: 2 classes, int16 [6 + history], one client per user. For `fd.models.din`.

    An example has the ids of user, gender, age, occupation, zip code and candidate film, and those of the `history`
    films that the user rated before the candidate. 0 means none or unknown.

    Every rating is an example with label 1. For each rating, `negatives` films that the user never rated are added as
    examples with label 0. The latest rating of each user is a test example, followed by `test_negatives` distinct
    films with label 0, in the order that `fd.ranking` expects. These films are drawn with `seed` from all rated films.

    size: "1m" is MovieLens 1M (`ml-1m/ratings.dat` and `users.dat`, as published by GroupLens; 6,040 users).
        "latest-small" is `movielens_latest_small.npz` with user_id, movie_id and timestamp [R] (610 users without
        profiles). (Harper and Konstan, "The MovieLens Datasets: History and Context", ACM TiiS 2015. The protocol is
        that of FedEve.)
    """
    ratings = movielens.read(files.folders(data_dir), size)
    return Samples(*movielens.leave_latest_out(ratings, history, negatives, test_negatives, seed))


def load_agnews(data_dir: DataDir, seed: int, natural: bool, *, vocabulary: int = 20_000, length: int = 64) -> Samples:
    """AG News by topic: 4 classes, 120,000 + 7,600 texts (title and description), int32 [length] word ids.

    The id 0 is padding. The id 1 stands for all words that are not among the `vocabulary` - 2 most frequent words of
    the training texts. Texts are truncated to `length` words. The files are `ag_news_csv/train.csv` and `test.csv`,
    with lines "class 1 to 4","title","description". (Zhang, Zhao and LeCun, "Character-level Convolutional Networks for
    Text Classification", NeurIPS 2015.)
    """
    return Samples(*text.read(files.folders(data_dir), vocabulary, length))


def load_bindingdb(data_dir: DataDir, seed: int, natural: bool, *, ligand: int = 100, protein: int = 1000) -> Samples:
    """BindingDB: whether a ligand binds a protein. 2 classes (1: Kd < 30 nM, our choice), int8 [ligand + protein].

    An example has the first `ligand` characters of the SMILES string and the first `protein` characters of the sequence
    of the first chain. Characters are encoded as 1..94 in ASCII order, and 0 is padding. There is one example per pair.
    A random 20 % of the pairs (`seed`) are test examples. Reading all of `BindingDB_All.tsv` takes a few minutes.
    Lines without a Kd value are skipped. (Liu et al., "BindingDB", Nucleic Acids Research 2007.)
    """
    return Samples(*bindingdb.read(files.folders(data_dir), ligand, protein, seed))
