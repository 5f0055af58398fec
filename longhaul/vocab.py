"""Every per-token quantity over the vocabulary, and sampling from it, by tiles: nothing of size [N,
V] exists.

Imports the tile helpers of model.py of ours. Letters: N tokens, D model width, V vocabulary (of a
tile: the tile's columns), K chosen tokens.
With z = hidden @ weight^T / temperature and p = softmax(z); r, q the same of the reference:

    logprob = z_target - lse        lse = log sum exp z                 entropy = lse - sum p z
    self_certainty = KL(U || p) = lse - mean z - log V                  (Zhao et al. 2025, arXiv 2505.19590)
    kl_ref = KL(p || q) = sum p (log p - log q)                         kl_from_ref = KL(q || p)

One backward serves them all: dz = p (A + B log p + C log q) + Q q + U, and += G at the target, one
of each letter per token.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from model import (
    add_product,
    capped,
    check_inputs,
    check_labels,
    choose_kernels,
    default_tiles,
    exp_,
    put_target,
    set_product,
    spans,
    target_logits,
    tile_body,
    tile_logits,
    wide,
)


class VocabStats(NamedTuple):
    """Per token [N], fp32 (fp64 for fp64 inputs); None where the target or the reference that it
    needs was not given.
    """

    logprob: Tensor | None
    lse: Tensor
    entropy: Tensor
    self_certainty: Tensor
    kl_ref: Tensor | None
    kl_from_ref: Tensor | None
    argmax: Tensor


def vocab_stats(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    target_N: Tensor | None = None,
    *,
    reference: tuple[Tensor, Tensor] | None = None,
    temperature: float = 1.0,
    token_tile: int | None = None,
    vocab_tile: int | None = None,
    kernels: str = "auto",
) -> VocabStats:
    """The statistics above, differentiable in hidden and weight (not in the reference, nor through
    argmax).

    reference = (hidden [N, any width], weight [V, that width]), taken at the same temperature.
    Tokens with target -100 have
    logprob 0. Raises ValueError for shapes, devices, dtypes, tiles and temperature <= 0; IndexError
    for targets outside [0, V) on CPU.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: must be > 0")
    has_target, has_reference = target_N is not None, reference is not None
    if not has_target:
        target_N = torch.full((len(hidden_ND),), -100, device=hidden_ND.device)
    check_inputs(hidden_ND, weight_VD, target_N, "none", token_tile, vocab_tile)
    if has_reference:
        reference = [tensor.detach() for tensor in reference]
        check_inputs(*reference, target_N, "none")
        if len(reference[1]) != len(weight_VD):
            raise ValueError(
                f"the reference has {len(reference[1])} tokens in its vocabulary, the policy {len(weight_VD)}: they must agree"
            )
    if kernels == "triton":
        raise ValueError(
            "kernels='triton': the statistics have no Triton twin, choose auto, torch or compiled"
        )
    kernels = choose_kernels(kernels, hidden_ND)
    auto = default_tiles(len(hidden_ND), len(weight_VD), hidden_ND.device, kernels)
    tiles = [
        token_tile or auto[0],
        vocab_tile or max(1, auto[1] // 2),
    ]  # twice the loss's temporaries per element
    stats_7N, argmax_N = stats_op(
        hidden_ND, weight_VD, target_N, reference or [], 1 / temperature, tiles, kernels
    )
    logprob, lse, entropy, self_certainty, kl_ref, kl_from_ref, _ = stats_7N.unbind(0)
    return VocabStats(
        logprob if has_target else None,
        lse,
        entropy,
        self_certainty,
        kl_ref if has_reference else None,
        kl_from_ref if has_reference else None,
        argmax_N,
    )


# ---- the two elementwise bodies; target logits come from fp32 dot products, as in the loss


def exact_tile(z_NV: Tensor, target_N: Tensor, z_target_N: Tensor, scale: float) -> Tensor:
    return put_target(capped(z_NV, None, z_target_N.dtype).mul_(scale), target_N, z_target_N)


def fold_stats(z_NV, r_NV, target_N, z_target_2N, state_SN, seen: int, scale: float):
    """Fold a tile into running sums [S, N], all relative to the running maximum: a common offset of
    the logits cancels exactly.
    """
    max_N, sum_N, dot_N, total_N = state_SN[:4]
    x_NV = exact_tile(z_NV, target_N, z_target_2N[0], scale)
    new_N = torch.maximum(max_N, x_NV.amax(1))
    step_N = max_N - new_N
    x_NV = x_NV.sub_(new_N[:, None].to(x_NV.dtype))
    p_NV, decay_N = exp_(x_NV.clone()), step_N.exp()
    state = [
        new_N,
        decay_N * sum_N + p_NV.sum(1),
        decay_N * (dot_N + step_N * sum_N) + (p_NV * x_NV).sum(1),
        total_N + step_N * seen + x_NV.sum(1),
    ]
    if r_NV is None:
        return torch.stack(state)
    max_r_N, sum_r_N, gap_N, gap_r_N = state_SN[4:]
    y_NV = exact_tile(r_NV, target_N, z_target_2N[1], scale)
    new_r_N = torch.maximum(max_r_N, y_NV.amax(1))
    step_r_N = max_r_N - new_r_N
    y_NV = y_NV.sub_(new_r_N[:, None].to(y_NV.dtype))
    q_NV, decay_r_N, shift_N = exp_(y_NV.clone()), step_r_N.exp(), step_N - step_r_N
    gap_NV = x_NV.sub_(y_NV)
    return torch.stack(
        [
            *state,
            new_r_N,
            decay_r_N * sum_r_N + q_NV.sum(1),
            decay_N * (gap_N + shift_N * sum_N) + p_NV.mul_(gap_NV).sum(1),
            decay_r_N * (gap_r_N + shift_N * sum_r_N) + q_NV.mul_(gap_NV).sum(1),
        ]
    )


def stats_gradient(z_NV, r_NV, target_N, z_target_2N, lse_2N, letters_5N, scale: float):
    """Overwrite z by p (A + B log p + C log q) + Q q + U, and by 0 at the target."""
    A_N, B_N, C_N, Q_N, U_N = letters_5N[:, :, None]
    log_p_NV = exact_tile(z_NV, target_N, z_target_2N[0], scale).sub_(lse_2N[0, :, None])
    factor_NV, d_NV = (log_p_NV * B_N).add_(A_N), exp_(log_p_NV)
    if r_NV is None:
        d_NV = d_NV.mul_(factor_NV).add_(U_N)
    else:
        log_q_NV = exact_tile(r_NV, target_N, z_target_2N[1], scale).sub_(lse_2N[1, :, None])
        d_NV = d_NV.mul_(factor_NV.addcmul_(log_q_NV, C_N)).add_(U_N).addcmul_(exp_(log_q_NV), Q_N)
    z_NV.copy_(put_target(d_NV, target_N, torch.zeros_like(lse_2N[0])))


# ---- the operator, opaque to torch.compile


@torch.library.custom_op("longhaul::vocab_stats", mutates_args=())
def stats_op(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    target_N: Tensor,
    reference: list[Tensor],
    scale: float,
    tiles: list[int],
    kernels: str,
) -> tuple[Tensor, Tensor]:
    """(stats_7N, argmax_N); the rows are the first six fields of VocabStats and the reference's
    lse.
    """
    N, V = len(hidden_ND), len(weight_VD)
    if target_N.device.type == "cpu":
        check_labels(target_N, V, -100)
    z_target_2N = both_targets(hidden_ND, weight_VD, target_N, reference, tiles[0], scale)
    # [N] sums in fp64 cost nothing and keep many small tiles exact; maxima start finite, so that
    # (max - new) * 0 is 0
    state_SN = hidden_ND.new_zeros(8 if reference else 4, N, dtype=torch.float64)
    state_SN[::4] = torch.finfo(torch.float32).min
    top_N = hidden_ND.new_full(
        (N,), -torch.inf
    )  # argmax is of the logits as their product rounds them, whatever the target and tiles
    argmax_N = torch.zeros(N, dtype=torch.long, device=hidden_ND.device)
    fold = tile_body(fold_stats, kernels)
    for v, t, z_NV, r_NV, _ in logit_tiles(hidden_ND, weight_VD, reference, tiles):
        value_N, index_N = z_NV.max(1)
        new_SN = fold(
            z_NV, r_NV, target_N[t] - v.start, z_target_2N[:, t], state_SN[:, t], v.start, scale
        )
        argmax_N[t] = torch.where(value_N > top_N[t], v.start + index_N, argmax_N[t])
        top_N[t] = torch.maximum(top_N[t], value_N)
        state_SN[:, t] = new_SN
    return torch.stack(finish(state_SN, z_target_2N[0], target_N, V)).to(
        z_target_2N.dtype
    ), argmax_N


def finish(state_SN: Tensor, z_target_N: Tensor, target_N: Tensor, V: int) -> list[Tensor]:
    max_N, sum_N, dot_N, total_N = state_SN[:4]
    log_N = sum_N.log()
    logprob_N = torch.where(target_N < 0, 0, z_target_N - max_N - log_N)
    stats = [logprob_N, max_N + log_N, log_N - dot_N / sum_N, log_N - total_N / V - math.log(V)]
    if len(state_SN) == 4:
        return [*stats, *[torch.zeros_like(log_N)] * 3]
    max_r_N, sum_r_N, gap_N, gap_r_N = state_SN[4:]
    difference_N = log_N - sum_r_N.log()
    return [
        *stats,
        gap_N / sum_N - difference_N,
        difference_N - gap_r_N / sum_r_N,
        max_r_N + sum_r_N.log(),
    ]


def both_targets(
    hidden_ND, weight_VD, target_N, reference, token_tile: int, scale: float
) -> Tensor:
    """Target logits [2, N] of the policy and the reference (zero without one)."""
    z_N = target_logits(hidden_ND, weight_VD, target_N, token_tile, None)
    r_N = (
        target_logits(*reference, target_N, token_tile, None).to(z_N.dtype)
        if reference
        else torch.zeros_like(z_N)
    )
    return torch.stack([z_N, r_N]).mul_(scale)


def logit_tiles(hidden_ND: Tensor, weight_VD: Tensor, reference: list[Tensor], tiles: list[int]):
    """Yield (columns, tokens, policy tile, reference tile or None, policy tile of all tokens), in
    buffers that are reused.
    """
    N, V = len(hidden_ND), len(weight_VD)
    buffer = hidden_ND.new_empty(N * min(tiles[1], V))
    r_buffer = reference[0].new_empty(min(tiles[0], N) * min(tiles[1], V)) if reference else None
    for v in spans(V, tiles[1]):
        w_VD, z_NV = (
            weight_VD[v].to(hidden_ND.dtype),
            buffer[: N * (v.stop - v.start)].view(N, v.stop - v.start),
        )
        for t in spans(N, tiles[0]):
            torch.mm(hidden_ND[t], w_VD.t(), out=z_NV[t])
            r_NV = (
                tile_logits(reference[0][t], reference[1][v].to(reference[0].dtype), r_buffer)
                if reference
                else None
            )
            yield v, t, z_NV[t], r_NV, z_NV


@torch.library.custom_op("longhaul::vocab_stats_backward", mutates_args=())
def stats_backward_op(
    grad_7N: Tensor,
    stats_7N: Tensor,
    hidden_ND: Tensor,
    weight_VD: Tensor,
    target_N: Tensor,
    reference: list[Tensor],
    scale: float,
    tiles: list[int],
    kernels: str,
    need_hidden: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor]:
    z_target_2N = both_targets(hidden_ND, weight_VD, target_N, reference, tiles[0], scale)
    letters_5N, d_target_N = letters(
        grad_7N, stats_7N, z_target_2N[1], target_N, len(weight_VD), scale
    )
    lse_2N, fill = stats_7N[[1, 6]], tile_body(stats_gradient, kernels)
    dh_ND, dw_VD = (
        stats_7N.new_empty(0),
        torch.empty_like(weight_VD) if need_weight else weight_VD.new_empty(0),
    )
    if need_hidden:
        dh_ND = (
            weight_VD.index_select(0, target_N.clamp(min=0))
            .to(hidden_ND.dtype)
            .to(stats_7N.dtype)
            .mul_(d_target_N[:, None])
        )
    for v, t, z_NV, r_NV, all_NV in logit_tiles(hidden_ND, weight_VD, reference, tiles):
        fill(
            z_NV,
            r_NV,
            target_N[t] - v.start,
            z_target_2N[:, t],
            lse_2N[:, t],
            letters_5N[:, t],
            scale,
        )
        if need_hidden:
            add_product(dh_ND[t], z_NV, weight_VD[v].to(z_NV.dtype))
        if need_weight and t.stop == len(hidden_ND):
            put_target(all_NV, target_N - v.start, d_target_N.to(all_NV.dtype))
            set_product(dw_VD[v], all_NV.t(), hidden_ND)
    return dh_ND.to(hidden_ND.dtype) if need_hidden else dh_ND, dw_VD


def letters(grad_7N, stats_7N, r_target_N, target_N, V: int, scale: float) -> tuple[Tensor, Tensor]:
    """(A, B, C, Q, U) and the whole dz at the target, where p - 1 is taken as expm1(log p)."""
    logprob_N, _, entropy_N, _, kl_N, _, lse_r_N = stats_7N
    g_logprob, g_lse, g_entropy, g_certainty, g_kl, g_from, _ = grad_7N * scale
    g_logprob = g_logprob.masked_fill(target_N < 0, 0)
    rest_N = g_lse + g_certainty + g_from - g_entropy * entropy_N - g_kl * kl_N
    A, B, C, Q, U = rest_N - g_logprob, g_kl - g_entropy, -g_kl, -g_from, -g_certainty / V
    log_q_N = r_target_N - lse_r_N
    d_target_N = (
        logprob_N.exp() * (rest_N + B * logprob_N + C * log_q_N)
        + Q * log_q_N.exp()
        + U
        - g_logprob * torch.expm1(logprob_N)
    )
    return torch.stack([A, B, C, Q, U]), d_target_N.masked_fill(target_N < 0, 0)


@stats_op.register_fake
def _(hidden_ND, weight_VD, target_N, *_):
    return hidden_ND.new_empty(7, len(hidden_ND), dtype=wide(hidden_ND.dtype)), torch.empty_like(
        target_N, dtype=torch.long
    )


@stats_backward_op.register_fake
def _(grad_7N, stats_7N, hidden_ND, weight_VD, *args):
    return (
        hidden_ND.new_empty(hidden_ND.shape) if args[-2] else stats_7N.new_empty(0),
        torch.empty_like(weight_VD) if args[-1] else weight_VD.new_empty(0),
    )


def _save(ctx, inputs, output):
    hidden_ND, weight_VD, target_N, reference, *ctx.options = inputs
    ctx.save_for_backward(output[0], hidden_ND, weight_VD, target_N, *reference)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad_7N, _argmax):
    stats_7N, hidden_ND, weight_VD, target_N, *reference = ctx.saved_tensors
    need = ctx.needs_input_grad[:2]
    grads = stats_backward_op(
        grad_7N, stats_7N, hidden_ND, weight_VD, target_N, reference, *ctx.options, *need
    )
    return (
        *(grad if needed else None for grad, needed in zip(grads, need)),
        None,
        [None] * len(reference),
        None,
        None,
        None,
    )


