"""Indexed attention whose time is that of what it reads: the bodies of the two operators.

Queries at the start of a document read most of what they see. There, masks cost less than
gathered blocks, so the plain version computes them, as it does the dense warm-up, where
every block is read. The other queries come in chunks: scores and choice (indexed/choice.py), then
attention over the chosen blocks in tiles of a few queries (indexed/reading.py).

The backward works on several chunks at a time: it keeps their probabilities and the gradients of
their logits, which the sums over queries for each key read. It saves 8 bytes per query, the rank of
the last chosen block, from which it chooses again. All sums have a fixed order.

The operators of a tile are large enough to share the threads inside, so there is no further level
of threads, and memory does not depend on their number.

Letters: as in indexed/choice.py and indexed/reading.py; T queries, the last of the S positions.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

import longhaul.sparse.indexed.choice as choice
import longhaul.sparse.indexed.reading as reading
from base.machine import platform
from longhaul.sparse.indexed import plain
from longhaul.sparse.indexed.plain import IndexedInputs, IndexedOutputs
from longhaul.sparse.nsa.branches import Buffers

# A query that sees at most so many times the budget is masked.
MASKED = 2.5
CHUNK_SCORES = 2**21  # scores that exist at once: 8 MiB
TILE_KEYS = 2**21  # elements of the keys that a tile gathers: 4 MiB in bf16
GROUP_ROWS = 4096  # queries x heads whose probabilities the backward keeps at once


class Row(NamedTuple):
    """One row of the batch: its tensors, keys and values in blocks, sizes."""

    q_THK: Tensor
    q_ThE: Tensor
    k_NE: Tensor
    k: reading.Blocks
    v: reading.Blocks
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
        q_THK, k_SGK, v_SGK, q_ThE, k_NE = (x[b] for x in inputs)
        k, v = reading.Blocks.of(k_SGK, r), reading.Blocks.of(v_SGK, r)
        return cls(q_THK, q_ThE, k_NE, k, v, len(k_SGK) - len(q_THK), r, most)

    @property
    def tile(self) -> int:
        """Queries of a tile."""
        _, G, K = self.k.shape
        return max(1, TILE_KEYS // ((self.most + 1) * self.r * G * K))

    def scores(
        self,
        queries: slice,
        buffers: Buffers,
    ) -> Tensor:
        """[C, N] over the blocks that a query of the chunk may choose."""
        seen = min((self.first + queries.stop - 1) // self.r, len(self.k_NE))
        scores_CN = choice.block_scores(self.q_ThE[queries], self.k_NE[:seen], buffers)
        choice.hide_unfinished(scores_CN, self.first + queries.start, self.r)
        return scores_CN

    def tiles(self, queries: slice) -> Iterator[tuple[slice, slice]]:
        """The tiles of a chunk: their queries in the call, and in the chunk."""
        for start in platform().tiles(range(queries.start, queries.stop, self.tile)):
            stop = min(start + self.tile, queries.stop)
            yield slice(start, stop), slice(start - queries.start, stop - queries.start)

    def read_by(
        self,
        at: slice,
        index_Am: Tensor,
    ) -> reading.Tile:
        """What the queries of a tile read, besides the chosen blocks their own."""
        return reading.tile_of(index_Am, self.first + at.start, self.r, len(self.k.whole_Nw))


def _masked_queries(
    inputs: IndexedInputs,
    r: int,
    most: int,
) -> int:
    """How many of the queries, the first ones, are computed by masks."""
    T, S = inputs.q_BTHK.shape[1], inputs.k_BSGK.shape[1]
    sparse_from = int(MASKED * (most + 1)) * r
    return min(T, max(0, sparse_from - (S - T)))


def _start(
    tensors: IndexedInputs,
    queries: int,
    seen: int,
    r: int,
) -> IndexedInputs:
    """The first queries, and the `seen` keys, with their blocks, that they see."""
    return IndexedInputs(
        tensors.q_BTHK[:, :queries],
        tensors.k_BSGK[:, :seen],
        tensors.v_BSGK[:, :seen],
        tensors.q_BThE[:, :queries],
        tensors.k_BNE[:, : seen // r],
    )


def _chunks(
    inputs: IndexedInputs,
    first: int,
    r: int,
) -> list[slice]:
    """The queries from `first` on, in chunks."""
    _, T, H, _ = inputs.q_BTHK.shape
    N = max(1, inputs.k_BSGK.shape[1] // r)
    size = max(16, min(256, CHUNK_SCORES // N, GROUP_ROWS // H))
    return [slice(start, min(start + size, T)) for start in range(first, T, size)]


# ---- forward


def forward(
    inputs: IndexedInputs,
    r: int,
    most: int,
    learns: bool,
    outputs: IndexedOutputs,
) -> None:
    """Fills the outputs; arguments as those of `operators.indexed_forward`."""
    masked = _masked_queries(inputs, r, most)
    if masked:
        seen = inputs.k_BSGK.shape[1] - inputs.q_BTHK.shape[1] + masked
        start = IndexedOutputs(*(x[:, :masked] for x in outputs))
        plain.forward(_start(inputs, masked, seen, r), r, most, learns, start)

    chunks = _chunks(inputs, masked, r)
    if not chunks:
        return
    chunks = platform().last(chunks)
    buffers = Buffers(inputs.q_BTHK)
    for b in range(len(inputs.q_BTHK)):
        row = Row.of(inputs, b, r, most)
        row_outputs = IndexedOutputs(*(x[b] for x in outputs))
        for queries in chunks:
            _forward_chunk(row, queries, learns, row_outputs, buffers)


def _forward_chunk(
    row: Row,
    queries: slice,
    learns: bool,
    outputs: IndexedOutputs,
    buffers: Buffers,
) -> None:
    scores_CN = row.scores(queries, buffers)
    index_Cm = choice.choose(scores_CN, row.most)
    scores_Cm = scores_CN.gather(1, index_Cm)
    outputs.least_BT[queries] = choice.least_rank(scores_Cm, index_Cm)

    mass_Cm = torch.empty_like(scores_Cm)
    for at, inside in row.tiles(queries):
        tile = row.read_by(at, index_Cm[inside])
        mass_Cm[inside] = _forward_tile(row, at, tile, outputs, buffers)
    if learns:
        log_sum_C = choice.log_sum(scores_Cm)
        outputs.log_sum_BT[queries] = log_sum_C
        target_Cm = reading.target(mass_Cm)
        # where the target is 0, a block adds 0
        log_share_Cm = scores_Cm.sub_(log_sum_C[:, None]).masked_fill_(target_Cm == 0, 0.0)
        outputs.kl_BT[queries] = (
            torch.xlogy(target_Cm, target_Cm).sub_(log_share_Cm.mul_(target_Cm)).sum(-1)
        )


def _forward_tile(
    row: Row,
    at: slice,
    tile: reading.Tile,
    outputs: IndexedOutputs,
    buffers: Buffers,
) -> Tensor:
    """Fills o and lse of a few queries; returns the mass of their chosen blocks."""
    # One buffer holds keys and then values, so that they stay in the cache between two operators.
    keys = reading.gather(row.k, tile, buffers)
    M = row.q_THK.shape[1] // len(keys)
    p_GAMS, mass_Am = [], 0
    for g, k_ASK in enumerate(keys):
        heads = slice(g * M, g * M + M)
        p_AMS, lse_AM = reading.probabilities(
            row.q_THK[at, heads], k_ASK, tile, buffers, name=f"p {g}"
        )
        outputs.lse_BTH[at, heads] = lse_AM
        p_GAMS.append(p_AMS)
        mass_Am = mass_Am + reading.block_mass(p_AMS, row.r)

    values = reading.gather(row.v, tile, buffers)
    for g, (p_AMS, v_ASK) in enumerate(zip(p_GAMS, values, strict=True)):
        heads = slice(g * M, g * M + M)
        outputs.o_BTHK[at, heads] = buffers.rounded("high", p_AMS) @ v_ASK
    return mass_Am


# ---- backward


class Kept(NamedTuple):
    """What the sums over queries read of each pair, in the dtype of the inputs."""

    index_Cn: Tensor
    p_GrCnM: Tensor  # probabilities
    ds_GrCnM: Tensor  # gradients of q k
    dscores_Cnh: Tensor  # gradients of the products of the indexer's heads; 0 for the own block

    @classmethod
    def empty(
        cls,
        row: Row,
        queries: int,
        buffers: Buffers,
    ) -> "Kept":
        r, G, _ = row.k.shape
        n, M = row.most + 1, row.q_THK.shape[1] // G
        dtype = row.q_THK.dtype
        pairs = (G, r, queries, n, M)
        return cls(
            buffers.take("kept index", (queries, n), torch.int32),
            buffers.take("kept p", pairs, dtype),
            buffers.take("kept ds", pairs, dtype),
            buffers.take("kept dscores", (queries, n, row.q_ThE.shape[1]), dtype),
        )

    def of(self, queries: slice) -> "Kept":
        return Kept(
            self.index_Cn[queries],
            self.p_GrCnM[:, :, queries],
            self.ds_GrCnM[:, :, queries],
            self.dscores_Cnh[queries],
        )


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
    masked = _masked_queries(inputs, r, most)
    if masked:
        start = IndexedOutputs(*(x[:, :masked] for x in saved))
        upstream = [None if x is None else x[:, :masked] for x in (do_BTHK, dkl_BT)]
        seen = inputs.k_BSGK.shape[1] - inputs.q_BTHK.shape[1] + masked
        of_start = [_start(tensors, masked, seen, r) for tensors in (inputs, grads)]
        plain.backward(*upstream, of_start[0], r, most, start, of_start[1])

    chunks = _chunks(inputs, masked, r)
    if not chunks:
        return
    size = (chunks[0].stop - chunks[0].start) * inputs.q_BTHK.shape[2]
    together = max(1, GROUP_ROWS // size)
    groups = [chunks[x : x + together] for x in range(0, len(chunks), together)]
    groups = platform().last(groups)
    buffers = Buffers(inputs.q_BTHK)
    for b in range(len(inputs.q_BTHK)):
        upstream = [None if x is None else x[b] for x in (do_BTHK, dkl_BT)]
        row = Row.of(inputs, b, r, most)
        row_saved = IndexedOutputs(*(x[b] for x in saved))
        row_grads = IndexedInputs(*(x[b] for x in grads))
        for group in groups:
            _backward_group(*upstream, row, group, row_saved, row_grads, buffers)


def _backward_group(
    do_THK: Tensor | None,
    dkl_T: Tensor | None,
    row: Row,
    group: list[slice],
    saved: IndexedOutputs,
    grads: IndexedInputs,
    buffers: Buffers,
) -> None:
    """The gradients of the queries of a few chunks, and what they add to those of the keys."""
    whole = slice(group[0].start, group[-1].stop)
    kept = Kept.empty(row, whole.stop - whole.start, buffers)
    for queries in platform().last(group):
        chunk = kept.of(slice(queries.start - whole.start, queries.stop - whole.start))
        _backward_chunk(do_THK, dkl_T, row, queries, saved, chunk, grads, buffers)

    seen = row.first + whole.stop
    pairs = reading.sort_pairs(kept.index_Cn, -(-seen // row.r))
    if dkl_T is not None:
        _add_score_gradients(row.q_ThE[whole], kept, pairs, grads.k_BNE)
    if do_THK is not None:
        k, v = grads.k_BSGK[:seen], grads.v_BSGK[:seen]
        _add_key_gradients(row.q_THK[whole], kept.ds_GrCnM, pairs, k)
        _add_key_gradients(do_THK[whole], kept.p_GrCnM, pairs, v)


def _backward_chunk(
    do_THK: Tensor | None,
    dkl_T: Tensor | None,
    row: Row,
    queries: slice,
    saved: IndexedOutputs,
    kept: Kept,
    grads: IndexedInputs,
    buffers: Buffers,
) -> None:
    scores_CN = row.scores(queries, buffers)
    index_Cm = choice.choose_again(scores_CN, saved.least_BT[queries], row.most)
    scores_Cm = scores_CN.gather(1, index_Cm)

    mass_Cm = torch.empty_like(scores_Cm)
    for at, inside in row.tiles(queries):
        tile = row.read_by(at, index_Cm[inside])
        kept.index_Cn[inside] = tile.index_An
        mass_Cm[inside] = _backward_tile(
            do_THK, row, at, tile, saved, kept.of(inside), grads, buffers
        )
    if dkl_T is None:
        return
    target_Cm = reading.target(mass_Cm)
    share_Cm = scores_Cm.sub_(saved.log_sum_BT[queries, None]).exp_()
    # a query without a target has no loss
    without = target_Cm.sum(-1, keepdim=True) == 0
    dscores_Cm = share_Cm.masked_fill_(without, 0.0).sub_(target_Cm)
    dscores_Cm.mul_(dkl_T[queries, None]).mul_(row.q_ThE.shape[-1] ** -0.5)
    for at, inside in row.tiles(queries):
        _backward_scores(row, at, index_Cm[inside], dscores_Cm[inside], kept.of(inside), grads)


def _backward_tile(
    do_THK: Tensor | None,
    row: Row,
    at: slice,
    tile: reading.Tile,
    saved: IndexedOutputs,
    kept: Kept,
    grads: IndexedInputs,
    buffers: Buffers,
) -> Tensor:
    """Fills dq of a few queries and what is kept; returns the mass of their chosen blocks."""
    dp_GAMS = []
    if do_THK is not None:
        dp_GAMS = _gradients_of_p(do_THK, row, at, tile, saved, buffers)
    keys = reading.gather(row.k, tile, buffers)
    M = row.q_THK.shape[1] // len(keys)
    mass_Am = 0
    for g, k_ASK in enumerate(keys):
        heads = slice(g * M, g * M + M)
        q_AMK, lse_AM = row.q_THK[at, heads], saved.lse_BTH[at, heads]
        p_AMS = reading.probabilities_again(q_AMK, k_ASK, lse_AM, tile, buffers)
        mass_Am = mass_Am + reading.block_mass(p_AMS, row.r)
        if do_THK is None:
            continue
        ds_AMS = dp_GAMS[g].mul_(p_AMS).mul_(q_AMK.shape[-1] ** -0.5)
        low_AMS = buffers.rounded("low", ds_AMS)
        grads.q_BTHK[at, heads] = low_AMS @ k_ASK
        kept.ds_GrCnM[g] = reading.by_pair(low_AMS, row.r)
        kept.p_GrCnM[g] = reading.by_pair(buffers.rounded("high", p_AMS), row.r)
    return mass_Am


def _gradients_of_p(
    do_THK: Tensor,
    row: Row,
    at: slice,
    tile: reading.Tile,
    saved: IndexedOutputs,
    buffers: Buffers,
) -> list[Tensor]:
    """do v - do o of each KV head, [A, M, S]."""
    values = reading.gather(row.v, tile, buffers)
    do_AHK = do_THK[at]
    delta_AH1 = (do_AHK.float() * saved.o_BTHK[at].float()).sum(-1, keepdim=True)
    M = do_AHK.shape[1] // len(values)
    found = []
    for g, (do_AMK, v_ASK) in enumerate(zip(do_AHK.split(M, dim=1), values, strict=True)):
        # Rounded once more than logits are: gradients err by 3.1e-3 instead of 2.5e-3.
        dp_AMS = torch.bmm(do_AMK.contiguous(), v_ASK.mT).float()
        found.append(dp_AMS.sub_(delta_AH1[:, g * M : g * M + M]))
    return found


def _backward_scores(
    row: Row,
    at: slice,
    index_Am: Tensor,
    dscores_Am: Tensor,
    kept: Kept,
    grads: IndexedInputs,
) -> None:
    """Fills dq of the indexer for a few queries, and what is kept of the gradients of its heads."""
    A, m = index_Am.shape
    q_AhE = row.q_ThE[at]
    k_AmE = row.k_NE.index_select(0, index_Am.flatten()).view(A, m, -1)
    negative_Ahm = (q_AhE @ k_AmE.mT) <= 0
    d_Ahm = dscores_Am[:, None].masked_fill(negative_Ahm, 0.0).to(q_AhE.dtype)
    grads.q_BThE[at] = d_Ahm @ k_AmE
    kept.dscores_Cnh[:, :-1] = d_Ahm.mT
    kept.dscores_Cnh[:, -1] = 0.0


def _add_score_gradients(
    q_ChE: Tensor,
    kept: Kept,
    pairs: reading.Pairs,
    dk_NE: Tensor,
) -> None:
    rows = reading.rows_of(pairs, q_ChE.shape[1])
    weight_Ph = kept.dscores_Cnh.flatten(0, 1).index_select(0, pairs.order_P)
    found_NE = reading.sum_of_queries(q_ChE, weight_Ph, rows, pairs)
    seen = min(len(found_NE), len(dk_NE))  # the own block of the last queries may be unfinished
    dk_NE[:seen].add_(found_NE[:seen].float())


def _add_key_gradients(
    x_CHK: Tensor,
    weight_GrCnM: Tensor,
    pairs: reading.Pairs,
    total_SGK: Tensor,
) -> None:
    """total[u] += sum over queries that read u, and heads, of weight * x."""
    G, r, *_, M = weight_GrCnM.shape
    rows = reading.rows_of(pairs, M)
    for g, x_CMK in enumerate(x_CHK.split(M, dim=1)):
        x_CMK = x_CMK.contiguous()
        for i in range(r):
            weight_PM = weight_GrCnM[g, i].flatten(0, 1).index_select(0, pairs.order_P)
            found_NK = reading.sum_of_queries(x_CMK, weight_PM, rows, pairs)
            total = total_SGK[i::r, g]  # token i of each block
            total.add_(found_NK[: len(total)].float())
