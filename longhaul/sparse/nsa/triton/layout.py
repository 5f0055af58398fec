"""Tables that the kernels of Native Sparse Attention read: documents, tiles, pairs sorted by block.

All documents of all rows of the batch share each launch, so programs find their work in tables.
Plain PyTorch makes them on the device from one small table of documents. The host never learns
which blocks a query has selected: sizes are upper bounds that it knows beforehand, so that nothing
waits for a CUDA device.

A query is a token under one KV head, numbered g*Z + z. Of the blocks that it selects, the first and
the local ones are forced. The others are free, and a pair is (query, free block).

Letters: B rows of the batch, T tokens of a row, Z = B*T tokens of all rows, G KV heads, D documents
of all rows, J selection blocks of all documents, P free blocks of a query, or all pairs, E buckets
of pairs, S spans.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model import sparse_documents


def ceil_div(count: int, size: int) -> int:
    """How many groups of `size` hold `count` items."""
    return -(-count // size)


def upload(on_host: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, from pinned memory so that the host does not wait."""
    if device.type == "cuda":
        on_host = on_host.pin_memory()
    return on_host.to(device, non_blocking=True)


def to_device(numbers: list, device: torch.device) -> Tensor:
    """int32 on the device."""
    return upload(torch.tensor(numbers, dtype=torch.int32), device)


def count_to(end: int, device: torch.device) -> Tensor:
    """0, 1, ..., end - 1 as int32."""
    return torch.arange(end, device=device, dtype=torch.int32)


def launch(kernel, grid: tuple[int, ...], **arguments) -> None:
    """Runs a Triton kernel over the grid; nothing for tensors without values, the planner's."""
    tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
    if not any(x.is_meta for x in tensors):
        kernel[grid](**arguments)


# ---- documents


class Span(NamedTuple):
    """Consecutive items of a document, or of a block."""

    owner: int
    first: int  # counted inside the owner
    count: int


def cut(spans: list[Span], size: int, device: torch.device) -> Tensor:
    """Cuts spans into tiles of `size` items.

    Returns int32 [tiles, 2] = (owner, first item). A tile lies inside one span.
    """
    table_S3 = torch.tensor(spans, dtype=torch.int32).view(-1, 3)
    owner_S, first_S, count_S = table_S3.unbind(1)
    number_S = (count_S + (size - 1)) // size
    total = sum(ceil_div(span.count, size) for span in spans)
    span = torch.arange(len(spans)).repeat_interleave(number_S, output_size=total)
    tile = torch.arange(total) - (number_S.cumsum(0) - number_S)[span]
    tiles = torch.stack([owner_S[span], first_S[span] + tile * size], 1)
    return upload(tiles.int(), device)


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
        spans = [Span(d, 0, count) for d, count in enumerate(counts)]
        return cut(spans, size, self.table_D4.device)

    def chunks(self, chunk: int, size: int) -> list[Tensor]:
        """The tiles of `size` tokens, like `tiles`, of each `chunk` tokens in turn."""
        spans = []
        tiles_of_chunks = []
        document = 0
        used = 0
        total = sum(self.tokens)
        for start in range(0, total, chunk):
            room = min(chunk, total - start)
            tiles = 0
            while room > 0:
                count = min(room, self.tokens[document] - used)
                spans.append(Span(document, used, count))
                tiles += ceil_div(count, size)
                room -= count
                used += count
                if used == self.tokens[document]:
                    document += 1
                    used = 0
            tiles_of_chunks.append(tiles)
        return list(cut(spans, size, self.table_D4.device).split(tiles_of_chunks))


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


def most_blocks(B: int, T: int, documents_of_a_row: int, cfg) -> int:
    """At least as many selection blocks as B rows have, whatever the lengths of their documents."""
    return B * (T // cfg.sel_block + documents_of_a_row)


class Pairs(NamedTuple):
    """The pairs (query, free block) of a call in the order of their buckets, unused ones last.

    A bucket is (KV head, chunk of tokens, block). The queries of a bucket are then adjacent, and
    one dense product serves them all. Pair (g*Z + z)*P + p is the p-th free block of token z under
    KV head g; a query that reads fewer blocks leaves pairs unused.
    """

    order_P: Tensor  # sorted position -> pair, int32
    start_E1: Tensor  # sorted position of each bucket's first pair; the last entry ends the used

    def pieces(self, size: int) -> tuple[Tensor, Tensor]:
        """Cuts each bucket's pairs into pieces of at most `size` pairs.

        Returns (bucket of each piece, first piece of each bucket [E + 1]). How many pieces there
        are depends on the choice of the queries; the tensor is as long as the most there can be.
        """
        P = len(self.order_P)
        E = len(self.start_E1) - 1
        pairs_E = self.start_E1.diff()
        pieces_E = (pairs_E + (size - 1)) // size
        end_E = pieces_E.cumsum(0, dtype=torch.int32)
        bucket_of_piece = torch.searchsorted(
            end_E,
            count_to(most_pieces(P, E, size), end_E.device),
            right=True,
            out_int32=True,
        )
        return bucket_of_piece, F.pad(end_E, (1, 0))


def most_pieces(pairs: int, buckets: int, size: int) -> int:
    """The most pieces of at most `size` pairs into which the pairs of buckets can be cut."""
    return pairs // size + min(buckets, pairs)


def sort_pairs(
    block_idx_ZGP: Tensor,  # free blocks, counted inside the token's document, -1 = unused
    base_Z: Tensor,  # first block of the token's document
    J: int,  # buckets of a KV head and a chunk
    chunk: int,  # tokens
) -> Pairs:
    """All pairs of a call, sorted: one sort, whose result the backward reads again."""
    Z, G, P = block_idx_ZGP.shape
    device = base_Z.device
    chunks = ceil_div(Z, chunk)
    buckets = G * chunks * J

    head_G1 = count_to(G, device)[:, None]
    chunk_Z = count_to(Z, device) // chunk
    base_GZ = (head_G1 * chunks + chunk_Z) * J + base_Z
    idx_GZP = block_idx_ZGP.transpose(0, 1)
    bucket_GZP = torch.where(idx_GZP < 0, buckets, base_GZ[..., None] + idx_GZP)

    # A stable sort, so that the sums over a block's pairs have the same order every time.
    bucket_P, order_P = bucket_GZP.int().flatten().sort(stable=True)
    start_E1 = torch.searchsorted(
        bucket_P,
        count_to(buckets + 1, device),
        out_int32=True,
    )
    return Pairs(order_P.int(), start_E1)
