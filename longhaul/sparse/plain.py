"""Block-sparse attention in plain operators: the equations, with a dense mask per chunk of queries.

Letters: B rows, T queries, the last of S positions, H query heads, G KV heads, M = H/G, K head
dimension, C queries of a chunk, N blocks, n chosen ones.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK = 64  # queries whose mask exists at once


def plain_block_sparse_attention(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    chosen_BTGn: Tensor,
    block: int = 64,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """o [B, T, H, K] and the natural log-sum-exp [B, T, H] in fp32 of each query's attention over
    the keys of its chosen blocks up to itself; -1 is no block.
    """
    assert cu_seqlens is None
    T, S = q_BTHK.shape[1], k_BSGK.shape[1]
    outputs = []
    for start in range(0, T, CHUNK):
        few = slice(start, start + CHUNK)
        inputs = q_BTHK[:, few], k_BSGK, v_BSGK, chosen_BTGn[:, few], block, S - T + start
        outputs.append(checkpoint(_chunk, *inputs, use_reentrant=False, preserve_rng_state=False))
    o, lse = zip(*outputs, strict=True)
    return torch.cat(o, dim=1), torch.cat(lse, dim=1)


def _chunk(q_BCHK, k_BSGK, v_BSGK, chosen_BCGn, block, first):
    B, C, H, K = q_BCHK.shape
    S, G = k_BSGK.shape[1:3]
    wide = torch.promote_types(q_BCHK.dtype, torch.float32)
    index_BCGn = chosen_BCGn.long() + 1
    read_BCGN = torch.zeros(B, C, G, -(-S // block) + 1, dtype=torch.bool, device=q_BCHK.device)
    read_BCGN = read_BCGN.scatter(-1, index_BCGn, True)[..., 1:]
    read_BCGS = read_BCGN.repeat_interleave(block, dim=-1)[..., :S]
    key_S = torch.arange(S, device=q_BCHK.device)
    query_C1 = torch.arange(first, first + C, device=q_BCHK.device)[:, None]
    read_BCGS = read_BCGS & (key_S <= query_C1)[None, :, None]

    q = q_BCHK.unflatten(2, (G, H // G)).to(wide) * K**-0.5
    logits = torch.einsum("bcgmk,bsgk->bcgms", q, k_BSGK.to(wide))
    logits = logits.masked_fill(~read_BCGS[:, :, :, None], -torch.inf)
    lse = logits.logsumexp(-1)
    p = (logits - lse[..., None]).exp()
    o = torch.einsum("bcgms,bsgk->bcgmk", p, v_BSGK.to(wide))
    return o.flatten(2, 3).to(q_BCHK.dtype), lse.flatten(2)
