"""Native Sparse Attention (arXiv 2502.11089) as Triton kernels: nsa/engine.py's twin for GPUs.

`nsa_attention` is the entry point. This file launches the kernels of nsa/triton/forward.py and
nsa/triton/backward.py over the tables of nsa/triton/layout.py.

**How the branches run.** The compressed branch and the window go to the attention kernels of
PyTorch (nsa/triton/dense.py). A second pass over the compressed keys turns the log-sum-exp into
probabilities, pools them and keeps the best blocks of each query, all on the chip. The selected
branch is block-major: (query, block) pairs are sorted by block, each piece of a block's pairs is
one dense tile, and the results of a query's pairs merge by log-sum-exp. Without the sort, every
query would gather n blocks of keys for itself. In the backward, the pairs of popular blocks are cut
into segments, whose sums are added in a fixed order.

All n blocks become pairs, including the forced ones. The partial results of these 3 of 16 blocks
add memory traffic (computed: about 2 ms of 10 per forward at 131,072 tokens and 3.35 TB/s) but need
no special case. Documents and rows of the batch share every launch. The kernels here use no
atomics, and the host never waits for the device. PyTorch's kernels add up dq by atomics, so that it
repeats bit for bit only under torch.use_deterministic_algorithms.

**Memory** at T = 131,072, H = 32, G = 8, K = 128 in bf16, beyond inputs, o and the returned
gradients (GB = 1e9 bytes; a test counts it):

saved      o_cmp and o_slc 2.15, log-sum-exps and indices 0.07
forward    partial results of a chunk of pairs 0.27; folded q and o of one KV head 0.27, or its
           o_win 0.13; sorting 0.02: at most 2.5 in all
backward   dq of a chunk of pairs 0.27, dk and dv of its segments 0.20; or folded q, o, do and dq of
           one KV head 0.54; in fp32 dq of one KV head 0.27 and its dk_slc and dv_slc 0.13, o_win
           0.13, deltas 0.05, sorting 0.02: at most 3.3 with what was saved. Computed: flash
           attention takes 0.54 of its own meanwhile, dq in fp32 and dk and dv of every query head

Letters: B rows of the batch, T tokens of a row, Z = B*T, H query heads, G KV heads, M = H/G, K head
dim, N compressed blocks of a row, n selected blocks per query, J selection blocks of all documents,
P pairs of a chunk.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from nsa.branches import BranchKV, Sizes
from nsa.engine import attend
from nsa.selected import LOG2E
from nsa.triton import dense
from nsa.triton.backward import (
    delta_kernel,
    pair_backward_kernel,
    segment_sum_kernel,
)
from nsa.triton.forward import (
    INTERPRETED,
    choose_kernel,
    combine_kernel,
    gather_kernel,
    pair_forward_kernel,
)
from nsa.triton.layout import Pairs, launch, lay_out, sort_pairs

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PARTIAL_RESULT_NUMBERS = 2**27  # numbers in the results of a chunk of pairs: 256 MiB in bf16
H100_SHARED_MEMORY = 227 * 1024
LEAST_SHARED_MEMORY = 99 * 1024
ENGINE = "use --kernels torch (nsa.engine.nsa_attention)"


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
    if available < LEAST_SHARED_MEMORY:
        raise ValueError(
            f"the Triton kernels of sparse attention need {LEAST_SHARED_MEMORY:,} bytes of shared "
            f"memory, and {device} has {available:,}: {ENGINE}"
        )


class TileSizes(NamedTuple):
    """Sizes of tiles, powers of two from 16 on, the least that a tensor core takes."""

    rows: int  # (query, head) rows, in kernels whose results belong to queries
    key_rows: int  # the same in kernels whose results belong to keys
    keys: int
    stages: int  # steps of a loop whose loads are in flight
    segment_rows: int = 1024  # rows of a segment in the backward of the selected branch


def tile_sizes(K: int, itemsize: int, shared: int) -> TileSizes:
    """Tiles that fit `shared` bytes of shared memory: 227 KiB on an H100, 163 KiB on an A100, 99
    KiB on smaller cards of the same generations.
    """
    bytes_of_a_row = triton.next_power_of_2(K) * itemsize
    if bytes_of_a_row > 256:  # fp32 from K = 128 on, 16-bit numbers from K = 256 on
        return TileSizes(rows=64, key_rows=16, keys=32, stages=1)
    if shared < 160 * 1024:
        return TileSizes(rows=64, key_rows=64, keys=32, stages=1)
    return TileSizes(rows=128, key_rows=64, keys=64, stages=2)


# ---- one call


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
        self.tiles = self.documents.tiles(tokens, self.rows // self.MP)
        self.block_tiles = self.documents.tiles(tokens, self.cfg.sel_block)
        self.J = len(self.block_tiles)

        whole_rows = cu_seqlens is None
        self.compressed_lines = dense.Lines.of_blocks(self.documents, whole_rows, self.cfg)
        self.window_lines = dense.Lines.of_tokens(self.documents, whole_rows, self.cfg)

        _, tokens_D, _, first_block_D = self.table.unbind(1)
        self.base_Z = first_block_D.repeat_interleave(tokens_D, output_size=self.Z)

        # One head group at a time bounds what a head needs, one chunk of its pairs bounds the
        # partial results.
        self.chunk = max(1, PARTIAL_RESULT_NUMBERS // (self.cfg.sel_count * self.M * self.K))
        self.kv_heads_at_once = min(self.G, max(1, self.chunk // self.Z))

    @property
    def all_heads(self) -> HeadGroup:
        return HeadGroup(0, self.G, self.M)

    def head_groups(self) -> Iterator[HeadGroup]:
        for start in range(0, self.G, self.kv_heads_at_once):
            stop = min(start + self.kv_heads_at_once, self.G)
            yield HeadGroup(start, stop, self.M)

    def chunks(self, group: HeadGroup) -> Iterator[slice]:
        """Ranges of the group's queries; query g*Z + z is token z under its KV head g."""
        queries = group.kv_heads * self.Z
        for start in range(0, queries, self.chunk):
            yield slice(start, min(start + self.chunk, queries))

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
    def query_tables(self) -> dict[str, Tensor]:
        return {"tile_ptr": self.tiles, "table_ptr": self.table}

    @property
    def block_tables(self) -> dict[str, Tensor]:
        return {"tile_ptr": self.block_tiles, "table_ptr": self.table}


