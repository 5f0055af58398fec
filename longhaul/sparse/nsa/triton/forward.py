"""Forward Triton kernels of Native Sparse Attention (arXiv 2502.11089), and helpers of all kernels.

nsa/triton/attention.py launches them and says how they work together.

Letters: Z tokens of all rows of the batch, H query heads, G KV heads, M = H/G query heads per KV
head, K head dim, N compressed blocks of all rows, J selection blocks of all documents, n selected
blocks per query. MP, KP and LP are M, K and sel_block padded to powers of two. t, s and j are a
token, a key and a block counted inside their document; z is a token counted over all rows.

**Rows of a tile.** The M heads that share a KV head see the same keys, so that the R rows of a
tile's matrix are (query, head): row r is query r // MP under head r % MP. With one query at a time,
a group of 4 heads would fill only a quarter of the 16 rows that a tensor core takes.

**Compressed keys.** Key s is visible to token t if it has ended: s*STRIDE + SPAN - 1 <= t, where
STRIDE is cmp_stride and SPAN is cmp_block.

**Numerics.** Logits, softmax and sums are fp32. Hidden logits become -inf before exp2: masking
afterwards could multiply inf by 0, which is NaN. Log-sum-exps are in base 2, and +inf for rows that
see nothing, so that exp2(logit - lse) is 0 there. Addresses are int64: Z*H*K passes 2^31 at 524,288
tokens, n*Z*H*K at 32,768.

Arguments that many kernels share:

q_ptr, o_ptr         [Z, H, K], starting at the first head of the launch
k_ptr, v_ptr         [Z, G, K] or [N, G, K], starting at the first KV head of the launch
lse_ptr              [Z, H] fp32
HEADS_O              heads per token of o, if that tensor holds only the heads of the launch
tile_ptr, table_ptr  Documents.tiles and Documents.table_D4 of layout.py
scale2               log2(e) / sqrt(K): logits are in base 2, since exp2 is what the hardware has
R                    rows of a tile
KEYS                 column of the table with the first key of a document
COUNT                n
"""

import triton
import triton.language as tl

# ---- helpers


@triton.jit
def row_mask(valid, K: tl.constexpr, KP: tl.constexpr):
    """[rows, KP]: valid rows, without the columns past K."""
    mask = valid[:, None]
    if K != KP:
        k = tl.arange(0, KP)
        mask = mask & (k < K)[None, :]
    return mask


@triton.jit
def load_rows(ptr, row, valid, K: tl.constexpr, KP: tl.constexpr):
    """[rows, KP] of a tensor [..., K]; invalid rows and columns past K are 0."""
    k = tl.arange(0, KP)
    return tl.load(
        ptr + row[:, None] * K + k[None, :],
        mask=row_mask(valid, K, KP),
        other=0.0,
    )


@triton.jit
def store_rows(ptr, row, valid, x, K: tl.constexpr, KP: tl.constexpr):
    """Stores the valid rows of x [rows, KP] in the dtype of the tensor."""
    k = tl.arange(0, KP)
    tl.store(
        ptr + row[:, None] * K + k[None, :],
        x.to(ptr.dtype.element_ty),
        mask=row_mask(valid, K, KP),
    )


@triton.jit
def product(a, b):
    """a b in fp32. fp32 operands take three tf32 products: error near 2^-21."""
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def add_product(a, b, total):
    """a b + total in fp32."""
    return tl.dot(a, b, total, input_precision="tf32x3")


@triton.jit
def keys_ended(t, STRIDE: tl.constexpr, SPAN: tl.constexpr):
    """How many keys of the document have ended by token t."""
    return tl.maximum(t + (STRIDE + 1 - SPAN), 0) // STRIDE


@triton.jit
def load_tile(tile_ptr, index, table_ptr, KEYS: tl.constexpr):
    """(first item of a tile, first token of its document, its tokens, its first key)."""
    document = tl.load(tile_ptr + 2 * index)
    entry = table_ptr + 4 * document
    item = tl.load(tile_ptr + 2 * index + 1)
    token = tl.load(entry)
    tokens = tl.load(entry + 1)
    key = tl.load(entry + KEYS)
    return item, token, tokens, key


# ---- choice of blocks


