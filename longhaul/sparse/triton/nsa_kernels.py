"""Triton kernels of Native Sparse Attention (arXiv 2502.11089) around its engine: the choice of
blocks, folding, and the sum of the branches. nsa.py launches them and says how they work together;
tiles.py has what all kernels share.

Letters: Z tokens of all rows of the batch, H query heads, G KV heads, M = H/G, K head dim, N
compressed keys of all rows. t, s and j are a token,
a compressed key and a block counted inside their document. Key s is visible to token t if it has
ended: s*STRIDE + SPAN - 1 <= t, where STRIDE is cmp_stride and SPAN is cmp_block.
"""

import triton
import triton.language as tl

from longhaul.sparse.triton.tiles import load_rows, padded, product, store_rows

# ---- choice of blocks


@triton.jit
def load_tile(tile_ptr, index):
    """(first token of the tile's document over all rows, first token of the tile inside the
    document, tokens and first key of the document).
    """
    entry = tile_ptr + 4 * index
    token = tl.load(entry)
    x = tl.load(entry + 1)
    tokens = tl.load(entry + 2)
    return token, x, tokens, tl.load(entry + 3)


@triton.jit
def importance_kernel(
    # tensors
    q_ptr,  # [Z, H, K], starting at the first head of the launch
    k_ptr,  # [N, G, K], starting at the first KV head of the launch
    lse_ptr,  # [KV heads, STRIDE, M, N] natural, starting at the first KV head of the launch
    importance_ptr,  # [KV heads, tiles, queries of a tile, columns] fp32
    tile_ptr,
    # numbers
    scale2,
    H,
    G,
    N,
    columns,
    # sizes of heads and tiles
    M: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    JB: tl.constexpr,  # blocks of a step
    # compressed keys
    STRIDE: tl.constexpr,
    SPAN: tl.constexpr,
    WEIGHTS: tl.constexpr,  # strides that the compressed key at each offset shares with the block
    # what is chosen
    BLOCK: tl.constexpr,  # tokens of a block
    COUNT: tl.constexpr,
    INIT: tl.constexpr,
    LOCAL: tl.constexpr,
):
    """Importance of the blocks between the first INIT and the LOCAL last of a tile of queries,
    summed over the heads of the group. The queries of a tile that all read every block rank
    nothing: nothing is written for them.

    A block's importance is the mass of PER + SPREAD - 1 compressed keys, times WEIGHTS (1, 2, 2, 2,
    1 with the default sizes). Each of these offsets takes one product, strided over the blocks of
    the tile, so that pooling moves no data between threads.
    """
    g = tl.program_id(1)
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    token, x, tokens, key = load_tile(tile_ptr, index)
    MP: tl.constexpr = triton.next_power_of_2(M)
    Q: tl.constexpr = R // MP
    PER: tl.constexpr = BLOCK // STRIDE  # strides of a selection block
    SPREAD: tl.constexpr = SPAN // STRIDE  # strides of a compressed block
    last = tl.minimum(x + Q, tokens) - 1
    if last < COUNT * BLOCK:
        return

    r = tl.arange(0, R)
    t = x + r // MP
    m = r % MP
    valid = (t < tokens) & (m < M)
    q_tile = load_rows(q_ptr, (token + t).to(tl.int64) * H + g * M + m, valid, K)
    later = tl.maximum(t - (SPAN - 1), 0)  # the token's line and its residue
    row = ((g * STRIDE + later % STRIDE) * M + m).to(tl.int64) * N + key + later // STRIDE
    lse = tl.load(lse_ptr + row, mask=valid & (t >= SPAN - 1), other=float("inf"))
    lse *= 1.4426950408889634

    ended = tl.maximum(last + (STRIDE + 1 - SPAN), 0) // STRIDE
    place = (g * tl.num_programs(0) + index).to(tl.int64) * Q + tl.arange(0, Q)
    for j0 in range(INIT // JB * JB, last // BLOCK - LOCAL + 1, JB):
        j = j0 + tl.arange(0, JB)
        importance = tl.zeros([R, JB], tl.float32)
        for offset in tl.static_range(PER + SPREAD - 1):
            s = j * PER + (offset - SPREAD + 1)
            k_row = (key + s).to(tl.int64) * G + g
            k_tile = load_rows(k_ptr, k_row, (s >= 0) & (s < ended), K)
            logit = product(q_tile, tl.trans(k_tile)) * scale2
            visible = (s >= 0)[None, :] & (s[None, :] * STRIDE + SPAN - 1 <= t[:, None])
            exponent = tl.where(visible, logit - lse[:, None], float("-inf"))
            importance += WEIGHTS[offset] * tl.exp2(exponent)
        of_queries = tl.sum(tl.reshape(importance, [Q, MP, JB]), 1)
        tl.store(
            importance_ptr + place[:, None] * columns + j[None, :],
            of_queries,
            mask=(x + tl.arange(0, Q) < tokens)[:, None] & (j < columns)[None, :],
        )


@triton.jit
def ordered(x):
    """int32 that order like the numbers, equal for equal ones; NaN is above all others, so that it
    shows.
    """
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    bits = bits ^ ((bits >> 31) & 2147483647)
    return tl.where(x == x, bits, 2147483647)


@triton.jit
def rank_threshold(bits, COUNT: tl.constexpr):
    """[rows]: the largest number that at least COUNT of the numbers of each row reach.

    Bisection ends early for a row of which exactly COUNT numbers reach the middle.
    """
    low = tl.full([bits.shape[0]], -2147483648, tl.int64)
    high = tl.max(bits, 1).to(tl.int64)
    while tl.max(high - low, 0) > 0:
        middle = low + (high - low + 1) // 2
        reached = tl.sum((bits >= middle.to(tl.int32)[:, None]).to(tl.int32), 1)
        enough = reached >= COUNT
        high = tl.where(enough, high, tl.minimum(high, middle - 1))
        high = tl.where(reached == COUNT, tl.minimum(high, middle), high)
        low = tl.where(enough, middle, low)
    return low.to(tl.int32)


@triton.jit
def write_forced(
    idx_ptr,
    out,  # [rows]: where the choice of each query begins
    own,  # the block that it is in
    exists,
    COUNT: tl.constexpr,
    INIT: tl.constexpr,
    LOCAL: tl.constexpr,
):
    """Writes the forced blocks: the first INIT, then the LOCAL last. A query with at most COUNT
    blocks reads all of them; -1 = unused.
    """
    FORCED: tl.constexpr = INIT + LOCAL
    p = tl.arange(0, triton.next_power_of_2(COUNT))[None, :]
    block = tl.where(p < INIT, p, own[:, None] + p - (FORCED - 1))
    used = tl.where(p < INIT, p <= own[:, None], block >= INIT)
    block = tl.where(p < FORCED, block, p - LOCAL)
    used = tl.where(p < FORCED, used, p <= own[:, None])
    early = own < COUNT
    tl.store(
        idx_ptr + out[:, None] + p,
        tl.where(used, block, -1).to(idx_ptr.dtype.element_ty),
        mask=exists[:, None] & (p < COUNT) & (early[:, None] | (p < FORCED)),
    )


@triton.jit
def write_best(
    idx_ptr,
    out,
    scores,  # [rows, blocks]
    free,  # [rows, blocks]: which of them may be chosen; in a row none, or FREE at least
    FORCED: tl.constexpr,
    FREE: tl.constexpr,
):
    """Writes the FREE blocks of the largest scores behind the forced ones, in the order of their
    positions; among equals the lower block wins. First a bisection finds the score of the last one
    that is chosen, then a running count chooses among equals.
    """
    bits = tl.where(free, ordered(scores), -2147483648)
    threshold = rank_threshold(bits, FREE)[:, None]
    above = bits > threshold
    equal = free & (bits == threshold)
    needed = FREE - tl.sum(above.to(tl.int32), 1)
    chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), 1) <= needed[:, None]))
    column = FORCED - 1 + tl.cumsum(chosen.to(tl.int32), 1)
    j = tl.arange(0, bits.shape[1])[None, :]
    tl.store(
        idx_ptr + out[:, None] + column,
        tl.broadcast_to(j, bits.shape).to(idx_ptr.dtype.element_ty),
        mask=chosen,
    )


