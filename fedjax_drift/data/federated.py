"""The data of a federation: one flat array of examples, grouped by client.

The examples of client i are contiguous: ``x[offsets[i] : offsets[i] + sizes[i]]``. So two integers describe a client of
any size, and a minibatch is a gather by index. The examples are not padded, and they are not copied in a round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_drift import checks, reprs, spec
from fedjax_drift.data import joining
from fedjax_drift.data.decoding import Decoding
from fedjax_drift.data.decoding import integers_as_int32 as integers_as_int32
from fedjax_drift.data.joining import Pair as Pair
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.shift.rule import TESTING, TRAINING, Owner, Shift, Shifting, shift_of
from fedjax_drift.shift.time import chain
from fedjax_drift.spec import Amount, Count, CountOrZero, Fix, Seed, Shape, Text, checked

Alpha = Annotated[Amount, Fix("0.01 splits very unevenly, 100 almost evenly; None splits evenly")]


@dataclass(frozen=True, eq=False)
@checked
class FederatedData:
    """The training examples of N clients, M in total, and optionally a test set.

    Create it with `from_clients` or `from_partition`.
    """

    x: np.ndarray
    """[M, ...] training inputs, grouped by client. uint8 inputs stay uint8 on the device, and reach the model as
    float32: images, which have at least two axes per example, in [0, 1], or standardised if `mean` and `std` are given;
    other uint8 inputs with their values, because the arithmetic of uint8 wraps around (0 - 1 = 255). Flat images
    [M, H * W] are images if `mean` and `std` are given; ``mean=0, std=1`` scales them to [0, 1]. Other dtypes reach the
    model unchanged, so tokens and ids must be int32, for example."""
    y: np.ndarray
    """[M, ...] training labels; integers for the default loss."""
    sizes: np.ndarray
    """int32 [N], number of training examples of each client, >= 1."""
    x_test: np.ndarray | None = None
    """[M_test, ...] test inputs; None without a test set."""
    y_test: np.ndarray | None = None
    """[M_test, ...] test labels."""
    test_sizes: np.ndarray | None = None
    """int32 [N], number of test examples of each client. None if the test set is not split by client."""
    mean: Any = None
    """Mean of the uint8 images, scaled to [0, 1]: a scalar, or one value per channel (the last axis of x); float32."""
    std: Any = None
    """Standard deviation of the uint8 images, scaled to [0, 1], like `mean`. Give both or neither."""
    name: Text = "data"
    redeal: Alpha | Literal["evenly"] | None = None
    """Redistribution of the cohort's examples in every round. Set it with `redealt`. "evenly": the examples are pooled
    and split evenly. A number alpha > 0: the examples are pooled, and each class is split by Dirichlet(alpha). None:
    clients train on their own examples."""
    client_names: tuple[str, ...] | None = None
    """N distinct names, one per client. None if the clients only have ids."""
    shifting: Shifting | None = None
    """How the examples change from client to client or from round to round. Set it with `shifted`."""

    def __post_init__(self) -> None:
        x, y = joining.checked_pair(self.x, self.y, "training data")
        sizes = joining.counts(self.sizes, "sizes", len(x))
        names, N = self.client_names, len(sizes)
        if names is not None:
            names = joining.checked_names(names, N)
        if sizes.min() < 1:
            empty = int(sizes.argmin()) if names is None else names[int(sizes.argmin())]
            what = f"every client needs at least 1 example, but client {empty} is empty: leave it out"
            raise ConfigurationError(what)
        (x_test, y_test), test_sizes = joining.checked_test(self.x_test, self.y_test, x, y), self.test_sizes
        if test_sizes is not None:
            test_sizes = joining.counts(test_sizes, "test_sizes", 0 if x_test is None else len(x_test), N)
        mean, std = joining.normalisation(self.mean, self.std, x)
        if self.redeal not in (None, "evenly"):
            joining.check_classes(y, "redealt(alpha) needs")
        arrays = {"x": x, "y": y, "sizes": sizes, "x_test": x_test, "y_test": y_test, "test_sizes": test_sizes}
        for name, value in (arrays | {"mean": mean, "std": std, "client_names": names}).items():
            object.__setattr__(self, name, value)

    @property
    def root(self) -> FederatedData:
        """The federation whose arrays these are. `redealt` and `shifted` data share them, also on the devices."""
        return self.__dict__.get("_root", self)

    def _with(self, **changes: Any) -> FederatedData:
        """The same arrays with other fields."""
        new = replace(self, **changes)
        object.__setattr__(new, "_root", self.root)
        return new

    @property
    def has_images(self) -> bool:
        """Whether the inputs are uint8 images, which the model gets divided by 255. See `x`."""
        return self.x.dtype == np.uint8 and (self.x.ndim > 2 or self.mean is not None)

    @property
    def num_clients(self) -> int:
        """N, the number of clients."""
        return len(self.sizes)

    @property
    def num_classes(self) -> int | None:
        """C, one more than the largest training label. None unless the labels are integers."""
        return int(self.range_of("y")[1]) + 1 if self.y.dtype.kind in "iu" else None

    @cached_property
    def offsets(self) -> np.ndarray:
        """int64 [N], the index of the first example of each client."""
        return np.cumsum(self.sizes, dtype=np.int64) - self.sizes

    def sizes_of(self, ids: np.ndarray) -> np.ndarray:
        """Returns the sizes n_i of the clients ``ids``, int32 [K]. An id outside of 0..N-1 has the size 0."""
        present = (ids >= 0) & (ids < self.num_clients)
        return np.where(present, self.sizes[np.where(present, ids, 0)], 0)

    def range_of(self, name: str, by_position: bool = False) -> tuple[Any, Any]:
        """Returns the smallest and the largest value of ``x``, ``y``, ``x_test`` or ``y_test``. They are cached.

        by_position: if True, returns arrays with one value per position of the last axis.
        """
        ranges: dict[tuple[str, bool], tuple[Any, Any]] = self.__dict__.setdefault("_ranges", {})
        if (name, by_position) not in ranges:
            array = getattr(self, name)
            if by_position:
                array = array.reshape(-1, 1 if array.ndim == 1 else array.shape[-1])
            axis = 0 if by_position else None
            ranges[name, by_position] = array.min(axis), array.max(axis)
        return ranges[name, by_position]

    @classmethod
    def from_clients(
        cls,
        clients: Sequence[Pair] | Mapping[Any, Pair],
        test: Pair | None = None,
        *,
        test_clients: Sequence[Pair] | Mapping[Any, Pair] | None = None,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        name: str = "data",
    ) -> FederatedData:
        """Creates a federation from one pair of arrays per client.

        Args:
          clients: a list of pairs (x_i [n_i, ...], y_i [n_i, ...]) with n_i >= 1. Or a dict from client name to pair.
            The clients then have names (`client_names`), and their ids follow the order of the dict.
          test: a pooled test set (x, y).
          test_clients: the test examples of each client, as a list or dict like ``clients``, instead of ``test``. A
            client may have no test examples: pass empty arrays of any dtype and shape, such as ``([], [])``, or leave
            the client out of a dict. `Simulation.evaluate` uses the test examples of all clients together.
          mean, std: see the attributes of this class. Default: no standardisation.
          name: the name of the data set in plots and logs.

        Raises:
          ValueError: a client is empty, lengths do not match, dtypes or shapes differ between clients, or inputs are
            not finite. Labels may be integers of different dtypes: they get a common integer dtype.

        >>> x, y = np.ones((2, 3), np.float32), np.array([0, 1])
        >>> data = FederatedData.from_clients({"ann": (x, y), "bob": (x[:1], y[:1])})
        >>> data.client_names, data.id_of("bob")
        (('ann', 'bob'), 1)
        """
        client_names = None
        if test_clients is not None:
            test_clients = joining.aligned(test_clients, clients)
        if isinstance(clients, Mapping):
            client_names, clients = tuple(map(str, clients)), list(clients.values())
        x, y, sizes = joining.concatenate(clients, "client", client_names)
        (x_test, y_test), test_sizes = (None, None) if test is None else joining.as_pair(test, "test"), None
        if test_clients is not None:
            if test is not None:
                fix = "evaluate pools test_clients, so leave test out"
                checks.refuse("pass either test or test_clients", "both", fix)
            x_test, y_test, test_sizes = joining.concatenate(test_clients, "test client", client_names)
            if len(test_sizes) != len(sizes):
                checks.refuse(f"test_clients must have {len(sizes)} pairs, one per client", len(test_sizes))
        return cls(x, y, sizes, x_test, y_test, test_sizes, mean, std, name, client_names=client_names)

    @classmethod
    def from_partition(
        cls,
        x: np.ndarray,
        y: np.ndarray,
        parts: Sequence[np.ndarray],
        test: Pair | None = None,
        *,
        test_parts: Sequence[np.ndarray] | None = None,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        name: str = "data",
    ) -> FederatedData:
        """Creates a federation from a data set ``x [M, ...], y [M, ...]`` and a list of N integer arrays, ``parts``.

        ``parts[i]`` has the indices of the examples of client i. If ``owner[m]`` is the client of example m, these are
        ``[np.flatnonzero(owner == i) for i in range(N)]``. Examples may be left out, or belong to several clients.
        ``test_parts`` splits the test set in the same way.

        Raises ValueError for a client without training examples and for indices outside of 0..M-1.
        """
        x, y = joining.checked_pair(x, y, "training data")
        rows, sizes = joining.join_parts(parts, len(x), "parts")
        (x_test, y_test), test_sizes = (None, None) if test is None else joining.as_pair(test, "test"), None
        if test_parts is not None:
            if x_test is None or y_test is None:
                checks.refuse("test_parts needs a test set to split", "none", "pass test=(x, y) too")
            test_rows, test_sizes = joining.join_parts(test_parts, len(x_test), "test_parts")
            x_test, y_test = x_test[test_rows], y_test[test_rows]
        return cls(x[rows], y[rows], sizes, x_test, y_test, test_sizes, mean, std, name)

    @classmethod
    @checked
    def of_shapes(
        cls,
        num_clients: Count,
        rows_per_client: Count,
        shape: Shape,
        dtype: Any = np.uint8,
        test_rows: CountOrZero = 0,
        label_shape: Shape = (),
    ) -> FederatedData:
        """Returns data whose examples and labels are all zero, and which take no memory: for `fd.plan`.

        Args:
          num_clients, rows_per_client: N and the number of training examples of every client, each >= 1.
          shape, dtype: of one example, such as (28, 28, 1). Default: uint8, for images.
          label_shape: the shape of the label of one example. Default: (), a class. For next-token prediction, pass
            ``shape=(T,), dtype=np.int32, label_shape=(T,)``.
          test_rows: number of test examples, >= 0. Some algorithms evaluate the global model in every round.
        """

        def pair(rows: int) -> Pair:
            x, y = np.zeros((), dtype), np.int32(0)
            return np.broadcast_to(x, (rows, *shape)), np.broadcast_to(y, (rows, *label_shape))

        x, y = pair(num_clients * rows_per_client)
        x_test, y_test = pair(test_rows) if test_rows else (None, None)
        return cls(x, y, np.full(num_clients, rows_per_client), x_test, y_test, name="shapes")

    def client(self, i: int | str) -> Pair:
        """Returns the training examples ``(x [n_i, ...], y [n_i, ...])`` of a client as stored. i: an id or a name."""
        i = self._id(i)
        rows = slice(self.offsets[i], self.offsets[i] + self.sizes[i])
        return self.x[rows], self.y[rows]

    def _id(self, client: int | str) -> int:
        if isinstance(client, str):
            return self.id_of(client)
        return checks.integer("client", client, 0, self.num_clients - 1)

    @checked
    def id_of(self, name: Text) -> int:
        """Returns the id in 0..N-1 of the client with this name. Raises ValueError if there is none."""
        if (client_id := self._ids.get(name)) is None:
            known = f"{self.num_clients} clients have names" if self._ids else "the clients have ids only"
            raise ConfigurationError(f"no client has the name {name!r} ({known}){checks.nearest(name, self._ids)}")
        return client_id

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.client_names or ())}

    def decode(self, x: Any) -> jax.Array:
        """Converts stored inputs ``x [..., *shape of one example]`` to model inputs.

        See `x`. Training and evaluation do this automatically. Call it if you apply a model yourself:
        ``model.apply(params, data.decode(data.x_test))``.
        """
        x = x if isinstance(x, jax.Array) else checks.array("x", x)
        if self.mean is not None and x.shape[-1:] != self.x.shape[-1:]:
            what = f"x must have {self.x.shape[-1]} channels as its last axis, like the data"
            checks.refuse(what, x.shape, "pass data.x_test, for example")
        return self.decoding(jnp.asarray(x))

    @property
    def decoding(self) -> Decoding:
        """`decode` as a value that can be compared."""
        mean, std = (None if value is None else tuple(value.ravel().tolist()) for value in (self.mean, self.std))
        return Decoding(self.has_images, mean, std)

    @checked
    def redealt(self, alpha: Alpha | None = None) -> FederatedData:
        """Returns the same data (no copy). Every round then pools the examples of its cohort and splits them.

        Redistribution separates client drift and period drift, see `drift_regimes`.

        Args:
          alpha: None (default) splits the examples evenly, so that the clients of a cohort are similar. If the
            federation is non-IID, only period drift remains. A number > 0 splits each class by Dirichlet(alpha), so
            that the clients of a cohort differ. If the federation is IID, only client drift remains. A client that gets
            no example does not take part in this round.

        Raises ValueError if alpha is given and the labels are not non-negative integers, one per example.
        """
        return self._with(redeal="evenly" if alpha is None else alpha)

    @checked
    def shifted(
        self,
        shift: Shift | Any,
        test: Literal["present", "first", "both"] | None = None,
        seed: Annotated[int, spec.integer(0, 2**32 - 1)] | None = None,
    ) -> FederatedData:
        """Returns the same data (no copy) with a shift: clients with other features, or data that change over time.

        The shift is applied to the decoded examples of every minibatch, in the compiled round. It is applied before
        the augmentation (`LocalTraining`). Data that are already shifted get a second shift after the first.

        Args:
          shift: one of `fedjax_drift.shift`, or a function ``(key, t, client, x, y) -> (x, y)`` of one decoded example.
            key: belongs to the example and is the same in all rounds. t: int32 [], the round. client: int32 [], the id.
            A shift that depends on the client leaves the global test set as it is. The test examples of a client
            (`Simulation.evaluate_clients`) are shifted like its training examples.
          test: which test set is evaluated after t rounds. "present" (default): that of round t - 1, the one just
            trained. "first": that of round 0. "both": the scores of the present one, and those of the first one with
            the prefix ``first_``.
          seed: random seed of all shifts of the data, in 0..2**32 - 1. The shifted data do not depend on the seed of a
            run. Default: that of an earlier shift, or 0.

        A shift that does not fit the examples is refused when a `Simulation` is created.
        """
        old = self.shifting
        if old is None:
            return self._with(shifting=Shifting(shift_of(shift), test or "present", seed or 0))
        seed = old.seed if seed is None else seed
        return self._with(shifting=Shifting(chain(old.shift, shift), test or old.test, seed))

    def examples(self, client: int | str, round: int = 0, test: bool = False) -> Pair:  # noqa: A002
        """Returns the examples ``(x [n_i, ...], y [n_i, ...])`` of a client as the model gets them in a round: decoded
        and shifted. client: an id or a name. test: whether to return its test examples."""
        i = self._id(client)
        x, y = self.client(i)
        if test:
            if self.x_test is None or self.y_test is None or self.test_sizes is None:
                checks.refuse("test examples of a client need a test set that is split by client", "none")
            end = self.test_sizes[: i + 1].sum()
            x, y = (a[end - self.test_sizes[i] : end] for a in (self.x_test, self.y_test))
        inputs, labels = self.decode(x), jnp.asarray(integers_as_int32(y))
        t = jnp.int32(checks.integer("round", round, 0, 2**31 - 1))
        if self.shifting is not None:
            owner, part = Owner(jnp.int32(i), self.num_clients, 0, self.num_classes), TESTING if test else TRAINING
            inputs, labels = self.shifting.examples(t, owner, jnp.arange(len(x)), inputs, labels, part)
        return np.asarray(inputs), np.asarray(labels)

    @checked
    def with_client_tests(self, seed: Seed = 0) -> FederatedData:
        """Returns the same data with the test set split by client, for `Simulation.evaluate_clients`.

        The test examples of each class are split in proportion to the clients' training examples of this class. So a
        client's test examples have nearly the label distribution of its training examples. Small clients may get none.
        `Simulation.evaluate` still uses the whole test set. seed: random seed, >= 0.

        Raises ValueError if there is no test set, if the labels are not non-negative integers with one label per
        example, or if a class of the test set has no training examples.
        """
        if self.x_test is None or self.y_test is None:
            checks.refuse("with_client_tests needs a test set to split", "none", "pass test=(x, y)")
        owner = joining.owners_by_class(self.y_test, self.label_counts(), seed)
        order = np.argsort(owner, kind="stable")
        sizes = np.bincount(owner, minlength=self.num_clients)
        return replace(self, x_test=self.x_test[order], y_test=self.y_test[order], test_sizes=sizes)

    @checked
    def with_validation(
        self,
        share: Annotated[float, spec.INSIDE, Fix("0.1 holds out a tenth of the examples of each client")] = 0.1,
        seed: Seed = 0,
    ) -> FederatedData:
        """Returns the same clients with a part of their training examples held out, which replaces the test set.

        Choose hyper-parameters with these data, so that the choice does not use the test set. Of a client with n
        examples, share * n random examples are held out (rounded, at most n - 1), share in (0, 1). They are split by
        client, as `Simulation.evaluate_clients` needs it. The examples are copied, also those of a memory map. seed:
        random seed, >= 0. Raises ValueError if no client has enough examples to hold one out.
        """
        rng = np.random.default_rng(seed)
        test_sizes = np.minimum(np.round(share * self.sizes).astype(np.int64), self.sizes - 1)
        if not test_sizes.any():
            got = f"share={share} of at most {self.sizes.max()} examples per client"
            checks.refuse("with_validation must hold out at least one example", got, "use a larger share")
        client, is_test = np.repeat(np.arange(self.num_clients), self.sizes), np.zeros(len(self.x), bool)
        rows = np.lexsort((rng.random(len(client)), client))  # grouped by client, in random order within a client
        is_test[rows[np.arange(len(rows)) < np.repeat(self.offsets + test_sizes, self.sizes)]] = True
        held = {"x_test": self.x[is_test], "y_test": self.y[is_test], "test_sizes": test_sizes}
        return replace(self, x=self.x[~is_test], y=self.y[~is_test], sizes=self.sizes - test_sizes, **held)

    @checked
    def with_validation_clients(
        self, share: Annotated[float, spec.INSIDE, Fix("0.1 holds out a tenth of the clients")] = 0.1, seed: Seed = 0
    ) -> FederatedData:
        """Returns the data without some of the clients, whose training examples replace the test set.

        Choose hyper-parameters with these data to score models on clients that never train. Of the N clients, share * N
        (rounded, in 1..N - 1) are held out, share in (0, 1). The random seed ``seed``, >= 0, chooses them. The others
        get new ids, in the same order. The test examples are not split by client. The examples are copied, also those
        of a memory map. Raises ValueError if there is only one client.
        """
        rng, N = np.random.default_rng(seed), self.num_clients
        if N == 1:
            checks.refuse("with_validation_clients needs at least 2 clients", 1, "use with_validation")
        is_test = rng.permutation(N) < min(max(round(share * N), 1), N - 1)
        kept, held = self.only(np.flatnonzero(~is_test)), self.only(np.flatnonzero(is_test))
        return replace(kept, x_test=held.x, y_test=held.y, test_sizes=None)

    def only(self, clients: Sequence[int | str] | np.ndarray) -> FederatedData:
        """Returns the data of some clients, such as the 90 of 100 that train: ``data.only(range(90))``.

        clients: different ids or names, at least one; the new ids follow their order, also for shifts. They keep their
        test examples. A test set that is not split by client stays whole. Raises ValueError for other clients.
        """
        ids = np.array([self._id(client) for client in clients], int)
        if not ids.size or len(set(ids.tolist())) < len(ids):
            checks.refuse("clients must be different ids or names, at least one", checks.shown(clients))
        changes = dict(zip(("x", "y", "sizes"), joining.of_clients(ids, self.x, self.y, self.sizes), strict=True))
        if self.test_sizes is not None:
            x, y, sizes = joining.of_clients(ids, self.x_test, self.y_test, self.test_sizes)
            changes |= {"x_test": x, "y_test": y, "test_sizes": sizes}
        names = self.client_names and tuple(self.client_names[i] for i in ids)
        return replace(self, client_names=names, **changes)

    def label_counts(self) -> np.ndarray:
        """Returns the number of training labels of each class at each client, int64 [N, C].

        Raises ValueError unless the labels are integers. An example may have several, such as the tokens of a text.
        """
        return joining.label_counts(self.y, self.sizes, self.num_classes or 0)

    def __repr__(self) -> str:
        test = "no test set" if self.x_test is None else f"{len(self.x_test):,} test examples"
        if self.redeal is not None:
            test += ", redealt evenly" if self.redeal == "evenly" else f", redealt by Dirichlet({self.redeal})"
        if self.shifting is not None:
            test += f", shifted by {self.shifting.shift!r}"
        return (
            f"FederatedData({self.name!r}: {self.num_clients:,} clients, {len(self.x):,} examples of "
            f"{self.x.dtype}{list(self.x.shape[1:])}, {self.sizes.min()} to {self.sizes.max()} per client, {test})"
        )

    def _repr_html_(self) -> str:
        return reprs.html_table(["", self.name], joining.described(self.x, self.y, self.sizes, self.x_test))


GivenData = Annotated[FederatedData, spec.instance(FederatedData), Fix("pass sim.data, for example")]
