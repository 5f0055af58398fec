"""Statistics of each token over the vocabulary, and sampling, in tiles: no [N, V] tensor exists.

Letters: N tokens, D model width, V vocabulary (of a tile: its columns), K chosen tokens, S sums.
With z = hidden @ weight^T / temperature, p = softmax(z), and r, q the same of a reference:

    logprob        = z_target - lse
    lse            = log sum exp z
    entropy        = lse - sum p z
    self_certainty = KL(U || p) = lse - mean z - log V        (Zhao et al. 2025, arXiv 2505.19590)
    kl_ref         = KL(p || q) = sum p (log p - log q)
    kl_from_ref    = KL(q || p) = sum q (log q - log p)

One backward serves them all: dz = p (A + B log p + C log q) + Q q + U, plus G at the target, where
each letter is one number per token. An lse is kept as its two terms, the maximum and the logarithm
of the sum relative to it: their sum would round away the logarithm where logits are large. With
x = z - max and y = r - max_r, dz = exp(x) (A + B x + C y) + Q exp(y) + U with other letters.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from longhaul.vocab.loss import (
    add_product,
    below_,
    capped,
    check_inputs,
    check_labels,
    choose_kernels,
    default_tiles,
    exp_,
    fastest_body,
    put_target,
    set_product,
    spans,
    target_logits,
    tile_logits,
    wide,
)

IGNORE = -100  # a target without a logprob


class VocabStats(NamedTuple):
    """Per token [N], in fp32 (fp64 for fp64 inputs); None if its target or reference is missing."""

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
    """The statistics above, differentiable in hidden and weight.

    They are not differentiable in the reference, nor through argmax. reference = (hidden [N, any
    width], weight [V, that width]), taken at the same temperature. Tokens with target -100 have
    logprob 0. Raises ValueError for shapes, devices, dtypes, tiles and temperature <= 0; IndexError
    for targets outside [0, V) on CPU.
    """
    has_target = target_N is not None
    has_reference = reference is not None
    if not has_target:
        target_N = torch.full((len(hidden_ND),), IGNORE, device=hidden_ND.device)
    reference = [tensor.detach() for tensor in reference] if has_reference else []

    _check_temperature(temperature)
    check_inputs(hidden_ND, weight_VD, target_N, "none", token_tile, vocab_tile)
    if has_reference:
        _check_reference(reference, target_N, len(weight_VD))
    if kernels == "triton":
        raise ValueError(
            "kernels='triton': the statistics have no Triton kernel: choose auto, torch or compiled"
        )

    kernels = choose_kernels(kernels, hidden_ND)
    auto = default_tiles(len(hidden_ND), len(weight_VD), hidden_ND.device, kernels)
    # Twice the temporaries per element of the loss, for which these tiles were chosen.
    tiles = [token_tile or auto[0], vocab_tile or max(1, auto[1] // 2)]
    stats_6N, _normalizers_4N, argmax_N = stats_op(
        hidden_ND, weight_VD, target_N, reference, 1 / temperature, tiles, kernels
    )
    logprob, lse, entropy, self_certainty, kl_ref, kl_from_ref = stats_6N.unbind(0)
    return VocabStats(
        logprob if has_target else None,
        lse,
        entropy,
        self_certainty,
        kl_ref if has_reference else None,
        kl_from_ref if has_reference else None,
        argmax_N,
    )


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} is not positive: give a number above 0")


def _check_reference(reference: list[Tensor], target_N: Tensor, V: int) -> None:
    hidden_NE, weight_VE = reference
    check_inputs(hidden_NE, weight_VE, target_N, "none")
    if len(weight_VE) != V:
        raise ValueError(
            f"the reference's vocabulary has {len(weight_VE)} tokens and the policy's {V}: "
            "give two models with the same vocabulary"
        )


# ---- the two elementwise bodies; target logits come from fp32 dot products, as in the loss


def exact_tile(z_NV: Tensor, target_N: Tensor, z_target_N: Tensor, scale: float) -> Tensor:
    """A tile of scaled logits in fp32 (or wider), with the exact one at the target."""
    x_NV = capped(z_NV, None, z_target_N.dtype).mul_(scale)
    return put_target(x_NV, target_N, z_target_N)


def fold_stats(
    z_NV: Tensor,
    r_NV: Tensor | None,
    target_N: Tensor,
    z_target_2N: Tensor,
    state_SN: Tensor,
    seen: int,
    scale: float,
) -> Tensor:
    """The running sums [S, N] with one more tile, of which `seen` columns came before.

    All sums are relative to the running maximum, so that an offset that all logits share cancels.
    """
    max_N, sum_N, dot_N, total_N = state_SN[:4]
    x_NV = exact_tile(z_NV, target_N, z_target_2N[0], scale)
    new_N = torch.maximum(max_N, x_NV.amax(1))
    step_N = max_N - new_N
    decay_N = step_N.exp()

    x_NV = x_NV.sub_(new_N[:, None].to(x_NV.dtype))
    p_NV = exp_(x_NV.clone())
    state = [
        new_N,
        decay_N * sum_N + p_NV.sum(1),
        decay_N * (dot_N + step_N * sum_N) + (p_NV * x_NV).sum(1),
        total_N + step_N * seen + x_NV.sum(1),
    ]
    if r_NV is None:
        return torch.stack(state)

    # The same for the reference, and the gaps x - y weighted by p and by q.
    max_r_N, sum_r_N, gap_N, gap_r_N = state_SN[4:]
    y_NV = exact_tile(r_NV, target_N, z_target_2N[1], scale)
    new_r_N = torch.maximum(max_r_N, y_NV.amax(1))
    step_r_N = max_r_N - new_r_N
    decay_r_N = step_r_N.exp()

    y_NV = y_NV.sub_(new_r_N[:, None].to(y_NV.dtype))
    q_NV = exp_(y_NV.clone())
    gap_NV = x_NV.sub_(y_NV)
    shift_N = step_N - step_r_N
    state += [
        new_r_N,
        decay_r_N * sum_r_N + q_NV.sum(1),
        decay_N * (gap_N + shift_N * sum_N) + p_NV.mul_(gap_NV).sum(1),
        decay_r_N * (gap_r_N + shift_N * sum_r_N) + q_NV.mul_(gap_NV).sum(1),
    ]
    return torch.stack(state)


def stats_gradient(
    z_NV: Tensor,
    r_NV: Tensor | None,
    target_N: Tensor,
    z_target_2N: Tensor,
    max_2N: Tensor,
    letters_5N: Tensor,
    scale: float,
) -> None:
    """Overwrite z by exp(x) (A + B x + C y) + Q exp(y) + U, and by 0 at the target."""
    A_N, B_N, C_N, Q_N, U_N = letters_5N[:, :, None]
    x_NV = below_(exact_tile(z_NV, target_N, z_target_2N[0], scale), max_2N[0])
    factor_NV = (x_NV * B_N).add_(A_N)
    d_NV = exp_(x_NV)

    if r_NV is None:
        d_NV = d_NV.mul_(factor_NV).add_(U_N)
    else:
        y_NV = below_(exact_tile(r_NV, target_N, z_target_2N[1], scale), max_2N[1])
        factor_NV = factor_NV.addcmul_(y_NV, C_N)
        d_NV = d_NV.mul_(factor_NV).add_(U_N).addcmul_(exp_(y_NV), Q_N)

    zero_N = torch.zeros_like(max_2N[0])
    z_NV.copy_(put_target(d_NV, target_N, zero_N))


# ---- the operator, opaque to torch.compile


@torch.library.custom_op("longhaul::tiled_stats", mutates_args=())
def stats_op(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    target_N: Tensor,
    reference: list[Tensor],
    scale: float,
    tiles: list[int],
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(stats_6N, normalizers_4N, argmax_N): the first six fields of VocabStats; what the backward
    needs of the sums, see `finish`; and argmax.
    """
    N = len(hidden_ND)
    V = len(weight_VD)
    if target_N.device.type == "cpu":
        check_labels(target_N, V, IGNORE)
    z_target_2N = both_targets(hidden_ND, weight_VD, target_N, reference, tiles[0], scale)

    # fp64 costs nothing for [N] sums and keeps the sum of many small tiles exact. Maxima start
    # finite, so that (max - new) * 0 is 0.
    state_SN = hidden_ND.new_zeros(8 if reference else 4, N, dtype=torch.float64)
    state_SN[::4] = torch.finfo(torch.float32).min
    # argmax takes the logits as their product rounds them, whatever the target and the tiles.
    top_N = hidden_ND.new_full((N,), -torch.inf)
    argmax_N = torch.zeros(N, dtype=torch.long, device=hidden_ND.device)

    fold = fastest_body(fold_stats, kernels)
    for v, t, z_NV, r_NV, _ in logit_tiles(hidden_ND, weight_VD, reference, tiles):
        value_N, index_N = z_NV.max(1)
        target_in_tile_N = target_N[t] - v.start
        new_SN = fold(
            z_NV, r_NV, target_in_tile_N, z_target_2N[:, t], state_SN[:, t], v.start, scale
        )
        argmax_N[t] = torch.where(value_N > top_N[t], v.start + index_N, argmax_N[t])
        top_N[t] = torch.maximum(top_N[t], value_N)
        state_SN[:, t] = new_SN

    stats, normalizers = finish(state_SN, z_target_2N[0], target_N, V)
    dtype = z_target_2N.dtype
    return torch.stack(stats).to(dtype), torch.stack(normalizers).to(dtype), argmax_N


