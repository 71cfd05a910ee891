"""Partitioners. They assign the examples of a labelled data set to clients.

A partitioner is an immutable object that can be compared and printed. Call it with the labels to get the indices of the
examples of each client:

    >>> import numpy as np
    >>> partitioner = dirichlet(2, alpha=0.3, seed=0)
    >>> partitioner
    dirichlet(num_clients=2, alpha=0.3, seed=0, prior='client', size_sigma=0.0, min_size=1)
    >>> [rows.size for rows in partitioner(np.array([0, 0, 1, 1, 2, 2]))]
    [3, 3]

Every partitioner uses every example exactly once, except for `long_tailed`, which leaves examples out. All give every
client at least one example, and terminate for every legal input. The result only depends on the arguments and the data.
Shapes: M examples, N clients, C distinct labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np

from fedjax_drift import checks, reprs, spec
from fedjax_drift.data.assignment import (
    SIZE_RULES,
    apportion,
    assign_by_turns,
    assign_counts,
    by_label,
    client_sizes,
    log_gamma,
    require_rows,
    split_classes,
)
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.spec import Amount, AmountOrZero, Count, CountOrZero, Fix, Flag, Seed, checked

__all__ = ["by_writer", "classes", "dirichlet", "distribution", "iid", "long_tailed", "shards"]
__dir__ = __all__.copy


Sizes = str | Sequence[int] | np.ndarray | None
Weights = Sequence[Sequence[float]] | np.ndarray
Sigma = Annotated[AmountOrZero, Fix("0 gives equal sizes, 0.3 is usual")]
Alpha = Annotated[Amount, Fix("0.01 gives a very uneven label mix, 100 an even one")]
IMBALANCE = spec.number("a finite number >= 1", lambda v: v >= 1, (1, 100), (0.5,), computed=False)


@dataclass(frozen=True, repr=False)
class Partition:
    """A partitioner with its name and arguments. Long arguments are printed as their dtype and shape, or length."""

    name: str
    """The name of its factory, such as "dirichlet"."""
    arguments: Mapping[str, Any] = field(hash=False)
    """The arguments of its factory."""
    owners: Callable[[np.ndarray, np.ndarray | None], np.ndarray] = field(compare=False)
    """``owners(y [M], writer [M] or None) -> int [M]``, the client of every example; -1 for those that are left out."""

    @property
    def base(self) -> Partition:
        """The partitioner that chooses the clients: this one, or the innermost one of `long_tailed`."""
        inner = self.arguments.get("partition")
        return self if inner is None else inner.base

    @property
    def num_clients(self) -> int | None:
        """N, or None if it depends on the data (`by_writer`)."""
        return self.base.arguments.get("num_clients")

    def __call__(self, y: np.ndarray, writer: np.ndarray | None = None) -> list[np.ndarray]:
        """Returns the indices of the examples of each client: N int64 arrays, ascending and disjoint.

        Together the arrays contain each of 0..M-1 once, or at most once (`long_tailed`).

        Args:
          y: integer labels [M].
          writer: integers or strings [M]. Only `by_writer` uses them.

        Raises:
          ValueError: a shape or dtype is wrong, or there are too few examples for the partitioner.
        """
        y = checks.array("y", y)
        if y.ndim != 1 or y.dtype.kind not in "iu" or y.size == 0:
            what, got = "y must be one-dimensional integer labels, at least one", f"{y.dtype} of shape {y.shape}"
            checks.refuse(what, got, "pass one class number per example")
        owner = self.owners(y, writer)
        rows = np.argsort(owner, kind="stable").astype(np.int64, copy=False)
        return np.split(rows, np.cumsum(np.bincount(owner + 1))[:-1])[1:]

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={reprs.short(v)}' for k, v in self.arguments.items())})"


@checked
def iid(num_clients: Count, seed: Seed = 0, size_sigma: Sigma = 0.0, sizes: Sizes = None) -> Partition:
    """Shuffles the examples and splits them into N parts.

    The clients' shares of a class are random. With `distribution(N, np.ones((N, C)))` for C classes they are equal, as
    in the code of FedDC's authors for CIFAR-100.

    Args:
      num_clients: N >= 1.
      seed: random seed, >= 0.
      size_sigma: with 0 (default) the sizes differ by at most one. With size_sigma > 0 they are drawn from
        LogNormal(log(M/N), size_sigma) and rescaled to sum to M, each at least 1, as in the code of FedDyn's and
        FedDC's authors. size_sigma is the standard deviation of the logarithm, 0.3 in their experiments.
      sizes: the sizes of the clients, instead of size_sigma. "linear", "square" and "exponential": client i in 0..N-1
        gets a number of examples in proportion to i + 1, (i + 1)^2 or e^(i + 1), rounded, and at least 1. Or a sequence
        of N integers >= 1 that sum to M. Default: None, see size_sigma.

    Raises:
      ValueError: sizes and size_sigma are both given. Calling the partitioner raises it if M < N, or if the given sizes
        do not sum to M.
    """
    arguments: dict[str, Any] = {"num_clients": num_clients, "seed": seed, "size_sigma": size_sigma}
    if sizes is not None:
        arguments["sizes"] = sizes = _checked_sizes(sizes, num_clients, size_sigma, min_size=1)

    def owners(y: np.ndarray, writer: np.ndarray | None) -> np.ndarray:
        rng = np.random.default_rng(seed)
        numbers = client_sizes(rng, y.size, num_clients, size_sigma, 1, sizes)
        return rng.permutation(np.repeat(np.arange(num_clients), numbers))

    return Partition("iid", arguments, owners)


@checked
def dirichlet(
    num_clients: Count,
    alpha: Alpha,
    seed: Seed = 0,
    prior: Literal["client", "class", "global"] = "client",
    size_sigma: Sigma = 0.0,
    min_size: Count | None = None,
    capped: Flag = True,
    sizes: Sizes = None,
) -> Partition:
    """Assigns different label distributions to the clients, drawn from a Dirichlet distribution.

    With a small alpha each client has few labels. With a large alpha all clients have nearly the same distribution.

    - prior="client": each client draws its label distribution from Dir(alpha 1_C). The examples are assigned one at a
      time: a client that is not full is chosen at random, and a class is drawn from its distribution. If no example of
      this class is left, the class is drawn again. (Code of FedDyn's and FedDC's authors. With sizes=, Flower's
      InnerDirichletPartitioner, which draws other random numbers, and may leave examples out.)
    - prior="global": the same with Dir(alpha p), where p are the label frequencies of the data. With C equally frequent
      labels, alpha here has the same effect as alpha / C with prior="client". (Hsu et al., arXiv 1909.06335; FedGVRGM.)
    - prior="class": each class is split over the clients by Dir(alpha 1_N). Clients that already have M/N examples or
      more get no example of the class. This is repeated until every client has min_size examples. After 100 attempts
      the last one is corrected: one random example at a time moves from the largest client to a client below min_size.
      (MOON's authors' code; LfD.)

    Args:
      num_clients: N >= 1.
      alpha: concentration, > 0 and finite.
      seed: random seed, >= 0.
      prior: "client" (default), "global" or "class", see above.
      size_sigma: the spread of the sizes, as in `iid`. It must be 0 with prior="class", where the sizes follow from the
        label distributions.
      min_size: minimum number of examples per client, >= 1. Default: 10 for prior="class" (as MOON), otherwise 1. With
        the other priors it only matters for log-normal sizes: clients below the minimum are enlarged, and the largest
        clients are reduced.
      capped: for prior="class" only. If it is False, clients with M/N examples or more can receive more, as in the
        library of FedEve's authors. In that library clients may be empty. Here every client has at least one example,
        so min_size=1 is the closest setting.
      sizes: the sizes of the clients, instead of size_sigma, as in `iid`. It must be None with prior="class".

    Raises:
      ValueError: size_sigma > 0 or sizes with prior="class", or capped=False with another prior. Calling the
        partitioner raises it if M < N min_size, or if the given sizes do not sum to M.
    """
    if prior == "class" and (size_sigma > 0 or sizes is not None):
        name, allowed, got = ("size_sigma", 0, size_sigma) if size_sigma > 0 else ("sizes", None, sizes)
        fix = "use prior='client' or prior='global' to choose the sizes"
        checks.refuse(f"{name} must be {allowed} with prior='class'", checks.shown(got), fix)
    if min_size is None:
        min_size = 10 if prior == "class" else 1
    arguments: dict[str, Any] = {"num_clients": num_clients, "alpha": alpha, "seed": seed, "prior": prior}
    arguments |= {"size_sigma": size_sigma, "min_size": min_size}
    if not capped:
        if prior != "class":
            checks.refuse("capped=False needs prior='class'", f"prior={prior!r}", "leave capped out")
        arguments["capped"] = False
    if sizes is not None:
        arguments["sizes"] = sizes = _checked_sizes(sizes, num_clients, size_sigma, min_size)

    def owners(y: np.ndarray, writer: np.ndarray | None) -> np.ndarray:
        rng = np.random.default_rng(seed)
        classes, class_sizes = np.unique(y, return_counts=True)
        if prior == "class":
            return split_classes(rng, y, class_sizes, num_clients, alpha, min_size, capped)
        numbers = client_sizes(rng, y.size, num_clients, size_sigma, min_size, sizes)
        p = class_sizes / y.size if prior == "global" else np.ones(classes.size)
        mixes = log_gamma(rng, alpha * p, (num_clients, classes.size))
        return assign_by_turns(rng, y, class_sizes, numbers, mixes)

    return Partition("dirichlet", arguments, owners)


@checked
def shards(num_clients: Count, per_client: Count, seed: Seed = 0) -> Partition:
    """Sorts the examples by label, splits them into N * per_client equal blocks, and assigns the blocks at random.

    The examples of one label are shuffled first. The sizes of the blocks differ by at most one. A block can contain
    more than one label, so a client can have more than per_client labels.

    Args:
      num_clients: N >= 1.
      per_client: number of blocks per client, >= 1. McMahan et al. (arXiv 1602.05629) use 2, FedADC uses 2 to 4.
      seed: random seed, >= 0.

    Raises:
      ValueError: calling the partitioner raises it if M < N * per_client.
    """

    def owners(y: np.ndarray, writer: np.ndarray | None) -> np.ndarray:
        require_rows(y.size, num_clients, "per_client", per_client)
        rng = np.random.default_rng(seed)
        blocks = num_clients * per_client
        owner_of_block = rng.permutation(np.repeat(np.arange(num_clients), per_client))
        owner = np.empty(y.size, np.int64)
        owner[by_label(rng, y)] = np.repeat(owner_of_block, apportion(y.size, np.ones(blocks)))
        return owner

    return Partition("shards", {"num_clients": num_clients, "per_client": per_client, "seed": seed}, owners)


@checked
def classes(
    num_clients: Count, per_client: Count, seed: Seed = 0, chosen: Literal["evenly", "independently"] = "evenly"
) -> Partition:
    """Gives every client examples of exactly per_client labels, chosen at random.

    The numbers of clients that have a label differ by at most one between the labels. The examples of a label are
    shuffled and split evenly over these clients. If the labels are equally frequent and N * per_client is a multiple of
    their number, the clients have nearly equal sizes.

    Args:
      num_clients: N >= 1.
      per_client: number of labels per client, in 1..C.
      seed: random seed, >= 0.
      chosen: how the labels of a client are chosen. "evenly" (default): see above. "independently", as in NIID-Bench
        (Li et al., ICDE 2022): client i has label i mod C, and its other labels are drawn without regard to those of
        the other clients. So labels have different numbers of clients, and clients have different sizes.

    Raises:
      ValueError: calling the partitioner raises it if there are fewer than per_client labels, if N * per_client < C, or
        with "independently" N < C (some labels would have no client), or if a label has fewer examples than clients.
    """

    def owners(y: np.ndarray, writer: np.ndarray | None) -> np.ndarray:
        labels, label, counts = np.unique(y, return_inverse=True, return_counts=True)
        low = -(-len(labels) // num_clients)
        if not low <= per_client <= len(labels):
            data = f"{len(labels)} labels and {num_clients} clients"
            checks.refuse(f"per_client must be in {low}..{len(labels)} for {data}", per_client)
        if chosen == "independently" and num_clients < len(labels):
            checks.refuse(f'chosen="independently" needs at least {len(labels)} clients, one per label', num_clients)
        rng = np.random.default_rng(seed)
        has = np.zeros((len(labels), num_clients), bool)
        number = np.zeros(len(labels), np.int64)  # of clients that have the label
        for client in rng.permutation(num_clients):
            # the labels that come first are its own, or those that the fewest clients have
            first = np.arange(len(labels)) != client % len(labels) if chosen == "independently" else number
            own = np.lexsort((rng.random(len(labels)), first))[:per_client]
            has[own, client], number[own] = True, number[own] + 1
        owner = np.empty(y.size, np.int64)
        for i, clients in enumerate(map(np.flatnonzero, has)):
            if counts[i] < len(clients):
                what = f"label {labels[i]} must have at least {len(clients)} examples, one per client that has it"
                checks.refuse(what, counts[i], "use fewer clients or a smaller per_client")
            rows = rng.permutation(np.flatnonzero(label == i))
            owner[rows] = np.repeat(rng.permutation(clients), apportion(len(rows), np.ones(len(clients))))
        return owner

    options = {"num_clients": num_clients, "per_client": per_client, "seed": seed, "chosen": chosen}
    return Partition("classes", options, owners)


@checked
def distribution(num_clients: Count, weights: Weights, seed: Seed = 0, min_per_label: CountOrZero = 0) -> Partition:
    """Splits the examples of every label in given proportions over the clients.

    Of the examples of a label, client i gets the share weights[i, c] / sum_j weights[j, c], rounded, chosen at random.
    So ``distribution(data.num_clients, data.label_counts())`` gives other examples with the same number of examples of
    each label to each client, if the labels are 0..C-1 and each is as frequent as in ``data``. A client that would be
    empty gets a random example of the client that is largest.

    Args:
      num_clients: N >= 1.
      weights: [N, C] finite numbers >= 0. Column c is for the label that is number c in increasing order. Every row and
        every column has a number > 0.
      seed: random seed, >= 0.
      min_per_label: >= 0. Every client first gets this number of examples of each label that it has a weight > 0 for.
        Only the others are split in proportion. Default: 0.

    Raises:
      ValueError: calling the partitioner raises it if the data do not have C labels, if M < N, or if a label has too
        few examples for min_per_label.
    """
    table = checks.array("weights", weights)
    if table.ndim != 2 or len(table) != num_clients or table.shape[1] == 0:
        what = f"weights must have shape [{num_clients}, C], one row per client and one column per label"
        checks.refuse(what, list(table.shape), "transpose it, or use another num_clients")
    if not np.isfinite(table).all() or not (table >= 0).all():
        checks.refuse("weights must be finite numbers >= 0", f"{table.min()}..{table.max()}")
    for axis, kind, also in ((1, "client", ""), (0, "label", " and of the data")):
        if not (positive := (table > 0).any(axis=axis)).all():
            got = f"none for {kind} {int(np.argmin(positive))}"
            checks.refuse(f"weights must have a number > 0 for every {kind}", got, f"leave it out of weights{also}")
    arguments = {"num_clients": num_clients, "weights": tuple(map(tuple, table.tolist())), "seed": seed}
    arguments["min_per_label"] = min_per_label

    def owners(y: np.ndarray, writer: np.ndarray | None) -> np.ndarray:
        require_rows(y.size, num_clients, "min_size", 1)
        labels, class_sizes = np.unique(y, return_counts=True)
        if len(labels) != table.shape[1]:
            what = f"weights must have {len(labels)} columns, one per label of the data"
            checks.refuse(what, table.shape[1], "leave out the columns of labels without examples")
        least = min_per_label * (table > 0)
        if (few := class_sizes < least.sum(axis=0)).any():
            c = int(np.argmax(few))
            what = f"label {labels[c]} must have at least {least[:, c].sum()} examples"
            each = f"min_per_label={min_per_label} for each of its clients"
            checks.refuse(f"{what}, {each}", class_sizes[c], "use a smaller min_per_label")
        split = zip(class_sizes - least.sum(axis=0), table.T / table.max(axis=0)[:, None], strict=True)
        counts = least.T + [apportion(total, shares) for total, shares in split]
        return assign_counts(np.random.default_rng(seed), y, counts, min_size=1)

    return Partition("distribution", arguments, owners)


def by_writer() -> Partition:
    """Assigns one client to each writer, in increasing order of the writers' ids: a natural partition.

    Calling the partitioner raises ValueError if ``writer`` is missing, or is not M integers or strings.
    """

    def owners(y: np.ndarray, writer: np.ndarray | None) -> np.ndarray:
        if writer is None:
            raise ConfigurationError(
                "the data set has no writers: use iid, dirichlet, shards or classes, or pass writer=, "
                "one id per example"
            )
        return np.unique(checks.ids("writer", writer, len(y)), return_inverse=True)[1]

    return Partition("by_writer", {}, owners)


@checked
def long_tailed(
    partition: Annotated[
        Partition, spec.instance(Partition), Fix("pass one such as fd.partition.dirichlet(100, alpha=0.5)")
    ],
    imbalance: Annotated[float, IMBALANCE, Fix("1 keeps all examples, 100 is usual")] = 100.0,
    seed: Seed = 0,
) -> Partition:
    """Leaves out examples, such that the sizes of the classes decrease exponentially, and partitions the others.

    Of class c = 0..C-1, in increasing order of the labels, it keeps n_max imbalance^(-c / (C-1)) examples, rounded
    down, where n_max is the size of the largest class: at least one, at most all, chosen at random. If the classes have
    equal sizes, the first keeps all examples, and the last the share 1 / imbalance. A test set does not change. With
    `by_writer`, there is no client for a writer of whom no example is kept.

    Args:
      partition: a partitioner for the examples that are kept, such as ``dirichlet(100, alpha=0.5)``.
      imbalance: the imbalance factor, >= 1. Default: 100; 10 and 50 are also usual. With 1, all examples are kept, and
        the result is that of ``partition``.
      seed: random seed of the choice, >= 0. ``partition`` has a seed of its own.

    Raises:
      ValueError: ``partition`` is not one of the partitioners of this module. Calling the partitioner raises it if
        ``partition`` refuses the examples that are kept.

    The profile is that of Cao et al., "Learning Imbalanced Datasets with Label-Distribution-Aware Margin Loss", NeurIPS
    2019. Shang et al., "Federated Learning on Heterogeneous and Long-Tailed Data via Classifier Re-Training with
    Federated Features", IJCAI 2022, partition such data by a Dirichlet distribution.
    """

    def owners(y: np.ndarray, writer: np.ndarray | None) -> np.ndarray:
        rng = np.random.default_rng(seed)
        _, label, sizes = np.unique(y, return_inverse=True, return_counts=True)
        profile = sizes.max() * imbalance ** (-np.arange(sizes.size) / max(1, sizes.size - 1))
        kept = np.maximum(1, (profile * (1 + 1e-12)).astype(np.int64))  # 2.9999999999999996 is 3
        rows = np.concatenate([rng.permutation(np.flatnonzero(label == c))[:n] for c, n in enumerate(kept)])
        rows.sort()
        writers = None if writer is None else checks.ids("writer", writer, len(y))[rows]
        owner = np.full(y.size, -1, np.int64)
        try:
            owner[rows] = partition.owners(y[rows], writers)
        except ConfigurationError as error:  # it speaks of the examples that are kept, which the caller never counted
            if rows.size == y.size:
                raise
            raise ConfigurationError(
                f"{error} (imbalance={imbalance:g} keeps {rows.size} of the {y.size} examples, and a smaller one keeps "
                "more)"
            ) from error
        return owner

    return Partition("long_tailed", {"partition": partition, "imbalance": imbalance, "seed": seed}, owners)


def _checked_sizes(sizes: Any, num_clients: int, size_sigma: float, min_size: int) -> str | tuple[int, ...]:
    if size_sigma > 0:
        got = f"sizes={checks.shown(sizes)} and size_sigma={size_sigma}"
        checks.refuse("pass either sizes or size_sigma", got, "leave one out")
    if isinstance(sizes, str):
        return checks.choice("sizes", sizes, SIZE_RULES)
    numbers = checks.array("sizes", sizes)
    if numbers.shape != (num_clients,) or numbers.dtype.kind not in "iu" or numbers.min() < min_size:
        words = ", ".join(map(repr, SIZE_RULES))
        what = f"sizes must be one of {words}, or {num_clients} integers >= {min_size}, one per client"
        checks.refuse(what, checks.shown(sizes))
    return tuple(numbers.tolist())
