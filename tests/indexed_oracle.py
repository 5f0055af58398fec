"""Dense float64 attention over blocks that an indexer chooses, written straight from the equations:
the truth that every faster version is tested against. Gradients come from autograd.

`sizes` has count, block, init and local. Letters: B rows, T tokens, G KV groups, E head dim of the
indexer, N blocks.
"""

import torch

from tests.oracle import attend


def scores(q_BTGE, k_BT1E, block: int) -> torch.Tensor:
    """[B, T, G, N]: the largest logit of each block, of the keys that are not after the query."""
    T, E = q_BTGE.shape[1], q_BTGE.shape[3]
    logits = torch.einsum("btge,bse->btgs", q_BTGE, k_BT1E[:, :, 0]) / E**0.5
    later = torch.ones(T, T, dtype=torch.bool).triu(1)
    logits = logits.masked_fill(later[:, None], -torch.inf)
    return torch.stack([part.max(-1).values for part in logits.split(block, dim=-1)], -1)


def choose(scores_BTGN: torch.Tensor, sizes, first: int = 0) -> torch.Tensor:
    """bool [B, T, G, N]: forced blocks, and the best others, the lower index on a tie; of queries
    from the position `first` on.
    """
    reads = torch.zeros_like(scores_BTGN, dtype=torch.bool)
    for b, t, g in torch.cartesian_prod(*map(torch.arange, scores_BTGN.shape[:3])).tolist():
        own = (first + t) // sizes.block
        forced = set(range(min(sizes.init, own + 1)))
        forced |= set(range(max(0, own + 1 - sizes.local), own + 1))
        found = scores_BTGN[b, t, g].tolist()
        others = sorted(set(range(own + 1)) - forced, key=lambda n: (-found[n], n))
        reads[b, t, g, [*forced, *others[: sizes.count - len(forced)]]] = True
    return reads


def outputs(inputs, sizes, warming: bool = False) -> tuple[torch.Tensor, ...]:
    """(o, loss, the blocks that are read), in float64."""
    q, k, v, q_idx, k_idx = inputs
    T, G = k.shape[1:3]
    found = scores(q_idx, k_idx, sizes.block)
    own = torch.arange(T)[:, None] // sizes.block
    seen = (torch.arange(found.shape[-1]) <= own)[None, :, None].expand_as(found)
    reads = seen if warming else choose(found.detach(), sizes)

    keys = reads.repeat_interleave(sizes.block, -1)[..., :T]
    keys = keys & torch.ones(T, T, dtype=torch.bool).tril()[:, None]
    visible = keys.transpose(1, 2).repeat_interleave(q.shape[2] // G, 1)
    o, _, p = attend(q, k, v, visible)

    mean = p.detach().unflatten(1, (G, -1)).mean(2).transpose(1, 2)
    mass = torch.stack([part.sum(-1) for part in mean.split(sizes.block, dim=-1)], -1)
    share = found.masked_fill(~reads, -torch.inf).log_softmax(-1)
    terms = torch.xlogy(mass, mass) - mass * share.masked_fill(~reads, 0.0)
    return o, terms.sum(-1).mean(2).sum(), reads