def finish(
    state_SN: Tensor, z_target_N: Tensor, target_N: Tensor, V: int
) -> tuple[list[Tensor], list[Tensor]]:
    """The six statistics of the sums over all tiles; the two maxima and the two logarithms of sums
    relative to them. Those of a missing reference are zeros.
    """
    max_N, sum_N, dot_N, total_N = state_SN[:4]
    log_N = sum_N.log()
    stats = [
        torch.where(target_N < 0, 0, z_target_N - max_N - log_N),
        max_N + log_N,
        log_N - dot_N / sum_N,
        log_N - total_N / V - math.log(V),
    ]
    if len(state_SN) == 4:
        zero_N = torch.zeros_like(log_N)
        return [*stats, zero_N, zero_N], [max_N, zero_N, log_N, zero_N]

    max_r_N, sum_r_N, gap_N, gap_r_N = state_SN[4:]
    log_r_N = sum_r_N.log()
    difference_N = log_N - log_r_N
    stats += [gap_N / sum_N - difference_N, difference_N - gap_r_N / sum_r_N]
    return stats, [max_N, max_r_N, log_N, log_r_N]


def both_targets(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    target_N: Tensor,
    reference: list[Tensor],
    token_tile: int,
    scale: float,
) -> Tensor:
    """Scaled target logits [2, N] of the policy and of the reference (zeros without one)."""
    z_N = target_logits(hidden_ND, weight_VD, target_N, token_tile, None)
    r_N = torch.zeros_like(z_N)
    if reference:
        r_N = target_logits(*reference, target_N, token_tile, None).to(z_N.dtype)
    return torch.stack([z_N, r_N]).mul_(scale)


