"""Exact attention over chosen blocks as Triton kernels: the bodies of the operators of
longhaul/sparse/engine.py.

A pair is a query under one KV head and a block that it has chosen. Pairs are sorted by block, and
each piece of a block's pairs is one dense tile, so that a block is read once for all its queries of
a piece; the results of a query's pairs then merge by log-sum-exp. In the backward the pairs of a
block are cut into segments. Each gives dq of its pairs, which are added in the order of the query's
slots, and its share of the block's dk and dv, which are added in the order of the segments: there
are no atomics, and results repeat bit for bit.

The own block of a query and the other forced ones are pairs like all others. Only there a key may
be after the query; all tiles are masked by it, which costs a comparison per logit.

The results of all pairs would take n times the memory of o, so that a part of the queries is
computed at a time: all tokens under some KV heads, or a chunk of tokens under one. All documents of
all rows share each launch. The host never waits for the device: how the queries have chosen decides
nothing but the contents of tables, whose lengths are upper bounds.

Letters: B rows, T queries (the last T of S positions), Z = B*T, H query heads, G KV heads, M = H/G,
K head dim, n chosen blocks of a query, l tokens of a block, J blocks of all documents, D documents,
P pairs, E buckets. A query is numbered y = g*Z + z, and its pairs y*n + i.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from longhaul.sparse.plain import documents
from longhaul.sparse.triton.kernels import (
    delta_kernel,
    merge_kernel,
    pair_backward_kernel,
    pair_forward_kernel,
    segment_sum_kernel,
)
from longhaul.sparse.triton.tiles import (
    ceil_div,
    count_to,
    cut_documents,
    launch,
    padded,
    shared_memory,
    tile_sizes,
    upload,
)

# Numbers in the results of a part's pairs, 384 MiB in bf16: six parts for each KV head at 131,072
# tokens of 4 heads of 128 that read 16 blocks.
PARTIAL_RESULT_NUMBERS = 3 * 2**26
LOG2E = 1.4426950408889634


# ---- tables


class Blocks(NamedTuple):
    """The blocks of all documents of all rows, one after another."""

    base_Z: Tensor  # the first block of each query's document
    keys_J2: Tensor  # first key of each block, counted over all rows, and how many it has


def lay_out(
    B: int,
    T: int,
    S: int,
    cu_seqlens: Tensor | None,
    block: int,
    device: torch.device,
) -> Blocks:
    """The blocks of a batch of which every row holds the same documents."""
    ranges = documents(cu_seqlens, T, S) * B
    queries_D = torch.tensor([queries.stop - queries.start for queries, _ in ranges])
    keys = [keys.stop - keys.start for _, keys in ranges]
    keys_D = torch.tensor(keys)
    document_J, done_J, first_D = cut_documents(keys, block)
    start_J = (keys_D.cumsum(0) - keys_D)[document_J] + done_J
    count_J = (keys_D[document_J] - done_J).clamp(max=block)

    first_D, queries_D = upload(torch.stack([first_D, queries_D]).int(), device)
    base_Z = first_D.repeat_interleave(queries_D, output_size=B * T)
    return Blocks(base_Z, upload(torch.stack([start_J, count_J], 1).int(), device))


class Pairs(NamedTuple):
    """The pairs of a call in the order of their buckets (KV head, chunk of tokens, block), those of
    unused slots last.
    """

    order_P: Tensor  # sorted position -> pair
    start_E1: Tensor  # sorted position of each bucket's first pair; the last entry ends the used


def sort_pairs(
    chosen_ZGn: Tensor,
    base_Z: Tensor,
    J: int,
    chunk: int,
) -> Pairs:
    """One sort for a whole call; J blocks of all documents, `chunk` tokens."""
    Z, G, _ = chosen_ZGn.shape
    device = base_Z.device
    chunks = ceil_div(Z, chunk)
    buckets = G * chunks * J

    chunk_Z = count_to(Z, device) // chunk
    base_GZ = (count_to(G, device)[:, None] * chunks + chunk_Z) * J + base_Z
    chosen_GZn = chosen_ZGn.transpose(0, 1)
    bucket_GZn = torch.where(chosen_GZn < 0, buckets, base_GZ[..., None] + chosen_GZn)

    # A stable sort, so that the sums over a block's pairs have the same order every time.
    bucket_P, order_P = bucket_GZn.int().flatten().sort(stable=True)
    every_bucket = count_to(buckets + 1, device)
    return Pairs(order_P, torch.searchsorted(bucket_P, every_bucket, out_int32=True))


class Pieces(NamedTuple):
    """The pairs of each bucket, cut into pieces of at most `size`."""

    size: int
    bucket: Tensor  # of each piece; as long as the most pieces that there can be
    first: Tensor  # piece of each bucket [E + 1]

    @classmethod
    def cut(cls, pairs: Pairs, size: int) -> "Pieces":
        pieces_E = (pairs.start_E1.diff() + (size - 1)) // size
        end_E = pieces_E.cumsum(0, dtype=torch.int32)
        most = most_pieces(len(pairs.order_P), len(end_E), size)
        every_piece = count_to(most, end_E.device)
        bucket = torch.searchsorted(end_E, every_piece, right=True, out_int32=True)
        return cls(size, bucket, F.pad(end_E, (1, 0)))


def most_pieces(
    pairs: int,
    buckets: int,
    size: int,
) -> int:
    """The most pieces of at most `size` pairs into which the pairs of buckets can be cut."""
    return pairs // size + min(buckets, pairs)


class Part(NamedTuple):
    """The queries y0..y1-1, which are computed at a time, and the buckets of their pairs."""

    y0: int
    y1: int
    head: int  # the first of its KV heads
    heads: int
    bucket0: int
    fills: bool  # whether it is the first one of its heads
    ends: bool  # whether it is the last one of its heads


class Call:
    """Sizes, tables and parts of one forward or backward."""

    def __init__(
        self,
        q_BTHK: Tensor,
        k_BSGK: Tensor,
        chosen_BTGn: Tensor,
        cu_seqlens: Tensor | None,
        block: int,
    ):
        B, T, H, K = q_BTHK.shape
        S, self.G = k_BSGK.shape[1:3]
        self.n = chosen_BTGn.shape[3]
        self.Z = B * T
        self.M = H // self.G
        self.scale = K**-0.5
        most = max(1, PARTIAL_RESULT_NUMBERS // (self.n * self.M * K))
        self.heads_at_once = max(1, min(self.G, most // self.Z))
        self.chunk = ceil_div(self.Z, ceil_div(self.Z, most))

        tile = tile_sizes(K, q_BTHK.element_size(), shared_memory(q_BTHK.device))
        MP = triton.next_power_of_2(self.M)
        self.rows = max(tile.rows, MP)
        self.key_rows = max(tile.key_rows, MP)
        self.queries_of_tile = self.rows // MP
        self.segment = max(tile.segment_rows, MP) // MP
        self.queries_of_merge = padded(self.M) // MP
        self.LP = padded(block)

        blocks = lay_out(B, T, S, cu_seqlens, block, q_BTHK.device)
        self.keys = blocks.keys_J2
        self.J = len(self.keys)
        self.pairs = sort_pairs(chosen_BTGn.flatten(0, 1), blocks.base_Z, self.J, self.chunk)
        self.numbers = {
            "n": self.n,
            "Z": self.Z,
            "G": self.G,
            "M": self.M,
            "K": K,
        }
        self.of_pairs = {
            "order_ptr": self.pairs.order_P,
            "start_ptr": self.pairs.start_E1,
            "keys_ptr": self.keys,
            "J": self.J,
            "chunks": ceil_div(self.Z, self.chunk),
            "tokens": T,
            "before": S - T,
            "scale2": self.scale * LOG2E,
            "LP": self.LP,
            **self.numbers,
        }

    def parts(self) -> Iterator[Part]:
        """All parts, of which the first is the largest."""
        chunks = ceil_div(self.Z, self.chunk)
        for head in range(0, self.G, self.heads_at_once):
            heads = min(self.heads_at_once, self.G - head)
            for index in range(chunks):
                y0 = head * self.Z + index * self.chunk
                end = (head + heads) * self.Z
                yield Part(
                    y0=y0,
                    y1=end if chunks == 1 else min(y0 + self.chunk, end),
                    head=head,
                    heads=heads,
                    bucket0=(head * chunks + index) * self.J,
                    fills=index == 0,
                    ends=index == chunks - 1,
                )

    def pieces_of(self, part: Part, size: int) -> int:
        """The most pieces that the part can have."""
        return most_pieces((part.y1 - part.y0) * self.n, part.heads * self.J, size)

    def launch_pieces(
        self,
        kernel,
        part: Part,
        pieces: Pieces,
        **arguments,
    ) -> None:
        """Runs a kernel over the pieces of a part."""
        launch(
            kernel,
            (self.pieces_of(part, pieces.size),),
            bucket_ptr=pieces.bucket,
            piece_ptr=pieces.first,
            bucket0=part.bucket0,
            buckets=part.heads * self.J,
            y0=part.y0,
            **self.of_pairs,
            **arguments,
        )

    def merge(
        self,
        part: Part,
        part_results: Tensor,
        chosen_BTGn: Tensor,
        out_BTHK: Tensor,
        part_lse: Tensor | None = None,
        lse_BTH: Tensor | None = None,
    ) -> None:
        """Merges the results of the pairs of a part's queries."""
        launch(
            merge_kernel,
            (ceil_div(part.y1 - part.y0, self.queries_of_merge),),
            part_ptr=part_results,
            part_lse_ptr=part_lse,
            chosen_ptr=chosen_BTGn,
            out_ptr=out_BTHK,
            lse_ptr=lse_BTH,
            y0=part.y0,
            y1=part.y1,
            **self.numbers,
        )


