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

import installed  # noqa: F401  (first: a missing package is answered in one line)

import argparse
import functools
import importlib
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from flags import PRECISIONS, Parser, precision
from footprint.measure import peak_bytes, saved_bytes
from longhaul.dist import World, named_device
from longhaul.kernels import loss_path
from longhaul.memory.plan import available_gib
from longhaul.memory.users_file import ToldInOneLine, UsersFile
from longhaul.vocab import linear_cross_entropy
from model import GIB, IGNORE, ModelConfig
from model import linear_cross_entropy as plain_chunked_loss

# tokens: (GiB of logits, whether the loss must be chunked)
DOCUMENTED = {
    4096: (1.16, False),
    40_000: (11.32, True),
    131_072: (37.09, True),
}
MIB = 2**20
DEFAULTS = dict(dtype="bf16", seq_len=128, hidden_size=32, vocab_size=151_936)
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
    checks = check_users_loss(given) if given.loss else [*check_rule(), *check_computation(given)]

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
        default="",
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
    typed = parser.parse_args(args)
    given = argparse.Namespace(**(LOSS_DEFAULTS if typed.loss else DEFAULTS) | vars(typed))

    if min(given.seq_len, given.hidden_size, given.vocab_size) < 1:
        parser.error("a size below 1: give --seq_len, --hidden_size and --vocab_size of at least 1")
    try:
        given.device = named_device(given.device)
        check_size(given)
        if given.loss:
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
    width = 4 if given.loss else 8
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
    columns = ("loss error", "token error", "dh error", "dW error", "kept, MiB", "peak, MiB")
    print(f"  {'':<16}" + "".join(f"{name:>13}" for name in columns) + f"{'time, s':>10}")
    for name, result in results.items():
        errors = "".join(f"{error:>13.1e}" for error in result["errors"].values())
        errors = errors.replace("nan", "  -")  # model.py has no loss of a token
        memory = f"{result['saved'] / MIB:>13.2f}{result['peak'] / MIB:>13.1f}"
        print(f"  {name:<16}{errors}{memory}{result['seconds']:>10.2f}")


def judge(
    results: dict,
    N: int,
    V: int,
    dtype: torch.dtype,
) -> list[bool]:
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


# ---- any loss: what people lost runs to

SHARE = 0.5  # of the fp32 logits: the largest peak of a loss that never has them as a whole
SLACK = 1.5  # an error may be this factor of the plain loss's own error, or so large:
LOSS_LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-3, torch.float16: 1e-3}  # nats
GRADIENT_LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-3, torch.float16: 3e-4}


class Wrong(Exception):
    """What a check has found."""


def users_loss(words: str) -> Callable:
    """The function that --loss names. ValueError if it cannot be had."""
    place, _, name = words.rpartition(":")
    if not place or not name:
        raise ValueError(f"--loss {words} names no function: give FILE.py:FUNCTION")

    file = UsersFile(place) if place.endswith(".py") else None
    try:
        with ToldInOneLine():
            module = file.load() if file else import_from_here(place)
    except ModuleNotFoundError as error:
        raise ValueError(f"--loss {words}: {error}: give FILE.py:FUNCTION, or install it") from None

    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"--loss {words}: {place} has no function {name}: give one that it has")
    return file.function(function) if file else function


def import_from_here(module: str):
    """The module, which may lie in the working directory."""
    sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(module)


# What a stranger's function may raise; its row then says it.
RAISED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    RuntimeError,
    TypeError,
    ValueError,
)


def check_users_loss(given: argparse.Namespace) -> list[bool]:
    """One table. Everything is checked in the first dtype, what depends on precision in each."""
    names = [given.dtype] if given.dtype else ["fp32", "bf16"]
    print(f"{given.loss} on {given.device}, against float64:")
    results = []
    for name in names:
        dtype = getattr(torch, PRECISIONS[name])
        for row, check in (CHECKS if name == names[0] else EXACTNESS).items():
            results.append(print_row(f"{name}  {row:<32}", check, given, dtype))
    return results


