"""Decoding over blocks of keys: what all states share, and the attention of one token.

A state keeps keys and values, and what its scores are made of. A token is stored first, then blocks
are scored, chosen by the rule of choose.py, and attended to exactly: on CUDA by Triton kernels
(triton/decode.py) if it serves them, which also take the position from a tensor, so that a CUDA
graph can repeat the step.

Letters: B rows, H query heads, G KV heads, M = H/G, X = B*G, K head dimension, S stored positions,
N blocks, n chosen ones, l tokens of a block, L keys that are read, R rows of a product, W their
width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from base import machine
from longhaul.sparse.choose import Products
from longhaul.sparse.triton import runs_triton
from model import Device, LayerCache


class BlockCache(LayerCache):
    """Keys and values of one layer, of which a decoded token reads some blocks."""

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        sizes,
        device: Device,
        dtype: torch.dtype,
        kernels: str,
    ):
        """sizes: those of a selector, by which blocks are chosen (block, count, init, local)."""
        B, length, G, K = shape
        l = sizes.block
        S = -(-length // l) * l  # whole blocks are read
        self.whole_kv = [
            torch.zeros((B, S, G, K), device=device, dtype=dtype),
            torch.zeros((B, S, G, K), device=device, dtype=dtype),
        ]
        self.capacity = length
        self.length = 0
        self.sizes = sizes
        self.fused = runs_triton(self.whole_kv[0], 1, l, kernels)
        self.block_N = torch.arange(S // l, device=device)
        # where token i of block 0 of each KV head is among all rows of K numbers
        token_l = torch.arange(l, device=device) * G
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
    def position(self) -> int:
        """Of the token that was stored last."""
        return self.length - 1

    def position_tensor(self) -> Tensor:
        """The position [1] on the device."""
        return torch.full((1,), self.position, device=self.whole_kv[0].device)

    def free_blocks(self) -> range:
        """Those between the forced ones; none as long as every block is read."""
        sizes = self.sizes
        if self.position < sizes.count * sizes.block:
            return range(0)
        return range(sizes.init, self.position // sizes.block - sizes.local + 1)

    def attend_blocks(self, q_BGMK: Tensor, scores_XN: Tensor | None) -> Tensor:
        """o_BGMK over the blocks that are chosen by the scores of those before the local ones."""
        free = self.free_blocks()
        if not free:
            return attend(q_BGMK, *(x.transpose(1, 2) for x in self.stored()))
        if self._is_fused(q_BGMK):
            from longhaul.sparse.triton.decode import attend_chosen

            position_1 = self.position_tensor()
            return attend_chosen(q_BGMK, self.whole_kv, scores_XN, position_1, self.sizes)
        k_BGLK, v_BGLK = self._gathered(self._chosen(scores_XN, free))
        # the own block comes last and is unfinished
        block = self.sizes.block
        end = (self.sizes.count - 1) * block + self.position % block + 1
        return attend(q_BGMK, k_BGLK[:, :, :end], v_BGLK[:, :, :end])

    def _is_fused(self, q: Tensor) -> bool:
        """Whether the Triton kernels attend, which have no gradients."""
        return self.fused and not q.requires_grad

    def _chosen(self, scores_XN: Tensor, free: range) -> Tensor:
        """int64 [X, n]: the forced blocks, and the best of the free ones; the own one last.

        A score and its block rank as one int64, of which the least is the best: bits of a float
        order like it, and the block in the lower half lets the lower one win a tie.
        """
        sizes = self.sizes
        free_P = self.block_N[free.start : free.stop]
        bits_XP = self.ordered_bits(scores_XN[:, free.start : free.stop])
        key_XP = torch.sub(free_P, bits_XP, alpha=2**32)
        most = sizes.count - sizes.init - sizes.local
        best_XP = key_XP.topk(most, largest=False, sorted=False).values & 0xFFFFFFFF
        forced = self.block_N[: sizes.init], self.block_N[free.stop : free.stop + sizes.local]
        first_Xi, near_Xl = (x.expand(len(best_XP), -1) for x in forced)
        return torch.cat((first_Xi, best_XP, near_Xl), 1)

    def ordered_bits(self, scores_XN: Tensor) -> Tensor:
        """int32 that order like the scores in fp32, equal for equal ones; NaN is above all others,
        so that it shows.
        """
        # -0.0 becomes 0.0, and NaN positive
        scores_XN = scores_XN.nan_to_num(torch.inf, torch.inf, -torch.inf).add_(0.0)
        bits_XN = scores_XN.view(torch.int32)
        return bits_XN ^ ((bits_XN >> 31) & 0x7FFFFFFF)

    def _gathered(self, block_Xn: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, G, n * l, K] of these blocks."""
        B, G, _, l = self.row_BG1l.shape
        block_BGn1 = block_Xn.view(B, G, -1, 1)
        row_BGL = torch.add(self.row_BG1l, block_BGn1, alpha=G * l).flatten(2)
        shape = *row_BGL.shape, self.k_BSGK.shape[-1]
        rows = row_BGL.flatten()
        k, v = (x.flatten(0, 2).index_select(0, rows).view(shape) for x in self.whole_kv)
        return k, v


def attend(q_BGMK: Tensor, k_BGLK: Tensor, v_BGLK: Tensor) -> Tensor:
    """o_BGMK over these keys."""
    with machine.lengths_vary(q_BGMK):
        return F.scaled_dot_product_attention(q_BGMK, k_BGLK, v_BGLK)


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