stats_op.register_autograd(_backward, setup_context=_save)


# ---- the largest logits, with or without noise


def topk_logits(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    k: int,
    *,
    temperature: float = 1.0,
    vocab_tile: int | None = None,
    perturb: Callable[[Tensor, slice], Tensor] = lambda z_NV, v: z_NV,
) -> tuple[Tensor, Tensor, Tensor]:
    """(index_NK, logit_NK, key_NK) of the k largest keys = perturb(logits / temperature, columns),
    sorted; not differentiable.
    """
    V = len(weight_VD)
    if not 1 <= k <= V or not temperature > 0:
        raise ValueError(
            f"k={k}, temperature={temperature}: allowed are 1 <= k <= {V}, the vocabulary, and temperature > 0"
        )
    check_inputs(
        hidden_ND,
        weight_VD,
        hidden_ND.new_zeros(len(hidden_ND), dtype=torch.long),
        "none",
        vocab_tile,
    )
    vocab_tile = vocab_tile or default_tiles(len(hidden_ND), V, hidden_ND.device, "torch")[1]
    with torch.no_grad():
        best = None
        for v in spans(V, vocab_tile):
            z_NV = (hidden_ND @ weight_VD[v].t().to(hidden_ND.dtype)).to(
                wide(hidden_ND.dtype)
            ) / temperature
            index_NV = torch.arange(v.start, v.stop, device=z_NV.device).expand_as(z_NV)
            tile = index_NV, z_NV, perturb(z_NV, v)
            best = tile if best is None else [torch.cat(pair, 1) for pair in zip(best, tile)]
            keep_NK = best[2].topk(min(k, best[2].shape[1]), 1).indices
            best = [x.gather(1, keep_NK) for x in best]
    return tuple(best)


def gumbel_topk(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    k: int,
    *,
    temperature: float = 1.0,
    noise_NV: Tensor | None = None,
    generator: torch.Generator | None = None,
    vocab_tile: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """k tokens sampled without replacement from softmax(z / temperature): the k largest of z /
    temperature + Gumbel noise.

    Returns topk_logits's (index_NK, logit_NK, key_NK); k = 1 is an ordinary sample (Kool et al.
    2019, arXiv 1903.06059). Noise may be
    given, so that two methods can be compared on the same draw.
    """

    if noise_NV is not None and noise_NV.shape != (len(hidden_ND), len(weight_VD)):
        raise ValueError(
            f"noise has shape {tuple(noise_NV.shape)}: give one number per token and piece, {(len(hidden_ND), len(weight_VD))}"
        )

    def perturb(z_NV: Tensor, v: slice) -> Tensor:
        noise = (
            torch.empty_like(z_NV).exponential_(generator=generator).log_().neg_()
            if noise_NV is None
            else noise_NV[:, v]
        )
        return z_NV + noise

    return topk_logits(
        hidden_ND, weight_VD, k, temperature=temperature, vocab_tile=vocab_tile, perturb=perturb
    )
