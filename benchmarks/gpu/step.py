"""Whole training steps of 0.6B and 4B, and the same work by a plain loop over transformers:
tokens/s, MFU, peak memory.

Ours comes from `longhaul.step` with the levers of `--fit auto`; nothing is set up a second time.
The first step is over a short row: it compiles, and leaves the optimizer's states. What depends on
the length, such as plans of cuDNN and new segments of the allocator, falls into the first timed
step; with several, the median leaves it out, and a single one has it. The peer has the same weights
and must give the same first loss; it has sdpa, bf16 autocast, fused AdamW, and gradient
checkpointing where it does not fit without. MFU counts the operations of the forward and backward
without recomputation, attention's causal half alone.
"""

import dataclasses
import functools
import importlib.util
import time
from collections.abc import Callable

import torch

from benchmarks import clock, train_step
from benchmarks.gpu.jobs import Job, Place
from benchmarks.record import Run, Table, attempt, free
from longhaul import qwen3, step
from longhaul.config import TrainConfig
from longhaul.dist import World
from longhaul.flops import keys_read, train_flops
from longhaul.memory import fit
from longhaul.memory import plan as planner
from longhaul.run.log import peak_flops
from model import GIB

ROUNDS = 5
ISSUED = "gradient norm"  # the first stage of a step after its backward
LONGEST = 2**22  # tokens: where the search for what fits ends
WARM_TOKENS = 4096  # of the first step: more than an indexer lets a query read
SIZES = (
    (3, "4B", "nsa", 131_072, False, 55),
    (4, "4B", "standard", 131_072, False, 75),
    (10, "0.6B", "standard", 8192, True, 50),
    (12, "4B", "nsa", 32_768, False, 45),
    (14, "4B", "standard", 8192, True, 70),
    (18, "4B", "standard", 32_768, False, 45),
    (19, "0.6B", "nsa", 131_072, False, 40),
    (21, "0.6B", "standard", 131_072, False, 60),
    (25, "4B", "nsa", 0, False, 120),
    (26, "4B", "standard", 0, False, 300),
    (27, "0.6B", "nsa", 0, False, 120),
    (28, "0.6B", "standard", 0, False, 300),
)  # importance, model, attention, tokens (0: the longest that fits), next to transformers, seconds
TOY = ((3, "tiny", "standard", 256, True, 60), (4, "tiny", "nsa", 256, False, 60))
TABLE = Table(
    "step",
    "A training step, one row, bf16 compute, fp32 weights and AdamW",
    {
        "system": "text",
        "model": "text",
        "attention": "text",
        "tokens": "count",
        "levers": "text",
        "step, ms": "ms",
        "steps timed": "count",
        "first step, s": "seconds",
        "forward and backward issued, ms": "ms",
        "tokens/s": "rate",
        "TFLOP/s": "tera",
        "MFU": "share",
        "speed / transformers": "ratio",
        "peak, GiB": "gib",
        "planned peak, GiB": "gib",
        "difference": "percent",
        "reserved, GiB": "gib",
        "planned reserved, GiB": "gib",
    },
)


def jobs(place: Place) -> list[Job]:
    """A job per model, attention and context."""
    found = []
    for importance, model, attention, tokens, beside, seconds in TOY if place.toy else SIZES:
        length = f"{tokens:,} tokens" if tokens else "the longest context that fits"
        work = functools.partial(
            one_context,
            place=place,
            model=model,
            attention=attention,
            tokens=tokens,
            beside=beside,
            limit=seconds / 3,
        )
        name = f"step, {model}, {attention}, {length}"
        found.append(Job(name, importance, seconds, work))
    return found


def settings(model: str, attention: str, tokens: int, place: Place) -> TrainConfig:
    """What a user would ask for: the model, the context and `--fit auto`."""
    return TrainConfig(
        model_size=model,
        attention_type=attention,
        context_length=tokens,
        kernels=place.kernels(attention),
        fit="auto",
        device=place.device.type,
        warmup_steps=0,
        schedule="constant",
        lr=1e-4,
    )


def flops(cfg: TrainConfig) -> float:
    """Operations of a step over one row that is one document."""
    config = cfg.model()
    pairs = keys_read(config, torch.arange(cfg.context_length)).double().sum().item()
    return train_flops(config, cfg.context_length, pairs)


