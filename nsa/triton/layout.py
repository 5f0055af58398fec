"""Tables for the kernels of Native Sparse Attention: documents, tiles inside them, (query, block)
pairs sorted by block.

Plain PyTorch. Sizes are static upper bounds known to the host,
so that nothing waits for a CUDA device; tables are made on the device from one small table of
documents.

Letters: B batch, T tokens, Z = B*T tokens of all rows, G KV heads, M query heads per KV head, D
documents (those of every row), J
selection blocks of all documents, C queries of a chunk (a query is a token under one KV head), n
selected blocks per query, P = C*n.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model import sparse_documents


def to_device(numbers: list, device: torch.device) -> Tensor:
    """int32 on the device; from pinned memory, so that the host does not wait."""
    return torch.tensor(numbers, dtype=torch.int32, pin_memory=device.type == "cuda").to(
        device, non_blocking=True
    )


class Documents(NamedTuple):
    """All documents of all rows, one after another, in flat indices."""

    table_D4: Tensor  # first token, tokens, first compressed block, first selection block
    tokens: list[int]
    compressed: list[int]

    def tiles(self, counts: list[int], size: int) -> Tensor:
        """[tiles, 2] = (document, first item inside it): `counts` items per document in tiles of
        `size` that never straddle two.
        """
        numbers = [-(-count // size) for count in counts]
        device, total = self.table_D4.device, sum(numbers)
        number_D = to_device(numbers, device)
        document = torch.arange(len(counts), device=device, dtype=torch.int32).repeat_interleave(
            number_D, output_size=total
        )
        first_D = number_D.cumsum(0, dtype=torch.int32) - number_D
        return (
            torch.stack(
                [document, (torch.arange(total, device=device) - first_D[document]) * size], 1
            )
            .int()
            .contiguous()
        )


def lay_out(q_BTHK: Tensor, blocks_per_row: int, cu_seqlens: Tensor | None, cfg) -> Documents:
    """The documents of a batch; every row holds the same ones."""
    B, T = q_BTHK.shape[:2]
    rows, block, table, tokens, compressed = (
        sparse_documents(cu_seqlens, T, blocks_per_row, cfg),
        0,
        [],
        [],
        [],
    )
    for b in range(B):
        for token, cmp in rows:
            table.append(
                [
                    b * T + token.start,
                    token.stop - token.start,
                    b * blocks_per_row + cmp.start,
                    block,
                ]
            )
            tokens.append(token.stop - token.start)
            compressed.append(cmp.stop - cmp.start)
            block += -(-tokens[-1] // cfg.sel_block)
    return Documents(to_device(table, q_BTHK.device), tokens, compressed)


# ---- pairs


class Pairs(NamedTuple):
    """Pairs (query, selected block) in the order of their blocks; what a query does not use comes
    last.
    """

    order_P: Tensor  # sorted position -> pair
    place_P: Tensor  # pair -> sorted position, -1 = unused
    start_J1: (
        Tensor  # sorted position of the first pair of each block; the last entry ends the used ones
    )

    def pieces(self, size: int) -> tuple[Tensor, Tensor]:
        """(block of each piece, first piece of each block): up to `size` pairs of one block. Pieces
        past the last one get block J.
        """
        P, J = len(self.order_P), len(self.start_J1) - 1
        number_J = (self.start_J1.diff() + size - 1) // size
        end_J = number_J.cumsum(0, dtype=torch.int32)
        count = P // size + min(J, P)  # an upper bound, so that nothing waits for the device
        piece = torch.arange(count, device=end_J.device, dtype=torch.int32)
        return torch.searchsorted(end_J, piece, right=True, out_int32=True), F.pad(
            end_J, (1, 0)
        ).int()


def sort_pairs(block_idx_ZGn: Tensor, base_Z: Tensor, J: int, queries: slice) -> Pairs:
    """Pairs of a range of queries of a few KV heads. Query g*Z + z is token z under head g; its
    block j is block g*J + base[z] + j.
    """
    Z, G, n = block_idx_ZGn.shape
    query_C = torch.arange(queries.start, queries.stop, device=base_Z.device)
    head_C, token_C = query_C // Z, query_C % Z
    idx_Cn = block_idx_ZGn[token_C, head_C].int()
    block_Cn = (head_C * J + base_Z[token_C]).int()[:, None] + idx_Cn
    block_P, order_P = torch.where(idx_Cn < 0, G * J, block_Cn).flatten().sort(stable=True)
    place_P = torch.empty_like(order_P).index_copy_(
        0, order_P, torch.arange(len(order_P), device=order_P.device)
    )
    start_J1 = torch.searchsorted(
        block_P, torch.arange(G * J + 1, device=order_P.device, dtype=torch.int32), out_int32=True
    )
    return Pairs(order_P.int(), torch.where(idx_Cn.flatten() < 0, -1, place_P).int(), start_J1)
