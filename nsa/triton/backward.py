"""Backward Triton kernels of Native Sparse Attention (arXiv 2502.11089).

Letters, rows of a tile and shared arguments are those of nsa/triton/forward.py. The compressed
branch and the window are in nsa/triton/dense.py.

With p = exp2(logit - lse) and delta = do . o of a branch, which is also the gradient of its gate:

    dv = (gate p)^T do
    ds = gate p (do v^T - delta) / sqrt(K)
    dq = ds k
    dk = ds^T q

The gate multiplies p in fp32, so that do needs no second rounding. Every element of dk and dv has
one program that writes it: no atomics, and results repeat bit for bit.

Further arguments:

do_ptr                        [Z, H, K], gradient of the output
delta_ptr, gate_ptr           [Z, H, 3]; in kernels of one branch, starting at that branch
dq_ptr, dk_ptr, dv_ptr        like q_ptr and k_ptr
scale                         1 / sqrt(K)
"""

import triton
import triton.language as tl

from nsa.triton.forward import (
    add_product,
    load_piece,
    load_rows,
    load_tile,
    product,
    store_rows,
    tokens_of_pairs,
)

# ---- what all branches need


@triton.jit
def delta_kernel(
    # tensors
    do_ptr,
    cmp_ptr,
    slc_ptr,
    win_ptr,  # [Z, HEADS, K]: only the heads of the launch
    delta_ptr,
    # numbers
    rows,  # Z * HEADS
    H,
    HEADS,
    # sizes
    K: tl.constexpr,
    KP: tl.constexpr,
    R: tl.constexpr,
):
    """delta [Z, H, 3] = do . o of each branch."""
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    valid = r < rows
    row = r // HEADS * H + r % HEADS

    branches = (cmp_ptr, slc_ptr, win_ptr)
    row_of_branch = (row, row, r)
    do = load_rows(do_ptr, row, valid, K, KP).to(tl.float32)
    for branch in tl.static_range(3):
        o = load_rows(branches[branch], row_of_branch[branch], valid, K, KP)
        tl.store(
            delta_ptr + row * 3 + branch,
            tl.sum(do * o.to(tl.float32), 1),
            mask=valid,
        )


@triton.jit
def load_queries(
    pointers,  # (q_ptr, do_ptr, lse_ptr, delta_ptr, gate_ptr)
    row,
    valid,
    K: tl.constexpr,
    KP: tl.constexpr,
):
    """(q, do, lse, delta, gate) of a tile's rows."""
    q_ptr, do_ptr, lse_ptr, delta_ptr, gate_ptr = pointers
    lse = tl.load(lse_ptr + row, mask=valid, other=float("inf"))  # +inf: invalid rows have p = 0
    delta = tl.load(delta_ptr + row * 3, mask=valid, other=0.0)
    gate = tl.load(gate_ptr + row * 3, mask=valid, other=0.0).to(tl.float32)
    q_tile = load_rows(q_ptr, row, valid, K, KP)
    do_tile = load_rows(do_ptr, row, valid, K, KP)
    return q_tile, do_tile, lse, delta, gate


@triton.jit
def gated_probabilities(queries, k_tile, hidden, scale2):
    """gate p of a tile."""
    q_tile, _, lse, _, gate = queries
    exponent = product(q_tile, tl.trans(k_tile)) * scale2 - lse[:, None]
    exponent = tl.where(hidden, float("-inf"), exponent)
    return tl.exp2(exponent) * gate[:, None]


@triton.jit
def logit_gradients(queries, p, v_tile, scale):
    """ds of a tile from its gated probabilities, in the dtype of the values."""
    _, do_tile, _, delta, _ = queries
    dp = product(do_tile, tl.trans(v_tile))
    return (p * (dp - delta[:, None]) * scale).to(v_tile.dtype)


# ---- selected branch: tables and numbers of pairs as in forward.py


