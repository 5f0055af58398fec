"""Backward Triton kernels of Native Sparse Attention (arXiv 2502.11089). Imports
nsa/triton/forward.py.

Letters and conventions as there. With p = exp2(s - lse) and delta = do . o of a branch (which is
also its gate's gradient):
dv = (gate p)^T do, ds = gate p (do v^T - delta) / sqrt(K), dq = ds k, dk = ds^T q. The gate
multiplies p in fp32, so that do needs no
second rounding. dq adds up in fp32 over the branches; every dk and dv has one writer. No atomics.
"""

import triton
import triton.language as tl

from nsa.triton.forward import load_rows, pairs_of, piece_of, seen, store_rows, tile_of


@triton.jit
def delta_kernel(
    do_ptr,
    cmp_ptr,
    slc_ptr,
    win_ptr,
    delta_ptr,
    rows,
    H,
    HEADS,
    K: tl.constexpr,
    KP: tl.constexpr,
    R: tl.constexpr,
):
    """delta [Z, H, 3] = do . o of each branch; o_win holds HEADS heads of each token."""
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    live, row = r < rows, r // HEADS * H + r % HEADS
    do = load_rows(do_ptr, row, live, K, KP).to(tl.float32)
    for branch in tl.static_range(3):
        part = load_rows(
            cmp_ptr if branch == 0 else slc_ptr if branch == 1 else win_ptr,
            r if branch == 2 else row,
            live,
            K,
            KP,
        )
        tl.store(delta_ptr + row * 3 + branch, tl.sum(do * part.to(tl.float32), 1), mask=live)


@triton.jit
def load_queries(
    q_ptr, do_ptr, lse_ptr, delta_ptr, gate_ptr, row, live, K: tl.constexpr, KP: tl.constexpr
):
    """q, do, lse, delta and gate of rows; the pointers of delta and gate stand at the branch."""
    lse = tl.load(lse_ptr + row, mask=live, other=float("inf"))  # dead rows: p = 0
    delta = tl.load(delta_ptr + row * 3, mask=live, other=0.0)
    gate = tl.load(gate_ptr + row * 3, mask=live, other=0.0).to(tl.float32)
    return load_rows(q_ptr, row, live, K, KP), load_rows(do_ptr, row, live, K, KP), lse, delta, gate


@triton.jit
def probabilities(rows, k_tile, hidden, scale2):
    """gate p of a tile."""
    q_tile, _, lse, _, gate = rows
    logit = tl.dot(q_tile, tl.trans(k_tile), input_precision="tf32x3") * scale2 - lse[:, None]
    if hidden is not None:
        logit = tl.where(hidden, float("-inf"), logit)
    return tl.exp2(logit) * gate[:, None]


@triton.jit
def slopes(rows, p, v_tile, scale):
    """ds of a tile, in the dtype of the values."""
    _, do_tile, _, delta, _ = rows
    dp = tl.dot(do_tile, tl.trans(v_tile), input_precision="tf32x3")
    return (p * (dp - delta[:, None]) * scale).to(v_tile.dtype)


# ---- queries against a range of keys


@triton.jit
def dq_fold(
    dq,
    rows,
    k_ptr,
    v_ptr,
    key_row,
    begin,
    end,
    stop,
    t,
    scale,
    scale2,
    G,
    K: tl.constexpr,
    KP: tl.constexpr,
    S: tl.constexpr,
    STRIDE: tl.constexpr,
    SPAN: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
):
    for s0 in range(begin, end, S):
        s = s0 + tl.arange(0, S)
        row = key_row + s.to(tl.int64) * G
        k_tile, v_tile = (
            load_rows(k_ptr, row, s < stop, K, KP),
            load_rows(v_ptr, row, s < stop, K, KP),
        )
        hidden = None
        if MASKED:
            age = t[:, None] - (s * STRIDE + SPAN - 1)[None, :]
            hidden = (age < 0) | (age >= WINDOW) | (s >= stop)[None, :]
        ds = slopes(rows, probabilities(rows, k_tile, hidden, scale2), v_tile, scale)
        dq = tl.dot(ds, k_tile, dq, input_precision="tf32x3")
    return dq


