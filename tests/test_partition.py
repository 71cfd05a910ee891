from __future__ import annotations

import itertools

import numpy as np
import pytest

from fedjax_drift.data import assignment, partition
from fedjax_drift.data.partition import by_writer, classes, dirichlet, distribution, iid, long_tailed, shards

PRIORS = ("client", "class", "global")
ALPHAS = (5e-324, 1e-6, 0.01, 0.3, 100.0, 1e6, 1e300)
# The labels have gaps, one label is negative, and one class has a single example. Most class sizes are not multiples
# of the tested numbers of clients.
LABELS = np.random.default_rng(7).permutation(np.repeat([-3, 0, 1, 2, 40, 41], [1, 7, 90, 400, 251, 250]))
SKEWED = np.random.default_rng(8).permutation(np.repeat([0, 1, 2, 3], [28000, 8000, 3000, 1000]))


def weights(clients: int, sigma: float) -> np.ndarray:
    return np.random.default_rng(5).lognormal(0, sigma, (clients, 6))


def recipes(seed: int) -> list[partition.Partition]:
    numbers = (1, 2, 37, 99, 999)
    dealt = itertools.product(numbers, ALPHAS, ("client", "global"), (0.0, 0.3, 3.0))
    return [
        *(iid(n, seed, sigma) for n in numbers for sigma in (0.0, 0.3, 50.0)),
        *(shards(n, k, seed) for n, k in ((1, 1), (2, 3), (37, 4), (99, 10), (999, 1))),
        *(classes(n, k, seed) for n, k in ((1, 6), (2, 3), (6, 1))),
        *(dirichlet(n, a, seed, prior=prior, size_sigma=sigma) for n, a, prior, sigma in dealt),
        *(dirichlet(99, a, seed, size_sigma=2.0, min_size=5) for a in ALPHAS),
        *(iid(n, seed, sizes=rule) for n in numbers for rule in ("linear", "square", "exponential")),
        *(dirichlet(99, a, seed, sizes="exponential", min_size=5) for a in ALPHAS),
        *(dirichlet(4, a, seed, prior, sizes=(1, 900, 90, 8)) for a in ALPHAS for prior in ("client", "global")),
        *(distribution(n, weights(n, sigma), seed) for n in numbers for sigma in (0.0, 2.0)),
        distribution(2, [[1, 1, 0, 1, 0, 1], [0, 1, 1, 1, 1, 0]], seed, min_per_label=1),
        *(
            dirichlet(n, a, seed, prior="class", min_size=size)
            for n, a, size in itertools.product(numbers, ALPHAS, (1, 5, 10))
            if n * size <= LABELS.size
        ),
        *(dirichlet(99, a, seed, prior="class", min_size=1, capped=False) for a in ALPHAS),
    ]


@pytest.mark.filterwarnings("error")
def test_every_partitioner_assigns_each_example_once_and_depends_on_its_seed():
    for recipe, other_recipe in zip(recipes(seed=3), recipes(seed=4), strict=True):
        parts, again, other = recipe(LABELS), recipe(LABELS), other_recipe(LABELS)
        arguments = recipe.arguments
        sizes = np.array([len(rows) for rows in parts])
        assert len(parts) == recipe.num_clients, recipe
        assert all(rows.dtype == np.int64 and (np.diff(rows) > 0).all() for rows in parts), recipe
        np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(LABELS.size), repr(recipe))
        assert sizes.min() >= arguments.get("min_size", 1), recipe
        assert recipe != other_recipe
        assert "a tuple of" in repr(recipe) or eval(repr(recipe)) == recipe  # long arguments are abbreviated
        if arguments.get("size_sigma") == 0 and arguments.get("prior") != "class" and "sizes" not in arguments:
            assert sizes.max() - sizes.min() <= 1, recipe
        assert all(map(np.array_equal, parts, again)), recipe
        if len(parts) > 1:
            assert not all(map(np.array_equal, parts, other)), recipe


