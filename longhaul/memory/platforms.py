"""The machine that the planner predicts, in place of the one that it runs on.

Code asks `base.machine.platform()` for what depends on the machine. The classes here answer for
the target, while the tensors are fake ones on the CPU or have no values at all. Tiles of a loop are
identical, so only the first two and the last one run.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from base.machine import Platform, running_on
from footprint.attention import Attention
from footprint.cuda import FusedRMSNorm
from footprint.device import target_card
from footprint.patches import Patches, patched
from footprint.tracker import Tracker


def few(tiles: Sequence) -> Sequence:
    """The first two tiles and the last one."""
    if len(tiles) <= 3:
        return tiles
    return [tiles[0], tiles[1], tiles[-1]]


# ---- the training step and the forward pass, on fake tensors


class FakeCpu(Platform):
    """A CPU: the machine's own kernels, over a few tiles of each loop (`every_tile`: over all)."""

    def __init__(self, tracker: Tracker, every_tile: bool = False):
        self.tracker = tracker
        self.every_tile = every_tile

    def tiles(self, tiles: Sequence) -> Sequence:
        return tiles if self.every_tile else few(tiles)


class Hopper(Platform):
    """The GPU that plans are made for, with FlashAttention."""

    def capability(self, device: torch.device) -> tuple[int, int]:
        return 9, 0

    def prefers_cudnn(self, q: Tensor) -> bool:
        return False


class FakeCuda(Hopper, FakeCpu):
    """A CUDA device: its fused kernels, and host memory that is not the device's. PyTorch chooses
    the kernel of attention as footprint says.
    """

    def device(self, x: Tensor) -> torch.device:
        return torch.device("cuda")

    def takes_elementwise(self, x: Tensor, kernels: str) -> bool:
        return kernels in ("auto", "triton")

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return FusedRMSNorm.apply(x, weight)

    def host_memory(self) -> contextlib.AbstractContextManager:
        return self.tracker.on_host()


@contextlib.contextmanager
def predicting(target: str, tracker: Tracker, every_tile: bool = False) -> Iterator[None]:
    """Model code inside the `with` block runs as it would on the target device, "cpu" or "cuda"."""
    kind = FakeCuda if target == "cuda" else FakeCpu
    attention: Patches = {}
    if target == "cuda":
        attention[F, "scaled_dot_product_attention"] = Attention(target_card(target))
    with running_on(kind(tracker, every_tile)), patched(attention):
        yield


# ---- the bodies of our own operators, on meta tensors


class Bodies(Hopper):
    """The inside of one operator on the target device: a few tiles of its largest part."""

    def __init__(self, target: str):
        self.target = target

    def device(self, x: Tensor) -> torch.device:
        return torch.device(self.target)

    def tiles(self, tiles: Sequence) -> Sequence:
        return few(tiles)

    def tile_body(self, function: Callable, kernels: str, fastest: Callable) -> Callable:
        return function if kernels == "torch" else FUSED[function.__name__]

    def mixed_product(self, out: Tensor, a: Tensor, b: Tensor, beta: int) -> None:
        """On CUDA a low-precision product is written in fp32, and allocates nothing."""
        if self.target == "cpu" or out.dtype != torch.float32:
            super().mixed_product(out, a, b, beta)

    def parts(self, parts: list, size: Callable) -> list:
        return [max(parts, key=size)]

    def last(self, parts: list) -> list:
        """The last one may be short; the one before is the largest, and finds the buffers that the
        third has left.
        """
        return parts[-3:]


def _fused(z_NV, target_N, *vectors_N) -> None:
    """The compiled bodies write into their arguments and allocate nothing."""


def _fused_fold(*args: object) -> Tensor:
    """The sums of a tile, which replace those before it."""
    state_SN = args[4]
    return torch.empty_like(state_SN)


FUSED = {
    "fold_logsumexp": _fused,
    "logits_to_gradient": _fused,
    "fold_stats": _fused_fold,
    "stats_gradient": _fused,
}
