"""Tiled MLP and attention by head groups: a layer runs in parts, each with short-lived activations.

    tile_mlp     cuts the tokens into tiles; every tile uses the whole weights
    group_heads  cuts the weights into groups of heads; every group sees all tokens

Both take the model and change a result only by rounding: sums over head groups round in bf16. The
forward saves only its input; the backward runs each part again and sums the parts' gradients.

Letters: B batch, T tokens, D model width, K head dimension, O outputs of a projection.
"""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.func import functional_call

from base.machine import rounds
from model import Decoder

Weights = dict[str, Tensor]  # by the name of the parameter

# Weights whose rows belong to heads, one whose columns do, and one that stacks four such matrices.
ROWS = {
    "q_proj.weight",
    "k_proj.weight",
    "v_proj.weight",
    "q_proj.bias",
    "k_proj.bias",
    "v_proj.bias",
    "sparse.gate.weight",
    "sparse.gate.bias",
}
OUTPUT = "o_proj.weight"
STACKED = "sparse.kv_proj.weight"  # [4, kv heads, K, D] as one matrix: four projections for NSA


def tile_mlp(model: Decoder, tiles: int) -> None:
    """Run each MLP over `tiles` tiles of the tokens in turn, forward and backward.

    Its [N, F] activations exist for one tile at a time (Sequence Tiling of ALST, Bekman et al.
    2025).
    """
    for layer in model.layers:
        layer.mlp.forward = TiledMLP(layer.mlp, tiles)


def group_heads(model: Decoder, groups: int) -> None:
    """Run attention for `groups` groups of KV heads in turn, each with its query heads.

    Queries, keys, values and outputs exist for one group at a time. The backward runs a group's
    forward again, so attention runs once more than without this lever.
    """
    for layer in model.layers:
        layer.attention.forward = GroupedAttention(layer.attention, groups)


# ---- what both levers share


class _SaveInput(torch.autograd.Function):
    """Identity that saves x and the weights; its backward calls `gradients(dy, x, *weights)`.

    Saving and running are two functions so that checkpoint's recomputation, which stops at the last
    saved tensor, stops before the module runs instead of running it a third time.
    """

    @staticmethod
    def forward(
        ctx,
        gradients,
        x,
        *weights,
    ):
        ctx.gradients = gradients
        ctx.save_for_backward(x, *weights)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return None, *ctx.gradients(dy, *ctx.saved_tensors)


class _RunForward(torch.autograd.Function):
    """y = function(x). Its backward hands the gradient of y to `_SaveInput` unchanged."""

    @staticmethod
    def forward(
        ctx,
        function,
        x,
    ):
        return function(x)

    @staticmethod
    def backward(ctx, dy):
        return None, dy


class _InParts:
    """Replaces a module's forward by one that runs in parts.

    A subclass defines outputs(x, weights, *inputs) and gradients(dy, x, weights, *inputs), which
    returns the gradient of x and those of the weights; weights and their gradients are by name.
    `plain` has the module's own forward and shares its parameters.
    """

    def __init__(self, module: torch.nn.Module):
        self.module = module
        self.plain = copy.copy(module)

    def run(self, x: Tensor, *inputs) -> Tensor:
        """The module's output for x; `inputs` are further arguments that need no gradient."""
        # read at each call: FSDP puts whole ones in their place
        weights = dict(self.module.named_parameters())

        def outputs(x: Tensor) -> Tensor:
            detached = {name: w.detach() for name, w in weights.items()}
            return self.outputs(x, detached, *inputs)

        def gradients(dy: Tensor, x: Tensor, *saved: Tensor) -> tuple[Tensor, ...]:
            named = dict(zip(weights, saved, strict=True))
            dx, sums = self.gradients(dy, x, named, *inputs)
            return dx, *(sums[name].to(w.dtype) for name, w in named.items())

        saved = _SaveInput.apply(gradients, x, *weights.values())
        return _RunForward.apply(outputs, saved)