def test_equal_sizes_differ_by_at_most_one():
    for rows, clients in itertools.product((60_000, 50_000, 1001, 1000), (3, 7, 100, 499, 1000)):
        sizes = assignment.apportion(rows, np.ones(clients))
        assert sizes.sum() == rows and set(sizes) <= {rows // clients, -(-rows // clients)}


def test_size_sigma_is_the_standard_deviation_of_the_log_sizes():
    for recipe in (iid(400, 0, 0.3), dirichlet(400, 0.3, size_sigma=0.3)):
        sizes = np.array([len(rows) for rows in recipe(SKEWED)])
        assert np.log(sizes).std() == pytest.approx(0.3, rel=0.12)


def label_mix(recipe: partition.Partition, y: np.ndarray) -> np.ndarray:
    """Returns the relative label frequencies of each client, [N, C]."""
    counts = np.array([np.bincount(y[rows], minlength=y.max() + 1) for rows in recipe(y)])
    return counts / counts.sum(axis=1, keepdims=True)


@pytest.mark.parametrize(("prior", "concentration"), [("client", lambda a: a), ("global", lambda a: a / 10)])
@pytest.mark.parametrize("alpha", [0.05, 0.3, 3.0, 1000.0])
def test_label_distributions_vary_as_expected_from_the_dirichlet_distribution(prior, concentration, alpha):
    y = np.repeat(np.arange(10), 4000)
    size, a = 20, concentration(alpha)
    purity = (label_mix(dirichlet(2000, alpha, prior=prior), y) ** 2).sum(axis=1).mean()
    # The expectation of sum_c q_c^2, where q are the frequencies of `size` draws from p ~ Dir(a 1_10). Draws of classes
    # without remaining examples are repeated, but they are too few to matter.
    assert purity == pytest.approx(1 / size + (1 - 1 / size) * (a + 1) / (10 * a + 1), rel=0.05)


def test_class_prior_splits_each_class_by_a_dirichlet_distribution():
    y = np.repeat(np.arange(2), 20_000)
    share = [len(dirichlet(4, 5.0, s, prior="class")(y[:20_000])[0]) / 20_000 for s in range(400)]
    assert np.mean(share) == pytest.approx(1 / 4, abs=0.02)
    assert np.var(share) == pytest.approx(1 / 4 * 3 / 4 / (4 * 5 + 1), rel=0.25)
    # Clients that have M/N examples or more after the first class get no example of the second class.
    parts = dirichlet(4, 0.5, 1, "class")(y)
    first, second = np.array([np.bincount(y[rows], minlength=2) for rows in parts]).T
    assert (first >= 10_000).any() and not second[first >= 10_000].any()


def test_without_a_cap_classes_are_split_independently():
    y = np.repeat(np.arange(2), 20_000)
    counts = [
        np.bincount(y[dirichlet(4, 0.5, s, "class", min_size=1, capped=False)(y)[0]], minlength=2) for s in range(400)
    ]
    first, second = np.transpose(counts) / 20_000
    assert np.mean(second[first >= 0.5]) == pytest.approx(1 / 4, abs=0.06)  # even with much of the first class
    assert np.var(second) == pytest.approx(1 / 4 * 3 / 4 / (4 * 0.5 + 1), rel=0.25)


def test_class_prior_rounds_without_bias():
    y = np.repeat(np.arange(10), 100)
    sizes = [len(dirichlet(300, 1e6, s, prior="class", min_size=1)(y)[0]) for s in range(60)]
    assert np.mean(sizes) == pytest.approx(1000 / 300, abs=0.4)


def test_global_prior_is_centred_on_skewed_label_frequencies():
    p = np.bincount(SKEWED) / SKEWED.size
    kept = label_mix(dirichlet(100, alpha=1e6, prior="global"), SKEWED)
    np.testing.assert_allclose(kept.mean(axis=0), p, atol=1e-9)
    assert np.abs(kept - p).max() < 5 * np.sqrt(0.21 / 400)  # five standard deviations of 400 binomial draws
    # For Dir(alpha p), Var p_c = p_c (1 - p_c) / (alpha + 1). The other term is the noise of 40 examples per client.
    spread = label_mix(dirichlet(1000, alpha=20, prior="global"), SKEWED).var(axis=0)
    np.testing.assert_allclose(spread, p * (1 - p) * (1 / 21 + (20 / 21) / 40), rtol=0.15)


def deal_one_by_one(rng, class_sizes, sizes, alpha):
    """Follows the description of FedDyn's procedure literally, one example at a time. Returns counts [N, C]."""
    mixes = rng.dirichlet(np.full(len(class_sizes), alpha), len(sizes))
    left, counts = list(class_sizes), np.zeros((len(sizes), len(class_sizes)), int)
    while any(left):
        i = rng.integers(len(sizes))
        if counts[i].sum() == sizes[i]:
            continue
        while not left[c := rng.choice(len(left), p=mixes[i])]:
            pass
        left[c] -= 1
        counts[i, c] += 1
    return counts


@pytest.mark.thorough
def test_vectorised_assignment_has_the_same_distribution_as_one_by_one():
    class_sizes, sizes, draws = np.array([1, 5, 5]), np.array([1, 3, 7]), 3000
    alpha = 1.5  # with a small alpha, the literal procedure takes too long
    y, rng = np.repeat(np.arange(3), class_sizes), np.random.default_rng(0)
    at_once, one_by_one = np.zeros((2, draws, 3, 3))
    for k in range(draws):
        mixes = assignment.log_gamma(rng, alpha, (3, 3))
        np.add.at(at_once[k], (assignment.assign_by_turns(rng, y, class_sizes, sizes, mixes), y), 1)
        one_by_one[k] = deal_one_by_one(rng, class_sizes, sizes, alpha)
    for moment in (lambda x: x, np.square):
        error = np.sqrt((moment(at_once).var(0) + moment(one_by_one).var(0)) / draws)
        gap = moment(at_once).mean(0) - moment(one_by_one).mean(0)
        assert (np.abs(gap) <= 4 * error + 1e-12).all()


def test_other_classes_keep_their_ratios_if_a_class_is_exhausted():
    mixes = np.array([[0.0, -2000.0, -2000.0 - np.log(3)]])  # the weights of classes 1 and 2 underflow
    drawn = assignment._draw(np.random.default_rng(0), mixes, np.array([False, True, True]), np.zeros(20_000, int))
    assert np.bincount(drawn, minlength=3)[0] == 0
    assert (drawn == 1).mean() == pytest.approx(3 / 4, abs=0.015)


def test_small_clients_get_examples_of_the_largest_clients():
    assert assignment.top_up(np.array([0, 9, 3, 7, 1]), 3).tolist() == [3, 5, 3, 6, 3]
    parts = dirichlet(50, 1e-6, seed=0, prior="class", min_size=15)(LABELS)
    sizes = np.array([len(rows) for rows in parts])
    assert sizes.min() == 15 and (sizes == 15).sum() > 25  # at most six clients had examples before


@pytest.mark.parametrize("per_client", [1, 2, 4])
def test_shards_limit_the_number_of_labels_per_client(per_client):
    y = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 5000))
    parts = shards(100, per_client, seed=5)(y)  # no block has examples of two labels
    labels = np.array([np.unique(y[rows]).size for rows in parts])
    assert labels.max() == per_client and {len(rows) for rows in parts} == {500}
    cut_across = [np.unique(LABELS[rows]).size for rows in shards(31, per_client)(LABELS)]
    assert max(cut_across) <= 3 + 2 * (per_client - 1)  # the first block can contain three labels, the others two


