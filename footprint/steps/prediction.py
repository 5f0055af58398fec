"""The memory of any training step, predicted before it runs.

`predict(build, step)` runs both on fake tensors, which have shapes but no memory, and records every
storage that they would allocate. Two steps run: the first makes the optimizer's states, the second
is like all that follow. `measure` asks the CPU's allocator what a real step took.
"""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TypeVar

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.overrides import TorchFunctionMode

from footprint.answers.report import Report
from footprint.cards.device import Card, target_card
from footprint.kernels.attention import Attention, NoKernel, settings_kept
from footprint.kernels.measure import peak_of_last
from footprint.kernels.operators import WITHOUT_MODE, FakeTensors, fake_zeros
from footprint.kernels.workspace import KernelWorkspaces
from footprint.pretend.batches import real_batches
from footprint.pretend.cuda import FastPathOfCuda, rules
from footprint.pretend.fast_path import FastPath
from footprint.pretend.outside import STORED, all_patches
from footprint.pretend.owners import adopt, label, move_data
from footprint.pretend.places import DEPTH, StepTracker
from footprint.pretend.ranks import GlooWorkspaces, as_rank, group_ends
from footprint.pretend.unknown import branches, written_as_json
from footprint.pretend.values import KERNEL, KnownValues, Reading, undisclosed
from footprint.pretend.written import AsWritten, with_a_device
from footprint.python.patches import Place, defaults_kept, patched, switched_on
from footprint.python.refusal import NO_NESTED, ON_THE_CPU, Refused, Stopped, place_of

State = TypeVar("State")
# in what PyTorch says to a program that wants a GPU where there is none
NEEDS_CUDA = (
    "Torch not compiled with CUDA enabled",
    "Found no NVIDIA driver",
    "No CUDA GPUs are available",
    "CUDA is not available",
    "not linked with support for cuda",
    "from the 'CUDA' backend",
    "requires CUDA support",
    "found two different devices",
    "found at least two devices",
)
# tells transformers to read weights in the thread that runs, whose tensors are fake
IN_ONE_THREAD = "HF_DEACTIVATE_ASYNC_LOAD"
NEEDS_RANKS = "it needs ranks: give world_size above 1"
# in what PyTorch says -> what to do
REMEDIES = {
    **dict.fromkeys(NEEDS_CUDA, ON_THE_CPU),
    "no fake impl registered": KERNEL,
    "active drivers": KERNEL,  # of Triton, without a GPU
    "numpy() is not supported": "it takes values out of a tensor, which has none: do without them",
    "shape_env must not be None": NO_NESTED,
    "TensorLikePair": (
        "torch.jit.trace compares values, which no tensor has: predict the module itself"
    ),
    "FlexAttention does not support backward on CPU": (
        "FlexAttention is compiled on a GPU, which is not predicted: predict "
        "scaled_dot_product_attention, which also keeps no scores"
    ),
    "already associated to a python object of type FakeTensor": (
        "tensors of a class of their own, such as the 4-bit weights of bitsandbytes, are not "
        "predicted: load the weights in bf16, which usually needs more memory"
    ),
    "initialize the default process group twice": (
        "there is a process group of world_size ranks: leave init_process_group out of build"
    ),
    "Default process group has not been initialized": NEEDS_RANKS,
    "Error initializing torch.distributed": NEEDS_RANKS,
}
# operators whose results have a shape that depends on values -> what to do
FIXED_SHAPE = "use an operator whose results have a fixed shape"
SHAPES = {
    "aten::_pack_padded_sequence": "predict the padded batch, which needs more memory",
    "aten::_ctc_loss": (
        "predict a loss of the same log_probs [T, N, C], such as their mean, and add "
        "2 x N x T x (2 S + 1) numbers, S the longest target"
    ),
    "aten::nonzero": "choose by torch.where or by topk, whose results have a fixed shape",
    "aten::repeat_interleave": "give it output_size, the number of elements of the result",
    "aten::masked_select": "choose by torch.where, whose result has a fixed shape",
}
# In what Python says of operations that no float has either
NO_FLOATS = (
    "can only concatenate",
    "unsupported operand type",
    "'Unknown' object",
    "type 'Unknown'",
    "Unknown found",
)
NO_ANSWERS: Mapping[str, object] = MappingProxyType({})
NO_PATCHES: Mapping[Place, object] = MappingProxyType({})


def predict(
    build: Callable[[], State],
    step: Callable[[State], object],
    target: str | Card = "cuda",
    world_size: int = 1,
    depth: int = DEPTH,
    answers: Mapping[str, object] = NO_ANSWERS,
) -> Report:
    """The memory of `step(build())` on the target, of one of `world_size` ranks. A target is "cpu",
    "cuda" (an H100), the name of a GPU, such as "RTX 4090", or a footprint.cards.device.Card.

    build() makes the model and the optimizer, on the CPU, and returns them in any form; step takes
    what it returned and runs one training step. depth: of the module names in stages. answers: the
    values that a step reads from tensors and decides by, by the line that reads them, such as
    {"train.py:12": False}; a list has the values of one reading after another.

    Refused (a ValueError) for a step that cannot be predicted, with the line and what to do.
    """
    card = target_card(target)
    if world_size < 1:
        raise Refused(f"world_size {world_size} is out of range: give the number of ranks")
    tracker = step_tracker(card, depth)
    with (
        fake_process_group(world_size),
        as_rank(world_size, start_fake_group),
        on_fake_tensors(tracker, card, answers, world_size),
    ):
        trace_two_steps(tracker, build, step)
    return Report.of(tracker, card, world_size)


