"""How every benchmark measures time and errors.

CUDA: seconds between two events on the stream. A scratch buffer larger than L2 is written first, so
that inputs come from memory and the host is ahead of the device when the clock starts. CPU: the CPU
time of this process, so that other jobs do not count. The candidates take turns on the same fresh
inputs; figures are medians, and a ratio is the median of the rounds' ratios.
"""

import functools
import statistics
import time

import torch

CPU = torch.device("cpu")
ROUNDS = 7
# written before each timed call on CUDA: the largest L2 of today holds a tenth of it
SCRATCH_BYTES = 2 * 2**30


def seconds(call, device: torch.device = CPU) -> float:
    """Seconds of `call()`: between CUDA events, or of this process's CPU time."""
    if device.type != "cuda":
        start = time.process_time()
        call()
        return time.process_time() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3  # milliseconds -> seconds


def host_milliseconds(call, device: torch.device) -> float | None:
    """Until `call()` returns, while the device still works; None on a CPU, which is the device.

    Near the device's own time, the host is what is waited for, unless the call itself waits.
    """
    if device.type != "cuda":
        call()
        return None
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    taken = time.perf_counter() - start
    torch.cuda.synchronize(device)
    return 1e3 * taken


def scratch(device: torch.device) -> torch.Tensor | None:
    """A buffer whose writing empties the caches; nothing on a CPU, whose inputs are larger than a
    core's.
    """
    if device.type != "cuda":
        return None
    free = torch.cuda.mem_get_info(device)[0]
    return torch.empty(min(SCRATCH_BYTES, free // 8), dtype=torch.uint8, device=device)


def interleaved(
    calls: dict,
    fresh,
    device: torch.device = CPU,
    rounds: int = ROUNDS,
    cold: bool = True,
) -> dict[str, list[float]]:
    """Seconds of each call in each round, one of them rotating to the front.

    calls: name -> function(*inputs), already warmed up. fresh(): new random inputs, made outside of
    the clock. cold: with the scratch buffer, for calls shorter than a training step.
    """
    times = {name: [] for name in calls}
    buffer = scratch(device) if cold else None
    names = list(calls)
    for index in range(rounds):
        inputs = fresh()
        for name in names[index % len(names) :] + names[: index % len(names)]:
            if buffer is not None:
                buffer.zero_()
            call = functools.partial(calls[name], *inputs)
            times[name].append(seconds(call, device))
            del call
        del inputs
    return times


def ratio(times: dict[str, list[float]], name: str, base: str) -> float | None:
    """Median over rounds of one call's time over another's; None without the other."""
    if base not in times:
        return None
    return statistics.median(a / b for a, b in zip(times[name], times[base], strict=True))


def milliseconds(times: list[float]) -> float:
    """The median."""
    return 1e3 * statistics.median(times)


def relative(value: torch.Tensor, exact: torch.Tensor) -> float:
    """|value - exact| / |exact| in the exact one's dtype and place."""
    return float((value.to(exact) - exact).norm() / exact.norm().clamp(min=1e-300))
