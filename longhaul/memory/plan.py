"""Before a run: what it needs against what is here, and the closest command that runs here.

Decided from the closed form (estimate.py) before anything is allocated. Imports longhaul.config,
longhaul.parallel.context, longhaul.dist, longhaul.memory.estimate and model.py of ours.
"""

import dataclasses
import itertools
import os
import shlex
from dataclasses import dataclass

import torch

from longhaul.config import TrainConfig
from longhaul.dist import World, check_replicas, cores
from longhaul.memory.estimate import (
    CUDA_CONTEXT_GIB,
    PROCESS_GIB,
    Estimate,
    cpu_step_seconds,
    estimate,
)
from longhaul.parallel import context
from model import GIB, PRESETS, ModelConfig

# ranks on a CPU share one memory with all else on the machine: above this they share their rows
# where they can
CPU_RANK_GIB = 4.0
PATIENCE = 900  # seconds per step beyond which a CPU run is not proposed


@dataclass(frozen=True)
class Plan:
    """A request beside the machine it would run on."""

    asked: TrainConfig
    cfg: TrainConfig  # what would run: as asked, with the ranks that share a row settled
    config: ModelConfig
    world: World
    device: torch.device
    estimate: Estimate
    available_gib: float  # for one rank
    sharing: str = ""  # why ranks share their rows, where they do

    @property
    def needed_gib(self) -> float:
        """One rank's peak, with what no tensor shows (process, context)."""
        hidden = PROCESS_GIB if self.device.type == "cpu" else CUDA_CONTEXT_GIB
        return self.estimate.peak / GIB + hidden

    @property
    def host_gib(self) -> float:
        """Host memory of one rank's levers on a GPU."""
        return self.estimate.host / GIB

    @property
    def host_available_gib(self) -> float:
        return host_available_bytes() / self.world.local_size / GIB

    @property
    def fits(self) -> bool:
        return self.needed_gib <= self.available_gib and (
            not self.estimate.host or self.host_gib <= self.host_available_gib
        )

    def shortage(self) -> str:
        """What is needed and what is there, where it does not fit."""
        if self.needed_gib > self.available_gib:
            return f"{self.needed_gib:.1f} GiB per rank are needed and {self.available_gib:.1f} GiB are here"
        return f"levers keep {self.host_gib:.1f} GiB per rank on the host and {self.host_available_gib:.1f} GiB are there"

    def table(self) -> str:
        """The plan, for the screen; every figure is computed."""
        rows = [
            f"plan (computed): {self.cfg.model_size} ({self.config.num_params():,} parameters), context {self.cfg.context_length:,}, "
            f"{self.cfg.attention_type} attention, {self.cfg.dtype}, {self.world.size} rank(s) on {self.device.type}"
        ]
        rows += [f"  {'shared rows':<16}{self.sharing}"] * bool(self.sharing)
        rows += [
            f"  {stage:<16}{size / GIB:>10.2f} GiB per rank"
            for stage, size in self.estimate.stages.items()
        ]
        where = (
            f"this machine's free memory / {self.world.local_size} rank(s)"
            if self.device.type == "cpu"
            else "the GPU"
        )
        rows += [
            f"  {'needed':<16}{self.needed_gib:>10.2f} GiB per rank (peak: {self.estimate.peak_stage})",
            f"  {'there':<16}{self.available_gib:>10.2f} GiB per rank ({where})",
        ]
        if self.estimate.host:
            rows += [
                f"  {'on the host':<16}{self.host_gib:>10.2f} GiB per rank of {self.host_available_gib:.2f} there"
            ]
        if self.device.type == "cpu":
            rows += [f"  {'step':<16}{self.seconds:>10.3g} s, order of magnitude"]
        return "\n".join(rows)

    @property
    def seconds(self) -> float:
        """Order of magnitude of a step on this machine's CPU cores."""
        return cpu_step_seconds(self.cfg, self.config, self.world.size, cores())


