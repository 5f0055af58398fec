"""FlexAttention on a GPU, which keeps its result and one number for each row of scores, and no
scores. Its kernel exists only where it is compiled.

Letters: `B` batch, `H` query heads, `T` tokens, `K` head dim.
"""

from types import SimpleNamespace

import torch
from torch import Tensor

from footprint.pretend.places import StepTracker
from footprint.python.late import Awaited
from footprint.python.refusal import place


class KeepsNoScores(torch.autograd.Function):
    """What the kernels allocate: the result and the sums of rows in fp32, which are kept with the
    inputs; in the backward one fp32 number for each row, and the gradients.

    torch/_higher_order_ops/flex_attention.py and torch/_inductor/kernel/flex.
    """

    @staticmethod
    def forward(ctx, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor) -> tuple[Tensor, Tensor]:
        B, H, T, _ = q_BHTK.shape
        o_BHTK = torch.empty_like(q_BHTK[..., :1].expand(B, H, T, v_BGSK.shape[-1]))
        lse_BHT = q_BHTK.new_empty((B, H, T), dtype=torch.float32)
        ctx.save_for_backward(q_BHTK, k_BGSK, v_BGSK, o_BHTK, lse_BHT)
        return o_BHTK, lse_BHT

    @staticmethod
    def backward(ctx, grad_BHTK: Tensor, _):
        *inputs, _, lse_BHT = ctx.saved_tensors
        delta_BHT = torch.empty_like(lse_BHT)  # as long as the kernel runs
        grads = tuple(map(torch.empty_like, inputs))
        del delta_BHT
        return grads


def flexible_attention(tracker: StepTracker) -> Awaited:
    """FlexAttention runs as if it were compiled, and the report says so."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod=None,
        block_mask=None,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        kernel_options=None,
        return_aux=None,
    ):
        tracker.known.suppose(f"FlexAttention in {place()} keeps no scores, as its kernel does")
        result, sums = KeepsNoScores.apply(query, key, value)
        if return_aux is not None:
            return result, SimpleNamespace(lse=sums, max_scores=sums)
        return (result, sums) if return_lse else result

    name = "torch.nn.attention.flex_attention"
    return {name: lambda module: {(module, "flex_attention"): attention}}
