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

from base.machine import platform
from model import Decoder, ModelConfig

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
        layer.attention.forward = GroupedAttention(layer.attention, model.config, groups)


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
    returns the gradient of x and those of the weights. `plain` has the module's own forward and
    shares its parameters.
    """

    def __init__(self, module: torch.nn.Module):
        self.module = module
        self.plain = copy.copy(module)
        self.names = [name for name, _ in module.named_parameters()]

    def run(self, x: Tensor, *inputs) -> Tensor:
        """The module's output for x; `inputs` are further arguments that need no gradient."""
        weights = self.weights()

        def outputs(x: Tensor) -> Tensor:
            return self.outputs(x, [w.detach() for w in weights], *inputs)

        def gradients(
            dy: Tensor,
            x: Tensor,
            *weights: Tensor,
        ) -> tuple[Tensor, ...]:
            return self.gradients(dy, x, weights, *inputs)

        saved = _SaveInput.apply(gradients, x, *weights)
        return _RunForward.apply(outputs, saved)

    def weights(self) -> list[Tensor]:
        """The module's parameters, read at each call: FSDP puts whole ones in their place."""
        found = dict(self.module.named_parameters())
        return [found[name] for name in self.names]


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

    def outputs(self, x_BTD: Tensor, weights: Sequence[Tensor]) -> Tensor:
        y_BTD = torch.empty_like(x_BTD)
        x_ND = x_BTD.flatten(0, 1)
        y_ND = y_BTD.flatten(0, 1)

        for tile in self._tiles(len(x_ND)):
            y_ND[tile].copy_(self._mlp(x_ND[tile], *weights))
        return y_BTD

    def gradients(
        self,
        dy_BTD: Tensor,
        x_BTD: Tensor,
        weights: Sequence[Tensor],
    ) -> tuple:
        dx_BTD = torch.empty_like(x_BTD)
        sums = [_wide_zeros(w) for w in weights]
        x_ND = x_BTD.flatten(0, 1)
        dy_ND = dy_BTD.flatten(0, 1)
        dx_ND = dx_BTD.flatten(0, 1)

        for tile in self._tiles(len(x_ND)):
            inputs = [x_ND[tile], *weights]
            self._add(recomputed_gradients(self._mlp, inputs, dy_ND[tile]), dx_ND[tile], sums)
        return dx_BTD, *(total.to(w.dtype) for total, w in zip(sums, weights, strict=True))

    def _mlp(self, x: Tensor, *weights: Tensor) -> Tensor:
        return functional_call(self.plain, dict(zip(self.names, weights, strict=True)), (x,))

    def _add(
        self,
        gradients: tuple[Tensor, ...],
        dx: Tensor,
        sums: list[Tensor],
    ) -> None:
        # A method of its own: the caller holds none of a tile's gradients while the next tile runs.
        dx.copy_(gradients[0])
        wide = [grad.to(total.dtype) for grad, total in zip(gradients[1:], sums, strict=True)]
        torch._foreach_add_(sums, wide)

    def _tiles(self, tokens: int) -> list[slice]:
        """The tiles to run, which differ by at most one token."""
        count = min(self.tiles, tokens)
        size, longer = divmod(tokens, count)
        found = []
        for tile in platform().tiles(range(count)):
            start = tile * size + min(tile, longer)
            end = (tile + 1) * size + min(tile + 1, longer)
            found.append(slice(start, end))
        return found


# ---- attention by head groups: weights in parts, tokens whole


