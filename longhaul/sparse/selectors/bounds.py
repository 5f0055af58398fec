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
        k_BSGK = k_BSGK[:, : whole * self.page]
        k_BPpGK = k_BSGK.unflatten(1, (whole, self.page))
        largest = k_BPpGK.amax(2)
        smallest = k_BPpGK.amin(2)
        return torch.cat((largest, smallest), dim=-1)

    def scores(self, chunk: Chunk, bounds_ZPW: Tensor) -> Tensor:
        C, M = chunk.q_ZCMK.shape[1:3]
        above = chunk.q_ZCMK.clamp(min=0)
        below = chunk.q_ZCMK.clamp(max=0)
        q_ZCMW = torch.cat((above, below), dim=-1)
        pages = self.block // self.page
        bounds_ZPW = bounds_ZPW[:, : chunk.N * pages]
        bounds_ZPR = chunk.products(bounds_ZPW, q_ZCMW.flatten(1, 2))
        bounds_ZNpR = bounds_ZPR.unflatten(1, (chunk.N, pages))
        largest_ZNCM = bounds_ZNpR.amax(2).unflatten(2, (C, M))
        return largest_ZNCM.amax(3).mT

    def vectors_scored(self, tokens: Tensor) -> Tensor:
        return 2 * (tokens // self.page)
