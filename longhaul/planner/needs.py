"""What one rank's step needs: the real step, simulated once with few layers, whose record is
extended to all (footprint.record.unroll) and replayed through the caching allocator.

Equal steps are simulated once. Sizes are bytes.
"""

import dataclasses
import functools
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from footprint.cards.device import Demand
from footprint.record.timeline import Sizes
from longhaul.config import TrainConfig
from longhaul.planner.simulate import Profile, profile
from longhaul.staging import PINNED

TRACES = 2  # that are kept, of some megabytes each
FP32 = 4
ADAMW = 12  # bytes of a parameter that the host updates: its weight and two moments
# Resident memory of a process with torch loaded, on a CPU, measured with torch 2.13: the CUDA build
# has more libraries.
PROCESS_GIB = 0.45 if torch.version.cuda is None else 0.66
# Context, workspaces and the allocator's rounding on a GPU, where nothing is replayed
CUDA_CONTEXT_GIB = 1.0
KEPT = ("parameter", "optimizer")  # categories of what every stage holds
FIXED = (*KEPT, "gradient", "unsharded")  # that are as large for every number of tokens
WARM_UP = "dense warm-up"  # a stage: steps in which only an indexer learns
COPY = "copy for --async_save"  # a category of its own
# settings that decide no byte
WEIGHTLESS = {"output_dir", "data", "seed", "max_steps", "warmup_steps", "lr", "resume"}
WEIGHTLESS |= {"skip_rows", "demo", "plan", "fit", "save_every"}


@dataclass(frozen=True)
class Needs:
    """One rank's step on `cfg.device`."""

    sizes: dict[str, Sizes]  # stage -> bytes by category at its peak
    host: int = 0  # bytes that levers keep in host memory
    # what CUDA's allocator reserves with classic and with expandable segments; 0 on a CPU
    classic: int = 0
    expandable: int = 0

    @functools.cached_property
    def stages(self) -> dict[str, int]:
        """Stage -> live bytes at its peak."""
        return {stage: sum(sizes.values()) for stage, sizes in self.sizes.items()}

    @property
    def peak(self) -> int:
        return max(self.stages.values())

    @property
    def peak_stage(self) -> str:
        return max(self.stages, key=self.stages.get)

    @property
    def static(self) -> int:
        """Weights and optimizer states, which every stage holds."""
        return self._at_peak(KEPT)

    @property
    def fixed(self) -> int:
        """What is alive at the peak for any number of tokens."""
        return self._at_peak(FIXED)

    def _at_peak(self, categories: Sequence[str]) -> int:
        return sum(self.sizes[self.peak_stage].get(name, 0) for name in categories)


# ---- one simulation for equal steps


def remembered(most: int) -> Callable[[Callable], Callable]:
    """function(cfg, ranks), called once for all settings of equal bytes; the last `most` results
    are kept.
    """

    def decorated(function: Callable) -> Callable:
        known: dict[tuple, Any] = {}

        @functools.wraps(function)
        def found(cfg: TrainConfig, ranks: int = 1) -> Any:
            specs = dataclasses.fields(cfg)
            values = (getattr(cfg, spec.name) for spec in specs if spec.name not in WEIGHTLESS)
            key = (type(cfg), ranks, *values)
            if key not in known:
                known[key] = function(cfg, ranks)
            if len(known) > most:
                del known[next(iter(known))]
            return known[key]

        return found

    return decorated


def alone(function: Callable, *args) -> Any:
    """function(*args), in a process of its own if this one is a rank of several: a process has one
    default group, and the simulation of several ranks needs a fake one.
    """
    if not torch.distributed.is_initialized():
        return function(*args)
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=fresh) as pool:
        return pool.submit(function, *args).result()


def demand(cfg: TrainConfig, ranks: int = 1) -> Demand:
    """What one rank's step asks of its GPU, with its trace."""
    return _demand_of(largest(dataclasses.replace(cfg, device="cuda"), ranks), ranks)


@remembered(most=TRACES)
def _demand_of(cfg: TrainConfig, ranks: int) -> Demand:
    return Demand.of(_simulated(cfg, ranks).trace, ranks)


@remembered(most=TRACES)
def _simulated(cfg: TrainConfig, ranks: int) -> Profile:
    """The profile of the step as it is, but for compiled layers: the eager step is an upper bound
    of these.
    """
    target = "cpu" if cfg.device == "cpu" else "cuda"
    return profile(dataclasses.replace(cfg, compile=False), ranks, target)


