"""Native Sparse Attention (arXiv 2502.11089) on GPUs: the bodies of the operators of
longhaul/sparse/nsa/engine.py.

**How the branches run.** The compressed branch and the window go to the attention kernels of
PyTorch (stock.py). A second pass over the compressed keys turns the log-sum-exp into probabilities,
pools them and writes the importance of each block; then each query's best blocks are found by
bisection over the bits of their importance. The selected branch is the engine of blocks.py. The
gates multiply the gradient of o before each branch sees it.

Documents and rows of the batch share every launch; no atomics but in PyTorch's kernels, whose dq
repeats bit for bit only under torch.use_deterministic_algorithms; the host never waits for the
device. Long rows are computed one or two KV heads at a time, so that launches grow with the work: a
layer of 32/8 heads has 66 in the forward and 94 in the backward at 8,192 tokens, 188 and 621 at
131,072 (a test counts them).

**Memory** at T = 131,072, H = 32, G = 8, K = 128 in bf16, beyond inputs, o and the returned
gradients (GB = 1e9 bytes; a test counts it):

saved      o_cmp and o_slc 2.15, log-sum-exps 0.03, the chosen blocks 0.03: 2.22
forward    o_cmp and o_slc; folded q and o of two KV heads 0.54, or partial results of a part's
           pairs 0.36 and the sorted pairs 0.27; the importance of blocks lies in the memory of o:
           at most 2.8 in all
backward   of one KV head q and the gradient of o_slc 0.27, dq, dk and dv 0.20, their sums in fp32
           0.13; dq of a part's pairs 0.36, dk and dv of its segments 0.18: at most 3.5 with what
           was saved. Computed: flash attention takes 0.54 of its own meanwhile, dq in fp32 and dk
           and dv of every query head

Letters: B rows of the batch, T tokens of a row, Z = B*T, H query heads, G KV heads, M = H/G, K head
dim, N compressed blocks of a row, n selected blocks per query, D documents of all rows. A place is
(line, residue) of stock.py.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from longhaul.sparse.nsa.branches import BranchKV, Outputs, Sizes, stride_weights
from longhaul.sparse.triton import blocks, stock
from longhaul.sparse.triton.nsa_kernels import (
    choose_kernel,
    combine_kernel,
    importance_kernel,
    move_kernel,
)
from longhaul.sparse.triton.tiles import (
    ceil_div,
    count_to,
    cut_documents,
    launch,
    require,
    shared_memory,
    tile_sizes,
    upload,
)
from model import sparse_documents

FORWARD_NUMBERS = 2**27  # numbers of q of the KV heads that are computed at a time: two at 131,072
BACKWARD_NUMBERS = 2**26
CHOICE_NUMBERS = 4096  # numbers that a program of choose_kernel holds: 32 per thread
ROWS = 16  # of a program that moves rows


class Call:
    """Sizes, documents and tables of one forward or backward."""

    def __init__(
        self,
        q_BTHK: Tensor,
        k_cmp_BNGK: Tensor,
        cu_seqlens: Tensor | None,
        cfg: Sizes,
    ):
        B, T, self.H, self.K = q_BTHK.shape
        N, self.G = k_cmp_BNGK.shape[1:3]
        self.Z = B * T
        self.M = self.H // self.G
        self.MP = triton.next_power_of_2(self.M)
        self.cfg = cfg
        self.tile = tile_sizes(self.K, q_BTHK.element_size(), shared_memory(q_BTHK.device))
        self.rows = max(self.tile.rows, self.MP)

        documents = sparse_documents(cu_seqlens, T, N, self.cfg) * B
        self.tokens = [tokens.stop - tokens.start for tokens, _ in documents]
        self.lines = [lines.stop - lines.start for _, lines in documents]
        table = torch.tensor([self.tokens, self.lines])
        first_2D = table.cumsum(1) - table
        self.tables = torch.cat([first_2D, table])
        self.device = q_BTHK.device
        self.of_document = upload(self.tables.int(), self.device)
        whole_rows = cu_seqlens is None
        self.window = stock.Lines(self.tokens, self.ends(self.tokens), self.cfg.window, whole_rows)
        some = [count for count in self.lines if count]
        self.compressed = stock.Lines(some, self.ends(some), None, whole_rows)

    def ends(self, counts: list[int]) -> Tensor:
        ends = list(itertools.accumulate(counts, initial=0))
        return upload(torch.tensor(ends, dtype=torch.int32), self.device)

    def query_tiles(self) -> Tensor:
        """int32 [tiles, 4] as load_tile reads them: a tile lies inside one document."""
        size = self.rows // self.MP
        start_D, first_D, tokens_D, _ = self.tables
        document, x, _ = cut_documents(self.tokens, size)
        tiles = [start_D[document], x, tokens_D[document], first_D[document]]
        return upload(torch.stack(tiles, 1).int(), self.device)

    def places(self) -> tuple[Tensor, Tensor]:
        """(token of each place, place of each token): token t of a document is at its place
        t - l + 1. -1 where there is none.
        """
        start_D, first_D, tokens_D, lines_D = self.of_document
        stride = self.cfg.cmp_stride
        first_D = first_D * stride
        count_D = lines_D * stride
        shift_D = first_D - start_D - (self.cfg.cmp_block - 1)

        number = {"output_size": sum(self.lines) * stride}
        token_P = count_to(number["output_size"], self.device)
        token_P = token_P - shift_D.repeat_interleave(count_D, **number)
        end_P = (start_D + tokens_D).repeat_interleave(count_D, **number)
        number = {"output_size": self.Z}
        place_Z = count_to(self.Z, self.device) + shift_D.repeat_interleave(tokens_D, **number)
        low_Z = first_D.repeat_interleave(tokens_D, **number)
        return (
            token_P.masked_fill_(token_P >= end_P, -1),
            place_Z.masked_fill_(place_Z < low_Z, -1),
        )

    def groups(self, numbers: int) -> Iterator["HeadGroup"]:
        """KV heads whose queries have at most so many numbers, or one."""
        at_once = max(1, numbers // (self.Z * self.M * self.K))
        for start in range(0, self.G, at_once):
            yield HeadGroup(start, min(start + at_once, self.G), self.M)

    def fold(self, x_ZhK: Tensor, token_P: Tensor) -> Tensor:
        """[lines, E, K] of some heads."""
        stride = self.cfg.cmp_stride
        heads = x_ZhK.shape[1]
        out = x_ZhK.new_empty(len(token_P) // stride, heads * stride, self.K)
        self.move(x_ZhK, out, token_P, x_ZhK, True)
        return out

    def unfold(self, x_CEK: Tensor, place_Z: Tensor, out_ZhK: Tensor) -> Tensor:
        """Fills `out` of some heads; 0 for tokens that see no compressed block."""
        self.move(x_CEK, out_ZhK, place_Z, out_ZhK, False)
        return out_ZhK

    def move(
        self,
        x: Tensor,
        out: Tensor,
        index: Tensor,
        unfolded_ZhK: Tensor,
        fold: bool,
    ) -> None:
        rows = out.numel() // self.K
        launch(
            move_kernel,
            (ceil_div(rows, ROWS),),
            x_ptr=x,
            out_ptr=out,
            index_ptr=index,
            rows=rows,
            heads=unfolded_ZhK.stride(0) // self.K,
            G=unfolded_ZhK.shape[1] // self.M,
            STRIDE=self.cfg.cmp_stride,
            M=self.M,
            K=self.K,
            R=ROWS,
            FOLD=fold,
        )


class HeadGroup(NamedTuple):
    """KV heads that are computed at a time, [start, stop), each with its M query heads."""

    start: int
    stop: int
    M: int

    @property
    def kv_heads(self) -> int:
        return self.stop - self.start

    def queries(self, x_BTH: Tensor) -> Tensor:
        """[Z, heads of the group, ...], a view."""
        return x_BTH.flatten(0, 1)[:, self.start * self.M : self.stop * self.M]

    def keys(self, x_BSG: Tensor) -> Tensor:
        """[B*S, KV heads of the group, ...], a view."""
        return x_BSG.flatten(0, 1)[:, self.start : self.stop]

    def folded(self, x_EC: Tensor, stride: int) -> Tensor:
        """The rows of the group in a tensor with those of all folded heads, a view."""
        return x_EC[self.start * self.M * stride : self.stop * self.M * stride]


# ---- forward


def compressed_forward(
    call: Call,
    q: Tensor,
    kv: BranchKV,
    o_cmp: Tensor,
    lse_cmp: Tensor,
) -> None:
    """Fills o_cmp and lse_cmp."""
    token_P, place_Z = call.places()
    for group in call.groups(FORWARD_NUMBERS):
        q_CEK = call.fold(group.queries(q), token_P)
        keys = group.keys(kv.k_cmp), group.keys(kv.v_cmp)
        o_CEK, lse_EC = stock.attend(call.compressed, q_CEK, *keys)
        group.folded(lse_cmp, call.cfg.cmp_stride).copy_(lse_EC)
        call.unfold(o_CEK, place_Z, group.queries(o_cmp))
        del q_CEK, o_CEK  # before those of the next group exist


def choose(
    call: Call,
    q: Tensor,
    k_cmp: Tensor,
    lse_cmp: Tensor,
    block_idx: Tensor,
    scratch: Tensor,
) -> None:
    """Fills block_idx from the log-sum-exps of the compressed branch.

    The importance of blocks goes through `scratch`, as many KV heads and tiles of queries at a time
    as it holds.
    """
    cfg = call.cfg
    tiles = call.query_tiles()
    queries = call.rows // call.MP
    columns = ceil_div(ceil_div(max(call.tokens), cfg.sel_block), 16) * 16
    importance = scratch.view(torch.float32)
    if len(importance) < columns * queries:
        importance = importance.new_empty(columns * queries)
    most = len(importance) // (columns * queries)
    heads = min(call.G, max(1, most // len(tiles)))
    width = triton.next_power_of_2(columns)
    at_once = min(queries, max(1, CHOICE_NUMBERS // width))
    for start in range(0, call.G, heads):
        group = HeadGroup(start, min(start + heads, call.G), call.M)
        for some in tiles.split(most):
            shared = {
                "importance_ptr": importance,
                "tile_ptr": some,
                "columns": columns,
                "G": call.G,
                "BLOCK": cfg.sel_block,
                "COUNT": cfg.sel_count,
                "INIT": cfg.sel_init,
                "LOCAL": cfg.sel_local,
            }
            if cfg.free > 0:
                launch(
                    importance_kernel,
                    (len(some), group.kv_heads),
                    q_ptr=group.queries(q),
                    k_ptr=group.keys(k_cmp),
                    lse_ptr=group.folded(lse_cmp, cfg.cmp_stride),
                    scale2=call.K**-0.5 * blocks.LOG2E,
                    H=call.H,
                    N=lse_cmp.shape[1],
                    M=call.M,
                    K=call.K,
                    R=call.rows,
                    JB=call.tile.blocks,
                    STRIDE=cfg.cmp_stride,
                    SPAN=cfg.cmp_block,
                    WEIGHTS=stride_weights(cfg),
                    **shared,
                )
            launch(
                choose_kernel,
                (len(some) * (queries // at_once), group.kv_heads),
                idx_ptr=group.keys(block_idx),
                PARTS=queries // at_once,
                Q=at_once,
                JP=width,
                **shared,
            )


def forward(
    q: Tensor,
    kv: BranchKV,
    gates: Tensor,
    cu_seqlens: Tensor | None,
    cfg: Sizes,
    outputs: Outputs,
) -> None:
    """Fills the outputs. ValueError if the kernels do not run on the tensors."""
    require(q, kv.k_slc, cfg.sel_block)
    call = Call(q, kv.k_cmp, cu_seqlens, cfg)
    q = q.contiguous()
    gates = gates.contiguous()
    kv = kv.contiguous()
    block_idx = outputs.block_idx
    o = outputs.o

    # Triton launches on the current device, which may differ from the tensors'; no effect on a CPU.
    with torch.cuda.device_of(q):
        compressed_forward(call, q, kv, outputs.o_cmp, outputs.lse_cmp)
        choose(call, q, kv.k_cmp, outputs.lse_cmp, block_idx, o.flatten())
        selected = q, kv.k_slc, kv.v_slc, block_idx, cu_seqlens, cfg.sel_block
        blocks.forward(*selected, into=(outputs.o_slc, outputs.lse_slc))
        for group in call.groups(FORWARD_NUMBERS):
            keys = group.keys(kv.k_win), group.keys(kv.v_win)
            o_win, _ = stock.attend(call.window, group.queries(q), *keys)
            launch(
                combine_kernel,
                (ceil_div(o_win.shape[0] * o_win.shape[1], ROWS),),
                o_ptr=group.queries(o),
                cmp_ptr=group.queries(outputs.o_cmp),
                slc_ptr=group.queries(outputs.o_slc),
                win_ptr=o_win,
                gate_ptr=group.queries(gates),
                rows=o_win.shape[0] * o_win.shape[1],
                H=call.H,
                heads=o_win.shape[1],
                K=call.K,
                R=ROWS,
            )


# ---- backward


def gated(do_ZhK: Tensor, gate_Zh: Tensor) -> Tensor:
    """do times the gate of a branch, contiguous and in the dtype of do."""
    out = do_ZhK.new_empty(do_ZhK.shape)
    return torch.mul(do_ZhK, gate_Zh.unsqueeze(-1), out=out)


class Gradients(NamedTuple):
    """What the backward fills."""

    dq: Tensor
    dkv: BranchKV
    dgates: Tensor  # fp32: do . o of each branch


def group_backward(
    call: Call,
    group: HeadGroup,
    places: tuple[Tensor, Tensor],
    do: Tensor,
    q: Tensor,
    kv: BranchKV,
    gates: Tensor,
    saved: Outputs,
    cu_seqlens: Tensor | None,
    grads: Gradients,
) -> None:
    """Fills the gradients of a group, but for the gates of the branches that are saved."""
    q_ZhK = group.queries(q)
    do_ZhK = group.queries(do)
    gate_cmp, gate_slc, gate_win = group.queries(gates).unbind(2)
    _, dgate_slc, dgate_win = group.queries(grads.dgates).unbind(2)
    kv = BranchKV(*(group.keys(x) for x in kv))
    dkv = BranchKV(*(group.keys(x) for x in grads.dkv))

    selected = gated(do_ZhK, gate_slc), q_ZhK, kv.k_slc, kv.v_slc, group.keys(saved.block_idx)
    of_rows = group.queries(saved.lse_slc), dgate_slc * gate_slc
    rows = (do.shape[0], -1)  # of the batch
    dq, dk, dv = blocks.backward(
        *(x.unflatten(0, rows) for x in (*selected, *of_rows)),
        cu_seqlens,
        call.cfg.sel_block,
    )
    del selected
    dkv.k_slc.copy_(dk.flatten(0, 1))
    dkv.v_slc.copy_(dv.flatten(0, 1))
    dq = dq.flatten(0, 1).float()

    # The forward does not save o_win, which would cost 1 GiB: it is computed again.
    o_win, lse_win = stock.attend(call.window, q_ZhK, kv.k_win, kv.v_win)
    dgate_win.copy_(blocks.row_products(do_ZhK.contiguous(), o_win))
    window = gated(do_ZhK, gate_win), q_ZhK, kv.k_win, kv.v_win, o_win, lse_win
    dq_win, dk, dv = stock.attend_backward(call.window, *window)
    del window, o_win
    dkv.k_win.copy_(dk)
    dkv.v_win.copy_(dv)
    dq += dq_win
    del dq_win

    token_P, place_Z = places
    do_CEK = call.fold(gated(do_ZhK, gate_cmp), token_P)
    q_CEK = call.fold(q_ZhK, token_P)
    o_CEK = call.fold(group.queries(saved.o_cmp), token_P)
    lse_EC = group.folded(saved.lse_cmp, call.cfg.cmp_stride)
    compressed = do_CEK, q_CEK, kv.k_cmp, kv.v_cmp, o_CEK, lse_EC
    dq_CEK, dk, dv = stock.attend_backward(call.compressed, *compressed)
    dkv.k_cmp.copy_(dk)
    dkv.v_cmp.copy_(dv)
    dq += call.unfold(dq_CEK, place_Z, q_ZhK.new_empty(q_ZhK.shape))
    group.queries(grads.dq).copy_(dq)


def backward(
    do: Tensor,
    q: Tensor,
    kv: BranchKV,
    gates: Tensor,
    saved: Outputs,
    cu_seqlens: Tensor | None,
    cfg: Sizes,
) -> tuple[Tensor, ...]:
    """Gradients of q, the six K/V and the gates; `saved` has all outputs but o."""
    call = Call(q, kv.k_cmp, cu_seqlens, cfg)
    do = do.contiguous()
    q = q.contiguous()
    kv = kv.contiguous()
    dgates = q.new_empty(gates.shape, dtype=torch.float32)
    grads = Gradients(torch.empty_like(q), BranchKV(*map(torch.empty_like, kv)), dgates)
    with torch.cuda.device_of(q):
        for branch, o in enumerate((saved.o_cmp, saved.o_slc)):
            dgates[..., branch] = blocks.row_products(do, o)
        places = call.places()
        for group in call.groups(BACKWARD_NUMBERS):
            given = do, q, kv, gates, saved, cu_seqlens, grads
            group_backward(call, group, places, *given)
    return grads.dq, *grads.dkv, dgates.to(gates.dtype)
