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

from longhaul.sparse.choose import Chunk
from longhaul.sparse.layer import BlockConfig


@dataclass(frozen=True)
class Pooled(BlockConfig):
    """Attention over the blocks whose means of keys draw most attention."""

    name = "pooled"

    count: int = 64
    local: int = 32
    dense_below: int = 8192
    kernel: int = 32  # keys of a mean
    stride: int = 16  # keys from one mean to the next
    reduce: str = "max"  # of the kernels that touch a block: max, or logsumexp

    def __post_init__(self):
        super().__post_init__()
        if self.block % self.stride or self.kernel % self.stride or self.kernel > self.block:
            allowed = "block and kernel multiples of stride, and kernel <= block"
            raise self.refusal(["block", "kernel", "stride"], allowed, "change them")
        if self.reduce not in ("max", "logsumexp"):
            raise self.refusal(["reduce"], "max or logsumexp", "choose one of them")

    def span(self) -> tuple[int, int]:
        return self.kernel, self.stride

    def summarise(self, k_BSGK: Tensor) -> Tensor:
        return k_BSGK.float().unfold(1, self.kernel, self.stride).mean(-1)

    def scores(self, chunk: Chunk, kbar_ZJK: Tensor) -> Tensor:
        q_ZCMK = chunk.q_ZCMK.float()
        t_C = torch.arange(q_ZCMK.shape[1], device=q_ZCMK.device) + chunk.first
        J = self.entries(chunk.first + len(t_C))
        logits_ZRJ = chunk.products(q_ZCMK.flatten(1, 2), kbar_ZJK[:, :J])
        last_J = torch.arange(J, device=t_C.device) * self.stride + self.kernel - 1
        logits_ZCMJ = logits_ZRJ.mul_(q_ZCMK.shape[-1] ** -0.5).unflatten(1, q_ZCMK.shape[1:3])
        logits_ZCMJ.masked_fill_(last_J > t_C[:, None, None], -torch.inf)
        p_ZCJ = logits_ZCMJ.softmax(-1).sum(2)

        each, before = self.block // self.stride, self.kernel // self.stride - 1
        p_ZCJ = F.pad(p_ZCJ[..., : chunk.N * each], (before, max(0, chunk.N * each - J)))
        touching_ZCNj = p_ZCJ.unfold(-1, each + before, each)
        return touching_ZCNj.amax(-1) if self.reduce == "max" else touching_ZCNj.sum(-1)
