"""What an algorithm needs of the model, of local training and of the rounds."""

from __future__ import annotations

from typing import Any, NamedTuple

from fedjax_drift import checks


class Needs(NamedTuple):
    """What an algorithm needs. It is checked when a `Simulation` is created. ``a | b`` are the needs of both."""

    features: bool = False  # the model has this field
    head: bool = False  # likewise
    extractor: bool = False  # likewise
    cosine: bool = False  # likewise
    classifier: bool = False  # the model has the default loss
    one_model: bool = False  # no running statistics that clients update, because clients train several models
    one_version: bool = False  # all clients of a mean have started with the same variables of the server
    one_rate: bool = False  # all clients of a mean have started with the same learning rate
    optimizer: str = "any"  # of the local steps: "any", "sgd" (without momentum) or "sgd or momentum"
    epochs: int = 0  # the least number of local epochs; with 1 or more, ``LocalTraining(steps=)`` is refused
    accuracy: bool = False  # the evaluation reports an accuracy
    one_server: bool = False  # no topology with several servers
    weights: bool = False  # participation and aggregation keep the weights of the clients
    equal_weights: bool = False  # all clients of a mean have the same weight, and no discount
    adapters: bool = False  # both factors of low-rank adapters are trained (`fd.models.lora`)

    def __or__(self, other: Needs) -> Needs:  # type: ignore[override]
        """The needs of both."""
        strict = max((self.optimizer, other.optimizer), key=OPTIMIZERS.index)
        largest: Any = map(max, self, other)
        return Needs(*largest)._replace(optimizer=strict)

    @classmethod
    def of(cls, value: Any) -> Needs:
        """The needs that ``value`` is, or that its strings name, such as ``("features", "sgd", "2 epochs")``."""
        if not isinstance(value, tuple | list) or isinstance(value, Needs):
            return checks.instance("Algorithm.requires", value, Needs, "pass fd.Needs(features=True), for example")
        needs, flags = cls(), [name for name, default in cls._field_defaults.items() if default is False]
        for name in value:
            number, _, unit = str(name).partition(" ")
            if name in OPTIMIZERS:
                needs |= cls(optimizer=name)
            elif unit == "epochs" and number.isdecimal():
                needs |= cls(epochs=int(number))
            else:
                flag = checks.choice("Algorithm.requires", str(name).replace(" ", "_"), [*flags, *OPTIMIZERS])
                needs |= cls()._replace(**{flag: True})  # type: ignore[arg-type]
        checks.warn(
            f"Algorithm.requires as strings is deprecated: pass requires=fd.{needs.brief()}", DeprecationWarning
        )
        return needs

    def brief(self) -> str:
        """The needs as an expression, without those that are the default."""
        given = [f"{n}={v!r}" for n, v in self._asdict().items() if v != self._field_defaults[n]]
        return f"Needs({', '.join(given)})"


OPTIMIZERS = ("any", "sgd or momentum", "sgd")  # of `Needs.optimizer`; each one allows less than the one before it
