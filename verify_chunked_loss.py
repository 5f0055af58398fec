"""Verify the chunked loss on this machine: `python verify_chunked_loss.py`. Exit code 0: all hold,
1: something failed, 2: bad input.

First the rule: at which sequence lengths the 4B's logits pass the threshold (nothing is allocated).
Then the proof: loss and both gradients of the standard and the chunked loss against float64, what
each keeps for the backward, the peak memory of forward and backward, and the time. Last the
negative control: the loop over chunks of cross_entropy that is often recommended, which autograd
makes keep every logit, must FAIL the test of what is kept. Imports model.py,
longhaul.memory.measure and longhaul.cli of ours.
"""

import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor

from longhaul.cli import Parser
from longhaul.memory.measure import peak_bytes, saved_bytes
from model import GIB, IGNORE, Decoder, ModelConfig, linear_cross_entropy

DOCUMENTED = {
    4096: (1.16, False),
    40_000: (11.32, True),
    131_072: (37.09, True),
}  # tokens: (GiB of logits, chunked)
MIB = 2**20
SAVED_LIMIT = 12  # bytes per token beyond the inputs
FACTOR = 1.05  # of the standard loss's own error against float64
FLOOR = {
    torch.bfloat16: 2e-3,
    torch.float16: 3e-4,
    torch.float32: 1e-6,
}  # the rounding of the results alone


def main(args: list[str] | None = None) -> int:
    """Run all checks; the exit code."""
    parser = Parser(description=__doc__.splitlines()[0], prog="verify_chunked_loss.py")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to compute"
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="of hidden states and weight",
    )
    parser.add_argument(
        "--seq_len", type=int, default=512, help="tokens of the computed comparison"
    )
    parser.add_argument(
        "--hidden_size",
        type=int,
        default=256,
        help="width of the computed comparison (the 4B has 2560)",
    )
    parser.add_argument(
        "--vocab_size", type=int, default=151_936, help="vocabulary of the computed comparison"
    )
    given = parser.parse_args(args)
    if min(given.seq_len, given.hidden_size, given.vocab_size) < 1:
        parser.error("--seq_len, --hidden_size and --vocab_size must be at least 1")
    if given.device != "cpu" and not (
        given.device.split(":")[0] == "cuda" and torch.cuda.is_available()
    ):
        parser.error(
            f"--device {given.device}: not here; use --device cpu, or cuda where torch sees a GPU"
        )
    checks = [*check_rule(), *check_computation(given)]
    failed = checks.count(False)
    print(f"\n{len(checks) - failed} passed, {failed} failed")
    return 1 if failed else 0


def verdict(holds: bool, text: str) -> bool:
    print(f"  {'✓' if holds else '✗ FAILED:'} {text}")
    return holds


def check_rule() -> list[bool]:
    """The documented cases at the real 4B shape, on the meta device."""
    with torch.device("meta"):
        decoder = Decoder(ModelConfig.preset("4B"))
    results = []
    for number, (seq_len, (gib, expected)) in enumerate(DOCUMENTED.items(), start=1):
        size, chunk = decoder.logits_gib(1, seq_len), decoder.should_chunk(1, seq_len)
        print(f"Test {number}: seq_len={seq_len}, logits={size:.2f}GiB, should_chunk={chunk}")
        name = (
            "Chunked loss used (memory efficient)"
            if chunk
            else "Standard loss used by the threshold"
        )
        if not chunk and decoder.config.loss_path(1, seq_len) == "chunked":
            name += "; --loss auto takes the chunked one here too, which is no slower at this vocabulary"
        results.append(verdict(chunk == expected and round(size, 2) == gib, name))
    return results


def check_computation(given) -> list[bool]:
    """Errors, kept bytes, peak memory and time at a size that fits this machine."""
    device, dtype = torch.device(given.device), getattr(torch, given.dtype)
    hidden_ND, weight_VD, labels_N = problem(
        given.seq_len, given.hidden_size, given.vocab_size, dtype, device
    )
    N, V = given.seq_len, given.vocab_size
    print(
        f"Computed: {N} tokens, width {given.hidden_size}, vocabulary {V:,}, {given.dtype} on {device}: logits {N * V * hidden_ND.element_size() / GIB:.3f} GiB"
    )
    exact = gradients(standard_loss, hidden_ND.double(), weight_VD.double(), labels_N)
    results = {
        name: measured(loss, hidden_ND, weight_VD, labels_N, exact) for name, loss in LOSSES.items()
    }
    print(
        f"  {'':<14}{'loss error':>12}{'dh error':>12}{'dW error':>12}{'kept, MiB':>12}{'peak, MiB':>12}{'time, s':>10}"
    )
    for name, r in results.items():
        print(
            f"  {name:<14}{r['errors'][0]:>12.1e}{r['errors'][1]:>12.1e}{r['errors'][2]:>12.1e}{r['saved'] / MIB:>12.2f}{r['peak'] / MIB:>12.1f}{r['seconds']:>10.2f}"
        )
    return judge(results, N, V, dtype)


