"""Triton kernels of exact attention over chosen blocks. blocks.py launches them and says how they
work together; tiles.py has what all kernels share.

Letters: Z tokens of all rows of the batch, H query heads, G KV heads, M = H/G, K head dim, n chosen
blocks of a query, J blocks of all documents. A query is a token under one KV head, y = g*Z + z, and
its pair with the i-th block that it has chosen has the number y*n + i.

Arguments that kernels share:

q_ptr, do_ptr        [Z, H, K]
lse_ptr, delta_ptr   [Z, H] fp32, the natural log-sum-exp
k_ptr, v_ptr         [rows of keys, G, K]
chosen_ptr           [Z, G, n], -1 = unused
part_*_ptr           results of the pairs of a part, [pairs, M, ...]
order_ptr            pair at each sorted position; pairs of one bucket are adjacent
start_ptr            sorted position of each bucket's first pair
bucket_ptr           bucket of each piece, of at most SIZE pairs
piece_ptr            first piece of each bucket
keys_ptr             [J, 2]: first key of each block, counted over all rows, and its keys
bucket0, buckets     first bucket of the part, and their number
y0                   first query of the part; its pairs' results are at row 0
chunks, J            buckets are (KV head, chunk of tokens, block)
tokens, before       queries of a row, and keys of a row before its first query
"""

import triton
import triton.language as tl

from longhaul.sparse.triton.tiles import (
    add_product,
    load_rows,
    padded,
    product,
    store_rows,
)

# ---- pieces: pairs of one block


@triton.jit
def load_piece(
    tables,  # (bucket_ptr, piece_ptr, start_ptr)
    bucket0,
    buckets,
    SIZE: tl.constexpr,
):
    """(begin, end, bucket) of a program: the sorted positions of its pairs, none if the part has no
    such piece.
    """
    bucket_ptr, piece_ptr, start_ptr = tables
    piece = tl.load(piece_ptr + bucket0) + tl.program_id(0)
    exists = piece < tl.load(piece_ptr + bucket0 + buckets)
    bucket = tl.load(bucket_ptr + piece, mask=exists, other=bucket0)
    number = piece - tl.load(piece_ptr + bucket)  # among the pieces of its bucket
    begin = tl.load(start_ptr + bucket) + number * SIZE
    end = tl.minimum(begin + SIZE, tl.load(start_ptr + bucket + 1))
    return begin, tl.where(exists, end, begin), bucket


@triton.jit
def load_keys(
    pointers,  # (k_ptr, v_ptr, keys_ptr)
    bucket,
    chunks,
    J,
    G,
    K: tl.constexpr,
    LP: tl.constexpr,
):
    """(k, v, place of each key, whether it exists) of a bucket's block."""
    k_ptr, v_ptr, keys_ptr = pointers
    entry = keys_ptr + 2 * (bucket % J)
    s = tl.arange(0, LP)
    exists = s < tl.load(entry + 1)
    place = tl.load(entry) + s
    row = place.to(tl.int64) * G + bucket // (J * chunks)
    k_tile = load_rows(k_ptr, row, exists, K)
    v_tile = load_rows(v_ptr, row, exists, K)
    return k_tile, v_tile, place, exists


