"""From live bytes to cards: what a device must hold for a step, and which cards hold it.

Sizes are bytes unless a name says GiB; GiB = 2^30 bytes.
"""

import difflib
import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from footprint.cards.allocator import GIB, MIB, OutOfMemory, Replay, replay, replays_of
from footprint.python.refusal import Refused
from footprint.record.trace import Event, Storage, Trace

# Declared, not simulated. The context is about what an idle process holds on sm80 and sm90; NCCL:
# buffers and channels of one communicator over NVLink.
CUDA_CONTEXT = GIB // 2
NCCL = GIB
# cuBLAS has one workspace for each thread that multiplies, from the allocator: eight parts of 4 MiB
# on Hopper, else two and eight of 16 KiB (aten/src/ATen/cuda/CublasHandlePool.cpp).
CUBLAS = "cuBLAS"
HOPPER = 90
CUBLAS_OF_HOPPER = 32 * MIB
CUBLAS_OF_OTHERS = 8 * MIB + 128 * 1024
PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.", "aten.addbmm.")
PRODUCTS += (
    "aten._addmm_activation.",
    "aten.mv.",
    "aten.addmv.",
    "aten.dot.",
    "aten.vdot.",
    "aten._scaled_mm.",
)

# Nominal memory of a card: GiB that torch sees
SIZES = {
    "8 GB": 7.8,
    "12 GB": 11.8,
    "16 GB": 15.7,
    "24 GB": 23.5,
    "40 GB": 39.4,
    "48 GB": 47.4,
    "80 GB": 79.1,
    "96 GB": 94.9,
    "141 GB": 139.8,
    "192 GB": 178.3,
}
# A GPU: GiB that torch sees (nominal memory less the driver's part), compute capability x 10, dense
# peak in bf16 (before capability 8.0 in fp16) with fp32 sums in FLOP/s, by the vendors' data sheets
CARDS = {
    "RTX 3060": (11.8, 86, 25.5e12),
    "RTX 3060 Ti": (7.8, 86, 32.4e12),
    "RTX 3070": (7.8, 86, 40.6e12),
    "RTX 3080": (9.8, 86, 59.5e12),
    "RTX 3090": (23.7, 86, 71e12),
    "RTX 4060 Ti 16GB": (15.7, 89, 44.1e12),
    "RTX 4070": (11.7, 89, 58.3e12),
    "RTX 4080": (15.7, 89, 97.5e12),
    "RTX 4090": (23.6, 89, 165.2e12),
    "RTX 5090": (31.4, 120, 209.5e12),
    "RTX A6000": (47.4, 86, 154.8e12),
    "Tesla T4": (14.6, 75, 65e12),
    "Tesla V100 16GB": (15.8, 70, 125e12),
    "Tesla V100 32GB": (31.7, 70, 125e12),
    "L4": (22.0, 89, 121e12),
    "A10": (22.0, 86, 125e12),
    "L40S": (44.4, 89, 362e12),
    "A100 40GB": (39.4, 80, 312e12),
    "A100 80GB": (79.1, 80, 312e12),
    "H100": (79.1, 90, 989e12),
    "H100 PCIe": (79.1, 90, 756e12),
    "H200": (139.8, 90, 989e12),
    "B200": (178.3, 100, 2250e12),
}
DEFAULT = "H100"  # the card of the target "cuda"
SIZE = re.compile(r" \d+GB$")  # in the name of a card
NO_OTHER = "(?! (Ti|SUPER|Laptop))"  # behind the name of a card, which would be another one's
# From this capability on, the card itself computes in bf16 (and FlashAttention runs).
HALF_SINCE = 80
TOTALS = ("live", "reserved", "device")  # rows of a waterfall


class Placement(enum.StrEnum):
    """Whether a device holds a step, and with which segments of the caching allocator."""

    FITS = "fits"
    EXPANDABLE = "fits with expandable segments"
    TOO_SMALL = "too small"