def judge(results: dict, N: int, V: int, dtype: torch.dtype) -> list[bool]:
    """The claims."""
    plain, ours, loop = results["standard"], results["chunked"], results["naive loop"]
    return [
        verdict(ours["errors"][0] <= 1e-3, "the loss is that of float64 within 1e-3 nats"),
        *(
            verdict(
                mine <= max(FACTOR * other, FLOOR[dtype]),
                f"{name} is as exact as the standard loss's",
            )
            for name, mine, other in zip(("dh", "dW"), ours["errors"][1:], plain["errors"][1:])
        ),
        verdict(
            ours["saved"] <= SAVED_LIMIT * N + 64,
            f"{ours['saved'] / N:.1f} bytes per token are kept for the backward (at most {SAVED_LIMIT})",
        ),
        verdict(
            ours["peak"] < plain["peak"],
            f"forward and backward take {ours['peak'] / plain['peak']:.1%} of the standard loss's extra memory",
        ),
        verdict(
            loop["saved"] > 0.9 * N * V * dtype.itemsize,
            f"negative control: the naive loop keeps {loop['saved'] / (N * V * 4):.0%} of the fp32 logits",
        ),
    ]


# ---- the losses: hidden [N, D], weight [V, D], labels [N] -> mean over valid tokens


def standard_loss(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> Tensor:
    """Full logits, in fp32 at least."""
    logits_NV = hidden_ND @ weight_VD.T
    return F.cross_entropy(
        logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)),
        labels_N,
        ignore_index=IGNORE,
    )


def chunked_loss(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> Tensor:
    """Ours."""
    return linear_cross_entropy(hidden_ND, weight_VD, labels_N, reduction="mean")


def naive_loop(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, chunk: int = 128) -> Tensor:
    """The loop of many recipes: one chunk of logits at a time in the forward, all of them kept for
    the backward.
    """
    total = hidden_ND.new_zeros((), dtype=torch.float32)
    for hidden, labels in zip(hidden_ND.split(chunk), labels_N.split(chunk)):
        total = total + F.cross_entropy(
            (hidden @ weight_VD.T).float(), labels, ignore_index=IGNORE, reduction="sum"
        )
    return total / (labels_N != IGNORE).sum().clamp(min=1)


LOSSES = {"standard": standard_loss, "chunked": chunked_loss, "naive loop": naive_loop}


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
    hidden_ND, weight_VD = hidden_ND.detach().requires_grad_(), weight_VD.detach().requires_grad_()
    value = loss(hidden_ND, weight_VD, labels_N)
    return value.detach(), *torch.autograd.grad(value, (hidden_ND, weight_VD))


def measured(loss, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, exact) -> dict:
    """Errors against float64 (loss absolute, gradients relative), bytes kept beyond the inputs,
    peak beyond the gradients, seconds.
    """
    inputs = (hidden_ND, weight_VD, labels_N)
    result = gradients(loss, *inputs)
    errors = [
        abs(float(result[0]) - float(exact[0])),
        *(relative(a, b) for a, b in zip(result[1:], exact[1:])),
    ]
    if hidden_ND.is_cuda:
        torch.cuda.synchronize(hidden_ND.device)
    start = time.perf_counter()
    float(gradients(loss, *inputs)[2].sum())  # reading a number waits for the device
    seconds = time.perf_counter() - start
    leaves = [tensor.detach().requires_grad_() for tensor in inputs[:2]]
    saved = saved_bytes(lambda: loss(*leaves, labels_N)) - sum(tensor.nbytes for tensor in inputs)
    peak = peak_bytes(lambda: gradients(loss, *inputs), hidden_ND.device) - sum(
        tensor.nbytes for tensor in inputs[:2]
    )
    return dict(errors=errors, saved=max(saved, 0), peak=peak, seconds=seconds)


def relative(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm())


if __name__ == "__main__":
    sys.exit(main())