def logit_tiles(
    hidden_ND: Tensor, weight_VD: Tensor, reference: list[Tensor], tiles: list[int]
) -> Iterator[tuple[slice, slice, Tensor, Tensor | None, Tensor]]:
    """Yield (columns, tokens, policy's tile, reference's tile or None, policy's columns so far).

    The tiles are in buffers that the next ones overwrite. The last item is [N, columns].
    """
    N = len(hidden_ND)
    V = len(weight_VD)
    token_tile, vocab_tile = tiles
    buffer = hidden_ND.new_empty(N * min(vocab_tile, V))
    r_buffer = None
    if reference:
        r_buffer = reference[0].new_empty(min(token_tile, N) * min(vocab_tile, V))

    for v in spans(V, vocab_tile):
        width = v.stop - v.start
        w_VD = weight_VD[v].to(hidden_ND.dtype)
        z_NV = buffer[: N * width].view(N, width)
        for t in spans(N, token_tile):
            torch.mm(hidden_ND[t], w_VD.t(), out=z_NV[t])
            r_NV = _reference_tile(reference, v, t, r_buffer) if reference else None
            yield v, t, z_NV[t], r_NV, z_NV


def _reference_tile(reference: list[Tensor], v: slice, t: slice, buffer: Tensor) -> Tensor:
    hidden_NE, weight_VE = reference
    return tile_logits(hidden_NE[t], weight_VE[v].to(hidden_NE.dtype), buffer)


