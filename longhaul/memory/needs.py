"""What a step needs, by stage: of pretraining the closed form says it at once; a step of
post-training, and one of an indexer's dense warm-up, is simulated; the long responses of GRADE
follow from short ones. Sizes are bytes.
"""

import dataclasses
import functools
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from longhaul.config import TrainConfig
from longhaul.memory import soft
from longhaul.memory.deep import profile
from longhaul.memory.estimate import Estimate, Rank, estimate, static
from longhaul.posttrain.config import GradeConfig, PolicyConfig
from model import GIB, ModelConfig

# Of GRADE's methods: the others need less than the first. Which of the two needs more depends on
# the lengths, the vocabulary and --group_size.
LARGEST = ("ste_legacy", "reinforce")
KEPT = ("parameter", "optimizer")  # categories of what every stage holds


def needs(cfg: TrainConfig, config: ModelConfig, ranks: int = 1) -> Estimate:
    """The live bytes of one rank's step on `cfg.device`, by stage; of the kind of step that needs
    most.
    """
    kinds = usual(cfg, config, ranks), warm_up(cfg, ranks)
    return max(filter(None, kinds), key=lambda one: one.peak)


def usual(cfg: TrainConfig, config: ModelConfig, ranks: int = 1) -> Estimate:
    """The same of a step in which everything learns."""
    if not isinstance(cfg, PolicyConfig):
        if cfg.device == "cpu":  # where "auto" never is the Triton twin, which keeps more
            config = dataclasses.replace(config, kernels="torch")
        return estimate(cfg, config, ranks)

    return alone(_simulated, of_memory(largest(cfg, ranks)), ranks)


@functools.lru_cache(maxsize=64)
def warm_up(cfg: TrainConfig, ranks: int = 1) -> Estimate | None:
    """The same of a step of the indexer's dense warm-up; None for a run without."""
    return alone(_simulated, in_warm_up(cfg), ranks) if cfg.dense_steps else None


def in_warm_up(cfg: TrainConfig) -> TrainConfig:
    """The settings of a run whose second step, which is simulated, is of the warm-up."""
    steps = max(2, cfg.indexer_warmup)
    return dataclasses.replace(cfg, indexer_warmup=steps, max_steps=max(steps + 1, cfg.max_steps))


def resident(cfg: PolicyConfig, config: ModelConfig, ranks: int = 1) -> int:
    """What every stage of a policy's step holds, by the closed form: its weights and optimizer
    states, its reference and its reward model, which is taken to be of the policy's shape or, where
    another is named, to be nothing.
    """
    terms = static(Rank(cfg, config, ranks, inside=False))
    states = 0 if _frozen(cfg) else terms["optimizer states"]
    frozen = int(cfg.needs_reference)
    if isinstance(cfg, GradeConfig) and not cfg.reward_checkpoint:
        frozen += 1
    return (1 + frozen) * terms["weights"] + states


def _frozen(cfg: PolicyConfig) -> bool:
    """Whether a part of the policy has no optimizer states."""
    return isinstance(cfg, GradeConfig) and cfg.freeze_embeddings


def largest(cfg: TrainConfig, ranks: int = 1) -> TrainConfig:
    """The settings of one kind of step, the one that needs most: of those of a run with a dense
    warm-up, or of the methods of --method all.
    """
    if cfg.dense_steps:
        return _larger_kind(cfg, ranks)
    if not isinstance(cfg, GradeConfig) or cfg.method != "all":
        return cfg
    each = [dataclasses.replace(cfg, method=method) for method in LARGEST]
    return max(each, key=lambda one: needs(one, one.model(), ranks).peak)


def _larger_kind(cfg: TrainConfig, ranks: int) -> TrainConfig:
    """The warm-up's settings, or those of the steps behind it."""
    if warm_up(cfg, ranks).peak > usual(cfg, cfg.model(), ranks).peak:
        return in_warm_up(cfg)
    return dataclasses.replace(cfg, indexer_warmup=0)


def kinds_in_words(cfg: TrainConfig, ranks: int = 1) -> str:
    """Which kind of step of a run with a dense warm-up needs most, in a line."""
    sizes = {
        "the indexer's dense warm-up": warm_up(cfg, ranks).peak,
        "the steps behind it": usual(cfg, cfg.model(), ranks).peak,
    }
    larger, smaller = sorted(sizes, key=sizes.get, reverse=True)
    return (
        f"of two kinds of step: {larger}, {sizes[larger] / GIB:.3f} GiB live; "
        f"{smaller}: {sizes[smaller] / GIB:.3f} GiB"
    )


def of_memory(cfg: PolicyConfig) -> PolicyConfig:
    """The settings without those that decide no byte, so that equal needs are simulated once."""
    default = type(cfg)()
    names = ("output_dir", "data", "seed", "max_steps", "lr", "resume", "skip_rows", "demo", "plan")
    names += ("save_every", "log_every")
    return dataclasses.replace(cfg, **{name: getattr(default, name) for name in names})


def alone(function: Callable, *args) -> Any:
    """function(*args), in a process of its own if this one is a rank of several: a process has one
    default group, and the simulation of several ranks needs a fake one.
    """
    if not torch.distributed.is_initialized():
        return function(*args)
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=fresh) as pool:
        return pool.submit(function, *args).result()


@functools.lru_cache(maxsize=64)
def _simulated(cfg: TrainConfig, ranks: int) -> Estimate:
    target = "cpu" if cfg.device == "cpu" else "cuda"
    if soft.is_long(cfg):
        stages, host = soft.stages(cfg, ranks, target)
    else:
        found = profile(cfg, ranks, target)
        stages, host = found.stages, found.trace.host_peak
    at_peak = max(stages.values(), key=lambda sizes: sum(sizes.values()))
    static = sum(at_peak.get(category, 0) for category in KEPT)
    return Estimate(static, stages, host)
