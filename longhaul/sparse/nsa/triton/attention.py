"""Native Sparse Attention (arXiv 2502.11089) as Triton kernels: nsa/engine.py's twin for GPUs.

`nsa_attention` is the entry point. This file launches the kernels of nsa/triton/forward.py and
nsa/triton/backward.py over the tables of nsa/triton/layout.py.

**How the branches run.** The compressed branch and the window go to the attention kernels of
PyTorch (nsa/triton/dense.py). A second pass over the compressed keys turns the log-sum-exp into
probabilities, pools them and writes the importance of each block; then each query's best blocks are
found by bisection over the bits of their importance.

The selected branch is block-major: (query, block) pairs are sorted by block, each piece of a
block's pairs is one dense tile, and the results of a query's pairs merge by log-sum-exp. Without
the sort, every query would gather its blocks of keys for itself. One sort serves the whole call,
and its order is kept for the backward. There the pairs of popular blocks are cut into segments,
whose sums are added in a fixed order.

The forced blocks of a query, 3 of 16, are no pairs: neighbouring queries share them. The kernels
that merge pairs also attend to the forced blocks of their tile of queries. In the backward, a
block's program adds the queries that it is local to, and the queries that read a first block from
afar are cut into segments.

Documents and rows of the batch share every launch. The kernels here use no atomics, and the host
never waits for the device. PyTorch's kernels add up dq by atomics, so that it repeats bit for bit
only under torch.use_deterministic_algorithms. A layer at 131,072 tokens with 32/8 heads launches
135 kernels in the forward and 173 in the backward (a test counts them).

**Memory** at T = 131,072, H = 32, G = 8, K = 128 in bf16, beyond inputs, o and the returned
gradients (GB = 1e9 bytes; a test counts it):

saved      o_cmp and o_slc 2.15, log-sum-exps 0.03, the order of the pairs 0.05: 2.24
forward    partial results of a part's pairs 0.59; folded q and o of two KV heads 0.54, or o_win of
           one 0.13; the importance of blocks lies in the memory of o: at most 2.9 in all
backward   dq of a part's pairs 0.58, dk and dv of its segments 0.20; or folded q, o, do and dq of
           one KV head 0.54; in fp32 dq of one KV head 0.27 and its dk_slc and dv_slc 0.13, o_win
           0.13, deltas 0.05: at most 3.5 with what was saved. Computed: flash attention takes 0.54
           of its own meanwhile, dq in fp32 and dk and dv of every query head

Letters: B rows of the batch, T tokens of a row, Z = B*T, H query heads, G KV heads, M = H/G, K head
dim, N compressed blocks of a row, n selected blocks per query, J selection blocks of all documents,
P pairs.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from longhaul.sparse.nsa.branches import BranchKV, Sizes
from longhaul.sparse.nsa.engine import attend
from longhaul.sparse.nsa.selected import LOG2E
from longhaul.sparse.nsa.triton import dense
from longhaul.sparse.nsa.triton.backward import (
    delta_kernel,
    far_dkv_kernel,
    local_dkv_kernel,
    merge_dq_kernel,
    pair_backward_kernel,
    segment_sum_kernel,
)
from longhaul.sparse.nsa.triton.forward import (
    INTERPRETED,
    choose_kernel,
    combine_kernel,
    importance_kernel,
    merge_kernel,
    pair_forward_kernel,
)
from longhaul.sparse.nsa.triton.layout import (
    Pairs,
    Span,
    ceil_div,
    count_to,
    cut,
    launch,
    lay_out,
    most_blocks,
    most_pieces,
    sort_pairs,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Numbers in the results of a part's pairs, 576 MiB in bf16: three parts of 131,072 tokens.
PARTIAL_RESULT_NUMBERS = 9 * 2**25
FOLDED_NUMBERS = 2**28  # numbers of folded q and o in the forward: 512 MiB in bf16
CHOICE_NUMBERS = 4096  # numbers that a program of choose_kernel holds: 32 per thread
H100_SHARED_MEMORY = 227 * 1024
ENGINE = "use --kernels torch (longhaul.sparse.nsa.engine.nsa_attention)"


# ---- where the kernels run


def supported(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels run on tensors of this dtype on this device."""
    if dtype not in DTYPES:
        return False
    if INTERPRETED:
        return True
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def require(dtype: torch.dtype, device: torch.device) -> None:
    """ValueError if the kernels do not run on tensors of this dtype on this device."""
    given = f"the Triton kernels of sparse attention were given {dtype} on {device}"
    if not supported(dtype, device):
        raise ValueError(
            f"{given}; they need float32, bfloat16 or float16 on a CUDA device of compute "
            "capability >= 8.0 (or TRITON_INTERPRET=1, set before triton is imported, for tests): "
            f"move the tensors there, or {ENGINE}"
        )
    if INTERPRETED and dtype == torch.bfloat16:
        raise ValueError(
            f"{given} under TRITON_INTERPRET=1, whose bf16 products are wrong; they need float32 "
            f"or float16: cast, or {ENGINE}"
        )


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a block of threads can have: on a CUDA device its own answer,
    elsewhere those of an H100.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return H100_SHARED_MEMORY
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def require_sizes(
    M: int, K: int, dtype: torch.dtype, cfg, device: torch.device | str | None = None
) -> None:
    """ValueError for sizes whose tiles would not fit the chip, and for a device that cannot run the
    kernels; None stands for an H100.
    """
    keys_of_a_block = triton.next_power_of_2(cfg.sel_block)
    kib = keys_of_a_block * triton.next_power_of_2(K) * dtype.itemsize / 1024
    if M > 64 or K > 256 or cfg.sel_block > 128 or kib > 32:
        raise ValueError(
            f"the Triton kernels of sparse attention were given {M} query heads per KV head, "
            f"head dim {K}, sel_block={cfg.sel_block}, and keys per block that take {kib:g} KiB; "
            f"the limits are 64, 256, 128 and 32 KiB, in this order: lower them, or {ENGINE}"
        )
    multiple = 16 // dtype.itemsize
    if K % multiple:
        raise ValueError(
            f"PyTorch's attention kernels, which sparse attention uses, were given head dim {K} in "
            f"{dtype}; it must be a multiple of {multiple}: choose such a head_dim, or {ENGINE}"
        )
    if device is None:
        return

    device = torch.device(device)
    require(dtype, device)
    available = shared_memory(device)
    needed = shared_memory_needed(M, K, dtype.itemsize, cfg.sel_block, available)
    if available < needed:
        raise ValueError(
            f"the Triton kernels of sparse attention need {needed:,} bytes of shared memory for "
            f"these sizes, and {device} has {available:,}: {ENGINE}"
        )


