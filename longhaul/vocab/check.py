"""Checks of any loss over a vocabulary, each for a mistake that people lost runs to.

A loss is a function of hidden [N, D], weight [V, D] and labels [N] whose value is the mean over the
labels that are not -100. A check takes a `Subject` and returns its figures in one line, or raises
`Wrong`. The truth is the plain loss in float64; the error of a low-precision loss may exceed the
error of the plain low-precision loss only by a small factor.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from footprint.kernels.measure import peak_bytes

IGNORE = -100
MIB = 2**20
SHARE = 0.5  # of the fp32 logits: the largest peak of a loss that never has them as a whole
SLACK = 1.5  # an error may be this factor of the plain loss's own error, or so large:
LOSS_LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-3, torch.float16: 1e-3}  # nats
GRADIENT_LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-3, torch.float16: 3e-4}


class Subject(NamedTuple):
    """What is checked, how, and the size at which its memory is."""

    loss: Callable[[Tensor, Tensor, Tensor], Tensor]
    dtype: torch.dtype
    device: torch.device
    tokens: int
    width: int
    vocabulary: int


class Wrong(Exception):
    """What a check has found."""


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
    """Of the gradients relative; of a loss, or of each token's, absolute."""
    errors = {}
    for name, value in result.items():
        measure = relative if name in ("dh", "dW") else off_by
        errors[name] = measure(value, exact[name])
    return errors


def plain_problem(
    subject: Subject,
    N: int = 256,
    V: int = 2048,
) -> tuple[Tensor, Tensor, Tensor]:
    """Like `problem`, and no label is ignored."""
    hidden_ND, weight_VD, labels_N = problem(N, 64, V, subject.dtype, subject.device)
    return hidden_ND, weight_VD, labels_N.where(labels_N != IGNORE, 0)


def check_exactness(subject: Subject) -> str:
    return compare(subject.loss, plain_problem(subject))


def check_exploding(subject: Subject) -> str:
    """Logits around +8192 and -8192, all of them multiples of 64, which bf16 does not round."""
    generator = torch.Generator().manual_seed(0)
    hidden_ND = torch.randint(-1, 2, (256, 64), generator=generator)
    weight_VD = 64 * torch.randint(-1, 2, (2048, 64), generator=generator)
    hidden_ND[:, 0] = 64
    labels_N = plain_problem(subject)[2]
    for offset in (128, -128):
        weight_VD[:, 0] = offset
        inputs = (x.to(subject.device, subject.dtype) for x in (hidden_ND, weight_VD))
        line = compare(subject.loss, (*inputs, labels_N), scale=8192 / 8)
    return line


def check_some_ignored(subject: Subject) -> str:
    """Two of three labels are ignored: they count nowhere."""
    hidden_ND, weight_VD, labels_N = plain_problem(subject)
    labels_N[torch.arange(len(labels_N)) % 3 > 0] = IGNORE
    line = compare(subject.loss, (hidden_ND, weight_VD, labels_N))
    dh_ND = outcome(subject.loss, hidden_ND, weight_VD, labels_N)["dh"]
    if dh_ND[labels_N == IGNORE].any():
        raise Wrong("hidden states of ignored labels have a gradient")
    return line


def check_all_ignored(subject: Subject) -> str:
    """As on a rank whose micro-batch is all prompt or padding."""
    hidden_ND, weight_VD, labels_N = plain_problem(subject)
    found = outcome(subject.loss, hidden_ND, weight_VD, torch.full_like(labels_N, IGNORE))
    largest = max(float(found[name].abs().max()) for name in ("dh", "dW"))
    line = f"loss {float(found['loss']):g}, largest gradient {largest:g}"
    if largest != 0 or not math.isfinite(found["loss"]):
        raise Wrong(line)
    return line


def check_odd_sizes(subject: Subject) -> str:
    """One token; then primes, which no tile divides."""
    compare(subject.loss, plain_problem(subject, N=1))
    return compare(subject.loss, plain_problem(subject, N=131, V=2503))


def check_edges(subject: Subject) -> str:
    """Labels on both sides of each multiple of 64, where tiles begin and end."""
    V = 4099
    starts = torch.arange(64, V, 64)
    labels_N = torch.cat([starts, starts - 1, torch.tensor([0, V - 1])]).to(subject.device)
    hidden_ND, weight_VD, _ = plain_problem(subject, len(labels_N), V)
    return compare(subject.loss, (hidden_ND, weight_VD, labels_N))


def check_upstream(subject: Subject) -> str:
    """(3 * loss).backward(), as loss scaling and accumulation have it."""

    def tripled(loss: Callable) -> Callable:
        return lambda *inputs: 3 * loss(*inputs)

    return compare(subject.loss, plain_problem(subject), tripled)


def check_two_calls(subject: Subject) -> str:
    """Two calls before one backward: what the first keeps must outlive the second."""

    def in_halves(loss: Callable) -> Callable:
        return lambda h, w, y: loss(h[:128], w, y[:128]) + loss(h[128:], w, y[128:])

    return compare(subject.loss, plain_problem(subject), in_halves)


def check_second_backward(subject: Subject) -> str:
    """A second backward gives the same gradients, or is refused."""
    hidden_ND, weight_VD, labels_N = plain_problem(subject)
    leaves = hidden_ND.requires_grad_(), weight_VD.requires_grad_()
    value = 3 * subject.loss(*leaves, labels_N)
    # copies, because the gradients may be what the second backward changes
    first = [x.clone() for x in torch.autograd.grad(value, leaves, retain_graph=True)]
    try:
        second = torch.autograd.grad(value, leaves)
    except (RuntimeError, ValueError) as error:
        return f"refused with {type(error).__name__}"
    for name, before, after in zip(("dh", "dW"), first, second, strict=True):
        error = relative(after, before.double())
        if not error <= GRADIENT_LIMITS[subject.dtype]:
            raise Wrong(f"{name} of the second backward differs by {error:.1e}")
    return "the same gradients"


def check_strides(subject: Subject) -> str:
    """Hidden states [N, D] whose neighbours in memory are neither in a row nor in a column."""
    hidden_ND, weight_VD, labels_N = plain_problem(subject)
    wide_NE = hidden_ND.repeat_interleave(2, dim=1)
    wide_NE[:, 1::2] = 7
    return compare(subject.loss, (wide_NE[:, ::2], weight_VD, labels_N))


def check_frozen(subject: Subject, trained: tuple[bool, bool]) -> str:
    return compare(subject.loss, plain_problem(subject), trained=trained)


def check_memory(subject: Subject) -> str:
    """The peak of forward and backward, above inputs and gradients."""
    sizes = subject.tokens, subject.width, subject.vocabulary
    inputs = problem(*sizes, subject.dtype, subject.device)
    gradients(subject.loss, *(x[:16] if x is not inputs[1] else x for x in inputs))  # compiles
    taken = peak_bytes(lambda: gradients(subject.loss, *inputs), subject.device)
    peak = taken - sum(x.nbytes for x in inputs[:2])

    logits = 4 * subject.tokens * subject.vocabulary
    text = f"peak {peak / MIB:,.0f} MiB, {peak / logits:.0%} of the logits in fp32"
    if peak > SHARE * logits:
        raise Wrong(f"{text} (at most {SHARE:.0%})")
    return text


# ---- the plain loss and its problem


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
    return tuple(outcome(loss, hidden_ND, weight_VD, labels_N).values())


def relative(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm())


def off_by(value: Tensor, exact: Tensor) -> float:
    """The root mean square of the differences."""
    return float((value.double() - exact).square().mean().sqrt())


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
