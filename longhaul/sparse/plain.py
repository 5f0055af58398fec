"""Attention over chosen blocks by masks: the plain version, and the checks of both versions.

Every query is multiplied with every key, so that time and memory grow with T * S. It takes any
floating dtype, fp64 included. longhaul/sparse/engine.py reads only the chosen blocks.

Letters: B rows, T queries (the last T of S positions), H query heads, G KV heads, M = H/G, K head
dim, l tokens of a block, N blocks of a document, n chosen blocks of a query, C queries of a chunk.
"""

import itertools

import torch
from torch import Tensor

CHUNK_LOGITS = 2**24  # logits that exist at once in one chunk of queries: 64 MiB in fp32


def plain_block_sparse_attention(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    chosen_BTGn: Tensor,
    block: int = 64,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(o_BTHK, lse_BTH): as `block_sparse_attention`, in any floating dtype.

    ValueError also for a block behind the query's own one, or one that is chosen twice.
    """
    check_block_inputs(q_BTHK, k_BSGK, v_BSGK, chosen_BTGn, block, cu_seqlens)
    parts = []
    for queries, keys in documents(cu_seqlens, q_BTHK.shape[1], k_BSGK.shape[1]):
        k, v = k_BSGK[:, keys], v_BSGK[:, keys]
        parts += _attend_document(q_BTHK[:, queries], k, v, chosen_BTGn[:, queries], block)
    o_parts, lse_parts = zip(*parts, strict=True)
    return torch.cat(o_parts, 1), torch.cat(lse_parts, 1)


def _attend_document(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    chosen_BTGn: Tensor,
    block: int,
) -> list[tuple[Tensor, Tensor]]:
    """(o, lse) of each chunk of the queries of one document."""
    B, T, H, _ = q_BTHK.shape
    S = k_BSGK.shape[1]
    size = max(1, CHUNK_LOGITS // (B * H * S))
    first = S - T
    parts = []
    for start in range(0, T, size):
        stop = min(start + size, T)
        t_C = torch.arange(first + start, first + stop, device=q_BTHK.device)
        visible_BCGS = _visible_keys(chosen_BTGn[:, start:stop], t_C, S, block)
        parts.append(_attend_chunk(q_BTHK[:, start:stop], k_BSGK, v_BSGK, visible_BCGS))
    return parts


def _visible_keys(
    chosen_BCGn: Tensor,
    t_C: Tensor,
    S: int,
    block: int,
) -> Tensor:
    """[B,C,G,S]: whether a query reads a key: one of a chosen block, and not after the query."""
    own_C11 = t_C[:, None, None] // block
    if (chosen_BCGn > own_C11).any():
        raise _refusal("a block behind the query's own one", "the own one and earlier ones")
    blocks = -(-S // block)
    index = chosen_BCGn.long()
    used = index >= 0
    count_BCGN = torch.zeros(*index.shape[:3], blocks, dtype=torch.int32, device=index.device)
    count_BCGN.scatter_add_(-1, index.clamp_min(0), used.int())
    if (count_BCGN > 1).any():
        raise _refusal("a block twice for one query", "each block at most once")

    in_block_BCGS = (count_BCGN > 0).repeat_interleave(block, -1)[..., :S]
    seen_CS = torch.arange(S, device=t_C.device) <= t_C[:, None]
    return in_block_BCGS & seen_CS[:, None]


def _attend_chunk(
    q_BCHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    visible_BCGS: Tensor,
) -> tuple[Tensor, Tensor]:
    """(o_BCHK, lse_BCH); a query that reads no key has o = 0 and lse = -inf."""
    G, K = k_BSGK.shape[2:]
    q_BCGMK = q_BCHK.unflatten(2, (G, -1))
    logits = torch.einsum("bcgmk,bsgk->bcgms", q_BCGMK, k_BSGK)
    wide = torch.promote_types(logits.dtype, torch.float32)
    logits_BCGMS = logits.to(wide) * K**-0.5

    # finite, so that the gradient of a query without keys is 0
    visible_BCG1S = visible_BCGS.unsqueeze(3)
    least = torch.finfo(wide).min
    logits_BCGMS = logits_BCGMS.masked_fill(~visible_BCG1S, least)
    lse_BCGM = logits_BCGMS.logsumexp(-1)
    p_BCGMS = (logits_BCGMS - lse_BCGM.unsqueeze(-1)).exp() * visible_BCG1S
    o_BCGMK = torch.einsum("bcgms,bsgk->bcgmk", p_BCGMS.to(v_BSGK.dtype), v_BSGK)

    blind_BCG1 = ~visible_BCG1S.any(-1)
    lse_BCGM = lse_BCGM.masked_fill(blind_BCG1, -torch.inf)
    return o_BCGMK.flatten(2, 3), lse_BCGM.flatten(2, 3)


# ---- documents and checks


def documents(
    cu_seqlens: Tensor | None,
    T: int,
    S: int,
) -> list[tuple[slice, slice]]:
    """(queries, keys) of each document of a row; without boundaries the row is one document."""
    if cu_seqlens is None:
        return [(slice(0, T), slice(0, S))]
    ends = cu_seqlens.tolist()  # keep it on the host: on CUDA this waits for the device
    pairs = list(itertools.pairwise(ends))
    if ends[0] != 0 or ends[-1] != T or any(start >= end for start, end in pairs):
        raise _refusal(f"cu_seqlens={ends} for T={T}", "boundaries increasing from 0 to T")
    return [(slice(start, end), slice(start, end)) for start, end in pairs]


def check_block_inputs(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    chosen_BTGn: Tensor,
    block: int,
    cu_seqlens: Tensor | None,
) -> None:
    """ValueError for shapes and dtypes that do not fit each other."""
    B, T, H, K = q_BTHK.shape
    _, S, G, _ = k_BSGK.shape
    if not 1 <= T <= S:
        raise _refusal(f"{T} queries of {S} positions", "1 to S queries, the last ones")
    if H % G:
        raise _refusal(f"{H} query heads, {G} KV heads", "a multiple")
    for name, x, shape in (("k", k_BSGK, (B, S, G, K)), ("v", v_BSGK, (B, S, G, K))):
        if tuple(x.shape) != shape or x.dtype != q_BTHK.dtype:
            given = f"{name} {x.dtype} {tuple(x.shape)}"
            raise _refusal(given, f"{q_BTHK.dtype} {shape}")
    if chosen_BTGn.shape[:3] != (B, T, G) or chosen_BTGn.shape[3] < 1:
        raise _refusal(f"chosen {tuple(chosen_BTGn.shape)}", f"({B}, {T}, {G}, n), n >= 1")
    if chosen_BTGn.dtype not in (torch.int32, torch.int64):
        raise _refusal(f"chosen {chosen_BTGn.dtype}", "int32 indices of blocks")
    if block < 1:
        raise _refusal(f"block={block}", "at least 1 token")
    if cu_seqlens is not None:
        _check_boundaries(cu_seqlens, T, S)


def check_engine_dtype(q_BTHK: Tensor) -> None:
    """ValueError for dtypes that only the plain version takes."""
    if q_BTHK.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise _refusal(f"{q_BTHK.dtype}", "fp32, bf16, fp16, or the plain version")


def _check_boundaries(cu_seqlens: Tensor, T: int, S: int) -> None:
    if T != S:
        raise _refusal(f"cu_seqlens with {T} queries of {S} positions", "as many of both")
    integers = cu_seqlens.dtype in (torch.int32, torch.int64)
    if not integers or cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        given = f"cu_seqlens {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
        raise _refusal(given, "int32 or int64 [documents + 1]")


def _refusal(given: str, allowed: str) -> ValueError:
    return ValueError(
        f"block_sparse_attention: given {given}; allowed: {allowed}; remedy: see its docstring"
    )
