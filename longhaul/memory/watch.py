"""What a run really takes, beside its plan: peaks by stage while the first steps run, and the
report when memory runs out.

GiB = 2^30 bytes. Imports longhaul.run.log, longhaul.memory (estimate, plan, stages) and model.py of
ours.
"""

import contextlib
import dataclasses
import re

import torch

from longhaul.memory import fit
from longhaul.memory import plan as planner
from longhaul.memory.stages import Stages
from longhaul.run.log import peak_memory_gib
from model import GIB

STEPS = 2  # watched: the first has no optimizer states yet, the second is like all that follow


class Watch:
    """Stands where stages expect a tracker: notes, whenever a stage ends, this process's peak so
    far.
    """

    def __init__(self, device: torch.device):
        self.device, self.stage, self.module, self.peaks = device, "start", "", {}

    def enter(self, stage: str, module: str = ""):
        if stage != self.stage:
            self.note()
        self.stage, self.module = stage, module

    def note(self):
        """The stage that is running has taken this much by now, GiB."""
        self.peaks[self.stage] = peak_memory_gib(self.device)

    def register(self, tensor: torch.Tensor, op: str) -> int:
        """Tensors are not followed here."""
        return 0

    @contextlib.contextmanager
    def over(self, state):
        """Watch one step of `state` (TrainState); compiled layers are left alone, since hooks would
        break their graphs.
        """
        watched = state.step < STEPS and not state.cfg.compile
        with Stages(self, state).installed() if watched else contextlib.nullcontext():
            yield
        self.note()


def planned_gib(plan: planner.Plan) -> float:
    """What the measured figure should be: on a CPU the whole process, on CUDA the tensors alone."""
    return plan.needed_gib if plan.device.type == "cpu" else plan.estimate.peak / GIB


def comparison(plan: planner.Plan) -> str:
    """Planned against measured peak, one line."""
    measured, what = (
        peak_memory_gib(plan.device),
        "resident memory" if plan.device.type == "cpu" else "allocated memory",
    )
    return f"peak of a step: planned {planned_gib(plan):.2f} GiB, measured {measured:.2f} GiB of {what} ({100 * (planned_gib(plan) / measured - 1):+.1f}%)"


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: CUDA's caching allocator has a type of its own, the CPU's a
    sentence.
    """
    return (
        isinstance(error, torch.OutOfMemoryError)
        or isinstance(error, RuntimeError)
        and "can't allocate memory" in str(error)
    )


def failed_bytes(error: BaseException) -> int:
    """Bytes of the allocation that failed, 0 where the message does not say."""
    found = re.search(r"allocate (\d+(?:\.\d+)?) ?(bytes|KiB|MiB|GiB)", str(error))
    return (
        int(float(found[1]) * dict(bytes=1, KiB=2**10, MiB=2**20, GiB=GIB)[found[2]])
        if found
        else 0
    )


def report(plan: planner.Plan, watch: Watch, error: BaseException) -> str:
    """Where memory ran out, planned against actual by stage, and the smallest change that fits."""
    watch.note()
    hidden = planned_gib(plan) - plan.estimate.peak / GIB
    size = failed_bytes(error)
    rows = [
        f"out of memory in {watch.stage}{f' of {watch.module}' if watch.module else ''}: an allocation of {size / GIB:.3f} GiB failed",
        f"  {'stage':<20}{'planned GiB':>13}{'actual GiB, peak so far':>26}",
    ]
    for stage in dict.fromkeys([*watch.peaks, *plan.estimate.stages]):
        planned = (
            f"{plan.estimate.stages[stage] / GIB + hidden:>13.2f}"
            if stage in plan.estimate.stages
            else f"{'-':>13}"
        )
        actual = f"{watch.peaks[stage]:>26.2f}" if stage in watch.peaks else f"{'not reached':>26}"
        rows.append(f"  {stage:<20}{planned}{actual}")
    short = dataclasses.replace(
        plan, available_gib=min(plan.available_gib, plan.needed_gib - max(size, 1) / GIB)
    )
    nearest = fit.fitted(short).plan or fit.closest(short)
    return "\n".join(
        [
            *rows,
            "nothing of longhaul fits here"
            if nearest is None
            else f"smallest change that fits ({nearest.needed_gib:.2f} GiB planned):\n{planner.command(nearest.asked, plan.world)}",
        ]
    )
