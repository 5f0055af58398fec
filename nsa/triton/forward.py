"""Forward Triton kernels of Native Sparse Attention (arXiv 2502.11089) and what they share with the
backward. Imports torch and triton only.

Letters: Z tokens of all rows, H query heads, G KV heads, M = H/G padded to MP, K head dim padded to
KP, S keys, R rows of a tile: (query,
head) flattened, so that a group of 4 heads fills the tensor cores; J selection blocks, P (query,
selected block) pairs.

Tensors are flat: q [Z, H, K], keys [S, G, K]. A launch serves a few KV heads: pointers start at the
first one, and row z*HEADS + g*M + m
is head m of KV head g, where HEADS is how many heads the tensor holds. t, keys and j count inside a
document. Key s is visible to
t where 0 <= t - (s*STRIDE + SPAN - 1) < WINDOW: compressed blocks with STRIDE = s, SPAN = l, the
window's tokens with STRIDE = SPAN = 1.
Log-sum-exps are in base 2 and +inf for rows that see nothing, so that exp2(s - lse) is 0 there.
Addresses are int64: Z*H*K passes 2^31 at
524,288 tokens, n*Z*H*K at 32,768.
"""

import triton
import triton.language as tl


@triton.jit
def load_rows(ptr, row, live, K: tl.constexpr, KP: tl.constexpr):
    """[rows, KP]; dead rows and columns past K are 0."""
    k = tl.arange(0, KP)
    if K == KP:
        mask = live[:, None]
    else:
        mask = live[:, None] & (k < K)[None, :]
    return tl.load(ptr + row[:, None] * K + k[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(ptr, row, live, x, K: tl.constexpr, KP: tl.constexpr):
    k = tl.arange(0, KP)
    if K == KP:
        mask = live[:, None]
    else:
        mask = live[:, None] & (k < K)[None, :]
    tl.store(ptr + row[:, None] * K + k[None, :], x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def seen(t, STRIDE: tl.constexpr, SPAN: tl.constexpr):
    """How many keys have ended by position t."""
    return tl.maximum(t + (STRIDE + 1 - SPAN), 0) // STRIDE


@triton.jit
def tile_of(tile_ptr, index, table_ptr, KEYS: tl.constexpr):
    """(first item, first token, tokens, first key) of a tile and its document; KEYS is the table's
    column of the first key.
    """
    document = tl.load(tile_ptr + 2 * index)
    entry = table_ptr + 4 * document
    return (
        tl.load(tile_ptr + 2 * index + 1),
        tl.load(entry),
        tl.load(entry + 1),
        tl.load(entry + KEYS),
    )


# ---- queries against a range of keys: the compressed branch and the window


@triton.jit
def fold(
    state,
    q_tile,
    k_ptr,
    v_ptr,
    key_row,
    begin,
    end,
    stop,
    t,
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
    """Online softmax over keys [begin, end), none of them at `stop` or later."""
    acc, top, mass = state
    for s0 in range(begin, end, S):
        s = s0 + tl.arange(0, S)
        row = key_row + s.to(tl.int64) * G
        z = (
            tl.dot(
                q_tile, tl.trans(load_rows(k_ptr, row, s < stop, K, KP)), input_precision="tf32x3"
            )
            * scale2
        )
        if MASKED:
            age = t[:, None] - (s * STRIDE + SPAN - 1)[None, :]
            z = tl.where((age >= 0) & (age < WINDOW) & (s < stop)[None, :], z, float("-inf"))
        new = tl.maximum(top, tl.max(z, 1))
        base = tl.where(new == float("-inf"), 0.0, new)  # -inf - -inf would be NaN
        p = tl.exp2(z - base[:, None])
        shrink = tl.exp2(top - base)
        v_tile = load_rows(v_ptr, row, s < stop, K, KP)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * shrink[:, None], input_precision="tf32x3")
        top, mass = new, mass * shrink + tl.sum(p, 1)
    return acc, top, mass


@triton.jit
def ranged_forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    lse_ptr,
    tile_ptr,
    table_ptr,
    scale2,
    H,
    G,
    HEADS_O,
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
    g = tl.program_id(1)
    index = tl.num_programs(0) - 1 - tl.program_id(0)  # late queries see the most: start them first
    x, token, tokens, key = tile_of(tile_ptr, index, table_ptr, KEYS)
    r = tl.arange(0, R)
    t, m = x + r // MP, r % MP
    live = (t < tokens) & (m < M)
    z, head = (token + t).to(tl.int64), g * M + m
    q_tile = load_rows(q_ptr, z * H + head, live, K, KP)
    key_row = key.to(tl.int64) * G + g
    last = tl.minimum(x + R // MP, tokens) - 1
    begin, stop = seen(x - WINDOW, STRIDE, SPAN), seen(last, STRIDE, SPAN)
    # keys that every row sees need no mask: [low, high), whole steps from `begin`
    low = begin + tl.cdiv(seen(last - WINDOW, STRIDE, SPAN) - begin, S) * S
    high = tl.maximum(low, begin + (seen(x, STRIDE, SPAN) - begin) // S * S)
    state = (
        tl.zeros([R, KP], tl.float32),
        tl.full([R], float("-inf"), tl.float32),
        tl.zeros([R], tl.float32),
    )
    state = fold(
        state,
        q_tile,
        k_ptr,
        v_ptr,
        key_row,
        begin,
        low,
        stop,
        t,
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
    state = fold(
        state,
        q_tile,
        k_ptr,
        v_ptr,
        key_row,
        low,
        high,
        stop,
        t,
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
    state = fold(
        state,
        q_tile,
        k_ptr,
        v_ptr,
        key_row,
        high,
        stop,
        stop,
        t,
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
    acc, top, mass = state
    blind = mass == 0.0
    safe = tl.where(blind, 1.0, mass)
    store_rows(o_ptr, z * HEADS_O + head, live, acc / safe[:, None], K, KP)
    tl.store(lse_ptr + z * H + head, tl.where(blind, float("inf"), top + tl.log2(safe)), mask=live)


# ---- choice of blocks


@triton.jit
def choose_kernel(
    q_ptr,
    k_ptr,
    lse_ptr,
    idx_ptr,
    tile_ptr,
    table_ptr,
    scale2,
    H,
    G,
    M: tl.constexpr,
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
    COUNT: tl.constexpr,
    INIT: tl.constexpr,
    LOCAL: tl.constexpr,
    BEST: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Selected blocks of each query: every block up to its own while there are at most COUNT; then
    the first INIT, the LOCAL last, and the most important others, whose importance never leaves the
    chip.

    A block's importance takes PER + SPREAD - 1 compressed keys, times WEIGHTS (1, 2, 2, 2, 1 in the
    default sizes): one product for each of
    these offsets, strided over the blocks of the tile, pools without moving data between threads.
    fp32 importance and index rank as one
    int64: non-negative floats order like their bits, and the lower block wins a tie. BEST, a power
    of two, is at least the number of free
    places."""
    g = tl.program_id(1)
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    x, token, tokens, key = tile_of(tile_ptr, index, table_ptr, 2)
    Q: tl.constexpr = R // MP
    FORCED: tl.constexpr = INIT + LOCAL
    r = tl.arange(0, R)
    t, m = x + r // MP, r % MP
    live = (t < tokens) & (m < M)
    row = (token + t).to(tl.int64) * H + g * M + m
    query = x + tl.arange(0, Q)
    own = query // (PER * STRIDE)
    best = tl.full([Q, BEST], -1, tl.int64)
    if COUNT > FORCED:
        q_tile = load_rows(q_ptr, row, live, K, KP)
        lse = tl.load(lse_ptr + row, mask=live, other=float("inf"))
        key_row = key.to(tl.int64) * G + g
        last = tl.minimum(x + Q, tokens) - 1
        stop = tl.where(
            last >= COUNT * PER * STRIDE, last // (PER * STRIDE) - LOCAL + 1, INIT
        )  # early queries choose nothing
        for j0 in range(INIT, stop, JB):
            j = j0 + tl.arange(0, JB)
            imp = tl.zeros([R, JB], tl.float32)
            for offset in tl.static_range(PER + SPREAD - 1):
                s = j * PER + (offset - SPREAD + 1)
                k_tile = load_rows(
                    k_ptr,
                    key_row + s.to(tl.int64) * G,
                    (s >= 0) & (s < seen(last, STRIDE, SPAN)),
                    K,
                    KP,
                )
                logit = tl.dot(q_tile, tl.trans(k_tile), input_precision="tf32x3") * scale2
                visible = (s >= 0)[None, :] & (s[None, :] * STRIDE + SPAN - 1 <= t[:, None])
                imp += WEIGHTS[offset] * tl.exp2(
                    tl.where(visible, logit - lse[:, None], float("-inf"))
                )
            imp = tl.sum(tl.reshape(imp, [Q, MP, JB]), 1)
            rank = (imp.to(tl.int32, bitcast=True).to(tl.int64) << 32) + (2147483647 - j)[None, :]
            rank = tl.where(j[None, :] <= own[:, None] - LOCAL, rank, -1)
            # of a falling and a rising list, the larger of each pair are the best of both, in an
            # order that one merge sorts
            best = tl.bitonic_merge(
                tl.maximum(best, tl.flip(tl.topk(rank, BEST), 1)), descending=True
            )
    # a NaN's rank may lose its index: the limits keep it from reading out of bounds
    free = tl.minimum(
        tl.maximum(2147483647 - (best & 4294967295), 0), tl.maximum(own - LOCAL, 0)[:, None]
    )
    early = (own < COUNT)[:, None]
    kept = (query < tokens)[:, None]
    base = idx_ptr + ((token + query).to(tl.int64) * G + g)[:, None] * COUNT
    p = tl.arange(0, COLUMNS)[None, :]
    first = tl.where(
        early,
        tl.where(p <= own[:, None], p, -1),
        tl.where(p < INIT, p, own[:, None] + p - (FORCED - 1)),
    )
    tl.store(
        base + p,
        first.to(idx_ptr.dtype.element_ty),
        mask=kept & (p < COUNT) & (early | (p < FORCED)),
    )
    p = FORCED + tl.arange(0, BEST)[None, :]
    tl.store(
        base + p,
        free.to(idx_ptr.dtype.element_ty),
        mask=kept & (p < COUNT) & (own >= COUNT)[:, None],
    )


# ---- selected branch: tiles of pairs of one block, then their merge


@triton.jit
def piece_of(
    piece,
    block_ptr,
    first_ptr,
    start_ptr,
    tile_ptr,
    table_ptr,
    J,
    SIZE: tl.constexpr,
    L: tl.constexpr,
):
    """A piece's pairs [begin, end), its block's KV head, first position, document's first token,
    and keys.
    """
    block = tl.load(block_ptr + piece)
    begin = tl.load(start_ptr + block) + (piece - tl.load(first_ptr + block)) * SIZE
    x, token, tokens, _ = tile_of(tile_ptr, block % J, table_ptr, 0)
    return (
        begin,
        tl.minimum(begin + SIZE, tl.load(start_ptr + block + 1)),
        block // J,
        x,
        token,
        tl.minimum(L, tokens - x),
    )


@triton.jit
def pairs_of(order_ptr, position, live, query0, COUNT, Z):
    """Token of each sorted pair, flat."""
    return (tl.load(order_ptr + position, mask=live, other=0) // COUNT + query0) % Z


@triton.jit
def pair_forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    lse_ptr,
    block_ptr,
    first_ptr,
    start_ptr,
    order_ptr,
    tile_ptr,
    table_ptr,
    query0,
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
    L: tl.constexpr,
    LP: tl.constexpr,
):
    """Softmax of each pair's rows over the keys of the pair's block, normalised, and its
    log-sum-exp, in sorted order.
    """
    piece = tl.program_id(0)
    if tl.load(block_ptr + piece) == BLOCKS:
        return
    begin, end, g, x, token, keys = piece_of(
        piece, block_ptr, first_ptr, start_ptr, tile_ptr, table_ptr, J, R // MP, L
    )
    r = tl.arange(0, R)
    position, m = begin + r // MP, r % MP
    live = (position < end) & (m < M)
    z = pairs_of(order_ptr, position, live, query0, COUNT, Z).to(tl.int64)
    q_tile = load_rows(q_ptr, z * H + g * M + m, live, K, KP)
    s = tl.arange(0, LP)
    row = (token + x + s).to(tl.int64) * G + g
    logit = (
        tl.dot(q_tile, tl.trans(load_rows(k_ptr, row, s < keys, K, KP)), input_precision="tf32x3")
        * scale2
    )
    visible = (s < keys)[None, :] & (
        (token + x + s)[None, :] <= z[:, None]
    )  # only a query's own block hides keys
    logit = tl.where(
        visible | (s == 0)[None, :], logit, float("-inf")
    )  # the first key is always visible; dead rows stay finite
    top = tl.max(logit, 1)
    p = tl.exp2(logit - top[:, None])
    mass = tl.sum(p, 1)
    v_tile = load_rows(v_ptr, row, s < keys, K, KP)
    o = tl.dot(p.to(v_tile.dtype), v_tile, input_precision="tf32x3") / mass[:, None]
    out = position.to(tl.int64) * M + m
    store_rows(o_ptr, out, live, o, K, KP)
    tl.store(lse_ptr + out, top + tl.log2(mass), mask=live)


@triton.jit
def gather_kernel(
    x_ptr,
    part_lse_ptr,
    place_ptr,
    o_ptr,
    lse_ptr,
    query0,
    queries,
    COUNT,
    Z,
    H,
    HEADS_O,
    M: tl.constexpr,
    MP: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    R: tl.constexpr,
    MERGE: tl.constexpr,
):
    """Sum over a query's pairs: of their outputs, weighted by exp2(lse - total lse) (MERGE), or of
    their gradients.
    """
    r = tl.arange(0, R)
    c, m = tl.program_id(0) * (R // MP) + r // MP, r % MP
    live = (c < queries) & (m < M)
    z, g = ((c + query0) % Z).to(tl.int64), (c + query0) // Z
    top, mass = tl.full([R], float("-inf"), tl.float32), tl.zeros([R], tl.float32)
    acc = tl.zeros([R, KP], tl.float32)
    for p in range(COUNT):
        place = tl.load(place_ptr + c * COUNT + p, mask=live, other=-1).to(tl.int64)
        row, used = place * M + m, place >= 0
        part = load_rows(x_ptr, row, used, K, KP).to(tl.float32)
        if MERGE:
            lse = tl.load(part_lse_ptr + row, mask=used, other=float("-inf"))
            new = tl.maximum(top, lse)
            base = tl.where(new == float("-inf"), 0.0, new)
            shrink, weight = tl.exp2(top - base), tl.exp2(lse - base)
            acc = acc * shrink[:, None] + part * weight[:, None]
            top, mass = new, mass * shrink + weight
        else:
            acc += part
    if MERGE:
        mass = tl.where(live, mass, 1.0)
        acc /= mass[:, None]
        tl.store(lse_ptr + z * H + g * M + m, top + tl.log2(mass), mask=live)
    store_rows(o_ptr, z * HEADS_O + g * M + m, live, acc, K, KP)


@triton.jit
def combine_kernel(
    o_ptr,
    cmp_ptr,
    slc_ptr,
    win_ptr,
    gate_ptr,
    rows,
    H,
    HEADS,
    K: tl.constexpr,
    KP: tl.constexpr,
    R: tl.constexpr,
):
    """o = g_cmp o_cmp + g_slc o_slc + g_win o_win; o_win holds HEADS heads of each token, the
    others H.
    """
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    live, row = r < rows, r // HEADS * H + r % HEADS
    o = tl.zeros([R, KP], tl.float32)
    for branch in tl.static_range(3):
        gate = tl.load(gate_ptr + row * 3 + branch, mask=live, other=0.0).to(tl.float32)
        part = load_rows(
            cmp_ptr if branch == 0 else slc_ptr if branch == 1 else win_ptr,
            r if branch == 2 else row,
            live,
            K,
            KP,
        )
        o += gate[:, None] * part.to(tl.float32)
    store_rows(o_ptr, row, live, o, K, KP)


INTERPRETED = not isinstance(
    combine_kernel, triton.JITFunction
)  # what the decorator made of it, whatever the environment says by now