@pytest.mark.parametrize(("clients", "per_client"), [(10, 5), (100, 2), (7, 3), (4, 10)])
def test_classes_gives_each_client_exactly_per_client_labels(clients, per_client):
    y = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 600))
    parts = classes(clients, per_client, seed=5)(y)
    has = np.array([np.isin(np.arange(10), y[rows]) for rows in parts])
    assert (has.sum(1) == per_client).all() and np.ptp(has.sum(0)) <= 1
    for label in range(10):
        sizes = [int((y[rows] == label).sum()) for rows in parts if label in y[rows]]
        assert max(sizes) - min(sizes) <= 1


def test_classes_that_are_chosen_independently_are_those_of_niid_bench():
    y = np.repeat(np.arange(10), 600)
    has = np.array(
        [[np.isin(range(10), y[rows]) for rows in classes(20, 3, s, "independently")(y)] for s in range(200)]
    )
    assert (has.sum(2) == 3).all() and all(has[:, i, i % 10].all() for i in range(20))
    shares = has.mean(0)  # of the partitions in which a client has a label: 1 for its own one, 2 / 9 for the others
    assert np.abs(shares[shares < 1] - 2 / 9).max() < 0.12 and np.ptp(has.sum(1)) > 4


def test_sizes_follow_their_rule():
    y = np.arange(3850) % 7
    sizes = {rule: np.array([len(rows) for rows in iid(10, sizes=rule)(y)]) for rule in ("linear", "square")}
    assert sizes["linear"].tolist() == [70 * i for i in range(1, 11)]
    assert sizes["square"].tolist() == [10 * i**2 for i in range(1, 11)]
    exponential = [len(rows) for rows in dirichlet(9, 0.3, sizes="exponential")(y)]
    assert exponential[0] == 1 and np.diff(np.log(exponential[4:])) == pytest.approx(np.ones(4), abs=0.02)
    given = (1, 3000, 49, 800)
    for recipe in (iid(4, sizes=given), dirichlet(4, 0.1, sizes=given), dirichlet(4, 9.0, sizes=np.array(given))):
        assert tuple(len(rows) for rows in recipe(y)) == given


