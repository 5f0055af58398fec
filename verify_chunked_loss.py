"""Verify the chunked loss on this machine: `python verify_chunked_loss.py`.

The exit code is 0 if every check passes, 1 if one fails and 2 for bad input.

1. The rule: at which sequence lengths the logits of the 4B exceed the threshold. Nothing is
   allocated for this.
2. The comparison: the error of the standard and of the chunked loss and of both gradients against
   float64, the bytes that each keeps for the backward, the peak memory of forward and backward,
   and the time. The loss in one pass keeps its gradients instead, and must be as exact.
3. The negative control: the loop over chunks of cross_entropy that many recipes recommend. Autograd
   keeps all of its logits, so it must fail the check of the bytes kept.

With --policy it verifies the statistics of post-training instead: how far the probability of a
token is from float64, with logits of bf16 and with those that longhaul/posttrain/policy.py takes.
"""

import installed  # noqa: F401  (first: a missing package is answered in one line)

import argparse
import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor

from flags import PRECISIONS, Parser, precision
from footprint.measure import peak_bytes, saved_bytes
from longhaul.dist import World, named_device
from longhaul.kernels import loss_path
from longhaul.memory.plan import available_gib
from longhaul.vocab import vocab_stats
from longhaul.vocab.loss import linear_cross_entropy
from model import GIB, IGNORE, ModelConfig

# tokens: (GiB of logits, whether the loss must be chunked)
DOCUMENTED = {
    4096: (1.16, False),
    40_000: (11.32, True),
    131_072: (37.09, True),
}
MIB = 2**20
SAVED_LIMIT = 12  # bytes per token beyond the inputs

# A gradient's error may be this factor of the standard loss's own error, or the error that rounding
# the result to its dtype makes.
FACTOR = 1.05
FLOOR = {torch.bfloat16: 2e-3, torch.float16: 3e-4, torch.float32: 1e-6}
PEAKED = 6.0  # standard deviation of the logits with --policy
TOKEN_FLOOR = 1e-5  # nats: the rounding of a token's loss in fp32


def main(args: list[str] | None = None) -> int:
    """Run all checks; the exit code."""
    given = parsed(args)
    checks = check_policy(given) if given.policy else [*check_rule(), *check_computation(given)]

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
        default="bf16",
        help="dtype of the hidden states and the weight",
    )
    parser.add_argument(
        "--policy",
        action="store_true",
        help="verify the probabilities that train a policy instead of the loss",
    )
    for name, default, words in (
        ("--seq_len", 512, "number of tokens in the comparison"),
        ("--hidden_size", 256, "model width in the comparison (the 4B has 2560)"),
        ("--vocab_size", 151_936, "vocabulary size in the comparison"),
    ):
        parser.add_argument(name, type=int, default=default, help=words)
    given = parser.parse_args(args)

    if min(given.seq_len, given.hidden_size, given.vocab_size) < 1:
        parser.error("a size below 1: give --seq_len, --hidden_size and --vocab_size of at least 1")
    try:
        given.device = named_device(given.device)
        check_size(given)
    except ValueError as error:
        parser.error(str(error))
    return given