def available_gib(device: torch.device, world: World) -> float:
    """Memory that one rank may use: free on the GPU, or its share of the host's available memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] / GIB
    return host_available_bytes() / world.local_size / GIB


def host_available_bytes() -> int:
    """MemAvailable on Linux (reclaimable caches count), within the cgroup's limit; physical memory
    elsewhere.
    """
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with (
            open("/sys/fs/cgroup/memory.max") as limit,
            open("/sys/fs/cgroup/memory.current") as used,
        ):
            return min(free, int(limit.read()) - int(used.read()))
    except (OSError, ValueError):  # no cgroup limit ("max")
        return free


def plan(
    cfg: TrainConfig,
    config: ModelConfig,
    world: World,
    device: torch.device,
    available: float | None = None,
) -> Plan:
    """The request's plan against `available` GiB per rank, or what is there; allocates nothing."""
    check_replicas(world, cfg.dp_replicate, cfg.context_ranks)
    chosen = _fewest_ranks_per_row(
        _candidates(
            cfg,
            config,
            world,
            device,
            available_gib(device, world) if available is None else available,
        )
    )
    run = chosen.cfg
    if (
        device.type == "cuda"
        and cfg.dtype == "fp32"
        and run.context_ranks > 1
        and run.context_choice(config).mode == "gather_kv"
    ):
        raise ValueError(
            "--dtype fp32 with --context_parallel_mode gather_kv on a GPU: its attention there runs in bf16: "
            "use --dtype bf16, or --context_parallel_mode ulysses"
        )
    return chosen


def _candidates(
    cfg: TrainConfig, config: ModelConfig, world: World, device: torch.device, available: float
) -> list[Plan]:
    """A plan for each number of ranks that may share a row, rising; the one that was asked for."""
    if cfg.context_parallel_size:
        return [_with_context(cfg, config, world, device, available, cfg.context_parallel_size)]
    sizes = context.allowed_sizes(
        cfg.context_parallel_mode,
        config.attention_type,
        config.num_kv_heads,
        cfg.context_length,
        world.size // cfg.dp_replicate,
    )
    possible = [
        size for size in sizes if world.size // cfg.dp_replicate % size == 0 and _allowed(cfg, size)
    ]
    return [_with_context(cfg, config, world, device, available, size) for size in possible]


def _allowed(cfg: TrainConfig, size: int) -> bool:
    """Whether `size` ranks may share a row beside the other settings."""
    try:
        return dataclasses.replace(cfg, context_parallel_size=size) is not None
    except ValueError:
        return False


def _with_context(cfg, config, world, device, available, size: int) -> Plan:
    run = dataclasses.replace(cfg, context_parallel_size=size)
    sharing = f"{size} ranks share each row" if size > 1 else ""
    if size > 1:
        mode, why = run.context_choice(config)
        sharing += f" by {mode} ({why})"
    here = dataclasses.replace(run, device=device.type)
    return Plan(
        cfg, run, config, world, device, estimate(here, config, world.size), available, sharing
    )


def _fewest_ranks_per_row(plans: list[Plan]) -> Plan:
    """The first plan within what a rank should take, else the first that fits, else the first."""
    alone = plans[0]
    should = min(
        alone.available_gib, CPU_RANK_GIB if alone.device.type == "cpu" else alone.available_gib
    )
    best = next((plan for plan in plans if plan.needed_gib <= should), None) or next(
        (plan for plan in plans if plan.fits), alone
    )
    if best is alone:
        return alone
    limit = f"{should:.2f} GiB {'that a rank should take of a memory it shares' if should < alone.available_gib else 'that are there'}"
    return dataclasses.replace(
        best,
        sharing=f"{best.sharing}; chosen, because with rows of its own a rank needs {alone.needed_gib:.2f} of the {limit}",
    )


def closest(request: Plan) -> Plan | None:
    """The nearest request that fits here, or None.

    First the same model with checkpointing, then with micro-batches of one row, then smaller models
    at the same context, then shorter contexts; each with the attention that was asked for before
    sparse attention, and a smaller one without checkpointing, if that is what was asked for, before
    with it. On CPU a proposal must also finish a step within 15 minutes.
    """
    return next(
        (
            plan
            for plan in _proposals(request)
            if plan.fits and (request.device.type != "cpu" or plan.seconds <= PATIENCE)
        ),
        None,
    )


def one_row(cfg: TrainConfig) -> dict:
    """Micro-batches of one row, the same rows per step."""
    rows = dict(batch_size=1)
    return (
        rows
        if cfg.global_batch_size
        else rows
        | dict(gradient_accumulation_steps=cfg.gradient_accumulation_steps * cfg.batch_size)
    )


LEVERS = (  # name, the settings that pull it; cheapest in time first
    ("chunked loss", lambda cfg: dict(loss="chunked")),
    ("checkpointing", lambda cfg: dict(gradient_checkpointing="full")),
    ("micro-batches of one row", one_row),
    (
        "tiled MLP",
        lambda cfg: dict(mlp_tiles=cfg.mlp_tiles if cfg.compile or cfg.mlp_tiles > 1 else 0),
    ),
    ("offloaded activations", lambda cfg: dict(offload_activations=cfg.device != "cpu")),
    (
        "offloaded optimizer",
        lambda cfg: dict(
            offload_optimizer=cfg.device != "cpu"
            and cfg.optimizer == "adamw"
            and cfg.master_weights == "fp32"
        ),
    ),
    ("head groups", lambda cfg: dict(attention_head_groups=_most_groups(cfg))),
)


