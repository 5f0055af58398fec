"""What makes a request fit: one ladder of memory levers, and the closest smaller request.

`--fit auto`, `--solve`, `--advise` and the report of a run that ran out of memory all climb the
same ladder, by the same search (search.py).

Every lever keeps AdamW in fp32. In bf16, two levers round more often than the plain path: the
offloaded optimizer, because the device then holds weights and gradients in bf16, and head groups,
because sums over groups round. Levers that round optimizer states, or that change the step
(updates in the backward pass do not clip), are left for the user to choose.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any

from data.mixture import open_corpora
from footprint.cards.device import Placement
from footprint.steps.search import Found, Lever, Search, pulled
from longhaul.config import TrainConfig
from longhaul.kernels import loss_path
from longhaul.kinds import attention_kind
from longhaul.planner.plan import Plan, plan
from longhaul.planner.program import ROLLOUT
from model import GIB, PRESETS, ModelConfig

PATIENCE = 24 * 3600  # seconds: a run that is proposed for a CPU ends within them
# settings of post-training that count tokens
LENGTHS = ("context_length", "max_response_length", "v_max_response_length", "max_new_tokens")


# ---- the ladder


def chunked_loss(cfg: TrainConfig) -> TrainConfig:
    """With --loss auto the loss is already in tiles, unless the logits are small; a policy's always
    is.
    """
    if cfg.SAMPLES:
        return cfg
    shape = (cfg.batch_size, cfg.context_length // cfg.context_ranks)
    if loss_path(cfg.model(), math.prod(shape)) != "standard":
        return cfg
    return dataclasses.replace(cfg, loss="chunked")


def checkpointing(cfg: TrainConfig) -> TrainConfig:
    return dataclasses.replace(cfg, gradient_checkpointing="full")


def one_row(cfg: TrainConfig) -> TrainConfig:
    """Micro-batches of one row; a step keeps its rows. Updates in the backward pass forbid it."""
    if cfg.optimizer_in_backward:
        return cfg
    if cfg.global_batch_size:
        return dataclasses.replace(cfg, batch_size=1)

    micro_batches = cfg.gradient_accumulation_steps * cfg.batch_size
    return dataclasses.replace(cfg, batch_size=1, gradient_accumulation_steps=micro_batches)


def one_prompt(cfg: TrainConfig) -> TrainConfig:
    """A rollout that answers one prompt at a time, which takes more forwards."""
    if getattr(cfg, "prompts_at_once", 1) == 1:
        return cfg
    return dataclasses.replace(cfg, rollout_prompts=1)


def tiled_mlp(cfg: TrainConfig) -> TrainConfig:
    """Tiles of the default size; compiled layers cannot be tiled."""
    if cfg.compile or cfg.mlp_tiles > 1:
        return cfg
    return dataclasses.replace(cfg, mlp_tiles=0)


def offloaded_activations(cfg: TrainConfig) -> TrainConfig:
    """On a CPU the host is the device, so that nothing is offloaded."""
    return dataclasses.replace(cfg, offload_activations=cfg.device != "cpu")


def offloaded_optimizer(cfg: TrainConfig) -> TrainConfig:
    """Only AdamW with fp32 weights can update on the host; a CPU is its own host."""
    fp32_adamw = cfg.optimizer == "adamw" and cfg.master_weights == "fp32"
    if not fp32_adamw or cfg.device == "cpu":
        return cfg
    return dataclasses.replace(cfg, master_weights="host")


def head_groups(cfg: TrainConfig) -> TrainConfig:
    """One KV head at a time on each rank; needs checkpointing and layers that are not compiled."""
    refused = "attention_head_groups" in attention_kind(cfg).refused_levers
    if refused or cfg.gradient_checkpointing != "full" or cfg.compile:
        return cfg

    config = cfg.model()
    groups = config.num_kv_heads
    if cfg.context_ranks > 1 and cfg.context_choice(config).mode == "ulysses":
        groups //= cfg.context_ranks
    return dataclasses.replace(cfg, attention_head_groups=groups)


def no_unread_reference(cfg: TrainConfig) -> TrainConfig:
    """Without a reference that only the log reads, for the KL of a policy that is not held back."""
    if getattr(cfg, "reads_reference", True):
        return cfg
    return dataclasses.replace(cfg, keep_reference=False)


LEVERS = (
    Lever("chunked loss", chunked_loss),
    Lever("checkpointing", checkpointing),
    Lever("micro-batches of one row", one_row),
    Lever("a rollout of one prompt", one_prompt),
    Lever("tiled MLP", tiled_mlp),
    Lever("offloaded activations", offloaded_activations),
    Lever("offloaded optimizer", offloaded_optimizer),
    Lever("head groups", head_groups),
    Lever("no reference", no_unread_reference),
)


# ---- what fits


def fitted(request: Plan) -> Plan | None:
    """The request itself if it fits, else with the fewest levers that make it fit; None if nothing
    does.
    """
    if request.device.type == "cpu" and request.is_hopeless:  # no lever moves weights off a CPU
        return None

    def judged(cfg: TrainConfig) -> Found:
        one = replanned(request, cfg)
        placement = Placement.FITS if one.fits else Placement.TOO_SMALL
        return Found(one.peak, int(one.needed_gib * GIB), placement, report=one)

    best = Search(judged, int(request.available_gib * GIB)).climb(request.asked, LEVERS).best
    return best.found.report if best.fits else None


def replanned(request: Plan, cfg: TrainConfig) -> Plan:
    """Another request on the same machine."""
    machine = request.world, request.device, request.available_gib, request.card
    return plan(cfg, cfg.model(), *machine)


# ---- a smaller request


def closest(request: Plan) -> Plan | None:
    """The nearest smaller request that fits this machine, or None.

    First the same model with checkpointing, then with micro-batches of one row, then smaller models
    at the same context, then shorter contexts. Each is tried with the attention that was asked for
    before sparse attention, and without checkpointing, if that is what was asked for, before with
    it. Who asks for too much of a CPU wants a GPU, not a toy: model and context stay there.
    """
    return next(filter(_runs_here, _proposals(request)), None)


def _runs_here(candidate: Plan) -> bool:
    """Whether it fits, and on a CPU ends within PATIENCE."""
    if candidate.is_hopeless:
        return False
    if candidate.device.type == "cpu" and candidate.total_seconds > PATIENCE:
        return False
    return candidate.fits


def _proposals(request: Plan) -> Iterator[Plan]:
    """The plans of smaller requests, from the least change to the largest.

    Of a length, or of a model at it, nothing is tried if its least demanding request does not fit.
    """
    asked = request.asked
    if asked.SAMPLES:
        if request.needs.peak_stage == ROLLOUT:
            yield from _planned(request, [one_prompt(asked)])
        levers = list(_with_levers(asked))
        yield from _planned(request, levers)
        if request.device.type != "cpu":
            shorter = (shorter_by(asked, [asked, *levers][-1], share) for share in (2, 4, 8, 16))
            yield from _planned(request, shorter)
        return
    yield from _planned(request, [checkpointing(asked)])

    sizes, lengths = _sizes_and_lengths(request)
    vocabulary = _vocabulary(asked)
    changed = functools.partial(_variants, asked, vocabulary)
    for length in lengths:
        if not _holds_least(request, changed(length, sizes[-1])):
            continue
        for size in sizes:
            if _holds_least(request, changed(length, size)):
                yield from _planned(request, changed(length, size))


def _sizes_and_lengths(request: Plan) -> tuple[list[str], list[int]]:
    """The models and the contexts that are proposed, those that were asked for first."""
    asked = request.asked
    if request.device.type == "cpu":
        return [asked.model_size], [asked.context_length]
    lengths = [asked.context_length >> n for n in range(asked.context_length.bit_length())]
    presets = list(PRESETS)
    smaller = presets[: presets.index(asked.model_size)]
    if asked.init_from:  # whose weights are of one size
        smaller = []
    return [asked.model_size, *reversed(smaller)], lengths


def _planned(request: Plan, settings: Iterable[TrainConfig]) -> Iterator[Plan]:
    """The plans of those settings that the ranks allow."""
    for one in settings:
        with contextlib.suppress(ValueError):
            yield replanned(request, one)


def _holds_least(request: Plan, variants: list[TrainConfig]) -> bool:
    """Whether the machine holds the last of the variants, which needs least."""
    return any(map(_runs_here, _planned(request, variants[-1:])))


def _with_levers(asked: TrainConfig) -> Iterator[TrainConfig]:
    """The request with one more lever at a time.

    Each plan is a simulation of seconds, so there are few.
    """
    levers = asked
    for lever in LEVERS:
        changed = pulled(lever, levers)
        if changed != levers:
            levers = changed
            yield levers


def shorter_by(cfg: TrainConfig, levers: TrainConfig, share: int) -> TrainConfig:
    """The request with these levers, and prompts and responses by a share as long."""
    lengths = {name: getattr(cfg, name) for name in LENGTHS if hasattr(cfg, name)}
    shorter = {name: -(-length // share) for name, length in lengths.items()}
    return dataclasses.replace(levers, **shorter)


def _with_rows_of_one(cfg: TrainConfig, changes: dict) -> TrainConfig:
    """The request with these changes and micro-batches of one row.

    Updates in the backward pass allow only one micro-batch, so that a step then has fewer rows.
    """
    if cfg.optimizer_in_backward:
        return dataclasses.replace(cfg, **changes, batch_size=1)
    return dataclasses.replace(one_row(cfg), **changes)


def _vocabulary(cfg: TrainConfig) -> int:
    """--vocab_size of a smaller preset: its own, or as asked, or as large as the data needs."""
    if not cfg.data:
        return 0
    return cfg.vocab_size or open_corpora(cfg.data)[0].dataset.vocab_size


def _preset(cfg: TrainConfig, size: str, vocabulary: int) -> dict:
    """The settings that make the model a smaller preset, with the vocabulary of the data.

    A smaller preset has fewer KV heads, so that attention may have to run in fewer groups of them.
    """
    groups = math.gcd(cfg.attention_head_groups, ModelConfig.preset(size).num_kv_heads)
    return dict(
        model_size=size,
        model_overrides=(),
        vocab_size=vocabulary,
        attention_head_groups=groups,
    )


def _variants(cfg: TrainConfig, vocabulary: int, length: int, size: str) -> list[TrainConfig]:
    """A size of model at a length: as asked, then with checkpointing, then both with sparse
    attention; without those whose settings exclude each other.
    """
    cheaper = attention_kind(cfg).cheaper or cfg.attention_type
    model = _preset(cfg, size, vocabulary) if size != cfg.model_size else {}
    found = []
    for attention in dict.fromkeys((cfg.attention_type, cheaper)):
        for recompute in dict.fromkeys((cfg.gradient_checkpointing, "full")):
            changes = dict(
                context_length=length, attention_type=attention, gradient_checkpointing=recompute
            )
            with contextlib.suppress(ValueError):
                found.append(_with_rows_of_one(cfg, changes | model))
    return found


def proposal(nearest: Plan, request: Plan) -> str:
    """The closest command, what it changes, and how long it takes."""
    changes = []
    for spec in dataclasses.fields(nearest.asked):
        before = getattr(request.asked, spec.name)
        after = getattr(nearest.asked, spec.name)
        if after != before:
            changes.append(f"{spec.name} {_shown(spec, before)} -> {_shown(spec, after)}")

    changes.append(nearest.costs())
    return f"closest command that runs here ({', '.join(changes)}):\n{nearest.command()}"


def _shown(spec: dataclasses.Field, value: Any) -> Any:
    """A setting's value; "default" for a zero or an empty text that stands for the default."""
    return "default" if not value and value == spec.default else value
