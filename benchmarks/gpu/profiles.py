"""Where the time of a training step goes, kernel by kernel: torch.profiler over one forward and
backward of sparse attention, and over one step of one layer of the 4B.

The job's folder has the whole table; the results have its first lines.
"""

import functools
from collections.abc import Callable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks import clock
from benchmarks.gpu import attention, smoke
from benchmarks.gpu.jobs import Job, Place
from benchmarks.gpu.step import batch
from benchmarks.record import Run, Table, replace_text
from longhaul import step

TOKENS = 131_072
TOY_TOKENS = 256
ROWS = 20  # of a profile, in the results
LINES = 80  # in the job's folder
KINDS = ((7.1, "nsa", 25), (9.6, "standard", 25))  # importance, attention, s
TABLE = Table(
    "profile",
    "Kernel by kernel: time on the device in one call, and on the host to issue all of it",
    {
        "call": "text",
        "kernel": "text",
        "launches": "count",
        "time, ms": "ms",
        "of the call": "share",
        "host, ms": "ms",
    },
)


def jobs(place: Place) -> list[Job]:
    """After the figures that they explain."""
    tokens = TOY_TOKENS if place.toy else TOKENS
    found = [
        Job(
            f"profile, attention, nsa, forward+backward, {tokens:,} tokens",
            7,
            25,
            functools.partial(of_attention, place=place, tokens=tokens),
        )
    ]
    for importance, kind, seconds in KINDS[:1] if place.toy else KINDS:
        work = functools.partial(of_step, place=place, kind=kind, tokens=tokens)
        name = f"profile, one layer, {kind}, {tokens:,} tokens"
        found.append(Job(name, importance, seconds, work))
    return found


def of_attention(run: Run, place: Place, tokens: int) -> None:
    """One forward and backward of sparse attention at the model's heads."""
    name = "longhaul, NSA triton" if place.cuda else "longhaul, NSA torch"
    contest = attention.plain(place, tokens)
    attend = contest.ways[name].attend
    tensors = attention.inputs(place, contest, tokens)
    upstream = torch.randn_like(tensors[0])
    call = functools.partial(attention.training, attend, *tensors, upstream)
    rows(run, place, f"{name}, forward+backward, {tokens:,} tokens", call)


def of_step(run: Run, place: Place, kind: str, tokens: int) -> None:
    """One training step of one layer of the 4B; a whole step has 36 times the layer's kernels."""
    cfg = smoke.settings(place, kind, context_length=tokens)
    state = step.build(cfg, cfg.model(), place.device)
    tokens_BT, labels_BT = batch(cfg, place)
    micro_batch = dict(tokens_BT=tokens_BT, labels_BT=labels_BT)
    call = functools.partial(step.train_step, state, [micro_batch])
    rows(run, place, f"step of one layer, {kind}, {tokens:,} tokens", call)


def rows(run: Run, place: Place, name: str, call: Callable[[], object]) -> None:
    """Profile the second call: rows of the kernels that take longest, the whole table as a file."""
    call()
    host = clock.host_milliseconds(call, place.device)
    record = profiled(call, place)
    averages = record.key_averages()
    order = "self_device_time_total" if place.cuda else "self_cpu_time_total"
    table = averages.table(sort_by=order, row_limit=LINES, max_name_column_width=80)
    replace_text(run.folder / "profile.txt", f"{name}\n{table}\n")

    times = {}
    for event in averages:
        if on_device(event, place):
            times[event.key] = (event.count, getattr(event, order) / 1e3)
    total = sum(milliseconds for _, milliseconds in times.values())
    slowest = sorted(times.items(), key=lambda item: -item[1][1])[:ROWS]
    launches = sum(count for count, _ in times.values())
    whole = {"launches": launches, "time, ms": total, "host, ms": host}
    run.row(TABLE, call=name, kernel="all", **whole)
    for kernel, (count, milliseconds) in slowest:
        figures = {"time, ms": milliseconds, "of the call": milliseconds / total}
        run.row(TABLE, call=name, kernel=kernel[:80], launches=count, **figures)


def profiled(call: Callable[[], object], place: Place) -> profile:
    """What the profiler recorded of a call."""
    activities = [ProfilerActivity.CPU]
    if place.cuda:
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize(place.device)
    with profile(activities=activities) as record:
        call()
        if place.cuda:
            torch.cuda.synchronize(place.device)
    return record


def on_device(event, place: Place) -> bool:
    """Whether a line of the profile is a kernel, and not the operator that launched it."""
    return not place.cuda or event.device_type == DeviceType.CUDA