@triton.jit
def importance_of_blocks(
    q_tile,
    lse,
    keys,  # (k_ptr, row of the document's first key, G)
    j,
    last,
    t,
    scale2,
    MP: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    R: tl.constexpr,
    JB: tl.constexpr,
    STRIDE: tl.constexpr,
    SPAN: tl.constexpr,
    PER: tl.constexpr,
    SPREAD: tl.constexpr,
    WEIGHTS: tl.constexpr,
):
    """[queries, JB] fp32: importance of the blocks j, summed over the heads of the group.

    A block's importance is the mass of PER + SPREAD - 1 compressed keys, times WEIGHTS (1, 2, 2, 2,
    1 with the default sizes). Each of these offsets takes one product, strided over the blocks of
    the tile, so that pooling moves no data between threads.
    """
    k_ptr, key_row, G = keys
    importance = tl.zeros([R, JB], tl.float32)
    for offset in tl.static_range(PER + SPREAD - 1):
        s = j * PER + (offset - SPREAD + 1)
        row = key_row + s.to(tl.int64) * G
        exists = (s >= 0) & (s < keys_ended(last, STRIDE, SPAN))
        k_tile = load_rows(k_ptr, row, exists, K, KP)
        logit = product(q_tile, tl.trans(k_tile)) * scale2

        inside = (s >= 0)[None, :]
        ended = s[None, :] * STRIDE + SPAN - 1 <= t[:, None]
        visible = inside & ended
        exponent = tl.where(visible, logit - lse[:, None], float("-inf"))
        importance += WEIGHTS[offset] * tl.exp2(exponent)
    return tl.sum(tl.reshape(importance, [R // MP, MP, JB]), 1)


@triton.jit
def importance_kernel(
    # tensors
    q_ptr,
    k_ptr,
    lse_ptr,
    importance_ptr,  # [KV heads, tokens of the part, COLUMNS] fp32
    # tables
    tile_ptr,
    table_ptr,
    # numbers
    scale2,
    H,
    G,
    start,  # first token of the part
    stop,
    COLUMNS,
    # sizes of heads and tiles
    M: tl.constexpr,
    MP: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    R: tl.constexpr,
    JB: tl.constexpr,  # blocks of a step
    # compressed keys
    STRIDE: tl.constexpr,
    SPAN: tl.constexpr,
    PER: tl.constexpr,  # strides of a selection block
    SPREAD: tl.constexpr,  # strides of a compressed block
    WEIGHTS: tl.constexpr,  # strides that the compressed key at each offset shares with the block
    # what is chosen
    COUNT: tl.constexpr,
    INIT: tl.constexpr,
    LOCAL: tl.constexpr,
):
    """Importance of the blocks between the first INIT and the LOCAL last of a tile of queries.

    The queries of a tile that all read every block rank nothing: nothing is written for them.
    """
    g = tl.program_id(1)
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    x, token, tokens, key = load_tile(tile_ptr, index, table_ptr, 2)
    Q: tl.constexpr = R // MP
    BLOCK: tl.constexpr = PER * STRIDE  # tokens
    tokens = tl.minimum(tokens, stop - token)
    last = tl.minimum(x + Q, tokens) - 1
    if last < COUNT * BLOCK:
        return

    r = tl.arange(0, R)
    t = x + r // MP
    m = r % MP
    valid = (t < tokens) & (m < M)
    row = (token + t).to(tl.int64) * H + g * M + m
    q_tile = load_rows(q_ptr, row, valid, K, KP)
    lse = tl.load(lse_ptr + row, mask=valid, other=float("inf"))
    keys = (k_ptr, key.to(tl.int64) * G + g, G)

    query = x + tl.arange(0, Q)
    exists = (query < tokens)[:, None]
    place = g.to(tl.int64) * (stop - start) + token + query - start
    for j0 in range(INIT // JB * JB, last // BLOCK - LOCAL + 1, JB):
        j = j0 + tl.arange(0, JB)
        importance = importance_of_blocks(
            q_tile,
            lse,
            keys,
            j,
            last,
            t,
            scale2,
            MP,
            K,
            KP,
            R,
            JB,
            STRIDE,
            SPAN,
            PER,
            SPREAD,
            WEIGHTS,
        )
        tl.store(
            importance_ptr + place[:, None] * COLUMNS + j[None, :],
            importance,
            mask=exists & (j < COLUMNS)[None, :],
        )


@triton.jit
def rank_threshold(bits, COUNT: tl.constexpr):
    """[rows]: the largest number that at least COUNT of the numbers of each row reach.

    Rows with fewer than COUNT non-negative numbers get 0 or less. Bisection ends early for a row of
    which exactly COUNT numbers reach the middle.
    """
    low = tl.zeros([bits.shape[0]], tl.int32)
    high = tl.max(bits, 1)
    while tl.max(high - low, 0) > 0:
        middle = low + tl.where(high > low, (high - low) // 2 + 1, 0)
        reached = tl.sum((bits >= middle[:, None]).to(tl.int32), 1)
        enough = reached >= COUNT
        high = tl.where(enough, high, tl.minimum(high, middle - 1))
        high = tl.where(reached == COUNT, tl.minimum(high, middle), high)
        low = tl.where(enough, middle, low)
    return low


@triton.jit
def choose_kernel(
    # tensors
    importance_ptr,
    idx_ptr,
    # tables
    tile_ptr,
    table_ptr,
    # numbers
    G,
    start,
    stop,
    COLUMNS,
    # sizes of tiles
    PARTS: tl.constexpr,  # programs of a tile of queries
    Q: tl.constexpr,  # queries of a program
    JP: tl.constexpr,  # a power of two, at least the number of blocks of a document
    # what is chosen
    BLOCK: tl.constexpr,  # tokens of a block
    COUNT: tl.constexpr,
    INIT: tl.constexpr,
    LOCAL: tl.constexpr,
    CP: tl.constexpr,  # COUNT padded to a power of two
):
    """block_idx [Z, G, COUNT]: the blocks that each query of a tile reads.

    First come the first INIT blocks, then the LOCAL last, then the most important others, in the
    order of their positions. A query with at most COUNT blocks reads all of them; -1 = unused.

    Importance ranks by its bits, as non-negative floats do, and among equal bits the lower block
    wins: first a bisection finds the importance of the last block that is chosen, then a running
    count chooses among equals.
    """
    g = tl.program_id(1)
    FORCED: tl.constexpr = INIT + LOCAL
    x, token, tokens, _key = load_tile(tile_ptr, tl.program_id(0) // PARTS, table_ptr, 0)
    tokens = tl.minimum(tokens, stop - token)
    query = x + tl.program_id(0) % PARTS * Q + tl.arange(0, Q)
    exists = query < tokens
    own = query // BLOCK
    early = own < COUNT
    out = ((token + query).to(tl.int64) * G + g) * COUNT

    # the forced blocks, and for early queries the others
    p = tl.arange(0, CP)[None, :]
    block = tl.where(p < INIT, p, own[:, None] + p - (FORCED - 1))
    used = tl.where(p < INIT, p <= own[:, None], block >= INIT)
    block = tl.where(p < FORCED, block, p - LOCAL)
    used = tl.where(p < FORCED, used, p <= own[:, None])
    tl.store(
        idx_ptr + out[:, None] + p,
        tl.where(used, block, -1).to(idx_ptr.dtype.element_ty),
        mask=exists[:, None] & (p < COUNT) & (early[:, None] | (p < FORCED)),
    )
    if COUNT > FORCED:
        j = tl.arange(0, JP)[None, :]
        between = (j >= INIT) & (j <= own[:, None] - LOCAL)
        free = between & (exists & (own >= COUNT))[:, None]
        place = g.to(tl.int64) * (stop - start) + token + query - start
        importance = tl.load(
            importance_ptr + place[:, None] * COLUMNS + j,
            mask=exists[:, None] & (j < COLUMNS),
            other=0.0,
        )
        bits = importance.to(tl.int32, bitcast=True) & 2147483647  # a NaN may have a sign
        bits = tl.where(free, bits, -1)

        threshold = rank_threshold(bits, COUNT - FORCED)[:, None]
        above = bits > threshold
        equal = free & (bits == threshold)
        needed = COUNT - FORCED - tl.sum(above.to(tl.int32), 1)
        chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), 1) <= needed[:, None]))
        column = FORCED - 1 + tl.cumsum(chosen.to(tl.int32), 1)
        tl.store(
            idx_ptr + out[:, None] + column,
            tl.broadcast_to(j, [Q, JP]).to(idx_ptr.dtype.element_ty),
            mask=chosen,
        )


# ---- selected branch: tiles of pairs of one block, then their merge with the forced blocks
#
# A part is a range of tokens under one KV head, or all tokens under several.
#
# order_ptr   pair at each sorted position (Pairs.order_P of layout.py)
# start_ptr   sorted position of each bucket's first pair (Pairs.start_E1)
# block_ptr   bucket of each piece (Pairs.pieces)
# first_ptr   first piece of each bucket
# bucket0     first bucket of the part, whose buckets are (KV head of the part, block)
# pair0       first pair of the part: its results are at row 0
# J           buckets of a KV head
# buckets     buckets of the part
# COUNT       free blocks of a query, those that are not forced: its pairs
# L, LP       tokens of a block, and padded to a power of two


@triton.jit
def load_piece(
    program,
    tables,  # (block_ptr, first_ptr, start_ptr, tile_ptr, table_ptr)
    bucket0,
    J,
    buckets,
    SIZE: tl.constexpr,  # pairs of a full piece
):
    """(begin, end, g, token) of a piece.

    Its pairs are the sorted positions [begin, end), none if the part has no such piece. Its block
    belongs to KV head g of the part and begins at `token`, counted over all rows.
    """
    block_ptr, first_ptr, start_ptr, tile_ptr, table_ptr = tables
    piece = tl.load(first_ptr + bucket0) + program
    exists = piece < tl.load(first_ptr + bucket0 + buckets)
    bucket = tl.load(block_ptr + piece, mask=exists, other=0)
    number = piece - tl.load(first_ptr + bucket)  # among the pieces of its bucket
    begin = tl.load(start_ptr + bucket) + number * SIZE
    end = tl.minimum(begin + SIZE, tl.load(start_ptr + bucket + 1))
    end = tl.where(exists, end, begin)

    block = (bucket - bucket0) % J
    x, token, _, _ = load_tile(tile_ptr, tl.where(exists, block, 0), table_ptr, 0)
    return begin, end, (bucket - bucket0) // J, token + x


@triton.jit
def pair_forward_kernel(
    # tensors
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,  # [pairs of the part, M, K]
    lse_ptr,  # [pairs of the part, M]
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
    L: tl.constexpr,
    LP: tl.constexpr,
):
    """Attention of each pair's rows to the keys of the pair's block, and its log-sum-exp.

    The pairs of a piece share their block, so that one dense product serves them all. A free block
    is whole and in the past of its queries: no key is hidden.
    """
    tables = (block_ptr, first_ptr, start_ptr, tile_ptr, table_ptr)
    begin, end, g, token = load_piece(
        tl.program_id(0),
        tables,
        bucket0,
        J,
        buckets,
        R // MP,
    )
    if begin >= end:
        return

    r = tl.arange(0, R)
    position = begin + r // MP
    m = r % MP
    valid = (position < end) & (m < M)
    pair = tl.load(order_ptr + position, mask=valid, other=0)
    z = (pair // COUNT % Z).to(tl.int64)
    q_tile = load_rows(q_ptr, z * H + g * M + m, valid, K, KP)

    s = tl.arange(0, LP)
    row = (token + s).to(tl.int64) * G + g
    k_tile = load_rows(k_ptr, row, s < L, K, KP)
    logit = product(q_tile, tl.trans(k_tile)) * scale2
    if L != LP:
        logit = tl.where((s < L)[None, :], logit, float("-inf"))
    top = tl.max(logit, 1)
    p = tl.exp2(logit - top[:, None])
    mass = tl.sum(p, 1)

    v_tile = load_rows(v_ptr, row, s < L, K, KP)
    o = product(p.to(v_tile.dtype), v_tile) / mass[:, None]
    out = (pair - pair0).to(tl.int64) * M + m
    store_rows(o_ptr, out, valid, o, K, KP)
    tl.store(lse_ptr + out, top + tl.log2(mass), mask=valid)


@triton.jit
def forced_steps(
    x,
    last,
    S: tl.constexpr,
    L: tl.constexpr,
    INIT: tl.constexpr,
    LOCAL: tl.constexpr,
):
    """(steps of the first blocks, first key of the local ones, all steps) of the tokens x..last."""
    initial = tl.cdiv(tl.minimum(INIT * L, last + 1), S)
    begin = tl.maximum((x // L - LOCAL + 1) * L, INIT * L)
    local = tl.cdiv(tl.maximum(last + 1 - begin, 0), S)
    return initial, begin, initial + local


@triton.jit
def forced_keys(
    step,
    steps,  # of forced_steps
    t,
    S: tl.constexpr,
    L: tl.constexpr,
    INIT: tl.constexpr,
    LOCAL: tl.constexpr,
):
    """(keys of a step [S], which of them lie in a forced block of each token t and are past)."""
    initial, begin, _ = steps
    first = step < initial
    s = tl.where(first, step * S, begin + (step - initial) * S) + tl.arange(0, S)
    is_initial = first & (s < INIT * L)
    is_local = (s[None, :] >= (t // L - LOCAL + 1)[:, None] * L) & (s >= INIT * L)[None, :]
    forced = is_initial[None, :] | (is_local & (step >= initial))
    return s, forced & (s[None, :] <= t[:, None])


@triton.jit
def merge_kernel(
    # tensors
    q_ptr,
    k_ptr,
    v_ptr,
    part_o_ptr,  # [pairs of the part, M, K]
    part_lse_ptr,  # [pairs of the part, M]
    o_ptr,
    lse_ptr,
    # tables
    tile_ptr,
    table_ptr,
    # numbers
    start,  # first token of the part
    stop,
    scale2,
    H,
    G,
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
    """o and lse of the selected branch: attention to the forced blocks, merged with the pairs.

    The softmax over all of a query's blocks is the mean of the softmaxes over each of them,
    weighted by their shares of the mass. Their log-sum-exps hold these shares.
    """
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
    q_tile = load_rows(q_ptr, z * H + head, valid, K, KP)

    acc = tl.zeros([R, KP], tl.float32)
    top = tl.full([R], float("-inf"), tl.float32)
    mass = tl.zeros([R], tl.float32)
    steps = forced_steps(x, last, LP, L, INIT, LOCAL)
    for step in range(steps[2]):
        s, visible = forced_keys(step, steps, t, LP, L, INIT, LOCAL)
        row = (token + s).to(tl.int64) * G + g
        k_tile = load_rows(k_ptr, row, s <= last, K, KP)
        logit = product(q_tile, tl.trans(k_tile)) * scale2
        logit = tl.where(visible, logit, float("-inf"))
        new_top = tl.maximum(top, tl.max(logit, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(logit - base[:, None])
        shrink = tl.exp2(top - base)

        v_tile = load_rows(v_ptr, row, s <= last, K, KP)
        acc = add_product(p.to(v_tile.dtype), v_tile, acc * shrink[:, None])
        mass = mass * shrink + tl.sum(p, 1)
        top = new_top

    # A query has as many pairs as blocks between the first and the local ones, at most COUNT.
    pairs = tl.where(valid, t // L - (INIT + LOCAL - 1), 0)
    place = g.to(tl.int64) * (stop - start) + z - start
    for number in range(tl.minimum(tl.max(pairs, 0), COUNT)):
        used = number < pairs
        row = (place * COUNT + number) * M + m
        part = load_rows(part_o_ptr, row, used, K, KP).to(tl.float32)
        lse = tl.load(part_lse_ptr + row, mask=used, other=float("-inf"))
        new_top = tl.maximum(top, lse)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp2(top - base)
        weight = tl.exp2(lse - base)
        acc = acc * shrink[:, None] + part * weight[:, None]
        mass = mass * shrink + weight
        top = new_top

    mass = tl.where(valid, mass, 1.0)
    store_rows(o_ptr, z * H + head, valid, acc / mass[:, None], K, KP)
    tl.store(lse_ptr + z * H + head, top + tl.log2(mass), mask=valid)


# ---- all branches


@triton.jit
def combine_kernel(
    # tensors
    o_ptr,
    cmp_ptr,
    slc_ptr,
    win_ptr,  # [Z, HEADS, K]: only the heads of the launch
    gate_ptr,  # [Z, H, 3]
    # numbers
    rows,  # Z * HEADS
    H,
    HEADS,
    # sizes
    K: tl.constexpr,
    KP: tl.constexpr,
    R: tl.constexpr,
):
    """o = g_cmp o_cmp + g_slc o_slc + g_win o_win."""
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    valid = r < rows
    row = r // HEADS * H + r % HEADS

    branches = (cmp_ptr, slc_ptr, win_ptr)
    row_of_branch = (row, row, r)
    o = tl.zeros([R, KP], tl.float32)
    for branch in tl.static_range(3):
        gate = tl.load(gate_ptr + row * 3 + branch, mask=valid, other=0.0)
        gate = gate.to(tl.float32)
        part = load_rows(branches[branch], row_of_branch[branch], valid, K, KP)
        o += gate[:, None] * part.to(tl.float32)
    store_rows(o_ptr, row, valid, o, K, KP)


# The decorator decided when this file was imported, whatever the environment says by now.
INTERPRETED = not isinstance(combine_kernel, triton.JITFunction)
