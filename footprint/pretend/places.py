"""Where a training step is: which phase runs, and which of the user's modules.

Nothing is hooked to a model that could hold memory. PyTorch's global hooks say when any module's
forward starts and ends and when any optimizer steps; a hook on a module's output says when the
backward reaches it; and whether the autograd engine runs can be asked before every operator.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from footprint.cards.device import multiplying_threads
from footprint.kernels.attention import Attention
from footprint.kernels.operators import corrected
from footprint.pretend.given import Given
from footprint.pretend.memories import DEVICE, Memories
from footprint.pretend.values import KnownValues
from footprint.python.refusal import ON_THE_CPU, Refused, place
from footprint.record.trace import phase_of
from footprint.record.tracker import NO_STORAGE, Tracker, tensors_in

# Phases outside of modules: before the first forward of a step, after a forward, after a backward,
# after the optimizer
START = "start"
LOSS = "loss"
GRADIENTS = "gradients"
END = "end"
# The others
FORWARD = "forward"
RECOMPUTE = "recompute"
BACKWARD = "backward"
OPTIMIZER = "optimizer"
MADE_BY = "footprint"  # in the metadata of a node of the graph: output -> its module
DEPTH = 2  # of the modules that a stage's name tells apart
# Names of the only module inside of what wraps a model or a layer: by DDP, torch.compile, FSDP and
# checkpointing
WRAPPED = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def in_backward() -> bool:
    """Whether the autograd engine is running: a forward then is a recomputation."""
    return torch._C._current_graph_task_id() != -1


@functools.cache
def shortened(module: str, depth: int) -> str:
    """A module's name as far as `depth`, with * for the numbers of modules in a list:
    "layers.3.mlp.up" is "layers.*" at depth 1 and "layers.*.mlp" at depth 2.
    """
    parts: list[str] = []
    for part in module.split("."):
        is_number = part.isdecimal()
        if not is_number and len([one for one in parts if one != "*"]) == depth:
            break
        parts.append("*" if is_number else part)
    return ".".join(parts)


def named_parts(
    module: nn.Module, name: str = "", wrapped: tuple[nn.Module, ...] = ()
) -> Iterator[tuple[str, nn.Module]]:
    """A module's parts with the names that they have without what wraps them: those of PEFT's model
    are those of its base model.
    """
    yield name, module
    wrapped += _wrapped_by(module)
    for key, part in module.named_children():
        own = f"{name}.{key}".lstrip(".")
        yield from named_parts(part, name if part in wrapped else own, wrapped)


def _wrapped_by(module: nn.Module) -> tuple[nn.Module, ...]:
    """The parts of a module that it wraps, the outermost first."""
    parts = dict(module.named_children())
    if "base_model" in parts and hasattr(module, "get_base_model"):  # PEFT, which wraps it twice
        return parts["base_model"], module.get_base_model()
    is_alone = len(parts) == 1
    return tuple(part for key, part in parts.items() if is_alone and key in WRAPPED)


def stage_name(phase: str, module: str, depth: int) -> str:
    """The stage of a phase and a module, such as "layers.* forward"."""
    if phase in (FORWARD, RECOMPUTE, BACKWARD):
        return f"{shortened(module, depth)} {phase}".strip()
    return phase


class Running(NamedTuple):
    """A module whose forward runs."""

    name: str
    is_recomputed: bool  # it has started in a backward
    is_nameless: bool  # it counts as part of the module around it


class Places:
    """Finds out where a training step is, by hooks on all modules and optimizers, and tells it to
    `enter(stage, module)`. Whoever runs operators in between calls `locate` before each of them.
    """

    def __init__(self, depth: int = DEPTH):
        self.depth = depth
        self.at = (START, "")  # the stage and the module that were entered last
        self.names = weakref.WeakKeyDictionary()  # module -> its name
        # those that are alive, in the order in which they were seen
        self.roots = weakref.WeakKeyDictionary()
        # modules that no model holds, and that were first met inside of another one
        self.nameless = weakref.WeakSet()
        self.running: list[Running] = []  # modules whose forwards run now
        self.in_optimizer = 0
        self.outside = START  # the phase outside of modules
        self.announced = ""  # the phase that the step itself has named
        self.graph_task = -1
        self.reached = ""  # the module that the backward has reached
        self.handles: list = []

    def enter(self, stage: str, module: str) -> None:
        """What happens from now on belongs to the stage and the module."""
        raise NotImplementedError

    def locate(self) -> None:
        task = torch._C._current_graph_task_id()
        if task != self.graph_task:
            if task != -1 and self.graph_task == -1:
                self.reached = ""
            if task == -1:
                self.outside = GRADIENTS
            self.graph_task = task
        phase, module = self._place(task != -1)
        place = stage_name(phase, module, self.depth), module
        if place != self.at:
            self.at = place
            self.enter(*place)

    def _place(self, backward: bool) -> tuple[str, str]:
        if self.announced:
            return self.announced, self.running[-1][0] if self.running else ""
        if self.in_optimizer:
            return OPTIMIZER, ""
        if self.running:
            name, is_recomputed, _ = self.running[-1]
            if not backward:
                return FORWARD, name
            if is_recomputed:
                return RECOMPUTE, name
        if backward:
            return BACKWARD, self.reached
        return self.outside, ""

    def announce(self, phase: str) -> None:
        """The step names what it does, until it names something else; START ends it."""
        self.announced = "" if phase == START else phase
        self.outside = START
        self.locate()

    def adopt(self, model: nn.Module, prefix: str = "") -> None:
        """Name the modules of a model."""
        if model in self.names:
            return
        self.roots[model] = None
        for name, module in named_parts(model, prefix):
            self.names.setdefault(module, name)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Hooks on all modules and optimizers, inside the `with` block."""
        self.handles += [
            register_module_forward_pre_hook(self._forward_starts),
            register_module_forward_hook(self._forward_ends, always_call=True),
            register_optimizer_step_pre_hook(self._optimizer_starts),
            register_optimizer_step_post_hook(self._optimizer_ends),
        ]
        try:
            yield
        finally:
            for handle in self.handles:
                handle.remove()
            self.handles.clear()

    def _forward_starts(self, module: nn.Module, args) -> None:
        outer = self.running[-1] if self.running else None
        if module not in self.names:
            self.adopt(module, type(module).__name__ if self.roots else "")
            if outer:
                self.nameless.add(module)
        around = outer.name if outer else self.reached
        is_part = module in self.nameless or (outer is not None and outer.is_nameless)
        name = around if is_part else self.names[module]
        self.running.append(Running(name, in_backward(), is_part))
        self.locate()

    def _forward_ends(self, module: nn.Module, args, output) -> None:
        name = self.running.pop().name
        for leaf in tree_leaves(output):
            if not isinstance(leaf, Tensor) or not leaf.requires_grad or leaf.is_leaf:
                continue
            # what a module returns as an inner one has made it belongs to the inner one
            made = leaf.grad_fn.metadata.setdefault(MADE_BY, {})
            if leaf.output_nr not in made:
                made[leaf.output_nr] = name
                leaf.register_hook(self._reaches(name))
        if not self.running and not in_backward():
            self.outside = LOSS
        self.locate()

    def _reaches(self, name: str):
        def reached(_) -> None:
            self.locate()  # a backward may begin here
            self.reached = name
            self.locate()

        return reached

    def _optimizer_starts(self, optimizer: Optimizer, args, kwargs) -> None:
        self.in_optimizer += 1
        self.locate()

    def _optimizer_ends(self, optimizer: Optimizer, args, kwargs) -> None:
        self.in_optimizer -= 1
        self.outside = END
        self.locate()