def recomputed_gradients(
    function: Callable[..., Tensor],
    inputs: list[Tensor],
    dy: Tensor,
) -> tuple[Tensor, ...]:
    """Gradients of the inputs of y = function(*inputs), which is computed again here."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        y = function(*leaves)
    return torch.autograd.grad(y, leaves, dy, materialize_grads=True)


def _wide_zeros(w: Tensor) -> Tensor:
    """Zeros to sum the gradients of a weight in that all parts use.

    They are fp32 or wider: bf16 sums of many small parts would lose the later ones.
    """
    return torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32))


# ---- tiled MLP: tokens in tiles, weights whole


class TiledMLP(_InParts):
    """The forward of an MLP that runs over `tiles` tiles of the tokens."""

    def __init__(self, mlp: torch.nn.Module, tiles: int):
        super().__init__(mlp)
        self.tiles = tiles

    def __call__(self, x_BTD: Tensor) -> Tensor:
        return self.run(x_BTD.contiguous())

    def outputs(self, x_BTD: Tensor, weights: Weights) -> Tensor:
        y_BTD = torch.empty_like(x_BTD)
        for x_ND, y_ND in self._tiles(x_BTD, y_BTD):
            y_ND.copy_(functional_call(self.plain, weights, (x_ND,)))
        return y_BTD

    def gradients(
        self,
        dy_BTD: Tensor,
        x_BTD: Tensor,
        weights: Weights,
    ) -> tuple[Tensor, Weights]:
        def mlp(x: Tensor, *values: Tensor) -> Tensor:
            return functional_call(self.plain, dict(zip(weights, values, strict=True)), (x,))

        dx_BTD = torch.empty_like(x_BTD)
        sums = {name: _wide_zeros(w) for name, w in weights.items()}
        for x_ND, dy_ND, dx_ND in self._tiles(x_BTD, dy_BTD, dx_BTD):
            inputs = [x_ND, *weights.values()]
            _add_gradients(recomputed_gradients(mlp, inputs, dy_ND), dx_ND, [*sums.values()])
        return dx_BTD, sums

    def _tiles(self, *tensors_BTD: Tensor) -> Sequence[tuple[Tensor, ...]]:
        """The tiles to run, of each tensor; they differ by at most one token."""
        tensors_ND = [x_BTD.flatten(0, 1) for x_BTD in tensors_BTD]
        count = min(self.tiles, len(tensors_ND[0]))
        tiles = zip(*(x_ND.tensor_split(count) for x_ND in tensors_ND), strict=True)
        return rounds(list(tiles))


def _add_gradients(gradients: tuple[Tensor, ...], dx: Tensor, sums: list[Tensor]) -> None:
    # A function of its own: its caller holds none of a tile's gradients while the next tile runs.
    dx.copy_(gradients[0])
    wide = [grad.to(total.dtype) for grad, total in zip(gradients[1:], sums, strict=True)]
    torch._foreach_add_(sums, wide)


# ---- attention by head groups: weights in parts, tokens whole


class GroupedAttention(_InParts):
    """The forward of an attention layer that runs one group of heads after another.

    The output, the gradient of x and their sums over groups are [B, T, D]. No group has such a
    tensor for itself: the projections add to the sums in place.
    """

    def __init__(self, attention: torch.nn.Module, groups: int):
        super().__init__(attention)
        self.groups = groups
        self.projections = {
            name: _SummingLinear(getattr(attention, name))
            for name in ("q_proj", "k_proj", "v_proj")
        }

        # Attention up to, but without, its output projection.
        self.heads = copy.copy(attention)
        replaced = self.projections | {"o_proj": torch.nn.Identity()}
        self.heads._modules = dict(attention._modules) | replaced

    def __call__(
        self,
        x_BTD: Tensor,
        rope,
        rows=None,
        cache=None,
    ) -> Tensor:
        if cache is not None:
            return self.plain(x_BTD, rope, rows, cache)
        return self.run(x_BTD.contiguous(), rope, rows)

    def outputs(
        self,
        x_BTD: Tensor,
        weights: Weights,
        rope,
        rows,
    ) -> Tensor:
        y_BTD = torch.zeros_like(x_BTD)
        y_ND = y_BTD.view(-1, y_BTD.shape[-1])

        for group in rounds(range(self.groups)):
            own = self._weights_of(group, weights)
            output = own.pop(OUTPUT)
            heads_BTO = self._heads(x_BTD, own, rope, rows)
            y_ND.addmm_(heads_BTO.flatten(0, 1), output.T.to(x_BTD.dtype))
            del heads_BTO  # the next group runs without them
        return y_BTD

    def gradients(
        self,
        dy_BTD: Tensor,
        x_BTD: Tensor,
        weights: Weights,
        rope,
        rows,
    ) -> tuple[Tensor, Weights]:
        dx_BTD = torch.zeros_like(x_BTD)
        # each group writes its own part, or all add to the whole
        sums = {
            name: torch.zeros_like(w) if name in (*ROWS, OUTPUT, STACKED) else _wide_zeros(w)
            for name, w in weights.items()
        }
        for group in rounds(range(self.groups)):
            own = self._weights_of(group, weights)
            grads = self._group_gradients(dy_BTD, x_BTD, own, rope, rows, dx_BTD)
            for name, total in sums.items():
                part = group_part(name, total, group, self.groups)
                part.add_(grads[name].view(part.shape))
            del grads  # the next group runs without them
        return dx_BTD, sums

    def _group_gradients(
        self,
        dy_BTD: Tensor,
        x_BTD: Tensor,
        own: Weights,
        rope,
        rows,
        dx_BTD: Tensor,
    ) -> Weights:
        """Gradients of one group's weights by name; the gradient of x is added to dx."""
        x_BTD = x_BTD.detach().requires_grad_()
        own = {name: w.detach().requires_grad_() for name, w in own.items()}
        output = own.pop(OUTPUT)
        with torch.enable_grad():
            heads_BTO = self._heads(x_BTD, own, rope, rows, dx_BTD)

        d_heads_BTO = dy_BTD @ output.to(dy_BTD.dtype)
        d_output = dy_BTD.flatten(0, 1).T @ heads_BTO.flatten(0, 1)

        leaves = [x_BTD, *own.values()]
        rest, *grads = torch.autograd.grad(heads_BTO, leaves, d_heads_BTO, allow_unused=True)
        if rest is not None:  # from readers of x other than the three projections
            dx_BTD += rest
        return dict(zip(own, grads, strict=True)) | {OUTPUT: d_output}

    def _heads(
        self,
        x_BTD: Tensor,
        own: Weights,
        rope,
        rows,
        dx_BTD: Tensor | None = None,
    ) -> Tensor:
        """Outputs [B, T, heads * K] of the heads whose weights are given.

        In the backward the projections add their gradients of x to dx.
        """
        for projection in self.projections.values():
            projection.dx = dx_BTD
        outputs = functional_call(self.heads, own, (x_BTD, rope, rows))
        for projection in self.projections.values():
            projection.dx = None  # the graph has it; here it would outlive the backward
        return outputs

    def _weights_of(self, group: int, weights: Weights) -> Weights:
        own = {}
        for name, weight in weights.items():
            part = group_part(name, weight, group, self.groups)
            own[name] = part.flatten(0, 1) if part.ndim == 3 else part
        return own


