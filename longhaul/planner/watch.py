"""What a run really takes, compared with its plan: peaks by stage while the first steps run, and
the report when memory runs out.

GiB = 2^30 bytes.
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterator

import torch

from base.machine import peak_memory_gib
from longhaul.config import TrainConfig
from longhaul.planner import fit
from longhaul.planner import plan as planner
from longhaul.planner.needs import WARM_UP
from longhaul.planner.stages import StagePeaks
from longhaul.step import TrainState
from model import GIB

# Watched: the first has no optimizer states yet, the second is like all that follow, up to
# the end of an indexer's dense warm-up.
STEPS = 2
# From where on a plan is called wrong, relative. The heap of a CPU's process has holes, and other
# libraries.
SURPRISE = {"cuda": 0.02, "cpu": 0.2}
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB}


class Watch(StagePeaks):
    """Notes this process's peak so far, in GiB, whenever a stage ends."""

    def __init__(self, device: torch.device):
        super().__init__(lambda: peak_memory_gib(device))
        self.peak_stage = self.stage

    def note(self) -> None:
        """Also in which stage the peak was reached."""
        before = max(self.peaks.values(), default=0.0)
        super().note()
        if self.peaks[self.stage] > before:
            self.peak_stage = self.stage

    @contextlib.contextmanager
    def over(self, state: TrainState) -> Iterator[None]:
        """Watch one step of `state`; compiled layers are left alone, since hooks would break their
        graphs.
        """
        if state.step < STEPS and not state.cfg.compile:
            with self.of_step(state):
                yield
        else:
            yield
        self.note()


# ---- planned against measured


def planned_gib(plan: planner.Plan, peak: int) -> float:
    """What the measured figure should be for so many live bytes: on a CPU the whole process, on
    CUDA only the tensors.
    """
    return peak / GIB + (plan.hidden_gib if plan.device.type == "cpu" else 0)


def compared_at(cfg: TrainConfig) -> set[int]:
    """The steps after which the peak is compared: the second of an indexer's dense warm-up, and the
    second of those in which everything learns.
    """
    steps = {cfg.dense_steps + STEPS}
    if cfg.dense_steps >= STEPS:
        steps.add(STEPS)
    return steps


def comparison(plan: planner.Plan, step: int) -> str:
    """Planned against measured peak after so many steps, one line."""
    planned, measured = _sizes(plan, step)
    what = "resident memory" if plan.device.type == "cpu" else "allocated memory"
    difference = 100 * (planned / measured - 1)
    return (
        f"peak of a step: planned {planned:.2f} GiB, measured {measured:.2f} GiB of {what} "
        f"({difference:+.1f}%)"
    )


def warning(plan: planner.Plan, step: int, watch: Watch) -> str | None:
    """What to say if more or less was measured than planned: the stage that has the peak."""
    planned, measured = _sizes(plan, step)
    surprise = measured / planned - 1
    if abs(surprise) <= SURPRISE[plan.device.type]:
        return None
    stage = watch.peak_stage
    return (
        f"warning: a step takes {100 * surprise:+.1f}% of memory against its plan; its peak is in "
        f"{stage}, for which {planned_gib(plan, plan.needs.stages.get(stage, 0)):.2f} GiB were "
        "planned: "
        "`python profile_memory.py --measure` with the same flags compares the tensors"
    )


def _sizes(plan: planner.Plan, step: int) -> tuple[float, float]:
    """(planned, measured) GiB after so many steps."""
    in_warm_up = step <= plan.cfg.dense_steps
    planned = plan.needs.stages[WARM_UP] if in_warm_up else plan.peak
    return planned_gib(plan, planned), peak_memory_gib(plan.device)


# ---- when memory runs out


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: CUDA's caching allocator raises a type of its own, the CPU's
    allocator a RuntimeError with a known sentence.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def failed_bytes(error: BaseException) -> int:
    """Bytes of the allocation that failed; 0 if the message does not say."""
    found = re.search(r"allocate (\d+(?:\.\d+)?) ?(bytes|KiB|MiB|GiB)", str(error))
    if not found:
        return 0
    number, unit = found.groups()
    return int(float(number) * UNITS[unit])


def report(plan: planner.Plan, watch: Watch, error: BaseException) -> str:
    """Where memory ran out, planned against actual by stage, and the smallest change that fits."""
    watch.note()
    size = failed_bytes(error)
    place = f"{watch.stage} of {watch.module}" if watch.module else watch.stage
    rows = [
        f"out of memory in {place}: an allocation of {size / GIB:.3f} GiB failed",
        f"  {'stage':<20}{'planned GiB':>13}{'actual GiB, peak so far':>26}",
        *_stage_rows(plan, watch),
    ]

    available = min(plan.available_gib, plan.needed_gib - max(size, 1) / GIB)
    short = dataclasses.replace(plan, available_gib=available)
    nearest = fit.fitted(short) or fit.closest(short)
    if nearest is None:
        rows.append("nothing of longhaul fits here")
    else:
        words = f"{nearest.needed_gib:.2f} GiB planned, {nearest.costs()}"
        rows.append(f"smallest change that fits ({words}):")
        rows.append(nearest.command())
    return "\n".join(rows)


def _stage_rows(plan: planner.Plan, watch: Watch) -> list[str]:
    without_tensors = planned_gib(plan, 0)  # the process itself, on a CPU
    rows = []
    stages = plan.needs.stages
    for stage in dict.fromkeys([*watch.peaks, *stages]):
        planned = "-"
        if stage in stages:
            planned = f"{stages[stage] / GIB + without_tensors:.2f}"
        actual = f"{watch.peaks[stage]:.2f}" if stage in watch.peaks else "not reached"
        rows.append(f"  {stage:<20}{planned:>13}{actual:>26}")
    return rows
