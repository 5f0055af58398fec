"""Every way to compute the loss over a large vocabulary: time, extra memory and error, forward and
backward, in one interleaved run.

    python -m benchmarks.vocab_loss [--cases 512x2048 512x2048i 2560x1024 512x8192]
        [--vocab_size 151936] [--rounds 3] [--out FOLDER]

A case is width x tokens; an i behind it ignores half of the labels. Time is process CPU time on one
thread (on CUDA: events), the median over rounds of fresh inputs; its ratio to longhaul's own choice
is the median of the rounds' ratios. Extra memory is the peak of all allocations beyond the two
gradients. Errors are against float64 on the first tokens: of the loss absolute, in nats, and of
gradients relative. Ours is timed only if its loss is within 1e-3 nats and its gradients are at most
1.5 times as wrong as the standard's; others are timed if their gradients are those of the same
function at all. The loss that torch 2.13's own reports in bf16 is not: its gradients are.
"""

import functools
import importlib.util
import inspect
import re
import shlex
import statistics

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks import clock
from benchmarks.record import Run, Table, attempt, where
from footprint.kernels.measure import peak_bytes
from longhaul.cli import Parser
from longhaul.dist import named_device
from longhaul.kernels import loss_path
from longhaul.vocab.check import gradients, standard_loss
from longhaul.vocab.loss import linear_cross_entropy
from model import IGNORE, ModelConfig
from model import linear_cross_entropy as plain_chunked_loss
from verify_chunked_loss import TORCH_LOSSES, naive_loop

CHECK_TOKENS = 256  # tokens of the float64 check: [tokens, V] in float64 exists there
OURS, STANDARD = "longhaul", "standard"
ERRORS = ("loss error", "dh error", "dW error")
# relative gradients of another's: beyond it is another function, not a coarser one
BOUND = 5e-2
TABLE = Table(
    "loss",
    "The loss over the vocabulary, forward and backward, bf16",
    {
        "loss": "text",
        "width": "count",
        "tokens": "count",
        "vocabulary": "count",
        "time, ms": "ms",
        "time / longhaul": "ratio",
        "TFLOP/s": "tera",
        "GB/s": "giga",
        "host, ms": "ms",
        "extra memory, MB": "mb",
        "of the logits": "share",
        "loss error": "error",
        "dh error": "error",
        "dW error": "error",
    },
)


# ---- the losses: hidden [N, D], weight [V, D], labels [N] -> mean over valid tokens


def automatic_loss(hidden, weight, labels, kernels="auto"):
    """What --loss auto computes: in one pass, unless blocks would be added in low precision."""
    V, D = weight.shape
    dtype = str(hidden.dtype).removeprefix("torch.")
    config = ModelConfig(vocab_size=V, hidden_size=D, compute_dtype=dtype)
    path = loss_path(config, len(hidden), low_precision=weight.element_size() < 4)
    one_pass = path == "one_pass"
    return linear_cross_entropy(hidden, weight, labels, kernels=kernels, one_pass=one_pass)


def one_pass_of_fp32(hidden, weight, labels):
    """As on one device, where training keeps weights in fp32: blocks are added to an fp32 dW."""
    return linear_cross_entropy(hidden, weight.float(), labels, one_pass=True)


def chunk_sum(hidden, weight, labels):
    """Summed loss of one chunk through its logits."""
    return F.cross_entropy(
        (hidden @ weight.T).float(), labels, ignore_index=IGNORE, reduction="sum"
    )


def checkpointed_loop(h, w, y, chunk=512, part=chunk_sum):
    """The naive loop with each chunk recomputed in the backward."""
    total = sum(
        checkpoint(part, hidden, w, labels, use_reentrant=False)
        for hidden, labels in zip(h.split(chunk), y.split(chunk), strict=True)
    )
    return total / (y != IGNORE).sum().clamp(min=1)


