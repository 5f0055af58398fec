"""What a layer keeps for its backward, and where: checkpointing, offload to the host, tiled MLP,
attention by groups of heads.

Each lever is a function taking the model and changes no result: what is not kept is computed again.
Imports model.py of ours.
"""

import contextlib
import copy
import functools
import weakref

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from model import Decoder

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
                handle.x = from_host(handle.host, handle.device)
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
    host = torch.empty(
        x.shape,
        dtype=x.dtype,
        pin_memory=x.device.type == "cuda",
        device="meta" if x.is_meta else "cpu",
    )
    return host.copy_(x, non_blocking=True)


def from_host(host: Tensor, device: torch.device) -> Tensor:
    """The copy on its device again; on a CPU the host's own."""
    return host.to(device, non_blocking=True)


# --- parts: a function of [B, T, D] and weights that saves its input alone and is run again in the backward, part by part


class _Keep(torch.autograd.Function):
    """Identity that saves x and the weights; its backward gets the output's gradient through `_Run`
    and computes theirs.

    Two functions and not one: inside a checkpoint, which stops running a layer again at its last
    saved tensor, `_Run` of the MLP then never runs a second time for nothing.
    """

    @staticmethod
    def forward(ctx, gradients, x, *weights):
        ctx.gradients = gradients
        ctx.save_for_backward(x, *weights)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return None, *ctx.gradients(dy, *ctx.saved_tensors)


class _Run(torch.autograd.Function):
    """y = function(x); passes y's gradient on as it is, to `_Keep`."""

    @staticmethod
    def forward(ctx, function, x):
        return function(x)

    @staticmethod
    def backward(ctx, dy):
        return None, dy


