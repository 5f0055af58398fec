"""Predicted against measured: the same step really runs on this machine, on its CPU under the same
tracker and the allocator's record, or on its GPU.

GiB = 2^30 bytes.
"""

import collections
import time

import torch

from footprint.cards.device import Demand, waterfall
from footprint.kernels.measure import peak_of_last
from footprint.record.trace import Trace
from longhaul import step
from longhaul.config import TrainConfig
from longhaul.planner.batches import row_batch, tensors_of
from longhaul.planner.program import program_of
from longhaul.planner.reserve import expandable_segments
from longhaul.planner.simulate import Profile, trace_real_run
from longhaul.planner.stages import StagePeaks
from model import GIB

CUDA = torch.device("cuda")


# ---- on a CPU


def measure(cfg: TrainConfig) -> dict:
    """Two real steps, twice: peaks by stage as the tracker sees them, and the allocator's own peak;
    bytes.
    """
    trace = trace_real_run(cfg)
    peak, _ = trace.peak()
    return {
        "stages": trace.peak_by_stage(),
        "tensors": _count_storages(trace),
        "peak_live_bytes": peak,
        "allocator_peak_bytes": allocator_peak(cfg),
    }


def allocator_peak(cfg: TrainConfig) -> int:
    """Bytes at the peak of the second of two steps: what the allocator recorded, and the rows,
    which are numpy's.
    """
    program = program_of(cfg, every=True, real=True)

    def first_step() -> step.TrainState:
        state = program.build()
        program.first(state)
        return state

    recorded = peak_of_last(first_step, program.step)
    return recorded + sum(tensor.nbytes for tensor in tensors_of(program.rows))


def _count_storages(trace: Trace) -> dict[str, int]:
    """Number of storages by "stage module shape dtype operator"; inputs are made otherwise in a
    real run.
    """
    names = []
    for storage in trace.storages.values():
        if storage.category == "input":
            continue
        shape = "x".join(map(str, storage.shape))
        names.append(f"{storage.stage} {storage.module} {shape} {storage.dtype} {storage.op}")
    return dict(collections.Counter(names))


# ---- on a GPU


class CudaPeaks(StagePeaks):
    """What the caching allocator itself says that each stage peaked at, bytes.

    It allocates when the host asks, so hooks on the host mark its stages exactly, however far
    behind the device is.
    """

    def __init__(self, device: torch.device):
        super().__init__(self._peak_of_stage)
        self.device = device
        self.reserved = 0

    def _peak_of_stage(self) -> int:
        """The peak since the last call; the next one starts from what is allocated now."""
        self.reserved = max(self.reserved, torch.cuda.max_memory_reserved(self.device))
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak


def measure_cuda(cfg: TrainConfig, snapshot: str = "", device: torch.device = CUDA) -> dict:
    """The second of two real steps on the GPU: the caching allocator's own peaks by stage, bytes,
    and its seconds.

    snapshot: a file to which the allocator's history is written.
    """
    state = step.build(cfg, cfg.model(), device)
    batch = [_on_device(micro, device) for micro in row_batch(cfg)]
    step.train_step(state, batch)
    torch.cuda.synchronize(device)

    if snapshot:
        torch.cuda.memory._record_memory_history()
    torch.cuda.reset_peak_memory_stats(device)
    peaks = CudaPeaks(device)
    began = time.perf_counter()
    with peaks.of_step(state):
        step.train_step(state, batch)
        torch.cuda.synchronize(device)
        seconds = time.perf_counter() - began
        peaks.note()
    if snapshot:
        torch.cuda.memory._dump_snapshot(snapshot)
        torch.cuda.memory._record_memory_history(enabled=None)

    free, total = torch.cuda.mem_get_info(device)
    return {
        "stages": peaks.peaks,
        "allocator_peak_bytes": max(peaks.peaks.values()),
        "reserved_peak_bytes": peaks.reserved,
        "device_bytes": total - free,
        "seconds": seconds,
    }


def _on_device(micro: step.MicroBatch, device: torch.device) -> step.MicroBatch:
    return {name: None if value is None else value.to(device) for name, value in micro.items()}


# ---- side by side


def table(predicted: Profile, measured: dict, demand: Demand | None = None) -> str:
    """Each stage's predicted and measured GiB, the allocator's own peak, and tensors that only one
    side has; with the `demand` of a CUDA run, what is reserved, what the device holds, and the
    seconds of the step.
    """
    rows = [f"{'stage':<20}{'predicted GiB':>15}{'measured GiB':>15}{'difference':>12}"]
    expected = predicted.trace.peak_by_stage()
    found = measured["stages"]
    for stage in dict.fromkeys([*expected, *found]):
        rows.append(_row(stage, expected.get(stage, 0), found.get(stage, 0)))

    peak, _ = predicted.trace.peak()
    rows.append(_row("allocator peak", peak, measured["allocator_peak_bytes"]))
    if demand is None:
        rows += _tensor_rows(predicted.trace, measured["tensors"])
    else:
        allocator = demand.expandable if expandable_segments() else demand.classic
        on_device = waterfall(allocator, demand.ranks)["device"]
        rows.append(_row("reserved peak", allocator.peak_reserved, measured["reserved_peak_bytes"]))
        rows.append(_row("device", on_device, measured["device_bytes"]))
        rows.append(f"the step took {measured['seconds']:.2f} s")
    return "\n".join(rows)


def _row(name: str, predicted: int, measured: int) -> str:
    difference = f"{100 * (predicted / measured - 1):+.3f}%" if measured else "-"
    return f"{name:<20}{predicted / GIB:>15.4f}{measured / GIB:>15.4f}{difference:>12}"


def _tensor_rows(trace: Trace, measured: dict[str, int]) -> list[str]:
    predicted = collections.Counter(_count_storages(trace))
    real = collections.Counter(measured)
    return [
        f"unexplained tensors (measured only): {_most_common(real - predicted)}",
        f"absent tensors (predicted only): {_most_common(predicted - real)}",
    ]


def _most_common(names: collections.Counter) -> str:
    return "; ".join(f"{count} x {name}" for name, count in names.most_common(5)) or "none"
