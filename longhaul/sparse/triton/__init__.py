"""Kernels for GPUs, in Triton, of attention over chosen blocks and of Native Sparse Attention.

tiles.py           what all kernels share: sizes of tiles, where they run, loads and products
kernels.py         the kernels of attention over chosen blocks
blocks.py          launches them: the twin of longhaul/sparse/engine.py, as custom operators
nsa_kernels.py     the choice of blocks, folding and the sum of the branches
nsa.py             launches them around blocks.py and stock.py: nsa/engine.py's twin
stock.py           PyTorch's attention kernels for the compressed branch and the window
decode_kernels.py  the kernels of one token that is decoded
decode.py          launches them: the twin of the two files decode.py

Nothing here imports Triton before a kernel is asked for.
"""

from torch import Tensor

from base.machine import has_triton


def runs_triton(
    x: Tensor,
    M: int,
    block: int,
    kernels: str,
) -> bool:
    """Whether Triton attends to chosen blocks with heads x [..., K], M query heads per KV head, or
    the operators of PyTorch. `kernels`: as of ModelConfig; "auto" takes Triton for tensors on CUDA,
    if it serves them, "triton" asks for it, and all others do without.
    """
    device = x.device
    if kernels not in ("auto", "triton"):
        return False
    if kernels == "auto" and (device.type != "cuda" or not has_triton()):
        return False
    from longhaul.sparse.triton import tiles

    refusal = tiles.refusal(M, x.shape[-1], x.dtype, block, device)
    if refusal and kernels == "triton":
        raise ValueError(refusal)
    return refusal is None
