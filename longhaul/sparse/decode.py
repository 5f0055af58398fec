"""Decoding over blocks of keys: what all states share, and the attention of one token.

A state keeps keys and values, and what its scores are made of. A token is stored first, then blocks
are scored, chosen by the rule of choose.py, and attended to exactly.

Without a clock, the token's position is a number, and what lies behind it is sliced away. By a
clock (longhaul/clock.py) it is a tensor, all that is stored is read under a mask, and no shape
changes, so that a CUDA graph can repeat the step.

A score and its block rank as one int64, of which the least is the best: bits of a float order like
it, and the block in the lower half lets the lower one win a tie.

Letters: B rows, H query heads, G KV heads, M = H/G, X = B*G, K head dimension, S stored positions,
J blocks of them, n chosen ones, l tokens of a block, L keys that are read, R rows of a product, W
their width.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from base.machine import platform
from longhaul.sparse.choose import Products
from model import Device, LayerCache


class Rule(NamedTuple):
    """Which blocks are read whatever their scores are, and how many in all."""

    block: int
    count: int
    init: int
    local: int


class BlockCache(LayerCache):
    """Keys and values of one layer, of which a decoded token reads some blocks."""

    clock = None

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        rule: Rule,
        device: Device,
        dtype: torch.dtype,
    ):
        B, length, G, K = shape
        # Whole blocks are read, at least n. What no token has written is read under a mask: zeros.
        blocks = max(rule.count, -(-length // rule.block))
        S = blocks * rule.block
        self.whole_kv = [
            torch.zeros((B, S, G, K), device=device, dtype=dtype),
            torch.zeros((B, S, G, K), device=device, dtype=dtype),
        ]
        self.capacity = length
        self.length = 0
        self.rule = rule
        self.block_J = torch.arange(blocks, device=device)
        # where token i of block 0 of each KV head is among all rows of K numbers
        token_l = torch.arange(rule.block, device=device) * G
        group_G1 = torch.arange(G, device=device)[:, None]
        row_B111 = torch.arange(B, device=device).view(-1, 1, 1, 1) * (S * G)
        self.row_BG1l = row_B111 + group_G1[:, None] + token_l

    # Views are made when they are asked for: an old one may not be written where gradients are on.

    @property
    def k_BSGK(self) -> Tensor:
        return self.whole_kv[0][:, : self.capacity]

    @property
    def v_BSGK(self) -> Tensor:
        return self.whole_kv[1][:, : self.capacity]

    @property
    def position(self) -> int | Tensor:
        """Of the token that was stored last."""
        return self.length - 1 if self.clock is None else self.clock.position

    def free_blocks(self) -> range:
        """Those between the forced ones; none as long as every block is read."""
        rule = self.rule
        if self.position < rule.count * rule.block:
            return range(0)
        return range(rule.init, self.position // rule.block - rule.local + 1)

    def attend_blocks(self, q_BGMK: Tensor, bits_XJ: Tensor | None) -> Tensor:
        """o_BGMK over the blocks that the rule chooses. `bits_XJ` order like the scores of the free
        blocks, by a clock of all.
        """
        if self.clock is not None:
            return self._attend_by_clock(q_BGMK, bits_XJ)
        free = self.free_blocks()
        if not free:
            return attend(q_BGMK, *(x.transpose(1, 2) for x in self.stored()))
        chosen_Xn = choose_stored(bits_XJ, self.block_J, self.rule, free)
        k_BGLK, v_BGLK = self.gathered(self._rows(chosen_Xn))
        # the own block comes last and is unfinished
        block = self.rule.block
        end = (self.rule.count - 1) * block + self.position % block + 1
        return attend(q_BGMK, k_BGLK[:, :, :end], v_BGLK[:, :, :end])

    def _attend_by_clock(self, q_BGMK: Tensor, bits_XJ: Tensor) -> Tensor:
        clock = self.clock
        chosen_Xn = choose_by_clock(bits_XJ, self.block_J, self.rule, clock)
        row_BGL = self._rows(chosen_Xn)
        first_BG1 = self.row_BG1l[..., 0]
        G = first_BG1.shape[1]
        last_BG1 = clock.shared("last row", lambda: first_BG1 + clock.position * G)
        is_read_BGL = row_BGL <= last_BG1
        return attend(q_BGMK, *self.gathered(row_BGL), is_read_BGL[:, :, None])

    def _rows(self, block_Xn: Tensor) -> Tensor:
        """Where the keys of these blocks are among all rows, [B, G, n * l]."""
        B, G, _, l = self.row_BG1l.shape
        block_BGn1 = block_Xn.view(B, G, -1, 1)
        return torch.add(self.row_BG1l, block_BGn1, alpha=G * l).flatten(2)

    def gathered(self, row_BGL: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, G, L, K] of these rows of K numbers."""
        shape = *row_BGL.shape, self.k_BSGK.shape[-1]
        rows = row_BGL.flatten()
        k, v = (x.flatten(0, 2).index_select(0, rows).view(shape) for x in self.whole_kv)
        return k, v