class StepTracker(Places, Tracker):
    """A tracker that finds out itself where any training step is, and that knows its parameters,
    gradients and optimizers.
    """

    def __init__(
        self,
        workspace,
        fake: bool,
        known: KnownValues,
        depth: int = DEPTH,
        attention: Attention | None = None,
    ):
        Places.__init__(self, depth)
        Tracker.__init__(self, workspace, fake)
        self.target = workspace.target
        self.known = known
        self.attention = attention  # of a card
        self.memories = Memories(self)
        self.given = Given(self, self.memories, known)

        # those that are alive, in the order in which they were seen
        self.optimizers = weakref.WeakKeyDictionary()
        self.gradients: set[int] = set()
        self.called: dict[int, tuple[str, str]] = {}  # id of a storage -> its category and name
        self.on_gradient: Callable[[Tensor], None] = lambda parameter: None
        self.modes: list[TorchFunctionMode] = []  # for functions, of the prediction that runs
        # Weak references that FakeTensorMode keeps; with them no module can change its dtype.
        self.seen_by_the_mode: MutableMapping = {}
        # the value of a tensor that PyTorch itself reads (Reading.argument)
        self.read_argument: Callable[[Tensor], object] | None = None
        self.autocast = False  # whether any operator ran under autocast
        self.recurrent = False  # whether any recurrent layer ran
        self.first_peak = 0  # bytes, before the step that is recorded
        self.multiplied: set[str] = set()  # threads that have, before that step

    def enter(self, stage: str, module: str = "") -> None:
        Tracker.enter(self, stage, module)

    def begin(self) -> None:
        super().begin()
        self.at = (START, "")
        self.known.begin()
        self.outside = START
        self.announced = ""

    def begin_step(self) -> dict[int, str]:
        """Record from here; returns which phase made what is alive (id of a storage -> phase)."""
        self.locate()
        before = self.trace
        self.first_peak, _ = before.peak()
        self.multiplied = multiplying_threads(before)
        self.begin()
        self.known.reads.places.clear()
        return {
            identity: phase_of(before.storages[identity].stage) for identity in self.trace.storages
        }

    def imagined(self, func, args, kwargs):
        return self.given.imagined(func, (args, kwargs))

    def run(self, func, args, kwargs):
        self.autocast = self.autocast or torch.is_autocast_enabled("cpu")
        if not self.fake:
            return func(*args, **kwargs)
        if self.attention:
            self.attention.check(func._schema.name, args)
        known = self.known.selected(func, args)
        if known is not None:
            return known
        return corrected(func, self.target)(*args, **kwargs)

    def _value(self, value: Tensor):
        return self.read_argument(self.given.double(value))

    def _record(self, func, args, outputs) -> None:
        if any(map(is_on_meta, tensors_in(outputs))):
            return
        memories = self.memories
        is_one = self.target != "cuda" or self.making_host_tensors
        if is_one or memories.choose(func, args) == DEVICE:
            super()._record(func, args, outputs)
        elif memories.are_two:
            with self.on_host():
                super()._record(func, args, outputs)
        else:
            super()._record(func, args, outputs)
            memories.note(outputs)

    def follow(self, func, args, kwargs, outputs) -> None:
        if self.fake:
            refuse_results(outputs)
            self.known.follow(func, args, kwargs, outputs)
            self.seen_by_the_mode.clear()

    def register(self, tensor: Tensor, op: object) -> int:
        if is_on_meta(tensor):
            return NO_STORAGE
        return super().register(tensor, op)

    def count_data(self, tensor: Tensor, op: str) -> None:
        """A real tensor of a data set is in host memory, or in that of the CPU."""
        is_hosts = self.target == "cuda"
        with self.on_host() if is_hosts else contextlib.nullcontext():
            self.register(tensor, op)

    def own(self, tensor: Tensor, op: str) -> int:
        """The id of the storage of a module's or an optimizer's tensor."""
        return self.register(self.given.double(local(tensor)), op)

    # ---- modules, optimizers, gradients

    def adopt(self, model: nn.Module, prefix: str = "") -> None:
        """Name the modules of a model, and watch the gradients of its parameters."""
        if model in self.names:
            return
        super().adopt(model, prefix)
        for tensor in (*model.parameters(), *model.buffers()):
            self.given.double(local(tensor))
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_leaf:
                hook = parameter.register_post_accumulate_grad_hook(self._note_gradient)
                self.handles.append(hook)

    def call(
        self,
        tensor: Tensor,
        category: str,
        name: str,
    ) -> None:
        """The step says what a tensor is."""
        self.called[self.register(tensor, category)] = category, name

    def _note_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.gradients.add(self.own(parameter.grad, "backward"))
            self.on_gradient(parameter)

    def _forward_starts(self, module: nn.Module, args) -> None:
        self.recurrent = self.recurrent or isinstance(module, nn.RNNBase)
        super()._forward_starts(module, args)

    def _optimizer_starts(self, optimizer: Optimizer, args, kwargs) -> None:
        if self.fake and isinstance(optimizer, torch.optim.LBFGS):
            raise Refused(
                f"{place()}: LBFGS decides by every loss how often it runs the step, so it is not "
                "predicted: predict one closure with SGD, and add 2 x history_size parameters"
            )
        self.optimizers[optimizer] = None
        for group in optimizer.param_groups:
            if self.target == "cuda":
                take_lists(group)
            for parameter in group["params"]:
                self._note_gradient(parameter)
        super()._optimizer_starts(optimizer, args, kwargs)


