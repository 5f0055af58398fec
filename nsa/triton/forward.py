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
def choose_kernel(
    # tensors
    q_ptr,
    k_ptr,
    lse_ptr,
    idx_ptr,
    # tables
    tile_ptr,
    table_ptr,
    # numbers
    scale2,
    H,
    G,
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
    BEST: tl.constexpr,  # a power of two, at least COUNT - INIT - LOCAL
    COLUMNS: tl.constexpr,  # COUNT padded to a power of two
):
    """block_idx [Z, G, COUNT]: the blocks that each query of a tile reads.

    A query with at most COUNT blocks reads all of them. Any other reads the first INIT, the LOCAL
    last, and the most important others. The importance never leaves the chip.
    """
    g = tl.program_id(1)
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    x, token, tokens, key = load_tile(tile_ptr, index, table_ptr, 2)
    Q: tl.constexpr = R // MP
    FORCED: tl.constexpr = INIT + LOCAL
    BLOCK: tl.constexpr = PER * STRIDE  # tokens

    r = tl.arange(0, R)
    t = x + r // MP
    m = r % MP
    valid = (t < tokens) & (m < M)
    row = (token + t).to(tl.int64) * H + g * M + m
    query = x + tl.arange(0, Q)
    own = query // BLOCK

    best = tl.full([Q, BEST], -1, tl.int64)
    if COUNT > FORCED:
        q_tile = load_rows(q_ptr, row, valid, K, KP)
        lse = tl.load(lse_ptr + row, mask=valid, other=float("inf"))
        keys = (k_ptr, key.to(tl.int64) * G + g, G)

        # A tile whose queries all read every block has nothing to rank.
        last = tl.minimum(x + Q, tokens) - 1
        stop = tl.where(last >= COUNT * BLOCK, last // BLOCK - LOCAL + 1, INIT)
        for j0 in range(INIT, stop, JB):
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

            # Importance and index rank as one int64: non-negative floats order like their bits,
            # and 2^31 - 1 - j below them lets the lower block win a tie.
            bits = importance.to(tl.int32, bitcast=True).to(tl.int64)
            rank = (bits << 32) + (2147483647 - j)[None, :]
            rank = tl.where(j[None, :] <= own[:, None] - LOCAL, rank, -1)

            # The larger of each pair of a falling and a rising list are the best of both lists, in
            # an order that one merge sorts.
            rising = tl.flip(tl.topk(rank, BEST), 1)
            best = tl.bitonic_merge(tl.maximum(best, rising), descending=True)

    # The rank of a NaN may have lost its index: the limits keep it from reading out of bounds.
    free = tl.maximum(2147483647 - (best & 4294967295), 0)
    free = tl.minimum(free, tl.maximum(own - LOCAL, 0)[:, None])

    # First all blocks of early queries or the forced ones of the others, then the free places.
    early = (own < COUNT)[:, None]
    exists = (query < tokens)[:, None]
    out = (token + query).to(tl.int64) * G + g
    base = idx_ptr + out[:, None] * COUNT

    p = tl.arange(0, COLUMNS)[None, :]
    all_blocks = tl.where(p <= own[:, None], p, -1)
    forced = tl.where(p < INIT, p, own[:, None] + p - (FORCED - 1))
    first = tl.where(early, all_blocks, forced)
    tl.store(
        base + p,
        first.to(idx_ptr.dtype.element_ty),
        mask=exists & (p < COUNT) & (early | (p < FORCED)),
    )

    p = FORCED + tl.arange(0, BEST)[None, :]
    tl.store(
        base + p,
        free.to(idx_ptr.dtype.element_ty),
        mask=exists & (p < COUNT) & (own >= COUNT)[:, None],
    )


# ---- selected branch: tiles of pairs of one block, then their merge
#
# block_ptr   block of each piece, BLOCKS if the piece is empty (Pairs.pieces of layout.py)
# first_ptr   first piece of each block
# start_ptr   sorted position of each block's first pair (Pairs.start_J1)
# order_ptr   pair at each sorted position (Pairs.order_P)
# place_ptr   sorted position of each pair (Pairs.place_P)
# query0      first query of the chunk
# J, BLOCKS   selection blocks of all documents, and those of all KV heads of the launch
# L, LP       tokens of a block, and padded to a power of two


@triton.jit
def load_piece(
    piece,
    tables,  # (block_ptr, first_ptr, start_ptr, tile_ptr, table_ptr)
    J,
    SIZE: tl.constexpr,  # pairs of a full piece
    L: tl.constexpr,
):
    """(begin, end, g, x, token, keys) of a piece.

    Its pairs are the sorted positions [begin, end). Its block belongs to KV head g, begins at
    position x of a document whose first token is `token`, and has `keys` keys.
    """
    block_ptr, first_ptr, start_ptr, tile_ptr, table_ptr = tables
    block = tl.load(block_ptr + piece)
    start = tl.load(start_ptr + block)
    number = piece - tl.load(first_ptr + block)  # among the pieces of its block
    begin = start + number * SIZE
    x, token, tokens, _ = load_tile(tile_ptr, block % J, table_ptr, 0)
    end = tl.minimum(begin + SIZE, tl.load(start_ptr + block + 1))
    return begin, end, block // J, x, token, tl.minimum(L, tokens - x)


@triton.jit
def tokens_of_pairs(order_ptr, position, valid, query0, COUNT, Z):
    """Token, counted over all rows, of the pair at each sorted position."""
    pair = tl.load(order_ptr + position, mask=valid, other=0)
    return (pair // COUNT + query0) % Z


@triton.jit
def pair_forward_kernel(
    # tensors
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,  # [P, M, K], in sorted order
    lse_ptr,  # [P, M], in sorted order
    # tables
    block_ptr,
    first_ptr,
    start_ptr,
    order_ptr,
    tile_ptr,
    table_ptr,
    # numbers
    query0,
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
    L: tl.constexpr,
    LP: tl.constexpr,
):
    """Attention of each pair's rows to the keys of the pair's block, and its log-sum-exp.

    The pairs of a piece share their block, so that one dense product serves them all.
    """
    piece = tl.program_id(0)
    if tl.load(block_ptr + piece) == BLOCKS:
        return
    tables = (block_ptr, first_ptr, start_ptr, tile_ptr, table_ptr)
    begin, end, g, x, token, keys = load_piece(piece, tables, J, R // MP, L)

    r = tl.arange(0, R)
    position = begin + r // MP
    m = r % MP
    valid = (position < end) & (m < M)
    z = tokens_of_pairs(order_ptr, position, valid, query0, COUNT, Z)
    z = z.to(tl.int64)
    q_tile = load_rows(q_ptr, z * H + g * M + m, valid, K, KP)

    s = tl.arange(0, LP)
    row = (token + x + s).to(tl.int64) * G + g
    k_tile = load_rows(k_ptr, row, s < keys, K, KP)
    logit = product(q_tile, tl.trans(k_tile)) * scale2

    # Only a query's own block hides keys from it. The first key is always visible; saying so keeps
    # the logits of invalid rows finite.
    exists = (s < keys)[None, :]
    ended = (token + x + s)[None, :] <= z[:, None]
    visible = exists & ended
    first = (s == 0)[None, :]
    logit = tl.where(visible | first, logit, float("-inf"))
    top = tl.max(logit, 1)
    p = tl.exp2(logit - top[:, None])
    mass = tl.sum(p, 1)

    v_tile = load_rows(v_ptr, row, s < keys, K, KP)
    o = product(p.to(v_tile.dtype), v_tile) / mass[:, None]
    out = position.to(tl.int64) * M + m
    store_rows(o_ptr, out, valid, o, K, KP)
    tl.store(lse_ptr + out, top + tl.log2(mass), mask=valid)


@triton.jit
def gather_kernel(
    # tensors
    x_ptr,  # [P, M, K], in sorted order: outputs of pairs, or their gradients
    part_lse_ptr,  # [P, M], in sorted order
    place_ptr,
    o_ptr,
    lse_ptr,
    # numbers
    query0,
    queries,  # of the chunk
    COUNT,
    Z,
    H,
    HEADS_O,
    # sizes of heads and tiles
    M: tl.constexpr,
    MP: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    R: tl.constexpr,
    MERGE: tl.constexpr,
):
    """Sums what the pairs of each query hold; with MERGE, weighted by exp2(lse - total lse).

    The softmax over all of a query's blocks is the mean of the softmaxes over each of them,
    weighted by their shares of the mass. Their log-sum-exps hold these shares. The merge of outputs
    also stores the total log-sum-exp; gradients are only added.
    """
    r = tl.arange(0, R)
    c = tl.program_id(0) * (R // MP) + r // MP
    m = r % MP
    valid = (c < queries) & (m < M)
    z = ((c + query0) % Z).to(tl.int64)
    g = (c + query0) // Z

    top = tl.full([R], float("-inf"), tl.float32)
    mass = tl.zeros([R], tl.float32)
    acc = tl.zeros([R, KP], tl.float32)
    for p in range(COUNT):
        place = tl.load(place_ptr + c * COUNT + p, mask=valid, other=-1)
        place = place.to(tl.int64)
        row = place * M + m
        used = place >= 0
        part = load_rows(x_ptr, row, used, K, KP).to(tl.float32)
        if MERGE:
            lse = tl.load(part_lse_ptr + row, mask=used, other=float("-inf"))
            new_top = tl.maximum(top, lse)
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            shrink = tl.exp2(top - base)
            weight = tl.exp2(lse - base)
            acc = acc * shrink[:, None] + part * weight[:, None]
            mass = mass * shrink + weight
            top = new_top
        else:
            acc += part

    if MERGE:
        mass = tl.where(valid, mass, 1.0)
        acc /= mass[:, None]
        tl.store(lse_ptr + z * H + g * M + m, top + tl.log2(mass), mask=valid)
    store_rows(o_ptr, z * HEADS_O + g * M + m, valid, acc, K, KP)


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
