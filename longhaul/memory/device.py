"""From live bytes to a verdict: live -> reserved by the allocator -> on the device, and which cards
hold that.

Sizes are bytes; GiB = 2^30 bytes. Imports longhaul.memory (allocator, trace) of ours.
"""

import difflib
import re
from dataclasses import dataclass

from longhaul.memory.allocator import GIB, MIB, OutOfMemory, Replay, replay
from longhaul.memory.trace import Trace

# declared: driver and kernels, about what an idle process holds on sm80 and sm90
CUDA_CONTEXT = GIB // 2
CUBLAS_WORKSPACES = 2 * 32 * MIB  # declared: cuBLAS and cuBLASLt on sm90
NCCL = GIB  # declared: buffers and channels of one communicator over NVLink
SIZES = {
    "24 GB": 23.5,
    "40 GB": 39.4,
    "48 GB": 47.4,
    "80 GB": 79.1,
    "96 GB": 94.9,
    "141 GB": 139.8,
    "192 GB": 178.3,
}  # GiB that torch sees there
CARDS = {  # GiB that torch sees (nominal memory less the driver's part), compute capability x 10
    "RTX 3060": (11.8, 86),
    "RTX 3060 Ti": (7.8, 86),
    "RTX 3070": (7.8, 86),
    "RTX 3080": (9.8, 86),
    "RTX 3090": (23.7, 86),
    "RTX 4060 Ti 16GB": (15.7, 89),
    "RTX 4070": (11.7, 89),
    "RTX 4080": (15.7, 89),
    "RTX 4090": (23.6, 89),
    "RTX 5090": (31.4, 120),
    "RTX A6000": (47.4, 86),
    "Tesla T4": (14.6, 75),
    "Tesla V100 16GB": (15.8, 70),
    "Tesla V100 32GB": (31.7, 70),
    "L4": (22.0, 89),
    "A10": (22.0, 86),
    "L40S": (44.4, 89),
    "A100 40GB": (39.4, 80),
    "A100 80GB": (79.1, 80),
    "H100": (79.1, 90),
    "H200": (139.8, 90),
    "B200": (178.3, 100),
}
HALF_SINCE = 80  # capability from which bf16 (and FlashAttention) run on the card itself
FITS, EXPANDABLE, TOO_SMALL = "fits", "fits with expandable segments", "too small"


def beyond_the_allocator(ranks: int = 1) -> dict[str, int]:
    """Bytes on the device that no tensor shows. cuBLAS takes its workspaces from the same segments;
    they stand apart to be seen.
    """
    return {"CUDA context": CUDA_CONTEXT, "cuBLAS workspaces": CUBLAS_WORKSPACES} | (
        {"NCCL": NCCL} if ranks > 1 else {}
    )


def waterfall(found: Replay, ranks: int = 1) -> list[tuple[str, int]]:
    """(what, bytes) from live to device; "live", "reserved" and "device" are sums of what stands
    before them.
    """
    rows = [
        ("live", found.peak_live),
        ("rounding to blocks", found.peak_allocated - found.peak_live),
        ("reserved, not in use", found.peak_reserved - found.peak_allocated),
        ("reserved", found.peak_reserved),
    ]
    beyond = beyond_the_allocator(ranks)
    return [*rows, *beyond.items(), ("device", found.peak_reserved + sum(beyond.values()))]


def replays(trace: Trace) -> tuple[Replay, Replay]:
    """What classic and expandable segments reserve for the trace."""
    return replay(trace), replay(trace, expandable=True)


@dataclass(frozen=True)
class Demand:
    """A step and what its allocator makes of it."""

    trace: Trace
    ranks: int
    classic: Replay
    expandable: Replay

    @classmethod
    def of(cls, trace: Trace, ranks: int = 1) -> "Demand":
        return cls(trace, ranks, *replays(trace))

    @property
    def least_bytes(self) -> int:
        """What the device must hold at least: with expandable segments, or classic ones where those
        are smaller.
        """
        return min(self.classic.peak_reserved, self.expandable.peak_reserved) + sum(
            beyond_the_allocator(self.ranks).values()
        )

    def verdict(self, device_bytes: int) -> str:
        """FITS (classic segments do), EXPANDABLE (only those) or TOO_SMALL."""
        beyond = sum(beyond_the_allocator(self.ranks).values())
        if self.classic.peak_reserved + beyond <= device_bytes:
            return FITS
        if self.classic.peak_live + beyond > device_bytes:
            return TOO_SMALL
        if runs_within(self.trace, device_bytes, self.ranks):
            return FITS
        return EXPANDABLE if self.expandable.peak_reserved + beyond <= device_bytes else TOO_SMALL


def runs_within(trace: Trace, device_bytes: int, ranks: int = 1) -> bool:
    """Whether the step runs on a device of that size with classic segments, which give back what is
    free when they must.
    """
    capacity = device_bytes - sum(beyond_the_allocator(ranks).values())
    try:
        return capacity > 0 and replay(trace, capacity=capacity).peak_reserved <= capacity
    except OutOfMemory:
        return False


# ---- cards


@dataclass(frozen=True)
class Card:
    """A GPU; `gib` as torch sees it, `cc` its compute capability x 10."""

    name: str
    gib: float
    cc: int


def card(gpu: str = "", vram: float = 0.0, cc: int = 0) -> Card:
    """From a name or from GiB; ValueError for an unknown name (lists the known ones), for both or
    neither, for sizes that are none.
    """
    if bool(gpu) == bool(vram):
        raise ValueError("--gpu and --vram: give one of them, a card's name or its GiB")
    if vram and not 0 < vram < 1e6:
        raise ValueError(f"--vram {vram} is out of range: give GiB above 0")
    if cc and not 35 <= cc <= 200:
        raise ValueError(
            f"--cc {cc} is out of range: give the compute capability times ten, such as 86"
        )
    if vram:
        return Card(f"{vram:g} GiB card", vram, cc or HALF_SINCE)
    names = {_plain(name): name for name in CARDS}
    if _plain(gpu) not in names:
        near = difflib.get_close_matches(_plain(gpu), names, n=1, cutoff=0.5)
        hint = f"did you mean {names[near[0]]}? " if near else ""
        raise ValueError(
            f"--gpu {gpu!r} is unknown: {hint}known are {', '.join(CARDS)}; or give --vram GIB --cc CAPABILITY"
        )
    name = names[_plain(gpu)]
    return Card(name, CARDS[name][0], cc or CARDS[name][1])


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|tesla|[^a-z0-9]", "", name.lower())
