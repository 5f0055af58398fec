"""Verify the chunked loss on this machine: `python verify_chunked_loss.py`.

The exit code is 0 if every check passes, 1 if one fails and 2 for bad input.

1. The rule: at which sequence lengths the logits of the 4B exceed the threshold. Nothing is
   allocated for this.
2. The comparison: the error of the standard and of the chunked loss and of both gradients against
   float64, the bytes that each keeps for the backward, the peak memory of forward and backward,
   and the time. The loss in one pass keeps its gradients instead, and must be as exact.
3. The negative control: the loop over chunks of cross_entropy that many recipes recommend. Autograd
   keeps all of its logits, so it must fail the check of the bytes kept.

With --loss it checks your loss instead: any function (hidden [N, D], weight [V, D], labels [N]) ->
mean over the labels that are not -100. Each row of its table names what people lost runs to.

    python verify_chunked_loss.py --loss mine.py:loss
    python verify_chunked_loss.py --loss package.module:loss --dtype bf16
"""

import base.with_torch  # noqa: F401  (first: a missing package is answered in one line)

import argparse
import functools
import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from base.flags import PRECISIONS, Parser, precision
from footprint.kernels.measure import peak_bytes, saved_bytes
from footprint.python.users_file import named_function, told_in_one_line
from longhaul.dist import World, named_device
from longhaul.kernels import loss_path
from longhaul.planner.plan import available_gib
from longhaul.vocab import linear_cross_entropy
from longhaul.vocab.check import (
    CHECKS,
    EXACTNESS,
    Subject,
    Wrong,
    errors_between,
    gradients,
    outcome,
    problem,
    standard_loss,
)
from model import GIB, IGNORE, ModelConfig
from model import linear_cross_entropy as plain_chunked_loss

# tokens: (GiB of logits, whether the loss must be chunked)
DOCUMENTED = {
    4096: (1.16, False),
    40_000: (11.32, True),
    131_072: (37.09, True),
}
MIB = 2**20
DEFAULTS = dict(loss=None, dtype="bf16", seq_len=128, hidden_size=32, vocab_size=151_936)
LOSS_DEFAULTS = dict(dtype=None, seq_len=16_384, hidden_size=32, vocab_size=32_768)
SAVED_LIMIT = 12  # bytes per token beyond the inputs

# A gradient's error may be this factor of the standard loss's own error, or the error that rounding
# the result to its dtype makes.
FACTOR = 1.05
FLOOR = {torch.bfloat16: 2e-3, torch.float16: 3e-4, torch.float32: 1e-6}
TOKEN_FLOOR = 1e-5  # nats: the rounding of a token's loss in fp32


def main(args: list[str] | None = None) -> int:
    """Run all checks; the exit code."""
    given = parsed(args)
    checks = (
        check_users_loss(given)
        if given.loss is not None
        else [*check_rule(), *check_computation(given)]
    )

    failed = checks.count(False)
    print(f"\n{len(checks) - failed} passed, {failed} failed")
    return 1 if failed else 0


def parsed(args: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__.splitlines()[0], prog="verify_chunked_loss.py")
    parser.add_argument(
        "--device", default="auto", help="where to compute: auto, cpu, cuda or cuda:N"
    )
    parser.add_argument(
        "--dtype",
        type=precision,
        choices=tuple(PRECISIONS),
        default=argparse.SUPPRESS,
        help="dtype of hidden states and weight (default: bf16; with --loss both fp32 and bf16)",
    )
    parser.add_argument(
        "--loss",
        default=argparse.SUPPRESS,
        metavar="FILE.py:FUNCTION",
        help="check this function, or package.module:FUNCTION, and nothing of longhaul",
    )
    for name, words in (
        ("seq_len", "number of tokens"),
        ("hidden_size", "model width"),
        ("vocab_size", "vocabulary size"),
    ):
        sizes = f"{DEFAULTS[name]:,}; with --loss {LOSS_DEFAULTS[name]:,}, for the memory alone"
        text = f"{words} in the comparison (default: {sizes})"
        parser.add_argument(f"--{name}", type=int, default=argparse.SUPPRESS, help=text)
    typed = vars(parser.parse_args(args))
    given = argparse.Namespace(**(LOSS_DEFAULTS if "loss" in typed else DEFAULTS) | typed)

    if min(given.seq_len, given.hidden_size, given.vocab_size) < 1:
        parser.error("a size below 1: give --seq_len, --hidden_size and --vocab_size of at least 1")
    try:
        given.device = named_device(given.device)
        check_size(given)
        if given.loss is not None:
            given.function = users_loss(given.loss)
    except ValueError as error:
        parser.refuse(error)
    return given