def _again(run, leaves: list[Tensor], dy: Tensor) -> tuple[Tensor, ...]:
    """Gradients of run(*leaves), which is computed here."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    with torch.enable_grad():
        y = run(*leaves)
    return torch.autograd.grad(y, leaves, dy, materialize_grads=True)


class _Parts:
    """A module whose forward goes part by part. `twin` has the module's plain forward and shares
    its parameters.
    """

    def __init__(self, module: torch.nn.Module):
        self.module, self.twin = module, copy.copy(module)
        self.names = [name for name, _ in module.named_parameters()]

    def weights(self) -> list[Tensor]:
        found = dict(
            self.module.named_parameters()
        )  # read at each call: FSDP puts whole parameters in their place
        return [found[name] for name in self.names]

    def call(self, x, weights, *args) -> Tensor:
        return functional_call(self.twin, dict(zip(self.names, weights)), (x, *args))

    def run(self, forward, gradients, x: Tensor) -> Tensor:
        weights = self.weights()
        kept = _Keep.apply(gradients, x, *weights)
        return _Run.apply(lambda x: forward(x, [w.detach() for w in weights]), kept)


def _wide_sum(w: Tensor) -> Tensor:
    """Zeros to which the gradients of a weight that all parts use are added: in fp32 or wider."""
    return torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32))


# ---- tiled MLP: tokens in parts, weights whole


def tile_mlp(model: Decoder, tiles: int):
    """Run each MLP over `tiles` parts of the tokens, forward and backward: its [N, F] activations
    exist for one part at a time (Sequence Tiling of ALST, Bekman et al. 2025). Weight gradients are
    summed over the parts in fp32.
    """
    for layer in model.layers:
        parts = _Parts(layer.mlp)
        layer.mlp.forward = functools.partial(_tiled, parts, tiles)


def _tiled(parts: _Parts, tiles: int, x_BTD: Tensor) -> Tensor:
    def forward(x, weights):
        y = torch.empty_like(x)
        xs, ys = split(x), split(y)
        for tile in range(len(xs)):
            ys[tile].copy_(parts.call(xs[tile], weights))
        return y

    def split(x):
        return x.flatten(0, 1).tensor_split(min(tiles, x.shape[0] * x.shape[1]))

    def add(grads, out, sums):  # a function, so that none of them is held while the next part runs
        out.copy_(grads[0])
        torch._foreach_add_(sums, [grad.to(total.dtype) for grad, total in zip(grads[1:], sums)])

    def gradients(dy, x, *weights):
        dx, sums = torch.empty_like(x), [_wide_sum(w) for w in weights]
        xs, dys, dxs = split(x), split(dy), split(dx)
        for tile in range(len(xs)):
            add(
                _again(lambda x, *w: parts.call(x, w), [xs[tile], *weights], dys[tile]),
                dxs[tile],
                sums,
            )
        return dx, *(total.to(w.dtype) for total, w in zip(sums, weights))

    return parts.run(forward, gradients, x_BTD.contiguous())


# ---- attention by groups of heads: weights in parts, tokens whole


def group_heads(model: Decoder, groups: int):
    """Run attention for `groups` groups of KV heads in turn, with their query heads: queries, keys,
    values and outputs exist for one group at a time. The backward runs a group's forward again, so
    that attention runs once more than without.
    """
    for layer in model.layers:
        layer.attention.forward = functools.partial(
            _grouped, _Heads(layer.attention), groups, model.config
        )


class _Heads(_Parts):
    """An attention layer without its output projection: what every group writes into the same [B,
    T, D], sums and gradients of x, goes there by the products themselves, so that no group has a
    [B, T, D] of its own.
    """

    def __init__(self, attention: torch.nn.Module):
        super().__init__(attention)
        self.plain, self.twin = self.twin, copy.copy(attention)
        self.sums = {
            name: _Summing(getattr(attention, name)) for name in ("q_proj", "k_proj", "v_proj")
        }
        self.twin._modules = dict(attention._modules) | self.sums | dict(o_proj=torch.nn.Identity())
        self.inner = [name for name in self.names if name != OUT]

    def outputs(self, x, weights: dict, rope, documents, dx: Tensor | None = None) -> Tensor:
        """[B, T, H*K] of the heads whose weights are given; the projections add the gradient of x
        to `dx`.
        """
        self._add_to(dx)
        outputs = functional_call(
            self.twin, {name: weights[name] for name in self.inner}, (x, rope, documents)
        )
        self._add_to(None)
        return outputs

    def _add_to(self, dx: Tensor | None):
        for projection in self.sums.values():
            projection.dx = dx


OUT = "o_proj.weight"


class _Summing(torch.nn.Module):
    """y = x w^T; in the backward dx += dy w in place, where autograd would hold three gradients of
    x to sum them.
    """

    def __init__(self, linear: torch.nn.Module):
        super().__init__()
        self.weight, self.dx = linear.weight, None

    def forward(self, x: Tensor) -> Tensor:
        return _Project.apply(x, self.weight.to(x.dtype), self.dx)


class _Project(torch.autograd.Function):
    """x [.., D], w [O, D]; dx: where the gradient of x is added."""

    @staticmethod
    def forward(ctx, x, w, dx):
        ctx.save_for_backward(x, w)
        ctx.dx = dx
        return torch.nn.functional.linear(x, w)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dy = dy.flatten(0, -2)
        ctx.dx.view(-1, w.shape[1]).addmm_(dy, w)
        return None, dy.T @ x.flatten(0, -2), None


def _grouped(
    parts: _Heads, groups: int, config, x_BTD: Tensor, rope, documents=None, cache=None
) -> Tensor:
    if cache is not None:
        return parts.plain(x_BTD, rope, documents, cache)
    slices = [head_slices(parts.names, config, group, groups) for group in range(groups)]

    def taken(weights, takes) -> dict:
        return {name: _flat(take(w)) for name, take, w in zip(parts.names, takes, weights)}

    def forward(x, weights):
        y = torch.zeros_like(x)
        for takes in slices:
            own = taken(weights, takes)
            y.view(-1, y.shape[-1]).addmm_(
                parts.outputs(x, own, rope, documents).flatten(0, 1), own[OUT].T.to(x.dtype)
            )
        return y

    def gradients(dy, x, *weights):
        dx, dweights = (
            torch.zeros_like(x),
            [
                _wide_sum(w) if take is _whole else torch.zeros_like(w)
                for take, w in zip(slices[0], weights)
            ],
        )
        for takes in slices:
            add(backward(dy, x, taken(weights, takes), dx), takes, dweights)
        return dx, *(total.to(w.dtype) for total, w in zip(dweights, weights))

    def add(grads: dict, takes, dweights):
        for name, take, total in zip(parts.names, takes, dweights):
            view = take(total)
            view.add_(grads[name].view(view.shape))

    def backward(dy, x, own, dx) -> dict:
        """Gradients of one group's weights by name; that of x is added to dx."""
        x = x.detach().requires_grad_()
        own = {name: w.detach().requires_grad_() for name, w in own.items()}
        with torch.enable_grad():
            o = parts.outputs(x, own, rope, documents, dx)
        out, leaves = own.pop(OUT), [x, *own.values()]
        with torch.no_grad():
            do, dout = dy @ out.to(dy.dtype), dy.flatten(0, 1).T @ o.flatten(0, 1)
        rest, *grads = torch.autograd.grad(o, leaves, do, allow_unused=True)
        if rest is not None:  # of what reads x beside the three projections
            dx += rest
        return dict(zip(own, grads)) | {OUT: dout}

    return parts.run(forward, gradients, x_BTD.contiguous())


def _flat(w: Tensor) -> Tensor:
    return w.flatten(0, 1) if w.ndim == 3 else w


def head_slices(names: list[str], config, group: int, groups: int) -> list:
    """For each parameter of an attention layer, a function that takes the view of it that one group
    of heads uses.
    """
    K, queries, keys = config.head_dim, config.num_heads // groups, config.num_kv_heads // groups

    def span(width):
        return slice(group * width, (group + 1) * width)

    rows = {
        "q_proj.weight": queries * K,
        "k_proj.weight": keys * K,
        "v_proj.weight": keys * K,
        "sparse.gate.weight": 3 * queries,
        "sparse.gate.bias": 3 * queries,
    }
    takes = {name: functools.partial(_rows, where=span(width)) for name, width in rows.items()}
    takes[OUT] = lambda w: w[:, span(queries * K)]
    takes["sparse.kv_proj.weight"] = lambda w: w.unflatten(0, (4, -1))[:, span(keys * K)]
    return [takes.get(name, _whole) for name in names]


def _rows(w: Tensor, where: slice) -> Tensor:
    return w[where]


def _whole(w: Tensor) -> Tensor:
    return w