# ---- what a device holds


def beyond_the_allocator(ranks: int = 1) -> dict[str, int]:
    """Bytes on the device that PyTorch's allocator does not know of."""
    found = {"CUDA context": CUDA_CONTEXT}
    if ranks > 1:
        found["NCCL"] = NCCL
    return found


def multiplying_threads(trace: Trace) -> set[str]:
    """The threads of a step that multiply matrices: the program's, and that of autograd."""
    found = set()
    for storage in trace.storages.values():
        if storage.op.startswith(PRODUCTS):
            is_autograd = storage.stage.endswith(("backward", "recompute"))
            found.add("autograd" if is_autograd else "program")
    return found


def cublas_size(capability: int) -> int:
    """Bytes of the workspace of one thread."""
    return CUBLAS_OF_HOPPER if capability == HOPPER else CUBLAS_OF_OTHERS


def with_cublas(trace: Trace, threads: set[str], capability: int = HOPPER) -> Trace:
    """The trace with a workspace of cuBLAS for each thread, which the first step has made."""
    if any(storage.op == CUBLAS for storage in trace.storages.values()):
        return trace
    size = cublas_size(capability)
    first = max(trace.storages, default=-1) + 1
    held = {}
    for identity, thread in enumerate(sorted(threads), first):
        held[identity] = Storage(
            id=identity,
            size=size,
            category="workspace",
            stage="start",
            module=f"thread of the {thread}",
            shape=(size,),
            dtype="uint8",
            op=CUBLAS,
        )
    before = [event for event in trace.events if not event.time]
    made = [Event(0, size, identity) for identity in held]
    events = before + made + trace.events[len(before) :]
    return replace(trace, events=events, storages=trace.storages | held)


def waterfall(found: Replay, ranks: int = 1) -> dict[str, int]:
    """What -> bytes, from live to device.

    The rows named in TOTALS are totals; each other row leads from one total to the next.
    """
    beyond = beyond_the_allocator(ranks)
    return {
        "live": found.peak_live,
        "rounding to blocks": found.peak_allocated - found.peak_live,
        "reserved, not in use": found.peak_reserved - found.peak_allocated,
        "reserved": found.peak_reserved,
        **beyond,
        "device": found.peak_reserved + sum(beyond.values()),
    }


@dataclass(frozen=True)
class Demand:
    """A step's trace and what the caching allocator reserves for it."""

    trace: Trace
    ranks: int
    classic: Replay
    expandable: Replay

    @classmethod
    def of(cls, trace: Trace, ranks: int = 1) -> "Demand":
        trace = with_cublas(trace, multiplying_threads(trace))
        return cls(trace, ranks, *replays_of(trace))

    @property
    def least_bytes(self) -> int:
        """What the device must hold at least, with the kind of segments that reserves less."""
        reserved = min(self.classic.peak_reserved, self.expandable.peak_reserved)
        return reserved + sum(beyond_the_allocator(self.ranks).values())

    @cached_property
    def cards(self) -> dict[str, Placement]:
        """Whether each size of card holds the step."""
        return placements(self.placement)

    def cards_text(self) -> str:
        """The sizes of cards, by whether they hold the step."""
        return cards_text(self.cards)

    def placement(self, device_bytes: int) -> Placement:
        """Whether a device of that size holds the step."""
        beyond = sum(beyond_the_allocator(self.ranks).values())
        if self.classic.peak_reserved + beyond <= device_bytes:
            return Placement.FITS
        if self.classic.peak_live + beyond > device_bytes:
            return Placement.TOO_SMALL
        if runs_within(self.trace, device_bytes, self.ranks):
            return Placement.FITS
        if self.expandable.peak_reserved + beyond <= device_bytes:
            return Placement.EXPANDABLE
        return Placement.TOO_SMALL


def placements(placement: Callable[[int], Placement]) -> dict[str, Placement]:
    """What a function of bytes says of each size of card."""
    return {card: placement(int(gib * GIB)) for card, gib in SIZES.items()}