# ---- forward


def choose(call: Call, q: Tensor, k_cmp: Tensor, lse: Tensor, block_idx: Tensor) -> None:
    """Fills block_idx from the log-sum-exp of the compressed branch."""
    cfg = call.cfg
    per = cfg.sel_block // cfg.cmp_stride
    spread = cfg.cmp_block // cfg.cmp_stride
    offsets = per + spread - 1

    # Strides that the compressed block at each offset shares with the selection block.
    weights = tuple(min(i + 1, spread, per, offsets - i) for i in range(offsets))
    # Two stages hold 2 * 5 tiles of 16 KiB.
    stages = call.tile.stages if offsets <= 5 else 1
    best = triton.next_power_of_2(max(2, cfg.sel_count - cfg.forced))

    launch(
        choose_kernel,
        (len(call.tiles), call.G),
        q_ptr=q,
        k_ptr=k_cmp,
        lse_ptr=lse,
        idx_ptr=block_idx,
        **call.query_tables,
        scale2=call.scale2,
        H=call.H,
        G=call.G,
        **call.head_sizes,
        R=call.rows,
        JB=max(call.tile.keys, best),
        STRIDE=cfg.cmp_stride,
        SPAN=cfg.cmp_block,
        PER=per,
        SPREAD=spread,
        WEIGHTS=weights,
        COUNT=cfg.sel_count,
        INIT=cfg.sel_init,
        LOCAL=cfg.sel_local,
        BEST=best,
        COLUMNS=triton.next_power_of_2(cfg.sel_count),
        num_warps=8,
        num_stages=stages,
    )