def take_lists(group: dict) -> None:
    """On CUDA an optimizer takes the implementation over lists of tensors unless it is told
    otherwise (torch/optim/optimizer.py, _default_to_fused_or_foreach).
    """
    undecided = "foreach" in group and group["foreach"] is None
    if undecided and not group.get("fused") and not group.get("differentiable"):
        group["foreach"] = True


def refuse_results(outputs: object) -> None:
    """Refused for a sparse tensor, whose number of elements depends on values, and for a tensor on
    a CUDA device that is not there: a CUDA build of PyTorch makes it until the backward.
    """
    for leaf in tensors_in(outputs):
        if leaf.layout not in (torch.strided, torch.jagged):
            raise Refused(
                f"{place()}: sparse tensors are not predicted: use dense ones, such as those of "
                "nn.Embedding(sparse=False)"
            )
        if leaf.is_cuda and not torch.cuda.is_available():
            raise Refused(f"{place()}: {ON_THE_CPU}")


def is_on_meta(value: object) -> bool:
    """Whether a value is a tensor on meta, which has no memory. torch.load makes fake tensors there
    and notes on their storage where they will be.
    """
    if not isinstance(value, Tensor) or value.device.type != "meta":
        return False
    place = getattr(value.untyped_storage(), "_fake_device", None)
    return place is None or str(place) == "meta"


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)
