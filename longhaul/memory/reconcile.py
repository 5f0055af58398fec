"""Predicted against measured: the same step really run on this machine, on its CPU under the same
tracker and the allocator's record.

Imports longhaul (config, dist, step), longhaul.memory (device, extrapolate, measure, simulate,
stages, trace) and model.py of ours. GiB = 2^30 bytes.
"""

import collections

import torch

from longhaul import step
from longhaul.config import TrainConfig
from longhaul.memory.device import Demand, waterfall
from longhaul.memory.extrapolate import Profile
from longhaul.memory.measure import peak_bytes
from longhaul.memory.simulate import observe, row_batch
from longhaul.memory.stages import Stages
from longhaul.memory.trace import Trace
from model import GIB


def measure(cfg: TrainConfig) -> dict:
    """Two real steps, twice: peaks by stage as the tracker sees them, and the allocator's own peak;
    bytes.
    """
    trace = observe(cfg, lambda: row_batch(cfg))
    return dict(
        stages=trace.peak_by_stage(),
        tensors=_born(trace),
        peak_live_bytes=trace.peak()[0],
        allocator_peak_bytes=allocator_peak(cfg),
    )


def allocator_peak(cfg: TrainConfig) -> int:
    """Bytes at the peak of the second step: what stays between steps, and what the allocator
    recorded on top.
    """
    state, batch = step.build(cfg, cfg.model(), "cpu"), row_batch(cfg)
    step.train_step(state, batch)
    kept = [
        *state.model.parameters(),
        *(v for values in state.optimizer.state.values() for v in values.values()),
    ]
    kept += [value for micro in batch for value in micro.values() if value is not None]
    resident = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept
    }
    return sum(resident.values()) + peak_bytes(
        lambda: step.train_step(state, batch), torch.device("cpu")
    )


class StagePeaks:
    """Stands where stages expect a tracker: what the caching allocator itself says each stage
    peaked at, bytes.

    It allocates when the host asks, so hooks on the host mark its stages exactly, however far
    behind the device is.
    """

    def __init__(self, device: torch.device):
        self.device, self.stage, self.module, self.peaks, self.reserved = device, "start", "", {}, 0

    def enter(self, stage: str, module: str = ""):
        if stage != self.stage:
            self.note()
        self.stage, self.module = stage, module

    def note(self):
        """The running stage has taken this much; the next peak starts from what is allocated now."""
        self.peaks[self.stage] = max(
            self.peaks.get(self.stage, 0), torch.cuda.max_memory_allocated(self.device)
        )
        self.reserved = max(self.reserved, torch.cuda.max_memory_reserved(self.device))
        torch.cuda.reset_peak_memory_stats(self.device)

    def register(self, tensor: torch.Tensor, op: str) -> int:
        """Tensors are not followed here."""
        return 0


def measure_cuda(
    cfg: TrainConfig, snapshot: str = "", device: torch.device = torch.device("cuda")
) -> dict:
    """The second of two real steps on the GPU: the caching allocator's own peaks by stage, bytes;
    its history in `snapshot` where that is named.
    """
    state = step.build(cfg, cfg.model(), device)
    batch = [
        {name: value if value is None else value.to(device) for name, value in micro.items()}
        for micro in row_batch(cfg)
    ]
    step.train_step(state, batch)
    torch.cuda.synchronize(device)
    if snapshot:
        torch.cuda.memory._record_memory_history()
    peaks = StagePeaks(device)
    torch.cuda.reset_peak_memory_stats(device)
    with Stages(peaks, state).installed():
        step.train_step(state, batch)
        torch.cuda.synchronize(device)
        peaks.note()
    if snapshot:
        torch.cuda.memory._dump_snapshot(snapshot)
        torch.cuda.memory._record_memory_history(enabled=None)
    free, total = torch.cuda.mem_get_info(device)
    return dict(
        stages=peaks.peaks,
        allocator_peak_bytes=max(peaks.peaks.values()),
        reserved_peak_bytes=peaks.reserved,
        device_bytes=total - free,
    )


def _born(trace: Trace) -> dict[str, int]:
    """Number of storages by what made them: "stage module shape dtype operator"."""
    names = (
        f"{s.stage} {s.module} {'x'.join(map(str, s.shape))} {s.dtype} {s.op}"
        for s in trace.storages.values()
    )
    return dict(collections.Counter(names))


def table(predicted: Profile, measured: dict, demand: Demand | None = None) -> str:
    """Each stage's predicted and measured GiB, the allocator's word, and tensors that only one side
    has; `demand`: of a CUDA run.
    """
    rows = [f"{'stage':<20}{'predicted GiB':>15}{'measured GiB':>15}{'difference':>12}"]
    ours = predicted.trace.peak_by_stage()
    for stage in dict.fromkeys([*ours, *measured["stages"]]) if measured["stages"] else ():
        a, b = ours.get(stage, 0), measured["stages"].get(stage, 0)
        rows.append(f"{stage:<20}{a / GIB:>15.4f}{b / GIB:>15.4f}{_percent(a, b):>12}")
    a, b = predicted.trace.peak()[0], measured["allocator_peak_bytes"]
    rows.append(f"{'allocator peak':<20}{a / GIB:>15.4f}{b / GIB:>15.4f}{_percent(a, b):>12}")
    if demand is not None:
        both = (
            ("reserved peak", demand.classic.peak_reserved, measured["reserved_peak_bytes"]),
            (
                "device",
                dict(waterfall(demand.classic, demand.ranks))["device"],
                measured["device_bytes"],
            ),
        )
        return "\n".join(
            rows
            + [
                f"{name:<20}{a / GIB:>15.4f}{b / GIB:>15.4f}{_percent(a, b):>12}"
                for name, a, b in both
            ]
        )
    here, there = (
        collections.Counter(_born(predicted.trace)),
        collections.Counter(measured["tensors"]),
    )
    rows += [
        f"unexplained tensors (measured only): {_first(there - here)}",
        f"absent tensors (predicted only): {_first(here - there)}",
    ]
    return "\n".join(rows)


def _percent(a: int, b: int) -> str:
    return f"{100 * (a / b - 1):+.3f}%" if b else "-"


def _first(names: collections.Counter) -> str:
    return "; ".join(f"{count} x {name}" for name, count in names.most_common(5)) or "none"
