"""Which blocks the selected branch of Native Sparse Attention reads (arXiv 2502.11089): the first
and the local ones, and of the others those to which the compressed branch gives the most mass.

Letters: C queries of a chunk, M query heads per KV head, N compressed blocks, J selection blocks, n
selected blocks of a query, R = C*M matrix rows (query, head).
"""

import torch.nn.functional as F
from torch import Tensor

from longhaul.sparse.choose import fill_choice
from longhaul.sparse.nsa.branches import Sizes, stride_weights


def choose(
    block_idx_Cn: Tensor,
    start: int,
    cfg: Sizes,
    queries: slice,
    p_RN: Tensor,
) -> None:
    """Fills the blocks of some queries of a chunk that begins at position `start`, to which the
    compressed branch gave the probabilities p.
    """
    chosen_Cn = block_idx_Cn[queries]
    p_CN = p_RN.unflatten(0, (len(chosen_Cn), -1)).sum(1)
    first = start + queries.start
    fill_choice(chosen_Cn[None], first, cfg, lambda J: importance(p_CN, J, cfg)[None])


def importance(
    p_CN: Tensor,
    J: int,
    cfg: Sizes,
) -> Tensor:
    """[C,J]: the mass of every compressed block, once per stride that it shares with block j."""
    before = cfg.spread - 1
    after = J * cfg.per - p_CN.shape[1]
    padded = F.pad(p_CN, (before, after))
    width = J * cfg.per
    imp_CJ = p_CN.new_zeros(len(p_CN), J)
    for offset, weight in enumerate(stride_weights(cfg)):
        imp_CJ.add_(padded[:, offset : offset + width : cfg.per], alpha=weight)
    return imp_CJ
