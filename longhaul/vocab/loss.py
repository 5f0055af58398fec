"""The cross-entropy of hidden @ weight^T in tiles of the vocabulary: no logits [N, V] exist.

The standard loss moves [N, V] through memory about ten times in fp32; that, not arithmetic, takes
most of its time. Here the forward walks the vocabulary once with an online log-sum-exp, and the
backward recomputes each tile. That is four products instead of three, yet faster, and it saves 8
bytes per token instead of 4V.

In one pass there are three products: the logits of a block of tokens stay until their sums are
known, become their own gradients, and then those of hidden and weight. These wait for the
backward, which would make them next anyway.

Letters: N tokens, n the valid tokens, packed; D model width; V vocabulary, inside a tile: the
tile's columns.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from base import machine
from base.machine import FP32, rounds

KERNELS = ("auto", "torch", "compiled", "triton")

# From this vocabulary on, the loss in tiles takes no more time than the standard one
# (benchmarks/vocab_loss.py).
TILES_WIN = 8192


def linear_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_valid: Tensor | float | None = None,
    token_tile: int | None = None,
    vocab_tile: int | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    kernels: str = "auto",
    validate: bool = False,
    one_pass: bool = False,
) -> Tensor:
    """Cross-entropy of the logits z = softcap(hidden @ weight^T), which never exist as a whole.

        loss_n = (1 - e) (lse_n - z_n,label) + e (lse_n - mean_v z_nv) + z_loss lse_n^2
        with e = label_smoothing

    hidden and weight have any floating dtype; the products run in hidden's, also under autocast, or
    in fp32 on a CPU that is faster in it.
    The loss is fp32, and gradients have the dtype of their input. As in torch's cross_entropy,
    `reduction` is "mean" by default, over the valid tokens given here. With `num_valid` it divides
    by that number: under data parallelism or accumulation, the *global* number of valid tokens.
    "sum" is for a caller that divides. Without a valid token the loss is 0 and gradients are zero.
    `kernels`: see `choose_kernels`.

    `one_pass` computes the gradients with the loss, unless none are needed. This saves a product
    and keeps, instead of 8 bytes per token, the gradients themselves and while it computes them the
    logits of `block_tokens` tokens. It needs one number as the loss, and one backward.

    Raises ValueError for shapes, devices, dtypes and tiles, and IndexError for labels outside
    [0, V): always on a CPU, on CUDA only with `validate`, which costs a host synchronisation.
    """
    check_inputs(hidden_ND, weight_VD, labels_N, reduction, token_tile, vocab_tile)
    if one_pass:
        _check_one_pass(hidden_ND, weight_VD, reduction)
    _check_options(softcap, label_smoothing, z_loss, num_valid)
    # one pass keeps the gradient anyway; two would keep the copy of hidden until the backward.
    # Blocks of fp32 logits hold fewer tokens, whose gradients a low-precision weight cannot add up.
    if one_pass and weight_VD.element_size() >= FP32:
        hidden_ND = hidden_ND.to(machine.product_dtype(hidden_ND))

    kernels = choose_kernels(kernels, hidden_ND)
    device = hidden_ND.device
    shape = len(hidden_ND), len(weight_VD)
    tokens, columns = default_tiles(*shape, device, kernels)
    wide_columns = forward_columns(*shape, device, kernels)
    tiles = [token_tile or tokens, vocab_tile or columns, vocab_tile or wide_columns]
    divisor = _divisor(labels_N, ignore_index, reduction, num_valid, wide(hidden_ND.dtype))

    needed = [torch.is_grad_enabled() and x.requires_grad for x in (hidden_ND, weight_VD)]
    if one_pass and any(needed):
        return vocab_loss_one_pass(
            hidden_ND,
            weight_VD,
            labels_N,
            torch.as_tensor(divisor, dtype=wide(hidden_ND.dtype), device=hidden_ND.device),
            ignore_index,
            label_smoothing,
            z_loss,
            softcap,
            tiles,
            kernels,
            validate,
            *needed,
        )[0]

    sums = vocab_nll(
        hidden_ND, weight_VD, labels_N, ignore_index, softcap, tiles, kernels, validate
    )
    loss_N = token_losses(*sums, label_smoothing, z_loss)
    return loss_N if reduction == "none" else loss_N.sum() / divisor


def _divisor(
    labels_N: Tensor,
    ignore_index: int,
    reduction: str,
    num_valid: Tensor | float | None,
    dtype: torch.dtype,
) -> Tensor | float:
    """What the summed loss is divided by, at least 1."""
    if reduction != "mean":
        return 1.0
    if num_valid is None:
        num_valid = (labels_N != ignore_index).sum()
    if isinstance(num_valid, Tensor):
        return num_valid.clamp(min=1).to(dtype)
    return max(num_valid, 1)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and exponentials: fp32, or fp64 for fp64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def token_losses(
    nll_N: Tensor,
    max_N: Tensor,
    log_sum_N: Tensor,
    mean_N: Tensor,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    """The loss of each token, from what `vocab_nll` returns."""
    loss_N = nll_N
    if label_smoothing:
        uniform_N = max_N - mean_N + log_sum_N
        loss_N = (1 - label_smoothing) * nll_N + label_smoothing * uniform_N
    if z_loss:
        loss_N = loss_N + z_loss * (max_N + log_sum_N).square()
    return loss_N


def check_inputs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    reduction: str,
    *tiles: int | None,
) -> None:
    """ValueError for shapes, devices, dtypes, tiles or a reduction that cannot be used."""
    if not _shapes_fit(hidden_ND, weight_VD, labels_N):
        shapes = tuple(hidden_ND.shape), tuple(weight_VD.shape), tuple(labels_N.shape)
        raise ValueError(
            f"hidden, weight, labels have shapes {shapes}; needed: (N, D), (V, D), (N,) with V >= 1"
        )

    if len({hidden_ND.device, weight_VD.device, labels_N.device}) > 1:
        raise ValueError(
            f"hidden is on {hidden_ND.device}, weight on {weight_VD.device}, labels on "
            f"{labels_N.device}: move them to one device"
        )

    floating = hidden_ND.is_floating_point() and weight_VD.is_floating_point()
    if not floating or labels_N.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"hidden is {hidden_ND.dtype}, weight {weight_VD.dtype}, labels {labels_N.dtype}; "
            "needed: floating, floating, int64"
        )

    for tile in tiles:
        if tile is not None and not (isinstance(tile, int) and tile >= 1):
            raise ValueError(
                f"token_tile, vocab_tile = {tiles}: both must be whole numbers >= 1, or None to "
                "choose by shape and device"
            )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r}: allowed are 'mean', 'sum', 'none'")


def _shapes_fit(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> bool:
    if hidden_ND.ndim != 2 or weight_VD.ndim != 2 or labels_N.ndim != 1:
        return False
    V, D = weight_VD.shape
    return hidden_ND.shape == (len(labels_N), D) and V >= 1


def _check_options(
    softcap: float | None,
    label_smoothing: float,
    z_loss: float,
    num_valid: Tensor | float | None,
) -> None:
    capped = softcap is None or softcap > 0
    if not capped or not 0 <= label_smoothing <= 1 or not abs(z_loss) < math.inf:
        raise ValueError(
            f"softcap={softcap}, label_smoothing={label_smoothing}, z_loss={z_loss}: need softcap "
            "> 0 or None, smoothing in [0, 1], finite z_loss"
        )

    if isinstance(num_valid, Tensor):
        wrong = num_valid.ndim > 0
    else:
        wrong = num_valid is not None and not num_valid >= 0
    if wrong:
        raise ValueError(
            f"num_valid={num_valid}: give a number of tokens, 0 or more, or a tensor without "
            "dimensions"
        )


def _check_one_pass(hidden_ND: Tensor, weight_VD: Tensor, reduction: str) -> None:
    if reduction == "none":
        raise ValueError(
            "one_pass=True with reduction='none': gradients can be computed with the loss only if "
            "it is one number: give reduction='mean' or 'sum', or one_pass=False"
        )
    N = len(hidden_ND)
    block = block_tokens(N, *weight_VD.shape, hidden_ND.element_size())
    if weight_VD.element_size() < FP32 and N > block:
        raise ValueError(SEVERAL_BLOCKS.format(N, block))


def check_labels(labels_N: Tensor, V: int, ignore_index: int) -> None:
    """IndexError for the first label outside [0, V) that is not `ignore_index`."""
    bad_N = ((labels_N < 0) | (labels_N >= V)) & (labels_N != ignore_index)
    if bad_N.any():
        n = int(bad_N.nonzero()[0, 0])
        raise IndexError(
            f"label {int(labels_N[n])} at position {n}: allowed are 0 to {V - 1}, and "
            f"{ignore_index} to ignore the token"
        )


def default_tiles(N: int, V: int, device: torch.device, kernels: str) -> tuple[int, int]:
    """(token_tile, vocab_tile).

    [N, vocab_tile] exists in the inputs' dtype, and [token_tile, vocab_tile] in fp32 if the bodies
    are eager. A compiled body keeps fp32 in registers and has no cache to miss.
    """
    if device.type == "cpu":
        token_tile = 512 if kernels == "torch" else 2048
        elements = 2**22
        widest = 2048
    else:
        token_tile = 8192
        elements = 2**28
        widest = 8192
    vocab_tile = elements // max(N, 1) // 128 * 128
    return token_tile, min(max(vocab_tile, 1024), widest, max(V, 1))


def forward_columns(N: int, V: int, device: torch.device, kernels: str) -> int:
    """vocab_tile if a tile never holds more than token_tile tokens, as in the forward and in one
    pass: 8192 columns on CUDA, so that at 131,072 tokens a fourth of the kernels is launched.
    """
    token_tile, _ = default_tiles(N, V, device, kernels)
    return default_tiles(min(N, token_tile), V, device, kernels)[1]


def spans(size: int, tile: int) -> list[slice]:
    """The tiles of `size` tokens or columns; the last one may be shorter."""
    starts = rounds(range(0, size, tile))
    return [slice(start, min(start + tile, size)) for start in starts]


def choose_kernels(kernels: str, tile_like: Tensor) -> str:
    """What computes the elementwise tile bodies: "torch" (eager), "compiled" (torch.compile) or
    "triton" (triton_bodies.py).

    "auto" is compiled on CUDA and inside a compiled caller, and eager otherwise. The Triton twins
    are used only if they are asked for.
    """
    if kernels not in KERNELS:
        raise ValueError(f"kernels={kernels!r} is unknown: choose auto, torch, compiled or triton")

    if kernels == "triton":
        try:
            import longhaul.vocab.triton_bodies as linear_ce
        except ImportError as error:
            raise ValueError(
                f"kernels='triton': {error}: pip install triton, or choose kernels='auto' or "
                "'torch'"
            ) from None
        linear_ce.require(tile_like)

    if kernels == "auto":
        is_compiled = tile_like.device.type == "cuda" or torch.compiler.is_compiling()
        return "compiled" if is_compiled else "torch"
    return kernels


@functools.cache
def fastest_body(function: Callable, kernels: str) -> Callable:
    """An elementwise tile function or its fused twin.

    Compiled with dynamic shapes: otherwise every ragged last tile would compile again.
    """
    if kernels == "triton":
        import longhaul.vocab.triton_bodies as linear_ce

        return getattr(linear_ce, function.__name__)
    if kernels == "compiled":
        return torch.compile(function, dynamic=True)
    return function


def tile_logits(hidden_ND: Tensor, weight_VD: Tensor, buffer: Tensor) -> Tensor:
    """hidden @ weight^T into the reused flat buffer; a ragged last tile stays contiguous."""
    N, V = len(hidden_ND), len(weight_VD)
    return torch.mm(hidden_ND, weight_VD.t(), out=buffer[: N * V].view(N, V))


def capped(z_NV: Tensor, softcap: float | None, dtype: torch.dtype) -> Tensor:
    """softcap * tanh(z / softcap), always as a copy that may be overwritten."""
    x_NV = z_NV.to(dtype, copy=True)
    if softcap is None:
        return x_NV
    return x_NV.div_(softcap).tanh_().mul_(softcap)


def exp_(x: Tensor) -> Tensor:
    """exp in place.

    On a CPU torch.exp is MKL's, four times slower on AMD than exp2. The product's rounding is below
    that of x = z - max.
    """
    return x.mul_(1.4426950408889634).exp2_()


def below_(x_NV: Tensor, max_N: Tensor) -> Tensor:
    """x - max in place, at most 0."""
    return x_NV.sub_(max_N[:, None]).clamp_(max=0)


def put_target(x_NV: Tensor, target_N: Tensor, value_N: Tensor) -> Tensor:
    """x[n, target_n] = value_n for targets inside the tile, without asking the device how many."""
    V = x_NV.shape[1]
    if torch.compiler.is_compiling():
        # A comparison fuses into the body; an indexed write would split it.
        column_V = torch.arange(V, device=x_NV.device, dtype=target_N.dtype)
        return torch.where(column_V == target_N[:, None], value_N[:, None], x_NV)

    row_N = torch.arange(len(x_NV), device=x_NV.device)
    column_N = target_N.clamp(0, V - 1).long()
    value_N = torch.where(target_N == column_N, value_N, x_NV[row_N, column_N])
    # scatter_ would copy the whole tile on a CPU: twice as slow
    return x_NV.index_put_((row_N, column_N), value_N)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b. Low-precision products are summed in fp32: bf16 sums make gradients 6x
    noisier.
    """
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        machine.mixed_product(total, a, b, beta=1)