def cards_text(cards: Mapping[str, Placement]) -> str:
    """Sizes of cards in words, by whether they hold something."""
    groups: dict[str, list[str]] = {}
    for card, placement in cards.items():
        groups.setdefault(placement, []).append(card)
    words = [f"{', '.join(names)} {placement}" for placement, names in groups.items()]
    return "; ".join(words)


def runs_within(trace: Trace, device_bytes: int, ranks: int = 1) -> bool:
    """Whether classic segments hold the step on a device of that size.

    The allocator gives back free segments before it fails, so that less than `peak_reserved` may
    be enough.
    """
    capacity = device_bytes - sum(beyond_the_allocator(ranks).values())
    if capacity <= 0:
        return False
    try:
        return replay(trace, capacity=capacity).peak_reserved <= capacity
    except OutOfMemory:
        return False


# ---- cards


@dataclass(frozen=True)
class Card:
    """A GPU; `gib` as torch sees it, `cc` its compute capability x 10."""

    name: str
    gib: float
    cc: int
    peak_flops: float | None = None  # dense, in half precision


def card(gpu: str = "", vram: float = 0.0, cc: int = 0) -> Card:
    """A card by its name, or one with `vram` GiB; `cc` replaces its compute capability.

    ValueError for both or neither, for an unknown name (it lists the known ones), and for a size or
    a capability that is out of range.
    """
    if bool(gpu) == bool(vram):
        raise ValueError("--gpu NAME or --vram GIB sets the card: give one of them")
    if vram and not 0 < vram < 1e6:
        raise ValueError(f"--vram {vram} is out of range: give GiB above 0")
    if cc and not 35 <= cc <= 200:
        raise ValueError(
            f"--cc {cc} is out of range: give the compute capability times ten, such as 86"
        )
    if vram:
        return Card(f"{vram:g} GiB card", vram, cc or HALF_SINCE)
    name = _known_name(gpu)
    gib, capability, peak_flops = CARDS[name]
    return Card(name, gib, cc or capability, peak_flops)


def installed_card(device: torch.device) -> Card | None:
    """The GPU of this machine, by what PyTorch calls it; None for a CPU and for an unknown one."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    called = torch.cuda.get_device_name(device)
    found = [name for name in CARDS if re.search(rf"\bG?{SIZE.sub('', name)}\b{NO_OTHER}", called)]
    if not found:
        return None
    # an A100 of 80 GB is no A100 40GB, and an H100 PCIe no H100
    return card(max(found, key=lambda name: (name.split()[-1] in called, len(name))))


def target_card(target: str | Card) -> Card | None:
    """The GPU of a target, "cuda" (an H100), the name of one or a card; None for "cpu". Refused for
    any other.
    """
    if isinstance(target, Card):
        return target
    if target == "cpu":
        return None
    try:
        return card(DEFAULT if target == "cuda" else target)
    except ValueError:
        raise Refused(
            f"target {target!r} is unknown: choose one of cpu, cuda (an {DEFAULT}), "
            f"{', '.join(CARDS)}"
        ) from None


def _known_name(gpu: str) -> str:
    """The key of CARDS that `gpu` spells; ValueError if there is none."""
    names = {_plain(name): name for name in CARDS}
    plain = _plain(gpu)
    if plain in names:
        return names[plain]

    near = difflib.get_close_matches(plain, names, n=1, cutoff=0.5)
    hint = f"did you mean {names[near[0]]}? " if near else ""
    raise ValueError(
        f"the GPU {gpu!r} is unknown: {hint}choose one of {', '.join(CARDS)}; "
        "profile_memory.py takes others as --vram GIB --cc CAPABILITY"
    )


def _plain(name: str) -> str:
    """The name without its maker, in small letters and digits only."""
    return re.sub(r"nvidia|geforce|tesla|[^a-z0-9]", "", name.lower())
