"""A minute that shows what runs at all: each Triton kernel alone, and training steps of one layer
of the 4B.

Each kernel has a process of its own in which no other kernel is launched, so that a bad one hides
nothing and costs nothing. Whether its numbers are right is not asked here: every later job checks
its own against float64.
"""

import functools
import math
import os

import torch

from benchmarks.gpu import attention, kernels
from benchmarks.gpu.jobs import Job, Place
from benchmarks.gpu.step import batch
from benchmarks.record import Run, Table
from longhaul import step
from longhaul.config import TrainConfig

SECONDS = 40
OF_ONE = 30  # seconds of a child
TOKENS = 8192
FEW_TOKENS = 1500  # for a kernel alone: several tiles, and the last one is not full
MANY_TOKENS = 65_536  # for one whose sums have several parts only in long rows
FEW_WORDS = 4096
TOY_TOKENS = 96
TOY_KERNELS = 2
TABLE = Table(
    "smoke",
    "What runs at all: each Triton kernel in a process of its own, a step of one layer",
    {"what": "text", "result": "text"},
)


def jobs(place: Place) -> list[Job]:
    """One job, whose children run several at a time."""
    names = list(kernels.found())
    if place.toy:
        names = names[:TOY_KERNELS]
    children = [
        Job(
            f"smoke, step, {kind}",
            1,
            OF_ONE,
            functools.partial(one_step, place=place, kind=kind),
        )
        for kind in ("nsa", "standard")
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
    return TrainConfig(
        model_size="4B" if place.cuda else "tiny",
        attention_type=kind,
        model_overrides=("num_layers=1",),
        device=place.device.type,
        warmup_steps=0,
        **changes,
    )


def one_kernel(run: Run, place: Place, name: str) -> None:
    """A row that says how often forward, backward and decoding launched the kernel, over few tokens
    or over many if few do not need it.
    """
    with kernels.alone(name) as launches:
        for tokens in (FEW_TOKENS, MANY_TOKENS) if place.cuda else (TOY_TOKENS,):
            forward_and_backward(place, tokens)
            if place.cuda:
                decode_once(place, tokens)
                torch.cuda.synchronize(place.device)
            if launches:
                break

    count = len(launches)
    result = f"ran, {count} launches" if count else "not launched by a step or by decoding"
    run.row(TABLE, what=name, result=result)


def forward_and_backward(place: Place, tokens: int) -> None:
    """Gradients of one layer, with sparse and with standard attention."""
    dtype = "bf16" if place.cuda else "fp32"  # the interpreter's bf16 products are wrong
    for kind in ("nsa", "standard"):
        cfg = settings(
            place,
            kind,
            context_length=tokens,
            kernels="triton",
            loss="chunked",
            dtype=dtype,
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
    """A row with the loss of two steps over random tokens. ValueError if it is not within 2 of the
    log of the vocabulary, near which random weights begin.
    """
    kernel = "triton" if kind == "nsa" and place.cuda else "auto"
    tokens = TOKENS if place.cuda else TOY_TOKENS
    cfg = settings(place, kind, context_length=tokens, kernels=kernel)
    state = step.build(cfg, cfg.model(), place.device)
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