def test_distribution_splits_each_label_in_proportion():
    y = np.repeat([4, 5, 9], [600, 60, 10])
    counts = np.array([[100, 0, 3], [200, 30, 3], [300, 30, 4]])

    def table(recipe: partition.Partition) -> np.ndarray:
        return np.array([[(y[rows] == label).sum() for label in (4, 5, 9)] for rows in recipe(y)])

    assert (table(distribution(3, counts)) == counts).all()
    at_least = table(distribution(3, [[1e-9, 0, 1], [1e300, 1, 1], [1e-9, 0, 1]], min_per_label=3))
    assert at_least.tolist() == [[3, 0, at_least[0, 2]], [594, 60, at_least[1, 2]], [3, 0, at_least[2, 2]]]
    assert at_least[:, 2].min() == 3
    first, last = distribution(2, [[1e-9, 1e-9, 1e-9], [1, 1, 1]])(y)  # no client is empty
    assert len(first) == 1 and len(last) == 669


def test_examples_of_one_label_are_shuffled():
    one_label = np.zeros(1000, int)
    for recipe in (iid(2), shards(2, 1), classes(2, 1), *(dirichlet(2, 100, prior=p) for p in PRIORS)):
        rows = recipe(one_label)[0]
        assert np.corrcoef(np.isin(np.arange(1000), rows), np.arange(1000))[0, 1] ** 2 < 0.02, recipe


def test_by_writer_sorts_the_writers():
    writer = np.array([30, 5, 30, 5, 7])
    parts = by_writer()(np.zeros(5, int), writer)
    assert [rows.tolist() for rows in parts] == [[1, 3], [4], [0, 2]]
    names = by_writer()(np.zeros(3, int), np.array(["b", "a", "b"]))
    assert [rows.tolist() for rows in names] == [[1], [0, 2]]
    assert by_writer().num_clients is None


