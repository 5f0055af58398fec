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

from longhaul.sparse.nsa.triton.forward import (
    add_product,
    forced_keys,
    forced_steps,
    load_piece,
    load_rows,
    load_tile,
    product,
    store_rows,
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
    dq_ptr,  # [pairs of the part, M, K]
    dk_ptr,  # [segments of the part, L, K] fp32
    dv_ptr,
    # tables
    block_ptr,
    first_ptr,
    start_ptr,
    order_ptr,
    tile_ptr,
    table_ptr,
    # numbers
    bucket0,
    pair0,
    buckets,
    scale,
    scale2,
    COUNT,
    Z,
    H,
    G,
    J,
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
    tables = (block_ptr, first_ptr, start_ptr, tile_ptr, table_ptr)
    begin, end, g, token = load_piece(tl.program_id(0), tables, bucket0, J, buckets, SIZE)
    if begin >= end:
        return

    s = tl.arange(0, LP)
    row = (token + s).to(tl.int64) * G + g
    k_tile = load_rows(k_ptr, row, s < L, K, KP)
    v_tile = load_rows(v_ptr, row, s < L, K, KP)
    hidden = None
    if L != LP:
        hidden = (s >= L)[None, :]

    pointers = (q_ptr, do_ptr, lse_ptr, delta_ptr, gate_ptr)
    dk = tl.zeros([LP, KP], tl.float32)
    dv = tl.zeros([LP, KP], tl.float32)
    for start in range(begin, end, R // MP):
        r = tl.arange(0, R)
        position = start + r // MP
        m = r % MP
        valid = (position < end) & (m < M)
        pair = tl.load(order_ptr + position, mask=valid, other=0)
        z = (pair // COUNT % Z).to(tl.int64)
        queries = load_queries(pointers, z * H + g * M + m, valid, K, KP)
        q_tile, do_tile, _, _, _ = queries

        p = gated_probabilities(queries, k_tile, hidden, scale2)
        dv = add_product(tl.trans(p.to(v_tile.dtype)), do_tile, dv)
        ds = logit_gradients(queries, p, v_tile, scale)
        dk = add_product(tl.trans(ds), q_tile, dk)
        out = (pair - pair0).to(tl.int64) * M + m
        store_rows(dq_ptr, out, valid, product(ds, k_tile), K, KP)

    out = tl.program_id(0).to(tl.int64) * L + s
    store_rows(dk_ptr, out, s < L, dk, K, KP)
    store_rows(dv_ptr, out, s < L, dv, K, KP)


@triton.jit
def far_dkv_kernel(
    # tensors
    q_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    gate_ptr,
    k_ptr,
    v_ptr,
    dk_ptr,  # [KV heads, segments, L, K] fp32
    dv_ptr,
    # tables
    far_ptr,  # block of each segment, and its first token inside the document
    tile_ptr,
    table_ptr,
    # numbers
    scale,
    scale2,
    H,
    G,
    # sizes of heads, tiles and blocks
    M: tl.constexpr,
    MP: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    R: tl.constexpr,
    SIZE: tl.constexpr,  # tokens of a full segment
    L: tl.constexpr,
    LP: tl.constexpr,
):
    """A segment's share of dk and dv of a first block, which all later tokens read."""
    g = tl.program_id(1)
    index = tl.program_id(0)
    block = tl.load(far_ptr + 2 * index)
    first = tl.load(far_ptr + 2 * index + 1)
    x, token, tokens, _key = load_tile(tile_ptr, block, table_ptr, 0)

    s = tl.arange(0, LP)
    row = (token + x + s).to(tl.int64) * G + g
    k_tile = load_rows(k_ptr, row, s < L, K, KP)
    v_tile = load_rows(v_ptr, row, s < L, K, KP)
    hidden = None
    if L != LP:
        hidden = (s >= L)[None, :]

    pointers = (q_ptr, do_ptr, lse_ptr, delta_ptr, gate_ptr)
    dk = tl.zeros([LP, KP], tl.float32)
    dv = tl.zeros([LP, KP], tl.float32)
    end = tl.minimum(first + SIZE, tokens)
    for start in range(first, end, R // MP):
        r = tl.arange(0, R)
        t = start + r // MP
        m = r % MP
        query = (token + t).to(tl.int64) * H + g * M + m
        queries = load_queries(pointers, query, (t < end) & (m < M), K, KP)
        q_tile, do_tile, _, _, _ = queries
        p = gated_probabilities(queries, k_tile, hidden, scale2)
        dv = add_product(tl.trans(p.to(v_tile.dtype)), do_tile, dv)
        ds = logit_gradients(queries, p, v_tile, scale)
        dk = add_product(tl.trans(ds), q_tile, dk)

    out = (g.to(tl.int64) * tl.num_programs(0) + index) * L + s
    store_rows(dk_ptr, out, s < L, dk, K, KP)
    store_rows(dv_ptr, out, s < L, dv, K, KP)


@triton.jit
def add_segments(
    dk,
    dv,
    dk_ptr,  # [segments, L, K] fp32
    dv_ptr,
    first,
    segments,
    s,
    valid,
    K: tl.constexpr,
    KP: tl.constexpr,
    L: tl.constexpr,
):
    """dk and dv of a block plus its segments, in their order."""
    for segment in range(segments):
        row = (first + segment).to(tl.int64) * L + s
        dk += load_rows(dk_ptr, row, valid, K, KP)
        dv += load_rows(dv_ptr, row, valid, K, KP)
    return dk, dv


@triton.jit
def segment_sum_kernel(
    # tensors
    part_dk_ptr,  # [segments, L, K] fp32
    part_dv_ptr,
    dk_ptr,  # [Z, G, K] fp32
    dv_ptr,
    # tables
    first_ptr,  # first segment of each bucket
    tile_ptr,
    table_ptr,
    # numbers
    bucket0,
    J,
    G,
    # sizes of heads and blocks
    K: tl.constexpr,
    KP: tl.constexpr,
    L: tl.constexpr,
    LP: tl.constexpr,
    FILL: tl.constexpr,
):
    """Adds the segments of a block, in their order, to its dk and dv; with FILL from zero."""
    block = tl.program_id(0)
    g = tl.program_id(1)
    bucket = bucket0 + g * J + block
    first = tl.load(first_ptr + bucket)
    segments = tl.load(first_ptr + bucket + 1) - first
    first -= tl.load(first_ptr + bucket0)
    x, token, tokens, _key = load_tile(tile_ptr, block, table_ptr, 0)

    s = tl.arange(0, LP)
    valid = s < tl.minimum(L, tokens - x)
    row = (token + x + s).to(tl.int64) * G + g
    dk = tl.zeros([LP, KP], tl.float32)
    dv = tl.zeros([LP, KP], tl.float32)
    if not FILL:
        dk = load_rows(dk_ptr, row, valid, K, KP)
        dv = load_rows(dv_ptr, row, valid, K, KP)

    dk, dv = add_segments(dk, dv, part_dk_ptr, part_dv_ptr, first, segments, s, valid, K, KP, L)
    store_rows(dk_ptr, row, valid, dk, K, KP)
    store_rows(dv_ptr, row, valid, dv, K, KP)


@triton.jit
def local_dkv_kernel(
    # tensors
    q_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    gate_ptr,
    k_ptr,
    v_ptr,
    sum_dk_ptr,  # [Z, HEADS_SUM, K] fp32: the segments of all parts but the last
    sum_dv_ptr,
    part_dk_ptr,  # [segments of the last part, L, K] fp32
    part_dv_ptr,
    far_dk_ptr,  # [KV heads, far segments, L, K] fp32
    far_dv_ptr,
    dk_ptr,
    dv_ptr,
    # tables
    first_ptr,  # first segment of each bucket
    first_far_ptr,  # first far segment of each block
    tile_ptr,
    table_ptr,
    # numbers
    bucket0,  # of the last part
    J,
    far_segments,  # of a KV head
    scale,
    scale2,
    H,
    G,
    HEADS_SUM,
    # sizes of heads, tiles and blocks
    M: tl.constexpr,
    MP: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    R: tl.constexpr,
    L: tl.constexpr,
    LP: tl.constexpr,
    LOCAL: tl.constexpr,
    SUMS: tl.constexpr,  # whether there are other parts
):
    """dk and dv of a block: the shares of its segments, and that of the tokens of LOCAL blocks from
    its first one on.
    """
    g = tl.program_id(1)
    block = tl.program_id(0)
    x, token, tokens, _key = load_tile(tile_ptr, block, table_ptr, 0)
    s = tl.arange(0, LP)
    keys = s < tl.minimum(L, tokens - x)
    row = (token + x + s).to(tl.int64)
    k_tile = load_rows(k_ptr, row * G + g, keys, K, KP)
    v_tile = load_rows(v_ptr, row * G + g, keys, K, KP)
    dk = tl.zeros([LP, KP], tl.float32)
    dv = tl.zeros([LP, KP], tl.float32)
    if SUMS:
        dk = load_rows(sum_dk_ptr, row * HEADS_SUM + g, keys, K, KP)
        dv = load_rows(sum_dv_ptr, row * HEADS_SUM + g, keys, K, KP)

    bucket = bucket0 + g * J + block
    first = tl.load(first_ptr + bucket)
    segments = tl.load(first_ptr + bucket + 1) - first
    first -= tl.load(first_ptr + bucket0)
    dk, dv = add_segments(dk, dv, part_dk_ptr, part_dv_ptr, first, segments, s, keys, K, KP, L)
    first_far = tl.load(first_far_ptr + block)
    segments = tl.load(first_far_ptr + block + 1) - first_far
    first_far += g * far_segments
    dk, dv = add_segments(dk, dv, far_dk_ptr, far_dv_ptr, first_far, segments, s, keys, K, KP, L)

    pointers = (q_ptr, do_ptr, lse_ptr, delta_ptr, gate_ptr)
    end = tl.minimum(x + LOCAL * L, tokens)
    for start in range(x, end, R // MP):
        r = tl.arange(0, R)
        t = start + r // MP
        m = r % MP
        query = (token + t).to(tl.int64) * H + g * M + m
        queries = load_queries(pointers, query, (t < end) & (m < M), K, KP)
        q_tile, do_tile, _, _, _ = queries

        hidden = (s >= L)[None, :] | ((x + s)[None, :] > t[:, None])
        p = gated_probabilities(queries, k_tile, hidden, scale2)
        dv = add_product(tl.trans(p.to(v_tile.dtype)), do_tile, dv)
        ds = logit_gradients(queries, p, v_tile, scale)
        dk = add_product(tl.trans(ds), q_tile, dk)
    store_rows(dk_ptr, row * G + g, keys, dk, K, KP)
    store_rows(dv_ptr, row * G + g, keys, dv, K, KP)


@triton.jit
def merge_dq_kernel(
    # tensors
    q_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    gate_ptr,
    k_ptr,
    v_ptr,
    part_dq_ptr,  # [pairs of the part, M, K]
    dq_ptr,
    # tables
    tile_ptr,
    table_ptr,
    # numbers
    start,  # first token of the part
    stop,
    scale,
    scale2,
    H,
    G,
    HEADS_DQ,
    # sizes of heads, tiles and blocks
    M: tl.constexpr,
    MP: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    R: tl.constexpr,
    L: tl.constexpr,
    LP: tl.constexpr,
    COUNT: tl.constexpr,
    INIT: tl.constexpr,
    LOCAL: tl.constexpr,
):
    """dq of a tile of queries, plus the shares of the forced blocks and of the pairs."""
    g = tl.program_id(1)
    x, token, tokens, _key = load_tile(tile_ptr, tl.program_id(0), table_ptr, 0)
    tokens = tl.minimum(tokens, stop - token)
    last = tl.minimum(x + R // MP, tokens) - 1

    r = tl.arange(0, R)
    t = x + r // MP
    m = r % MP
    valid = (t < tokens) & (m < M)
    z = (token + t).to(tl.int64)
    head = g * M + m
    pointers = (q_ptr, do_ptr, lse_ptr, delta_ptr, gate_ptr)
    queries = load_queries(pointers, z * H + head, valid, K, KP)

    dq = load_rows(dq_ptr, z * HEADS_DQ + head, valid, K, KP)
    steps = forced_steps(x, last, LP, L, INIT, LOCAL)
    for step in range(steps[2]):
        s, visible = forced_keys(step, steps, t, LP, L, INIT, LOCAL)
        row = (token + s).to(tl.int64) * G + g
        k_tile = load_rows(k_ptr, row, s <= last, K, KP)
        v_tile = load_rows(v_ptr, row, s <= last, K, KP)
        p = gated_probabilities(queries, k_tile, visible == 0, scale2)
        dq = add_product(logit_gradients(queries, p, v_tile, scale), k_tile, dq)

    pairs = tl.where(valid, t // L - (INIT + LOCAL - 1), 0)
    place = g.to(tl.int64) * (stop - start) + z - start
    for number in range(tl.minimum(tl.max(pairs, 0), COUNT)):
        row = (place * COUNT + number) * M + m
        dq += load_rows(part_dq_ptr, row, number < pairs, K, KP).to(tl.float32)
    store_rows(dq_ptr, z * HEADS_DQ + head, valid, dq, K, KP)