def shared_memory_needed(M: int, K: int, itemsize: int, sel_block: int, available: int) -> int:
    """Bytes of shared memory of the kernel that takes most, pair_backward_kernel; a bound of what
    the compiler says, see tests/kernel_resources.py.
    """
    KP = max(16, triton.next_power_of_2(K))
    LP = max(16, triton.next_power_of_2(sel_block))
    R = max(tile_sizes(K, itemsize, available).key_rows, triton.next_power_of_2(M))
    if itemsize == 4:  # three products for one split their operands
        return itemsize * (7 * LP * KP + 4 * (R - 16) * KP)

    keys_and_rows = (2 * LP + 2 * R) * KP
    gradients = R * LP + LP * KP
    return itemsize * (keys_and_rows + gradients)


class TileSizes(NamedTuple):
    """Sizes of tiles, powers of two from 16 on, the least that a tensor core takes."""

    rows: int  # (query, head) rows, in kernels whose results belong to queries
    key_rows: int  # the same in kernels whose results belong to keys
    blocks: int  # selection blocks of a step that computes their importance
    segment_rows: int = 2048  # rows of a segment in the backward of the selected branch


def tile_sizes(K: int, itemsize: int, shared: int) -> TileSizes:
    """Tiles that fit `shared` bytes of shared memory: 227 KiB on an H100, 163 KiB on an A100, 99
    KiB on smaller cards of the same generations. tests/kernel_resources.py compiles them.
    """
    if itemsize == 4:
        return TileSizes(rows=32, key_rows=16, blocks=32)
    if K > 128:
        return TileSizes(rows=64, key_rows=16, blocks=32)
    if shared < 200 * 1024:
        return TileSizes(rows=64, key_rows=64, blocks=32)
    return TileSizes(rows=64, key_rows=128, blocks=64)


# ---- one call