def put(
    buffer: Tensor,
    dim: int,
    slot: int | Tensor,
    x: Tensor,
) -> None:
    """Writes one token, of size 1 in this dimension."""
    if isinstance(slot, int):
        buffer.narrow(dim, slot, 1).copy_(x)
    else:
        buffer.index_copy_(dim, slot, x)


def ordered_bits(scores_XJ: Tensor) -> Tensor:
    """int32 that order like the scores in fp32, equal for equal ones; NaN is above all others, so
    that it shows.
    """
    # -0.0 becomes 0.0, and NaN positive
    bits_XJ = scores_XJ.nan_to_num(torch.inf, torch.inf, -torch.inf).add_(0.0).view(torch.int32)
    return bits_XJ ^ ((bits_XJ >> 31) & 0x7FFFFFFF)


def choose_stored(
    bits_XJ: Tensor,
    block_J: Tensor,
    rule: Rule,
    free: range,
) -> Tensor:
    """int64 [X, n]: the forced blocks, and the best of the free ones; the own one last."""
    key_XJ = torch.sub(block_J[free.start : free.stop], bits_XJ, alpha=2**32)
    most = rule.count - rule.init - rule.local
    best_XP = key_XJ.topk(most, largest=False, sorted=False).values & 0xFFFFFFFF
    forced = block_J[: rule.init], block_J[free.stop : free.stop + rule.local]
    first_Xi, near_Xl = (x.expand(len(bits_XJ), -1) for x in forced)
    return torch.cat((first_Xi, best_XP, near_Xl), 1)


def choose_by_clock(
    bits_XJ: Tensor,
    block_J: Tensor,
    rule: Rule,
    clock,
) -> Tensor:
    """The same at fixed shapes, in any order; with blocks behind the own one if there are fewer."""

    def rank() -> Tensor:
        own_1 = clock.position // rule.block
        is_forced_J = (block_J < rule.init) | (block_J > own_1 - rule.local)
        rank_J = block_J + torch.where(is_forced_J, -(2**63), 0)
        return torch.where(block_J > own_1, block_J + (2**63 - 2**32), rank_J)

    rank_J = clock.shared("rank", rank)
    is_settled_J = clock.shared("settled", lambda: rank_J != block_J)
    key_XJ = torch.sub(rank_J, bits_XJ.masked_fill(is_settled_J, 0), alpha=2**32)
    return key_XJ.topk(rule.count, largest=False, sorted=False).values & 0xFFFFFFFF


def attend(
    q_BGMK: Tensor,
    k_BGLK: Tensor,
    v_BGLK: Tensor,
    is_read: Tensor | None = None,
) -> Tensor:
    """o_BGMK over these keys."""
    with platform().lengths_vary(q_BGMK):
        return F.scaled_dot_product_attention(q_BGMK, k_BGLK, v_BGLK, attn_mask=is_read)


# ---- products of a few rows with many keys, which lie in the cache


class TokenProducts(Products):
    """The products of one token: keys are not copied."""

    def __init__(self, q: Tensor):
        super().__init__(q, q.dtype)

    def __call__(self, a_ZJW: Tensor, b_ZRW: Tensor) -> Tensor:
        return logits(b_ZRW, a_ZJW).mT


def each_product(a_XRK: Tensor, b_XKS: Tensor) -> Tensor:
    """a b for each of the X KV heads.

    With few rows, a batched bf16 product of a CPU is 9 times slower than 2-D products.
    """
    if a_XRK.is_cuda:
        return torch.bmm(a_XRK, b_XKS)
    return torch.stack([a @ b for a, b in zip(a_XRK, b_XKS, strict=True)])


def logits(q_XRK: Tensor, k_XSK: Tensor) -> Tensor:
    """q k^T [X, R, S] in fp32.

    A bf16 product of a CPU returns bf16, too coarse for logits. Subtracting it inside a second
    product, whose sums are fp32, returns what rounding lost.
    """
    if q_XRK.is_cuda and q_XRK.dtype != torch.float32:
        return torch.bmm(q_XRK, k_XSK.mT, out_dtype=torch.float32)
    if q_XRK.dtype != torch.bfloat16:
        return each_product(q_XRK.float(), k_XSK.float().mT)

    high = each_product(q_XRK, k_XSK.mT)
    low = [
        torch.addmm(high_RS, q_RK, k_SK.T, beta=-1)
        for high_RS, q_RK, k_SK in zip(high, q_XRK, k_XSK, strict=True)
    ]
    return high.float().add_(torch.stack(low))
