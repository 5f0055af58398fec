"""What Native Sparse Attention adds to a layer of grouped-query attention: gates, compression, K/V
of its own.

Imports torch, and nsa.compress, nsa.decode and nsa.engine of ours; nsa/triton/attention.py lazily.

The model projects, norms and rotates q, k and v; this module makes of them the inputs of
`nsa_attention` and calls it.
Letters: B batch, T tokens, H query heads, G KV heads, K head dim, D model width.
"""

import torch
import torch.nn.functional as F
from torch import nn

from nsa.compress import Compressor
from nsa.decode import nsa_decode
from nsa.engine import nsa_attention


class _Linear(nn.Linear):
    """y = x W^T + b in the dtype of x; the model fills the parameters by name."""

    def reset_parameters(self):
        pass

    def forward(self, x):
        return F.linear(
            x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype)
        )


class SparseBranches(nn.Module):
    """o = sum over the branches compressed, selected, window of sigmoid(W_g x + b_g) * o_branch
    (arXiv 2502.11089).

    kv="shared": one K/V serves all branches, as many parameters as standard attention beside gates
    and compression.
    kv="separate": the model's own K/V serve the selected branch, `kv_proj` makes those of the other
    two.
    """

    def __init__(self, config, norm, rotate):
        super().__init__()
        self.cfg, self.rotate, self.heads = config.nsa, rotate, (-1, config.head_dim)
        self.core = choose_core(config)
        self.gate = _Linear(config.hidden_size, 3 * config.num_heads)
        self.compressor = Compressor(config.head_dim, config.nsa, config.norm_eps)
        self.kv_proj = None
        if self.cfg.kv == "separate":
            self.kv_proj = _Linear(
                config.hidden_size, 4 * config.num_kv_heads * config.head_dim, bias=False
            )
            self.cmp_norm, self.win_norm = (
                norm(config.head_dim, config.norm_eps) for _ in range(2)
            )

    def forward(self, x_BTD, q_BTHK, raw_BTGK, k_BTGK, v_BTGK, rope, layout=None, cache=None):
        """o [B,T,H,K]. raw: keys before RoPE; rope: (cos, sin) of the tokens; layout: their
        documents; cache: an NSAState.
        """
        gates_BTH3 = self.gate(x_BTD).sigmoid().unflatten(-1, (-1, 3))
        branches = (
            (raw_BTGK, v_BTGK, k_BTGK, v_BTGK) if self.kv_proj is None else self._own(x_BTD, rope)
        )
        if cache is not None:
            return self._continue(q_BTHK, k_BTGK, v_BTGK, branches, gates_BTH3, rope, cache)
        attend = self.attend if layout.cu_seqlens is None else self.packed
        return attend(q_BTHK, k_BTGK, v_BTGK, *branches, gates_BTH3, *rope, layout)

    def _own(self, x_BTD, rope):
        """Raw keys and values of the compressed branch, keys and values of the window."""
        k_cmp, v_cmp, k_win, v_win = (
            x.unflatten(-1, self.heads) for x in self.kv_proj(x_BTD).chunk(4, -1)
        )
        return self.cmp_norm(k_cmp), v_cmp, self.rotate(self.win_norm(k_win), *rope), v_win

    def attend(self, q, k, v, raw, v_raw, k_win, v_win, gates, cos, sin, layout):
        """All branches over whole documents."""

        def rotate(k_cmp, centre):
            return self.rotate(k_cmp, cos[:, centre], sin[:, centre])

        k_cmp, v_cmp = self.compressor(raw, v_raw, rotate, layout)
        return self.core(q, k, v, k_cmp, v_cmp, k_win, v_win, gates, self.cfg, layout.cu_seqlens)

    def packed(self, q, *inputs):
        """The same over the B*T flattened tokens of rows that hold several documents."""
        *tensors, layout = inputs
        flat = [x.expand(len(q), *x.shape[1:]).flatten(0, 1)[None] for x in (q, *tensors)]
        return self.attend(*flat, layout).view_as(q)

    def _continue(self, q_BTHK, k_BTGK, v_BTGK, branches, gates_BTH3, rope, state):
        """Attention of T tokens that follow what the state holds: a whole prompt at once, anything
        else token by token.
        """
        state.require(*q_BTHK.shape[:2])
        if state.length and q_BTHK.shape[1] > 1:
            tokens = zip(
                *(x.split(1, 1) for x in (q_BTHK, k_BTGK, v_BTGK, *branches, gates_BTH3, *rope))
            )
            return torch.cat(
                [
                    self._continue(q, k, v, own, gates, (cos, sin), state)
                    for q, k, v, *own, gates, cos, sin in tokens
                ],
                1,
            )
        raw, v_raw, k_win, v_win = branches
        prompt, own_window = (
            state.length == 0,
            (None, None) if self.kv_proj is None else (k_win, v_win),
        )
        state.remember(*rope)
        state.append(
            raw,
            v_raw,
            k_BTGK,
            v_BTGK,
            *own_window,
            self.compressor,
            lambda k_cmp, _: self.rotate(k_cmp, *state.turns[:, :, : k_cmp.shape[1]]),
        )
        if prompt:
            return self.core(
                q_BTHK, k_BTGK, v_BTGK, *state.compressed(), k_win, v_win, gates_BTH3, self.cfg
            )
        return nsa_decode(q_BTHK, gates_BTH3, state)


def choose_core(config):
    """nsa_attention of the engine, or its Triton twin where it is asked for; ValueError where that
    cannot serve the sizes.
    """
    if config.dtype == torch.float64:
        raise ValueError(
            "compute_dtype='float64' with attention_type='nsa': the branches run in float32, bfloat16 or float16"
        )
    if config.kernels != "triton":
        return nsa_attention
    try:
        from nsa.triton import attention as twin  # the one lazy edge
    except ImportError as error:
        raise ValueError(
            f"kernels='triton': {error}: pip install triton, or choose kernels='auto' or 'torch'"
        ) from None
    twin.require_sizes(
        config.num_heads // config.num_kv_heads, config.head_dim, config.dtype.itemsize, config.nsa
    )
    return twin.nsa_attention
