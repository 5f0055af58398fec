"""What a step may do with the value of a tensor that has none.

Fake tensors have shapes but no values. A number that is only logged or that scales a loss is an
`Unknown` (unknown.py). A decision by a value is refused with the line of the user's file, unless
the user has given the answer for that line. Numbers are taken to be finite.

Values that do not depend on weights are known: of small tensors made by `arange`, `linspace`,
`ones`, `tensor` and so on a real twin is computed next to the fake one. Random integers are drawn
for the twin; where one is read, the prediction is that of this draw, and says so.
"""

import itertools
import sys
import types
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.functional import one_hot
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from footprint.kernels.operators import is_fake
from footprint.pretend.unknown import USUAL, Reads, Unknown, branches, is_formatting, usual, whole
from footprint.python.patches import Patches
from footprint.python.refusal import HERE, TORCH, Refused, lines, place
from footprint.record.tracker import tensors_in

# torch draws until no number is out of bounds, which it asks there
INITIALISATION = torch.nn.init.__file__
# distributions ask there whether what they were given is valid
CHECKS = (torch.distributions.distribution.__file__, torch.distributions.constraints.__file__)
KERNEL = (
    "a kernel that is not PyTorch's cannot run, so its memory cannot be predicted: make it an "
    "operator (torch.library.custom_op) and say what it returns (register_fake)"
)
MOST_KNOWN = 2**18  # elements of a tensor whose values are computed
# the attribute of a fake storage: a real one, and whether its values depend on random integers
TWIN = "_footprint_twin"
NO_TWIN = (None, False)
SHARED = "_footprint_shared"  # the attribute of one whose twin is a tensor of the user's
READS = {
    Tensor.item,
    Tensor.tolist,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
}
# A training loop asks them to stop when it has diverged
ARE_FINITE = {torch.isfinite, Tensor.isfinite}
ARE_NOT_FINITE = {torch.isnan, Tensor.isnan, torch.isinf, Tensor.isinf}
FINITE = "numbers that the step tests are finite"
# functions whose results have the same shape whatever Unknown they get
COMPUTES = {"tensor", "as_tensor", "full", "full_like", "fill_", "clamp", "clamp_"}
COMPUTES |= {"__setitem__", "index_fill_", "fill_diagonal_"}
_ARITHMETIC = ("add", "sub", "mul", "div", "truediv", "pow", "mod", "floordiv")
_COMPARISONS = ("gt", "ge", "lt", "le", "eq", "ne", "where", "masked_fill")
_UPDATES = ("lerp", "addcmul", "addcdiv", "clamp_min", "clamp_max")
for _name in _ARITHMETIC + _COMPARISONS + _UPDATES:
    COMPUTES |= {_name, f"{_name}_", f"__{_name}__", f"__r{_name}__", f"__i{_name}__"}
# functions that take a tensor of one element for a number on which no shape depends
FACTORS = {
    "add",
    "sub",
    "rsub",
    "addcmul",
    "addcdiv",
    "addmm",
    "addbmm",
    "baddbmm",
    "addmv",
    "addr",
}
FACTORS |= {"clamp", "clip", "full_like", "masked_fill", "fill", "lerp", "normal", "uniform"}
FACTORS |= {"isclose", "softplus", "threshold", "leaky_relu", "elu", "tril", "triu", "roll"}
# functions of which one argument is such a number, or a tuple of them: its position
ONE_FACTOR = {"full": 1, "select": 2, "narrow": 2, "getitem": 1, "setitem": 1}
NAMES = ("fill_value", "index", "start")  # of that argument
SPLITS = {Tensor.split, torch.split}
PERMUTATIONS = (torch.ops.aten.randperm.default, torch.ops.aten.randperm.generator)
RANDOM = (
    *PERMUTATIONS,
    torch.ops.aten.randint.default,
    torch.ops.aten.randint.generator,
    torch.ops.aten.randint.low,
    torch.ops.aten.randint.low_generator,
)
# operators that draw whole numbers into the tensor that they are given
DRAWS = (
    torch.ops.aten.random_.default,
    torch.ops.aten.random_.to,
    getattr(torch.ops.aten.random_, "from"),
)
MOST_DRAWN = 2**20  # elements of a tensor of random integers that have values
# GradScaler divides gradients by it, and has it say in `found_inf` whether one is not finite
UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
NO_OVERFLOW = "no gradient overflows, so that GradScaler lets the optimizer step"
# operators whose results have shapes that follow from known values
NONZERO = torch.ops.aten.nonzero.default
REPEATS = torch.ops.aten.repeat_interleave.Tensor
INDEXED = torch.ops.aten.index.Tensor
ALL_OR_ANY = (torch.ops.aten.all.default, torch.ops.aten.any.default)
# operators whose results do not depend on the values of the tensor that they are given
LIKE = {
    "aten::zeros_like",
    "aten::ones_like",
    "aten::full_like",
    "aten::new_zeros",
    "aten::new_ones",
    "aten::new_full",
}


