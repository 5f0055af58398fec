"""What is known of a step's memory: as numbers, as tables, as JSON and as a page. Sizes are bytes;
GiB = 2^30 bytes.
"""

from dataclasses import dataclass, field
from functools import cached_property

import torch

from footprint.answers.page import page, write
from footprint.answers.picture import picture
from footprint.answers.snapshot import write_snapshot
from footprint.answers.tables import device_rows, heading, stage_rows, tensor_rows, waterfalls
from footprint.cards.allocator import GIB, STEP, Replay, of_step, replays_of
from footprint.cards.device import (
    Card,
    Demand,
    Placement,
    cards_text,
    multiplying_threads,
    placements,
    with_cublas,
)
from footprint.pretend.cuda import not_modelled as left_out
from footprint.pretend.places import StepTracker
from footprint.record.timeline import Sizes, alike, stages_at_peak
from footprint.record.trace import Trace

LISTED = 40  # groups of tensors in `largest`
SHOWN = 12  # of them in the table


@dataclass
class Report:
    """The memory of one rank's training step, the second one, which is like all that follow."""

    trace: Trace
    target: str  # "cpu" or "cuda"
    world_size: int
    first_peak: int  # most bytes alive while the model is built and the first step runs
    not_modelled: list[str] = field(default_factory=list)  # what the prediction leaves out
    assumed: list[str] = field(default_factory=list)  # what it takes for granted about values
    card: str = ""  # the GPU whose workspaces are counted

    @classmethod
    def of(cls, tracker: StepTracker, card: Card | None, world_size: int) -> "Report":
        trace = of_step(tracker.trace)
        target = tracker.target
        if card:
            threads = tracker.multiplied | multiplying_threads(trace)
            trace = with_cublas(trace, threads, card.cc)
        missing = tracker.workspace.not_modelled()
        missing += left_out(trace, tracker, world_size)
        assumed = list(tracker.known.assumed)
        name = card.name if card else ""
        return cls(trace, target, world_size, tracker.first_peak, missing, assumed, name)

    @cached_property
    def peak(self) -> int:
        """Most bytes alive during the step, workspaces of operators included."""
        return self.trace.peak()[0]

    @cached_property
    def allocated(self) -> int:
        """The peak in whole blocks of CUDA's allocator, which torch.cuda.max_memory_allocated()
        counts. Where no segment is left to cut a block from, it may be up to 1 MiB larger.
        """
        return max((size for _, size in self.trace.levels(STEP)), default=0)

    @cached_property
    def peak_stage(self) -> str:
        """The stage in which the peak lies, such as "layers.* backward"."""
        return self.trace.stage_at(self.trace.peak()[1])

    @cached_property
    def by_stage(self) -> dict[str, int]:
        """Most bytes alive within each stage, in the order in which stages first start."""
        return {stage: sum(sizes.values()) for stage, sizes in self.stages.items()}

    @cached_property
    def stages(self) -> dict[str, Sizes]:
        """Stage -> category -> bytes, at the stage's largest moment."""
        return stages_at_peak(self.trace)

    @cached_property
    def largest(self) -> list[dict]:
        """The largest tensors alive at the peak; those that differ only by the number of their
        layer are one entry with a "count".
        """
        return alike(self.trace.at(self.trace.peak()[1]), LISTED)

    @cached_property
    def demand(self) -> Demand | None:
        """What the step asks of a GPU; None for a CPU, which has no caching allocator."""
        return Demand.of(self.trace, self.world_size) if self.target == "cuda" else None

    @property
    def host_peak(self) -> int:
        """Most bytes that the step keeps in host memory, as far as PyTorch makes them: what it
        moves there, and what it has not moved to the device.
        """
        return self.trace.host_peak

    @property
    def reserved(self) -> int | None:
        """Most bytes that the CUDA caching allocator reserves, with classic segments; None for a
        CPU.
        """
        return self.demand.classic.peak_reserved if self.demand else None

    def placement(self, device_bytes: int) -> Placement:
        """Whether a GPU of that size holds the step."""
        return self.demand.placement(device_bytes)

    @cached_property
    def cards(self) -> dict[str, Placement]:
        """Whether each size of card holds the step."""
        return placements(self.placement)

    # ---- to read

    def __str__(self) -> str:
        device = f"a GPU (CUDA, {self.card})" if self.demand else "a CPU"
        rows = [f"{heading(device, self.world_size, self.not_modelled)}; live GiB"]
        rows += stage_rows(self.stages, self.peak_stage)
        rows += ["", *tensor_rows(self.largest[:SHOWN]), ""]
        if self.demand:
            rows += device_rows(self.demand)
            rows.append(f"cards: {cards_text(self.cards)}")
        else:
            rows.append(f"live peak {self.peak / GIB:.3f} GiB")
        if self.host_peak:
            rows.append(f"host memory: at most {self.host_peak / GIB:.3f} GiB")
        if self.not_modelled:
            rows.append(f"not in the prediction: {'; '.join(self.not_modelled)}")
        if self.assumed:
            rows.append(f"assumed: {'; '.join(self.assumed)}")
        return "\n".join(rows)

    def json(self) -> dict:
        """Everything as plain values, which `json.dump` writes."""
        found = {
            "peak_live_bytes": self.peak,
            "peak_stage": self.peak_stage,
            "first_step_peak_bytes": self.first_peak,
            "categories": self.stages[self.peak_stage],
            "stages": self.by_stage,
            "top_tensors": [group | {"shape": list(group["shape"])} for group in self.largest],
            "host_peak_bytes": self.host_peak,
            "target": self.target,
            "ranks": self.world_size,
            "torch": torch.__version__,
            "not_modelled": self.not_modelled,
            "assumed": self.assumed,
        }
        if self.demand is None:
            return found
        return found | {
            "card": self.card,
            "peak_allocated_bytes": self.allocated,
            "peak_reserved_bytes": self.demand.classic.peak_reserved,
            "peak_reserved_expandable_bytes": self.demand.expandable.peak_reserved,
            "waterfall": waterfalls(self.demand),
            "cards": dict(self.cards),
        }

    def html(self, path: str, title: str = "Memory of a training step") -> None:
        """Write the step's timeline and tables as one HTML page; to a file that ends in .svg the
        timeline alone, in .pickle what CUDA's allocator would record. ValueError if the file cannot
        be written.
        """
        if path.endswith(".svg"):
            self.svg(path)
            return
        if path.endswith(".pickle"):
            self.snapshot(path)
            return
        write(path, page(self.trace, title, str(self), self._replays))

    def svg(self, path: str) -> None:
        """Write the timeline alone, as a picture; ValueError if the file cannot be written."""
        write(path, picture(self.trace, self._replays))

    @property
    def _replays(self) -> tuple[Replay, Replay]:
        if self.demand:
            return self.demand.classic, self.demand.expandable
        return replays_of(self.trace)

    def snapshot(self, path: str) -> None:
        """Write what torch.cuda.memory._dump_snapshot would of such a step, for PyTorch's viewer
        (docs.pytorch.org/memory_viz); ValueError if the file cannot be written.
        """
        write_snapshot(path, self.trace)