def gather(
    call: Call,
    pairs: Pairs,
    queries: slice,
    x: Tensor,
    part_lse: Tensor,
    o: Tensor,
    heads_o: int,
    lse: Tensor,
    merge: bool,
) -> None:
    """Fills o with each query's sum of x over its pairs.

    With merge=True, the sum is weighted by part_lse, and lse is filled; otherwise the kernel
    touches neither of them.
    """
    count = queries.stop - queries.start
    rows = max(32, call.MP)
    launch(
        gather_kernel,
        (triton.cdiv(count, rows // call.MP),),
        x_ptr=x,
        part_lse_ptr=part_lse,
        place_ptr=pairs.place_P,
        o_ptr=o,
        lse_ptr=lse,
        query0=queries.start,
        queries=count,
        COUNT=call.cfg.sel_count,
        Z=call.Z,
        H=call.H,
        HEADS_O=heads_o,
        **call.head_sizes,
        R=rows,
        MERGE=merge,
        num_warps=4,
        num_stages=2,
    )


def selected_forward(
    call: Call,
    group: HeadGroup,
    queries: slice,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_idx: Tensor,
    o: Tensor,
    lse: Tensor,
) -> None:
    """Fills o and lse of the selected branch for a chunk of queries."""
    pairs = sort_pairs(block_idx[:, : group.kv_heads], call.base_Z, call.J, queries)
    block_of_piece, first_piece = pairs.pieces(call.rows // call.MP)

    part_o = q.new_empty(len(pairs.order_P), call.M, call.K)
    part_lse = lse.new_empty(len(pairs.order_P), call.M)
    launch(
        pair_forward_kernel,
        (len(block_of_piece),),
        q_ptr=q,
        k_ptr=k,
        v_ptr=v,
        o_ptr=part_o,
        lse_ptr=part_lse,
        block_ptr=block_of_piece,
        first_ptr=first_piece,
        start_ptr=pairs.start_J1,
        order_ptr=pairs.order_P,
        **call.block_tables,
        query0=queries.start,
        scale2=call.scale2,
        COUNT=call.cfg.sel_count,
        Z=call.Z,
        H=call.H,
        G=call.G,
        J=call.J,
        BLOCKS=call.J * group.kv_heads,
        **call.head_sizes,
        R=call.rows,
        **call.block_sizes,
        num_warps=8,
        num_stages=1,
    )
    gather(call, pairs, queries, part_o, part_lse, o, call.H, lse, merge=True)


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
    block_idx: Tensor  # [B, T, G, n] int16 or int32, -1 = unused

    @classmethod
    def empty(cls, q: Tensor, k_slc: Tensor, k_cmp: Tensor, cfg: Sizes) -> "Outputs":
        B, T, H, _ = q.shape
        N, G = k_cmp.shape[1:3]
        index_dtype = torch.int16 if T <= 32768 * cfg.sel_block else torch.int32
        return cls(
            o=torch.empty_like(q, memory_format=torch.contiguous_format),
            o_cmp=torch.empty_like(q, memory_format=torch.contiguous_format),
            o_slc=torch.empty_like(q, memory_format=torch.contiguous_format),
            lse_cmp=q.new_empty((H * cfg.cmp_stride, B * N), dtype=torch.float32),
            lse_slc=q.new_empty((B, T, H), dtype=torch.float32),
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
    """Fills o_cmp, lse_cmp and block_idx of all heads."""
    lse2 = torch.empty_like(outputs.lse_slc)
    for group in call.head_groups():
        compressed_forward(call, group, q, kv, outputs, lse2)

    group = call.all_heads
    choose(
        call,
        group.of_queries(q),
        group.of_keys(kv.k_cmp),
        group.of_queries(lse2),
        group.of_keys(outputs.block_idx),
    )


def group_forward(
    call: Call,
    group: HeadGroup,
    q: Tensor,
    kv: BranchKV,
    gates: Tensor,
    outputs: Outputs,
) -> None:
    """Fills o, o_slc and lse_slc of a head group, whose blocks are chosen."""
    q = group.of_queries(q)
    k_slc = group.of_keys(kv.k_slc)
    v_slc = group.of_keys(kv.v_slc)
    block_idx = group.of_keys(outputs.block_idx)
    o_slc = group.of_queries(outputs.o_slc)
    lse_slc = group.of_queries(outputs.lse_slc)
    for queries in call.chunks(group):
        selected_forward(call, group, queries, q, k_slc, v_slc, block_idx, o_slc, lse_slc)

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


@torch.library.custom_op("longhaul::nsa_triton_forward", mutates_args=())
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of Outputs; only o has gradients."""
    call = Call(q, k_slc, k_cmp, cu_seqlens, sizes)
    q = q.contiguous()
    gates = gates.contiguous()
    kv = BranchKV(k_slc, v_slc, k_cmp, v_cmp, k_win, v_win).contiguous()
    outputs = Outputs.empty(q, k_slc, k_cmp, call.cfg)

    # Triton launches on the current device, which may differ from the tensors'; no effect on a CPU.
    with torch.cuda.device_of(q):
        compressed_and_choice(call, q, kv, outputs)
        for group in call.head_groups():
            group_forward(call, group, q, kv, gates, outputs)
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
    queries: slice,
    branch: BranchQueries,
    k: Tensor,
    v: Tensor,
    block_idx: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Fills dq of a chunk of queries; adds to dk and dv.

    dk and dv are fp32 [Z, KV heads of the group, K], because each element is a sum of many.
    """
    pairs = sort_pairs(block_idx[:, : group.kv_heads], call.base_Z, call.J, queries)
    segment = max(call.tile.segment_rows, call.MP) // call.MP
    block_of_piece, first_piece = pairs.pieces(segment)
    pieces = len(block_of_piece)

    part_dq = branch.q.new_empty(len(pairs.order_P), call.M, call.K)
    part_dk, part_dv = branch.q.new_empty(
        (2, pieces, call.cfg.sel_block, call.K),
        dtype=torch.float32,
    )
    launch(
        pair_backward_kernel,
        (pieces,),
        **branch.pointers,
        k_ptr=k,
        v_ptr=v,
        dq_ptr=part_dq,
        dk_ptr=part_dk,
        dv_ptr=part_dv,
        block_ptr=block_of_piece,
        first_ptr=first_piece,
        start_ptr=pairs.start_J1,
        order_ptr=pairs.order_P,
        **call.block_tables,
        query0=queries.start,
        scale=call.scale,
        scale2=call.scale2,
        COUNT=call.cfg.sel_count,
        Z=call.Z,
        H=call.H,
        G=call.G,
        J=call.J,
        BLOCKS=call.J * group.kv_heads,
        **call.head_sizes,
        R=call.key_rows,
        SIZE=segment,
        **call.block_sizes,
        num_warps=8,
        num_stages=call.tile.stages,
    )
    launch(
        segment_sum_kernel,
        (call.J * group.kv_heads,),
        part_dk_ptr=part_dk,
        part_dv_ptr=part_dv,
        dk_ptr=dk,
        dv_ptr=dv,
        first_ptr=first_piece,
        **call.block_tables,
        G=group.kv_heads,
        J=call.J,
        **call.head_dim,
        **call.block_sizes,
        num_warps=8,
        num_stages=1,
    )
    heads = group.query_heads
    gather(call, pairs, queries, part_dq, branch.lse, dq, heads, branch.lse, merge=False)


def window_backward(
    call: Call,
    group: HeadGroup,
    do: Tensor,
    q: Tensor,
    kv: BranchKV,
    gate: Tensor,
    o: Tensor,
    lse: Tensor,
    dq: Tensor,
    dkv: BranchKV,
) -> None:
    """Adds to dq [Z, query heads of the group, K]; fills dk_win and dv_win."""
    lines = call.window_lines
    heads = call.heads_of(group)
    own = slice(0, group.kv_heads)
    (do_gated,) = dense.fold(lines, heads, do, gate=gate)
    dq_CEK, dkv.k_win[:, own], dkv.v_win[:, own] = dense.attend_backward(
        lines,
        do_gated,
        q[:, : group.query_heads],
        kv.k_win[:, own],
        kv.v_win[:, own],
        o,
        lse,
    )
    dense.add_unfolded(lines, heads, dq_CEK, dq, dq, group.query_heads)


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
    dkv: BranchKV,
    dq_of_all: Tensor,
) -> None:
    """Fills dq_of_all [Z, H, K] with dq + this branch's; fills dk_cmp and dv_cmp."""
    lines = call.compressed_lines
    heads = call.heads_of(group)
    own = slice(0, group.kv_heads)
    do_gated, q_CEK, o_CEK = dense.fold(lines, heads, do, q, o, gate=gate)
    dq_CEK, dkv.k_cmp[:, own], dkv.v_cmp[:, own] = dense.attend_backward(
        lines,
        do_gated,
        q_CEK,
        kv.k_cmp[:, own],
        kv.v_cmp[:, own],
        o_CEK,
        lse_EC,
    )
    dense.add_unfolded(lines, heads, dq_CEK, dq, dq_of_all, call.H)


class Saved(NamedTuple):
    """What the backward reads of the forward's results."""

    o_cmp: Tensor
    o_slc: Tensor
    lse_cmp: Tensor
    lse_slc: Tensor
    block_idx: Tensor


class Gradients(NamedTuple):
    """What the backward fills; delta becomes the gradient of the gates."""

    dq: Tensor
    dkv: BranchKV
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
) -> None:
    """Fills the gradients of a head group."""
    q = group.of_queries(q)
    do = group.of_queries(do)
    gates = group.of_queries(gates)
    delta = group.of_queries(grads.delta)
    kv = BranchKV(*(group.of_keys(x) for x in kv))
    dkv = BranchKV(*(group.of_keys(x) for x in grads.dkv))

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

    lse_slc = group.of_queries(saved.lse_slc)
    selected = BranchQueries(q, do, lse_slc, delta[..., 1], gates[..., 1])

    # The selected branch fills dq, the others add to it.
    dq = q.new_empty((call.Z, group.query_heads, call.K), dtype=torch.float32)
    dk, dv = dq.new_zeros((2, call.Z, group.kv_heads, call.K))
    k_slc = kv.k_slc
    v_slc = kv.v_slc
    block_idx = group.of_keys(saved.block_idx)
    for queries in call.chunks(group):
        selected_backward(call, group, queries, selected, k_slc, v_slc, block_idx, dq, dk, dv)
    dkv.k_slc[:, : group.kv_heads] = dk
    dkv.v_slc[:, : group.kv_heads] = dv

    del dk, dv

    gate_cmp = gates[..., 0]
    gate_win = gates[..., 2]
    window_backward(call, group, do, q, kv, gate_win, o_win, lse_win, dq, dkv)
    del o_win, lse_win

    o_cmp = group.of_queries(saved.o_cmp)
    lse_cmp = call.folded_heads(group, saved.lse_cmp)
    dq_of_all = group.of_queries(grads.dq)
    compressed_backward(call, group, do, q, kv, gate_cmp, o_cmp, lse_cmp, dq, dkv, dq_of_all)


@torch.library.custom_op("longhaul::nsa_triton_backward", mutates_args=())
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
    block_idx: Tensor,
    cu_seqlens: Tensor | None,
    sizes: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, the six K/V and the gates."""
    call = Call(q, k_slc, k_cmp, cu_seqlens, sizes)
    do = do.contiguous()
    q = q.contiguous()
    gates = gates.contiguous()
    kv = BranchKV(k_slc, v_slc, k_cmp, v_cmp, k_win, v_win).contiguous()
    saved = Saved(o_cmp, o_slc, lse_cmp, lse_slc, block_idx)

    grads = Gradients(
        dq=torch.empty_like(q),
        dkv=BranchKV(*(torch.empty_like(x) for x in kv)),
        delta=q.new_empty(gates.shape, dtype=torch.float32),
    )
    with torch.cuda.device_of(q):
        for group in call.head_groups():
            group_backward(call, group, do, q, kv, gates, saved, grads)
    return grads.dq, *grads.dkv, grads.delta.to(gates.dtype)


# ---- the operators of PyTorch


@nsa_triton_forward.register_fake
def _(q, k_slc, v_slc, k_cmp, v_cmp, k_win, v_win, gates, cu_seqlens, sizes):
    return tuple(Outputs.empty(q, k_slc, k_cmp, Sizes(*sizes)))


@nsa_triton_backward.register_fake
def _(do, *inputs_and_saved):
    inputs = inputs_and_saved[:8]  # q, the six K/V and the gates
    return tuple(x.new_empty(x.shape) for x in inputs)


def _save(ctx, inputs, output):
    *tensors, sizes = inputs
    _, *saved = output
    ctx.save_for_backward(*tensors, *saved)
    ctx.sizes = sizes
    ctx.set_materialize_grads(False)  # zeros for the absent gradients would take 2.2 GB at 131,072


def _backward(ctx, do, *_):
    *inputs, cu_seqlens, o_cmp, o_slc, lse_cmp, lse_slc, block_idx = ctx.saved_tensors
    saved = Saved(o_cmp, o_slc, lse_cmp, lse_slc, block_idx)
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

    Shapes, dtypes, results and errors are those of nsa.engine.nsa_attention. Needs at most 64 query
    heads per KV head, head dim 256, sel_block 128 and 32 KiB of keys per block. Keep cu_seqlens on
    the host, or the call waits for the device. Raises ValueError if the kernels do not run on the
    tensors' device and dtype.
    """
    kv = BranchKV(k_slc, v_slc, k_cmp, v_cmp, k_win, v_win)
    return attend(nsa_triton_forward, (q, *kv), gates, cfg, cu_seqlens, return_parts)