# ---- values that are known


class KnownValues:
    """Real twins of the storages of small fake tensors, as far as they follow from constants.

    What views and copies of a module's tensors hold is known with them. The twin of many booleans
    that are all equal has one of them.
    """

    def __init__(self):
        self.reads = Reads()
        self.assumed: dict[str, None] = {}  # what the prediction takes for granted, in words
        self.given_unknown = False  # whether the function that runs got a number without a value
        self.random = torch.Generator("cpu")  # not the user's

    def begin(self) -> None:
        """Draw the random integers that the last step has drawn."""
        self.random.manual_seed(0)

    def suppose(self, words: str) -> None:
        """Take something for granted, and say so."""
        self.assumed.setdefault(words)

    def suppose_numbers(self) -> None:
        """Say which numbers without a value the step has read as plain ones."""
        for line in self.reads.places:
            self.suppose(f"the number that {line} reads is taken as {USUAL:g}")

    def of(self, tensor: Tensor) -> Tensor | None:
        """The tensor with its values; None if they are not known."""
        if not is_fake(tensor):
            return tensor
        fake = tensor.untyped_storage()
        storage, _ = getattr(fake, TWIN, NO_TWIN)
        if storage is None or tensor.is_complex():
            return None
        layout = tensor.storage_offset(), tensor.shape, tensor.stride()
        if storage.nbytes() < fake.nbytes():  # one of many that are equal
            if tensor.numel() * tensor.itemsize < fake.nbytes():
                return None
            layout = 0, ()
        with _disable_current_modes():
            empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
            return empty.set_(storage, *layout)

    def give(self, fake: Tensor, real: Tensor) -> None:
        """A fake tensor has the values of a real one, which the step does not change."""
        storage = real.untyped_storage()
        is_small = storage.nbytes() <= MOST_KNOWN * real.itemsize
        if real.is_floating_point() and not is_small:
            return
        fake_storage = fake.untyped_storage()
        if is_small:
            with _disable_current_modes():
                storage = storage.clone()
        setattr(fake_storage, SHARED, not is_small)
        setattr(fake_storage, TWIN, (storage, False))

    def is_drawn(self, tensor: Tensor) -> bool:
        """Whether the values that are known depend on random integers."""
        _, is_drawn = getattr(tensor.untyped_storage(), TWIN, NO_TWIN)
        return is_drawn

    def follow(self, func, args, kwargs, outputs) -> None:
        """Compute the same operator on the twins, if all of its inputs have one."""
        results = tensors_in(outputs)
        given = tensors_in((args, kwargs))
        if func in DRAWS and not results[0].is_floating_point():
            self._draw(results[0], *args[1:])
            return
        if func in RANDOM and results[0].numel() <= MOST_DRAWN:
            is_drawn = func not in PERMUTATIONS  # no memory depends on which of them it is
            func = func.overloadpacket
            kwargs = dict(generator=self.random, dtype=results[0].dtype)
        elif self.given_unknown or not self._is_computable(func, given, results):
            self._forget_written(func, args, kwargs)
            return
        else:
            is_drawn = any(map(self.is_drawn, given))
        with unset_fake_temporarily(), torch.no_grad():
            args, kwargs = tree_map(self._real, (tuple(args), dict(kwargs)))
            computed = tensors_in(func(*args, **kwargs))
        for fake, real in zip(results, computed, strict=True):
            if is_alike(fake, real):
                setattr(fake.untyped_storage(), TWIN, (real.untyped_storage(), is_drawn))

    def _draw(self, fake: Tensor, *bounds: int) -> None:
        """Whole numbers that are drawn into a tensor are those of this draw."""
        setattr(fake.untyped_storage(), TWIN, NO_TWIN)
        if fake.numel() > MOST_KNOWN:
            return
        with _disable_current_modes():
            real = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="cpu")
            real.random_(*bounds, generator=self.random)
        if is_alike(fake, real):
            setattr(fake.untyped_storage(), TWIN, (real.untyped_storage(), True))

    def selected(self, func, args) -> Tensor | None:
        """A fake tensor of the shape that `nonzero`, by which a device mesh finds its rank, and
        `repeat_interleave` have for known values; None for anything else.
        """
        if func is INDEXED:
            return self._indexed(*args)
        if func not in (NONZERO, REPEATS):
            return None
        real = self.of(args[0])
        if real is None or self.is_drawn(args[0]):
            return None
        if func is REPEATS:
            with unset_fake_temporarily():
                count = int(real.sum())
            return args[0].new_empty(count)
        with unset_fake_temporarily():
            alike = args[0].numel() // max(real.numel(), 1)
            count = int(torch.count_nonzero(real)) * alike
        return args[0].new_empty((args[0].dim(), count), dtype=torch.int64).t()

    def _indexed(self, x: Tensor, given: list[Tensor | None]) -> Tensor | None:
        """What is chosen by masks with known values: as many rows as they have true
        elements; None without such masks.
        """
        masks = [one for one in given if one is not None and one.dtype == torch.bool]
        if not masks or any(self.of(mask) is None or self.is_drawn(mask) for mask in masks):
            return None
        indices = []
        for index in given:
            is_mask = index is not None and index.dtype == torch.bool
            indices += self._positions(index) if is_mask else [index]
        return INDEXED(x, indices)

    def _positions(self, mask: Tensor) -> list[Tensor]:
        """The positions of the true elements, along each dimension."""
        rows = self.selected(NONZERO, (mask,))
        return [rows.new_empty(rows.shape[0]) for _ in range(mask.dim())]

    def suppose_all(self, fake: Tensor, value: bool) -> None:
        """Take all elements of a tensor of booleans to be `value`, unless they are known."""
        if self.of(fake) is not None:
            return
        self.suppose(FINITE)
        with _disable_current_modes():
            count = fake.numel() if fake.numel() <= MOST_KNOWN else 1
            real = torch.full((count,), value, device="cpu")
        setattr(fake.untyped_storage(), TWIN, (real.untyped_storage(), False))

    def _is_computable(self, func, given: list[Tensor], results: list[Tensor]) -> bool:
        name = func._schema.name
        if func.namespace != "aten" or "empty" in name:
            return False
        if torch.Tag.nondeterministic_seeded in func.tags:
            return False
        if func._schema.is_mutable and any(map(_is_shared, given)):
            return False
        if name not in LIKE and any(self.of(tensor) is None for tensor in given):
            return False
        is_large = any(tensor.numel() > MOST_KNOWN for tensor in given + results)
        return not is_large or func in ALL_OR_ANY

    def _real(self, value):
        if not isinstance(value, Tensor):
            return value
        real = self.of(value)
        if real is not None:
            return real
        return torch.empty(value.shape, dtype=value.dtype, device="cpu")

    def _forget_written(self, func, args, kwargs) -> None:
        """What an operator writes into no longer has the twin's values, nor have its views."""
        if not func._schema.is_mutable:
            return
        arguments = func._schema.arguments
        named = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
        for argument in arguments:
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            if func is UNSCALE and argument.name == "found_inf":
                self.suppose(NO_OVERFLOW)
                continue
            for tensor in tensors_in(named.get(argument.name)):
                setattr(tensor.untyped_storage(), TWIN, NO_TWIN)