def check_size(given: argparse.Namespace):
    """ValueError if this machine cannot hold the standard loss in float64, or with --loss in fp32,
    which a loss under test may turn out to be.
    """
    logits = given.seq_len * given.vocab_size
    weight = given.hidden_size * given.vocab_size
    width = 4 if given.loss is not None else 8
    needed = width * (3 * logits + 2 * weight) / GIB  # logits, their softmax and gradient
    available = available_gib(given.device, World())
    if needed > available:
        raise ValueError(
            f"the comparison needs {needed:,.1f} GiB for full logits in fp{8 * width}, and "
            f"{available:.1f} are available: give a smaller --seq_len, --hidden_size or "
            "--vocab_size"
        )


def verdict(holds: bool, text: str) -> bool:
    """Print one check; whether it holds."""
    print(f"  {'✓' if holds else '✗ FAILED:'} {text}")
    return holds


def check_rule() -> list[bool]:
    """The documented cases at the real 4B shape."""
    config = ModelConfig.preset("4B")
    results = []
    for number, (seq_len, (gib, expected)) in enumerate(DOCUMENTED.items(), start=1):
        size = config.logits_gib(1, seq_len)
        chunk = config.should_chunk(1, seq_len)
        print(f"Test {number}: seq_len={seq_len}, logits={size:.2f}GiB, should_chunk={chunk}")
        is_right = chunk == expected and round(size, 2) == gib
        results.append(verdict(is_right, rule_text(config, seq_len)))
    return results


def rule_text(config: ModelConfig, seq_len: int) -> str:
    """What the threshold asks for, and which loss runs."""
    if config.should_chunk(1, seq_len):
        return "Chunked loss used (memory efficient)"
    if loss_path(config, seq_len) == "standard":
        return "Standard loss used"
    return (
        "Standard loss used if only the threshold decides; --loss auto takes tiles, which are as "
        "fast at this vocabulary"
    )


def check_computation(given: argparse.Namespace) -> list[bool]:
    """Errors, kept bytes, peak memory and time at a size that fits this machine."""
    N = given.seq_len
    V = given.vocab_size
    dtype = getattr(torch, PRECISIONS[given.dtype])
    inputs = problem(N, given.hidden_size, V, dtype, given.device)
    print(
        f"Computed: {N} tokens, width {given.hidden_size}, vocabulary {V:,}, {given.dtype} on "
        f"{given.device}: logits {N * V * dtype.itemsize / GIB:.3f} GiB"
    )

    hidden_ND, weight_VD, labels_N = inputs
    exact = result_of(standard_loss, hidden_ND.double(), weight_VD.double(), labels_N)
    results = {name: measured(loss, *inputs, exact) for name, loss in LOSSES.items()}
    print_table(results)
    if not TORCH_LOSSES:
        print(f"  F.linear_cross_entropy in chunks needs torch 2.13; this is {torch.__version__}")
    return judge(results, N, V, dtype)


