"""Every storage that operators make, from birth to death, under a dispatch mode: on fake tensors (a
prediction) or real ones.

Imports longhaul.memory.trace of ours. Sizes are bytes. A kernel's own buffers are no tensors:
`workspace` declares them.
"""

import contextlib
import sys
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from longhaul.memory.trace import Event, Storage, Trace

QUESTION = torch.ops.aten._local_scalar_dense.default
SUM = torch.ops.aten.add.Tensor
WRAPPERS = (
    "_dynamo/eval_frame.py",
    "torch/_compile.py",
    "utils/_python_dispatch.py",
)  # of __torch_dispatch__
NOWHERE = -1  # the storage of a workspace's event: it lives for that moment alone


def accumulate(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """What autograd's engine does where two gradients of one tensor meet: in place where it holds
    the last reference.

    Under a dispatch mode it gives that up and adds into a third tensor. Two references to the
    storage and four to the tensor are this call's own.
    """
    for total, other in ((old, new), (new, old)):
        alone = (
            torch._C._storage_Use_Count(total.untyped_storage()._cdata) == 2
            and total._use_count() == 4
        )
        if alone and torch.ops.aten.is_non_overlapping_and_dense(total):
            return total.add_(other)
    return old + new


def asked_by_the_engine() -> bool:
    """Whether the autograd engine itself runs this operator, not Python code in a backward."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename.endswith(WRAPPERS):
        frame = frame.f_back
    return frame.f_code.co_name == "_engine_run_backward"


def no_workspace(func, args, outputs) -> int:
    """Nothing beyond what is returned."""
    return 0


class Tracker(TorchDispatchMode):
    """Records allocations in `trace`; a storage is dropped when its last tensor goes (weak
    reference), as an allocator sees it.

    workspace(func, args, outputs): bytes that the operator holds inside beyond what it returns.
    fake: tensors have no values, so the
    tracker answers where the program asks for one, and leaves out the fused optimizer, whose
    imitation allocates.
    """

    def __init__(self, workspace=no_workspace, fake: bool = False):
        super().__init__()
        self.trace, self.workspace, self.fake = Trace(stages=[(0, "start")]), workspace, fake
        self.time, self.stage, self.module, self.count = 0, "start", "", 0
        self.alive: dict[int, tuple] = {}  # address of a storage -> (its weak reference, its id)
        self.held: dict[int, int] = {}  # id of a storage alive -> its bytes now
        self.elsewhere, self.host = (
            False,
            {},
            # whether tensors are being made on the host; address of such a storage -> its reference
            # and bytes
        )

    # ---- the mode

    def __enter__(self):
        original = self._original = torch.UntypedStorage.resize_

        def resize_(storage, size):
            original(storage, size)
            if storage._cdata in self.alive:
                self._resized(self.alive[storage._cdata][1], size)

        torch.UntypedStorage.resize_ = (
            resize_  # so FSDP2 frees whole parameters and takes them back, unseen by dispatch
        )
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self._original
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(kind.__name__ == "DTensor" for kind in types):
            # DTensor then runs the operator on its local shards, which come back here
            return NotImplemented
        if self.fake and func is QUESTION:
            return self._answer(args[0])
        if self.fake and func is torch.ops.aten._fused_adamw_.default:
            return None
        if func is SUM and asked_by_the_engine():
            outputs = accumulate(*args)
        else:
            outputs = func(*args, **(kwargs or {}))
        if func.namespace != "prim":
            self._seen(func, args, outputs)
        return outputs

    def _answer(self, value: torch.Tensor):
        """No label is out of range, every token counts, every norm is finite: any() is False, other
        booleans True, numbers 1.
        """
        if value.dtype != torch.bool:
            return 1
        known = self.alive.get(value.untyped_storage()._cdata)
        return known is None or self.trace.storages[known[1]].op != "aten.any.default"

    def _seen(self, func, args, outputs):
        for tensor in tree_iter(outputs):
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                self.register(tensor, str(func))
        extra = self.workspace(func, args, outputs)
        if extra:
            self.trace.workspaces.append((self._event(0, NOWHERE), extra, str(func)))

    # ---- storages

    def register(self, tensor: torch.Tensor, op: str) -> int:
        """The id of the tensor's storage, which is born here if it was not known."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if self.elsewhere or key in self.host:
            return self._on_host(key, storage)
        if key not in self.alive:
            identity, self.count = self.count, self.count + 1
            self.alive[key] = (
                weakref.ref(storage, lambda _: self._dropped(key, identity)),
                identity,
            )
            size = self.held[identity] = storage.nbytes()
            self.trace.storages[identity] = Storage(
                identity,
                size,
                "",
                self.stage,
                self.module,
                tuple(tensor.shape),
                str(tensor.dtype).removeprefix("torch."),
                op,
            )
            self._event(size, identity)
        return self.alive[key][1]

    @contextlib.contextmanager
    def on_host(self):
        """What is made inside is in host memory: no event of the device's, but a part of
        `trace.host_peak`.
        """
        before, self.elsewhere = self.elsewhere, True
        try:
            yield
        finally:
            self.elsewhere = before

    def _on_host(self, key: int, storage) -> int:
        if key not in self.alive and key not in self.host:
            self.host[key] = (
                weakref.ref(storage, lambda _: self.host.pop(key, None)),
                storage.nbytes(),
            )
            peaks, now = self.trace.host_peaks, sum(size for _, size in self.host.values())
            peaks[self.stage] = max(peaks.get(self.stage, 0), now)
        return self.alive[key][1] if key in self.alive else NOWHERE

    def _event(self, size: int, identity: int) -> int:
        self.time += 1
        if size or identity == NOWHERE:
            self.trace.events.append(Event(self.time, size, identity))
        return self.time

    def _resized(self, identity: int, size: int):
        change, self.held[identity] = size - self.held[identity], size
        storage = self.trace.storages[identity]
        storage.size, storage.category = max(size, storage.size), "unsharded"
        self._event(change, identity)

    def _dropped(self, key: int, identity: int):
        if key in self.alive and self.alive[key][1] == identity:
            del self.alive[key]
        self._event(-self.held.pop(identity, 0), identity)

    # ---- stages

    def enter(self, stage: str, module: str = ""):
        """What is born from now on belongs to `stage` and `module`."""
        if stage != self.stage:
            self.trace.stages.append((self.time + 1, stage))
        if module != self.module:
            self.trace.modules.append((self.time + 1, module))
        self.stage, self.module = stage, module

    def begin(self, config: dict):
        """Forget what is gone, date what is alive to time 0, and record from here."""
        storages = {identity: self.trace.storages[identity] for _, identity in self.alive.values()}
        events = [Event(0, self.held[identity], identity) for identity in sorted(storages)]
        self.trace = Trace(
            events,
            storages,
            [(0, "start")],
            config=config,
            host_peaks=dict(start=sum(size for _, size in self.host.values())),
        )
        self.time, self.stage, self.module = 0, "start", ""
        for storage in storages.values():
            storage.stage = "start"
