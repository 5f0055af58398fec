"""A dispatch mode that records every storage that operators make, from its first tensor to its
last: on fake tensors, which makes a prediction, or on real ones.

Sizes are bytes. Buffers inside a kernel are not tensors, so the mode does not see them: the
function `workspace` declares them.
"""

import contextlib
import sys
import weakref
from collections.abc import Callable, Container, Iterator
from dataclasses import replace

import torch
from torch._C import DispatchKey
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from footprint.record.trace import Event, Storage, Trace

aten = torch.ops.aten
READ_VALUE = aten._local_scalar_dense.default
ADD = aten.add.Tensor
READ_DEVICE = torch.ops.prim.device.default  # PyTorch's C++ code asks, twice an operator
# Backward formulas write into zeros in place. Under a dispatch mode they do not
# (torch/csrc/autograd/FunctionsManual.cpp, areAnyTensorSubclassLike).
IN_PLACE = {
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.index_add.default: aten.index_add_.default,
    aten.index_fill.int_Tensor: aten.index_fill_.int_Tensor,
    aten.index_put.default: aten.index_put_.default,
    aten.put.default: aten.put_.default,
    aten.sub.Tensor: aten.sub_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.masked_fill.Scalar: aten.masked_fill_.Scalar,
}
# Gradients of the larger and the smaller of two, half of them where both are equal. They mask what
# `where` has made in them: fmax and fmin so since torch 2.14, the others since they were written.
TIES = ["MaximumBackward0", "MinimumBackward0", "ClampMinBackward1", "ClampMaxBackward1"]
if torch.__version__ >= (2, 14):
    TIES += ["FmaxBackward0", "FminBackward0"]
# `sub` and `mul` only in this formula, which goes on with what these operators made in it.
BCE = "BinaryCrossEntropyWithLogitsBackward0"
BCE_OWN = ("aten.sigmoid.default", "aten.add.Scalar")
ASSIGNING = (aten.index_put.default, aten.put.default)  # unless they accumulate
# They count how many elements share a gradient, by a sum that is not in place.
REDUCTIONS = ("ScatterReduceBackward0", "IndexReduceBackward0")
SUMS = (aten.scatter_add.default, aten.index_add.default)
# Their backward adds the gradient of the mean to that of the variance, never in place.
MEANS = ("VarMeanBackward0", "StdMeanBackward0")
# They work in place, but their imitations on fake tensors allocate.
FUSED_OPTIMIZERS = (
    aten._fused_adamw_.default,
    aten._fused_adam_.default,
    aten._fused_adagrad_.default,
    aten._fused_sgd_.default,
)
# files of PyTorch whose frames lie between __torch_dispatch__ and what called the operator
DISPATCH_FILES = (
    "_dynamo/eval_frame.py",
    "torch/_compile.py",
    "utils/_python_dispatch.py",
)
# They run an operator on the tensors inside, which come back to the mode.
WRAPPERS = ("DTensor", "Ragged")
# the storage of an event that marks a workspace or that lies in host memory
NO_STORAGE = -1


def storage_address(tensor: torch.Tensor) -> int:
    """What tells the storages that are alive apart."""
    return tensor.untyped_storage()._cdata