@triton.jit
def load_pairs(
    order_ptr,
    position,
    end,
    numbers,  # (n, Z, G, tokens, before)
    y0,
    M: tl.constexpr,
    R: tl.constexpr,
):
    """Of each row: (whether it exists, its row in tensors of queries and among the results of the
    part, the place of its query among the keys). The pairs begin at a sorted position.
    """
    MP: tl.constexpr = triton.next_power_of_2(M)
    n, Z, G, tokens, before = numbers
    r = tl.arange(0, R)
    m = r % MP
    valid = (position + r // MP < end) & (m < M)
    pair = tl.load(order_ptr + position + r // MP, mask=valid, other=0)
    y = (pair // n).to(tl.int32)
    z = y % Z
    query = (z * G + y // Z).to(tl.int64) * M + m
    result = ((y - y0) * n + (pair % n).to(tl.int32)).to(tl.int64) * M + m
    return valid, query, result, z + (z // tokens + 1) * before


@triton.jit
def seen_keys(keys, exists, place):
    """[rows, keys]: which keys are not after the query, which may be in its own block."""
    return tl.where(exists, keys, 2147483647)[None, :] <= place[:, None]


@triton.jit
def pair_forward_kernel(
    # tensors
    q_ptr,
    k_ptr,
    v_ptr,
    part_o_ptr,
    part_lse_ptr,  # in base 2
    # tables
    order_ptr,
    start_ptr,
    bucket_ptr,
    piece_ptr,
    keys_ptr,
    # numbers
    bucket0,
    buckets,
    y0,
    n,
    Z,
    G,
    J,
    chunks,
    tokens,
    before,
    scale2,
    # sizes
    M: tl.constexpr,
    K: tl.constexpr,
    LP: tl.constexpr,
    R: tl.constexpr,
):
    """Attention of each pair's rows to the keys of its block, and their log-sum-exp."""
    QUERIES: tl.constexpr = R // triton.next_power_of_2(M)
    tables = (bucket_ptr, piece_ptr, start_ptr)
    begin, end, bucket = load_piece(tables, bucket0, buckets, QUERIES)
    if begin >= end:
        return

    pointers = (k_ptr, v_ptr, keys_ptr)
    block = load_keys(pointers, bucket, chunks, J, G, K, LP)
    k_tile, v_tile, keys, exists = block
    numbers = (n, Z, G, tokens, before)
    rows = load_pairs(order_ptr, begin, end, numbers, y0, M, R)
    valid, query, result, place = rows

    q_tile = load_rows(q_ptr, query, valid, K)
    seen = seen_keys(keys, exists, place)
    logits = product(q_tile, tl.trans(k_tile)) * scale2
    logits = tl.where(seen, logits, float("-inf"))
    top = tl.max(logits, 1)
    top = tl.where(valid, top, 0.0)
    p = tl.exp2(logits - top[:, None])
    mass = tl.where(valid, tl.sum(p, 1), 1.0)
    tl.store(part_lse_ptr + result, top + tl.log2(mass), mask=valid)
    o = product(p.to(v_tile.dtype), v_tile) / mass[:, None]
    store_rows(part_o_ptr, result, valid, o, K)


# ---- what belongs to queries: results of their pairs, in the order of their slots


@triton.jit
def merge_kernel(
    # tensors
    part_ptr,
    part_lse_ptr,
    chosen_ptr,
    out_ptr,
    lse_ptr,
    # numbers
    y0,
    y1,
    n,
    Z,
    G,
    # sizes
    M: tl.constexpr,
    K: tl.constexpr,
):
    """o and lse of queries from the results of their pairs; 0 and -inf without a pair. Without
    log-sum-exps dq, the sum over the pairs.

    The softmax over all of a query's blocks is the mean of the softmaxes over each of them,
    weighted by their shares of the mass. Their log-sum-exps hold these shares.
    """
    MP: tl.constexpr = triton.next_power_of_2(M)
    R: tl.constexpr = padded(M)  # few rows, so that registers hold them
    r = tl.arange(0, R)
    m = r % MP
    number = tl.program_id(0).to(tl.int64) * (R // MP) + r // MP  # of the query in the part
    y = y0 + number
    valid = (y < y1) & (m < M)
    choice = y % Z * G + y // Z
    acc = tl.zeros([R, padded(K)], tl.float32)
    top = tl.full([R], float("-inf"), tl.float32)
    mass = tl.zeros([R], tl.float32)
    for i in range(n):
        used = tl.load(chosen_ptr + choice * n + i, mask=valid, other=-1) >= 0
        row = (number * n + i) * M + m
        part = load_rows(part_ptr, row, used, K).to(tl.float32)
        if part_lse_ptr is None:
            acc += part
        else:
            lse = tl.load(part_lse_ptr + row, mask=used, other=float("-inf"))
            new_top = tl.maximum(top, lse)
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            shrink = tl.exp2(top - base)
            weight = tl.exp2(lse - base)
            acc = acc * shrink[:, None] + part * weight[:, None]
            mass = mass * shrink + weight
            top = new_top

    if part_lse_ptr is not None:
        some = tl.where(top == float("-inf"), 1.0, mass)
        acc /= some[:, None]
        lse = (top + tl.log2(some)) * 0.6931471805599453
        tl.store(lse_ptr + choice * M + m, lse, mask=valid)
    store_rows(out_ptr, choice * M + m, valid, acc, K)


# ---- backward: with p = exp(logit - lse) and delta = do . o,
#
#     dv = p^T do      ds = p (do v^T - delta) / sqrt(K)      dq = ds k      dk = ds^T q


@triton.jit
def delta_kernel(
    # tensors
    do_ptr,
    o_ptr,
    delta_ptr,
    # numbers
    rows,
    # sizes
    K: tl.constexpr,
    R: tl.constexpr,
):
    """delta = do . o of each row, fp32."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    valid = row < rows
    do = load_rows(do_ptr, row, valid, K).to(tl.float32)
    o = load_rows(o_ptr, row, valid, K).to(tl.float32)
    tl.store(delta_ptr + row, tl.sum(do * o, 1), mask=valid)


@triton.jit
def pair_backward_kernel(
    # tensors
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    part_dq_ptr,
    segment_dk_ptr,  # [segments of the part, LP, K] fp32
    segment_dv_ptr,
    # tables
    order_ptr,
    start_ptr,
    bucket_ptr,
    piece_ptr,
    keys_ptr,
    # numbers
    bucket0,
    buckets,
    y0,
    n,
    Z,
    G,
    J,
    chunks,
    tokens,
    before,
    scale,
    scale2,
    # sizes
    M: tl.constexpr,
    K: tl.constexpr,
    LP: tl.constexpr,
    R: tl.constexpr,
    SIZE: tl.constexpr,
):
    """dq of every pair of a segment, and the segment's share of its block's dk and dv.

    A popular block has far more pairs than others. Cut into segments, they run in parallel, and
    segment_sum_kernel adds the shares.
    """
    QUERIES: tl.constexpr = R // triton.next_power_of_2(M)
    tables = (bucket_ptr, piece_ptr, start_ptr)
    begin, end, bucket = load_piece(tables, bucket0, buckets, SIZE)
    if begin >= end:
        return

    pointers = (k_ptr, v_ptr, keys_ptr)
    block = load_keys(pointers, bucket, chunks, J, G, K, LP)
    k_tile, v_tile, keys, exists = block
    numbers = (n, Z, G, tokens, before)
    dk = tl.zeros([LP, padded(K)], tl.float32)
    dv = tl.zeros([LP, padded(K)], tl.float32)
    for position in range(begin, end, QUERIES):
        rows = load_pairs(order_ptr, position, end, numbers, y0, M, R)
        valid, query, result, place = rows
        q_tile = load_rows(q_ptr, query, valid, K)
        do_tile = load_rows(do_ptr, query, valid, K)
        lse = tl.load(lse_ptr + query, mask=valid, other=float("inf"))  # p = 0 without a query
        delta = tl.load(delta_ptr + query, mask=valid, other=0.0)

        exponent = product(q_tile, tl.trans(k_tile)) * scale2 - lse[:, None] * 1.4426950408889634
        seen = seen_keys(keys, exists, place)
        p = tl.exp2(tl.where(seen, exponent, float("-inf")))
        dv = add_product(tl.trans(p.to(v_tile.dtype)), do_tile, dv)
        dp = product(do_tile, tl.trans(v_tile))
        ds = (p * (dp - delta[:, None]) * scale).to(v_tile.dtype)
        dk = add_product(tl.trans(ds), q_tile, dk)
        store_rows(part_dq_ptr, result, valid, product(ds, k_tile), K)

    row = tl.program_id(0).to(tl.int64) * LP + tl.arange(0, LP)
    store_rows(segment_dk_ptr, row, exists, dk, K)
    store_rows(segment_dv_ptr, row, exists, dv, K)


@triton.jit
def segment_sum_kernel(
    # tensors
    segments_ptr,  # [2, most, LP, K] fp32, shares of dk and of dv
    sums_ptr,  # [2, rows, heads, K] fp32
    # tables
    piece_ptr,
    keys_ptr,
    # numbers
    bucket0,
    J,
    heads,  # KV heads of the part
    most,
    rows,  # of keys
    # sizes
    K: tl.constexpr,
    LP: tl.constexpr,
    FILL: tl.constexpr,
):
    """Adds the segments of a block, in their order, to its sum; with FILL from zero."""
    head = tl.program_id(1)
    which = tl.program_id(2).to(tl.int64)  # dk or dv
    bucket = bucket0 + head * J + tl.program_id(0)
    segment = tl.load(piece_ptr + bucket) - tl.load(piece_ptr + bucket0)
    end = segment + tl.load(piece_ptr + bucket + 1) - tl.load(piece_ptr + bucket)

    entry = keys_ptr + 2 * tl.program_id(0)
    s = tl.arange(0, LP)
    exists = s < tl.load(entry + 1)
    row = (which * rows + tl.load(entry) + s) * heads + head
    total = tl.zeros([LP, padded(K)], tl.float32)
    if not FILL:
        total = load_rows(sums_ptr, row, exists, K)
    for number in range(segment, end):
        place = (which * most + number) * LP + s
        total += load_rows(segments_ptr, place, exists, K)
    store_rows(sums_ptr, row, exists, total, K)
