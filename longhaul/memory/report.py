"""A simulated step as words: category x stage, the largest tensors at the peak, live -> reserved ->
device, which cards hold it; and as a dictionary for --json.

GiB = 2^30 bytes. Imports longhaul.memory (device, estimate, extrapolate, timeline, trace) and
model.py of ours.
"""

import dataclasses

from longhaul.memory.device import SIZES, Demand, waterfall
from longhaul.memory.estimate import PROCESS_GIB
from longhaul.memory.extrapolate import Profile
from longhaul.memory.timeline import alike, of_step
from longhaul.memory.trace import CATEGORIES
from model import GIB


def top_tensors(profile: Profile, count: int = 12) -> list[dict]:
    """The largest storages alive at the peak, those alike but for their layer's number as one line
    with their count.
    """
    _, time = of_step(profile.trace).peak()
    return [
        group | dict(shape=list(group["shape"])) for group in alike(profile.trace.at(time), count)
    ]


def verdicts(demand: Demand) -> dict[str, str]:
    """Card -> one of device's verdicts."""
    return {card: demand.verdict(int(gib * GIB)) for card, gib in SIZES.items()}


def table(profile: Profile, cfg, ranks: int, demand: Demand | None) -> str:
    """The profile for the screen; `demand` is None for a CPU, which has no caching allocator."""
    config = cfg.model()
    title = (
        f"predicted, one of {ranks} rank(s): {cfg.model_size} ({config.num_params():,} parameters, {config.num_layers} layers), "
        f"{cfg.batch_size} x {cfg.context_length:,} tokens, {cfg.attention_type} attention, {cfg.dtype}, "
        f"checkpointing {cfg.gradient_checkpointing}, loss {config.loss_path(cfg.batch_size, cfg.context_length)}; live GiB"
    )
    used = [
        name for name in CATEGORIES if any(sizes.get(name) for sizes in profile.stages.values())
    ]
    rows = [
        title,
        f"{'stage at its peak':<20}" + "".join(f"{name:>12}" for name in [*used, "total"]),
    ]
    for stage, sizes in profile.stages.items():
        mark = "  <- peak" if stage == profile.peak_stage else ""
        values = [sizes.get(name, 0) for name in used] + [sum(sizes.values())]
        rows.append(f"{stage:<20}" + "".join(f"{value / GIB:>12.3f}" for value in values) + mark)
    end = (
        _device_rows(demand)
        if demand
        else [
            f"live peak {profile.peak / GIB:.3f} GiB, process {profile.peak / GIB + PROCESS_GIB:.2f} GiB"
        ]
    )
    return "\n".join([*rows, "", *_tensor_rows(profile), "", *end])


def _tensor_rows(profile: Profile) -> list[str]:
    rows = ["largest tensors at the peak:"]
    for found in top_tensors(profile):
        shape = "x".join(map(str, found["shape"]))
        rows.append(
            f"  {found['count'] * found['bytes'] / GIB:>8.3f} GiB {found['count']:>3} x {found['category']:<12}{found['dtype']:<9} {shape:<22} "
            f"{found['module']} ({found['op']})"
        )
    return rows


def _device_rows(demand: Demand) -> list[str]:
    """The waterfall for both kinds of segments, and the cards."""
    columns = [
        dict(waterfall(found, demand.ranks)) for found in (demand.classic, demand.expandable)
    ]
    rows = [f"{'GiB per rank':<22}{'classic segments':>18}{'expandable':>14}"]
    rows += [
        f"{'= ' if name in ('live', 'reserved', 'device') else '+ '}{name:<20}"
        + f"{columns[0][name] / GIB:>18.2f}{columns[1][name] / GIB:>14.2f}"
        for name in columns[0]
    ]
    groups: dict[str, list[str]] = {}
    for card, verdict in verdicts(demand).items():
        groups.setdefault(verdict, []).append(card)
    return [
        *rows,
        "cards: " + "; ".join(f"{', '.join(cards)} {verdict}" for verdict, cards in groups.items()),
    ]


def machine_readable(profile: Profile, cfg, ranks: int, demand: Demand | None) -> dict:
    """Everything as plain values; sizes in bytes."""
    found = dict(
        peak_live_bytes=profile.peak,
        peak_stage=profile.peak_stage,
        categories=profile.stages[profile.peak_stage],
        stages={
            stage: dict(total=sum(sizes.values()), **sizes)
            for stage, sizes in profile.stages.items()
        },
        top_tensors=top_tensors(profile, 40),
        ranks=ranks,
        config=dataclasses.asdict(cfg),
    )
    if demand is None:
        return found
    both = dict(classic=demand.classic, expandable=demand.expandable)
    return found | dict(
        peak_reserved_bytes=demand.classic.peak_reserved,
        peak_reserved_expandable_bytes=demand.expandable.peak_reserved,
        waterfall={name: dict(waterfall(replay, ranks)) for name, replay in both.items()},
        cards=verdicts(demand),
    )