def print_row(
    title: str,
    check: Callable,
    given: argparse.Namespace,
    dtype: torch.dtype,
) -> bool:
    """One row of the table; whether the loss passed."""
    try:
        return verdict(True, title + check(given, dtype))
    except Wrong as wrong:
        return verdict(False, f"{title}{wrong}")
    except RAISED as error:
        line = " ".join(str(error).split())
        return verdict(False, f"{title}raised {type(error).__name__}: {line[:200]}")


def compare(
    loss: Callable,
    inputs: tuple[Tensor, Tensor, Tensor],
    form: Callable = lambda loss: loss,
    trained: tuple[bool, bool] = (True, True),
    scale: float = 1.0,
) -> str:
    """Loss and gradients against float64, as a line of figures; Wrong if one is off by more than
    the plain loss allows. `form` makes of the loss what is computed, `trained` says which of hidden
    and weight require gradients, and `scale` is how much larger than usual the logits are.
    """
    hidden_ND, weight_VD, labels_N = inputs
    exact = outcome(form(standard_loss), hidden_ND.double(), weight_VD.double(), labels_N, trained)
    plain = errors_between(outcome(form(standard_loss), *inputs, trained), exact)
    found = errors_between(outcome(form(loss), *inputs, trained), exact)

    dtype = hidden_ND.dtype
    faults = []
    for name, error in found.items():
        limit = (LOSS_LIMITS if name == "loss" else GRADIENT_LIMITS)[dtype]
        if not error <= max(SLACK * plain[name], scale * limit):  # true for NaN, too
            faults.append(f"{name} is off by {error:.1e}, the plain loss by {plain[name]:.1e}")
    if faults:
        raise Wrong("; ".join(faults))
    return "errors: " + ", ".join(f"{name} {error:.1e}" for name, error in found.items())


def outcome(
    loss: Callable,
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    trained: tuple[bool, bool] = (True, True),
) -> dict[str, Tensor]:
    """The loss, and the gradients of what is trained."""
    needed_by = dict(zip(("dh", "dW"), trained, strict=True))
    leaves = dict(dh=hidden_ND.detach(), dW=weight_VD.detach())
    for name, leaf in leaves.items():
        leaf.requires_grad_(needed_by[name])
    value = loss(*leaves.values(), labels_N)
    if not isinstance(value, Tensor) or value.ndim:
        raise Wrong(f"returned {value!r:.60}: return a tensor without dimensions")

    wanted = [name for name, needed in needed_by.items() if needed]
    result = dict(loss=value.detach())
    if wanted:
        found = torch.autograd.grad(value, [leaves[name] for name in wanted])
        result |= dict(zip(wanted, found, strict=True))
    return result