@pytest.mark.parametrize(
    ("sizes", "imbalance", "kept"),
    [
        ([6000] * 10, 100, [6000, 3596, 2156, 1292, 774, 464, 278, 166, 100, 60]),  # 6000 / 100^(c/9), rounded down
        ([50] * 3, 10, [50, 15, 5]),
        ([4, 50, 30], 25, [4, 10, 2]),  # the largest class sets the scale, and a class is never enlarged
        ([147] * 3, 49, [147, 21, 3]),  # in float64, 147 / 49^(2/2) is 2.9999999999999996
        ([9, 9, 9], 1e300, [9, 1, 1]),
        ([7], 100, [7]),
    ],
)
def test_the_classes_of_a_long_tail_decrease_exponentially(sizes, imbalance, kept):
    y = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)) - 2, sizes))
    parts, other = (long_tailed(iid(3, seed=5), imbalance, seed)(y) for seed in (0, 1))
    rows = np.concatenate(parts)
    assert len(parts) == 3 and len(set(rows.tolist())) == len(rows)
    assert np.bincount(y[rows] + 2).tolist() == kept
    assert len(sizes) == 1 or set(rows.tolist()) != set(np.concatenate(other).tolist())
    # The clients are those that the partitioner makes of the examples that are kept.
    rows.sort()
    assert all(map(np.array_equal, parts, [rows[i] for i in iid(3, seed=5)(y[rows])]))


def test_a_long_tail_without_imbalance_is_the_partition_itself():
    y, writer = np.tile(np.arange(4), 50), np.arange(200) // 20
    for base in (dirichlet(7, 0.3), shards(5, 2), by_writer()):
        whole = long_tailed(base, imbalance=1)
        assert all(map(np.array_equal, whole(y, writer), base(y, writer)))
        assert whole.num_clients == base.num_clients and eval(repr(whole)) == whole != long_tailed(base, 2)
    unequal = np.repeat(np.arange(4), [90, 3, 1, 106])
    assert all(map(np.array_equal, long_tailed(iid(7), 1)(unequal), iid(7)(unequal)))


def test_long_tails_combine_with_writers_and_with_each_other():
    y, writer = np.array([0, 0, 1, 1]), np.array(["c", "a", "b", "b"])
    parts = long_tailed(by_writer(), 2)(y, writer)  # one of the two examples of b is kept
    assert [len(rows) for rows in parts] == [1, 1, 1] and parts[0].tolist() == [1] and parts[2].tolist() == [0]
    parts = long_tailed(by_writer(), 2)(y, np.array(["c", "c", "a", "b"]))  # either a or b has no example
    assert [len(rows) for rows in parts] == [1, 2] and parts[1].tolist() == [0, 1]
    twice = long_tailed(long_tailed(dirichlet(3, 0.5), 4), 2)
    assert twice.base == dirichlet(3, 0.5) == twice.base.base and twice.num_clients == 3 and eval(repr(twice)) == twice
    y = np.repeat([0, 1, 2], 16)
    rows = np.concatenate(twice(y))  # 16, 11, 8 of the outer one, of which the inner one keeps 16 / 4^(c/2)
    assert np.bincount(y[rows]).tolist() == [16, 8, 4] and len(set(rows.tolist())) == 28