def _most_groups(cfg: TrainConfig) -> int:
    """One group of KV heads at a time, where that is possible; one on each rank where heads are
    spread over the ranks.
    """
    config = cfg.model()
    if cfg.gradient_checkpointing != "full" or cfg.compile:
        return cfg.attention_head_groups
    spread = cfg.context_ranks > 1 and cfg.context_choice(config).mode == "ulysses"
    return config.num_kv_heads if not spread else config.num_kv_heads // cfg.context_ranks


def ladder(cfg: TrainConfig):
    """(names of the levers, settings): the same training with one lever more at a time; one that is
    on already gives no rung.

    All keep AdamW in fp32. In bf16 two round more often than the plain path: the offloaded
    optimizer, whose device holds weights and gradients in bf16, and head groups, whose sums do.
    Levers that round states, or change the step (updates in the backward do not clip), are for the
    user to choose.
    """
    names = []
    for name, changes in LEVERS:
        changed = dataclasses.replace(cfg, **changes(cfg))
        if changed != cfg:
            cfg, names = changed, [*names, name]
            yield " + ".join(names), cfg


def fitted(request: Plan) -> Plan | None:
    """The request itself or with the fewest levers that make it fit; None where they do not."""
    rungs = (_with(request, cfg) for _, cfg in ladder(request.asked))
    return next((plan for plan in itertools.chain([request], rungs) if plan.fits), None)


def _proposals(request: Plan):
    cfg = request.asked
    yield _changed(request, gradient_checkpointing="full")
    sizes = list(PRESETS)[: list(PRESETS).index(cfg.model_size)][::-1]
    # a smaller preset must still hold the data's tokens
    vocabulary = request.config.vocab_size if cfg.data else 0
    for context in (
        cfg.context_length >> halvings for halvings in range(cfg.context_length.bit_length())
    ):
        for size in [cfg.model_size, *sizes]:
            smaller = (
                dict(model_size=size, model_overrides=(), vocab_size=vocabulary, init_from="")
                if size != cfg.model_size
                else {}
            )
            for attention in dict.fromkeys((cfg.attention_type, "nsa")):
                for checkpointing in dict.fromkeys((cfg.gradient_checkpointing, "full")):
                    yield _changed(
                        request,
                        **one_row(cfg),
                        **smaller,
                        context_length=context,
                        attention_type=attention,
                        gradient_checkpointing=checkpointing,
                    )


def _changed(request: Plan, **changes) -> Plan:
    return _with(request, dataclasses.replace(request.asked, **changes))


def _with(request: Plan, cfg: TrainConfig) -> Plan:
    return plan(cfg, cfg.model(), request.world, request.device, request.available_gib)


def proposal(nearest: Plan, request: Plan) -> str:
    """The closest command, below what it changes."""
    cfg, asked = nearest.asked, request.asked
    names = [
        spec.name
        for spec in dataclasses.fields(cfg)
        if getattr(cfg, spec.name) != getattr(asked, spec.name)
    ]
    changes = ", ".join(
        f"{name} {getattr(asked, name) or 'default'} -> {getattr(cfg, name) or 'default'}"
        for name in names
    )
    return f"closest command that runs here ({changes}):\n{command(cfg, request.world)}"


def command(cfg: TrainConfig, world: World) -> str:
    """The shell command of a configuration: what differs from the defaults."""
    machines = (
        f"--nnodes={world.size // world.local_size} --node_rank=N --master_addr=HOST "
        if world.size > world.local_size
        else ""
    )
    launcher = (
        f"torchrun {machines}--nproc_per_node={world.local_size} train.py"
        if world.size > 1
        else "python train.py"
    )
    words = [launcher]
    for spec in dataclasses.fields(cfg):
        value, default = (
            getattr(cfg, spec.name),
            spec.default if spec.default is not dataclasses.MISSING else (),
        )
        if value == default or spec.name in ("plan", "config", "fit"):
            continue
        if spec.type is bool:
            words.append(f"--{spec.name}" if value else f"--no_{spec.name}")
        elif value == spec.metadata["bare"]:
            words.append(f"--{spec.name}")
        else:
            words.append(
                f"--{spec.name} {shlex.join(value if spec.metadata['many'] else [str(value)])}"
            )
    return " ".join(words)