# ---- forward and backward


def forward(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    chosen_BTGn: Tensor,
    cu_seqlens: Tensor | None,
    block: int,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(o_BTHK, lse_BTH), written `into` these if they are given."""
    given = (q_BTHK, k_BSGK, v_BSGK, chosen_BTGn)
    q_BTHK, k_BSGK, v_BSGK, chosen_BTGn = (x.contiguous() for x in given)
    call = Call(q_BTHK, k_BSGK, chosen_BTGn, cu_seqlens, block)
    pieces = Pieces.cut(call.pairs, call.queries_of_tile)
    if into is None:
        into = torch.empty_like(q_BTHK), q_BTHK.new_empty(q_BTHK.shape[:3], dtype=torch.float32)
    o_BTHK, lse_BTH = into
    parts = list(call.parts())
    pairs = (parts[0].y1 - parts[0].y0) * call.n
    part_o = q_BTHK.new_empty(pairs, call.M, q_BTHK.shape[3])
    part_lse = lse_BTH.new_empty(pairs, call.M)
    for part in parts:
        call.launch_pieces(
            pair_forward_kernel,
            part,
            pieces,
            q_ptr=q_BTHK,
            k_ptr=k_BSGK,
            v_ptr=v_BSGK,
            part_o_ptr=part_o,
            part_lse_ptr=part_lse,
            R=call.rows,
        )
        call.merge(part, part_o, chosen_BTGn, o_BTHK, part_lse, lse_BTH)
    return o_BTHK, lse_BTH


def row_products(
    do: Tensor,
    o: Tensor,
) -> Tensor:
    """do . o over the last dimension, in fp32, of contiguous tensors."""
    delta = do.new_empty(do.shape[:-1], dtype=torch.float32)
    K = do.shape[-1]
    launch(
        delta_kernel,
        (ceil_div(delta.numel(), 16),),
        do_ptr=do,
        o_ptr=o,
        delta_ptr=delta,
        rows=delta.numel(),
        K=K,
        R=16,
    )
    return delta


def backward(
    do_BTHK: Tensor,
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    chosen_BTGn: Tensor,
    lse_BTH: Tensor,
    delta_BTH: Tensor,
    cu_seqlens: Tensor | None,
    block: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv); delta is do . o less the gradient of lse."""
    given = do_BTHK, q_BTHK, k_BSGK, v_BSGK, chosen_BTGn, lse_BTH, delta_BTH
    given = [x.contiguous() for x in given]
    do_BTHK, q_BTHK, k_BSGK, v_BSGK, chosen_BTGn, lse_BTH, delta_BTH = given
    call = Call(q_BTHK, k_BSGK, chosen_BTGn, cu_seqlens, block)
    pieces = Pieces.cut(call.pairs, call.segment)
    dq_BTHK, dk_BSGK, dv_BSGK = (torch.empty_like(x) for x in (q_BTHK, k_BSGK, v_BSGK))
    B, S, G, K = k_BSGK.shape
    parts = list(call.parts())
    part_dq = q_BTHK.new_empty((parts[0].y1 - parts[0].y0) * call.n, call.M, K)
    most = call.pieces_of(parts[0], pieces.size)
    segments = part_dq.new_empty((2, most, call.LP, K), dtype=torch.float32)
    sums = part_dq.new_empty((2, B, S, call.heads_at_once, K), dtype=torch.float32)
    for part in parts:
        call.launch_pieces(
            pair_backward_kernel,
            part,
            pieces,
            q_ptr=q_BTHK,
            k_ptr=k_BSGK,
            v_ptr=v_BSGK,
            do_ptr=do_BTHK,
            lse_ptr=lse_BTH,
            delta_ptr=delta_BTH,
            part_dq_ptr=part_dq,
            segment_dk_ptr=segments[0],
            segment_dv_ptr=segments[1],
            scale=call.scale,
            R=call.key_rows,
            SIZE=pieces.size,
            num_warps=8,
        )
        call.merge(part, part_dq, chosen_BTGn, dq_BTHK)
        rows = B * S
        launch(
            segment_sum_kernel,
            (call.J, part.heads, 2),
            segments_ptr=segments,
            sums_ptr=sums,
            piece_ptr=pieces.first,
            keys_ptr=call.keys,
            bucket0=part.bucket0,
            J=call.J,
            heads=part.heads,
            most=most,
            rows=rows,
            K=K,
            LP=call.LP,
            FILL=part.fills,
        )
        if part.ends:
            own = slice(part.head, part.head + part.heads)
            used = sums.flatten()[: 2 * rows * part.heads * K]
            dk_BSGK[:, :, own], dv_BSGK[:, :, own] = used.view(2, B, S, part.heads, K)
    return dq_BTHK, dk_BSGK, dv_BSGK
