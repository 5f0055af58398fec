"""Triton kernels of indexed attention: scores and ranks of blocks, attention over the chosen ones,
and gradients.

indexed/triton/attention.py launches them and says how they work together.

Letters: C queries of a launch, H query heads, G KV heads, M = H/G query heads per KV head, K head
dim, h query heads of the indexer, E its head dim, N blocks. MP, KP, HP and EP are M, K, h and E
padded to powers of two, MP and HP to at least the 16 rows of a tensor core. c is a query of the
launch, t its position in the document, and a slot one of the blocks that it reads.

**Slots.** A query has `count` chosen blocks, the lesser of `most` and of the blocks that end before
it; index_ptr [C, most] has them first. Slot `count` is the query's own block, which it sees up to
itself.

**Numerics.** Logits, softmax and sums are fp32. Hidden logits become -inf before exp2. Addresses
are int64.

Arguments that many kernels share:

q_ptr, o_ptr, do_ptr  [C, H, K]
k_ptr, v_ptr          [S, G, K], of the whole document
lse_ptr, delta_ptr    [C, H] fp32; lse in nats
first                 position of the first query of the launch
scale2                log2(e) / sqrt(K): logits are in base 2, since exp2 is what the hardware has
r                     tokens of a block
"""

import triton
import triton.language as tl

from longhaul.sparse.nsa.triton.forward import add_product, load_rows, product, store_rows

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# ---- choice of blocks


@triton.jit
def rank_kernel(
    # tensors
    q_ptr,  # [C, h, E]
    k_ptr,  # [N, E]
    rank_ptr,  # [C, N] int64
    # numbers
    first,
    C,
    N,
    scale,  # 1 / sqrt(E)
    # sizes
    r: tl.constexpr,
    h: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    QB: tl.constexpr,
    NB: tl.constexpr,
):
    """The ranks of model.py's `block_ranks`: by score, and on a tie the lower index first; -1 for a
    block that does not end before the query.

    The sum over heads stays in registers. Clearing the sign makes NaN the best score, which then
    reaches the loss.
    """
    c = tl.program_id(0) * QB + tl.arange(0, QB)
    block = tl.program_id(1) * NB + tl.arange(0, NB)
    k_tile = load_rows(k_ptr, block.to(tl.int64), block < N, E, EP)

    score = tl.zeros([QB, NB], tl.float32)
    for head in range(h):
        q_tile = load_rows(q_ptr, c.to(tl.int64) * h + head, c < C, E, EP)
        x = product(q_tile, tl.trans(k_tile))
        score += tl.where(x < 0, 0.0, x)

    largest = 0x7FFFFFFF
    bits = (score * scale).to(tl.int32, bitcast=True) & largest
    rank = (bits.to(tl.int64) << 31) + (largest - block)[None, :]
    has_ended = (block * r + r)[None, :] <= (first + c)[:, None]
    tl.store(
        rank_ptr + c.to(tl.int64)[:, None] * N + block[None, :],
        tl.where(has_ended, rank, -1),
        mask=(c < C)[:, None] & (block < N)[None, :],
    )


# ---- attention over the chosen blocks


