"""Every way to compute the loss over a large vocabulary: time, extra memory and error, forward and backward, in one interleaved run.

    python -m benchmarks.vocab_loss [--cases 512x2048 512x2048i 2560x1024 512x8192] [--vocab_size 151936] [--repeats 3] [--device cpu]

A case is width x tokens; an i behind it ignores half of the labels. Time is process CPU time on one thread (CUDA: events), the median
of the ratios to the standard loss F.cross_entropy((h @ W.T).float(), y); extra memory is the peak of all allocations beyond the two
gradients; errors are relative to float64 on the same bf16 inputs. A variant whose loss is off by more than 1e-3 nats or whose gradients are
more than 1.5 times as wrong as the standard's is marked so and not timed. Imports verify_chunked_loss.py, longhaul.memory.measure,
longhaul.cli and model.py of ours.
"""

import functools
import importlib.util
import statistics
import time

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from longhaul.cli import Parser
from longhaul.memory.measure import peak_bytes
from model import IGNORE, linear_cross_entropy
from verify_chunked_loss import gradients, naive_loop, relative, standard_loss

CHECK_TOKENS = 256  # tokens of the float64 check: [tokens, V] in float64 exists there


def checkpointed_loop(h, w, y, chunk=512):
    """The naive loop with each chunk recomputed in the backward."""
    part = lambda hidden, labels: F.cross_entropy((hidden @ w.T).float(), labels, ignore_index=IGNORE, reduction="sum")
    total = sum(checkpoint(part, *pair, use_reentrant=False) for pair in zip(h.split(chunk), y.split(chunk)))
    return total / (y != IGNORE).sum().clamp(min=1)


def variants(device: torch.device) -> dict:
    """Name -> function(hidden, weight, labels), the standard loss first; what is not installed is said and left out."""
    ours = functools.partial(linear_cross_entropy, reduction="mean")
    table = {"standard": standard_loss, "longhaul, compiled bodies": functools.partial(ours, kernels="compiled"),
             "longhaul, eager bodies": functools.partial(ours, kernels="torch"), "standard, torch.compile": torch.compile(standard_loss),
             "naive loop": functools.partial(naive_loop, chunk=512), "checkpointed loop": checkpointed_loop}
    if hasattr(F, "linear_cross_entropy"):
        table["F.linear_cross_entropy"] = lambda h, w, y: F.linear_cross_entropy(h, w, y)
    if device.type == "cuda":
        table["longhaul, triton bodies"] = functools.partial(ours, kernels="triton")
        table |= installed_peers()
    return table


def installed_peers() -> dict:
    """Liger-Kernel and cut-cross-entropy, which need a GPU."""
    peers = {}
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
        peers["Liger-Kernel"] = lambda h, w, y: LigerFusedLinearCrossEntropyLoss()(w, h, y)
    if importlib.util.find_spec("cut_cross_entropy"):
        from cut_cross_entropy import linear_cross_entropy as cce
        peers["cut-cross-entropy"] = cce
    return peers


def main(args: list[str] | None = None):
    parser = Parser(description=__doc__.splitlines()[0], prog="python -m benchmarks.vocab_loss")
    parser.add_argument("--cases", nargs="+", default=["512x2048", "512x2048i", "2560x1024", "512x8192"], help="width x tokens, i: half ignored")
    parser.add_argument("--vocab_size", type=int, default=151_936, help="vocabulary")
    parser.add_argument("--repeats", type=int, default=3, help="timed rounds")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to run")
    parser.add_argument("--only", nargs="+", default=[], help="names of variants beside the standard loss")
    given = parser.parse_args(args)
    torch.set_num_threads(1)
    device = torch.device(given.device)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "one CPU thread"
    print(f"torch {torch.__version__}, {where}, bf16, V={given.vocab_size:,}; forward and backward")
    for case in given.cases:
        width, tokens = (int(number) for number in case.rstrip("i").split("x"))
        run(width, tokens, case.endswith("i"), given, device)


def run(D: int, N: int, ignored: bool, given, device: torch.device):
    """One case: check, then memory, then interleaved times; prints a Markdown table."""
    h, w, y = inputs(D, N, given.vocab_size, ignored, device)
    table = {name: loss for name, loss in variants(device).items() if name == "standard" or not given.only or name in given.only}
    few = h[:CHECK_TOKENS], w, y[:CHECK_TOKENS]
    exact = gradients(standard_loss, few[0].double(), w.double(), few[2])
    errors = {name: check(loss, few, exact) for name, loss in table.items()}
    right = {name: sound(errors[name], errors["standard"]) for name in table}
    mandatory = h.nbytes + w.nbytes
    for name in table:  # compilation and warm-up, outside of what is measured
        if right[name]:
            gradients(table[name], h, w, y)
    memory = {name: peak_bytes(lambda: gradients(loss, h, w, y), device) - mandatory for name, loss in table.items() if right[name]}
    times = {name: [] for name in memory}
    for _ in range(given.repeats):
        for name in times:
            times[name].append(seconds(lambda: gradients(table[name], h, w, y), device))
    print(f"\nD={D}, N={N:,}{', half of the labels ignored' if ignored else ''}: standard {statistics.median(times['standard']):.2f} s")
    print("| loss | time | extra memory, MB | of standard | loss error | dh error | dW error |\n|---|---|---|---|---|---|---|")
    for name in table:
        figures = "not timed: fails the check | | " if not right[name] else (
            f"{statistics.median(a / b for a, b in zip(times[name], times['standard'])):.2f}x | {memory[name] / 1e6:,.0f} | "
            f"{memory[name] / memory['standard']:.1%}")
        print(f"| {name} | {figures} | {errors[name][0]:.1e} | {errors[name][1]:.2e} | {errors[name][2]:.2e} |", flush=True)


def inputs(D: int, N: int, V: int, ignored: bool, device: torch.device):
    """bf16 hidden states and weight with logits of standard deviation 1."""
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(N, D, generator=generator).to(device, torch.bfloat16)
    w = (torch.randn(V, D, generator=generator) / D**0.5).to(device, torch.bfloat16)
    y = torch.randint(V, (N,), generator=generator).to(device)
    if ignored:
        y[::2] = IGNORE
    return h, w, y


def check(loss, few, exact) -> list[float]:
    """Errors of loss (absolute), dh and dW (relative) against float64 on the first tokens."""
    got = gradients(loss, *few)
    return [abs(float(got[0]) - float(exact[0])), relative(got[1], exact[1]), relative(got[2], exact[2])]


def sound(errors: list[float], standard: list[float]) -> bool:
    """Whether a variant computes the loss well enough to be timed."""
    return errors[0] <= 1e-3 and all(mine <= 1.5 * other for mine, other in zip(errors[1:], standard[1:]))


def seconds(function, device: torch.device) -> float:
    """CPU seconds of this process, or seconds between CUDA events."""
    if device.type != "cuda":
        start = time.process_time()
        function()
        return time.process_time() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    function()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1e3


if __name__ == "__main__":
    main()
