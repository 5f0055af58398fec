"""Blocks by the mean of their keys (MoBA, arXiv 2502.13189; FlashMoBA, 2511.11571).

    S[t, b] = sum over the group's heads h of q_h[t] . mean(k_s, s in b)

MoBA chooses for each head; here the heads of a group share a choice. Letters: those of choose.py.
"""

from dataclasses import dataclass

from torch import Tensor

from longhaul.sparse.choose import Chunk
from longhaul.sparse.layer import BlockConfig


@dataclass(frozen=True)
class Mean(BlockConfig):
    """Attention over the blocks whose mean key is nearest to the query."""

    name = "mean"

    init: int = 0
    local: int = 1

    def span(self) -> tuple[int, int]:
        return self.block, self.block

    def summarise(self, k_BSGK: Tensor) -> Tensor:
        N = k_BSGK.shape[1] // self.block
        k_BSGK = k_BSGK[:, : N * self.block].float()
        return k_BSGK.unflatten(1, (N, self.block)).mean(2)

    def scores(self, chunk: Chunk, mean_ZNK: Tensor) -> Tensor:
        q_ZCK = chunk.q_ZCMK.float().sum(2)
        return chunk.products(q_ZCK, mean_ZNK[:, : chunk.N])
