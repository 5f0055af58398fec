"""Kernels for GPUs, in Triton, of attention over chosen blocks and of Native Sparse Attention.

tiles.py        what all kernels share: sizes of tiles, where they run, loads and products
kernels.py      the kernels of attention over chosen blocks
blocks.py       launches them: the twin of longhaul/sparse/engine.py, as custom operators
nsa_kernels.py  the choice of blocks, folding and the sum of the branches
nsa.py          launches them around blocks.py and stock.py: nsa/engine.py's twin
stock.py        PyTorch's attention kernels for the compressed branch and the window

Nothing here imports Triton before a kernel is asked for.
"""

from types import ModuleType

from torch import Tensor

from base.machine import has_triton, platform


def kernels_for(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    block: int,
    kernels: str,
) -> ModuleType | None:
    """The module whose functions attend to chosen blocks of these tensors in Triton; None if the
    operators of PyTorch do. `kernels`: as of ModelConfig; "auto" takes Triton for tensors on CUDA,
    if it serves them, "triton" asks for it, and all others do without.
    """
    device = platform().device(q_BTHK)
    if kernels not in ("auto", "triton"):
        return None
    if kernels == "auto" and (device.type != "cuda" or not has_triton()):
        return None
    from longhaul.sparse.triton import blocks, tiles

    M = q_BTHK.shape[2] // k_BSGK.shape[2]
    refusal = tiles.refusal(M, q_BTHK.shape[3], q_BTHK.dtype, block, device)
    if refusal and kernels == "triton":
        raise ValueError(refusal)
    return None if refusal else blocks
