"""Checkpointing: what a layer keeps for its backward, and whether on the device or on the host.

checkpoint_layers takes the model and changes no result: what is not kept is computed again.
"""

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from model import Decoder

# What selective checkpointing keeps: the outputs of attention, the only part of a layer whose time
# grows with the square of the length.
ATTENTION_OPS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "torch_attn::_varlen_attn",
    "longhaul::nsa_forward",
    "longhaul::index_loss",
    "longhaul::choose_blocks",
    "longhaul::block_sparse_forward",
}

# From torch 2.14 on, checkpoint must be told whether hooks see what selective checkpointing keeps.
UNSEEN_BY_HOOKS = {}
if "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters:
    UNSEEN_BY_HOOKS = {"respect_saved_tensors_hooks": False}


# ---- checkpointing


def checkpoint_layers(model: Decoder, selective: bool = False, offload: bool = False) -> None:
    """Keep one input [B, T, D] per layer; the backward runs the layer again (Chen et al. 2016).

    selective: attention's outputs are kept too, so that its forward runs only once.
    offload: the inputs wait in host memory.
    """
    options = dict(UNSEEN_BY_HOOKS)
    if selective:
        options["context_fn"] = functools.partial(
            create_selective_checkpoint_contexts, _keep_attention
        )

    copies = HostCopies() if offload else None
    for layer in model.layers:
        forward = functools.partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False, **options
        )
        if offload:
            forward = functools.partial(_offloaded, copies, forward)
        layer.forward = forward


def _keep_attention(_context, op, *args, **kwargs) -> CheckpointPolicy:
    if op.name().split(".")[0] in ATTENTION_OPS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


# ---- offload


def _offloaded(copies: "HostCopies", forward: Callable[..., Tensor], *args) -> Tensor:
    """Run a checkpointed layer; what it saves goes to the host.

    The hooks see only the layer's inputs, because a checkpoint saves these outside of itself. They
    never see what the layer computes again, nor what selective checkpointing keeps.
    """
    with torch.autograd.graph.saved_tensors_hooks(copies.pack, copies.unpack):
        y = forward(*args)
    copies.let_go()
    return y


class InOrder:
    """Copies of a CPU: each is complete when it returns."""

    def after_computation(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def mark(self) -> None:
        return None

    def hold_computation(self, mark: None) -> None:
        pass


class OnSecondStream:
    """Copies of a GPU: a stream of their own runs them while the computing one computes."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)

    @contextlib.contextmanager
    def after_computation(self) -> Iterator[None]:
        """What is queued inside starts when all computation that is queued now is done."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield

    def mark(self) -> torch.cuda.Event:
        """The moment at which all copies that are queued now are done."""
        return self.stream.record_event()

    def hold_computation(self, mark: torch.cuda.Event) -> None:
        """What is computed from now on waits for the mark."""
        torch.cuda.current_stream(self.device).wait_event(mark)


Copying = InOrder | OnSecondStream


def copying_on(device: torch.device) -> Copying:
    """How copies between the device and the host run."""
    return OnSecondStream(device) if device.type == "cuda" else InOrder()


class HostCopies:
    """Layer inputs [B, T, D] in host memory, from the forward to the backward.

    On CUDA the memory is pinned. An input goes out while its layer runs, and comes back while the
    layer after it runs backward. The host queues work many layers ahead of the device, so memory is
    bounded by events on the device: a layer's input is freed behind its copy, and the next one's
    copy begins only when the layer before is done. All device memory belongs to the computing
    stream. (`record_stream` would keep every input until its event was seen to be complete.)
    """

    def __init__(self, copying_on: Callable[[torch.device], Copying] = copying_on):
        self.copying_on = copying_on
        self.copying: Copying | None = None
        self.waiting: list[weakref.ref] = []  # handles, in the order of the forward
        self.leaving: tuple | None = None  # the input that is being copied, and when it is complete

    def pack(self, x: Tensor) -> "Tensor | _Handle":
        """Called for every tensor that is saved; the result is saved instead of it."""
        if x.ndim != 3:  # not a layer's input but checkpoint's own marker
            return x
        if self.copying is None:
            self.copying = self.copying_on(x.device)

        handle = _Handle(x)
        with self.copying.after_computation():
            handle.host = to_host(x)
        self.leaving = (x, self.copying.mark())

        alive = [ref for ref in self.waiting if ref() is not None]
        self.waiting = [*alive, weakref.ref(handle)]
        return handle

    def let_go(self) -> None:
        """The layer has run: whatever takes the memory of its input waits for the copy."""
        if self.leaving is None:
            return
        _, complete = self.leaving
        self.leaving = None
        self.copying.hold_computation(complete)

    def unpack(self, saved: "Tensor | _Handle") -> Tensor:
        """Called when the backward needs what `pack` returned."""
        if isinstance(saved, Tensor):
            return saved

        self.waiting = [ref for ref in self.waiting if ref() not in (None, saved)]
        self._fetch(saved)
        self.copying.hold_computation(saved.ready)
        if self.waiting:
            self._fetch(self.waiting[-1]())  # the backward needs it next

        x = saved.x
        saved.x = None
        return x

    def _fetch(self, handle: "_Handle") -> None:
        """Begin to copy a layer's input back, unless that has begun already."""
        if handle.x is not None:
            return
        if handle.host_is_device:
            handle.x = handle.host
            return
        handle.x = torch.empty_like(handle.host, device=handle.device)
        with self.copying.after_computation():
            handle.x.copy_(handle.host, non_blocking=True)
        handle.ready = self.copying.mark()


class _Handle:
    """A layer's input: its copy on the host, and while it is needed its copy on the device."""

    def __init__(self, x: Tensor):
        self.device = x.device
        self.host_is_device = is_hosts(x)
        self.host: Tensor | None = None
        self.x: Tensor | None = None
        self.ready: torch.cuda.Event | None = None  # when x is complete


def is_hosts(x: Tensor) -> bool:
    """Whether x is in host memory."""
    return x.device.type == "cpu"


def to_host(x: Tensor) -> Tensor:
    """A copy in host memory, pinned if x is on CUDA; on meta it stays there."""
    host = torch.empty(
        x.shape,
        dtype=x.dtype,
        pin_memory=x.device.type == "cuda",
        device="meta" if x.is_meta else "cpu",
    )
    return host.copy_(x, non_blocking=True)