def errors_between(result: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Of the loss absolute, of the gradients relative."""
    errors = {name: relative(result[name], exact[name]) for name in result if name != "loss"}
    return dict(loss=abs(float(result["loss"]) - float(exact["loss"])), **errors)


def plain_problem(
    given: argparse.Namespace,
    dtype: torch.dtype,
    N: int = 256,
    V: int = 2048,
) -> tuple[Tensor, Tensor, Tensor]:
    """Like `problem`, and no label is ignored."""
    hidden_ND, weight_VD, labels_N = problem(N, 64, V, dtype, given.device)
    return hidden_ND, weight_VD, labels_N.where(labels_N != IGNORE, 0)


def check_exactness(given, dtype) -> str:
    return compare(given.function, plain_problem(given, dtype))


def check_exploding(given, dtype) -> str:
    """Logits around +8192 and -8192, all of them multiples of 64, which bf16 does not round."""
    generator = torch.Generator().manual_seed(0)
    hidden_ND = torch.randint(-1, 2, (256, 64), generator=generator)
    weight_VD = 64 * torch.randint(-1, 2, (2048, 64), generator=generator)
    hidden_ND[:, 0] = 64
    labels_N = plain_problem(given, dtype)[2]
    for offset in (128, -128):
        weight_VD[:, 0] = offset
        inputs = (x.to(given.device, dtype) for x in (hidden_ND, weight_VD))
        line = compare(given.function, (*inputs, labels_N), scale=8192 / 8)
    return line


def check_some_ignored(given, dtype) -> str:
    """Two of three labels are ignored: they count nowhere."""
    hidden_ND, weight_VD, labels_N = plain_problem(given, dtype)
    labels_N[torch.arange(len(labels_N)) % 3 > 0] = IGNORE
    line = compare(given.function, (hidden_ND, weight_VD, labels_N))
    dh_ND = outcome(given.function, hidden_ND, weight_VD, labels_N)["dh"]
    if dh_ND[labels_N == IGNORE].any():
        raise Wrong("hidden states of ignored labels have a gradient")
    return line


def check_all_ignored(given, dtype) -> str:
    """As on a rank whose micro-batch is all prompt or padding."""
    hidden_ND, weight_VD, labels_N = plain_problem(given, dtype)
    found = outcome(given.function, hidden_ND, weight_VD, torch.full_like(labels_N, IGNORE))
    largest = max(float(found[name].abs().max()) for name in ("dh", "dW"))
    line = f"loss {float(found['loss']):g}, largest gradient {largest:g}"
    if largest != 0 or not math.isfinite(found["loss"]):
        raise Wrong(line)
    return line


def check_odd_sizes(given, dtype) -> str:
    """One token; then primes, which no tile divides."""
    compare(given.function, plain_problem(given, dtype, N=1))
    return compare(given.function, plain_problem(given, dtype, N=131, V=2503))


def check_edges(given, dtype) -> str:
    """Labels on both sides of each multiple of 64, where tiles begin and end."""
    V = 4099
    starts = torch.arange(64, V, 64)
    labels_N = torch.cat([starts, starts - 1, torch.tensor([0, V - 1])]).to(given.device)
    hidden_ND, weight_VD, _ = plain_problem(given, dtype, len(labels_N), V)
    return compare(given.function, (hidden_ND, weight_VD, labels_N))


def check_upstream(given, dtype) -> str:
    """(3 * loss).backward(), as loss scaling and accumulation have it."""

    def tripled(loss: Callable) -> Callable:
        return lambda *inputs: 3 * loss(*inputs)

    return compare(given.function, plain_problem(given, dtype), tripled)


def check_two_calls(given, dtype) -> str:
    """Two calls before one backward: what the first keeps must outlive the second."""

    def in_halves(loss: Callable) -> Callable:
        return lambda h, w, y: loss(h[:128], w, y[:128]) + loss(h[128:], w, y[128:])

    return compare(given.function, plain_problem(given, dtype), in_halves)


def check_second_backward(given, dtype) -> str:
    """A second backward gives the same gradients, or is refused."""
    hidden_ND, weight_VD, labels_N = plain_problem(given, dtype)
    leaves = hidden_ND.requires_grad_(), weight_VD.requires_grad_()
    value = 3 * given.function(*leaves, labels_N)
    # copies, because the gradients may be what the second backward changes
    first = [x.clone() for x in torch.autograd.grad(value, leaves, retain_graph=True)]
    try:
        second = torch.autograd.grad(value, leaves)
    except (RuntimeError, ValueError) as error:
        return f"refused with {type(error).__name__}"
    for name, before, after in zip(("dh", "dW"), first, second, strict=True):
        error = relative(after, before.double())
        if not error <= GRADIENT_LIMITS[dtype]:
            raise Wrong(f"{name} of the second backward differs by {error:.1e}")
    return "the same gradients"


def check_strides(given, dtype) -> str:
    """Hidden states [N, D] whose neighbours in memory are neither in a row nor in a column."""
    hidden_ND, weight_VD, labels_N = plain_problem(given, dtype)
    wide_NE = hidden_ND.repeat_interleave(2, dim=1)
    wide_NE[:, 1::2] = 7
    return compare(given.function, (wide_NE[:, ::2], weight_VD, labels_N))


def check_frozen(given, dtype, trained: tuple[bool, bool]) -> str:
    return compare(given.function, plain_problem(given, dtype), trained=trained)


def check_memory(given, dtype) -> str:
    """The peak of forward and backward, above inputs and gradients."""
    inputs = problem(given.seq_len, given.hidden_size, given.vocab_size, dtype, given.device)
    gradients(given.function, *(x[:16] if x is not inputs[1] else x for x in inputs))  # compiles
    taken = peak_bytes(lambda: gradients(given.function, *inputs), given.device)
    peak = taken - sum(x.nbytes for x in inputs[:2])

    logits = 4 * given.seq_len * given.vocab_size
    text = f"peak {peak / MIB:,.0f} MiB, {peak / logits:.0%} of the logits in fp32"
    if peak > SHARE * logits:
        raise Wrong(f"{text} (at most {SHARE:.0%})")
    return text


EXACTNESS = {
    "loss and gradients": check_exactness,
    "exploding logits": check_exploding,
}
CHECKS = EXACTNESS | {
    "some labels ignored": check_some_ignored,
    "all labels ignored": check_all_ignored,
    "odd sizes": check_odd_sizes,
    "labels at the edges of tiles": check_edges,
    "upstream gradient of 3": check_upstream,
    "two calls, one backward": check_two_calls,
    "second backward": check_second_backward,
    "hidden is not contiguous": check_strides,
    "weight is frozen": functools.partial(check_frozen, trained=(True, False)),
    "hidden is frozen": functools.partial(check_frozen, trained=(False, True)),
    "nothing is trained": functools.partial(check_frozen, trained=(False, False)),
    "memory through the backward": check_memory,
}


# ---- the losses: hidden [N, D], weight [V, D], labels [N] -> a mean over valid tokens, or [N]


def standard_loss(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    reduction: str = "mean",
) -> Tensor:
    """Full logits, in fp32 at least."""
    logits_NV = hidden_ND @ weight_VD.T
    wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    return F.cross_entropy(wide_NV, labels_N, ignore_index=IGNORE, reduction=reduction)


def one_pass_loss(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    reduction: str = "mean",
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


def problem(
    N: int,
    D: int,
    V: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight and labels with logits of standard deviation 1 and every seventh token
    ignored.
    """
    generator = torch.Generator().manual_seed(0)
    hidden_ND = torch.randn(N, D, generator=generator).to(device, dtype)
    weight_VD = (torch.randn(V, D, generator=generator) / D**0.5).to(device, dtype)
    labels_N = torch.randint(V, (N,), generator=generator).to(device)
    labels_N[6::7] = IGNORE
    return hidden_ND, weight_VD, labels_N


def gradients(
    loss,
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, dh, dW)."""
    hidden_ND = hidden_ND.detach().requires_grad_()
    weight_VD = weight_VD.detach().requires_grad_()
    value = loss(hidden_ND, weight_VD, labels_N)
    return value.detach(), *torch.autograd.grad(value, (hidden_ND, weight_VD))


def result_of(
    loss,
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
) -> dict[str, Tensor]:
    """The mean loss, each token's loss if the function can return it, and both gradients."""
    value, dh_ND, dw_VD = gradients(loss, hidden_ND, weight_VD, labels_N)
    result = dict(loss=value, dh=dh_ND, dW=dw_VD)
    if loss is not plain_chunked_loss:
        with torch.no_grad():
            result["token"] = loss(hidden_ND, weight_VD, labels_N, reduction="none")
    return result


def errors_of(result: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Errors against float64: of the losses absolute, of the gradients relative."""
    token = math.nan
    if "token" in result:
        token = root_mean_square(result["token"] - exact["token"])
    return dict(
        loss=abs(float(result["loss"]) - float(exact["loss"])),
        token=token,
        dh=relative(result["dh"], exact["dh"]),
        dW=relative(result["dW"], exact["dW"]),
    )


def measured(
    loss,
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    exact: dict[str, Tensor],
) -> dict:
    """Errors against float64, bytes kept beyond the inputs, peak beyond the gradients, seconds."""
    inputs = (hidden_ND, weight_VD, labels_N)
    errors = errors_of(result_of(loss, *inputs), exact)

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


def relative(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm())


def root_mean_square(error_N: Tensor) -> float:
    return float(error_N.double().square().mean().sqrt())


if __name__ == "__main__":
    sys.exit(main())
