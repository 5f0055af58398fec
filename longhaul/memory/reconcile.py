"""Predicted against measured: the same step really run on this machine's CPU, under the same tracker and under the allocator's record.

Imports longhaul (config, dist, step), longhaul.memory (extrapolate, measure, simulate, trace) and model.py of ours. GiB = 2^30 bytes.
"""

import collections

import torch

from longhaul import step
from longhaul.config import TrainConfig
from longhaul.memory.extrapolate import Profile
from longhaul.memory.measure import peak_bytes
from longhaul.memory.simulate import observe, row_batch
from longhaul.memory.trace import Trace
from model import GIB


def measure(cfg: TrainConfig) -> dict:
    """Two real steps, twice: peaks by stage as the tracker sees them, and the allocator's own peak; bytes."""
    trace = observe(cfg, lambda: row_batch(cfg))
    return dict(stages=trace.peak_by_stage(), tensors=_born(trace), peak_live_bytes=trace.peak()[0], allocator_peak_bytes=allocator_peak(cfg))


def allocator_peak(cfg: TrainConfig) -> int:
    """Bytes at the peak of the second step: what stays between steps, and what the allocator recorded on top."""
    state, batch = step.build(cfg, cfg.model(), "cpu"), row_batch(cfg)
    step.train_step(state, batch)
    kept = [*state.model.parameters(), *(v for values in state.optimizer.state.values() for v in values.values())]
    kept += [value for micro in batch for value in micro.values() if value is not None]
    resident = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    return sum(resident.values()) + peak_bytes(lambda: step.train_step(state, batch), torch.device("cpu"))


def _born(trace: Trace) -> dict[str, int]:
    """Number of storages by what made them: "stage module shape dtype operator"."""
    names = (f"{s.stage} {s.module} {'x'.join(map(str, s.shape))} {s.dtype} {s.op}" for s in trace.storages.values())
    return dict(collections.Counter(names))


def table(predicted: Profile, measured: dict) -> str:
    """Each stage's predicted and measured GiB, the allocator's word, and tensors that only one side has."""
    rows = [f"{'stage':<20}{'predicted GiB':>15}{'measured GiB':>15}{'difference':>12}"]
    ours = predicted.trace.peak_by_stage()
    for stage in ours.keys() | measured["stages"].keys():
        a, b = ours.get(stage, 0), measured["stages"].get(stage, 0)
        rows.append(f"{stage:<20}{a / GIB:>15.4f}{b / GIB:>15.4f}{_percent(a, b):>12}")
    a, b = predicted.trace.peak()[0], measured["allocator_peak_bytes"]
    rows.append(f"{'allocator peak':<20}{a / GIB:>15.4f}{b / GIB:>15.4f}{_percent(a, b):>12}")
    here, there = collections.Counter(_born(predicted.trace)), collections.Counter(measured["tensors"])
    rows += [f"unexplained tensors (measured only): {_first(there - here)}", f"absent tensors (predicted only): {_first(here - there)}"]
    return "\n".join(rows)


def _percent(a: int, b: int) -> str:
    return f"{100 * (a / b - 1):+.3f}%" if b else "-"


def _first(names: collections.Counter) -> str:
    return "; ".join(f"{count} x {name}" for name, count in names.most_common(5)) or "none"
