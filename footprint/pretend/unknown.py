"""Numbers that a step reads from tensors without values, and what may be done with them.

They can be computed with and written, as if they were 1. Where they are compared, or where Python
wants a plain float (`float(loss)`, `math.exp`), they are 1, too, and the report names the line,
unless the user has given the number.
"""

import dis
import json
import numbers
import operator
import sys
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from footprint.python.patches import Patches
from footprint.python.refusal import HERE, TORCH, Refused

USUAL = 1.0  # in place of every number that is not known
MOST_READS = 100_000  # of one line in a step: a loop that never ends
WHOLE = tuple("bcdoxX")  # ends of format specifications that want an integer


class Reads:
    """Where the step has read a plain number."""

    def __init__(self):
        self.places: Counter[str] = Counter()  # "file.py:12" -> how often

    def plain(self, place: str) -> float:
        """The number read at `place`, as a float that nothing can follow."""
        self.places[place] += 1
        if self.places[place] > MOST_READS:  # a loop without an end
            raise branches(place)
        return USUAL


def _computed(self: "Unknown", *others: object) -> "Unknown":
    """The result of arithmetic; that with a tensor or a list is theirs."""
    if not all(isinstance(other, numbers.Number) for other in others):
        return NotImplemented
    return Unknown(self.origin, self.reads)


def _compared(relation: Callable) -> Callable[["Unknown", object], bool]:
    """A comparison as method, which is that of the usual number."""

    def compare(self: "Unknown", other: object) -> bool:
        if isinstance(other, Tensor):
            return NotImplemented
        return relation(float(self), USUAL if isinstance(other, Unknown) else other)

    return compare


class Unknown(torch.SymFloat):
    """A number without a value.

    PyTorch takes a SymFloat for a number, so that the mode `Reading` sees which function gets it.
    """

    def __init__(self, origin: str, reads: Reads):
        self.origin = origin  # where it was read
        self.reads = reads

    __class__ = property(lambda self: float)  # loggers ask whether a value is a number
    __hash__ = object.__hash__

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _computed
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _computed
    __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __pos__ = __abs__ = __round__ = _computed

    def __divmod__(self, other: object) -> tuple["Unknown", "Unknown"]:
        return self // other, self % other

    def __rdivmod__(self, other: object) -> tuple["Unknown", "Unknown"]:
        return other // self, other % self

    def __deepcopy__(self, memo: dict) -> "Unknown":
        return Unknown(self.origin, self.reads)

    def _refuse(self, *_):
        raise branches(self.origin)

    __index__ = __trunc__ = __floor__ = __ceil__ = is_integer = _refuse

    # ---- decisions

    __lt__ = _compared(operator.lt)
    __le__ = _compared(operator.le)
    __gt__ = _compared(operator.gt)
    __ge__ = _compared(operator.ge)
    __eq__ = _compared(operator.eq)
    __ne__ = _compared(operator.ne)

    def __bool__(self) -> bool:
        return bool(float(self))

    # ---- other types

    def __float__(self) -> float:
        return self.reads.plain(self.origin)

    def __array__(self, dtype=None, copy=None):
        numpy = sys.modules["numpy"]  # which asks, so it is there; this package does not need it
        return numpy.asarray(float(self), dtype=dtype)

    def __getattr__(self, name: str):
        """What else a float has, such as `as_integer_ratio`, which `statistics` asks for."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(float(self), name)

    def __int__(self) -> int:
        if not is_formatting():
            self._refuse()
        return int(USUAL)

    def __repr__(self) -> str:
        return str(USUAL)

    __str__ = __repr__

    def __format__(self, form: str) -> str:
        return format(int(USUAL) if form.endswith(WHOLE) else USUAL, form)

    def __reduce__(self):
        return float, (USUAL,)


numbers.Real.register(Unknown)


def branches(where: str) -> Refused:
    """The refusal of a step that decides by a value."""
    line = where.removesuffix(")").split(" ")[-1]
    return Refused(
        f"{where}: the step reads a tensor's value and decides by it, but tensors have no values "
        f"while memory is predicted: give the value with answers={{{line!r}: ...}}, or do without "
        "the decision"
    )


def is_formatting() -> bool:
    """Whether the line that runs formats by `%`, such as "%d" % count."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith((TORCH, HERE)):
        frame = frame.f_back
    running = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    return running == "BINARY_OP"


def usual(value: object) -> object:
    """The usual number for an unknown one; any other value as it is."""
    return USUAL if isinstance(value, Unknown) else value


def whole(value: object) -> object:
    """The usual whole number for an unknown one; any other value as it is."""
    return int(USUAL) if isinstance(value, Unknown) else value


def written_as_json() -> Patches:
    """Unknown numbers in lists and dictionaries can be written by `json`."""
    encode = json.JSONEncoder.iterencode

    def plain(encoder: json.JSONEncoder, value: object, *args, **kwargs):
        return encode(encoder, tree_map(usual, value), *args, **kwargs)

    return {(json.JSONEncoder, "iterencode"): plain}