def chunk_of_pairs(Z: int, G: int, M: int, K: int, cfg) -> tuple[int, int]:
    """(tokens of a chunk, KV heads at once), so that the results of a part's pairs stay in bounds.

    Several KV heads at once take all tokens.
    """
    numbers = max(1, cfg.free * M * K)
    most = max(1, PARTIAL_RESULT_NUMBERS // numbers)
    chunk = ceil_div(Z, ceil_div(Z, most))
    return chunk, min(G, max(1, most // Z))


class Part(NamedTuple):
    """A range of tokens under the KV heads of a group: the pairs that are computed at a time."""

    start: int  # tokens, counted over all rows
    stop: int
    tiles: Tensor  # of its tokens
    pairs: int
    pair0: int
    bucket0: int
    buckets: int


class HeadGroup(NamedTuple):
    """KV heads that are computed at a time, [start, stop), each with its M query heads."""

    start: int
    stop: int
    M: int

    @property
    def kv_heads(self) -> int:
        return self.stop - self.start

    @property
    def query_heads(self) -> int:
        return self.kv_heads * self.M

    def of_queries(self, x_BTH: Tensor) -> Tensor:
        """[Z, query heads, ...] from the group's first one on: kernels take the view's pointer."""
        return x_BTH.flatten(0, 1)[:, self.start * self.M :]

    def of_keys(self, x_BSG: Tensor) -> Tensor:
        """[B*S, KV heads, ...] from the group's first one on: kernels take the view's pointer."""
        return x_BSG.flatten(0, 1)[:, self.start :]


class Call:
    """What all launches of one forward or backward share: sizes, documents, tiles of queries."""

    def __init__(
        self,
        q_BTHK: Tensor,
        k_BTGK: Tensor,
        k_cmp_BNGK: Tensor,
        cu_seqlens: Tensor | None,
        sizes: Sequence[int],
    ):
        B, T, self.H, self.K = q_BTHK.shape
        self.Z = B * T
        self.G = k_BTGK.shape[2]
        self.M = self.H // self.G
        self.MP = triton.next_power_of_2(self.M)
        self.cfg = Sizes(*sizes)
        self.scale = self.K**-0.5
        self.scale2 = self.K**-0.5 * LOG2E

        itemsize = q_BTHK.element_size()
        if not q_BTHK.is_meta:  # the planner, whose tensors have no values, launches nothing
            require(q_BTHK.dtype, q_BTHK.device)
        require_sizes(self.M, self.K, q_BTHK.dtype, self.cfg)
        self.tile = tile_sizes(self.K, itemsize, shared_memory(q_BTHK.device))
        self.rows = max(self.tile.rows, self.MP)
        self.key_rows = max(self.tile.key_rows, self.MP)

        blocks_per_row = k_cmp_BNGK.shape[1]
        self.documents = lay_out(q_BTHK, blocks_per_row, cu_seqlens, self.cfg)
        tokens = self.documents.tokens
        self.table = self.documents.table_D4
        self.block_tiles = self.documents.tiles(tokens, self.cfg.sel_block)
        self.J = len(self.block_tiles)

        whole_rows = cu_seqlens is None
        self.window_lines = dense.Lines.of_tokens(self.documents, whole_rows, self.cfg)
        self.compressed_lines = dense.Lines.of_blocks(
            self.documents, self.window_lines.document_Z, whole_rows, self.cfg
        )

        # One head group at a time bounds what a head needs, one part of its pairs bounds the
        # partial results.
        self.chunk, self.kv_heads_at_once = chunk_of_pairs(self.Z, self.G, self.M, self.K, self.cfg)
        boundaries = 1 if cu_seqlens is None else len(cu_seqlens) - 1
        self.buckets = most_blocks(B, T, boundaries, self.cfg)

    @property
    def base_Z(self) -> Tensor:
        """The first selection block of each token's document."""
        return self.table[:, 3][self.window_lines.document_Z]

    @property
    def all_heads(self) -> HeadGroup:
        return HeadGroup(0, self.G, self.M)

    def head_groups(self, at_once: int = 0) -> Iterator[HeadGroup]:
        """Groups of `at_once` KV heads; 0: as many as the results of their pairs allow."""
        at_once = at_once or self.kv_heads_at_once
        for start in range(0, self.G, at_once):
            stop = min(start + at_once, self.G)
            yield HeadGroup(start, stop, self.M)

    @cached_property
    def chunks(self) -> list[Tensor]:
        """Tiles of queries of each chunk of tokens."""
        return self.documents.chunks(self.chunk, self.rows // self.MP)

    def parts(self, group: HeadGroup) -> Iterator["Part"]:
        """The parts of a head group's pairs, the largest one first."""
        for index, tiles in enumerate(self.chunks):
            start = index * self.chunk
            stop = min(start + self.chunk, self.Z)
            first = group.start * len(self.chunks) + index
            pairs = (stop - start) * group.kv_heads * self.cfg.free
            yield Part(
                start=start,
                stop=stop,
                tiles=tiles,
                pairs=pairs,
                pair0=(group.start * self.Z + start) * self.cfg.free,
                bucket0=first * self.buckets,
                buckets=self.buckets * group.kv_heads,
            )

    @cached_property
    def far(self) -> Tensor:
        """Segments of the tokens that read a first block from afar: (block, first token)."""
        spans = []
        block = 0
        for tokens in self.documents.tokens:
            for j in range(self.cfg.sel_init):
                first = (j + self.cfg.sel_local) * self.cfg.sel_block
                if first < tokens:
                    spans.append(Span(block + j, first, tokens - first))
            block += ceil_div(tokens, self.cfg.sel_block)
        return cut(spans, self.segment, self.table.device)

    @cached_property
    def first_far(self) -> Tensor:
        """The first far segment of each block [blocks + 1]."""
        block_S = self.far[:, 0].contiguous()
        every_block = count_to(len(self.block_tiles) + 1, block_S.device)
        return torch.searchsorted(block_S, every_block, out_int32=True)

    @property
    def segment(self) -> int:
        """Tokens of a segment."""
        return max(self.tile.segment_rows, self.MP) // self.MP

    # The dense branches.

    def heads_of(self, group: HeadGroup) -> dense.Heads:
        return dense.Heads(self.H, self.M, group.kv_heads, self.K)

    def folded_heads(self, group: HeadGroup, x_EC: Tensor) -> Tensor:
        """The rows of the group in a tensor with those of all folded heads."""
        rows = self.M * self.cfg.cmp_stride
        return x_EC[group.start * rows : group.stop * rows]

    # Arguments of kernels, by the names that they have there.

    @property
    def head_dim(self) -> dict[str, int]:
        return {"K": self.K, "KP": max(16, triton.next_power_of_2(self.K))}

    @property
    def head_sizes(self) -> dict[str, int]:
        return {"M": self.M, "MP": self.MP, **self.head_dim}

    @property
    def block_sizes(self) -> dict[str, int]:
        L = self.cfg.sel_block
        return {"L": L, "LP": max(16, triton.next_power_of_2(L))}

    @property
    def forced(self) -> dict[str, int]:
        return {"INIT": self.cfg.sel_init, "LOCAL": self.cfg.sel_local}

    @property
    def pooling(self) -> dict:
        """How compressed blocks add up to the importance of a selection block."""
        cfg = self.cfg
        per = cfg.sel_block // cfg.cmp_stride
        spread = cfg.cmp_block // cfg.cmp_stride
        offsets = per + spread - 1
        return {
            "STRIDE": cfg.cmp_stride,
            "SPAN": cfg.cmp_block,
            "PER": per,
            "SPREAD": spread,
            # strides that the compressed block at each offset shares with the selection block
            "WEIGHTS": tuple(min(i + 1, spread, per, offsets - i) for i in range(offsets)),
        }

    def numbers_of(self, part: Part) -> dict[str, int]:
        return {
            "bucket0": part.bucket0,
            "pair0": part.pair0,
            "buckets": part.buckets,
            "COUNT": self.cfg.free,
            "Z": self.Z,
            "J": self.buckets,
        }

    @property
    def block_tables(self) -> dict[str, Tensor]:
        return {"tile_ptr": self.block_tiles, "table_ptr": self.table}


# ---- forward


def choose(
    call: Call, q: Tensor, k_cmp: Tensor, lse: Tensor, block_idx: Tensor, scratch: Tensor
) -> None:
    """Fills block_idx from the log-sum-exp of the compressed branch.

    The importance of blocks goes through `scratch`, as many tokens and KV heads at a time as it
    holds.
    """
    most_tokens = max(call.documents.tokens)
    columns = ceil_div(ceil_div(most_tokens, call.cfg.sel_block), 16) * 16
    importance = scratch.view(torch.float32)
    if len(importance) < columns:
        importance = importance.new_empty(columns)
    most = len(importance) // columns
    heads = min(call.G, max(1, most // call.Z))
    chunk = ceil_div(call.Z, ceil_div(call.Z, most))
    chunks = call.documents.chunks(chunk, call.rows // call.MP)

    for group in call.head_groups(heads):
        for index, tiles in enumerate(chunks):
            tokens = range(index * chunk, min((index + 1) * chunk, call.Z))
            choose_part(
                call,
                group,
                tiles,
                tokens,
                columns,
                q[:, group.start * call.M :],
                k_cmp[:, group.start :],
                lse[:, group.start * call.M :],
                importance,
                block_idx[:, group.start :],
            )


def choose_part(
    call: Call,
    group: HeadGroup,
    tiles: Tensor,
    tokens: range,
    columns: int,
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    importance: Tensor,
    block_idx: Tensor,
) -> None:
    """Fills block_idx of a range of tokens under the KV heads of a group."""
    cfg = call.cfg
    numbers = {"start": tokens.start, "stop": tokens.stop, "COLUMNS": columns}
    if cfg.free > 0:
        launch(
            importance_kernel,
            (len(tiles), group.kv_heads),
            q_ptr=q,
            k_ptr=k_cmp,
            lse_ptr=lse,
            importance_ptr=importance,
            tile_ptr=tiles,
            table_ptr=call.table,
            **numbers,
            scale2=call.scale2,
            H=call.H,
            G=call.G,
            **call.head_sizes,
            R=call.rows,
            JB=call.tile.blocks,
            **call.pooling,
            COUNT=cfg.sel_count,
            **call.forced,
            num_warps=4,
            num_stages=1,
        )

    queries = call.rows // call.MP
    width = triton.next_power_of_2(columns)
    at_once = min(queries, max(1, CHOICE_NUMBERS // width))
    launch(
        choose_kernel,
        (len(tiles) * (queries // at_once), group.kv_heads),
        importance_ptr=importance,
        idx_ptr=block_idx,
        tile_ptr=tiles,
        table_ptr=call.table,
        **numbers,
        G=call.G,
        PARTS=queries // at_once,
        Q=at_once,
        JP=width,
        BLOCK=cfg.sel_block,
        COUNT=cfg.sel_count,
        **call.forced,
        CP=triton.next_power_of_2(cfg.sel_count),
        num_warps=4,
        num_stages=1,
    )


class PairTables(NamedTuple):
    """The pairs of a call, cut into pieces of at most `size` pairs."""

    size: int
    pairs: Pairs
    bucket_of_piece: Tensor
    first_piece: Tensor

    @classmethod
    def of(cls, pairs: Pairs, size: int) -> "PairTables":
        return cls(size, pairs, *pairs.pieces(size))

    @property
    def pointers(self) -> dict[str, Tensor]:
        return {
            "block_ptr": self.bucket_of_piece,
            "first_ptr": self.first_piece,
            "start_ptr": self.pairs.start_E1,
            "order_ptr": self.pairs.order_P,
        }

    def pieces(self, part: Part) -> int:
        """The most pieces that the part can have."""
        return most_pieces(part.pairs, part.buckets, self.size)


def selected_forward(
    call: Call,
    group: HeadGroup,
    tables: PairTables,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
) -> None:
    """Fills o and lse of the selected branch for a head group."""
    parts = list(call.parts(group))
    part_o = q.new_empty(parts[0].pairs, call.M, call.K)
    part_lse = lse.new_empty(parts[0].pairs, call.M)
    for part in parts:
        if part.pairs > 0:
            launch(
                pair_forward_kernel,
                (tables.pieces(part),),
                q_ptr=q,
                k_ptr=k,
                v_ptr=v,
                o_ptr=part_o,
                lse_ptr=part_lse,
                **tables.pointers,
                **call.block_tables,
                **call.numbers_of(part),
                scale2=call.scale2,
                H=call.H,
                G=call.G,
                **call.head_sizes,
                R=call.rows,
                **call.block_sizes,
                num_warps=4,
                num_stages=1,
            )
        launch(
            merge_kernel,
            (len(part.tiles), group.kv_heads),
            q_ptr=q,
            k_ptr=k,
            v_ptr=v,
            part_o_ptr=part_o,
            part_lse_ptr=part_lse,
            o_ptr=o,
            lse_ptr=lse,
            tile_ptr=part.tiles,
            table_ptr=call.table,
            start=part.start,
            stop=part.stop,
            scale2=call.scale2,
            H=call.H,
            G=call.G,
            **call.head_sizes,
            R=call.rows,
            **call.block_sizes,
            COUNT=call.cfg.free,
            **call.forced,
            num_warps=4,
            num_stages=1,
        )


def window_forward(
    call: Call,
    group: HeadGroup,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> tuple[Tensor, Tensor]:
    """(o_win [Z, query heads of the group, K], its log-sum-exp)."""
    return dense.attend(
        call.window_lines,
        q[:, : group.query_heads],
        k[:, : group.kv_heads],
        v[:, : group.kv_heads],
    )


def for_each_head(call: Call, group: HeadGroup, kernel, **pointers: Tensor) -> None:
    """Launches a kernel that treats every (token, query head) of the group by itself."""
    rows = call.Z * group.query_heads
    rows_per_program = 16
    launch(
        kernel,
        (triton.cdiv(rows, rows_per_program),),
        **pointers,
        rows=rows,
        H=call.H,
        HEADS=group.query_heads,
        **call.head_dim,
        R=rows_per_program,
        num_warps=4,
        num_stages=1,
    )


class Outputs(NamedTuple):
    """Results of the forward."""

    o: Tensor  # [B, T, H, K]
    o_cmp: Tensor
    o_slc: Tensor
    lse_cmp: Tensor  # [H * cmp_stride, B * N] fp32, natural, folded as in nsa/triton/dense.py
    lse_slc: Tensor  # [B, T, H] fp32, in base 2
    order: Tensor  # of the pairs: Pairs.order_P
    start: Tensor  # Pairs.start_E1
    block_idx: Tensor  # [B, T, G, n] int16 or int32, -1 = unused

    @classmethod
    def empty(cls, q: Tensor, k_cmp: Tensor, cu_seqlens: Tensor | None, cfg: Sizes) -> "Outputs":
        B, T, H, K = q.shape
        N, G = k_cmp.shape[1:3]
        chunk, _ = chunk_of_pairs(B * T, G, H // G, K, cfg)
        boundaries = 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1
        buckets = G * ceil_div(B * T, chunk) * most_blocks(B, T, boundaries, cfg)
        index_dtype = torch.int16 if T <= 32768 * cfg.sel_block else torch.int32
        return cls(
            o=torch.empty_like(q, memory_format=torch.contiguous_format),
            o_cmp=torch.empty_like(q, memory_format=torch.contiguous_format),
            o_slc=torch.empty_like(q, memory_format=torch.contiguous_format),
            lse_cmp=q.new_empty((H * cfg.cmp_stride, B * N), dtype=torch.float32),
            lse_slc=q.new_empty((B, T, H), dtype=torch.float32),
            order=q.new_empty(B * T * G * cfg.free, dtype=torch.int32),
            start=q.new_empty(buckets + 1, dtype=torch.int32),
            block_idx=q.new_empty((B, T, G, cfg.sel_count), dtype=index_dtype),
        )


def compressed_forward(
    call: Call,
    group: HeadGroup,
    q: Tensor,
    kv: BranchKV,
    outputs: Outputs,
    lse2: Tensor,
) -> None:
    """Fills o_cmp and lse_cmp of a head group; lse2 [B, T, H] becomes the latter in base 2."""
    lines = call.compressed_lines
    heads = call.heads_of(group)
    (q_CEK,) = dense.fold(lines, heads, group.of_queries(q))
    o_CEK, lse_EC = dense.attend(
        lines,
        q_CEK,
        group.of_keys(kv.k_cmp)[:, : group.kv_heads],
        group.of_keys(kv.v_cmp)[:, : group.kv_heads],
    )
    dense.unfold(
        lines,
        heads,
        o_CEK,
        lse_EC,
        group.of_queries(outputs.o_cmp),
        group.of_queries(lse2),
    )
    call.folded_heads(group, outputs.lse_cmp).copy_(lse_EC)


def compressed_and_choice(call: Call, q: Tensor, kv: BranchKV, outputs: Outputs) -> None:
    """Fills o_cmp, lse_cmp and block_idx of all heads; o holds other numbers meanwhile."""
    lse2 = torch.empty_like(outputs.lse_slc)
    at_once = max(1, FOLDED_NUMBERS // (2 * call.Z * call.M * call.K))
    for group in call.head_groups(at_once):
        compressed_forward(call, group, q, kv, outputs, lse2)

    group = call.all_heads
    choose(
        call,
        group.of_queries(q),
        group.of_keys(kv.k_cmp),
        group.of_queries(lse2),
        group.of_keys(outputs.block_idx),
        outputs.o.flatten(),
    )


def with_pairs(call: Call, outputs: Outputs) -> Outputs:
    """The outputs with the pairs of the chosen blocks."""
    free = outputs.block_idx.flatten(0, 1)[..., call.cfg.forced :]
    pairs = sort_pairs(free, call.base_Z, call.buckets, call.chunk)
    return outputs._replace(order=pairs.order_P, start=pairs.start_E1)


def group_forward(
    call: Call,
    group: HeadGroup,
    q: Tensor,
    kv: BranchKV,
    gates: Tensor,
    tables: PairTables,
    outputs: Outputs,
) -> None:
    """Fills o, o_slc and lse_slc of a head group, whose blocks are chosen."""
    q = group.of_queries(q)
    k_slc = group.of_keys(kv.k_slc)
    v_slc = group.of_keys(kv.v_slc)
    o_slc = group.of_queries(outputs.o_slc)
    lse_slc = group.of_queries(outputs.lse_slc)
    selected_forward(call, group, tables, q, k_slc, v_slc, o_slc, lse_slc)

    k_win = group.of_keys(kv.k_win)
    v_win = group.of_keys(kv.v_win)
    o_win, _ = window_forward(call, group, q, k_win, v_win)
    for_each_head(
        call,
        group,
        combine_kernel,
        o_ptr=group.of_queries(outputs.o),
        cmp_ptr=group.of_queries(outputs.o_cmp),
        slc_ptr=o_slc,
        win_ptr=o_win,
        gate_ptr=group.of_queries(gates),
    )


@torch.library.custom_op("longhaul::nsa_triton_paired_forward", mutates_args=())
def nsa_triton_forward(
    q: Tensor,
    k_slc: Tensor,
    v_slc: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    cu_seqlens: Tensor | None,
    sizes: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of Outputs; only o has gradients."""
    call = Call(q, k_slc, k_cmp, cu_seqlens, sizes)
    q = q.contiguous()
    gates = gates.contiguous()
    kv = BranchKV(k_slc, v_slc, k_cmp, v_cmp, k_win, v_win).contiguous()
    outputs = Outputs.empty(q, k_cmp, cu_seqlens, call.cfg)

    # Triton launches on the current device, which may differ from the tensors'; no effect on a CPU.
    with torch.cuda.device_of(q):
        compressed_and_choice(call, q, kv, outputs)
        outputs = with_pairs(call, outputs)
        pairs = Pairs(outputs.order, outputs.start)
        tables = PairTables.of(pairs, call.rows // call.MP)
        for group in call.head_groups():
            group_forward(call, group, q, kv, gates, tables, outputs)
    return tuple(outputs)


# ---- backward


class BranchQueries(NamedTuple):
    """What the backward of one branch reads of the queries of a head group, [Z, H, ...]."""

    q: Tensor
    do: Tensor
    lse: Tensor
    delta: Tensor  # do . o of the branch
    gate: Tensor

    @property
    def pointers(self) -> dict[str, Tensor]:
        return {
            "q_ptr": self.q,
            "do_ptr": self.do,
            "lse_ptr": self.lse,
            "delta_ptr": self.delta,
            "gate_ptr": self.gate,
        }


def selected_backward(
    call: Call,
    group: HeadGroup,
    tables: PairTables,
    branch: BranchQueries,
    k: Tensor,
    v: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Adds to dq [Z, query heads of the group, K]; fills dk and dv of the group's KV heads.

    dk and dv add up in fp32, because each element is a sum of many.
    """
    inputs = {**branch.pointers, "k_ptr": k, "v_ptr": v}
    scales = {"scale": call.scale, "scale2": call.scale2}
    heads = {"H": call.H, "G": call.G, **call.head_sizes}
    loop = {"num_warps": 8, "num_stages": 1}

    parts = list(call.parts(group))
    sums = dq.new_empty((2, call.Z if len(parts) > 1 else 0, group.kv_heads, call.K))
    segments = dq.new_empty((2, tables.pieces(parts[0]), call.cfg.sel_block, call.K))
    part_dq = branch.q.new_empty(parts[0].pairs, call.M, call.K)
    for part in parts:
        if part.pairs > 0:
            launch(
                pair_backward_kernel,
                (tables.pieces(part),),
                **inputs,
                dq_ptr=part_dq,
                dk_ptr=segments[0],
                dv_ptr=segments[1],
                **tables.pointers,
                **call.block_tables,
                **call.numbers_of(part),
                **scales,
                **heads,
                R=call.key_rows,
                SIZE=tables.size,
                **call.block_sizes,
                **loop,
            )
        launch(
            merge_dq_kernel,
            (len(part.tiles), group.kv_heads),
            **inputs,
            part_dq_ptr=part_dq,
            dq_ptr=dq,
            tile_ptr=part.tiles,
            table_ptr=call.table,
            start=part.start,
            stop=part.stop,
            **scales,
            HEADS_DQ=group.query_heads,
            **heads,
            R=call.rows,
            **call.block_sizes,
            COUNT=call.cfg.free,
            **call.forced,
            num_warps=4,
            num_stages=1,
        )
        if part is not parts[-1]:
            launch(
                segment_sum_kernel,
                (len(call.block_tiles), group.kv_heads),
                part_dk_ptr=segments[0],
                part_dv_ptr=segments[1],
                dk_ptr=sums[0],
                dv_ptr=sums[1],
                first_ptr=tables.first_piece,
                **call.block_tables,
                bucket0=part.bucket0,
                J=call.buckets,
                G=group.kv_heads,
                **call.head_dim,
                **call.block_sizes,
                FILL=part.start == 0,
                num_warps=16,
                num_stages=1,
            )

    far = far_dkv(call, group, inputs)
    launch(
        local_dkv_kernel,
        (len(call.block_tiles), group.kv_heads),
        **inputs,
        sum_dk_ptr=sums[0],
        sum_dv_ptr=sums[1],
        part_dk_ptr=segments[0],
        part_dv_ptr=segments[1],
        far_dk_ptr=far[0],
        far_dv_ptr=far[1],
        dk_ptr=dk,
        dv_ptr=dv,
        first_ptr=tables.first_piece,
        first_far_ptr=call.first_far,
        **call.block_tables,
        bucket0=parts[-1].bucket0,
        J=call.buckets,
        far_segments=len(call.far),
        **scales,
        HEADS_SUM=group.kv_heads,
        **heads,
        R=call.key_rows,
        **call.block_sizes,
        LOCAL=call.cfg.sel_local,
        SUMS=len(parts) > 1,
        **loop,
    )


def far_dkv(call: Call, group: HeadGroup, inputs: dict[str, Tensor]) -> Tensor:
    """Shares of dk and dv [2, segments of each KV head, sel_block, K] from the tokens that read a
    first block from afar.
    """
    segments = len(call.far)
    shares = call.table.new_empty(
        (2, group.kv_heads * segments, call.cfg.sel_block, call.K),
        dtype=torch.float32,
    )
    if segments > 0:
        launch(
            far_dkv_kernel,
            (segments, group.kv_heads),
            **inputs,
            dk_ptr=shares[0],
            dv_ptr=shares[1],
            far_ptr=call.far,
            **call.block_tables,
            scale=call.scale,
            scale2=call.scale2,
            H=call.H,
            G=call.G,
            **call.head_sizes,
            R=call.key_rows,
            SIZE=call.segment,
            **call.block_sizes,
            num_warps=8,
            num_stages=1,
        )
    return shares


def window_backward(
    call: Call,
    group: HeadGroup,
    do: Tensor,
    q: Tensor,
    kv: BranchKV,
    gate: Tensor,
    o: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq [Z, query heads of the group, K], dk and dv [Z, KV heads of the group, K]."""
    lines = call.window_lines
    heads = call.heads_of(group)
    own = slice(0, group.kv_heads)
    (do_gated,) = dense.fold(lines, heads, do, gate=gate)
    return dense.attend_backward(
        lines,
        do_gated,
        q[:, : group.query_heads],
        kv.k_win[:, own],
        kv.v_win[:, own],
        o,
        lse,
    )


def compressed_backward(
    call: Call,
    group: HeadGroup,
    do: Tensor,
    q: Tensor,
    kv: BranchKV,
    gate: Tensor,
    o: Tensor,
    lse_EC: Tensor,
    dq: Tensor,
    dq_of_all: Tensor,
) -> tuple[Tensor, Tensor]:
    """dk and dv; fills dq_of_all [Z, H, K] with dq + this branch's."""
    lines = call.compressed_lines
    heads = call.heads_of(group)
    own = slice(0, group.kv_heads)
    do_gated, q_CEK, o_CEK = dense.fold(lines, heads, do, q, o, gate=gate)
    dq_CEK, dk, dv = dense.attend_backward(
        lines,
        do_gated,
        q_CEK,
        kv.k_cmp[:, own],
        kv.v_cmp[:, own],
        o_CEK,
        lse_EC,
    )
    dense.add_unfolded(lines, heads, dq_CEK, dq, dq_of_all, call.H)
    return dk, dv


class Saved(NamedTuple):
    """What the backward reads of the forward's results."""

    o_cmp: Tensor
    o_slc: Tensor
    lse_cmp: Tensor
    lse_slc: Tensor
    order: Tensor
    start: Tensor


class Gradients(NamedTuple):
    """What the backward fills; delta becomes the gradient of the gates."""

    dq: Tensor
    dk_slc: Tensor
    dv_slc: Tensor
    delta: Tensor  # [B, T, H, 3] fp32


def group_backward(
    call: Call,
    group: HeadGroup,
    do: Tensor,
    q: Tensor,
    kv: BranchKV,
    gates: Tensor,
    saved: Saved,
    grads: Gradients,
    tables: PairTables,
) -> list[Tensor]:
    """Fills the gradients of a head group; returns those of its k_cmp, v_cmp, k_win and v_win."""
    q = group.of_queries(q)
    do = group.of_queries(do)
    gates = group.of_queries(gates)
    delta = group.of_queries(grads.delta)
    kv = BranchKV(*(group.of_keys(x) for x in kv))

    # The forward does not save o_win, which would cost 1 GiB: it is computed again.
    o_win, lse_win = window_forward(call, group, q, kv.k_win, kv.v_win)
    for_each_head(
        call,
        group,
        delta_kernel,
        do_ptr=do,
        cmp_ptr=group.of_queries(saved.o_cmp),
        slc_ptr=group.of_queries(saved.o_slc),
        win_ptr=o_win,
        delta_ptr=delta,
    )

    # The window fills dq, the other branches add to it.
    dq_win, dk_win, dv_win = window_backward(call, group, do, q, kv, gates[..., 2], o_win, lse_win)
    dq = dq_win.float()
    del o_win, lse_win, dq_win

    lse_slc = group.of_queries(saved.lse_slc)
    selected = BranchQueries(q, do, lse_slc, delta[..., 1], gates[..., 1])
    dk_slc = group.of_keys(grads.dk_slc)
    dv_slc = group.of_keys(grads.dv_slc)
    selected_backward(call, group, tables, selected, kv.k_slc, kv.v_slc, dq, dk_slc, dv_slc)

    gate_cmp = gates[..., 0]
    o_cmp = group.of_queries(saved.o_cmp)
    lse_cmp = call.folded_heads(group, saved.lse_cmp)
    dq_of_all = group.of_queries(grads.dq)
    dk_cmp, dv_cmp = compressed_backward(
        call, group, do, q, kv, gate_cmp, o_cmp, lse_cmp, dq, dq_of_all
    )
    return [dk_cmp, dv_cmp, dk_win, dv_win]


@torch.library.custom_op("longhaul::nsa_triton_paired_backward", mutates_args=())
def nsa_triton_backward(
    do: Tensor,
    q: Tensor,
    k_slc: Tensor,
    v_slc: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    o_cmp: Tensor,
    o_slc: Tensor,
    lse_cmp: Tensor,
    lse_slc: Tensor,
    order: Tensor,
    start: Tensor,
    cu_seqlens: Tensor | None,
    sizes: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, the six K/V and the gates."""
    call = Call(q, k_slc, k_cmp, cu_seqlens, sizes)
    do = do.contiguous()
    q = q.contiguous()
    gates = gates.contiguous()
    kv = BranchKV(k_slc, v_slc, k_cmp, v_cmp, k_win, v_win).contiguous()
    saved = Saved(o_cmp, o_slc, lse_cmp, lse_slc, order, start)

    grads = Gradients(
        dq=torch.empty_like(q),
        dk_slc=torch.empty_like(kv.k_slc),
        dv_slc=torch.empty_like(kv.v_slc),
        delta=q.new_empty(gates.shape, dtype=torch.float32),
    )
    with torch.cuda.device_of(q):
        tables = PairTables.of(Pairs(order, start), call.segment)
        of_groups = [
            group_backward(call, group, do, q, kv, gates, saved, grads, tables)
            for group in call.head_groups()
        ]

    dkv = []
    for x in (kv.k_cmp, kv.v_cmp, kv.k_win, kv.v_win):
        of_heads = [results.pop(0) for results in of_groups]
        dkv.append(torch.cat(of_heads, 1).view_as(x))
    return grads.dq, grads.dk_slc, grads.dv_slc, *dkv, grads.delta.to(gates.dtype)


# ---- the operators of PyTorch


@nsa_triton_forward.register_fake
def _(q, k_slc, v_slc, k_cmp, v_cmp, k_win, v_win, gates, cu_seqlens, sizes):
    return tuple(Outputs.empty(q, k_cmp, cu_seqlens, Sizes(*sizes)))


@nsa_triton_backward.register_fake
def _(do, *inputs_and_saved):
    inputs = inputs_and_saved[:8]  # q, the six K/V and the gates
    return tuple(x.new_empty(x.shape) for x in inputs)


def _save(ctx, inputs, output):
    *tensors, sizes = inputs
    _, *saved, _ = output
    ctx.save_for_backward(*tensors, *saved)
    ctx.sizes = sizes
    ctx.set_materialize_grads(False)  # zeros for the absent gradients would take 2.2 GB at 131,072


def _backward(ctx, do, *_):
    *inputs, cu_seqlens, o_cmp, o_slc, lse_cmp, lse_slc, order, start = ctx.saved_tensors
    saved = Saved(o_cmp, o_slc, lse_cmp, lse_slc, order, start)
    grads = nsa_triton_backward(do, *inputs, *saved, cu_seqlens, ctx.sizes)
    return *grads, None, None


nsa_triton_forward.register_autograd(_backward, setup_context=_save)


# ---- the entry point


def nsa_attention(
    q: Tensor,
    k_slc: Tensor,
    v_slc: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    cfg,
    cu_seqlens: Tensor | None = None,
    return_parts: bool = False,
) -> Tensor | dict[str, Tensor]:
    """Native Sparse Attention: o = g_cmp o_cmp + g_slc o_slc + g_win o_win (arXiv 2502.11089).

    Shapes, dtypes, results and errors are those of the engine's nsa_attention. Needs at most 64
    query heads per KV head, head dim 256, sel_block 128 and 32 KiB of keys per block. Keep
    cu_seqlens on the host, or the call waits for the device. Raises ValueError if the kernels do
    not run on the tensors' device and dtype.
    """
    kv = BranchKV(k_slc, v_slc, k_cmp, v_cmp, k_win, v_win)
    return attend(nsa_triton_forward, (q, *kv), gates, cfg, cu_seqlens, return_parts)
