"""How much a layer's queries read of what full attention would look at: the recall of its choice.

The letters are those of layer.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from base.machine import pinned_copy
from longhaul.sparse.indexed.plain import (
    block_ranks,
    block_scores,
    block_sums,
    least_rank,
    masked_logits,
    readable_keys,
    softmax_,
)
from model import CHUNK_LOGITS, wide

SAMPLED_QUERIES = 16  # of a document, over whose keys the recall is measured


@dataclass(frozen=True)
class Reading:
    """How much the queries of a layer read, and whether its indexer learns from it."""

    r: int
    most: int  # blocks that a query reads at most, besides its own
    warming: bool
    learns: bool
    kernels: str = "auto"  # as in ModelConfig

    def most_of(self, blocks: int) -> int:
        """The same of so many blocks; in the warm-up it is all of them."""
        return max(self.most, blocks) if self.warming else self.most

    @torch.no_grad()
    def recall(
        self,
        q_BTHK: Tensor,
        k_BSGK: Tensor,
        q_BThE: Tensor,
        k_BNE: Tensor,
        length: int,
    ) -> Tensor:
        """The share of full attention's mass on the keys that queries read, the largest share on as
        many blocks, and the number of queries, [3]; the shares are means over heads, summed over
        rows and sampled queries.

        They are 16 of the queries that have a choice, at equal distances from the end of the
        document on, which has `length` tokens. The queries are given as to `indexed_forward`.
        """
        S, T = k_BSGK.shape[1], q_BTHK.shape[1]
        total_3 = torch.zeros(3, dtype=wide(q_BTHK.dtype), device=q_BTHK.device)
        sampled = self._sampled(length, S - T, S) if self.learns else range(0)
        if not sampled:
            return total_3

        B, _, H, _ = q_BTHK.shape
        query = pinned_copy(torch.tensor(sampled), q_BTHK.device)
        for part in query.split(max(1, CHUNK_LOGITS // (B * H * S))):
            own = part - (S - T)
            total_3[:2] += self._shares(
                q_BTHK[:, own], k_BSGK, q_BThE[:, own], k_BNE, part[:, None]
            )
        total_3[2].fill_(B * len(sampled))  # assigned, the number would be copied from the host
        return total_3

    def _sampled(
        self,
        length: int,
        first: int,
        end: int,
    ) -> list[int]:
        """Those of the sampled queries of a document that are from `first` on and before `end`."""
        choosing = length - (self.most + 1) * self.r  # they have more candidates than they read
        count = max(0, min(SAMPLED_QUERIES, choosing))
        sampled = [length - 1 - index * choosing // count for index in range(count)]
        return [query for query in sampled if first <= query < end]

    def _shares(
        self,
        q_BCHK: Tensor,
        k_BSGK: Tensor,
        q_BChE: Tensor,
        k_BNE: Tensor,
        query_C1: Tensor,
    ) -> Tensor:
        S = k_BSGK.shape[1]
        rank_BCN = block_ranks(block_scores(q_BChE, k_BNE), query_C1, self.r)
        chosen_BCN = rank_BCN >= least_rank(rank_BCN, self.most)[..., None]
        read_BCS = readable_keys(chosen_BCN, query_C1, self.r, S)

        keys = torch.arange(S, device=query_C1.device)
        p_BGMCS = masked_logits(q_BCHK, k_BSGK, (keys <= query_C1)[None])
        softmax_(p_BGMCS)
        mass_BCS = p_BGMCS.mean((1, 2))

        before_C1 = query_C1 // self.r * self.r
        blocks_BCN = block_sums(mass_BCS.masked_fill(keys >= before_C1, 0.0), self.r)
        own_BC = mass_BCS.masked_fill(keys < before_C1, 0.0).sum(-1)
        best_BC = own_BC + blocks_BCN.topk(self.most).values.sum(-1)
        return torch.stack(((mass_BCS * read_BCS).sum(), best_BC.sum()))