def sum_of_gradients(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The sum of two gradients of one tensor, as autograd's engine makes it without a mode: in
    place if the engine holds the last reference to the older one and to its storage.

    Under a dispatch mode the engine adds into a third tensor, which the real step does not have.
    Two references to the storage and four to the tensor are those of this call itself.
    """
    storage_uses = torch._C._storage_Use_Count(old.untyped_storage()._cdata)
    is_last = storage_uses == 2 and old._use_count() == 4
    if is_last and aten.is_non_overlapping_and_dense(old):
        return old.add_(new)
    return old + new


def taken_apart() -> contextlib.AbstractContextManager:
    """Operators without a kernel of their own are taken apart by autograd's keys inside the `with`
    block. Where those are off, in a mode and in inference mode, a tracker would be given such an
    operator whole, and never see what it makes inside.
    """
    included = torch._C._dispatch_tls_local_include_set().add(DispatchKey.AutogradCPU)
    excluded = torch._C._dispatch_tls_local_exclude_set().remove(DispatchKey.AutogradCPU)
    return torch._C._ForceDispatchKeyGuard(included, excluded)


def tensors_in(values: object) -> list[torch.Tensor]:
    """The tensors among an operator's arguments or results, which lie in lists, tuples and
    dictionaries. A walk by torch.utils._pytree takes as long as the operator on fake tensors.
    """
    found: list[torch.Tensor] = []
    _gather(values, found)
    return found


def _gather(value: object, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, list | tuple):
        for one in value:
            _gather(one, found)
    elif isinstance(value, dict):
        for one in value.values():
            _gather(one, found)


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor lies in a storage. Forward derivatives that are zero do not."""
    return tensor.layout == torch.strided and not tensor._is_zerotensor()


def is_flag(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.bool and tensor.ndim == 0


def node_name() -> str:
    """The node of the graph whose backward runs, such as "SumBackward0"."""
    node = torch._C._current_autograd_node()
    return node.name() if node else ""


def called_by_the_engine() -> bool:
    """Whether the autograd engine itself runs this operator, not Python code in a backward."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename.endswith(DISPATCH_FILES):
        frame = frame.f_back
    return frame.f_code.co_name == "_engine_run_backward"


def no_workspace(func, args, outputs) -> int:
    """Nothing beyond what is returned."""
    return 0


class Tracker(TorchDispatchMode):
    """Records allocations in `trace`. A storage ends when its last tensor does (weak reference), as
    an allocator sees it.

    workspace(func, args, outputs): bytes that the operator holds inside beyond what it returns.
    fake: tensors have no values, so the tracker answers when the program asks for one, and it
    leaves out fused optimizers, whose imitations allocate.
    """

    def __init__(self, workspace: Callable[..., int] = no_workspace, fake: bool = False):
        super().__init__()
        self.workspace = workspace
        self.fake = fake
        self.kernels: dict[object, Callable] = {}  # operator -> what runs it by others
        self.trace = Trace(stages=[(0, "start")])
        self.time = 0
        self.stage = "start"
        self.module = ""
        self.count = 0  # of storages

        self.alive: dict[int, tuple] = {}  # address of a storage -> its weak reference, its id
        self.held: dict[int, int] = {}  # id of a storage alive -> its bytes now
        self.host: dict[int, tuple] = {}  # address -> weak reference and bytes, in host memory
        self.making_host_tensors = False
        self.undo: list[Callable] = []  # the methods that were patched

    # ---- the mode

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is READ_DEVICE and isinstance(args[0], FakeTensor):
            return args[0].device
        if func in self.kernels:
            return self.run_in_parts(self.kernels[func], args, kwargs or {})
        if any(kind.__name__ in WRAPPERS for kind in types):
            return NotImplemented
        if func.namespace == "prim":  # asks for a property, allocates nothing
            return func(*args, **(kwargs or {}))

        self.locate()
        if self.fake and func is READ_VALUE:
            return self._value(args[0])
        if self.fake and func is aten.equal.default and is_flag(args[0]):
            return False  # a check of PyTorch's own for a mistake, as of the windows of istft
        if self.fake and func in FUSED_OPTIMIZERS:
            return None

        args, kwargs = self.imagined(func, args, kwargs or {})
        if func is ADD and called_by_the_engine() and not self.adds_a_mean(args):
            outputs = sum_of_gradients(*args)
        elif func in IN_PLACE and called_by_the_engine() and self.is_a_formula(func, args):
            func = IN_PLACE[func]
            outputs = self.run(func, args, kwargs)
        else:
            outputs = self.run(func, args, kwargs)
        with torch._C.DisableTorchFunction():  # the step does not ask
            self._record(func, args, outputs)
            self.follow(func, args, kwargs, outputs)
        return outputs

    def adds_a_mean(self, args) -> bool:
        """Whether this sum is one that the backward of a variance with its mean makes itself."""
        return node_name() in MEANS and self.made_by(args[1]) == "aten.div.Scalar"

    def is_a_formula(self, func, args) -> bool:
        """Whether a backward adds into its zeros, where what is assigned to is the gradient, or
        goes on with what it has made.
        """
        if func in (aten.sub.Tensor, aten.mul.Tensor):
            own = node_name() == BCE and self.made_by(args[0]) in BCE_OWN
            return own and not torch.is_grad_enabled()
        if func is aten.masked_fill.Scalar:
            own = node_name() in TIES and self.made_by(args[0]) == "aten.where.self"
            return own and not torch.is_grad_enabled()
        if func in SUMS and node_name() in REDUCTIONS:
            return False
        return func not in ASSIGNING or args[3:] == (True,)

    def made_by(self, tensor: torch.Tensor) -> str:
        """The operator that made the tensor's storage."""
        storage = self.trace.storages.get(self.identity(tensor))
        return storage.op if storage else ""

    def __enter__(self):
        """FSDP2 frees whole parameters and takes them back by resizing the flat tensors that they
        lie in, which is no operator.
        """
        resize = torch.UntypedStorage.resize_

        def seen(storage: torch.UntypedStorage, size: int):
            resized = resize(storage, size)
            self._resized(storage)
            return resized

        self.undo.append(resize)
        torch.UntypedStorage.resize_ = seen
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self.undo.pop()
        return super().__exit__(*error)

    def run_in_parts(self, kernel: Callable, args, kwargs):
        """What a kernel returns that is written in operators, which are recorded."""
        with self, taken_apart():
            return kernel(*args, **kwargs)

    def locate(self) -> None:
        """For a subclass that finds out itself, before each operator, where the step is."""

    def imagined(self, func, args, kwargs) -> tuple:
        """The arguments; for a subclass whose step has real tensors among fake ones."""
        return args, kwargs

    def run(self, func, args, kwargs):
        """What the operator returns; for a subclass that knows better than a fake tensor."""
        return func(*args, **kwargs)

    def follow(self, func, args, kwargs, outputs) -> None:
        """For a subclass that looks at what an operator has returned."""

    def _value(self, value: torch.Tensor) -> bool | int | float:
        """What the program reads from a tensor without a value; for a subclass that can say."""
        raise NotImplementedError

    def _record(self, func, args, outputs) -> None:
        for tensor in tensors_in(outputs):
            if has_memory(tensor):
                self.register(tensor, func)

        extra = 0 if self.making_host_tensors else self.workspace(func, args, outputs)
        if extra:
            self._event(0, NO_STORAGE)
            self.trace.workspaces.append((self.time, extra, str(func)))

    # ---- storages

    def identity(self, tensor: torch.Tensor) -> int | None:
        """The id of the tensor's storage; None if it is not known, or in host memory."""
        _, identity = self.alive.get(storage_address(tensor), (None, None))
        return identity

    def register(self, tensor: torch.Tensor, op: object) -> int:
        """The id of the tensor's storage; a storage that was not known begins here."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if self.making_host_tensors or address in self.host:
            return self._register_on_host(address, storage)
        if address not in self.alive:
            self._begin_storage(address, storage, tensor, op)
        return self.alive[address][1]

    def shares(self, real: torch.UntypedStorage, fake: torch.UntypedStorage) -> bool:
        """Whether a real storage is recorded; then the fake one that stands for it is the same."""
        if real._cdata in self.alive:
            self.alive[fake._cdata] = self.alive[real._cdata]
            weakref.finalize(fake, self.alive.pop, fake._cdata, None)
            return True
        if real._cdata in self.host:
            reference, _ = self.host[real._cdata]
            self.host[fake._cdata] = reference, 0
            weakref.finalize(fake, self.host.pop, fake._cdata, None)
            return True
        return False

    def _begin_storage(self, address: int, storage, tensor: torch.Tensor, op: object) -> None:
        identity = self.count
        self.count += 1
        reference = weakref.ref(storage, lambda _: self._end_storage(address, identity))
        self.alive[address] = (reference, identity)

        size = storage.nbytes()
        self.held[identity] = size
        self.trace.storages[identity] = Storage(
            id=identity,
            size=size,
            category="",
            stage=self.stage,
            module=self.module,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            op=str(op),
        )
        self._event(size, identity)

    def _end_storage(self, address: int, identity: int) -> None:
        if address in self.alive and self.alive[address][1] == identity:
            del self.alive[address]
        self._event(-self.held.pop(identity, 0), identity)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        known = self.alive.get(storage._cdata)
        if known is None:
            return
        _, identity = known
        change = storage.nbytes() - self.held[identity]
        self.held[identity] = storage.nbytes()
        record = self.trace.storages[identity]
        record.size = max(storage.nbytes(), record.size)
        record.category = "unsharded"
        self._event(change, identity)

    def _event(self, size: int, identity: int) -> None:
        self.time += 1
        if size or identity == NO_STORAGE:
            self.trace.events.append(Event(self.time, size, identity))

    # ---- host memory

    @contextlib.contextmanager
    def on_host(self) -> Iterator[None]:
        """Tensors made inside the `with` block are in host memory: they count in
        `trace.host_peaks`, not on the device.
        """
        before = self.making_host_tensors
        self.making_host_tensors = True
        try:
            yield
        finally:
            self.making_host_tensors = before

    def _register_on_host(self, address: int, storage) -> int:
        if address in self.alive:
            return self.alive[address][1]
        if address not in self.host:
            reference = weakref.ref(storage, lambda _: self.host.pop(address, None))
            self.host[address] = (reference, storage.nbytes())
            peaks = self.trace.host_peaks
            peaks[self.stage] = max(peaks.get(self.stage, 0), self._host_bytes())
        return NO_STORAGE

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        return storage_address(tensor) in self.host

    def move_to_host(self, identities: Container[int]) -> None:
        """These storages have been in host memory from the start."""
        moved = [event for event in self.trace.events if event.storage in identities]
        self.trace.events = [
            event for event in self.trace.events if event.storage not in identities
        ]
        peaks = self.trace.host_peaks
        peaks["start"] = peaks.get("start", 0) + Trace(moved).peak()[0]
        for address, (reference, identity) in list(self.alive.items()):
            storage = reference()
            if identity in identities and storage is not None:
                del self.alive[address]
                del self.held[identity]
                self._register_on_host(address, storage)

    def _host_bytes(self) -> int:
        return sum(size for _, size in self.host.values())

    # ---- stages

    def enter(self, stage: str, module: str = "") -> None:
        """What is allocated from now on belongs to `stage` and `module`."""
        if stage != self.stage:
            self.trace.stages.append((self.time + 1, stage))
        if module != self.module:
            self.trace.modules.append((self.time + 1, module))
        self.stage = stage
        self.module = module

    def begin(self) -> None:
        """Forget what is gone, date what is alive to time 0, and record from here."""
        identities = sorted({identity for _, identity in self.alive.values()})
        storages = {
            identity: replace(self.trace.storages[identity], stage="start")
            for identity in identities
        }
        held = {identity: self.held[identity] for identity in identities}
        events = [Event(0, size, identity) for identity, size in held.items() if size]

        self.trace = Trace(
            events=events,
            storages=storages,
            stages=[(0, "start")],
            host_peaks={"start": self._host_bytes()},
        )
        self.time = 0
        self.stage = "start"
        self.module = ""
