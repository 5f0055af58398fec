"""Decoding one token by Triton kernels: the twin of longhaul/sparse/decode.py and nsa/decode.py.

Every block of keys that the token reads is a tile of a program of its own, whatever it belongs to:
chosen blocks, compressed keys, or the window. Their results merge by log-sum-exp, those of the
branches of Native Sparse Attention with their gates. The position is read on the device, so that a
CUDA graph can repeat the step.

A layer of Native Sparse Attention has 8 launches for a token, or 9 with keys of its own for the
window: it stores three pairs of tensors, attends to the compressed keys, chooses blocks, attends to
them and to the window, and merges. A selector's layer has 4 after its scores.

Letters: B rows, G KV heads, X = B*G, M query heads of each, K head dim, S stored keys, N compressed
ones or blocks, n chosen blocks.
"""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from longhaul.sparse.nsa.branches import Sizes
from longhaul.sparse.triton.blocks import LOG2E
from longhaul.sparse.triton.decode_kernels import (
    choose_blocks_kernel,
    merge_parts_kernel,
    put_kernel,
    tile_kernel,
)
from longhaul.sparse.triton.tiles import ceil_div, launch

COMPRESSED_KEYS = 64  # of a tile
NO_WINDOW = 2**40
TOKENS = {"STRIDE": 1, "SPAN": 1}


def put(rings: Sequence[Tensor], pair: Sequence[Tensor], position_1: Tensor) -> None:
    """Stores a pair [B, 1, ...] of the token in rings [B, size, ...] at position modulo size."""
    rows, size = rings[0].shape[:2]
    a, b = (x.expand(rows, *x.shape[1:]).contiguous() for x in pair)
    numbers = a[0].numel()
    launch(
        put_kernel,
        (rows, ceil_div(numbers, 256)),
        a_ptr=a,
        b_ptr=b,
        ring_a_ptr=rings[0],
        ring_b_ptr=rings[1],
        position_ptr=position_1,
        size=size,
        numbers=numbers,
    )


class Token:
    """A token's queries, and the parts of its attention."""

    def __init__(
        self,
        q_BGMK: Tensor,
        position_1: Tensor,
        parts: int,
    ):
        B, self.G, M, K = q_BGMK.shape
        self.X = B * self.G
        self.q_BGMK = q_BGMK.contiguous()
        self.position_1 = position_1
        self.parts = {
            "part_o_ptr": q_BGMK.new_empty((self.X, parts, M, K), dtype=torch.float32),
            "part_lse_ptr": q_BGMK.new_empty((self.X, parts, M), dtype=torch.float32),
            "parts": parts,
            "M": M,
            "K": K,
        }

    def attend(
        self,
        kv_BSGK: Sequence[Tensor],
        first: int,
        tiles: int,
        size: int,
        chosen_Xn: Tensor | None = None,
        logits_XMS: Tensor | None = None,
        window: int = NO_WINDOW,
        spans: dict[str, int] = TOKENS,
    ) -> None:
        """Fills parts from the first one on: of so many blocks of `size` keys, those that are
        chosen, or those of the window. `spans`: tokens of a key, and to the next one's.
        """
        k, v = kv_BSGK
        launch(
            tile_kernel,
            (self.X, tiles),
            q_ptr=self.q_BGMK,
            k_ptr=k,
            v_ptr=v,
            chosen_ptr=chosen_Xn,
            position_ptr=self.position_1,
            logits_ptr=logits_XMS,
            G=self.G,
            keys=k.shape[1],
            first=first,
            scale2=k.shape[-1] ** -0.5 * LOG2E,
            SIZE=size,
            WINDOW=window,
            **spans,
            **self.parts,
        )

    def choose(
        self,
        scores: Tensor,
        blocks: int,
        sizes,
        tiles: int = 0,
        spans: dict[str, int] = TOKENS,
    ) -> Tensor:
        """int32 [X, n] by scores [X, blocks], or by logits of compressed keys of so many tiles."""
        chosen_Xn = scores.new_empty((self.X, sizes.count), dtype=torch.int32)
        launch(
            choose_blocks_kernel,
            (self.X,),
            num_warps=8,
            scores_ptr=scores,
            part_lse_ptr=self.parts["part_lse_ptr"] if tiles else None,
            chosen_ptr=chosen_Xn,
            position_ptr=self.position_1,
            columns=scores.shape[-1],
            parts=self.parts["parts"],
            tiles=tiles,
            M=self.parts["M"],
            TP=triton.next_power_of_2(tiles),
            JP=triton.next_power_of_2(blocks),
            BLOCK=sizes.block,
            COUNT=sizes.count,
            INIT=sizes.init,
            LOCAL=sizes.local,
            **spans,
        )
        return chosen_Xn

    def merge(
        self,
        gates: Tensor | None = None,
        end_0: int = 0,
        end_1: int = 0,
    ) -> Tensor:
        """o_BGMK of all parts, or of three branches, of which the first two end there."""
        o_BGMK = torch.empty_like(self.q_BGMK)
        launch(
            merge_parts_kernel,
            (self.X * self.parts["M"],),
            gate_ptr=gates,
            o_ptr=o_BGMK,
            end_0=end_0,
            end_1=end_1,
            **self.parts,
        )
        return o_BGMK


def attend_chosen(
    q_BGMK: Tensor,
    kv_BSGK: Sequence[Tensor],
    scores_XN: Tensor,
    position_1: Tensor,
    sizes,
) -> Tensor:
    """o_BGMK over the blocks that are chosen by their scores."""
    token = Token(q_BGMK, position_1, sizes.count)
    chosen_Xn = token.choose(scores_XN.contiguous(), scores_XN.shape[1], sizes)
    token.attend(kv_BSGK, 0, sizes.count, sizes.block, chosen_Xn)
    return token.merge()


def attend_nsa(
    q_BGMK: Tensor,
    gates: Tensor,
    position_1: Tensor,
    kv: Sequence[Sequence[Tensor] | None],
    sizes: Sizes,
) -> Tensor:
    """o_BGMK of Native Sparse Attention. kv: (k, v) [B, S, G, K] of all tokens, of the compressed
    blocks, and of the window if it has keys of its own, a ring.
    """
    kv_BSGK, cmp_BNGK, win_BwGK = kv
    B, G, M, _ = q_BGMK.shape
    N = cmp_BNGK[0].shape[1]
    block = sizes.block
    compressed = ceil_div(N, COMPRESSED_KEYS)
    selected = compressed + sizes.count
    last = ceil_div(sizes.window, block) + 1
    spans = {"STRIDE": sizes.cmp_stride, "SPAN": sizes.cmp_block}
    token = Token(q_BGMK, position_1, selected + last)

    logits_XMN = q_BGMK.new_empty((B * G, M, N), dtype=torch.float32)
    token.attend(cmp_BNGK, 0, compressed, COMPRESSED_KEYS, logits_XMS=logits_XMN, spans=spans)
    blocks = ceil_div(kv_BSGK[0].shape[1], block)
    chosen_Xn = token.choose(logits_XMN, blocks, sizes, compressed, spans)
    token.attend(kv_BSGK, compressed, sizes.count, block, chosen_Xn)
    if win_BwGK is None:
        token.attend(kv_BSGK, selected, last, block, window=sizes.window)
    else:  # a ring holds nothing else
        token.attend(win_BwGK, selected, last, block)
    return token.merge(gates.contiguous(), compressed, selected)
