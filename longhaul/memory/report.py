"""A simulated step as words: category x stage, the largest tensors at the peak, which cards hold it; and as a dictionary for --json.

GiB = 2^30 bytes. Imports longhaul.memory (estimate, extrapolate, trace) and model.py of ours.
"""

import dataclasses

from longhaul.memory.estimate import CUDA_CONTEXT_GIB
from longhaul.memory.extrapolate import Profile
from longhaul.memory.trace import CATEGORIES, Trace
from model import GIB

CARDS = {"24 GB": 23.5, "40 GB": 39.4, "48 GB": 47.4, "80 GB": 79.1, "96 GB": 94.9, "141 GB": 139.8, "192 GB": 178.3}  # GiB that torch sees there


def peak_time(trace: Trace, stage: str) -> int:
    """The moment of the largest live sum within a stage."""
    starts = trace.stages
    inside = [point for point in trace.levels() if trace.stage_at(point[0]) == stage]
    return max(inside, key=lambda point: point[1])[0] if inside else starts[0][0]


def top_tensors(profile: Profile, count: int = 12) -> list[dict]:
    """The largest storages alive at the peak's stage, those alike but for their layer's number as one line with their count."""
    groups: dict[tuple, int] = {}
    for storage in profile.trace.at(peak_time(profile.trace, profile.peak_stage)):
        key = storage.size, storage.category, storage.stage, storage.module, storage.shape, storage.dtype, storage.op
        groups[key] = groups.get(key, 0) + 1
    names = ("bytes", "category", "stage", "module", "shape", "dtype", "op")
    return [dict(zip(names, key)) | dict(count=number) for key, number in list(groups.items())[:count]]


def verdicts(profile: Profile) -> dict[str, bool]:
    """Card -> whether the live peak and the context of CUDA fit on it; an allocator's fragmentation comes on top."""
    return {card: profile.peak / GIB + CUDA_CONTEXT_GIB <= size for card, size in CARDS.items()}


def table(profile: Profile, cfg, ranks: int) -> str:
    """The profile for the screen."""
    config = cfg.model()
    title = (f"predicted, one of {ranks} rank(s): {cfg.model_size} ({config.num_params():,} parameters, {config.num_layers} layers), "
             f"{cfg.batch_size} x {cfg.context_length:,} tokens, {cfg.attention_type} attention, {cfg.dtype}, "
             f"checkpointing {cfg.gradient_checkpointing}, loss {config.loss_path(cfg.batch_size, cfg.context_length)}; live GiB")
    used = [name for name in CATEGORIES if any(sizes.get(name) for sizes in profile.stages.values())]
    rows = [title, f"{'stage at its peak':<20}" + "".join(f"{name:>12}" for name in [*used, "total"])]
    for stage, sizes in profile.stages.items():
        mark = "  <- peak" if stage == profile.peak_stage else ""
        values = [sizes.get(name, 0) for name in used] + [sum(sizes.values())]
        rows.append(f"{stage:<20}" + "".join(f"{value / GIB:>12.3f}" for value in values) + mark)
    return "\n".join([*rows, "", *_tensor_rows(profile), "", *_verdict_rows(profile)])


def _tensor_rows(profile: Profile) -> list[str]:
    depth = len({storage.module.split(".")[1] for storage in profile.trace.storages.values() if storage.module.startswith("layers.")})
    rows = [f"largest tensors at the peak (of {depth} simulated layers):"]
    for found in top_tensors(profile):
        shape = "x".join(map(str, found["shape"]))
        rows.append(f"  {found['bytes'] / GIB:>8.3f} GiB {found['count']:>2} x {found['category']:<12}{found['dtype']:<9} {shape:<22} {found['module']} ({found['op']})")
    return rows


def _verdict_rows(profile: Profile) -> list[str]:
    need = profile.peak / GIB
    words = ", ".join(f"{card} {'fits' if fits else 'too small'}" for card, fits in verdicts(profile).items())
    return [f"live peak {need:.2f} GiB in {profile.peak_stage}, with {CUDA_CONTEXT_GIB:g} GiB of CUDA context {need + CUDA_CONTEXT_GIB:.2f} GiB per rank",
            f"cards (allocator fragmentation not included): {words}"]


def machine_readable(profile: Profile, cfg, ranks: int) -> dict:
    """Everything as plain values; sizes in bytes."""
    categories = profile.stages[profile.peak_stage]
    return dict(peak_live_bytes=profile.peak, peak_stage=profile.peak_stage, categories=categories,
                stages={stage: dict(total=sum(sizes.values()), **sizes) for stage, sizes in profile.stages.items()},
                top_tensors=top_tensors(profile, 40), cards=verdicts(profile), ranks=ranks, config=dataclasses.asdict(cfg))