def _is_shared(tensor: Tensor) -> bool:
    return getattr(tensor.untyped_storage(), SHARED, False)


def is_alike(fake: Tensor, real: Tensor) -> bool:
    """Whether a real tensor lies in its storage as the fake one does."""
    if not is_fake(fake) or fake.dtype != real.dtype:
        return False
    if real.untyped_storage().device.type != "cpu":  # zeros of a forward derivative, or meta
        return False
    layouts = ((one.stride(), one.storage_offset()) for one in (fake, real))
    sizes = (one.untyped_storage().nbytes() for one in (fake, real))
    return len(set(layouts)) == len(set(sizes)) == 1


def calling_file() -> str:
    """The file that called the function modes of this package."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(HERE):
        frame = frame.f_back
    return frame.f_code.co_filename


def _whole(tensor: Tensor) -> Tensor:
    """Of a DTensor what all ranks hold together, which PyTorch gathers to read its value."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    with torch.no_grad():
        return tensor.full_tensor()


# ---- reading

# what Python insists on when it asks for a value
KINDS = {Tensor.__bool__: bool, Tensor.__int__: int, Tensor.__float__: float, Tensor.__index__: int}


def converted(func, answer: object) -> object:
    """The user's answer as the kind of number that is read."""
    kind = KINDS.get(func)
    if kind is None:
        return answer
    if not isinstance(answer, bool | int | float):
        raise Refused(f"{place()}: the answer {answer!r} is no {kind.__name__}, which is read here")
    return kind(answer)


