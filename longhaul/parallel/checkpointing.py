"""Checkpointing: what a layer keeps for its backward, and whether on the device or on the host.

checkpoint_layers takes the model and changes no result: what is not kept is computed again.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from model import Decoder, platform

# What selective checkpointing keeps: the outputs of attention, the only part of a layer whose time
# grows with the square of the length.
ATTENTION_OPS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "torch_attn::_varlen_attn",
    "longhaul::nsa_forward",
    "longhaul::nsa_triton_forward",
}


# ---- checkpointing


def checkpoint_layers(model: Decoder, selective: bool = False, offload: bool = False) -> None:
    """Keep one input [B, T, D] per layer; the backward runs the layer again (Chen et al. 2016).

    selective: attention's outputs are kept too, so that its forward runs only once.
    offload: the inputs wait in host memory.
    """
    options = {}
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
        return forward(*args)


class HostCopies:
    """Layer inputs [B, T, D] in host memory, from the forward to the backward.

    On CUDA the memory is pinned, and a second stream copies while the first one computes: out while
    the layer runs, back one layer before the backward needs it. On a CPU the copies are plain.
    """

    def __init__(self):
        self.waiting: list[weakref.ref] = []  # handles, in the order of the forward
        self.stream: torch.cuda.Stream | None = None

    def pack(self, x: Tensor) -> "Tensor | _Handle":
        """Called for every tensor that is saved; the result is saved instead of it."""
        if x.ndim != 3:  # not a layer's input but checkpoint's own marker
            return x

        handle = _Handle(x.device)
        with self._copying(x.device, after_computation=True):
            handle.host = to_host(x)
            if self.stream is not None:
                x.record_stream(self.stream)

        alive = [ref for ref in self.waiting if ref() is not None]
        self.waiting = [*alive, weakref.ref(handle)]
        return handle

    def unpack(self, saved: "Tensor | _Handle") -> Tensor:
        """Called when the backward needs what `pack` returned."""
        if isinstance(saved, Tensor):
            return saved

        self.waiting = [ref for ref in self.waiting if ref() not in (None, saved)]
        self._fetch(saved)
        if self.stream is not None:
            computing = torch.cuda.current_stream(saved.device)
            computing.wait_event(saved.ready)
            saved.x.record_stream(computing)
            if self.waiting:
                self._fetch(self.waiting[-1]())  # the backward needs it next

        x = saved.x
        saved.x = None
        return x

    def _fetch(self, handle: "_Handle") -> None:
        """Begin to copy a layer's input back, unless that has begun already."""
        if handle.x is not None:
            return
        with self._copying(handle.device, after_computation=False):
            handle.x = platform().from_host(handle.host, handle.device)
            if self.stream is not None:
                handle.ready = self.stream.record_event()

    def _copying(
        self, device: torch.device, after_computation: bool
    ) -> contextlib.AbstractContextManager:
        """The copying stream on CUDA; `after_computation`: it first waits for the computing one."""
        if device.type != "cuda":
            return contextlib.nullcontext()
        if self.stream is None:
            self.stream = torch.cuda.Stream(device)
        if after_computation:
            self.stream.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(self.stream)


class _Handle:
    """A layer's input: its copy on the host, and while it is needed its copy on the device."""

    def __init__(self, device: torch.device):
        self.device = device
        self.host: Tensor | None = None
        self.x: Tensor | None = None
        self.ready: torch.cuda.Event | None = None  # when x is complete


def to_host(x: Tensor) -> Tensor:
    """A copy in host memory, pinned if x is on CUDA; on meta it stays there."""
    with platform().host_memory():
        host = torch.empty(
            x.shape,
            dtype=x.dtype,
            pin_memory=x.device.type == "cuda",
            device="meta" if x.is_meta else "cpu",
        )
        return host.copy_(x, non_blocking=True)
