"""Tables that the kernels of Native Sparse Attention read: documents, tiles, pairs sorted by block.

All documents of all rows of the batch share each launch, so programs find their work in tables.
Plain PyTorch makes them on the device from one small table of documents. The host never learns
which blocks a query has selected: sizes are upper bounds that it knows beforehand, so that nothing
waits for a CUDA device.

A query is a token under one KV head, numbered g*Z + z. A pair is (query, selected block).

Letters: B rows of the batch, T tokens of a row, Z = B*T tokens of all rows, G KV heads, D documents
of all rows, J selection blocks of all documents, C queries of a chunk, n selected blocks per query,
P = C*n pairs of a chunk.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model import sparse_documents


def ceil_div(count: int, size: int) -> int:
    """How many groups of `size` hold `count` items."""
    return -(-count // size)


def to_device(numbers: list, device: torch.device) -> Tensor:
    """int32 on the device, copied from pinned memory so that the host does not wait."""
    on_host = torch.tensor(
        numbers,
        dtype=torch.int32,
        pin_memory=device.type == "cuda",
    )
    return on_host.to(device, non_blocking=True)


def count_to(end: int, device: torch.device) -> Tensor:
    """0, 1, ..., end - 1 as int32."""
    return torch.arange(end, device=device, dtype=torch.int32)


def launch(kernel, grid: tuple[int, ...], **arguments) -> None:
    """Runs a Triton kernel over the grid; nothing for tensors without values, the planner's."""
    tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
    if not any(x.is_meta for x in tensors):
        kernel[grid](**arguments)


# ---- documents


class Documents(NamedTuple):
    """All documents of all rows, one after another."""

    table_D4: Tensor  # first token, tokens, first compressed block, first selection block
    tokens: list[int]  # of each document
    compressed: list[int]  # compressed blocks of each document

    def tiles(self, counts: list[int], size: int) -> Tensor:
        """Cuts `counts[d]` items of each document d into tiles of `size` items.

        Returns int32 [tiles, 2] = (document, first item, counted inside the document). A tile lies
        inside one document.
        """
        numbers = [ceil_div(count, size) for count in counts]
        total = sum(numbers)

        device = self.table_D4.device
        number_D = to_device(numbers, device)
        end_D = number_D.cumsum(0, dtype=torch.int32)
        first_tile_D = end_D - number_D

        every_document = count_to(len(counts), device)
        document = every_document.repeat_interleave(number_D, output_size=total)
        tile = torch.arange(total, device=device)
        first_item = (tile - first_tile_D[document]) * size

        tiles = torch.stack([document, first_item], 1)
        return tiles.int().contiguous()


def lay_out(
    q_BTHK: Tensor,
    blocks_per_row: int,  # compressed blocks
    cu_seqlens: Tensor | None,  # boundaries of a row's documents; None: each row is one
    cfg,
) -> Documents:
    """The documents of a batch, of which every row holds the same ones.

    Raises the ValueErrors of model.sparse_documents.
    """
    B, T, _, _ = q_BTHK.shape
    documents_of_a_row = sparse_documents(cu_seqlens, T, blocks_per_row, cfg)

    table = []
    tokens = []
    compressed = []
    selection_block = 0
    for b in range(B):
        for token, block in documents_of_a_row:
            count = token.stop - token.start
            entry = [
                b * T + token.start,
                count,
                b * blocks_per_row + block.start,
                selection_block,
            ]
            table.append(entry)
            tokens.append(count)
            compressed.append(block.stop - block.start)
            selection_block += ceil_div(count, cfg.sel_block)

    table_D4 = to_device(table, q_BTHK.device)
    return Documents(table_D4, tokens, compressed)


# ---- pairs


class Pairs(NamedTuple):
    """Pairs in the order of their blocks, with unused places last.

    The queries that selected a block are then adjacent, and one dense product per block serves them
    all. A query that selects fewer than n blocks leaves places unused.
    """

    order_P: Tensor  # sorted position -> pair, int32
    place_P: Tensor  # pair -> sorted position, int32, -1 = unused
    start_J1: (
        Tensor  # sorted position of each block's first pair; the last entry ends the used ones
    )

    def pieces(self, size: int) -> tuple[Tensor, Tensor]:
        """Cuts each block's pairs into pieces of at most `size` pairs.

        Returns (block of each piece, first piece of each block [J + 1]). How many pieces there are
        depends on the choice of the queries; the tensor is as long as the most there can be, and
        pieces past the last one get block J.
        """
        P = len(self.order_P)
        J = len(self.start_J1) - 1
        most = P // size + min(J, P)

        pairs_J = self.start_J1.diff()
        pieces_J = (pairs_J + size - 1) // size
        end_J = pieces_J.cumsum(0, dtype=torch.int32)

        block_of_piece = torch.searchsorted(
            end_J,
            count_to(most, end_J.device),
            right=True,
            out_int32=True,
        )
        first_J1 = F.pad(end_J, (1, 0))
        return block_of_piece, first_J1.int()


def sort_pairs(
    block_idx_ZGn: Tensor,  # counted inside the token's document, -1 = unused
    base_Z: Tensor,  # first block of the token's document
    J: int,
    queries: slice,
) -> Pairs:
    """The pairs of a range of queries of G KV heads, sorted by block.

    Each KV head has its own blocks: block j of token z under KV head g is block g*J + base[z] + j.
    """
    Z, G, _ = block_idx_ZGn.shape
    device = base_Z.device

    query_C = torch.arange(queries.start, queries.stop, device=device)
    head_C = query_C // Z
    token_C = query_C % Z
    idx_Cn = block_idx_ZGn[token_C, head_C].int()

    base_C = head_C * J + base_Z[token_C]
    block_Cn = base_C.int()[:, None] + idx_Cn
    unused_Cn = idx_Cn < 0
    block_Cn = torch.where(unused_Cn, G * J, block_Cn)

    # A stable sort, so that the sums over a block's pairs have the same order every time.
    block_P, order_P = block_Cn.flatten().sort(stable=True)

    position_P = torch.arange(len(order_P), device=device)
    place_P = torch.empty_like(order_P)
    place_P.index_copy_(0, order_P, position_P)
    place_P = torch.where(unused_Cn.flatten(), -1, place_P)

    start_J1 = torch.searchsorted(
        block_P,
        count_to(G * J + 1, device),
        out_int32=True,
    )
    return Pairs(order_P.int(), place_P.int(), start_J1)
