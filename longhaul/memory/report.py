"""A simulated step as tables for the screen, and as a dictionary for --json.

Category x stage, the largest tensors at the peak, live -> reserved -> device, and the cards that
hold it. GiB = 2^30 bytes.
"""

import dataclasses

from footprint.device import TOTALS, Demand, waterfall
from footprint.timeline import alike, of_step, used_categories
from longhaul.config import TrainConfig
from longhaul.flops import step_seconds, time_words
from longhaul.memory.deep import Profile
from longhaul.memory.estimate import PROCESS_GIB
from longhaul.posttrain.config import PolicyConfig
from model import GIB


def top_tensors(profile: Profile, count: int = 12) -> list[dict]:
    """The largest storages alive at the peak; storages that differ only by layer are one group."""
    _, time = of_step(profile.trace).peak()
    groups = alike(profile.trace.at(time), count)
    return [group | {"shape": list(group["shape"])} for group in groups]


def waterfalls(demand: Demand) -> dict[str, dict[str, int]]:
    """Live to device in bytes, for both kinds of segments."""
    return {
        "classic": dict(waterfall(demand.classic, demand.ranks)),
        "expandable": dict(waterfall(demand.expandable, demand.ranks)),
    }


# ---- for the screen


def table(profile: Profile, cfg: TrainConfig, ranks: int, demand: Demand | None) -> str:
    """The profile for the screen; `demand` is None for a CPU, which has no caching allocator."""
    rows = [_title(cfg, ranks, demand)]
    rows += _stage_rows(profile)
    rows.append("")
    rows += _tensor_rows(profile)
    rows.append("")
    if demand:
        rows += _device_rows(demand)
        rows.append(f"cards: {demand.cards_text()}")
    else:
        peak = profile.peak / GIB
        rows.append(f"live peak {peak:.3f} GiB, process {peak + PROCESS_GIB:.2f} GiB")
    rows.append(f"time: {run_time(cfg, ranks, demand)}")
    return "\n".join(rows)


def _title(cfg: TrainConfig, ranks: int, demand: Demand | None) -> str:
    """What was predicted, and for which device."""
    config = cfg.model()
    loss = "over tiles" if isinstance(cfg, PolicyConfig) else cfg.loss_path(config, ranks)
    device = "a CPU" if demand is None else "a GPU (CUDA)"
    return (
        f"predicted for {device}, one of {ranks} rank(s): {cfg.model_size} "
        f"({config.num_params():,} parameters, {config.num_layers} layers), "
        f"{cfg.batch_size} x {cfg.row_tokens:,} tokens, "
        f"{cfg.attention_type} attention, {cfg.dtype}, "
        f"checkpointing {cfg.gradient_checkpointing}, loss {loss}; live GiB"
    )


def run_time(cfg: TrainConfig, ranks: int, demand: Demand | None) -> str:
    """How long a step and the run take, in words."""
    device = "cpu" if demand is None else "cuda"
    seconds = step_seconds(cfg, cfg.model(), ranks, device)
    return time_words(seconds, cfg.max_steps, device, cfg.UNTIMED)


def _stage_rows(profile: Profile) -> list[str]:
    """Category x stage, each stage at its largest moment."""
    used = used_categories(profile.stages)
    head = "".join(f"{name:>12}" for name in [*used, "total"])
    rows = [f"{'stage at its peak':<20}{head}"]
    for stage, sizes in profile.stages.items():
        values = [sizes.get(name, 0) for name in used]
        values.append(sum(sizes.values()))
        figures = "".join(f"{value / GIB:>12.3f}" for value in values)
        mark = "  <- peak" if stage == profile.peak_stage else ""
        rows.append(f"{stage:<20}{figures}{mark}")
    return rows


def _tensor_rows(profile: Profile) -> list[str]:
    rows = ["largest tensors at the peak:"]
    for group in top_tensors(profile):
        size = group["count"] * group["bytes"] / GIB
        shape = "x".join(str(length) for length in group["shape"])
        rows.append(
            f"  {size:>8.3f} GiB {group['count']:>3} x {group['category']:<12}"
            f"{group['dtype']:<9} {shape:<22} {group['module']} ({group['op']})"
        )
    return rows


def _device_rows(demand: Demand) -> list[str]:
    """The waterfall for both kinds of segments."""
    both = waterfalls(demand)
    classic = both["classic"]
    expandable = both["expandable"]
    rows = [f"{'GiB per rank':<22}{'classic segments':>18}{'expandable':>14}"]
    for name in classic:
        sign = "=" if name in TOTALS else "+"
        figures = f"{classic[name] / GIB:>18.2f}{expandable[name] / GIB:>14.2f}"
        rows.append(f"{sign} {name:<20}{figures}")
    return rows


# ---- for --json


def machine_readable(profile: Profile, cfg: TrainConfig, ranks: int, demand: Demand | None) -> dict:
    """Everything as plain values; sizes in bytes."""
    stages = {}
    for stage, sizes in profile.stages.items():
        stages[stage] = {"total": sum(sizes.values()), **sizes}

    found = {
        "peak_live_bytes": profile.peak,
        "peak_stage": profile.peak_stage,
        "categories": profile.stages[profile.peak_stage],
        "stages": stages,
        "top_tensors": top_tensors(profile, 40),
        "ranks": ranks,
        "config": dataclasses.asdict(cfg),
    }
    if demand is None:
        return found
    return found | {
        "peak_reserved_bytes": demand.classic.peak_reserved,
        "peak_reserved_expandable_bytes": demand.expandable.peak_reserved,
        "waterfall": waterfalls(demand),
        "cards": demand.cards,
    }
