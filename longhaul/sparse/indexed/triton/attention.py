"""Indexed attention as Triton kernels: indexed/engine.py's twin for GPUs, behind model.py's two
operators.

This file launches the kernels of indexed/triton/kernels.py, chunk by chunk of the queries. A chunk
has the ranks of all its blocks in memory, 8 bytes each; PyTorch selects the best ones, which are
unique, so the choice is exact and the host never waits for the device. A program then gathers the
blocks of one query for the heads of one group. The target of the indexer's loss is a second pass
over the chosen keys, from the log-sum-exp; the rest of the loss is PyTorch's operators.

The backward ranks and chooses again, by the same kernel on the same chunks. Gradients of keys are
sums over the (query, block) pairs of a group of chunks, sorted by block: each block has one
program, so there are no atomics, and results repeat bit for bit.

Rows whose queries may read every block, as in the dense warm-up, are computed by model.py's plain
version: gathering would read each key once for every query.

Letters: as in indexed/triton/kernels.py; T queries, the last of the S positions, m = most chosen
blocks of a query.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from base.machine import platform
from longhaul.sparse.indexed import plain
from longhaul.sparse.indexed.choice import LARGEST_INDEX
from longhaul.sparse.indexed.plain import IndexedInputs, IndexedOutputs
from longhaul.sparse.indexed.reading import LOG2E, Pairs, sort_pairs, target
from longhaul.sparse.indexed.triton.kernels import (
    attend_kernel,
    dkv_kernel,
    dq_kernel,
    indexer_dk_kernel,
    indexer_dq_kernel,
    mass_kernel,
    rank_kernel,
)
from longhaul.sparse.nsa.triton.attention import supported
from longhaul.sparse.nsa.triton.forward import INTERPRETED
from longhaul.sparse.nsa.triton.layout import ceil_div, launch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CHUNK_RANKS = 2**23  # ranks that exist at once: 64 MiB
GROUP_PAIRS = 2**21  # pairs that are sorted at once: 8 MiB of blocks
HEADS_BYTES = 2**14  # of the heads that one tile of queries holds


# ---- where the kernels run


def require(
    heads: tuple[int, int],  # query heads per KV head, and of the indexer
    dims: tuple[int, int],  # of a head, and of the indexer's
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> None:
    """ValueError if the kernels cannot serve the sizes, or cannot run on the device; None stands
    for a GPU that can.
    """
    given = (
        f"the Triton kernels of indexed attention were given {heads[0]} query heads per KV head "
        f"of {dims[0]} elements, {heads[1]} of the indexer of {dims[1]}, and {dtype}"
    )
    bytes_of = [
        padded(x) * padded(dim) * dtype.itemsize for x, dim in zip(heads, dims, strict=True)
    ]
    if max(dims) > 256 or max(bytes_of) > HEADS_BYTES:
        raise ValueError(
            f"{given}; allowed: heads of at most 256 elements, and {HEADS_BYTES // 1024} KiB for "
            "each of these groups of heads, padded to powers of two"
        )
    if dtype not in DTYPES or device is not None and not supported(dtype, device):
        raise ValueError(
            f"{given} on {device or 'a GPU'}; allowed: float32, bfloat16 or float16 on a CUDA "
            "device of compute capability >= 8.0 (or TRITON_INTERPRET=1, set before triton is "
            "imported, for tests)"
        )


def require_values(inputs: IndexedInputs) -> None:
    """ValueError if the kernels cannot run on these tensors; those without values run none."""
    q = inputs.q_BTHK
    if q.is_meta:
        return
    if not supported(q.dtype, q.device) or INTERPRETED and q.dtype == torch.bfloat16:
        raise ValueError(
            f"the Triton kernels of indexed attention were given {q.dtype} on {q.device}; allowed: "
            "float32, bfloat16 or float16 on a CUDA device of compute capability >= 8.0, or under "
            "TRITON_INTERPRET=1, whose bf16 products are wrong, float32 or float16; remedy: choose "
            "kernels='auto' or 'torch'"
        )


class TileSizes(NamedTuple):
    """Sizes of tiles, powers of two from 16 on, the least that a tensor core takes."""

    keys: int  # keys or blocks that a program gathers at once
    queries: int  # of a tile of ranks
    rows: int  # (query, head) rows of a step that adds to the gradients of a block


def tile_sizes(dim: int, itemsize: int) -> TileSizes:
    """Tiles for heads of `dim` elements, that fit the 99 KiB of shared memory which every card from
    Ampere on has; a test compiles them.
    """
    of_a_key = itemsize * padded(dim)
    whole = 2**14 if itemsize < 4 else 2**13  # three products for one hold their operands in parts
    keys = max(16, min(64, whole // of_a_key))
    return TileSizes(keys=keys, queries=keys, rows=max(16, keys // 2))


def padded(size: int) -> int:
    """The next power of two, at least 16."""
    return max(16, triton.next_power_of_2(size))


# ---- one row


class Row(NamedTuple):
    """One row of the batch, in memory without gaps, and sizes."""

    q_THK: Tensor
    k_SGK: Tensor
    v_SGK: Tensor
    q_ThE: Tensor
    k_NE: Tensor
    first: int  # position of the first query
    r: int
    most: int

    @classmethod
    def of(
        cls,
        inputs: IndexedInputs,
        b: int,
        r: int,
        most: int,
    ) -> "Row":
        tensors = [x[b].contiguous() for x in inputs]
        return cls(*tensors, len(tensors[1]) - len(tensors[0]), r, most)

    @property
    def scale(self) -> float:
        return self.q_THK.shape[-1] ** -0.5

    @property
    def heads(self) -> dict[str, int]:
        """Sizes of attention's heads, as kernels take them."""
        _, G, K = self.k_SGK.shape
        return dict(G=G, r=self.r, M=self.q_THK.shape[1] // G, K=K, KP=padded(K))

    @property
    def group_rows(self) -> int:
        """Query heads of a group, padded."""
        return padded(self.heads["M"])

    @property
    def indexer(self) -> dict[str, int]:
        """Sizes of the indexer's heads."""
        _, h, E = self.q_ThE.shape
        return dict(h=h, E=E, EP=padded(E))

    @property
    def tile(self) -> TileSizes:
        return tile_sizes(self.k_SGK.shape[-1], self.k_SGK.itemsize)

    @property
    def indexer_tile(self) -> TileSizes:
        return tile_sizes(self.k_NE.shape[-1], self.k_NE.itemsize)


def _dense(inputs: IndexedInputs, most: int) -> bool:
    """Whether every query may read all blocks."""
    return inputs.k_BNE.shape[1] <= most


def _chunks(inputs: IndexedInputs) -> list[slice]:
    """The queries in chunks, whose ranks exist at once."""
    T, N = inputs.q_BTHK.shape[1], inputs.k_BNE.shape[1]
    size = max(16, CHUNK_RANKS // N)
    return [slice(start, min(start + size, T)) for start in range(0, T, size)]


def _size(queries: slice) -> int:
    """About how many ranks a chunk has: the last one has the most blocks, but may be short."""
    return (queries.stop - queries.start) * queries.stop


class Choice(NamedTuple):
    """The best blocks of each query of a chunk, best first; `most` of them, or all."""

    index_Cm: Tensor  # int32
    scores_Cm: Tensor
    used_Cm: Tensor  # whether there is a block
    least_C: Tensor  # the rank of the last one, 0 if all blocks are chosen


def choose(row: Row, queries: slice) -> Choice:
    """The choice of `plain.least_rank`. Ranks are unique, so that the selection is exact."""
    q_ChE = row.q_ThE[queries]
    first = row.first + queries.start
    seen = (row.first + queries.stop - 1) // row.r
    N = min(max(seen, row.most), len(row.k_NE))
    C, tile = len(q_ChE), row.indexer_tile
    rank_CN = q_ChE.new_empty((C, N), dtype=torch.int64)
    launch(
        rank_kernel,
        (ceil_div(C, tile.queries), ceil_div(N, tile.keys)),
        q_ptr=q_ChE,
        k_ptr=row.k_NE,
        rank_ptr=rank_CN,
        first=first,
        C=C,
        N=N,
        scale=q_ChE.shape[-1] ** -0.5,
        r=row.r,
        **row.indexer,
        QB=tile.queries,
        NB=tile.keys,
        num_warps=4,
        num_stages=1,
    )
    rank_Cm = rank_CN.topk(row.most).values
    del rank_CN
    # a rank that no kernel wrote names a block that exists, too
    index_Cm = rank_Cm.bitwise_not().bitwise_and_(LARGEST_INDEX).clamp_(max=N - 1).int()
    scores_Cm = (rank_Cm >> 31).int().view(torch.float32)
    return Choice(index_Cm, scores_Cm, rank_Cm >= 0, rank_Cm[:, -1].clamp(min=0))


def block_mass(
    row: Row,
    queries: slice,
    index_Cm: Tensor,
    lse_CH: Tensor,
) -> Tensor:
    """[C, m]: the probability of each chosen block, summed over heads."""
    mass_Cm = lse_CH.new_empty(index_Cm.shape)
    launch(
        mass_kernel,
        (len(index_Cm), ceil_div(row.most, row.tile.keys)),
        q_ptr=row.q_THK[queries],
        k_ptr=row.k_SGK,
        lse_ptr=lse_CH,
        index_ptr=index_Cm,
        mass_ptr=mass_Cm,
        first=row.first + queries.start,
        most=row.most,
        scale2=row.scale * LOG2E,
        **row.heads,
        MP=row.group_rows,
        NB=row.tile.keys,
        num_warps=4,
        num_stages=2,
    )
    return mass_Cm


# ---- forward


def forward(
    inputs: IndexedInputs,
    r: int,
    most: int,
    learns: bool,
    outputs: IndexedOutputs,
) -> None:
    """Fills the outputs; arguments as those of `operators.indexed_forward`."""
    if _dense(inputs, most):
        plain.forward(inputs, r, most, learns, outputs)
        return
    require_values(inputs)
    chunks = platform().parts(_chunks(inputs), size=_size)
    with torch.cuda.device_of(inputs.q_BTHK):
        for b in range(len(inputs.q_BTHK)):
            row = Row.of(inputs, b, r, most)
            row_outputs = IndexedOutputs(*(x[b] for x in outputs))
            for queries in chunks:
                _forward_chunk(row, queries, learns, row_outputs)


def _forward_chunk(
    row: Row,
    queries: slice,
    learns: bool,
    outputs: IndexedOutputs,
) -> None:
    choice = choose(row, queries)
    outputs.least_BT[queries] = choice.least_C
    launch(
        attend_kernel,
        (len(choice.index_Cm), row.heads["G"]),
        q_ptr=row.q_THK[queries],
        k_ptr=row.k_SGK,
        v_ptr=row.v_SGK,
        index_ptr=choice.index_Cm,
        o_ptr=outputs.o_BTHK[queries],
        lse_ptr=outputs.lse_BTH[queries],
        first=row.first + queries.start,
        most=row.most,
        scale2=row.scale * LOG2E,
        **row.heads,
        MP=row.group_rows,
        SB=row.tile.keys,
        num_warps=4,
        num_stages=2,
    )
    if not learns:
        return
    target_Cm = target(block_mass(row, queries, choice.index_Cm, outputs.lse_BTH[queries]))
    log_sum_C = choice.scores_Cm.masked_fill(~choice.used_Cm, -torch.inf).logsumexp(-1)
    outputs.log_sum_BT[queries] = log_sum_C
    # where the target is 0, a block adds 0
    log_share_Cm = (choice.scores_Cm - log_sum_C[:, None]).masked_fill_(target_Cm == 0, 0.0)
    divergence_Cm = torch.xlogy(target_Cm, target_Cm).sub_(log_share_Cm.mul_(target_Cm))
    outputs.kl_BT[queries] = divergence_Cm.sum(-1)


# ---- backward


class Kept(NamedTuple):
    """What the gradients of keys read of a group of queries."""

    block_Cn: Tensor  # int32: the block of each slot, the own one last
    dscore_Cn: Tensor  # gradient of its score; 0 for the own block
    delta_CH: Tensor  # do . o

    @classmethod
    def empty(cls, row: Row, queries: int) -> "Kept":
        slots = (queries, row.most + 1)
        make = row.q_THK.new_empty
        return cls(
            make(slots, dtype=torch.int32),
            make(slots, dtype=torch.float32),
            make((queries, row.q_THK.shape[1]), dtype=torch.float32),
        )

    def of(self, queries: slice) -> "Kept":
        return Kept(*(x[queries] for x in self))


def backward(
    do_BTHK: Tensor | None,
    dkl_BT: Tensor | None,
    inputs: IndexedInputs,
    r: int,
    most: int,
    saved: IndexedOutputs,
    grads: IndexedInputs,
) -> None:
    """Fills the gradients of queries, and adds to the others; as `operators.indexed_backward`."""
    if _dense(inputs, most):
        plain.backward(do_BTHK, dkl_BT, inputs, r, most, saved, grads)
        return
    require_values(inputs)
    chunks = _chunks(inputs)
    together = max(1, GROUP_PAIRS // (chunks[0].stop * (most + 1)))
    groups = [chunks[x : x + together] for x in range(0, len(chunks), together)]
    groups = platform().parts(groups, size=lambda group: sum(map(_size, group)))
    with torch.cuda.device_of(inputs.q_BTHK):
        for b in range(len(inputs.q_BTHK)):
            upstream = [None if x is None else x[b].contiguous() for x in (do_BTHK, dkl_BT)]
            row = Row.of(inputs, b, r, most)
            row_saved = IndexedOutputs(*(x[b].contiguous() for x in saved))
            row_grads = IndexedInputs(*(x[b] for x in grads))
            for group in groups:
                _backward_group(*upstream, row, group, row_saved, row_grads)


def _backward_group(
    do_THK: Tensor | None,
    dkl_T: Tensor | None,
    row: Row,
    group: list[slice],
    saved: IndexedOutputs,
    grads: IndexedInputs,
) -> None:
    """The gradients of the queries of a few chunks, and what they add to those of the keys."""
    whole = slice(group[0].start, group[-1].stop)
    kept = Kept.empty(row, whole.stop - whole.start)
    for queries in platform().tiles(group):
        inside = kept.of(slice(queries.start - whole.start, queries.stop - whole.start))
        _backward_chunk(do_THK, dkl_T, row, queries, saved, grads, inside)

    blocks = ceil_div(row.first + whole.stop, row.r)
    pairs = sort_pairs(kept.block_Cn, blocks)
    if dkl_T is not None:
        _add_indexer_dk(row, whole, kept, pairs, grads.k_BNE)
    if do_THK is not None:
        _add_dkv(row, whole, do_THK, saved.lse_BTH, kept, pairs, grads)


def _backward_chunk(
    do_THK: Tensor | None,
    dkl_T: Tensor | None,
    row: Row,
    queries: slice,
    saved: IndexedOutputs,
    grads: IndexedInputs,
    kept: Kept,
) -> None:
    """Fills the gradients of the queries of a chunk, and what is kept of them."""
    choice = choose(row, queries)
    position_C = torch.arange(queries.start, queries.stop, device=row.k_SGK.device) + row.first
    unused = torch.iinfo(torch.int32).max  # sorted behind all blocks
    kept.block_Cn[:, :-1] = choice.index_Cm.masked_fill(~choice.used_Cm, unused)
    kept.block_Cn[:, -1] = position_C // row.r
    if do_THK is not None:
        _fill_dq(row, queries, do_THK, choice.index_Cm, saved, grads.q_BTHK, kept.delta_CH)
    if dkl_T is None:
        return

    target_Cm = target(block_mass(row, queries, choice.index_Cm, saved.lse_BTH[queries]))
    share_Cm = (choice.scores_Cm - saved.log_sum_BT[queries, None]).exp_()
    # a query without a target has no loss
    without = ~choice.used_Cm | (target_Cm.sum(-1, keepdim=True) == 0)
    dscore_Cm = share_Cm.masked_fill_(without, 0.0).sub_(target_Cm)
    dscore_Cm.mul_(dkl_T[queries, None]).mul_(row.q_ThE.shape[-1] ** -0.5)
    kept.dscore_Cn[:, :-1] = dscore_Cm
    kept.dscore_Cn[:, -1] = 0.0
    launch(
        indexer_dq_kernel,
        (len(dscore_Cm),),
        q_ptr=row.q_ThE[queries],
        k_ptr=row.k_NE,
        index_ptr=choice.index_Cm,
        dscore_ptr=kept.dscore_Cn,
        dq_ptr=grads.q_BThE[queries],
        first=row.first + queries.start,
        most=row.most,
        r=row.r,
        **row.indexer,
        HP=padded(row.indexer["h"]),
        NB=row.indexer_tile.keys,
        num_warps=4,
        num_stages=2,
    )


def _fill_dq(
    row: Row,
    queries: slice,
    do_THK: Tensor,
    index_Cm: Tensor,
    saved: IndexedOutputs,
    dq_THK: Tensor,
    delta_CH: Tensor,
) -> None:
    launch(
        dq_kernel,
        (len(index_Cm), row.heads["G"]),
        q_ptr=row.q_THK[queries],
        do_ptr=do_THK[queries],
        o_ptr=saved.o_BTHK[queries],
        lse_ptr=saved.lse_BTH[queries],
        k_ptr=row.k_SGK,
        v_ptr=row.v_SGK,
        index_ptr=index_Cm,
        dq_ptr=dq_THK[queries],
        delta_ptr=delta_CH,
        first=row.first + queries.start,
        most=row.most,
        scale=row.scale,
        scale2=row.scale * LOG2E,
        **row.heads,
        MP=row.group_rows,
        SB=row.tile.keys,
        num_warps=4,
        num_stages=2,
    )


def _add_dkv(
    row: Row,
    queries: slice,
    do_THK: Tensor,
    lse_TH: Tensor,
    kept: Kept,
    pairs: Pairs,
    grads: IndexedInputs,
) -> None:
    S, G, _ = row.k_SGK.shape
    tokens = 16  # of a block, under one program
    launch(
        dkv_kernel,
        (len(pairs.start_N) - 1, G, ceil_div(row.r, tokens)),
        q_ptr=row.q_THK[queries],
        do_ptr=do_THK[queries],
        lse_ptr=lse_TH[queries],
        delta_ptr=kept.delta_CH,
        k_ptr=row.k_SGK,
        v_ptr=row.v_SGK,
        dk_ptr=grads.k_BSGK,
        dv_ptr=grads.v_BSGK,
        order_ptr=pairs.order_P,
        start_ptr=pairs.start_N,
        first=row.first + queries.start,
        slots=row.most + 1,
        scale=row.scale,
        scale2=row.scale * LOG2E,
        S=S,
        **row.heads,
        LB=tokens,
        R=row.tile.rows,
        num_warps=4,
        num_stages=2,
    )


def _add_indexer_dk(
    row: Row,
    queries: slice,
    kept: Kept,
    pairs: Pairs,
    dk_NE: Tensor,
) -> None:
    whole = min(len(pairs.start_N) - 1, len(dk_NE))  # the last own block may be unfinished
    launch(
        indexer_dk_kernel,
        (whole,),
        q_ptr=row.q_ThE[queries],
        k_ptr=row.k_NE,
        dscore_ptr=kept.dscore_Cn,
        dk_ptr=dk_NE,
        order_ptr=pairs.order_P,
        start_ptr=pairs.start_N,
        slots=row.most + 1,
        **row.indexer,
        R=row.indexer_tile.rows,
        num_warps=4,
        num_stages=2,
    )
