"""Blocks by attention over means of keys (InfLLM-v2, arXiv 2509.24663).

    kbar_j = mean of the rotated keys i in [16 j, 16 j + 32)
    p_h[t, j] = softmax over j of q_h[t] . kbar_j / sqrt(K), of the kernels that end before t
    S[t, b] = max over the five kernels j that touch b of the sum over the group's heads h of p_h

With reduce=logsumexp, their sum in place of the largest: an estimate of the block's mass, the
exponential of a log-sum-exp of its logits (SubBlock). Letters: those of choose.py, J kernels.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from longhaul.sparse.choose import Products
from longhaul.sparse.layer import BlockConfig


@dataclass(frozen=True)
class Pooled(BlockConfig):
    """Attention over the blocks whose means of keys draw most attention."""

    name = "pooled"
    found = "a quarter"

    count: int = 64
    local: int = 32
    dense_below: int = 8192
    kernel: int = 32  # keys of a mean
    stride: int = 16  # keys from one mean to the next
    reduce: str = "max"  # of the kernels that touch a block: max, or logsumexp

    def __post_init__(self):
        super().__post_init__()
        if self.block % self.stride or self.kernel % self.stride:
            names = ["block", "kernel", "stride"]
            raise self.refusal(names, "block and kernel multiples of stride", "change stride")
        if self.reduce not in ("max", "logsumexp"):
            raise self.refusal(["reduce"], "max or logsumexp", "choose one of them")

    def span(self) -> tuple[int, int]:
        return self.kernel, self.stride

    def summarise(self, k_BSGK: Tensor) -> Tensor:
        J = self.entries(k_BSGK.shape[1])
        if not J:
            return k_BSGK[:, :0].float()
        return k_BSGK.float().unfold(1, self.kernel, self.stride).mean(-1)

    def scores(
        self,
        q_ZCMK: Tensor,
        kbar_ZJK: Tensor,
        first: int,
        N: int,
        products: Products,
    ) -> Tensor:
        C, M, K = q_ZCMK.shape[1:]
        J = self.entries(first + C)
        logits_ZRJ = products(q_ZCMK.float().flatten(1, 2), kbar_ZJK[:, :J]).mul_(K**-0.5)
        end_J = torch.arange(J, device=q_ZCMK.device) * self.stride + self.kernel
        seen_C = torch.arange(first, first + C, device=q_ZCMK.device) + 1
        is_future_CJ = end_J > seen_C[:, None]
        logits_ZCMJ = logits_ZRJ.unflatten(1, (C, M)).masked_fill_(
            is_future_CJ[:, None], -torch.inf
        )
        p_ZCJ = logits_ZCMJ.softmax(-1).sum(2)

        each = self.block // self.stride
        before = self.kernel // self.stride - 1
        p_ZCJ = F.pad(p_ZCJ[..., : N * each], (before, max(0, N * each - J)))
        touching_ZCNj = p_ZCJ.unfold(-1, each + before, each)
        return touching_ZCNj.amax(-1) if self.reduce == "max" else touching_ZCNj.sum(-1)

    def columns(self, tokens: int) -> int:
        return tokens // self.stride

    def vectors_scored(self, tokens: Tensor) -> Tensor:
        return tokens // self.stride
