"""Triton kernels that decode one token, of Native Sparse Attention and of all selectors. decode.py
launches them and says how they work together; tiles.py has what all kernels share.

Letters: B rows of the batch, G KV heads, X = B*G, M query heads of each, K head dim. Log-sum-exps
are in base 2.

position_ptr   the token's position, one int64
part_o_ptr     [X, parts, M, K] fp32, attention to the keys of each tile
part_lse_ptr   [X, parts, M] fp32, their log-sum-exp
"""

import triton
import triton.language as tl

from longhaul.sparse.triton.nsa_kernels import write_best, write_forced
from longhaul.sparse.triton.tiles import load_rows, padded, product, store_rows


@triton.jit
def put_kernel(
    a_ptr,  # [B, numbers] of the token
    b_ptr,
    ring_a_ptr,  # [B, size, numbers]
    ring_b_ptr,
    position_ptr,
    size,
    numbers,
):
    """Stores two tensors of the token in two rings of the same size."""
    row = tl.program_id(0)
    number = tl.program_id(1) * 256 + tl.arange(0, 256)
    valid = number < numbers
    place = (row * size + tl.load(position_ptr) % size) * numbers + number
    a = tl.load(a_ptr + row * numbers + number, mask=valid)
    b = tl.load(b_ptr + row * numbers + number, mask=valid)
    tl.store(ring_a_ptr + place, a, mask=valid)
    tl.store(ring_b_ptr + place, b, mask=valid)


