"""Blocks by an upper bound of their largest logit (Quest, arXiv 2406.10774, which decodes so).

    S[t, b] = max over the group's heads h and the pages p of b of
              sum over i of max(q_hi[t] m_pi, q_hi[t] M_pi)

with m_p and M_p the smallest and the largest key of the page by dimension. The sum is one product:
relu(q) . M + min(q, 0) . m. Letters: those of choose.py, P pages.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from longhaul.sparse.choose import Chunk
from longhaul.sparse.layer import BlockConfig


@dataclass(frozen=True)
class Bounds(BlockConfig):
    """Attention over the blocks whose largest logit may be the largest."""

    name = "bounds"
    found = "half"

    page: int = 16  # keys that share a bound

    def __post_init__(self):
        super().__post_init__()
        if self.block % self.page:
            names = ["block", "page"]
            raise self.refusal(names, "block a multiple of page", "change one of them")

    def span(self) -> tuple[int, int]:
        return self.page, self.page

    def summarise(self, k_BSGK: Tensor) -> Tensor:
        whole = k_BSGK.shape[1] // self.page
        k_BPpGK = k_BSGK[:, : whole * self.page].unflatten(1, (whole, self.page))
        return torch.cat((k_BPpGK.amax(2), k_BPpGK.amin(2)), dim=-1)

    def scores(self, chunk: Chunk, bounds_ZPW: Tensor) -> Tensor:
        C, M = chunk.q_ZCMK.shape[1:3]
        halves = chunk.q_ZCMK.clamp(min=0), chunk.q_ZCMK.clamp(max=0)
        q_ZRW = torch.cat(halves, dim=-1).flatten(1, 2)
        pages = self.block // self.page
        bounds_ZPR = chunk.products(bounds_ZPW[:, : chunk.N * pages], q_ZRW)
        bounds_ZNR = bounds_ZPR.unflatten(1, (chunk.N, pages)).amax(2)
        return bounds_ZNR.unflatten(2, (C, M)).amax(3).mT

    def vectors_scored(self, tokens: Tensor) -> Tensor:
        return 2 * (tokens // self.page)
