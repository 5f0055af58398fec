"""Decoding with a whole model after a long prompt: seconds of the prompt, milliseconds per token,
with CUDA graphs and without.

The clock is the caller's: each token is read by the host before the next one begins.
"""

import functools
import statistics
import time

import torch

from benchmarks.gpu.jobs import Job, Place
from benchmarks.record import Run, Table
from longhaul import step
from longhaul.config import TrainConfig
from longhaul.generate import cache_bytes, cast_matrices, generate

SIZES = (
    (8.5, "4B", "nsa", 131_072, (True,), 45),
    (12.2, "4B", "standard", 131_072, (True,), 70),
    (15.2, "4B", "nsa", 8192, (True, False), 45),
    (15.3, "4B", "standard", 8192, (True, False), 45),
)  # importance, model, attention, tokens of the prompt, with graphs or without, seconds
TOY = ((8.5, "tiny", "nsa", 256, (False,), 60), (8.6, "tiny", "standard", 256, (False,), 60))
# All steps of which there are graphs, and every length of the last selected block, come before
# those that are timed.
WARM = 64
TIMED = 64
TABLE = Table(
    "decode",
    "Decoding one row with a whole model in bf16, greedily, after a prompt of random tokens",
    {
        "model": "text",
        "attention": "text",
        "prompt, tokens": "count",
        "steps": "text",
        "prompt, s": "seconds",
        "token, ms": "ms",
        "tokens/s": "rate",
        "GB/s": "giga",
    },
)


def jobs(place: Place) -> list[Job]:
    """A job per model, attention and length."""
    found = []
    for importance, model, kind, tokens, captured, seconds in TOY if place.toy else SIZES:
        work = functools.partial(
            one_prompt, place=place, model=model, kind=kind, tokens=tokens, captured=captured
        )
        name = f"decode, {model}, {kind}, after {tokens:,} tokens"
        found.append(Job(name, importance, seconds, work))
    return found


def one_prompt(
    run: Run, place: Place, model: str, kind: str, tokens: int, captured: tuple[bool, ...]
) -> None:
    """A row with CUDA graphs, a row without, or both."""
    cfg = TrainConfig(
        model_size=model, attention_type=kind, context_length=tokens, device=place.device.type
    )
    decoder = step.build(cfg, cfg.model(), place.device).model
    cast_matrices(decoder)
    weights = sum(parameter.nbytes for parameter in decoder.parameters())

    made = torch.Generator().manual_seed(0)
    prompt = torch.randint(cfg.model().vocab_size, (tokens,), generator=made).tolist()
    for graphs in captured:
        began = time.perf_counter()
        ends = []
        for _ in generate(decoder, prompt, WARM + TIMED, temperature=0, captured=graphs):
            ends.append(time.perf_counter())
        seconds = statistics.median(
            after - before for before, after in zip(ends[WARM - 1 :], ends[WARM:], strict=False)
        )
        figures = {"prompt, s": ends[0] - began, "token, ms": 1e3 * seconds}
        if kind == "standard":  # each token reads every weight and the whole cache
            figures["GB/s"] = (weights + cache_bytes(cfg.model(), tokens)) / seconds
        run.row(
            TABLE,
            model=model,
            attention=kind,
            steps="CUDA graphs" if graphs else "one by one",
            **{"prompt, tokens": tokens, "tokens/s": 1 / seconds},
            **figures,
        )