def set_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out = a @ b."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    else:
        machine.mixed_product(out, a, b, beta=0)


def pack_valid(labels_N: Tensor, ignore_index: int) -> tuple[slice | Tensor, Tensor]:
    """(rows, target_n) of the valid tokens, so that ignored ones cost nothing.

    Targets are int32, because comparing int64 columns costs more than the exp. On CUDA the number
    of valid tokens would cost a host synchronisation, so all tokens stay there, and ignored ones
    get the target -1 and a zero gradient.
    """
    valid_N = labels_N != ignore_index
    if labels_N.device.type != "cpu" or valid_N.all():
        return slice(None), torch.where(valid_N, labels_N, -1).int()
    rows = valid_N.nonzero()[:, 0]
    return rows, labels_N[rows].int()


def unpack(value_n: Tensor, rows: slice | Tensor, N: int) -> Tensor:
    """Scatter packed values back to N tokens, zero for the ignored ones."""
    if isinstance(rows, slice):
        return value_n
    return value_n.new_zeros(N, *value_n.shape[1:]).index_copy_(0, rows, value_n)


def fold_logsumexp(
    z_NV: Tensor,
    target_N: Tensor,
    max_N: Tensor,
    sum_N: Tensor,
    total_N: Tensor,
    softcap: float | None,
) -> None:
    """Fold a tile into (max, sum exp(z - max)) of all logits except the target's, and into the sum
    of all logits. All three are overwritten.
    """
    x_NV = capped(z_NV, softcap, max_N.dtype)
    total_N.add_(x_NV.sum(1))

    x_NV = put_target(x_NV, target_N, torch.full_like(max_N, -torch.inf))
    new_max_N = torch.maximum(max_N, x_NV.amax(1))
    sum_N.mul_((max_N - new_max_N).exp()).add_(exp_(x_NV.sub_(new_max_N[:, None])).sum(1))
    max_N.copy_(new_max_N)