@triton.jit
def keys_of_slots(index_ptr, start, count, t, r: tl.constexpr, SB: tl.constexpr):
    """(keys of SB tokens of slots from token `start` on, which of them the query at t sees)."""
    s = start + tl.arange(0, SB)
    slot = s // r
    block = tl.load(index_ptr + slot, mask=slot < count, other=0)
    key = tl.where(slot < count, block, t // r) * r + s % r
    return key, (slot <= count) & (key <= t)


@triton.jit
def attend_kernel(
    # tensors
    q_ptr,
    k_ptr,
    v_ptr,
    index_ptr,
    o_ptr,
    lse_ptr,
    # numbers
    first,
    most,
    scale2,
    G,
    # sizes
    r: tl.constexpr,
    M: tl.constexpr,
    MP: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    SB: tl.constexpr,
):
    """o and lse of a query under the heads of a group; every first tile has a visible key."""
    c = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1)
    t = first + tl.program_id(0)
    count = tl.minimum(most, t // r)
    m = tl.arange(0, MP)
    row = (c * G + g) * M + m
    q_tile = load_rows(q_ptr, row, m < M, K, KP)

    acc = tl.zeros([MP, KP], tl.float32)
    top = tl.full([MP], float("-inf"), tl.float32)
    mass = tl.zeros([MP], tl.float32)
    for start in range(0, (count + 1) * r, SB):
        key, seen = keys_of_slots(index_ptr + c * most, start, count, t, r, SB)
        key_row = key.to(tl.int64) * G + g
        k_tile = load_rows(k_ptr, key_row, seen, K, KP)
        logit = product(q_tile, tl.trans(k_tile)) * scale2
        logit = tl.where(seen[None, :], logit, float("-inf"))
        new_top = tl.maximum(top, tl.max(logit, 1))
        p = tl.exp2(logit - new_top[:, None])
        shrink = tl.exp2(top - new_top)

        v_tile = load_rows(v_ptr, key_row, seen, K, KP)
        acc = add_product(p.to(v_tile.dtype), v_tile, acc * shrink[:, None])
        mass = mass * shrink + tl.sum(p, 1)
        top = new_top

    store_rows(o_ptr, row, m < M, acc / mass[:, None], K, KP)
    tl.store(lse_ptr + row, (top + tl.log2(mass)) * LN2, mask=m < M)


@triton.jit
def mass_kernel(
    # tensors
    q_ptr,
    k_ptr,
    lse_ptr,
    index_ptr,
    mass_ptr,  # [C, most] fp32
    # numbers
    first,
    most,
    scale2,
    G,
    # sizes
    r: tl.constexpr,
    M: tl.constexpr,
    MP: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    NB: tl.constexpr,
):
    """The probability of each chosen block, summed over heads; 0 in slots that are not used.

    Each token of the blocks takes one product, strided over the blocks of the tile, so that pooling
    moves no data between threads.
    """
    c = tl.program_id(0).to(tl.int64)
    t = first + tl.program_id(0)
    count = tl.minimum(most, t // r)
    slot = tl.program_id(1) * NB + tl.arange(0, NB)
    used = slot < count
    block = tl.load(index_ptr + c * most + slot, mask=used, other=0)
    m = tl.arange(0, MP)

    total = tl.zeros([NB], tl.float32)
    for g in range(G):
        row = (c * G + g) * M + m
        q_tile = load_rows(q_ptr, row, m < M, K, KP)
        lse = tl.load(lse_ptr + row, mask=m < M, other=float("inf")) * LOG2E
        for token in range(r):
            key_row = (block * r + token).to(tl.int64) * G + g
            k_tile = load_rows(k_ptr, key_row, used, K, KP)
            exponent = product(q_tile, tl.trans(k_tile)) * scale2 - lse[:, None]
            total += tl.sum(tl.exp2(exponent), 0)
    tl.store(mass_ptr + c * most + slot, tl.where(used, total, 0.0), mask=slot < most)


# ---- gradients of queries


@triton.jit
def dq_kernel(
    # tensors
    q_ptr,
    do_ptr,
    o_ptr,
    lse_ptr,
    k_ptr,
    v_ptr,
    index_ptr,
    dq_ptr,
    delta_ptr,
    # numbers
    first,
    most,
    scale,
    scale2,
    G,
    # sizes
    r: tl.constexpr,
    M: tl.constexpr,
    MP: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    SB: tl.constexpr,
):
    """dq = ds k and delta = do . o of a query and a group; ds = p (do v - delta) / sqrt(K)."""
    c = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1)
    t = first + tl.program_id(0)
    count = tl.minimum(most, t // r)
    m = tl.arange(0, MP)
    row = (c * G + g) * M + m
    q_tile = load_rows(q_ptr, row, m < M, K, KP)
    do_tile = load_rows(do_ptr, row, m < M, K, KP)
    o_tile = load_rows(o_ptr, row, m < M, K, KP)
    delta = tl.sum(do_tile.to(tl.float32) * o_tile.to(tl.float32), 1)
    tl.store(delta_ptr + row, delta, mask=m < M)
    lse = tl.load(lse_ptr + row, mask=m < M, other=float("inf")) * LOG2E

    acc = tl.zeros([MP, KP], tl.float32)
    for start in range(0, (count + 1) * r, SB):
        key, seen = keys_of_slots(index_ptr + c * most, start, count, t, r, SB)
        key_row = key.to(tl.int64) * G + g
        k_tile = load_rows(k_ptr, key_row, seen, K, KP)
        v_tile = load_rows(v_ptr, key_row, seen, K, KP)
        exponent = product(q_tile, tl.trans(k_tile)) * scale2 - lse[:, None]
        p = tl.exp2(tl.where(seen[None, :], exponent, float("-inf")))
        dp = product(do_tile, tl.trans(v_tile))
        ds = p * (dp - delta[:, None]) * scale
        acc = add_product(ds.to(k_tile.dtype), k_tile, acc)
    store_rows(dq_ptr, row, m < M, acc, K, KP)


@triton.jit
def indexer_dq_kernel(
    # tensors
    q_ptr,  # [C, h, E]
    k_ptr,  # [N, E]
    index_ptr,
    dscore_ptr,  # [C, most + 1] fp32, 0 in slots that are not used
    dq_ptr,
    # numbers
    first,
    most,
    # sizes
    r: tl.constexpr,
    h: tl.constexpr,
    HP: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    NB: tl.constexpr,
):
    """dq of the indexer: the sum over the chosen blocks of dscore k, where q k is positive."""
    c = tl.program_id(0).to(tl.int64)
    count = tl.minimum(most, (first + tl.program_id(0)) // r)
    head = tl.arange(0, HP)
    row = c * h + head
    q_tile = load_rows(q_ptr, row, head < h, E, EP)

    acc = tl.zeros([HP, EP], tl.float32)
    for start in range(0, count, NB):
        slot = start + tl.arange(0, NB)
        used = slot < count
        block = tl.load(index_ptr + c * most + slot, mask=used, other=0)
        dscore = tl.load(dscore_ptr + c * (most + 1) + slot, mask=used, other=0.0)
        k_tile = load_rows(k_ptr, block.to(tl.int64), used, E, EP)
        x = product(q_tile, tl.trans(k_tile))
        d = tl.where(x > 0, dscore[None, :], 0.0)
        acc = add_product(d.to(k_tile.dtype), k_tile, acc)
    store_rows(dq_ptr, row, head < h, acc, E, EP)


# ---- gradients of keys: the pairs (query, slot) that read a block lie one after another in
# order_ptr, pair c * (most + 1) + slot, from start_ptr[block] on


@triton.jit
def dkv_kernel(
    # tensors
    q_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    k_ptr,
    v_ptr,
    dk_ptr,  # [S, G, K] fp32
    dv_ptr,
    order_ptr,
    start_ptr,
    # numbers
    first,
    slots,  # most + 1
    scale,
    scale2,
    S,
    G,
    # sizes
    r: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    LB: tl.constexpr,
    R: tl.constexpr,
):
    """Adds ds^T q to dk and p^T do to dv of up to LB tokens of a block, under one KV head.

    A row is (pair, head). No other program of the launch writes these tokens, so the sums have a
    fixed order.
    """
    block = tl.program_id(0)
    g = tl.program_id(1)
    begin = tl.load(start_ptr + block)
    rows = (tl.load(start_ptr + block + 1) - begin) * M
    token = tl.program_id(2) * LB + tl.arange(0, LB)
    key = block * r + token
    exists = (token < r) & (key < S)
    key_row = key.to(tl.int64) * G + g
    k_tile = load_rows(k_ptr, key_row, exists, K, KP)
    v_tile = load_rows(v_ptr, key_row, exists, K, KP)

    dk = tl.zeros([LB, KP], tl.float32)
    dv = tl.zeros([LB, KP], tl.float32)
    for at in range(0, rows, R):
        x = at + tl.arange(0, R)
        valid = x < rows
        c = tl.load(order_ptr + begin + x // M, mask=valid, other=0) // slots
        row = (c.to(tl.int64) * G + g) * M + x % M
        q_tile = load_rows(q_ptr, row, valid, K, KP)
        lse = tl.load(lse_ptr + row, mask=valid, other=float("inf")) * LOG2E
        exponent = product(k_tile, tl.trans(q_tile)) * scale2 - lse[None, :]
        seen = exists[:, None] & (key[:, None] <= (first + c)[None, :])
        p = tl.exp2(tl.where(seen, exponent, float("-inf")))

        do_tile = load_rows(do_ptr, row, valid, K, KP)
        dv = add_product(p.to(do_tile.dtype), do_tile, dv)
        dp = product(v_tile, tl.trans(do_tile))
        delta = tl.load(delta_ptr + row, mask=valid, other=0.0)
        ds = p * (dp - delta[None, :]) * scale
        dk = add_product(ds.to(q_tile.dtype), q_tile, dk)

    dk += load_rows(dk_ptr, key_row, exists, K, KP)
    dv += load_rows(dv_ptr, key_row, exists, K, KP)
    store_rows(dk_ptr, key_row, exists, dk, K, KP)
    store_rows(dv_ptr, key_row, exists, dv, K, KP)


@triton.jit
def indexer_dk_kernel(
    # tensors
    q_ptr,  # [C, h, E]
    k_ptr,  # [N, E]
    dscore_ptr,  # [C, slots] fp32, 0 for the own block
    dk_ptr,  # [N, E] fp32
    order_ptr,
    start_ptr,
    # numbers
    slots,
    # sizes
    h: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    R: tl.constexpr,
):
    """Adds to dk of the indexer, for one block, the sum over pairs and heads of dscore q, where q k
    is positive.
    """
    block = tl.program_id(0).to(tl.int64)
    begin = tl.load(start_ptr + block)
    rows = (tl.load(start_ptr + block + 1) - begin) * h
    e = tl.arange(0, EP)
    k = tl.load(k_ptr + block * E + e, mask=e < E, other=0.0).to(tl.float32)

    total = tl.load(dk_ptr + block * E + e, mask=e < E, other=0.0)
    for at in range(0, rows, R):
        x = at + tl.arange(0, R)
        valid = x < rows
        pair = tl.load(order_ptr + begin + x // h, mask=valid, other=0)
        row = (pair // slots).to(tl.int64) * h + x % h
        q_tile = load_rows(q_ptr, row, valid, E, EP).to(tl.float32)
        dscore = tl.load(dscore_ptr + pair, mask=valid, other=0.0)
        positive = tl.sum(q_tile * k[None, :], 1) > 0
        d = tl.where(positive, dscore, 0.0)
        total += tl.sum(q_tile * d[:, None], 0)
    tl.store(dk_ptr + block * E + e, total, mask=e < E)