@triton.jit
def ranged_dq_kernel(
    q_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    gate_ptr,
    k_ptr,
    v_ptr,
    dq_ptr,
    tile_ptr,
    table_ptr,
    scale,
    scale2,
    H,
    G,
    HEADS_DQ,
    M: tl.constexpr,
    MP: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    STRIDE: tl.constexpr,
    SPAN: tl.constexpr,
    WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
):
    """dq += ds k over the keys that a query sees; the tiles and the keys without a mask as in
    ranged_forward_kernel.
    """
    g = tl.program_id(1)
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    x, token, tokens, key = tile_of(tile_ptr, index, table_ptr, KEYS)
    r = tl.arange(0, R)
    t, m = x + r // MP, r % MP
    live = (t < tokens) & (m < M)
    z, head = (token + t).to(tl.int64), g * M + m
    rows = load_queries(q_ptr, do_ptr, lse_ptr, delta_ptr, gate_ptr, z * H + head, live, K, KP)
    key_row = key.to(tl.int64) * G + g
    last = tl.minimum(x + R // MP, tokens) - 1
    begin, stop = seen(x - WINDOW, STRIDE, SPAN), seen(last, STRIDE, SPAN)
    low = begin + tl.cdiv(seen(last - WINDOW, STRIDE, SPAN) - begin, S) * S
    high = tl.maximum(low, begin + (seen(x, STRIDE, SPAN) - begin) // S * S)
    dq = load_rows(dq_ptr, z * HEADS_DQ + head, live, K, KP)
    dq = dq_fold(
        dq,
        rows,
        k_ptr,
        v_ptr,
        key_row,
        begin,
        low,
        stop,
        t,
        scale,
        scale2,
        G,
        K,
        KP,
        S,
        STRIDE,
        SPAN,
        WINDOW,
        True,
    )
    dq = dq_fold(
        dq,
        rows,
        k_ptr,
        v_ptr,
        key_row,
        low,
        high,
        stop,
        t,
        scale,
        scale2,
        G,
        K,
        KP,
        S,
        STRIDE,
        SPAN,
        WINDOW,
        False,
    )
    dq = dq_fold(
        dq,
        rows,
        k_ptr,
        v_ptr,
        key_row,
        high,
        stop,
        stop,
        t,
        scale,
        scale2,
        G,
        K,
        KP,
        S,
        STRIDE,
        SPAN,
        WINDOW,
        True,
    )
    store_rows(dq_ptr, z * HEADS_DQ + head, live, dq, K, KP)


@triton.jit
def dkv_fold(
    dk,
    dv,
    q_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    gate_ptr,
    k_tile,
    v_tile,
    token,
    begin,
    end,
    stop,
    g,
    s,
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
    """Queries at positions [begin, end), none of them at `stop` or later."""
    for x in range(begin, end, R // MP):
        r = tl.arange(0, R)
        t, m = x + r // MP, r % MP
        rows = load_queries(
            q_ptr,
            do_ptr,
            lse_ptr,
            delta_ptr,
            gate_ptr,
            (token + t).to(tl.int64) * H + g * M + m,
            (t < stop) & (m < M),
            K,
            KP,
        )
        hidden = None
        if MASKED:
            age = t[:, None] - (s * STRIDE + SPAN - 1)[None, :]
            hidden = (age < 0) | (age >= WINDOW)
        p = probabilities(rows, k_tile, hidden, scale2)
        dv = tl.dot(tl.trans(p.to(v_tile.dtype)), rows[1], dv, input_precision="tf32x3")
        ds = slopes(rows, p, v_tile, scale)
        dk = tl.dot(tl.trans(ds), rows[0], dk, input_precision="tf32x3")
    return dk, dv


@triton.jit
def ranged_dkv_kernel(
    q_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    gate_ptr,
    k_ptr,
    v_ptr,
    dk_ptr,
    dv_ptr,
    tile_ptr,
    table_ptr,
    scale,
    scale2,
    H,
    G,
    M: tl.constexpr,
    MP: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    STRIDE: tl.constexpr,
    SPAN: tl.constexpr,
    WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
):
    """dk and dv of a tile of keys from all the queries that see one of them."""
    g = tl.program_id(1)
    s0, token, tokens, key = tile_of(tile_ptr, tl.program_id(0), table_ptr, KEYS)
    keys = tl.minimum(S, seen(tokens - 1, STRIDE, SPAN) - s0)
    s = s0 + tl.arange(0, S)
    row, live = (key + s).to(tl.int64) * G + g, s - s0 < keys
    k_tile, v_tile = load_rows(k_ptr, row, live, K, KP), load_rows(v_ptr, row, live, K, KP)
    Q: tl.constexpr = R // MP
    opens, closes = (
        s0 * STRIDE + SPAN - 1,
        (s0 + S - 1) * STRIDE + SPAN - 1,
    )  # where the tile's first and last key become visible
    begin, stop = opens, tl.minimum(tokens, closes + WINDOW)
    # whole steps of queries that see every key need no mask: [low, high)
    low = tl.minimum(begin + tl.cdiv(closes - begin, Q) * Q, tl.maximum(stop, begin))
    high = tl.maximum(low, low + (tl.minimum(tokens, opens + WINDOW) - low) // Q * Q)
    dk, dv = tl.zeros([S, KP], tl.float32), tl.zeros([S, KP], tl.float32)
    dk, dv = dkv_fold(
        dk,
        dv,
        q_ptr,
        do_ptr,
        lse_ptr,
        delta_ptr,
        gate_ptr,
        k_tile,
        v_tile,
        token,
        begin,
        low,
        stop,
        g,
        s,
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
        True,
    )
    dk, dv = dkv_fold(
        dk,
        dv,
        q_ptr,
        do_ptr,
        lse_ptr,
        delta_ptr,
        gate_ptr,
        k_tile,
        v_tile,
        token,
        low,
        high,
        stop,
        g,
        s,
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
        False,
    )
    dk, dv = dkv_fold(
        dk,
        dv,
        q_ptr,
        do_ptr,
        lse_ptr,
        delta_ptr,
        gate_ptr,
        k_tile,
        v_tile,
        token,
        high,
        stop,
        stop,
        g,
        s,
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
        True,
    )
    store_rows(dk_ptr, row, live, dk, K, KP)
    store_rows(dv_ptr, row, live, dv, K, KP)


# ---- selected branch


@triton.jit
def pair_backward_kernel(
    q_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    gate_ptr,
    k_ptr,
    v_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    block_ptr,
    first_ptr,
    start_ptr,
    order_ptr,
    tile_ptr,
    table_ptr,
    query0,
    scale,
    scale2,
    COUNT,
    Z,
    H,
    G,
    J,
    BLOCKS,
    M: tl.constexpr,
    MP: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    R: tl.constexpr,
    SIZE: tl.constexpr,
    L: tl.constexpr,
    LP: tl.constexpr,
):
    """A segment of at most SIZE pairs of one block: dq of every pair, and the segment's share of
    the block's dk and dv in fp32.
    """
    piece = tl.program_id(0)
    if tl.load(block_ptr + piece) == BLOCKS:
        return
    begin, end, g, x, token, keys = piece_of(
        piece, block_ptr, first_ptr, start_ptr, tile_ptr, table_ptr, J, SIZE, L
    )
    s = tl.arange(0, LP)
    row = (token + x + s).to(tl.int64) * G + g
    k_tile, v_tile = load_rows(k_ptr, row, s < keys, K, KP), load_rows(v_ptr, row, s < keys, K, KP)
    dk, dv = tl.zeros([LP, KP], tl.float32), tl.zeros([LP, KP], tl.float32)
    for start in range(begin, end, R // MP):
        r = tl.arange(0, R)
        position, m = start + r // MP, r % MP
        live = (position < end) & (m < M)
        z = pairs_of(order_ptr, position, live, query0, COUNT, Z).to(tl.int64)
        rows = load_queries(
            q_ptr, do_ptr, lse_ptr, delta_ptr, gate_ptr, z * H + g * M + m, live, K, KP
        )
        hidden = (s >= keys)[None, :] | ((token + x + s)[None, :] > z[:, None])
        p = probabilities(rows, k_tile, hidden, scale2)
        dv = tl.dot(tl.trans(p.to(v_tile.dtype)), rows[1], dv, input_precision="tf32x3")
        ds = slopes(rows, p, v_tile, scale)
        dk = tl.dot(tl.trans(ds), rows[0], dk, input_precision="tf32x3")
        store_rows(
            dq_ptr,
            position.to(tl.int64) * M + m,
            live,
            tl.dot(ds, k_tile, input_precision="tf32x3"),
            K,
            KP,
        )
    out = piece.to(tl.int64) * L + s
    store_rows(dk_ptr, out, s < keys, dk, K, KP)
    store_rows(dv_ptr, out, s < keys, dv, K, KP)


@triton.jit
def segment_sum_kernel(
    part_dk_ptr,
    part_dv_ptr,
    dk_ptr,
    dv_ptr,
    first_ptr,
    tile_ptr,
    table_ptr,
    G,
    J,
    K: tl.constexpr,
    KP: tl.constexpr,
    L: tl.constexpr,
    LP: tl.constexpr,
):
    """Adds a block's segments, in their order, to its fp32 dk and dv [Z, G, K]."""
    block = tl.program_id(0)
    g = block // J
    x, token, tokens, _ = tile_of(tile_ptr, block % J, table_ptr, 0)
    s = tl.arange(0, LP)
    live, row = s < tl.minimum(L, tokens - x), (token + x + s).to(tl.int64) * G + g
    dk, dv = load_rows(dk_ptr, row, live, K, KP), load_rows(dv_ptr, row, live, K, KP)
    first = tl.load(first_ptr + block).to(tl.int64)
    for piece in range(tl.load(first_ptr + block + 1) - tl.load(first_ptr + block)):
        part = (first + piece) * L + s
        dk += load_rows(part_dk_ptr, part, live, K, KP)
        dv += load_rows(part_dv_ptr, part, live, K, KP)
    store_rows(dk_ptr, row, live, dk, K, KP)
    store_rows(dv_ptr, row, live, dv, K, KP)
