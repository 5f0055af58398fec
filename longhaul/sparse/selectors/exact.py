"""Blocks by the model's own logits.

    S[t, b] = max over the group's heads h and the keys s of b of q_h[t] . k_s

It is one of the seven products of attention's forward and backward, so it costs a seventh of full
attention at any length; other choices are measured against it. Letters: those of choose.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from longhaul.sparse.choose import Chunk
from longhaul.sparse.layer import BlockConfig


@dataclass(frozen=True)
class Exact(BlockConfig):
    """Attention over the blocks that hold the largest logits."""

    name = "exact"

    def scores(self, chunk: Chunk, k_ZSK: Tensor) -> Tensor:
        Z, C, M, _ = chunk.q_ZCMK.shape
        q_ZRK = chunk.q_ZCMK.flatten(1, 2)
        scores_ZNC = q_ZRK.new_empty((Z, chunk.N, C), dtype=torch.float32)
        for tile in chunk.products.tiles(chunk.N, Z * C * M * self.block):
            first = tile.start * self.block
            end = tile.stop * self.block
            logits_ZLR = chunk.products(k_ZSK[:, first:end], q_ZRK)
            logits_ZNlR = logits_ZLR.unflatten(1, (len(tile), self.block))
            largest_ZNCM = logits_ZNlR.amax(2).unflatten(2, (C, M))
            scores_ZNC[:, tile.start : tile.stop] = largest_ZNCM.amax(3)
        return scores_ZNC.mT