def measure(build: Callable[[], State], step: Callable[[State], object]) -> int:
    """Peak bytes of the second of two real steps, as the CPU's allocator records them."""

    def first_step() -> State:
        state = build()
        step(state)
        return state

    return peak_of_last(first_step, step)


def step_tracker(card: Card | None, depth: int) -> StepTracker:
    workspaces = KernelWorkspaces("cuda") if card else GlooWorkspaces("cpu")
    attention = Attention(card) if card else None
    return StepTracker(workspaces, True, KnownValues(), depth, attention)


# ---- the step


def trace_two_steps(
    tracker: StepTracker,
    build: Callable[[], State],
    step: Callable[[State], object],
    first: Callable[[State], object] | None = None,
) -> None:
    """Build and run two steps under the tracker, whose trace is then that of the second. `first`
    runs in place of the first step, and leaves what that would leave.
    """
    with tracker.watching():
        state = build()
        adopt(tracker, state)
        if tracker.target == "cuda":
            move_data(tracker, state)
        (first or step)(state)

        origins = tracker.begin_step()
        step(state)
        tracker.locate()
        label(tracker, state, origins)
        tracker.known.suppose_numbers()
    if not tracker.trace.events:
        raise Refused(
            "neither build nor step has made a tensor: build makes the model and the optimizer and "
            "returns them, and step runs one training step"
        )


# ---- fake tensors


@contextlib.contextmanager
def on_fake_tensors(
    tracker: StepTracker,
    card: Card | None,
    answers: Mapping[str, object],
    ranks: int = 1,
    more: Mapping[Place, object] = NO_PATCHES,
    reader: type[Reading] = Reading,
) -> Iterator[None]:
    """Operators inside the `with` block allocate nothing and are recorded; errors are refusals.

    more: patches that replace those of a prediction. reader: what answers for values.
    """
    patches = all_patches(tracker) | undisclosed() | written_as_json() | real_batches(tracker)
    patches |= tracker.given.patches() | dict(more)
    fast_path = FastPath(tracker.known)
    if card:
        fast_path = FastPathOfCuda(tracker.known, tracker.attention)
        patches |= tracker.attention.patches()
    tracker.kernels = fast_path.kernels()
    replaced = WITHOUT_MODE | STORED | tracker.given.rules() | fast_path.rules()
    if card:
        replaced |= rules(tracker.attention)
    reading = reader(tracker.known, answers, replaced, tracker.given.double)
    tracker.read_argument = reading.argument
    modes: list[TorchFunctionMode] = [reading]
    if card:
        modes.append(AsWritten(tracker.memories))
    tracker.modes = modes
    fake_tensors = FakeTensors()
    tracker.given.mode = fake_tensors
    tracker.seen_by_the_mode = fake_tensors.fake_tensor_converter.tensor_memo
    with_device = with_a_device(tracker, ranks, card) if card else contextlib.nullcontext()
    with _refusing(), defaults_kept(), settings_kept(), warnings.catch_warnings():
        os.environ[IN_ONE_THREAD] = "1"
        warnings.filterwarnings("error", message=".*CUDA is not available.*Disabling")
        # on a CPU without CUDA, it really is disabled
        warnings.filterwarnings("ignore", message=".*GradScaler is enabled, but CUDA")
        warnings.filterwarnings("ignore", message="Accessing the data pointer")  # by deepcopy
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        try:
            with (
                patched(patches),
                fake_zeros(),
                fake_tensors,
                with_device,
                switched_on(modes),
                tracker,
            ):
                yield
        finally:
            tracker.given.restore(tracker.roots, tracker.optimizers)


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """What fake tensors cannot do is refused in one line."""
    try:
        yield
    except Stopped as error:
        raise Refused(str(error)) from None
    except NoKernel as error:
        raise Refused(f"{place_of(error.__traceback__)}: {error}") from error
    except DynamicOutputShapeException as error:
        raise Refused(_words(error, "has a result whose shape depends on values")) from error
    except DataDependentOutputException as error:
        raise Refused(_words(error, "reads a value that a tensor does not have")) from error
    except UnsupportedOperatorException as error:
        raise Refused(_words(error, "does not say what it returns for shapes alone")) from error
    except TypeError as error:
        if "Unknown" not in str(error):
            raise
        if any(words in str(error) for words in NO_FLOATS):
            error.args = (str(error).replace("Unknown", "float"),)
            raise
        raise branches(place_of(error.__traceback__)) from error
    except (AssertionError, RuntimeError, UserWarning, ValueError) as error:
        remedy = next((remedy for words, remedy in REMEDIES.items() if words in str(error)), None)
        if remedy is None:
            raise
        raise Refused(f"{place_of(error.__traceback__)}: {remedy}") from error


def _words(error: RuntimeError, reason: str) -> str:
    where = place_of(error.__traceback__)
    known = f"{error.func} {reason}, so its memory cannot be predicted"
    remedy = SHAPES.get(error.func._schema.name)
    if remedy is None:
        remedy = f"{FIXED_SHAPE}, or give it a fake implementation (torch.library.register_fake)"
    return f"{where}: {known}: {remedy}"


@contextlib.contextmanager
def fake_process_group(ranks: int) -> Iterator[None]:
    """A process group of `ranks` in which this process is rank 0 and no other exists; nothing for
    one rank.
    """
    if ranks == 1:
        yield
        return

    # A group that failed to start has used up the first name for groups, by which PyTorch's caches
    # of sharded operators know the default group. The end of a group frees all names.
    with group_ends():
        start_fake_group(ranks)
        torch.distributed.destroy_process_group()
        start_fake_group(ranks)
        yield


def start_fake_group(ranks: int, start: Callable = torch.distributed.init_process_group) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    start("fake", store=FakeStore(), rank=0, world_size=ranks)