class GroupedAttention(_InParts):
    """The forward of an attention layer that runs one group of heads after another.

    The output, the gradient of x and their sums over groups are [B, T, D]. No group has such a
    tensor for itself: the projections add to the sums in place.
    """

    def __init__(
        self,
        attention: torch.nn.Module,
        config: ModelConfig,
        groups: int,
    ):
        super().__init__(attention)
        self.groups = [HeadGroup(config, group, groups) for group in range(groups)]
        self.inner_names = [name for name in self.names if name != OUTPUT]
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
        weights: Sequence[Tensor],
        rope,
        rows,
    ) -> Tensor:
        y_BTD = torch.zeros_like(x_BTD)
        y_ND = y_BTD.view(-1, y_BTD.shape[-1])

        for group in platform().tiles(self.groups):
            own = self._weights_of(group, weights)
            heads_BTO = self._heads(x_BTD, own, rope, rows)
            y_ND.addmm_(heads_BTO.flatten(0, 1), own[OUTPUT].T.to(x_BTD.dtype))
            del heads_BTO  # the next group runs without them
        return y_BTD

    def gradients(
        self,
        dy_BTD: Tensor,
        x_BTD: Tensor,
        weights: Sequence[Tensor],
        rope,
        rows,
    ) -> tuple:
        dx_BTD = torch.zeros_like(x_BTD)
        sums = [self._zeros(name, w) for name, w in zip(self.names, weights, strict=True)]

        for group in platform().tiles(self.groups):
            grads = self._group_gradients(
                dy_BTD, x_BTD, self._weights_of(group, weights), rope, rows, dx_BTD
            )
            self._add(group, grads, sums)
            del grads  # the next group runs without them
        return dx_BTD, *(total.to(w.dtype) for total, w in zip(sums, weights, strict=True))

    def _group_gradients(
        self,
        dy_BTD: Tensor,
        x_BTD: Tensor,
        own: dict[str, Tensor],
        rope,
        rows,
        dx_BTD: Tensor,
    ) -> dict[str, Tensor]:
        """Gradients of one group's weights by name; the gradient of x is added to dx."""
        x_BTD = x_BTD.detach().requires_grad_()
        own = {name: w.detach().requires_grad_() for name, w in own.items()}
        with torch.enable_grad():
            heads_BTO = self._heads(x_BTD, own, rope, rows, dx_BTD)

        output = own.pop(OUTPUT)
        with torch.no_grad():
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
        own: dict[str, Tensor],
        rope,
        rows,
        dx_BTD: Tensor | None = None,
    ) -> Tensor:
        """Outputs [B, T, heads * K] of the heads whose weights are given.

        In the backward the projections add their gradients of x to dx.
        """
        inner = {name: own[name] for name in self.inner_names}
        self._add_input_gradients_to(dx_BTD)
        outputs = functional_call(self.heads, inner, (x_BTD, rope, rows))
        self._add_input_gradients_to(None)
        return outputs

    def _add_input_gradients_to(self, dx_BTD: Tensor | None) -> None:
        for projection in self.projections.values():
            projection.dx = dx_BTD

    def _weights_of(self, group: "HeadGroup", weights: Sequence[Tensor]) -> dict[str, Tensor]:
        own = {}
        for name, weight in zip(self.names, weights, strict=True):
            view = group.view(name, weight)
            own[name] = view.flatten(0, 1) if view.ndim == 3 else view
        return own

    def _add(
        self,
        group: "HeadGroup",
        grads: dict[str, Tensor],
        sums: list[Tensor],
    ) -> None:
        for name, total in zip(self.names, sums, strict=True):
            view = group.view(name, total)
            view.add_(grads[name].view(view.shape))

    def _zeros(self, name: str, weight: Tensor) -> Tensor:
        """A weight's gradients: each group writes its own part, or all add to the whole."""
        if self.groups[0].shares(name):
            return _wide_zeros(weight)
        return torch.zeros_like(weight)


class HeadGroup:
    """The part of each weight of an attention layer that one group of heads uses."""

    def __init__(
        self,
        config: ModelConfig,
        group: int,
        groups: int,
    ):
        queries = config.num_heads // groups
        keys = config.num_kv_heads // groups

        def span(width: int) -> slice:
            return slice(group * width, (group + 1) * width)

        self.queries = span(queries * config.head_dim)
        self.keys = span(keys * config.head_dim)
        gates = span(3 * queries)
        self.rows = {
            "q_proj.weight": self.queries,
            "k_proj.weight": self.keys,
            "v_proj.weight": self.keys,
            "q_proj.bias": self.queries,
            "k_proj.bias": self.keys,
            "v_proj.bias": self.keys,
            "sparse.gate.weight": gates,
            "sparse.gate.bias": gates,
        }

    def view(self, name: str, weight: Tensor) -> Tensor:
        """This group's part of the parameter `name`, or all of it if every group uses it whole."""
        if name in self.rows:
            return weight[self.rows[name]]
        if name == OUTPUT:
            return weight[:, self.queries]
        if name == STACKED:
            return weight.unflatten(0, (4, -1))[:, self.keys]
        return weight

    def shares(self, name: str) -> bool:
        """Whether every group uses the whole parameter."""
        return name not in self.rows and name not in (OUTPUT, STACKED)


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
