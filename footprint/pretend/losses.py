"""The loss among what a model returns: a tensor, or tensors in tuples, dicts and dataclasses."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from footprint.python.refusal import Refused


class Named(NamedTuple):
    """A tensor of an output, where it is in it, and its own name there."""

    tensor: Tensor
    place: str
    name: object


def returned_loss(output: object) -> tuple[Tensor, str]:
    """The loss that a model returns: what is named "loss", or the only scalar, of all tensors that
    need gradients. Else the mean of the first of them, scalars first; and what this takes for
    granted, in words.

    Refused for an output without a tensor that needs a gradient.
    """
    trained = [found for found in tensors(output) if found.tensor.requires_grad]
    if not trained:
        raise Refused(
            f"the model returns {kind(output)}, in which no tensor needs a gradient: give `loss`, "
            "a function of what it returns, or train parameters on which that depends"
        )

    scalars = [found for found in trained if found.tensor.dim() == 0]
    named = [found for found in trained if found.name == "loss"]
    for choice in (named, scalars):
        if len(choice) == 1 and choice[0].tensor.dim() == 0:
            return choice[0].tensor, ""

    first = [*named, *scalars, *trained][0]
    words = f"the loss is the mean of {first.place}, unless `loss` says another"
    return first.tensor.mean(), words


def tensors(value: object, place: str = "the model's output", name: object = "") -> Iterator[Named]:
    """The tensors in a value, outermost first in the order of its parts."""
    if isinstance(value, Tensor):
        yield Named(value, place, name)
        return
    for name, part in parts(value):
        shown = f"{place}[{name!r}]" if is_container(value) else f"{place}.{name}"
        yield from tensors(part, shown, name)


def parts(value: object) -> Iterator[tuple[object, object]]:
    """The names of a value's parts, and the parts."""
    if isinstance(value, Mapping):
        yield from value.items()
    elif is_container(value):
        yield from enumerate(value)
    elif isinstance(value, tuple):  # a named one
        yield from value._asdict().items()
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield field.name, getattr(value, field.name)
    elif hasattr(value, "loss"):  # an object of the model's own
        yield from (getattr(value, "__dict__", {}) | {"loss": value.loss}).items()


def is_container(value: object) -> bool:
    """Whether its parts are items, not attributes."""
    if isinstance(value, tuple):
        return not hasattr(value, "_asdict")
    return isinstance(value, Mapping | list)


def kind(output: object) -> str:
    """What was returned, in words."""
    if output is None:
        return "None"
    return f"a value of type {type(output).__name__}"