@remembered(most=4096)
def _needs_of(cfg: TrainConfig, ranks: int) -> Needs:
    return alone(_computed, cfg, ranks)


def _computed(cfg: TrainConfig, ranks: int) -> Needs:
    stages = _simulated(cfg, ranks).stages
    copy = _copy_to_save(cfg, ranks, Needs(stages).static)
    if cfg.device == "cpu":
        copied = {COPY: copy} if copy else {}
        return Needs({stage: sizes | copied for stage, sizes in stages.items()})
    found = _demand_of(cfg, ranks)
    reserved = found.classic.peak_reserved, found.expandable.peak_reserved
    return Needs(stages, _host_bytes(cfg, ranks, copy), *reserved)


def _copy_to_save(
    cfg: TrainConfig,
    ranks: int,
    static: int,
) -> int:
    """What a background save holds of this rank's weights and optimizer states."""
    if not cfg.async_save:
        return 0
    on_host = ADAMW * cfg.model().num_params() // (ranks // cfg.dp_replicate)
    return static + on_host if cfg.master_weights == "host" and cfg.device != "cpu" else static


def _host_bytes(
    cfg: TrainConfig,
    ranks: int,
    copy: int,
) -> int:
    """Host memory that levers of a GPU take: layer inputs, in blocks of pinned memory that CUDA
    rounds up to powers of two, fp32 weights and two moments, the copy that a background save
    writes, and the pinned slabs through which these pass.
    """
    config = cfg.model()
    total = copy
    if cfg.offload_activations:
        tokens = cfg.batch_size * cfg.row_tokens // cfg.context_ranks
        block = tokens * config.hidden_size * config.dtype.itemsize
        total += config.num_layers * (1 << (block - 1).bit_length())
    if cfg.master_weights == "host":
        total += ADAMW * (config.num_params() // (ranks // cfg.dp_replicate))
    if cfg.master_weights == "host" or cfg.async_save:
        total += PINNED
    return total


def at_least(cfg: TrainConfig, ranks: int = 1) -> int:
    """Bytes below which no step is, so that what they exclude is not simulated: the weights, and of
    pretraining all gradients next to AdamW's moments.
    """
    config = cfg.model()
    weight = config.dtype.itemsize if cfg.weights_in_compute_dtype else FP32
    if cfg.SAMPLES:
        size = weight * (1 + cfg.frozen_models)
    else:
        moments = 2 * FP32 if cfg.optimizer == "adamw" and cfg.master_weights != "host" else 0
        size = weight + moments + (0 if cfg.optimizer_in_backward else weight)
    return size * config.num_params() // (ranks // cfg.dp_replicate)


# ---- kinds of steps


def needs(cfg: TrainConfig, ranks: int = 1) -> Needs:
    """What one rank's step needs on `cfg.device`; with an indexer's dense warm-up, one more stage
    is the peak of a step of the warm-up.
    """
    if not cfg.dense_steps:
        return _needs_of(largest(cfg, ranks), ranks)
    usual = needs(dataclasses.replace(cfg, indexer_warmup=0), ranks)
    dense = _needs_of(in_warm_up(cfg), ranks)
    return Needs(
        usual.sizes | {WARM_UP: dense.sizes[dense.peak_stage]},
        usual.host,
        max(usual.classic, dense.classic),
        max(usual.expandable, dense.expandable),
    )


def in_warm_up(cfg: TrainConfig) -> TrainConfig:
    """The settings of a run whose second step, which is simulated, is of the warm-up."""
    steps = max(2, cfg.indexer_warmup)
    return dataclasses.replace(cfg, indexer_warmup=steps, max_steps=max(steps + 1, cfg.max_steps))


def largest(cfg: TrainConfig, ranks: int = 1) -> TrainConfig:
    """The settings of one kind of step, the one that needs most: of those of a run with a dense
    warm-up, or of the methods of --method all.
    """
    if cfg.dense_steps:
        if needs(cfg, ranks).peak_stage == WARM_UP:
            return in_warm_up(cfg)
        return dataclasses.replace(cfg, indexer_warmup=0)
    kinds = cfg.kinds()
    if len(kinds) == 1:
        return kinds[0]
    return max(kinds, key=lambda one: needs(one, ranks).peak)
