"""Backward Triton kernels of Native Sparse Attention (arXiv 2502.11089).

Letters, rows of a tile, key ranges and shared arguments are those of nsa/triton/forward.py.

With p = exp2(logit - lse) and delta = do . o of a branch, which is also the gradient of its gate:

    dv = (gate p)^T do
    ds = gate p (do v^T - delta) / sqrt(K)
    dq = ds k
    dk = ds^T q

The gate multiplies p in fp32, so that do needs no second rounding. dq adds up in fp32 over the
branches. Every element of dk and dv has one program that writes it: no atomics, and results repeat
bit for bit.

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
    key_bounds,
    keys_ended,
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
    """gate p of a tile; `hidden` is None if every row sees every key."""
    q_tile, _, lse, _, gate = queries
    exponent = product(q_tile, tl.trans(k_tile)) * scale2 - lse[:, None]
    if hidden is not None:
        exponent = tl.where(hidden, float("-inf"), exponent)
    return tl.exp2(exponent) * gate[:, None]


@triton.jit
def logit_gradients(queries, p, v_tile, scale):
    """ds of a tile from its gated probabilities, in the dtype of the values."""
    _, do_tile, _, delta, _ = queries
    dp = product(do_tile, tl.trans(v_tile))
    return (p * (dp - delta[:, None]) * scale).to(v_tile.dtype)


# ---- queries against a range of keys: the compressed branch and the window


@triton.jit
def add_dq_of_keys(
    dq,
    queries,
    keys,  # (k_ptr, v_ptr, row of the document's first key, G)
    begin,
    end,
    stop,  # keys from here on do not exist for this tile
    t,
    scale,
    scale2,
    K: tl.constexpr,
    KP: tl.constexpr,
    S: tl.constexpr,
    STRIDE: tl.constexpr,
    SPAN: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
):
    """dq + ds k over the keys [begin, end)."""
    k_ptr, v_ptr, key_row, G = keys
    for s0 in range(begin, end, S):
        s = s0 + tl.arange(0, S)
        row = key_row + s.to(tl.int64) * G
        k_tile = load_rows(k_ptr, row, s < stop, K, KP)
        v_tile = load_rows(v_ptr, row, s < stop, K, KP)

        hidden = None
        if MASKED:
            age = t[:, None] - (s * STRIDE + SPAN - 1)[None, :]
            hidden = (age < 0) | (age >= WINDOW) | (s >= stop)[None, :]
        p = gated_probabilities(queries, k_tile, hidden, scale2)
        ds = logit_gradients(queries, p, v_tile, scale)
        dq = add_product(ds, k_tile, dq)
    return dq


@triton.jit
def ranged_dq_kernel(
    # tensors
    q_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    gate_ptr,
    k_ptr,
    v_ptr,
    dq_ptr,
    # tables
    tile_ptr,
    table_ptr,
    # numbers
    scale,
    scale2,
    H,
    G,
    HEADS_DQ,
    # sizes of heads and tiles
    M: tl.constexpr,
    MP: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    # range of keys
    STRIDE: tl.constexpr,
    SPAN: tl.constexpr,
    WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
):
    """dq += ds k of a tile of queries, over the same keys as in ranged_forward_kernel."""
    g = tl.program_id(1)
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    x, token, tokens, key = load_tile(tile_ptr, index, table_ptr, KEYS)

    r = tl.arange(0, R)
    t = x + r // MP
    m = r % MP
    valid = (t < tokens) & (m < M)
    z = (token + t).to(tl.int64)
    head = g * M + m
    pointers = (q_ptr, do_ptr, lse_ptr, delta_ptr, gate_ptr)
    queries = load_queries(pointers, z * H + head, valid, K, KP)

    keys = (k_ptr, v_ptr, key.to(tl.int64) * G + g, G)
    last = tl.minimum(x + R // MP, tokens) - 1
    bounds = key_bounds(x, last, S, STRIDE, SPAN, WINDOW)
    dq = load_rows(dq_ptr, z * HEADS_DQ + head, valid, K, KP)
    for part in tl.static_range(3):
        dq = add_dq_of_keys(
            dq,
            queries,
            keys,
            bounds[part],
            bounds[part + 1],
            bounds[3],
            t,
            scale,
            scale2,
            K,
            KP,
            S,
            STRIDE,
            SPAN,
            WINDOW,
            MASKED=part != 1,
        )
    store_rows(dq_ptr, z * HEADS_DQ + head, valid, dq, K, KP)


# ---- keys against the range of queries that see them


@triton.jit
def query_bounds(
    s0,
    tokens,
    Q: tl.constexpr,  # queries of a step
    S: tl.constexpr,
    STRIDE: tl.constexpr,
    SPAN: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """(begin, low, high, stop) of the tokens that see the keys s0..s0+S-1.

    Some of these keys are seen by the tokens [begin, stop). All of them are seen by [low, high),
    which therefore needs no mask; low and high are a whole number of steps of Q tokens after begin.
    """
    # where the first and the last key become visible
    opens = s0 * STRIDE + SPAN - 1
    closes = (s0 + S - 1) * STRIDE + SPAN - 1

    begin = opens
    stop = tl.minimum(tokens, closes + WINDOW)
    low = begin + tl.cdiv(closes - begin, Q) * Q
    low = tl.minimum(low, tl.maximum(stop, begin))
    end_of_all = tl.minimum(tokens, opens + WINDOW)
    high = tl.maximum(low, low + (end_of_all - low) // Q * Q)
    return begin, low, high, stop


@triton.jit
def add_dkv_of_queries(
    dk,
    dv,
    pointers,  # (q_ptr, do_ptr, lse_ptr, delta_ptr, gate_ptr)
    k_tile,
    v_tile,
    s,
    token,
    begin,
    end,
    stop,  # tokens from here on do not exist, or see none of the keys
    g,
    scale,
    scale2,
    H,
    M: tl.constexpr,
    MP: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    R: tl.constexpr,
    STRIDE: tl.constexpr,
    SPAN: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
):
    """dk + ds^T q and dv + (gate p)^T do over the tokens [begin, end) of a document."""
    for x in range(begin, end, R // MP):
        r = tl.arange(0, R)
        t = x + r // MP
        m = r % MP
        row = (token + t).to(tl.int64) * H + g * M + m
        queries = load_queries(pointers, row, (t < stop) & (m < M), K, KP)
        q_tile, do_tile, _, _, _ = queries

        hidden = None
        if MASKED:
            age = t[:, None] - (s * STRIDE + SPAN - 1)[None, :]
            hidden = (age < 0) | (age >= WINDOW)
        p = gated_probabilities(queries, k_tile, hidden, scale2)
        dv = add_product(tl.trans(p.to(v_tile.dtype)), do_tile, dv)
        ds = logit_gradients(queries, p, v_tile, scale)
        dk = add_product(tl.trans(ds), q_tile, dk)
    return dk, dv


@triton.jit
def ranged_dkv_kernel(
    # tensors
    q_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    gate_ptr,
    k_ptr,
    v_ptr,
    dk_ptr,
    dv_ptr,
    # tables
    tile_ptr,
    table_ptr,
    # numbers
    scale,
    scale2,
    H,
    G,
    # sizes of heads and tiles
    M: tl.constexpr,
    MP: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    # range of keys
    STRIDE: tl.constexpr,
    SPAN: tl.constexpr,
    WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
):
    """dk and dv of a tile of keys, from all the queries that see one of them."""
    g = tl.program_id(1)
    s0, token, tokens, key = load_tile(tile_ptr, tl.program_id(0), table_ptr, KEYS)

    keys = tl.minimum(S, keys_ended(tokens - 1, STRIDE, SPAN) - s0)
    s = s0 + tl.arange(0, S)
    row = (key + s).to(tl.int64) * G + g
    valid = s - s0 < keys
    k_tile = load_rows(k_ptr, row, valid, K, KP)
    v_tile = load_rows(v_ptr, row, valid, K, KP)

    pointers = (q_ptr, do_ptr, lse_ptr, delta_ptr, gate_ptr)
    bounds = query_bounds(s0, tokens, R // MP, S, STRIDE, SPAN, WINDOW)
    dk = tl.zeros([S, KP], tl.float32)
    dv = tl.zeros([S, KP], tl.float32)
    for part in tl.static_range(3):
        dk, dv = add_dkv_of_queries(
            dk,
            dv,
            pointers,
            k_tile,
            v_tile,
            s,
            token,
            bounds[part],
            bounds[part + 1],
            bounds[3],
            g,
            scale,
            scale2,
            H,
            M,
            MP,
            K,
            KP,
            R,
            STRIDE,
            SPAN,
            WINDOW,
            MASKED=part != 1,
        )
    store_rows(dk_ptr, row, valid, dk, K, KP)
    store_rows(dv_ptr, row, valid, dv, K, KP)


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
