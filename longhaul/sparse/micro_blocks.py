"""Attention over blocks of a few tokens, one choice for all heads (QSA): a plain reference, so that
layers of this kind can be trained, checked and compared. Nothing in longhaul uses it.

    kbar[b] = mean of the indexer's keys of the r tokens of the whole block b
    I[t, b] = sum over heads j of relu(q_j[t] . kbar[b]) / sqrt(E)

A query reads the best budget / r of the blocks that end before it, the lower index first on a tie,
and the unfinished block that it is in. The indexer's loss is KL(p || softmax(I)) over the chosen
blocks, where p is attention's probability of each, summed over heads and normalised; it is a
constant. A budget of the row's length is full attention, and the loss that of a dense warm-up.

Every query is multiplied with every key, chunk by chunk, and the backward computes a chunk again:
time grows with T * S, memory with T. It takes any floating dtype, fp64 included.

Letters: B rows, T queries, the last of S positions, H query heads, G KV heads, K head dimension, h
query heads of the indexer, E their dimension, N whole blocks, C queries of a chunk.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_LOGITS = 2**24  # logits that exist at once in one chunk of queries: 64 MiB in fp32


def micro_block_attention(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    q_BThE: Tensor,
    k_BSE: Tensor,
    r: int = 4,
    budget: int = 2048,
) -> tuple[Tensor, Tensor]:
    """(o_BTHK, kl_BT) of one document in each row. The gradients of o are those of q, k and v, and
    of the loss those of the indexer's queries and keys: neither sees the other.
    """
    B, T, H, _ = q_BTHK.shape
    S = k_BSGK.shape[1]
    k_BNE = pooled_keys(k_BSE, r)
    size = max(16, CHUNK_LOGITS // (B * H * S))
    outputs = []
    for start in range(0, T, size):
        few = slice(start, min(start + size, T))
        position_C = torch.arange(S - T + few.start, S - T + few.stop, device=q_BTHK.device)
        inputs = q_BTHK[:, few], k_BSGK, v_BSGK, q_BThE[:, few], k_BNE
        numbers = position_C, r, budget // r
        outputs.append(checkpoint(_attend_chunk, *inputs, *numbers, use_reentrant=False))
    o_parts, kl_parts = zip(*outputs, strict=True)
    return torch.cat(o_parts, 1), torch.cat(kl_parts, 1)


def pooled_keys(k_BSE: Tensor, r: int) -> Tensor:
    """kbar [B, N, E] of each whole block, summed in fp32 or wider."""
    N = k_BSE.shape[1] // r
    blocks_BNrE = k_BSE[:, : N * r].unflatten(1, (N, r))
    return _wide(blocks_BNrE).mean(2).to(k_BSE.dtype)


def block_scores(q_BChE: Tensor, k_BNE: Tensor) -> Tensor:
    """I [B, C, N] in fp32 or wider."""
    logits = torch.einsum("bche,bne->bchn", _wide(q_BChE), _wide(k_BNE))
    return logits.relu().sum(2) * q_BChE.shape[-1] ** -0.5


def choose(
    scores_BCN: Tensor,
    position_C: Tensor,
    r: int,
    most: int,
) -> Tensor:
    """bool [B, C, N]: which blocks a query reads besides its own."""
    N = scores_BCN.shape[-1]
    ends_N = torch.arange(1, N + 1, device=scores_BCN.device) * r
    whole_CN = ends_N <= position_C[:, None]
    scores_BCN = scores_BCN.masked_fill(~whole_CN, -torch.inf)
    order_BCN = scores_BCN.sort(dim=-1, descending=True, stable=True).indices
    chosen_BCN = torch.zeros_like(scores_BCN, dtype=torch.bool)
    return chosen_BCN.scatter(-1, order_BCN[..., :most], True) & whole_CN


def _attend_chunk(
    q_BCHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    q_BChE: Tensor,
    k_BNE: Tensor,
    position_C: Tensor,
    r: int,
    most: int,
) -> tuple[Tensor, Tensor]:
    """(o_BCHK, kl_BC) of some queries."""
    G, K = k_BSGK.shape[2:]
    scores_BCN = block_scores(q_BChE, k_BNE)
    chosen_BCN = choose(scores_BCN.detach(), position_C, r, most)
    visible_BCS = _visible_keys(chosen_BCN, position_C, r, k_BSGK.shape[1])

    q_BCGMK = _wide(q_BCHK).unflatten(2, (G, -1))
    logits_BCGMS = torch.einsum("bcgmk,bsgk->bcgms", q_BCGMK, _wide(k_BSGK)) * K**-0.5
    hidden_BC11S = ~visible_BCS[:, :, None, None]
    p_BCGMS = logits_BCGMS.masked_fill(hidden_BC11S, -torch.inf).softmax(-1)
    o_BCGMK = torch.einsum("bcgms,bsgk->bcgmk", p_BCGMS, _wide(v_BSGK))

    mass_BCS = p_BCGMS.detach().sum((2, 3))
    kl_BC = _divergence(scores_BCN, chosen_BCN, mass_BCS, r)
    return o_BCGMK.flatten(2, 3).to(q_BCHK.dtype), kl_BC


def _visible_keys(
    chosen_BCN: Tensor,
    position_C: Tensor,
    r: int,
    S: int,
) -> Tensor:
    """bool [B, C, S]: keys of chosen blocks, and of the query's own one up to itself."""
    key_S = torch.arange(S, device=position_C.device)
    own_CS = (key_S <= position_C[:, None]) & (key_S >= position_C[:, None] // r * r)
    in_blocks = chosen_BCN.repeat_interleave(r, -1)
    return F.pad(in_blocks, (0, S - in_blocks.shape[-1])) | own_CS


def _divergence(
    scores_BCN: Tensor,
    chosen_BCN: Tensor,
    mass_BCS: Tensor,
    r: int,
) -> Tensor:
    """kl [B, C]; 0 for a query that chose no block, or gives its chosen ones nothing."""
    N = scores_BCN.shape[-1]
    mass_BCN = mass_BCS[..., : N * r].unflatten(-1, (N, r)).sum(-1) * chosen_BCN
    tiny = torch.finfo(mass_BCN.dtype).tiny
    p_BCN = mass_BCN / mass_BCN.sum(-1, keepdim=True).clamp(min=tiny)
    # finite, so that a block that is not chosen adds 0
    least = torch.finfo(scores_BCN.dtype).min
    log_share_BCN = scores_BCN.masked_fill(~chosen_BCN, least).log_softmax(-1)
    return (torch.xlogy(p_BCN, p_BCN) - p_BCN * log_share_BCN).sum(-1)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