def group_part(name: str, weight: Tensor, group: int, groups: int) -> Tensor:
    """The part of a layer's weight that one group of heads uses; all of it if every group does."""
    if name in ROWS:
        return weight.chunk(groups)[group]
    if name == OUTPUT:
        return weight.chunk(groups, dim=1)[group]
    if name == STACKED:
        return weight.unflatten(0, (4, -1)).chunk(groups, dim=1)[group]
    return weight


class _SummingLinear(torch.nn.Module):
    """y = x w^T + b, whose backward adds the gradient of x to `dx` in place.

    Autograd would hold three gradients of x, one of each projection, to sum them.
    """

    def __init__(self, linear: torch.nn.Module):
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.dx: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = _AddingProduct.apply(x, self.weight.to(x.dtype), self.dx)
        return y if self.bias is None else y + self.bias.to(x.dtype)


class _AddingProduct(torch.autograd.Function):
    """x [.., D] @ w [O, D]^T; the gradient of x is added to dx."""

    @staticmethod
    def forward(
        ctx,
        x,
        w,
        dx,
    ):
        ctx.save_for_backward(x, w)
        ctx.dx = dx
        return torch.nn.functional.linear(x, w)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dy = dy.flatten(0, -2)
        ctx.dx.view(-1, w.shape[1]).addmm_(dy, w)
        return None, dy.T @ x.flatten(0, -2), None