def print_table(results: dict[str, dict]):
    """A row per loss. "token error" is the root mean square error of a token's loss."""
    columns = ("loss error", "dh error", "dW error", "token error", "kept, MiB", "peak, MiB")
    print(f"  {'':<16}" + "".join(f"{name:>13}" for name in columns) + f"{'time, s':>10}")
    for name, result in results.items():
        errors = "".join(f"{error:>13.1e}" for error in result["errors"].values())
        memory = f"{result['saved'] / MIB:>13.2f}{result['peak'] / MIB:>13.1f}"
        # model.py has no loss of a token
        print(f"  {name:<16}{errors:<52}{memory}{result['seconds']:>10.2f}")


def judge(results: dict, N: int, V: int, dtype: torch.dtype) -> list[bool]:
    """The claims."""
    plain = results["standard"]
    ours = results["chunked"]
    loop = results["naive loop"]

    checks = [
        verdict(ours["errors"]["loss"] <= 1e-3, "the loss is that of float64 within 1e-3 nats"),
        verdict(
            ours["errors"]["token"] <= token_bound(plain["errors"]["token"], V),
            "each token's loss is free of the rounding of its label's logit",
        ),
    ]
    for name in ("dh", "dW"):
        bound = max(FACTOR * plain["errors"][name], FLOOR[dtype])
        text = f"{name} is as exact as the standard loss's, also in one pass and in model.py"
        worst = max(results[loss]["errors"][name] for loss in ("chunked", "one pass", "model.py"))
        checks.append(verdict(worst <= bound, text))

    kept = ours["saved"] / N
    share = ours["peak"] / plain["peak"]
    kept_by_loop = loop["saved"] / (N * V * 4)
    return [
        *checks,
        verdict(
            ours["saved"] <= SAVED_LIMIT * N + 64,
            f"{kept:.1f} bytes per token are kept for the backward (at most {SAVED_LIMIT})",
        ),
        verdict(
            ours["peak"] < plain["peak"],
            f"forward and backward take {share:.1%} of the standard loss's extra memory",
        ),
        verdict(
            loop["saved"] > 0.9 * N * V * dtype.itemsize,
            f"negative control: the naive loop keeps {kept_by_loop:.0%} of the fp32 logits",
        ),
    ]


def token_bound(plain_error: float, V: int) -> float:
    """The largest allowed error of a token's loss, root mean square, in nats.

    The standard loss rounds the label's logit to the inputs' dtype, which is nearly all of its
    error. The chunked loss keeps that logit in fp32. The rounding of the others averages out over
    the vocabulary: of logits with standard deviation 1, a few times sqrt(e / V) of it remains.
    """
    remains = min(0.8, 12 / V**0.5)
    return max(remains * plain_error, TOKEN_FLOOR)


# ---- the loss of a user


def users_loss(words: str) -> Callable:
    """The function that --loss names. ValueError if it cannot be had."""
    place, _, name = words.rpartition(":")
    if not place or not name:
        raise ValueError(f"--loss {words} names no function: give FILE.py:FUNCTION")

    if place.endswith(".py"):
        return named_function("--loss", words)
    try:
        with told_in_one_line():
            module = import_from_here(place)
    except ModuleNotFoundError as error:
        raise ValueError(f"--loss {words}: {error}: give FILE.py:FUNCTION, or install it") from None

    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"--loss {words}: {place} has no function {name}: give one that it has")
    return function


def import_from_here(module: str):
    """The module, which may lie in the working directory."""
    sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(module)


def check_users_loss(given: argparse.Namespace) -> list[bool]:
    """One table. Everything is checked in the first dtype, what depends on precision in each."""
    names = [given.dtype] if given.dtype else ["fp32", "bf16"]
    sizes = given.seq_len, given.hidden_size, given.vocab_size
    print(f"{given.loss} on {given.device}, against float64:")
    results = []
    for name in names:
        dtype = getattr(torch, PRECISIONS[name])
        subject = Subject(given.function, dtype, given.device, *sizes)
        for row, check in (CHECKS if name == names[0] else EXACTNESS).items():
            results.append(print_row(f"{name}  {row:<32}", check, subject))
    return results