def logits_to_gradient(
    z_NV: Tensor,
    target_N: Tensor,
    max_N: Tensor,
    slope_N: Tensor,
    shift_N: Tensor,
    softcap: float | None,
) -> None:
    """Overwrite z by (slope * exp(z - max) + shift) * d softcap, and by 0 at the target.

    No logit counts as larger than `max`, so that the exp is at most 1.
    """
    x_NV = capped(z_NV, softcap, max_N.dtype)
    chain_NV = None if softcap is None else 1 - (x_NV / softcap).square()

    d_NV = exp_(below_(x_NV, max_N)).mul_(slope_N[:, None]).add_(shift_N[:, None])
    if chain_NV is not None:
        d_NV = d_NV.mul_(chain_NV)
    z_NV.copy_(put_target(d_NV, target_N, torch.zeros_like(max_N)))


class _Problem(NamedTuple):
    """The valid tokens, packed, and how their logits are computed."""

    hidden_nD: Tensor
    weight_VD: Tensor
    target_n: Tensor
    softcap: float | None
    tiles: list[int]
    kernels: str

    def vocabulary_tiles(self) -> list[slice]:
        return spans(len(self.weight_VD), self.tiles[1])

    def token_tiles(self) -> list[slice]:
        return spans(len(self.hidden_nD), self.tiles[0])