@triton.jit
def choose_kernel(
    # tensors
    importance_ptr,
    idx_ptr,  # [Z, G, COUNT], starting at the first KV head of the launch
    tile_ptr,
    # numbers
    G,
    columns,
    # sizes of tiles
    PARTS: tl.constexpr,  # programs of a tile of queries
    Q: tl.constexpr,  # queries of a program
    JP: tl.constexpr,  # a power of two, at least the number of blocks of a document
    # what is chosen
    BLOCK: tl.constexpr,  # tokens of a block
    COUNT: tl.constexpr,
    INIT: tl.constexpr,
    LOCAL: tl.constexpr,
):
    """The blocks that each query of a tile reads."""
    g = tl.program_id(1)
    token, x, tokens, _key = load_tile(tile_ptr, tl.program_id(0) // PARTS)
    query = x + tl.program_id(0) % PARTS * Q + tl.arange(0, Q)
    exists = query < tokens
    own = query // BLOCK
    out = ((token + query).to(tl.int64) * G + g) * COUNT
    write_forced(idx_ptr, out, own, exists, COUNT, INIT, LOCAL)
    if COUNT > INIT + LOCAL:
        j = tl.arange(0, JP)[None, :]
        between = (j >= INIT) & (j <= own[:, None] - LOCAL)
        free = between & (exists & (own >= COUNT))[:, None]
        place = (g * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * Q + tl.arange(0, Q)
        seen = exists[:, None] & (j // 16 <= (own[:, None] - LOCAL) // 16)  # 64 bytes at a time
        importance = tl.load(importance_ptr + place[:, None] * columns + j, mask=seen, other=0.0)
        write_best(idx_ptr, out, importance, free, INIT + LOCAL, COUNT - INIT - LOCAL)


# ---- folding, and the sum of the branches


@triton.jit
def move_kernel(
    # tensors
    x_ptr,
    out_ptr,
    index_ptr,  # of each place its token, of each token its place; -1: none, which gives 0
    # numbers
    rows,  # of out
    heads,  # of a token of the unfolded tensor
    # sizes
    G: tl.constexpr,  # KV heads of the launch
    STRIDE: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    FOLD: tl.constexpr,
):
    """Folds [Z, heads, K] into [lines, G, STRIDE, M, K], or fills the first with the second."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    valid = row < rows
    m = row % M
    if FOLD:
        g = row // (M * STRIDE) % G
        place = row // (M * STRIDE * G) * STRIDE + row // M % STRIDE
        token = tl.load(index_ptr + place, mask=valid, other=-1)
        exists = token >= 0
        source = token.to(tl.int64) * heads + g * M + m
        target = row
    else:
        token = row // (M * G)
        place = tl.load(index_ptr + token, mask=valid, other=-1).to(tl.int64)
        exists = place >= 0
        folded = (place // STRIDE * G + row // M % G) * STRIDE + place % STRIDE
        source = folded * M + m
        target = token * heads + row % (M * G)
    store_rows(out_ptr, target, valid, load_rows(x_ptr, source, exists, K), K)


@triton.jit
def combine_kernel(
    # tensors
    o_ptr,
    cmp_ptr,
    slc_ptr,
    win_ptr,  # [Z, heads, K]: only the heads of the launch
    gate_ptr,  # [Z, H, 3]
    # numbers
    rows,  # Z * heads
    H,
    heads,
    # sizes
    K: tl.constexpr,
    R: tl.constexpr,
):
    """o = g_cmp o_cmp + g_slc o_slc + g_win o_win."""
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    valid = r < rows
    row = r // heads * H + r % heads
    branches = (cmp_ptr, slc_ptr, win_ptr)
    row_of_branch = (row, row, r)
    o = tl.zeros([R, padded(K)], tl.float32)
    for branch in tl.static_range(3):
        gate = tl.load(gate_ptr + row * 3 + branch, mask=valid, other=0.0)
        part = load_rows(branches[branch], row_of_branch[branch], valid, K)
        o += gate.to(tl.float32)[:, None] * part.to(tl.float32)
    store_rows(o_ptr, row, valid, o, K)