def check_size(given: argparse.Namespace):
    """ValueError if this machine cannot hold the standard loss in float64."""
    logits = given.seq_len * given.vocab_size
    weight = given.hidden_size * given.vocab_size
    needed = 8 * (3 * logits + 2 * weight) / GIB  # logits, their softmax and gradient
    available = available_gib(given.device, World())
    if needed > available:
        raise ValueError(
            f"the comparison needs {needed:,.1f} GiB for the standard loss in float64, and "
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
    return judge(results, N, V, dtype)


def print_table(results: dict[str, dict]):
    """A row per loss. "token error" is the root mean square error of a token's loss."""
    columns = ("loss error", "token error", "dh error", "dW error", "kept, MiB", "peak, MiB")
    print(f"  {'':<14}" + "".join(f"{name:>13}" for name in columns) + f"{'time, s':>10}")
    for name, result in results.items():
        errors = "".join(f"{error:>13.1e}" for error in result["errors"].values())
        memory = f"{result['saved'] / MIB:>13.2f}{result['peak'] / MIB:>13.1f}"
        print(f"  {name:<14}{errors}{memory}{result['seconds']:>10.2f}")


def judge(results: dict, N: int, V: int, dtype: torch.dtype) -> list[bool]:
    """The claims."""
    plain = results["standard"]
    ours = results["chunked"]
    loop = results["naive loop"]

    in_one_pass = results["one pass"]

    checks = [
        verdict(ours["errors"]["loss"] <= 1e-3, "the loss is that of float64 within 1e-3 nats"),
        verdict(
            ours["errors"]["token"] <= token_bound(plain["errors"]["token"], V),
            "each token's loss is free of the rounding of its label's logit",
        ),
    ]
    for name in ("dh", "dW"):
        bound = max(FACTOR * plain["errors"][name], FLOOR[dtype])
        text = f"{name} is as exact as the standard loss's, also in one pass"
        worst = max(ours["errors"][name], in_one_pass["errors"][name])
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


# ---- the probabilities that train a policy

PROBABILITY_MEAN = 1e-4  # the largest mean and single error of a probability
PROBABILITY_MAX = 2e-3


def check_policy(given: argparse.Namespace) -> list[bool]:
    """Errors of probabilities against float64 at targets of all ranks. The logits are as large as
    those of a trained model: the likeliest tokens have probabilities of up to nearly 1.
    """
    N = given.seq_len
    dtype = getattr(torch, PRECISIONS[given.dtype])
    hidden_ND, weight_VD, labels_N = problem(N, given.hidden_size, given.vocab_size, dtype, "cpu")
    hidden_ND = (hidden_ND * PEAKED).to(given.device)
    weight_VD = weight_VD.to(given.device)

    exact_NV = (hidden_ND.double() @ weight_VD.double().T).log_softmax(1)
    labels_N = likely_labels(exact_NV, labels_N.clamp(min=0).to(given.device))
    exact_N = exact_NV.gather(1, labels_N[:, None])[:, 0].exp()
    ours_N = vocab_stats(hidden_ND.float(), weight_VD, labels_N).logprob.exp()
    rounded_NV = (hidden_ND @ weight_VD.T).float().log_softmax(1)
    rounded_N = rounded_NV.gather(1, labels_N[:, None])[:, 0].exp()

    print(f"Computed: {N} tokens, vocabulary {given.vocab_size:,}, {given.dtype} on {given.device}")
    print(f"  {'error of a probability':<34}{'mean':>10}{'largest':>10}")
    errors = {}
    for name, found_N in (("full logits", rounded_N), ("fp32 in tiles", ours_N)):
        error_N = (found_N.double() - exact_N).abs()
        errors[name] = float(error_N.mean()), float(error_N.max())
        print(f"  {name:<34}{errors[name][0]:>10.1e}{errors[name][1]:>10.1e}")

    mean, largest = errors["fp32 in tiles"]
    return [
        verdict(mean <= PROBABILITY_MEAN, f"the mean error is at most {PROBABILITY_MEAN:g}"),
        verdict(largest <= PROBABILITY_MAX, f"the largest error is at most {PROBABILITY_MAX:g}"),
        verdict(
            dtype == torch.float32 or mean < errors["full logits"][0] / 4,
            "it is less than a quarter of that of logits in the dtype of the weights",
        ),
    ]


def likely_labels(logprob_NV: Tensor, labels_N: Tensor) -> Tensor:
    """Of every four tokens three with a likely label, as a policy draws them: the first, second or
    third of its distribution.
    """
    likeliest_N3 = logprob_NV.topk(3, dim=1).indices
    place_N = torch.arange(len(labels_N), device=labels_N.device) % 4
    likely_N = likeliest_N3.gather(1, place_N.clamp(max=2)[:, None])[:, 0]
    return torch.where(place_N < 3, likely_N, labels_N)


# ---- the losses: hidden [N, D], weight [V, D], labels [N] -> a mean over valid tokens, or [N]


def standard_loss(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, reduction: str = "mean"
) -> Tensor:
    """Full logits, in fp32 at least."""
    logits_NV = hidden_ND @ weight_VD.T
    wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    return F.cross_entropy(wide_NV, labels_N, ignore_index=IGNORE, reduction=reduction)


def chunked_loss(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, reduction: str = "mean"
) -> Tensor:
    """The loss under test."""
    return linear_cross_entropy(hidden_ND, weight_VD, labels_N, reduction=reduction)


def one_pass_loss(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, reduction: str = "mean"
) -> Tensor:
    """Gradients with the loss, if it is one number."""
    with_gradients = reduction != "none"
    return linear_cross_entropy(
        hidden_ND, weight_VD, labels_N, reduction=reduction, one_pass=with_gradients
    )


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


LOSSES = {
    "standard": standard_loss,
    "chunked": chunked_loss,
    "one pass": one_pass_loss,
    "naive loop": naive_loop,
}


def problem(
    N: int, D: int, V: int, dtype: torch.dtype, device: torch.device
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
    loss, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, dh, dW)."""
    hidden_ND = hidden_ND.detach().requires_grad_()
    weight_VD = weight_VD.detach().requires_grad_()
    value = loss(hidden_ND, weight_VD, labels_N)
    return value.detach(), *torch.autograd.grad(value, (hidden_ND, weight_VD))


def result_of(loss, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> dict[str, Tensor]:
    """The mean loss, each token's loss, and both gradients."""
    value, dh_ND, dw_VD = gradients(loss, hidden_ND, weight_VD, labels_N)
    with torch.no_grad():
        tokens_N = loss(hidden_ND, weight_VD, labels_N, reduction="none")
    return dict(loss=value, token=tokens_N, dh=dh_ND, dW=dw_VD)


def errors_of(result: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Errors against float64: of the losses absolute, of the gradients relative."""
    return dict(
        loss=abs(float(result["loss"]) - float(exact["loss"])),
        token=root_mean_square(result["token"] - exact["token"]),
        dh=relative(result["dh"], exact["dh"]),
        dW=relative(result["dW"], exact["dW"]),
    )


def measured(
    loss, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, exact: dict[str, Tensor]
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