@triton.jit
def pair_backward_kernel(
    # tensors
    q_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    gate_ptr,
    k_ptr,
    v_ptr,
    dq_ptr,  # [P, M, K], in sorted order
    dk_ptr,  # [segments, L, K] fp32
    dv_ptr,
    # tables
    block_ptr,
    first_ptr,
    start_ptr,
    order_ptr,
    tile_ptr,
    table_ptr,
    # numbers
    query0,
    scale,
    scale2,
    COUNT,
    Z,
    H,
    G,
    J,
    BLOCKS,
    # sizes of heads, tiles and blocks
    M: tl.constexpr,
    MP: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    R: tl.constexpr,
    SIZE: tl.constexpr,  # pairs of a full segment
    L: tl.constexpr,
    LP: tl.constexpr,
):
    """dq of every pair of a segment, and the segment's share of its block's dk and dv.

    A popular block has far more pairs than others. Cut into segments, they run in parallel, and
    segment_sum_kernel adds the shares.
    """
    piece = tl.program_id(0)
    if tl.load(block_ptr + piece) == BLOCKS:
        return
    tables = (block_ptr, first_ptr, start_ptr, tile_ptr, table_ptr)
    begin, end, g, x, token, keys = load_piece(piece, tables, J, SIZE, L)

    s = tl.arange(0, LP)
    row = (token + x + s).to(tl.int64) * G + g
    k_tile = load_rows(k_ptr, row, s < keys, K, KP)
    v_tile = load_rows(v_ptr, row, s < keys, K, KP)

    pointers = (q_ptr, do_ptr, lse_ptr, delta_ptr, gate_ptr)
    dk = tl.zeros([LP, KP], tl.float32)
    dv = tl.zeros([LP, KP], tl.float32)
    for start in range(begin, end, R // MP):
        r = tl.arange(0, R)
        position = start + r // MP
        m = r % MP
        valid = (position < end) & (m < M)
        z = tokens_of_pairs(order_ptr, position, valid, query0, COUNT, Z).to(tl.int64)
        queries = load_queries(pointers, z * H + g * M + m, valid, K, KP)
        q_tile, do_tile, _, _, _ = queries

        hidden = (s >= keys)[None, :] | ((token + x + s)[None, :] > z[:, None])
        p = gated_probabilities(queries, k_tile, hidden, scale2)
        dv = add_product(tl.trans(p.to(v_tile.dtype)), do_tile, dv)
        ds = logit_gradients(queries, p, v_tile, scale)
        dk = add_product(tl.trans(ds), q_tile, dk)
        out = position.to(tl.int64) * M + m
        store_rows(dq_ptr, out, valid, product(ds, k_tile), K, KP)

    out = piece.to(tl.int64) * L + s
    store_rows(dk_ptr, out, s < keys, dk, K, KP)
    store_rows(dv_ptr, out, s < keys, dv, K, KP)


@triton.jit
def segment_sum_kernel(
    # tensors
    part_dk_ptr,  # [segments, L, K] fp32
    part_dv_ptr,
    dk_ptr,  # [Z, G, K] fp32
    dv_ptr,
    # tables
    first_ptr,
    tile_ptr,
    table_ptr,
    # numbers
    G,
    J,
    # sizes of heads and blocks
    K: tl.constexpr,
    KP: tl.constexpr,
    L: tl.constexpr,
    LP: tl.constexpr,
):
    """Adds the segments of a block, in their order, to its dk and dv."""
    block = tl.program_id(0)
    g = block // J
    x, token, tokens, _ = load_tile(tile_ptr, block % J, table_ptr, 0)

    s = tl.arange(0, LP)
    valid = s < tl.minimum(L, tokens - x)
    row = (token + x + s).to(tl.int64) * G + g
    dk = load_rows(dk_ptr, row, valid, K, KP)
    dv = load_rows(dv_ptr, row, valid, K, KP)

    first = tl.load(first_ptr + block).to(tl.int64)
    segments = tl.load(first_ptr + block + 1) - tl.load(first_ptr + block)
    for segment in range(segments):
        part = (first + segment) * L + s
        dk += load_rows(part_dk_ptr, part, valid, K, KP)
        dv += load_rows(part_dv_ptr, part, valid, K, KP)
    store_rows(dk_ptr, row, valid, dk, K, KP)
    store_rows(dv_ptr, row, valid, dv, K, KP)