def is_question(func: Callable) -> bool:
    """Whether a tensor is asked for an attribute: half of what a mode for functions sees."""
    return type(func) is types.MethodWrapperType and func.__name__ == "__get__"


class Reading(TorchFunctionMode):
    """Answers when Python code asks a fake tensor for its value."""

    def __init__(
        self,
        known: KnownValues,
        answers: Mapping[str, object],
        rules: Mapping[Callable, Callable],
        imagined: Callable[[Tensor], Tensor],
    ):
        super().__init__()
        self.known = known
        self.imagined = imagined  # the fake tensor that stands for a real one
        # "file.py:12" -> the value that is read there; of a list, one after another
        self.answers = {}
        for line, answer in answers.items():
            self.answers[line] = itertools.cycle(answer if isinstance(answer, list) else [answer])
        self.rules = rules  # function -> what the target runs in its place
        self.gave_unknown = False  # whether there can be any
        self.running: tuple = (None, (), {})  # the innermost function, and its arguments

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if is_question(func) and func not in self.rules:
            return func(*args, **kwargs)
        before = self.running, self.known.given_unknown
        self.running = func, args, kwargs
        try:
            return self._run(func, args, kwargs)
        finally:
            self.running, self.known.given_unknown = before

    def _run(self, func, args, kwargs):
        if func in READS or func is Tensor.__format__:
            args = (_whole(args[0]), *args[1:])
            if active_fake_mode():  # not in a loader, which reads real data
                args = (self.imagined(args[0]), *args[1:])
            if is_fake(args[0]):
                return self.value(func, *args) if func in READS else self.text(*args)
        # PyTorch itself asks for addresses to compare them
        if func is Tensor.data_ptr and not calling_file().startswith(TORCH):
            raise Refused(f"{place()}: {KERNEL}")
        if func is Tensor.pin_memory:  # host memory, which fake tensors do not know
            return args[0]
        if func is one_hot:
            return self._one_hot(*args, **kwargs)
        if func in SPLITS:  # they would take a refusal for a tensor of several sizes
            sizes, kwargs = tree_map(self._size, (args[1:], kwargs))
            args = (args[0], *sizes)
        leaves = tree_leaves((args, kwargs)) if self.gave_unknown else []
        if any(isinstance(leaf, Unknown) for leaf in leaves):
            name = getattr(func, "__name__", "")
            computes = name in COMPUTES or name.startswith("_foreach_")
            plain = self._number(func, args) if computes else self._known
            self.known.given_unknown = self.known.given_unknown or computes
            args, kwargs = tree_map(plain, (args, kwargs))
        result = self.rules.get(func, func)(*args, **kwargs)
        if func in ARE_FINITE or func in ARE_NOT_FINITE:
            tested = getattr(result, "_local_tensor", result)
            if is_fake(tested):
                self.known.suppose_all(tested, func in ARE_FINITE)
        return result

    def _number(self, func, args) -> Callable:
        """What an unknown number is: a whole one if it is written into whole numbers."""
        name = getattr(func, "__name__", "")
        is_whole = isinstance(args[0], Tensor) and not args[0].is_floating_point()
        return whole if is_whole and writes(name) else usual

    def _known(self, value):
        """For a function whose result may have another shape with another number."""
        if isinstance(value, Unknown):
            raise branches(value.origin)
        return value

    def text(self, tensor: Tensor, form: str) -> str:
        """What f"{loss:.3f}" writes: the value, if it is known; else as if it were 1."""
        real = self.known.of(tensor)
        if real is not None:
            with _disable_current_modes():
                return format(real, form)
        if tensor.dim():
            return format(str(tensor), form)
        return format(Unknown(place(), self.known.reads), form)

    def value(self, func, tensor: Tensor):
        """The value, if it is known; else the user's answer; else an Unknown or a refusal."""
        if self.known.of(tensor) is None and calling_file() == INITIALISATION:
            return False
        value = self._told(func, tensor)
        if value is not None:
            return value
        if calling_file() in CHECKS:
            return True
        where = place()
        if func is Tensor.item and tensor.dtype != torch.bool:
            self.gave_unknown = True
            return Unknown(where, self.known.reads)
        if func is Tensor.__float__:
            return self.known.reads.plain(where)
        if func is Tensor.__int__ and is_formatting():
            return int(USUAL)
        raise branches(where)

    def _told(self, func, tensor: Tensor) -> object:
        """The value that is known, or that the user has said is read here; None for neither. One
        that depends on random integers is the user's before it is the draw's.
        """
        real = self.known.of(tensor)
        is_drawn = self.known.is_drawn(tensor)
        if real is None or is_drawn:
            line = next((line for line in lines() if line in self.answers), None)
            if line:
                return converted(func, next(self.answers[line]))
        if is_drawn:
            self.known.suppose(f"the random integers that {place()} reads are those of one draw")
        if real is None:
            return None
        with _disable_current_modes():  # the tracker would answer for a tensor without values
            return func(real)

    def _one_hot(self, tensor: Tensor, num_classes: int = -1) -> Tensor:
        """As PyTorch makes it on real tensors; on fake ones it would hold booleans, too."""
        if num_classes == -1:
            num_classes = self.argument(tensor.max()) + 1
        ones = tensor.new_zeros((*tensor.shape, num_classes))
        return ones.scatter_(-1, tensor.unsqueeze(-1), 1)

    def _size(self, given):
        return self.argument(given) if is_fake(given) else given

    def argument(self, tensor: Tensor):
        """The value that PyTorch itself reads of a tensor, which it was given for a number.

        If it is not known, any will do where no shape depends on it: 0 is in the bounds of an index
        and a factor, too. Else it is the user's answer, or a refusal.
        """
        value = self._told(Tensor.item, tensor)
        if value is not None:
            return value
        if not self._is_factor(tensor):
            raise branches(place())
        self.known.given_unknown = True
        return USUAL if tensor.is_floating_point() else 0

    def _is_factor(self, tensor: Tensor) -> bool:
        """Whether no shape depends on the value of a tensor that the running function was given."""
        func, args, kwargs = self.running
        name = getattr(func, "__name__", "").strip("_")
        if name in FACTORS or name.startswith("foreach_"):
            return True
        if name not in ONE_FACTOR:
            return False
        named = tuple(kwargs.get(word) for word in NAMES)
        given = args[ONE_FACTOR[name]] if ONE_FACTOR[name] < len(args) else named
        indices = given if isinstance(given, tuple) else (given,)
        return any(index is tensor for index in indices)  # not the bound of a slice


def writes(name: str) -> bool:
    """Whether a method of that name writes into its tensor."""
    is_own = name.startswith("__i") or name == "__setitem__"
    return is_own or (name.endswith("_") and not name.endswith("__"))


# ---- models that ask


class _TellsTorchOnly(type):
    def __instancecheck__(cls, value: object) -> bool:
        asks = sys._getframe(1).f_code.co_filename
        return is_fake(value) and asks.startswith(TORCH)


class Undisclosed(metaclass=_TellsTorchOnly):
    """In place of FakeTensor's public name: only PyTorch is told whether a tensor is fake."""


def undisclosed() -> Patches:
    """Models run as they do on real tensors.

    `transformers` asks whether a tensor is fake, to read no value of it. Then it makes attention
    masks that the real step does without, and attention takes another kernel. Here small values
    are known, and others are refused where they are read.
    """
    return {(torch._subclasses, "FakeTensor"): Undisclosed}