@triton.jit
def tile_kernel(
    # tensors
    q_ptr,  # [X, M, K]
    k_ptr,  # [B, keys, G, K]
    v_ptr,
    chosen_ptr,  # [X, tiles] blocks; None: those of the window, or all
    position_ptr,
    logits_ptr,  # None, or [X, M, keys] fp32 in base 2, which are written
    part_o_ptr,
    part_lse_ptr,
    # numbers
    G,
    keys,
    first,  # part of the first tile
    parts,
    scale2,
    # which keys are read
    SIZE: tl.constexpr,  # keys of a block
    STRIDE: tl.constexpr,  # tokens from one key to the next
    SPAN: tl.constexpr,  # tokens of a key
    WINDOW: tl.constexpr,  # tokens back from the position on
    # sizes of heads
    M: tl.constexpr,
    K: tl.constexpr,
):
    """Attention of the token's heads to one block of keys, which are read if they have ended; 0 and
    -inf without any.
    """
    x = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1)
    position = tl.load(position_ptr)
    block = tl.maximum(position + 1 - WINDOW, 0) // SIZE + i
    if chosen_ptr is not None:
        block = tl.load(chosen_ptr + x * tl.num_programs(1) + i).to(tl.int64)
    number = tl.arange(0, padded(SIZE))
    s = block * SIZE + number
    exists = (s >= 0) & (number < SIZE) & (s < keys)
    seen = exists & (s > position - WINDOW) & (s * STRIDE + SPAN - 1 <= position)
    row = (x // G * keys + s) * G + x % G

    m = tl.arange(0, padded(M))
    head = x * M + m
    valid = m < M
    q_tile = load_rows(q_ptr, head, valid, K)
    k_tile = load_rows(k_ptr, row, seen, K)
    logits = product(q_tile, tl.trans(k_tile)) * scale2
    logits = tl.where(seen[None, :], logits, float("-inf"))
    if logits_ptr is not None:
        place = head[:, None] * keys + s[None, :]
        tl.store(logits_ptr + place, logits, mask=valid[:, None] & exists[None, :])

    top = tl.max(logits, 1)
    top = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2(logits - top[:, None])
    mass = tl.sum(p, 1)
    part = (x * parts + first + i) * M + m
    tl.store(part_lse_ptr + part, top + tl.log2(mass), mask=valid)
    some = tl.where(mass == 0, 1.0, mass)
    v_tile = load_rows(v_ptr, row, seen, K)
    o = product(p.to(v_tile.dtype), v_tile) / some[:, None]
    store_rows(part_o_ptr, part, valid, o, K)


@triton.jit
def choose_blocks_kernel(
    # tensors
    scores_ptr,  # [X, columns] fp32 of blocks, or logits [X, M, columns] of compressed keys
    part_lse_ptr,  # of these, their parts come first; None with scores
    chosen_ptr,  # [X, COUNT]
    position_ptr,
    # numbers
    columns,
    parts,
    tiles,  # of compressed keys
    # sizes
    M: tl.constexpr,
    STRIDE: tl.constexpr,
    SPAN: tl.constexpr,
    TP: tl.constexpr,  # tiles and blocks padded
    JP: tl.constexpr,
    # what is chosen
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    INIT: tl.constexpr,
    LOCAL: tl.constexpr,
):
    """The blocks that the token reads, by their scores or by the mass of compressed keys, each as
    often as it shares a stride with the block.
    """
    x = tl.program_id(0).to(tl.int64)
    position = tl.load(position_ptr)
    own = (tl.zeros([1], tl.int64) + position) // BLOCK
    out = tl.zeros([1], tl.int64) + x * COUNT
    write_forced(chosen_ptr, out, own, own >= 0, COUNT, INIT, LOCAL)
    if COUNT > INIT + LOCAL:
        j = tl.arange(0, JP)[None, :]
        free = (j >= INIT) & ((j <= own - LOCAL) & (own >= COUNT))
        if part_lse_ptr is None:
            scores = tl.load(scores_ptr + x * columns + j, mask=free, other=0.0)
        else:
            scores = tl.zeros([1, JP], tl.float32)
            tile = tl.arange(0, TP)
            for m in range(M):
                part = part_lse_ptr + (x * parts + tile) * M + m
                lse = tl.load(part, mask=tile < tiles, other=float("-inf"))
                top = tl.max(lse, 0)
                lse = top + tl.log2(tl.sum(tl.exp2(lse - top), 0))
                PER: tl.constexpr = BLOCK // STRIDE
                for i in tl.static_range(PER * (SPAN // STRIDE)):
                    s = j * PER + i % PER - i // PER
                    seen = free & (s >= 0) & (s * STRIDE + SPAN - 1 <= position)
                    logit = scores_ptr + (x * M + m) * columns + s
                    logit = tl.load(logit, mask=seen, other=float("-inf"))
                    scores += tl.exp2(logit - lse)
        write_best(chosen_ptr, out, scores, free, INIT + LOCAL, COUNT - INIT - LOCAL)


@triton.jit
def merge_parts_kernel(
    part_o_ptr,
    part_lse_ptr,
    gate_ptr,  # [X, M, 3] of the branches; None: 1
    o_ptr,  # [X, M, K]
    parts,
    end_0,  # of the parts of the first branch
    end_1,
    M: tl.constexpr,
    K: tl.constexpr,
):
    """The attention of one head: the sum of its branches, each merged, times their gates."""
    head = tl.program_id(0).to(tl.int64)
    x = head // M
    begin = x * parts
    ends = (end_0, end_1, parts)
    o = tl.zeros([1, padded(K)], tl.float32)
    for branch in tl.static_range(3):
        end = x * parts + ends[branch]
        acc = tl.zeros([1, padded(K)], tl.float32)
        top = tl.full([1], float("-inf"), tl.float32)
        mass = tl.zeros([1], tl.float32)
        for start in range(begin, end, 16):
            part = start + tl.arange(0, 16)
            row = part * M + head % M
            lse = tl.load(part_lse_ptr + row, mask=part < end, other=float("-inf"))
            new_top = tl.maximum(top, tl.max(lse, 0))
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            weight = tl.exp2(lse - base)
            shrink = tl.exp2(top - base)
            part_o = load_rows(part_o_ptr, row, part < end, K)
            acc = acc * shrink[:, None] + tl.sum(part_o * weight[:, None], 0)[None, :]
            mass = mass * shrink + tl.sum(weight, 0)
            top = new_top
        acc /= tl.where(mass == 0, 1.0, mass)[:, None]
        if gate_ptr is not None:
            acc *= tl.load(gate_ptr + head * 3 + branch).to(tl.float32)
        o += acc
        begin = end
    row = tl.zeros([1], tl.int64) + head
    store_rows(o_ptr, row, row >= 0, o, K)
