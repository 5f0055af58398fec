"""Decisions of a script by values that no tensor has: they are taken as if each number were 1, and
the report names the line.

`predict` refuses such a step, whose author can give the value. A script is somebody's as it is, and
decides mostly by losses: whether the best one yet is saved, whether a run has diverged.
"""

import operator

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from footprint.kernels.operators import is_fake
from footprint.pretend.places import StepTracker
from footprint.pretend.unknown import USUAL
from footprint.pretend.values import CHECKS, KINDS, TWIN, Reading, calling_file
from footprint.python.patches import Patches
from footprint.python.refusal import Refused, place

COMPARED = "_footprint_compared"  # the attribute of a result of unknown numbers
RELATIONS = {}
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _relation = getattr(operator, _name)
    RELATIONS[getattr(torch, _name)] = _relation
    RELATIONS[getattr(Tensor, _name)] = _relation
    RELATIONS[getattr(Tensor, f"__{_name}__")] = _relation
# numpy has no such kinds of numbers
NEAREST = {torch.bfloat16: torch.float32}


class Deciding(Reading):
    """Reads what is not known as 1, and what is compared as what 1 gives."""

    def __init__(self, tracker: StepTracker, refusals: list[str], *args):
        super().__init__(*args)
        self.tracker = tracker
        self.refusals = refusals  # those that nothing has answered

    def _run(self, func, args, kwargs):
        result = super()._run(func, args, kwargs)
        if func in RELATIONS and is_fake(result) and len(args) == 2:
            self._compare(RELATIONS[func], result, args)
        return result

    def _compare(self, relation, result: Tensor, args) -> None:
        """A comparison of single numbers has the value that it has for 1."""
        if result.numel() != 1 or self.known.of(result) is not None:
            return
        if calling_file() in CHECKS:  # of distributions, which are not told that 1 is meant
            return
        numbers = [self._single(value) for value in args]
        if None in numbers:
            return
        with _disable_current_modes():
            answer = torch.full((1,), relation(*numbers), dtype=torch.bool, device="cpu")
        setattr(result.untyped_storage(), TWIN, (answer.untyped_storage(), False))
        setattr(result, COMPARED, True)

    def _single(self, value: object) -> float | None:
        if not isinstance(value, Tensor):
            return float(value) if isinstance(value, int | float) else None
        if value.numel() != 1:
            return None
        real = self.known.of(value)
        if real is None:
            return USUAL
        with _disable_current_modes():
            return float(real)

    def value(self, func, tensor: Tensor):
        if getattr(tensor, COMPARED, False):
            self.known.suppose(f"{place()} compares unknown numbers as if they were {USUAL:g}")
        try:
            return super().value(func, tensor)
        except Refused as refusal:
            if func is Tensor.__index__:  # a size, on which memory depends
                raise
            self.refusals.remove(str(refusal))
        answer = self._usual(tensor)
        self.known.suppose(f"what {place()} reads is taken as {answer}")
        if func is Tensor.tolist:
            return nested(answer, list(tensor.shape))
        return KINDS.get(func, lambda value: value)(answer)

    def _usual(self, tensor: Tensor) -> bool | float | int:
        """1; of a boolean what training goes on with: all() of something holds, no other does."""
        if tensor.dtype == torch.bool:
            return self.tracker.made_by(tensor).startswith("aten.all")
        return USUAL if tensor.is_floating_point() else int(USUAL)


def nested(value: object, shape: list[int]) -> object:
    """A list of lists of that shape, all of one value."""
    if not shape:
        return value
    return [nested(value, shape[1:]) for _ in range(shape[0])]


def arrays_of_ones(tracker: StepTracker) -> Patches:
    """numpy reads ones from a tensor without values, and the report says where."""
    read = Tensor.numpy

    def numpy(tensor: Tensor, *args, **kwargs):
        if not is_fake(tensor):
            return read(tensor, *args, **kwargs)
        known = tracker.known.of(tensor)
        if known is None:
            tracker.known.suppose(f"the values that numpy reads in {place()} are ones")
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            if known is None:
                dtype = NEAREST.get(tensor.dtype, tensor.dtype)
                known = torch.ones(tensor.shape, dtype=dtype, device="cpu")
            return read(known.detach().clone())

    def array(tensor: Tensor, dtype=None, copy=None):
        found = numpy(tensor)
        return found if dtype is None else found.astype(dtype, copy=False)

    return {(Tensor, "numpy"): numpy, (Tensor, "__array__"): array}