def variants(device: torch.device, say=print) -> dict:
    """Name -> function(hidden, weight, labels), longhaul's choice first; what is not installed is
    said.
    """
    automatic, other = ("compiled", "eager") if device.type == "cuda" else ("eager", "compiled")
    bodies = functools.partial(automatic_loss, kernels={"eager": "torch"}.get(other, other))
    table = {
        OURS: automatic_loss,
        STANDARD: standard_loss,
        "longhaul, two passes": linear_cross_entropy,
        "longhaul, model.py": plain_chunked_loss,
        f"longhaul, {other} bodies": bodies,
        "standard, torch.compile": torch.compile(standard_loss),
        "naive loop": functools.partial(naive_loop, chunk=512),
        "checkpointed loop": checkpointed_loop,
        "checkpointed loop, torch.compile": functools.partial(
            checkpointed_loop, chunk=4096, part=torch.compile(chunk_sum)
        ),
    } | torch_own(say)
    say(f"longhaul's bodies are {automatic} here")
    if device.type == "cuda":
        return (
            table
            | {
                "longhaul, triton bodies": functools.partial(automatic_loss, kernels="triton"),
                "longhaul, one pass, fp32 weight": one_pass_of_fp32,
            }
            | installed_peers(say)
        )
    say("longhaul, triton bodies, Liger-Kernel, cut-cross-entropy: need a CUDA device")
    return table


def torch_own(say=print) -> dict:
    """torch's fused loss, through full logits and in chunks."""
    if not hasattr(F, "linear_cross_entropy"):
        say(f"F.linear_cross_entropy: not in torch {torch.__version__}")
        return {}
    if not TORCH_LOSSES:
        say(f"F.linear_cross_entropy in chunks: needs torch 2.13; this is {torch.__version__}")
    return {"torch, full logits": F.linear_cross_entropy} | TORCH_LOSSES


def installed_peers(say=print) -> dict:
    """Liger-Kernel and cut-cross-entropy, which need a GPU; each also in its more exact form where
    it has one.
    """
    peers = {}
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss as Liger

        peers["Liger-Kernel"] = lambda h, w, y: Liger()(w, h, y)
        if "accum_dtype" in inspect.signature(Liger.__init__).parameters:
            peers["Liger-Kernel, fp32 sums"] = lambda h, w, y: Liger(accum_dtype=torch.float32)(
                w, h, y
            )
    else:
        say("Liger-Kernel: not installed (pip install liger-kernel)")
    if importlib.util.find_spec("cut_cross_entropy"):
        from cut_cross_entropy import linear_cross_entropy as cce

        peers["cut-cross-entropy"] = cce
        if "accum_c_fp32" in inspect.signature(cce).parameters:
            peers["cut-cross-entropy, fp32 sums"] = functools.partial(
                cce, accum_e_fp32=True, accum_c_fp32=True, filter_eps=None
            )
    else:
        say("cut-cross-entropy: not installed (pip install cut-cross-entropy)")
    return peers


# ---- one case


def inputs(D: int, N: int, V: int, ignored: bool, device: torch.device, seed: int = 0):
    """bf16 hidden states and weight with logits of standard deviation 1."""
    generator = torch.Generator(device).manual_seed(seed)
    h = torch.randn(N, D, generator=generator, device=device, dtype=torch.bfloat16)
    w = torch.randn(V, D, generator=generator, device=device, dtype=torch.bfloat16).div_(D**0.5)
    y = torch.randint(V, (N,), generator=generator, device=device)
    if ignored:
        y[::2] = IGNORE
    return h, w, y


def check(loss, few, exact) -> list[float]:
    """Errors of loss (absolute), dh and dW (relative) against float64 on the first tokens."""
    got = gradients(loss, *few)
    return [
        abs(float(got[0]) - float(exact[0])),
        clock.relative(got[1], exact[1]),
        clock.relative(got[2], exact[2]),
    ]


def sound(name: str, errors: list[float], standard: list[float]) -> bool:
    """Whether a variant computes the loss well enough to be timed: ours as exactly as the standard,
    another's at all.
    """
    if name.startswith(OURS):
        return errors[0] <= 1e-3 and all(
            mine <= 1.5 * other for mine, other in zip(errors[1:], standard[1:], strict=True)
        )
    return all(error <= BOUND for error in errors[1:])


def checked(table: dict, few) -> dict:
    """Name -> (errors, "") or (None or errors, why it is not timed)."""
    exact = gradients(standard_loss, few[0].double(), few[1].double(), few[2])
    found = {name: attempt(check, loss, few, exact) for name, loss in table.items()}
    standard = check(
        standard_loss, few, exact
    )  # the yardstick, also at sizes where the standard loss itself has no line any more
    return {
        name: (
            errors,
            why or ("" if sound(name, errors, standard) else "not timed: fails its check"),
        )
        for name, (errors, why) in found.items()
    }


