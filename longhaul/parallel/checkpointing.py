"""Checkpointing: what a layer keeps for its backward, and whether on the device or on the host.

checkpoint_layers takes the model and changes no result: what is not kept is computed again.
"""

import contextlib
import functools
import weakref

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from model import Decoder, platform

# what selective checkpointing keeps: the one part of a layer whose time grows with the square of
# the length
ATTENTION_OPS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "longhaul::nsa_forward",
    "longhaul::nsa_triton_forward",
}


# ---- checkpointing


def checkpoint_layers(model: Decoder, selective: bool = False, offload: bool = False):
    """Keep one input [B, T, D] per layer and run the layer again in the backward (Chen et al.
    2016).

    selective: attention's outputs are kept too, so that its forward runs once. offload: the inputs
    wait on the host.
    """
    options = (
        dict(context_fn=functools.partial(create_selective_checkpoint_contexts, _keep_attention))
        if selective
        else {}
    )
    host = HostCopies() if offload else None
    for layer in model.layers:
        kept = functools.partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False, **options
        )
        layer.forward = functools.partial(_offloaded, host, kept) if offload else kept


def _keep_attention(_, op, *args, **kwargs) -> CheckpointPolicy:
    return (
        CheckpointPolicy.MUST_SAVE
        if op.name().split(".")[0] in ATTENTION_OPS
        else CheckpointPolicy.PREFER_RECOMPUTE
    )


# ---- offload


def _offloaded(host: "HostCopies", forward, *args):
    """A checkpoint saves its inputs outside of itself: the hooks see those alone, never what the
    layer computes again.
    """
    with torch.autograd.graph.saved_tensors_hooks(host.pack, host.unpack):
        return forward(*args)


class HostCopies:
    """Layer inputs [B, T, D] in pinned host memory. On CUDA a stream of their own copies them
    behind the computation: out while the layer runs, back one layer ahead of the backward.
    Elsewhere the copies are plain.
    """

    def __init__(self):
        self.waiting: list[weakref.ref] = []  # handles in the order of the forward
        self.stream = None

    def pack(self, x: Tensor):
        if x.ndim != 3:  # checkpoint's own marker
            return x
        handle = _Handle(x.device)
        with self._side(x.device):
            handle.host = to_host(x)
            if self.stream is not None:
                x.record_stream(self.stream)
        self.waiting = [ref for ref in self.waiting if ref() is not None] + [weakref.ref(handle)]
        return handle

    def unpack(self, handle) -> Tensor:
        if isinstance(handle, Tensor):
            return handle
        self.waiting = [ref for ref in self.waiting if ref() not in (None, handle)]
        self._fetch(handle)
        if self.stream is not None:
            torch.cuda.current_stream(handle.device).wait_event(handle.ready)
            handle.x.record_stream(torch.cuda.current_stream(handle.device))
            if self.waiting:
                self._fetch(self.waiting[-1]())  # the backward needs it next
        x, handle.x = handle.x, None
        return x

    def _fetch(self, handle: "_Handle"):
        if handle.x is None:
            with self._side(handle.device, follow=False):
                handle.x = platform().from_host(handle.host, handle.device)
                handle.ready = self.stream and self.stream.record_event()

    def _side(self, device: torch.device, follow: bool = True):
        """The copying stream; `follow`: after what the current stream has computed so far."""
        if device.type != "cuda":
            return contextlib.nullcontext()
        self.stream = self.stream or torch.cuda.Stream(device)
        if follow:
            self.stream.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(self.stream)


class _Handle:
    """A layer's input: its host copy, and its copy on the device while it is back."""

    def __init__(self, device: torch.device):
        self.device, self.host, self.x, self.ready = device, None, None, None


def to_host(x: Tensor) -> Tensor:
    """A copy in host memory, pinned where x is on CUDA; on meta, of no device."""
    with platform().host_memory():
        host = torch.empty(
            x.shape,
            dtype=x.dtype,
            pin_memory=x.device.type == "cuda",
            device="meta" if x.is_meta else "cpu",
        )
        return host.copy_(x, non_blocking=True)