class _Sums(NamedTuple):
    """What `vocab_nll` returns, of packed tokens."""

    nll: Tensor
    max: Tensor
    log_sum: Tensor
    mean: Tensor


@torch.library.custom_op("longhaul::linear_nll", mutates_args=())
def vocab_nll(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    ignore_index: int,
    softcap: float | None,
    tiles: list[int],
    kernels: str,
    validate: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(-log p(label), max of the logits, log sum exp(z - max), mean of the logits) per token in
    fp32, 0 for ignored tokens. `tiles`: tokens, columns in the backward, columns in the forward.

    The maximum and the logarithm stay apart, because their sum would round away the logarithm where
    logits are large. Gradients take the maximum for a constant. The operator is opaque to
    torch.compile, which would unroll the loops.
    """
    N, V = len(hidden_ND), len(weight_VD)
    if validate or labels_N.device.type == "cpu":
        check_labels(labels_N, V, ignore_index)

    rows, target_n = pack_valid(labels_N, ignore_index)
    tiles = [tiles[0], tiles[-1]]
    h_nD = hidden_ND[rows].to(machine.product_dtype(hidden_ND))
    problem = _Problem(h_nD, weight_VD, target_n, softcap, tiles, kernels)
    tokens = min(tiles[0], len(target_n))
    buffer = h_nD.new_empty(tokens * min(tiles[1], V))

    def reused(v: slice, t: slice) -> Tensor:
        return tile_at(buffer, 0, t.stop - t.start, v.stop - v.start)

    sums = _fold_vocabulary(problem, reused)
    return tuple(unpack(x_n, rows, N) for x_n in sums)


def tile_at(buffer: Tensor, start: int, N: int, V: int) -> Tensor:
    """A tile [N, V] in a flat buffer; a ragged last tile is contiguous too."""
    return buffer[start : start + N * V].view(N, V)


def _fold_vocabulary(problem: _Problem, tile_of: Callable) -> _Sums:
    """Each token's sums over the vocabulary; the logits go into tile_of(columns, tokens)."""
    h_nD, weight_VD, target_n, softcap, tiles, kernels = problem
    z_target_n = target_logits(h_nD, weight_VD, target_n, tiles[0], softcap)
    max_n = z_target_n.clone()
    sum_n = torch.zeros_like(z_target_n)
    total_n = torch.zeros_like(z_target_n)

    fold = fastest_body(fold_logsumexp, kernels)
    for v in problem.vocabulary_tiles():
        w_VD = weight_VD[v].to(h_nD.dtype)
        target_in_v = target_n - v.start
        for t in problem.token_tiles():
            z_NV = torch.mm(h_nD[t], w_VD.t(), out=tile_of(v, t))
            fold(z_NV, target_in_v[t], max_n[t], sum_n[t], total_n[t], softcap)

    # If the label's logit is the maximum, then log(1 + sum of the others) is exact also for a
    # p(label) near 1. Differences from the maximum are exact under a large common offset.
    above_target_n = max_n - z_target_n
    all_n = sum_n + (-above_target_n).exp()
    log_sum_n = torch.where(above_target_n > 0, all_n.log(), sum_n.log1p())
    nll_n = above_target_n + log_sum_n

    sums = nll_n, max_n, log_sum_n, total_n / len(weight_VD)
    return _Sums(*(x_n.masked_fill_(target_n < 0, 0) for x_n in sums))


def target_logits(
    h_nD: Tensor, weight_VD: Tensor, target_n: Tensor, token_tile: int, softcap: float | None
) -> Tensor:
    """The label's logit from an fp32 dot product: a low-precision tile would round the one logit
    that the loss subtracts.
    """
    z_n = h_nD.new_empty(len(h_nD), dtype=wide(h_nD.dtype))
    for t in spans(len(h_nD), token_tile):
        w_nD = weight_VD.index_select(0, target_n[t].clamp(min=0)).to(h_nD.dtype)
        z_n[t] = (h_nD[t].to(z_n.dtype) * w_nD).sum(1)
    return capped(z_n, softcap, z_n.dtype)


@torch.library.custom_op("longhaul::linear_nll_backward", mutates_args=())
def vocab_nll_backward(
    grads: list[Tensor],
    max_N: Tensor,
    log_sum_N: Tensor,
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    ignore_index: int,
    softcap: float | None,
    tiles: list[int],
    kernels: str,
    need_hidden: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of hidden and weight, empty if not needed.

    `grads` are those of nll, log_sum and mean: dz = (d_nll + d_log_sum) p + d_mean / V, minus d_nll
    at the label, with p = exp(z - max) exp(-log_sum).
    """
    rows, target_n = pack_valid(labels_N, ignore_index)
    h_nD = hidden_ND[rows].to(machine.product_dtype(hidden_ND))
    problem = _Problem(h_nD, weight_VD, target_n, softcap, tiles, kernels)
    max_n = max_N[rows]
    slopes = _slopes(problem, [grad_N[rows] for grad_N in grads], max_n, log_sum_N[rows])

    n = len(target_n)
    buffer = h_nD.new_empty(n * min(tiles[1], len(weight_VD)))

    def reused(v: slice) -> Tensor:
        return tile_at(buffer, 0, n, v.stop - v.start)

    dh_nD = label_gradient(problem, slopes) if need_hidden else None
    dw_VD = torch.empty_like(weight_VD) if need_weight else None
    _gradient_products(problem, max_n, slopes, reused, True, dh_nD, dw_VD, set_product)

    if need_hidden:
        dh_nD = unpack(dh_nD.to(hidden_ND.dtype), rows, len(hidden_ND))
    else:
        dh_nD = max_n.new_empty(0)
    return dh_nD, dw_VD if need_weight else weight_VD.new_empty(0)


class _Slopes(NamedTuple):
    """The gradient dz of each token's logits: exp(z - max) * slope + constant; at the label,
    `target`.
    """

    slope: Tensor
    constant: Tensor
    target: Tensor


def _slopes(
    problem: _Problem, grads: Sequence[Tensor], max_n: Tensor, log_sum_n: Tensor
) -> _Slopes:
    """`grads` as in `vocab_nll_backward`, of packed tokens."""
    h_nD, weight_VD, target_n, softcap, tiles, _ = problem
    ignored_n = target_n < 0
    d_nll_n, d_log_sum_n, d_mean_n = [grad_n.masked_fill(ignored_n, 0) for grad_n in grads]
    constant_n = d_mean_n / len(weight_VD)
    slope_n = (d_nll_n + d_log_sum_n) * torch.exp(-log_sum_n)

    # p - 1 = expm1(-nll), and nll holds the fp32 logit of the label, which a tile would round.
    z_target_n = target_logits(h_nD, weight_VD, target_n, tiles[0], softcap)
    nll_n = (max_n - z_target_n + log_sum_n).masked_fill_(ignored_n, 0)
    d_target_n = d_nll_n * torch.expm1(-nll_n) + d_log_sum_n * torch.exp(-nll_n) + constant_n
    if softcap is not None:
        d_target_n.mul_(1 - (z_target_n / softcap).square())
    return _Slopes(slope_n, constant_n, d_target_n)


def label_gradient(problem: _Problem, slopes: _Slopes) -> Tensor:
    """The label's term of dh, by far the largest: it stays in fp32, outside the tiles."""
    column_n = problem.target_n.clamp(min=0)
    w_nD = problem.weight_VD.index_select(0, column_n).to(problem.hidden_nD.dtype)
    return w_nD.to(slopes.target.dtype).mul_(slopes.target[:, None])


def _gradient_products(
    problem: _Problem,
    max_n: Tensor,
    slopes: _Slopes,
    tile_of: Callable,
    recompute: bool,
    dh_nD: Tensor | None,
    dw_VD: Tensor | None,
    put_product: Callable,
) -> None:
    """Overwrite the logits in tile_of(columns) by their gradient, and add its products to dh_nD
    and, with `put_product`, to dw_VD, unless they are None. `recompute`: the logits are not there.
    """
    h_nD, weight_VD, target_n, softcap, _, kernels = problem
    fill = fastest_body(logits_to_gradient, kernels)
    label_n = slopes.target.to(h_nD.dtype)
    for v in problem.vocabulary_tiles():
        w_VD = weight_VD[v].to(h_nD.dtype)
        z_nV = tile_of(v)
        target_in_v = target_n - v.start
        for t in problem.token_tiles():
            if recompute:
                torch.mm(h_nD[t], w_VD.t(), out=z_nV[t])
            slope_N, constant_N, _ = (x_n[t] for x_n in slopes)
            fill(z_nV[t], target_in_v[t], max_n[t], slope_N, constant_N, softcap)
            if dh_nD is not None:
                add_product(dh_nD[t], z_nV[t], w_VD)

        # One product over all tokens is rounded once, however many token tiles there are, and needs
        # no fp32 [V, D].
        if dw_VD is not None:
            dz_nV = put_target(z_nV, target_in_v, label_n)
            put_product(dw_VD[v], dz_nV.t(), h_nD)


@vocab_nll.register_fake
def _(hidden_ND, *_):
    return tuple(hidden_ND.new_empty(len(hidden_ND), dtype=wide(hidden_ND.dtype)) for _ in range(4))


@vocab_nll_backward.register_fake
def _(grads, max_N, log_sum_N, hidden_ND, weight_VD, *args):
    need_hidden, need_weight = args[-2:]
    dh_ND = max_N.new_empty(0)
    if need_hidden:  # contiguous, whatever hidden's strides are
        dh_ND = hidden_ND.new_empty(hidden_ND.shape)
    dw_VD = torch.empty_like(weight_VD) if need_weight else weight_VD.new_empty(0)
    return dh_ND, dw_VD


def _save(ctx, inputs, output):
    hidden_ND, weight_VD, labels_N, *ctx.options, _validate = inputs
    _nll_N, max_N, log_sum_N, _mean_N = output
    # beyond the inputs, 8 bytes per token
    ctx.save_for_backward(max_N, log_sum_N, hidden_ND, weight_VD, labels_N)
    ctx.mark_non_differentiable(max_N)


def _backward(ctx, d_nll_N, _d_max_N, d_log_sum_N, d_mean_N):
    need_hidden, need_weight = ctx.needs_input_grad[:2]
    grads = [d_nll_N, d_log_sum_N, d_mean_N]
    dh_ND, dw_VD = vocab_nll_backward(
        grads, *ctx.saved_tensors, *ctx.options, need_hidden, need_weight
    )
    dh_ND = dh_ND if need_hidden else None
    dw_VD = dw_VD if need_weight else None
    return dh_ND, dw_VD, *[None] * 6


vocab_nll.register_autograd(_backward, setup_context=_save)

# Bytes of logits that a block has at most. Each block reads and writes the sum dW once: with 4096
# bytes of logits per vocabulary entry, that is a small part of its products.
BLOCK_BYTES = 2**30

SEVERAL_BLOCKS = (
    "the loss in one pass was given {} tokens, which makes blocks of {}, and a weight in low "
    "precision, which would round the gradient of each block: give fewer tokens, a weight in fp32, "
    "or take the loss that recomputes (one_pass=False; --loss chunked)"
)


def block_tokens(N: int, V: int, D: int, element: int) -> int:
    """Tokens of a block in one pass, if logits have `element` bytes: N tokens make blocks of equal
    length.

    The logits of a block never take more than BLOCK_BYTES, nor more than twice dW in fp32, which
    the pass makes anyway.
    """
    most = max(min(BLOCK_BYTES, 2 * FP32 * V * D) // (element * V), 1)
    blocks = max(math.ceil(N / most), 1)
    return max(math.ceil(N / blocks), 1)


@torch.library.custom_op("longhaul::linear_loss_one_pass", mutates_args=())
def vocab_loss_one_pass(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    divisor: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    tiles: list[int],
    kernels: str,
    validate: bool,
    need_hidden: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The summed loss / divisor, and its gradients of hidden and weight, empty if not needed."""
    N, V = len(hidden_ND), len(weight_VD)
    if validate or labels_N.device.type == "cpu":
        check_labels(labels_N, V, ignore_index)

    rows, target_n = pack_valid(labels_N, ignore_index)
    tiles = [tiles[0], tiles[-1]]
    problem = _Problem(hidden_ND[rows], weight_VD, target_n, softcap, tiles, kernels)
    h_nD = problem.hidden_nD
    n, D = h_nD.shape
    tokens = block_tokens(n, V, D, h_nD.element_size())
    buffer = h_nD.new_empty(tokens * V)

    loss_n = divisor.new_empty(n)
    dh_nD = h_nD.new_empty(h_nD.shape) if need_hidden else None
    dw_VD = torch.empty_like(weight_VD) if need_weight else None
    if need_weight and n == 0:
        dw_VD.zero_()
    for t in spans(n, tokens):
        block = problem._replace(hidden_nD=h_nD[t], target_n=target_n[t])
        dh_tD = dh_nD[t] if need_hidden else None
        put_product = add_product if t.start else set_product
        loss_n[t] = _one_block(
            block, buffer, divisor, label_smoothing, z_loss, dh_tD, dw_VD, put_product
        )
    del buffer

    loss = unpack(loss_n, rows, N).sum() / divisor
    dh_ND = unpack(dh_nD, rows, N) if need_hidden else h_nD.new_empty(0)
    return loss, dh_ND, dw_VD if need_weight else weight_VD.new_empty(0)


def _one_block(
    problem: _Problem,
    buffer: Tensor,
    divisor: Tensor,
    label_smoothing: float,
    z_loss: float,
    dh_nD: Tensor | None,
    dw_VD: Tensor | None,
    put_product: Callable,
) -> Tensor:
    """Each token's loss; its gradients go to dh_nD and, with `put_product`, to dw_VD, unless they
    are None.
    """
    n = len(problem.target_n)

    def kept(v: slice, t: slice = slice(None)) -> Tensor:
        return tile_at(buffer, n * v.start, n, v.stop - v.start)[t]

    sums = _fold_vocabulary(problem, kept)
    loss_n = token_losses(*sums, label_smoothing, z_loss)

    each = divisor.reciprocal()
    lse_n = sums.max + sums.log_sum
    grads = [
        ((1 - label_smoothing) * each).expand(n),
        (label_smoothing + 2 * z_loss * lse_n) * each,
        (-label_smoothing * each).expand(n),
    ]
    slopes = _slopes(problem, grads, sums.max, sums.log_sum)
    sum_nD = None if dh_nD is None else label_gradient(problem, slopes)
    _gradient_products(problem, sums.max, slopes, kept, False, sum_nD, dw_VD, put_product)
    if dh_nD is not None:
        dh_nD.copy_(sum_nD)
    return loss_n


@vocab_loss_one_pass.register_fake
def _(hidden_ND, weight_VD, labels_N, divisor, *args):
    need_hidden, need_weight = args[-2:]
    dh_ND = hidden_ND.new_empty(hidden_ND.shape if need_hidden else 0)
    dw_VD = torch.empty_like(weight_VD) if need_weight else weight_VD.new_empty(0)
    return torch.empty_like(divisor), dh_ND, dw_VD


@torch.library.custom_op("longhaul::scale_gradients", mutates_args=("gradients",))
def scale_gradients(gradients: list[Tensor], factor: Tensor) -> None:
    """Multiply in place by the gradient of the loss; a factor of 1 costs nothing on a CPU."""
    if factor.device.type == "cpu" and factor == 1:
        return
    for gradient in gradients:
        gradient.mul_(factor)


def _save_gradients(ctx, inputs, output):
    _loss, dh_ND, dw_VD = output
    ctx.mark_non_differentiable(dh_ND, dw_VD)
    ctx.set_materialize_grads(False)  # zeros of the size of dW otherwise
    ctx.save_for_backward(dh_ND, dw_VD)
    ctx.is_spent = False


def _scaled_gradients(ctx, d_loss, _d_dh_ND, _d_dw_VD):
    if ctx.is_spent:
        raise ValueError(
            "the one-pass loss was given a second backward, and the first one has used its "
            "gradients: call the backward once, or take the loss that recomputes "
            "(one_pass=False; in a model loss='chunked')"
        )
    ctx.is_spent = True
    gradients = list(ctx.saved_tensors)
    scale_gradients(gradients, d_loss)
    needed = ctx.needs_input_grad[:2]
    found = [x if is_needed else None for x, is_needed in zip(gradients, needed, strict=True)]
    return *found, *[None] * 11


vocab_loss_one_pass.register_autograd(_scaled_gradients, setup_context=_save_gradients)