@torch.library.custom_op("longhaul::tiled_stats_backward", mutates_args=())
def stats_backward_op(
    grad_6N: Tensor,
    stats_6N: Tensor,
    normalizers_4N: Tensor,
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
    """Gradients of hidden and weight; an empty tensor for one that is not needed."""
    V = len(weight_VD)
    z_target_2N = both_targets(hidden_ND, weight_VD, target_N, reference, tiles[0], scale)
    max_2N, log_2N = normalizers_4N[:2], normalizers_4N[2:]
    log_q_N = z_target_2N[1] - max_2N[1] - log_2N[1]
    letters_5N, d_target_N = letters(grad_6N, stats_6N, log_q_N, target_N, V, scale)
    letters_5N = relative_to_maxima(letters_5N, *log_2N)

    # The tiles below are 0 at the target, whose share of dh is the first term of its sum.
    dh_ND = stats_6N.new_empty(0)
    if need_hidden:
        dh_ND = _target_share(hidden_ND, weight_VD, target_N, d_target_N)
    dw_VD = torch.empty_like(weight_VD) if need_weight else weight_VD.new_empty(0)

    fill = fastest_body(stats_gradient, kernels)
    for v, t, z_NV, r_NV, all_NV in logit_tiles(hidden_ND, weight_VD, reference, tiles):
        target_in_tile_N = target_N[t] - v.start
        fill(
            z_NV,
            r_NV,
            target_in_tile_N,
            z_target_2N[:, t],
            max_2N[:, t],
            letters_5N[:, t],
            scale,
        )
        if need_hidden:
            add_product(dh_ND[t], z_NV, weight_VD[v].to(z_NV.dtype))

        # After the last tokens these columns are complete: one product over all tokens.
        if need_weight and t.stop == len(hidden_ND):
            put_target(all_NV, target_N - v.start, d_target_N.to(all_NV.dtype))
            set_product(dw_VD[v], all_NV.t(), hidden_ND)

    if need_hidden:
        dh_ND = dh_ND.to(hidden_ND.dtype)
    return dh_ND, dw_VD


def _target_share(
    hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, d_target_N: Tensor
) -> Tensor:
    """d_target times the target's weights, [N, D] in the dtype of the sums."""
    w_ND = weight_VD.index_select(0, target_N.clamp(min=0)).to(hidden_ND.dtype)
    return w_ND.to(d_target_N.dtype).mul_(d_target_N[:, None])


def letters(
    grad_6N: Tensor, stats_6N: Tensor, log_q_N: Tensor, target_N: Tensor, V: int, scale: float
) -> tuple[Tensor, Tensor]:
    """(A, B, C, Q, U) as [5, N], and all of dz at the target [N], where q is exp(log_q).

    There p - 1 is computed as expm1(log p), which is exact for p near 1.
    """
    logprob_N, _, entropy_N, _, kl_N, _ = stats_6N
    g_logprob, g_lse, g_entropy, g_certainty, g_kl, g_from = grad_6N * scale
    g_logprob = g_logprob.masked_fill(target_N < 0, 0)

    rest_N = g_lse + g_certainty + g_from - g_entropy * entropy_N - g_kl * kl_N
    A = rest_N - g_logprob
    B = g_kl - g_entropy
    C = -g_kl
    Q = -g_from
    U = -g_certainty / V

    d_target_N = (
        logprob_N.exp() * (rest_N + B * logprob_N + C * log_q_N)
        + Q * log_q_N.exp()
        + U
        - g_logprob * torch.expm1(logprob_N)
    )
    return torch.stack([A, B, C, Q, U]), d_target_N.masked_fill(target_N < 0, 0)


def relative_to_maxima(letters_5N: Tensor, log_N: Tensor, log_r_N: Tensor) -> Tensor:
    """The letters of exp(x) (A + B x + C y) + Q exp(y) + U.

    They follow from log p = x - log_sum, p = exp(x) exp(-log_sum), and the same for q.
    """
    A, B, C, Q, U = letters_5N
    A = A - B * log_N - C * log_r_N
    inverse_N = torch.exp(-log_N)
    return torch.stack([A * inverse_N, B * inverse_N, C * inverse_N, Q * torch.exp(-log_r_N), U])


@stats_op.register_fake
def _(hidden_ND, weight_VD, target_N, *_):
    N = len(hidden_ND)
    stats_6N = hidden_ND.new_empty(6, N, dtype=wide(hidden_ND.dtype))
    return stats_6N, stats_6N.new_empty(4, N), torch.empty_like(target_N, dtype=torch.long)


@stats_backward_op.register_fake
def _(grad_6N, stats_6N, normalizers_4N, hidden_ND, weight_VD, *args):
    need_hidden, need_weight = args[-2:]
    dh_ND = hidden_ND.new_empty(hidden_ND.shape) if need_hidden else stats_6N.new_empty(0)
    dw_VD = torch.empty_like(weight_VD) if need_weight else weight_VD.new_empty(0)
    return dh_ND, dw_VD


def _save(ctx, inputs, output):
    hidden_ND, weight_VD, target_N, reference, *ctx.options = inputs
    stats_6N, normalizers_4N, argmax_N = output
    ctx.save_for_backward(stats_6N, normalizers_4N, hidden_ND, weight_VD, target_N, *reference)
    ctx.mark_non_differentiable(normalizers_4N, argmax_N)


def _backward(ctx, grad_6N, _normalizers, _argmax):
    stats_6N, normalizers_4N, hidden_ND, weight_VD, target_N, *reference = ctx.saved_tensors
    need_hidden, need_weight = ctx.needs_input_grad[:2]
    dh_ND, dw_VD = stats_backward_op(
        grad_6N,
        stats_6N,
        normalizers_4N,
        hidden_ND,
        weight_VD,
        target_N,
        reference,
        *ctx.options,
        need_hidden,
        need_weight,
    )
    return (
        dh_ND if need_hidden else None,
        dw_VD if need_weight else None,
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
    """(index_NK, logit_NK, key_NK) of the k largest keys, sorted; not differentiable.

    key = perturb(logits / temperature, columns).
    """
    N = len(hidden_ND)
    V = len(weight_VD)
    if not 1 <= k <= V:
        raise ValueError(f"k={k} is out of range: give 1 to {V}, the size of the vocabulary")
    _check_temperature(temperature)
    no_labels_N = hidden_ND.new_zeros(N, dtype=torch.long)
    check_inputs(hidden_ND, weight_VD, no_labels_N, "none", vocab_tile)
    vocab_tile = vocab_tile or default_tiles(N, V, hidden_ND.device, "torch")[1]

    best = None
    with torch.no_grad():
        for v in spans(V, vocab_tile):
            w_DV = weight_VD[v].t().to(hidden_ND.dtype)
            z_NV = (hidden_ND @ w_DV).to(wide(hidden_ND.dtype)) / temperature
            index_NV = torch.arange(v.start, v.stop, device=z_NV.device).expand_as(z_NV)
            tile = (index_NV, z_NV, perturb(z_NV, v))
            best = _largest(tile, best, k)
    return best


def _largest(tile: tuple, best: tuple | None, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """(index, logit, key) of the k largest keys of a tile and of those found before."""
    if best is not None:
        tile = [torch.cat(pair, 1) for pair in zip(best, tile, strict=True)]
    key_NV = tile[2]
    keep_NK = key_NV.topk(min(k, key_NV.shape[1]), 1).indices
    return tuple(x.gather(1, keep_NK) for x in tile)


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
    """k tokens drawn without replacement from softmax(z / temperature).

    They are the k largest of z / temperature + Gumbel noise; k = 1 is an ordinary sample (Kool et
    al. 2019, arXiv 1903.06059). Returns what topk_logits does. The noise may be given, so that two
    methods can be compared on the same draw.
    """
    shape = (len(hidden_ND), len(weight_VD))
    if noise_NV is not None and noise_NV.shape != shape:
        raise ValueError(
            f"noise has shape {tuple(noise_NV.shape)}: give one number for each token of the input "
            f"and of the vocabulary, {shape}"
        )

    def perturb(z_NV: Tensor, v: slice) -> Tensor:
        if noise_NV is not None:
            return z_NV + noise_NV[:, v]
        noise = torch.empty_like(z_NV).exponential_(generator=generator)
        return z_NV + noise.log_().neg_()

    return topk_logits(
        hidden_ND, weight_VD, k, temperature=temperature, vocab_tile=vocab_tile, perturb=perturb
    )