# what a stranger's loss raises when it cannot serve; anything else ends the program
RAISED = (RuntimeError, ValueError, TypeError, AttributeError, AssertionError, LookupError)


def print_row(title: str, check: Callable, subject: Subject) -> bool:
    """One row of the table; whether the loss passed."""
    try:
        return verdict(True, title + check(subject))
    except Wrong as wrong:
        return verdict(False, f"{title}{wrong}")
    except RAISED as error:
        line = " ".join(str(error).split())
        return verdict(False, f"{title}raised {type(error).__name__}: {line[:200]}")


# ---- the losses: hidden [N, D], weight [V, D], labels [N] -> a mean over valid tokens, or [N]


def one_pass_loss(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, reduction: str = "mean"
) -> Tensor:
    """Gradients with the loss, if it is one number."""
    with_gradients = reduction != "none"
    return linear_cross_entropy(
        hidden_ND, weight_VD, labels_N, reduction=reduction, one_pass=with_gradients
    )


def torch_losses() -> dict[str, Callable]:
    """torch's own loss in chunks, which torch 2.13 brought: its automatic choice, and the most
    exact sums that it has a name for.
    """
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        return {}
    policies = {"torch, automatic": "auto", "torch, accurate": "accurate"}
    return {
        name: functools.partial(
            F.linear_cross_entropy, options=torch.nn.LinearCrossEntropyOptions(acc_policy=policy)
        )
        for name, policy in policies.items()
    }


def naive_loop(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    reduction: str = "mean",
    chunk: int = 128,
) -> Tensor:
    """The loop of many recipes: one chunk of logits at a time in the forward, all of them kept for
    the backward.
    """
    parts = []
    for hidden, labels in zip(hidden_ND.split(chunk), labels_N.split(chunk), strict=True):
        parts.append(standard_loss(hidden, weight_VD, labels, reduction="none"))
    losses_N = torch.cat(parts)
    if reduction == "none":
        return losses_N
    return losses_N.sum() / (labels_N != IGNORE).sum().clamp(min=1)


TORCH_LOSSES = torch_losses()
LOSSES = {
    "standard": standard_loss,
    "chunked": linear_cross_entropy,
    "one pass": one_pass_loss,
    "model.py": plain_chunked_loss,
    **TORCH_LOSSES,
    "naive loop": naive_loop,
}


def result_of(loss, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> dict[str, Tensor]:
    """The mean loss, both gradients, and each token's loss if the function can return it."""
    result = outcome(loss, hidden_ND, weight_VD, labels_N)
    if loss is not plain_chunked_loss:
        with torch.no_grad():
            result["token"] = loss(hidden_ND, weight_VD, labels_N, reduction="none")
    return result


def measured(
    loss, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, exact: dict[str, Tensor]
) -> dict:
    """Errors against float64, bytes kept beyond the inputs, peak beyond the gradients, seconds."""
    inputs = (hidden_ND, weight_VD, labels_N)
    errors = errors_between(result_of(loss, *inputs), exact)

    if hidden_ND.is_cuda:
        torch.cuda.synchronize(hidden_ND.device)
    start = time.perf_counter()
    float(gradients(loss, *inputs)[2].sum())  # reading a number waits for the device
    seconds = time.perf_counter() - start

    leaves = [tensor.detach().requires_grad_() for tensor in inputs[:2]]
    kept = saved_bytes(lambda: loss(*leaves, labels_N))
    saved = kept - sum(tensor.nbytes for tensor in inputs)
    taken = peak_bytes(lambda: gradients(loss, *inputs), hidden_ND.device)
    peak = taken - sum(tensor.nbytes for tensor in inputs[:2])
    return dict(errors=errors, saved=max(saved, 0), peak=peak, seconds=seconds)


if __name__ == "__main__":
    sys.exit(main())