def test_partitioners_are_compared_by_value():
    recipe = dirichlet(100, alpha=0.3, seed=0)
    assert eval(repr(recipe)) == recipe != dirichlet(100, alpha=0.3, seed=1)
    assert hash(recipe) == hash(dirichlet(100, 0.3, 0))
    assert recipe.num_clients == 100 and recipe.arguments["min_size"] == 1
    assert repr(by_writer()) == "by_writer()"


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("alpha", [1e-6, 1e6])
def test_ten_thousand_clients(prior, alpha):
    y = np.repeat(np.arange(10), 6000)
    parts = dirichlet(10_000, alpha, prior=prior, min_size=2)(y)
    assert min(map(len, parts)) >= 2 and np.unique(np.concatenate(parts)).size == y.size


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dirichlet(2, 0.0), "alpha must be a finite number > 0, got 0.0: 0.01 gives"),
        (lambda: dirichlet(2, 1, prior="clas"), "got 'clas': did you mean 'class'?"),
        (lambda: dirichlet(2, 1, prior="class", size_sigma=0.3), "size_sigma must be 0 with"),
        (lambda: dirichlet(2, 1, capped=False), "capped=False needs prior='class'"),
        (lambda: iid(1000)(LABELS), "num_clients=1000 needs at least 1000 examples, got a data set with 999: use num"),
        (lambda: classes(2, 2)(LABELS), "per_client must be in 3..6 for 6 labels and 2 clients, got 2"),
        (lambda: classes(9, 7)(LABELS), "per_client must be in 1..6 for 6 labels and 9 clients, got 7"),
        (lambda: classes(5, 2, 0, "independently")(LABELS), "needs at least 6 clients, one per label, got 5"),
        (lambda: iid(2, sizes="cubic"), "sizes must be one of 'linear', 'square', 'exponential', got 'cubic'"),
        (lambda: iid(2, sizes=(5, 0)), "or 2 integers >= 1, one per client, got (5, 0)"),
        (lambda: iid(2, size_sigma=1, sizes="linear"), "pass either sizes or size_sigma, got sizes='linear' and"),
        (lambda: iid(2, sizes=(500, 500))(LABELS), "sizes must sum to 999, the number of examples, got 1000"),
        (lambda: dirichlet(2, 1, prior="class", sizes="linear"), "sizes must be None with prior='class', got 'linear'"),
        (lambda: dirichlet(2, 1, sizes=(5, 4), min_size=5), "or 2 integers >= 5, one per client, got (5, 4)"),
        (lambda: distribution(3, np.ones((2, 3))), "must have shape [3, C], one row per client and one column per"),
        (lambda: distribution(2, [[1, -1], [1, 1]]), "weights must be finite numbers >= 0, got -1..1"),
        (lambda: distribution(2, [[1, 0], [1, 0]]), "for every label, got none for label 1: leave it out"),
        (lambda: distribution(2, [[0, 0], [1, 1]]), "for every client, got none for client 0: leave it out"),
        (lambda: distribution(2, np.ones((2, 5)))(LABELS), "weights must have 6 columns, one per label of the data"),
        (lambda: distribution(2, np.ones((2, 6)), 0, 4)(LABELS), "label -3 must have at least 8 examples"),
        (lambda: classes(9, 2)(LABELS), "label -3 must have at least 3 examples"),
        (lambda: shards(100, 10)(LABELS), "use per_client <= 9 or num_clients <= 99"),
        (lambda: dirichlet(100, 1, prior="class")(LABELS), "num_clients=100 with min_size=10 needs at least 1000"),
        (lambda: dirichlet(1000, 1, min_size=1000)(LABELS), "use more data"),
        (lambda: dirichlet(9, 1, min_size=112)(LABELS), "use min_size <= 111 or num_clients <= 8"),
        (lambda: iid(2)(LABELS[:, None]), "y must be one-dimensional integer labels"),
        (lambda: iid(2)(LABELS / 2), "got float64 of shape"),
        (lambda: long_tailed(iid(2), 0.5), "imbalance must be a finite number >= 1, got 0.5: 1 keeps all"),
        (lambda: long_tailed(iid, 2), "partition must be of type Partition, got"),
        (lambda: long_tailed(iid(120), 1e9)(np.repeat([0, 1], 98)),
         "use num_clients <= 99 (imbalance=1e+09 keeps 99 of the 196 examples, and a smaller one keeps more)"),
        (lambda: long_tailed(by_writer())(LABELS), "has no writers: use iid, dirichlet, shards or classes"),
        (lambda: long_tailed(by_writer())(LABELS, LABELS[1:]), "must be 999 integers or strings, one per example"),
        (lambda: by_writer()(LABELS, LABELS[1:]), "must be 999 integers or strings, one per example, got int64[998]"),
        (lambda: by_writer()(LABELS, [1, "1"] + [2] * 997), "writer must be all integers or all strings, got both"),
    ],
)  # fmt: skip
def test_bad_input_says_what_to_do(make, message):
    with pytest.raises(ValueError) as error:
        make()
    assert message in str(error.value)
