"""A simulated step as tables for the screen, and as a dictionary for --json.

Category x stage, the largest tensors at the peak, live -> reserved -> device, and the cards that
hold it. GiB = 2^30 bytes.
"""

import dataclasses

import torch

from footprint.answers.tables import device_rows, heading, stage_rows, tensor_rows, waterfalls
from footprint.cards.allocator import of_step
from footprint.cards.device import Demand
from footprint.record.timeline import alike
from longhaul.config import TrainConfig
from longhaul.planner.needs import PROCESS_GIB
from longhaul.planner.simulate import Profile
from model import GIB


def top_tensors(profile: Profile, count: int = 12) -> list[dict]:
    """The largest storages alive at the peak; storages that differ only by layer are one group."""
    _, time = of_step(profile.trace).peak()
    groups = alike(profile.trace.at(time), count)
    return [group | {"shape": list(group["shape"])} for group in groups]


# ---- for the screen


def table(profile: Profile, cfg: TrainConfig, ranks: int, demand: Demand | None) -> str:
    """The profile for the screen; `demand` is None for a CPU, which has no caching allocator."""
    rows = [_title(cfg, ranks, demand)]
    rows += stage_rows(profile.stages, profile.peak_stage)
    rows.append("")
    rows += tensor_rows(top_tensors(profile))
    rows.append("")
    if demand:
        rows += device_rows(demand)
        rows.append(f"cards: {demand.cards_text()}")
    else:
        peak = profile.peak / GIB
        rows.append(f"live peak {peak:.3f} GiB, process {peak + PROCESS_GIB:.2f} GiB")
    return "\n".join(rows)


def _title(cfg: TrainConfig, ranks: int, demand: Demand | None) -> str:
    """What was predicted, and for which device."""
    config = cfg.model()
    loss = "over tiles" if cfg.SAMPLES else cfg.loss_path(config, ranks)
    device = "a CPU" if demand is None else "a GPU (CUDA)"
    return (
        f"{heading(device, ranks)}: {cfg.model_size} "
        f"({config.num_params():,} parameters, {config.num_layers} layers), "
        f"{cfg.batch_size} x {cfg.row_tokens:,} tokens, "
        f"{cfg.attention_type} attention, {cfg.dtype}, "
        f"checkpointing {cfg.gradient_checkpointing}, loss {loss}; live GiB"
    )


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
        "torch": torch.__version__,
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
