"""A minute that shows what runs at all: each Triton kernel alone, and training steps of one layer
of the 4B.

Each kernel has a process of its own in which no other kernel is launched, so that a bad one hides
nothing and costs nothing. Whether all of them together are right is asked of a packed row, whose
gradients must be those of PyTorch's operators; every later job checks its own against float64.
"""

import functools
import math
import os
from dataclasses import replace

import torch

from benchmarks.gpu import attention, kernels
from benchmarks.gpu.jobs import Job, Place
from benchmarks.gpu.step import batch
from benchmarks.record import Run, Table
from longhaul import step
from longhaul.config import TrainConfig
from model import OnHost

SECONDS = 43
OF_ONE = 30  # seconds of a child
TOKENS = 8192
FEW_TOKENS = 1500  # for a kernel alone: several tiles, and the last one is not full
MANY_TOKENS = 65_536  # for one whose sums have several parts only in long rows
FEW_WORDS = 4096
TOY_TOKENS = 96
# How far gradients may differ: their norms relative to each other. Of one layer in bf16 and in fp32
# they differ by 1% to 2%, and with indexed attention, whose choice rounding changes, by 3% to 6%
# (measured on a CPU).
NEAR = 0.15
COUNT = 4  # blocks of 16 tokens that an indexer lets a query read: fewer than any row has
TOY_KERNELS = ("attend_kernel",)
TABLE = Table(
    "smoke",
    "What runs at all: each Triton kernel in a process of its own, a step of one layer",
    {"what": "text", "result": "text"},
)


def jobs(place: Place) -> list[Job]:
    """One job, whose children run several at a time."""
    names = list(kernels.found())
    if place.toy:
        names = [name for name in names if name in TOY_KERNELS]
    children = [
        Job(
            f"smoke, step, {kind}",
            1,
            OF_ONE,
            functools.partial(one_step, place=place, kind=kind),
        )
        for kind in ("nsa", "indexed", "standard")
    ]
    for name in names:
        work = functools.partial(one_kernel, place=place, name=name)
        children.append(Job(f"smoke, kernel, {name}", 1, OF_ONE, work, environment(place)))
    return [Job("smoke test", 1, SECONDS, children=tuple(children))]