def fitted(cfg: TrainConfig, place: Place) -> planner.Plan | None:
    """The plan with the fewest levers that fit here."""
    return fit.fitted(planner.plan(cfg, cfg.model(), World(), place.device))


def longest(model: str, attention: str, place: Place) -> int:
    """The largest power of two tokens whose plan fits."""
    tokens = 8192
    while tokens < LONGEST and fitted(settings(model, attention, 2 * tokens, place), place):
        tokens *= 2
    return tokens


def levers(plan: planner.Plan, cfg: TrainConfig) -> str:
    """What `--fit auto` changed of the request."""
    names = [
        spec.name
        for spec in dataclasses.fields(TrainConfig)
        if getattr(plan.asked, spec.name) != getattr(cfg, spec.name)
    ]
    return ", ".join(f"{name}={getattr(plan.asked, name)}" for name in names) or "none"


# ---- one context


class Side:
    """A system at work: `run(tokens, targets)` is a step that returns its loss.

    `first` was the loss of the first step, on batch(seed 0); `peak_gib` and `reserved_gib` are the
    highest of the steps since, above what others hold; None where no allocator says it.
    """

    def __init__(self, one_step: Callable, levers: str, cfg: TrainConfig, place: Place, base: int):
        self.one_step = one_step
        self.levers = levers
        self.place = place
        self.peak_gib: float | None = None
        self.reserved_gib: float | None = None
        self.issued: float | None = None  # ms until the host had issued forward and backward
        tokens = min(WARM_TOKENS, cfg.context_length)
        began = time.perf_counter()
        self.first = float(one_step(*batch(cfg, place, seed=0, tokens=tokens)))
        self.first_seconds = time.perf_counter() - began  # with what it compiles
        self.own = allocated(place) - base

    def run(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if not self.place.cuda:
            return self.one_step(tokens, targets)
        device = self.place.device
        torch.cuda.reset_peak_memory_stats(device)
        others = torch.cuda.memory_allocated(device) - self.own
        loss = self.one_step(tokens, targets)
        peak = (torch.cuda.max_memory_allocated(device) - others) / GIB
        self.peak_gib = max(self.peak_gib or 0.0, peak)
        self.reserved_gib = torch.cuda.max_memory_reserved(device) / GIB
        return loss


def one_context(
    run: Run, place: Place, model: str, attention: str, tokens: int, beside: bool, limit: float
):
    """Our row, and transformers' where it is asked for: in turns where both fit, else one after the
    other.
    """
    cfg = settings(model, attention, tokens or longest(model, attention, place), place)
    plan, name = fitted(cfg, place), f"step, {model}, {attention}, {cfg.context_length:,} tokens"
    if plan is None:
        row(run, cfg, "longhaul", "", "no levers make it fit")
        return
    words, planned = levers(plan, cfg), plan.needs.peak / GIB
    ours, why = attempt(our_side, plan, place, words)
    if why:
        row(run, cfg, "longhaul", words, why, planned=planned)
        run.fail(f"{name}: {why}")
        return
    theirs, reason = their_side(plan, place, ours.first) if beside else (None, "")
    sides = {"longhaul": ours} | ({"transformers": theirs} if theirs else {})
    times = timed(sides, cfg, place, limit)
    figures = {
        "first step, s": ours.first_seconds,
        "forward and backward issued, ms": ours.issued,
    }
    if place.cuda and not theirs:  # nobody else's memory is in the allocator's
        figures["reserved, GiB"] = ours.reserved_gib
        figures["planned reserved, GiB"] = plan.reserved_gib
    row(run, cfg, "longhaul", words, times, ours.peak_gib, planned, figures)
    if beside and reason == "out of memory":
        first = ours.first
        del ours, sides
        free()
        theirs, reason = their_side(plan, place, first)
        times = timed({"transformers": theirs}, cfg, place, limit) if theirs else {}
        run.note(
            f"{name}: transformers ran after longhaul, not in turns, as both do not fit at once"
        )
    if beside:
        row(
            run,
            cfg,
            "transformers",
            theirs.levers if theirs else "",
            times if theirs else reason,
            theirs.peak_gib if theirs else None,
        )


def timed(sides: dict[str, Side], cfg: TrainConfig, place: Place, limit: float) -> dict:
    """Seconds of each side's steps, in turns."""
    return clock.interleaved(
        {name: side.run for name, side in sides.items()},
        functools.partial(batch, cfg, place),
        place.device,
        ROUNDS,
        limit,
        cold=False,
    )


def row(
    run: Run,
    cfg: TrainConfig,
    system: str,
    words: str,
    times: dict | str,
    peak: float | None = None,
    planned: float | None = None,
    more: dict | None = None,
):
    """One row; a reason instead of times says why there are none."""
    figures = {"step, ms": times} if isinstance(times, str) else speed(cfg, times, system)
    run.row(
        TABLE,
        **{
            "system": system,
            "model": cfg.model_size,
            "attention": cfg.attention_type,
            "tokens": cfg.context_length,
            "levers": words,
            "peak, GiB": peak,
            "planned peak, GiB": planned,
            "difference": 100 * (planned / peak - 1) if peak and planned else None,
        },
        **figures,
        **(more or {}),
    )


def speed(cfg: TrainConfig, times: dict, system: str) -> dict:
    """Step time, tokens/s, MFU, and how many times faster than transformers."""
    taken = clock.milliseconds(times[system])
    peak = peak_flops(torch.device(cfg.device))
    return {
        "step, ms": taken,
        "steps timed": len(times[system]),
        "TFLOP/s": flops(cfg) / (taken / 1e3),
        "tokens/s": cfg.batch_size * cfg.context_length / taken * 1e3,
        "MFU": flops(cfg) / (taken / 1e3) / peak if peak else None,
        "speed / transformers": clock.ratio(times, "transformers", system)
        if "transformers" in times
        else None,
    }


# ---- the two systems


def our_side(plan: planner.Plan, place: Place, words: str) -> Side:
    """THE path, after its first step."""
    base = allocated(place)
    state = step.build(plan.cfg, plan.config, place.device)
    began = time.perf_counter()

    def one_step(tokens, targets):
        nonlocal began
        began = time.perf_counter()
        return step.train_step(state, [dict(tokens_BT=tokens, labels_BT=targets)]).loss

    side = Side(one_step, words, plan.cfg, place, base)

    def note_issued(stage: str):
        if stage == ISSUED and place.cuda:
            side.issued = 1e3 * (time.perf_counter() - began)

    state.listeners.append(note_issued)
    return side


def their_side(plan: planner.Plan, place: Place, first: float) -> tuple[Side | None, str]:
    """(transformers' side, "") or (None, why not): with gradient checkpointing where ours has it,
    or where it does not fit without.
    """
    if not importlib.util.find_spec("transformers"):
        return None, "not installed (pip install transformers)"
    why = ""
    for checkpointing in (False, True) if plan.cfg.gradient_checkpointing == "none" else (True,):
        side, why = attempt(plain_side, plan, place, checkpointing, first)
        if side or why != "out of memory":
            return side, why
    return None, why


def plain_side(plan: planner.Plan, place: Place, checkpointing: bool, first: float) -> Side:
    """A plain loop over transformers' model with our initial weights; ValueError where its first
    loss is another.
    """
    base = allocated(place)
    model = copied(plan, place)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    words = f"sdpa, fused AdamW{', gradient checkpointing' * checkpointing}"
    loop = train_step.plain_loop(model, plan.cfg)
    side = Side(loop, words, plan.cfg, place, base)
    if abs(side.first - first) > train_step.TOLERANCE[plan.cfg.dtype] * first:
        raise ValueError(
            f"not timed: first losses {first:.4f} (longhaul) and {side.first:.4f} differ"
        )
    return side


def copied(plan: planner.Plan, place: Place):
    """transformers' Qwen3 in fp32 with the weights that ours starts from."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    decoder = step.build(
        dataclasses.replace(plan.cfg, master_weights="fp32"), plan.config, place.device
    ).model
    with place.device:
        model = Qwen3ForCausalLM(Qwen3Config(**qwen3.hf_config(decoder)))
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameters[qwen3.hf_name(name)].copy_(parameter)
    return model


def allocated(place: Place) -> int:
    """Bytes in use on the GPU."""
    return torch.cuda.memory_allocated(place.device) if place.cuda else 0


def batch(
    cfg: TrainConfig, place: Place, seed: int | None = None, tokens: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens and their targets [B, T]; T is the context length unless `tokens` says it."""
    generator = None if seed is None else torch.Generator(place.device).manual_seed(seed)
    rows = torch.randint(
        cfg.model().vocab_size,
        (cfg.batch_size, (tokens or cfg.context_length) + 1),
        device=place.device,
        generator=generator,
    )
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