def peak_mb(loss, batch) -> float:
    """MB beyond the two gradients; the first call compiles and warms up."""
    gradients(loss, *batch)
    return (
        peak_bytes(lambda: gradients(loss, *batch), batch[0].device)
        - batch[0].nbytes
        - batch[1].nbytes
    ) / 1e6


def case(
    run: Run,
    D: int,
    N: int,
    V: int,
    table: dict,
    device: torch.device,
    rounds: int,
    ignored: bool = False,
) -> None:
    """Check, then memory, then interleaved times: a row per variant."""
    batch = inputs(D, N, V, ignored, device)
    errors = checked(table, (batch[0][:CHECK_TOKENS], batch[1], batch[2][:CHECK_TOKENS]))
    why = {name: reason for name, (_, reason) in errors.items() if reason}
    memory = {}
    host = {}
    for name in [name for name in table if name not in why]:
        memory[name], reason = attempt(peak_mb, table[name], batch)
        why |= {name: reason} if reason else {}
        if not reason and device.type == "cuda":
            call = functools.partial(gradients, table[name], *batch)
            host[name] = clock.host_milliseconds(call, device)
    del batch
    seeds = iter(range(1, 1 + rounds))
    calls = {
        name: functools.partial(gradients, loss) for name, loss in table.items() if name not in why
    }
    times = clock.interleaved(
        calls, lambda: inputs(D, N, V, ignored, device, next(seeds)), device, rounds
    )
    for name in table:
        figures = (
            {
                "time, ms": clock.milliseconds(times[name]),
                "time / longhaul": clock.ratio(times, name, OURS),
                # three products, and every input and gradient once: what no loss can avoid
                "TFLOP/s": 6 * N * D * V / statistics.median(times[name]),
                "GB/s": 2 * 2 * D * (N + V) / statistics.median(times[name]),
                "host, ms": host.get(name),
                "extra memory, MB": memory[name],
                "of the logits": memory[name] * 1e6 / (2 * N * V),
            }
            if name in times
            else {"time, ms": why[name]}
        )
        run.row(
            loss=name + ", half ignored" * ignored,
            width=D,
            tokens=N,
            vocabulary=V,
            **figures,
            **dict(zip(ERRORS, errors[name][0] or (), strict=False)),
        )


def parse_case(words: str) -> tuple[int, int, bool]:
    """Width, tokens, and whether half of the labels are ignored; ValueError for other words."""
    found = re.fullmatch(r"(\d+)x(\d+)(i?)", words)
    if not found:
        raise ValueError(f"--cases {words} is none: give WIDTHxTOKENS, such as 512x2048")
    return int(found[1]), int(found[2]), bool(found[3])


def main(args: list[str] | None = None):
    parser = Parser(description=__doc__.splitlines()[0], prog="python -m benchmarks.vocab_loss")
    parser.add_argument(
        "--cases",
        nargs="+",
        default=["512x2048", "512x2048i", "2560x1024", "512x8192"],
        help="width x tokens, i: half ignored",
    )
    parser.add_argument("--vocab_size", type=int, default=151_936, help="vocabulary")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to run"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        help="names of variants next to longhaul and the standard loss",
    )
    parser.add_argument(
        "--out", default="runs/vocab_loss", help="folder of results.json and results.md"
    )
    given = parser.parse_args(args)
    try:
        device = named_device(given.device)
        cases = [parse_case(words) for words in given.cases]
    except ValueError as error:
        parser.refuse(error)
    torch.set_num_threads(1)
    command = (
        f"python -m benchmarks.vocab_loss --cases {' '.join(given.cases)} --vocab_size "
        f"{given.vocab_size} --rounds {given.rounds}"
    )
    if given.only:
        command += " --only " + shlex.join(given.only)
    run = Run(given.out, "The loss over the vocabulary", command, where(device), TABLE)
    table = {
        name: loss
        for name, loss in variants(device, run.note).items()
        if name in (OURS, STANDARD, *given.only) or not given.only
    }
    for width, tokens, ignored in cases:
        case(run, width, tokens, given.vocab_size, table, device, given.rounds, ignored)
    print((run.folder / "results.md").read_text())


if __name__ == "__main__":
    main()