def at_once() -> int:
    """How many children run at the same time: each needs a core to compile, and a few GB."""
    return min(max((os.cpu_count() or 1) // 2, 1), 8)


def environment(place: Place) -> dict[str, str]:
    """Without a GPU, kernels run in Triton's interpreter."""
    return {} if place.cuda else {"TRITON_INTERPRET": "1"}


def settings(place: Place, kind: str, **changes) -> TrainConfig:
    """One layer of the 4B, or of the smallest model."""
    cfg = TrainConfig(
        model_size="4B" if place.cuda else "tiny",
        attention_type=kind,
        model_overrides=("num_layers=1",),
        kernels=place.kernels(kind),
        device=place.device.type,
        warmup_steps=0,
    )
    return replace(cfg, **changes)


def kinds_of(name: str) -> tuple[str, ...]:
    """The kinds of attention whose layers may launch the kernel of that name."""
    kernel = kernels.found().get(name)
    package = kernel.fn.__module__.partition(".")[0] if kernel else ""
    return {"nsa": ("nsa",)}.get(package, ("nsa", "standard"))


def one_kernel(run: Run, place: Place, name: str) -> None:
    """A row that says how often forward, backward and decoding launched the kernel, over few tokens
    or over many if few do not need it.
    """
    with kernels.alone(name) as launches:
        for tokens in (FEW_TOKENS, MANY_TOKENS) if place.cuda else (TOY_TOKENS,):
            for kind in kinds_of(name):
                forward_and_backward(place, kind, tokens)
            if place.cuda and "nsa" in kinds_of(name):
                decode_once(place, tokens)
            if place.cuda:
                torch.cuda.synchronize(place.device)
            if launches:
                break

    count = len(launches)
    result = f"ran, {count} launches" if count else "not launched by a step or by decoding"
    run.row(TABLE, what=name, result=result)


def packed_gradients(state: step.TrainState, place: Place) -> dict[str, torch.Tensor]:
    """The gradient of every parameter for a row of two documents, which the state then forgets."""
    tokens_BT, labels_BT = batch(state.cfg, place, seed=0)
    second = torch.arange(tokens_BT.shape[1]) >= tokens_BT.shape[1] // 3
    micro = dict(tokens_BT=tokens_BT, labels_BT=labels_BT, doc_ids=OnHost(second.int()[None]))
    step.gradients(state, [micro])
    found = {name: p.grad for name, p in state.model.named_parameters()}
    state.optimizer.zero_grad(set_to_none=True)
    return found


def worst_difference(found: dict, want: dict) -> tuple[str, float]:
    """The parameter whose gradients differ most, and the norm of their difference relative to that
    of the gradient.
    """
    errors = {}
    for name, gradient in want.items():
        difference = float((found[name] - gradient).norm())
        size = float(gradient.norm())
        errors[name] = difference / size if size else difference  # some are 0 at first
    return max(errors.items(), key=lambda item: math.inf if math.isnan(item[1]) else item[1])


def forward_and_backward(place: Place, kind: str, tokens: int) -> None:
    """Gradients of one layer."""
    cfg = settings(
        place,
        kind,
        context_length=tokens,
        blocks=(f"count={COUNT}", "block=16") if kind == "indexed" else (),
        kernels="triton",
        loss="chunked",
        dtype="bf16" if place.cuda else "fp32",  # the interpreter's bf16 products are wrong
        vocab_size=FEW_WORDS,
    )
    state = step.build(cfg, cfg.model(), place.device)
    tokens_BT, labels_BT = batch(cfg, place)
    step.gradients(state, [dict(tokens_BT=tokens_BT, labels_BT=labels_BT)])


@torch.no_grad()
def decode_once(place: Place, tokens: int) -> None:
    """Sparse attention of one token against so many."""
    H, G = attention.heads(place)
    step = attention.nsa_decoder(attention.cache(place.device, tokens, G))
    step(*attention.token(place.device, H, G))


def one_step(run: Run, place: Place, kind: str) -> None:
    """Rows with the difference of a packed row's gradients from those of PyTorch's operators, and
    with the loss of two steps over random tokens. ValueError if the gradients are not NEAR, or if
    the loss is not within 2 of the log of the vocabulary, near which random weights begin.
    """
    tokens = TOKENS if place.cuda else TOY_TOKENS
    cfg = settings(place, kind, context_length=tokens)
    state = step.build(cfg, cfg.model(), place.device)
    found = packed_gradients(state, place)
    reference = replace(cfg, kernels="torch")
    want = packed_gradients(step.build(reference, reference.model(), place.device), place)
    name, error = worst_difference(found, want)
    what = f"one layer, {kind}, packed row: gradients against PyTorch's operators"
    run.row(TABLE, what=what, result=f"within {error:.1e} (of {name})")
    if not error <= NEAR:
        raise ValueError(f"the gradient of {name} differs by {error:.1e} of its norm")

    losses = []
    for _ in range(2):
        tokens_BT, labels_BT = batch(cfg, place)
        result = step.train_step(state, [dict(tokens_BT=tokens_BT, labels_BT=labels_BT)])
        losses.append(float(result.loss))

    words = ", ".join(f"{loss:.3f}" for loss in losses)
    expected = math.log(cfg.model().vocab_size)
    run.row(TABLE, what=f"one layer, {kind}, {tokens:,} tokens", result=f"losses {words}")
    if not all(abs(loss - expected) < 2 for loss in losses):
        raise ValueError(f"losses {words} of random tokens are not near {expected:.3f}")
