"""The operators of indexed attention, forward and backward, and what computes them: the Triton
twin, the engine that skips what is not read, or the plain version.

The letters are those of layer.py.
"""

from types import ModuleType

import torch
from torch import Tensor

from base.machine import Device, platform
from longhaul.sparse.indexed import engine, plain
from longhaul.sparse.indexed.plain import IndexedInputs, IndexedOutputs, wide_zeros, with_gradients


@torch.library.custom_op("longhaul::indexed_forward", mutates_args=())
def indexed_forward(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    q_BThE: Tensor,
    k_BNE: Tensor,
    r: int,
    most: int,
    learns: bool,
    kernels: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Indexed attention of the last T of the S tokens of one document in each row.

    The tensors are the fields of IndexedInputs, the results those of IndexedOutputs. `most`: blocks
    that a query reads at most, besides its own. `learns`: whether the indexer's loss is computed.
    `kernels`: as in ModelConfig. Gradients of o are those of q, k and v, and of the loss those of
    the indexer: neither sees the other.
    """
    inputs = IndexedInputs(q_BTHK, k_BSGK, v_BSGK, q_BThE, k_BNE)
    outputs = IndexedOutputs.empty(q_BTHK)
    twin = indexed_core(inputs, kernels)
    forward = plain.forward if twin is None else twin.forward
    forward(inputs, r, most, learns, outputs)
    return tuple(outputs)


def engine_for(dtype: torch.dtype) -> ModuleType | None:
    """The engine, whose time is that of what is read; None for the plain version, which alone
    computes in fp64.
    """
    return None if dtype == torch.float64 else engine


def indexed_core(inputs: IndexedInputs, kernels: str) -> ModuleType | None:
    """What computes indexed attention: with kernels="triton" the Triton twin, with "auto" that one
    for tensors on CUDA if it can run there, and otherwise `engine_for`.
    """
    G = inputs.k_BSGK.shape[2]
    _, _, H, K = inputs.q_BTHK.shape
    _, _, h, E = inputs.q_BThE.shape
    sizes = (H // G, h), (K, E), inputs.q_BTHK.dtype
    if kernels == "triton":
        return triton_indexed_core(*sizes)

    q_BTHK = inputs.q_BTHK
    if kernels == "auto" and platform().device(q_BTHK).type == "cuda":
        at_hand = q_BTHK.device if q_BTHK.is_cuda else None  # the planner's tensors are elsewhere
        if why_no_indexed_triton(*sizes, at_hand) is None:
            return triton_indexed_core(*sizes)
    return engine_for(inputs.q_BTHK.dtype)


def triton_indexed_core(
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    device: Device | None = None,
) -> ModuleType:
    """The Triton twin of indexed attention, for so many query heads per KV head and of the indexer,
    and their dims.

    Raises ValueError if it is absent, or cannot serve the sizes, or cannot run on the device; None
    stands for a GPU that is not at hand.
    """
    remedy = "choose kernels='auto' or 'torch'"
    try:
        from longhaul.sparse.indexed.triton import attention
    except ImportError as error:
        raise ValueError(f"kernels='triton': {error}: pip install triton, or {remedy}") from None

    device = None if device is None else torch.device(device)
    try:
        attention.require(heads, dims, dtype, device)
    except ValueError as error:
        raise ValueError(f"{error}; remedy: {remedy}") from None
    return attention


def why_no_indexed_triton(
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    device: Device | None,
) -> str | None:
    """Why the Triton twin of indexed attention cannot run, or None if it can."""
    try:
        triton_indexed_core(heads, dims, dtype, device)
    except ValueError as error:
        return str(error)
    return None


@torch.library.custom_op("longhaul::indexed_backward", mutates_args=())
def indexed_backward(
    do_BTHK: Tensor | None,
    dkl_BT: Tensor | None,
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    q_BThE: Tensor,
    k_BNE: Tensor,
    o_BTHK: Tensor,
    lse_BTH: Tensor,
    log_sum_BT: Tensor,
    least_BT: Tensor,
    r: int,
    most: int,
    kernels: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the inputs: of q, k and v from `do`, of the indexer's from `dkl`; of no token
    without.

    Scores and probabilities are computed again, chunk by chunk. Sums are fp32 or wider. `r`,
    `most` and `kernels` are those of the forward.
    """
    inputs = IndexedInputs(q_BTHK, k_BSGK, v_BSGK, q_BThE, k_BNE)
    saved = IndexedOutputs(o_BTHK, log_sum_BT, lse_BTH, log_sum_BT, least_BT)  # kl is not read
    of_model, of_indexer = with_gradients(do_BTHK, dkl_BT, inputs)
    q, *keys = of_model
    q_idx, k_idx = of_indexer
    grads = IndexedInputs(
        q.new_zeros(q.shape),
        *map(wide_zeros, keys),
        q_idx.new_zeros(q_idx.shape),
        wide_zeros(k_idx),
    )
    twin = indexed_core(inputs, kernels)
    backward = plain.backward if twin is None else twin.backward
    backward(do_BTHK, dkl_BT, inputs, r, most, saved, grads)
    return tuple(x.to(like.dtype) for x, like in zip(grads, inputs, strict=True))


@indexed_forward.register_fake
def _(q_BTHK, *_):
    return tuple(IndexedOutputs.empty(q_BTHK))


@indexed_backward.register_fake
def _(do_BTHK, dkl_BT, *inputs_and_saved):
    of_model, of_indexer = with_gradients(do_BTHK, dkl_BT, inputs_and_saved[:5])
    return tuple(x.new_empty(x.shape) for x in (*of_model, *of_indexer))


def _save_indexed(ctx, inputs, output):
    *tensors, ctx.r, ctx.most, ctx.learns, ctx.kernels = inputs
    o_BTHK, _kl_BT, *statistics = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*statistics)
    ctx.save_for_backward(*tensors, o_BTHK, *statistics)


def _indexed_gradients(ctx, do_BTHK, dkl_BT, *_):
    if not any(ctx.needs_input_grad[:3]):
        do_BTHK = None
    if not ctx.learns or not any(ctx.needs_input_grad[3:5]):
        dkl_BT = None
    given = do_BTHK, dkl_BT, *ctx.saved_tensors
    grads = indexed_backward(*given, ctx.r, ctx.most, ctx.kernels)
    of_model = grads[:3] if do_BTHK is not None else (None,) * 3
    of_indexer = grads[3:] if dkl_BT is not None else (None,) * 2
    return *of_model, *of_indexer, None, None, None, None


indexed_forward.register_autograd(_indexed_gradients, setup_context=_save_indexed)
