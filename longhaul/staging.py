"""From a GPU to the host and back, slab by slab through pinned memory.

A copy to or from pageable memory stops the host until the device has done all that is queued. Here
the host waits only for the slab that it needs, while the next one is under way.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

SLAB = 2**24  # elements that are worked on at once: 64 MiB in fp32
PINNED = 2 * 4 * SLAB  # bytes of the two slabs that are pinned


def slabs(x: Tensor) -> list[slice]:
    """Ranges of the first dimension with at most SLAB elements each."""
    length = max(1, SLAB // max(1, x[:1].numel()))
    return [slice(start, min(start + length, len(x))) for start in range(0, len(x), length)]


class Staging:
    """Two pinned slabs of host memory, made when the first tensor of a GPU comes.

    Tensors of the host pass through as they are.
    """

    def __init__(self):
        self.pinned: list[Tensor] = []
        self.current = 0

    def slabs_on_host(self, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """(slab, its elements in host memory), which are valid until the next one is asked for."""
        if not self.is_far(x):
            for slab in slabs(x):
                yield slab, x[slab]
            return

        parts = slabs(x)
        if not parts:  # a shard without rows
            return
        coming = self._begin(x[parts[0]], 0)
        for index, slab in enumerate(parts):
            here, complete = coming
            if index + 1 < len(parts):
                coming = self._begin(x[parts[index + 1]], (index + 1) % 2)
            complete.synchronize()
            self.current = index % 2
            yield slab, here

    def give_back(self, target: Tensor, source: Tensor) -> None:
        """Copy `source` of the host, as large as the slab at hand, to the target in its dtype.

        It takes the place of that slab; the stream keeps the order of all copies.
        """
        if not self.is_far(target):
            target.copy_(source)
            return
        here = self._slot(self.current, target)
        here.copy_(source)
        target.copy_(here, non_blocking=True)

    def on_host(self, x: Tensor) -> Tensor:
        """A copy in pageable memory, which is not scarce."""
        copy = torch.empty(x.shape, dtype=x.dtype, device="cpu")
        for slab, here in self.slabs_on_host(x):
            copy[slab].copy_(here)
        return copy

    def _begin(self, slab: Tensor, index: int) -> tuple[Tensor, torch.cuda.Event]:
        """A slab's place on the host, and when it will be complete."""
        here = self._slot(index, slab)
        here.copy_(slab, non_blocking=True)
        return here, self.mark(slab.device)

    def _slot(self, index: int, like: Tensor) -> Tensor:
        """Pinned memory for a tensor like `like`."""
        size = max(like.nbytes, SLAB * 4)
        if len(self.pinned) <= index:
            self.pinned.append(self.memory(size))
        if self.pinned[index].numel() < size:  # one row is larger than a slab
            self.pinned[index] = self.memory(size)
        return self.pinned[index][: like.nbytes].view(like.dtype).view(like.shape)

    # ---- the device

    def is_far(self, x: Tensor) -> bool:
        """Whether the host cannot read x."""
        return x.device.type == "cuda"

    def mark(self, device: torch.device) -> torch.cuda.Event:
        """The end of what is queued on the device now."""
        return torch.cuda.current_stream(device).record_event()

    def memory(self, size: int) -> Tensor:
        """`size` bytes of pinned memory."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
