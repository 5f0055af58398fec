"""Compression of keys and values (equation 2 of Native Sparse Attention), over the documents of a
batch. Imports torch alone.

Letters: B batch, T tokens, G KV heads, K head dim, N compressed blocks, U units of s tokens. l, s
of the paper: cmp_block,
cmp_stride of `cfg`, an NSAConfig.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsa.platform import platform


class Layout(NamedTuple):
    """Where the documents of a batch and their compressed blocks lie; made on the host, once a
    batch, for all layers.
    """

    cu_seqlens: (
        Tensor | None
    )  # [documents + 1] over the B*T flattened tokens, on the host; None: every row is one document
    rows: slice | Tensor  # [U*s] the tokens of the documents' units of s tokens
    first: Tensor  # [N] the first unit of each compressed block
    centre: Tensor  # [N] the token at each compressed block's centre


def layout(cu_seqlens, shape, cfg, device):
    """The Layout of `shape` = (B, T) tokens; cu_seqlens [documents + 1] over all B*T of them, or
    None for one document a row.
    """
    if cu_seqlens is None or len(cu_seqlens) == shape[0] + 1:
        return Layout(None, *row_layout(shape[1], cfg, device))
    units, parts = 0, []
    for start, end in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:]):
        rows, first, centre = row_layout(end - start, cfg, "cpu")
        parts.append((torch.arange(start, start + rows.stop), first + units, centre + start))
        units += rows.stop // cfg.cmp_stride
    return Layout(cu_seqlens, *(torch.cat(x).to(device, non_blocking=True) for x in zip(*parts)))


def row_layout(tokens, cfg, device):
    """(rows, first, centre) of one document; tokens after its last whole block belong to no unit."""
    N, spread = cfg.compressed_blocks(tokens), cfg.cmp_block // cfg.cmp_stride
    first = torch.arange(N, device=device)
    return (
        slice(0, (N + spread - 1) * cfg.cmp_stride if N else 0),
        first,
        first * cfg.cmp_stride + cfg.cmp_block // 2,
    )


class Compressor(nn.Module):
    """A block of l tokens becomes one key and one value; phi(x) = mean(x) + W2 silu(W1 flatten(x +
    pe)).

    With W2 = 0 it pools: training starts there, and cmp_kind="mean" stays there. The key, taken
    before RoPE, is normed
    again (averaging shrinks it by up to sqrt(l)) and rotated at its block's centre. Shared over KV
    heads. Parameters are
    left unfilled: the model fills them by name."""

    def __init__(self, head_dim, cfg, eps=1e-6):
        super().__init__()
        self.cfg, self.eps = cfg, eps
        self.norm_weight = nn.Parameter(torch.empty(head_dim))
        if cfg.cmp_kind == "mlp":
            for name in "kv":
                self.register_parameter(
                    f"{name}_w1", nn.Parameter(torch.empty(head_dim, cfg.cmp_block * head_dim))
                )
                self.register_parameter(f"{name}_w2", nn.Parameter(torch.empty(head_dim, head_dim)))
            self.pe_lK = nn.Parameter(torch.empty(cfg.cmp_block, head_dim))

    def forward(self, k_BTGK, v_BTGK, rotate, layout):
        """(k_cmp, v_cmp) [B,N,G,K] of keys before RoPE and of values; rotate(k_cmp, centre) turns
        keys as the token `centre` is.
        """
        mlp = self.cfg.cmp_kind == "mlp"
        k = self._phi(
            k_BTGK[:, layout.rows],
            layout.first,
            *((self.k_w1, self.k_w2, self.pe_lK) if mlp else ()),
        )
        v = self._phi(
            v_BTGK[:, layout.rows], layout.first, *((self.v_w1, self.v_w2) if mlp else ())
        )
        norm = platform().rms_norm
        k = norm(k.float(), self.norm_weight.float(), self.eps).to(k.dtype)
        return rotate(k, layout.centre), v

    def _phi(self, x_BTGK, first_N, w1=None, w2=None, pe_lK=None):
        """l/s products over units of s tokens, each shifted by one unit and added: overlapping
        blocks are not copied.
        """
        s, spread = self.cfg.cmp_stride, self.cfg.cmp_block // self.cfg.cmp_stride
        x_BUGK = x_BTGK.unflatten(1, (x_BTGK.shape[1] // s, s)).transpose(2, 3)
        total = x_BUGK.float().sum(3)  # fp32: l terms
        mean = (sum(total[:, first_N + i] for i in range(spread)) / self.cfg.cmp_block).to(
            x_BTGK.dtype
        )
        if w1 is None:
            return mean
        w1, w2, flat = w1.to(x_BTGK.dtype), w2.to(x_BTGK.dtype), x_BUGK.flatten(3)
        hidden = sum((flat @ part.T)[:, first_N + i] for i, part in enumerate(w1.chunk(spread, 1)))
        if pe_lK is not None:
            hidden = hidden + w1 @ pe_lK.to(x_BTGK.dtype).flatten()
        return mean + F.silu(hidden) @ w2.T
