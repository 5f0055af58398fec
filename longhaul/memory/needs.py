"""What a step needs, by stage: of pretraining the closed form says it at once, a step of
post-training is simulated; the long responses of GRADE follow from short ones. Sizes are bytes.
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
from model import ModelConfig

# Of GRADE's methods: the others need less than the first. Which of the two needs more depends on
# the lengths, the vocabulary and --group_size.
LARGEST = ("ste_legacy", "reinforce")
KEPT = ("parameter", "optimizer")  # categories of what every stage holds


def needs(cfg: TrainConfig, config: ModelConfig, ranks: int = 1) -> Estimate:
    """The live bytes of one rank's step on `cfg.device`, by stage."""
    if not isinstance(cfg, PolicyConfig):
        return estimate(cfg, config, ranks)

    return alone(_simulated, of_memory(largest(cfg, ranks)), ranks)


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
    """The settings, with the method whose step needs most instead of --method all."""
    if not isinstance(cfg, GradeConfig) or cfg.method != "all":
        return cfg
    each = [dataclasses.replace(cfg, method=method) for method in LARGEST]
    return max(each, key=lambda one: needs(one, one.model(), ranks).peak)


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
def _simulated(cfg: PolicyConfig, ranks: int) -> Estimate:
    target = "cpu" if cfg.device == "cpu" else "cuda"
    if soft.is_long(cfg):
        stages, host = soft.stages(cfg, ranks, target)
    else:
        found = profile(cfg, ranks, target)
        stages, host = found.stages, found.trace.host_peak
    at_peak = max(stages.values(), key=lambda sizes: sum(sizes.values()))
    static = sum(at_peak.get(category, 0) for category in KEPT)
    return Estimate(static, stages, host)
