"""What a run needs, compared with what this machine has, before anything is allocated.

The step is simulated, in one to three seconds (needs.py). On a GPU, what the allocator reserves for
its live bytes decides (reserve.py). The time on a CPU comes from a measurement of half a second on
this machine (flops.py).
"""

import dataclasses
import math
import os
import shlex
from dataclasses import dataclass
from functools import cached_property

import torch

from data.progress import duration
from footprint.cards.device import DEFAULT, Card, beyond_the_allocator, installed_card
from longhaul import dist
from longhaul.config import TrainConfig
from longhaul.dist import World, check_replicas
from longhaul.flops import run_words, step_seconds, time_words, warm_up_seconds
from longhaul.kinds import unfit_exchanges
from longhaul.parallel import context
from longhaul.planner import reserve
from longhaul.planner.needs import PROCESS_GIB, WARM_UP, Needs, at_least, needs
from model import GIB, ModelConfig

# Ranks on a CPU share one memory with everything else on the machine: a rank that needs more than
# this shares its rows with others if it can.
CPU_RANK_GIB = 4.0


@dataclass(frozen=True)
class Plan:
    """A request, and the machine that it would run on."""

    asked: TrainConfig
    cfg: TrainConfig  # what would run: as asked, with a fixed number of ranks per row
    config: ModelConfig
    world: World
    device: torch.device
    available_gib: float = math.inf  # for one rank
    sharing: str = ""  # how many ranks share each row, and why; empty if each has its own rows
    # of a length schedule, of which this plan is the one that needs most; empty without one
    stages: tuple["Plan", ...] = ()
    gpu: str = "cuda"  # whose peak times the run on a GPU: a target of footprint
    card: Card | None = None  # a GPU that is not here, whose host is not known

    @property
    def hidden_gib(self) -> float:
        """The memory of one rank's process or CUDA context, which no tensor shows."""
        if self.device.type == "cpu":
            return PROCESS_GIB
        return sum(beyond_the_allocator(self.world.size).values()) / GIB

    @cached_property
    def needs(self) -> Needs:
        """Of a step, in the stage of a length schedule that needs most."""
        if self.stages:
            return self._worst_stage.needs
        return needs(self._on_device, self.world.size)

    @property
    def _worst_stage(self) -> "Plan":
        return max(self.stages, key=lambda one: one.needed_gib)

    @property
    def peak(self) -> int:
        """Live bytes at the peak of any step."""
        return self.needs.peak

    @property
    def needed_gib(self) -> float:
        """What one rank needs: on a GPU what the allocator reserves for its live bytes."""
        if self.device.type == "cpu":
            return self.peak / GIB + self.hidden_gib
        return self.reserved_gib + self.hidden_gib

    @cached_property
    def reserved_gib(self) -> float:
        """What the GPU's allocator reserves in any step."""
        if self.stages:
            return self._worst_stage.reserved_gib
        device_bytes = int(self.available_gib * GIB)
        request = self._on_device, self.world.size, device_bytes
        return reserve.reserved(self.needs, *request) / GIB

    @property
    def _on_device(self) -> TrainConfig:
        """What would run, told the device."""
        return dataclasses.replace(self.cfg, device=self.device.type)

    @property
    def host_gib(self) -> float:
        """Host memory that the levers of one rank use on a GPU."""
        return self.needs.host / GIB

    @property
    def host_available_gib(self) -> float:
        """This rank's part of the host's available memory."""
        return host_available_bytes() / self.world.local_size / GIB

    @property
    def is_hopeless(self) -> bool:
        """Whether what every step holds is more than there is, which needs no simulation."""
        least = at_least(self._on_device, self.world.size) / GIB + self.hidden_gib
        return least > self.available_gib

    @property
    def fits(self) -> bool:
        """Whether one rank's device, and the host if levers use it, hold the run."""
        if self.is_hopeless:
            return False
        if self.needs.host and not self.card and self.host_gib > self.host_available_gib:
            return False
        return self.needed_gib <= self.available_gib

    @property
    def _timed_on(self) -> str:
        return "cpu" if self.device.type == "cpu" else self.gpu

    @cached_property
    def seconds(self) -> float:
        """Time of a step: on a CPU within a factor of two, on a GPU an order of magnitude."""
        return step_seconds(self.cfg, self.config, self.world.size, self._timed_on)

    @cached_property
    def warm_up_seconds(self) -> float:
        """The same of a step of the indexer's dense warm-up; 0 for a run without one."""
        return warm_up_seconds(self.cfg, self.config, self.world.size, self._timed_on)

    @property
    def longest_step(self) -> float:
        """Seconds of the step that takes most."""
        return max(self.seconds, self.warm_up_seconds)

    @property
    def total_seconds(self) -> float:
        """Time of all steps."""
        if not self.stages:
            return self._seconds_between(0, self.cfg.max_steps)
        total = 0.0
        for stage, own in zip(self.cfg.stages(), self.stages, strict=True):
            total += own._seconds_between(stage.first_step, stage.last_step)
        return total

    def _seconds_between(self, first: int, last: int) -> float:
        """Time of the steps from `first` on and before `last`."""
        dense = max(0, min(self.cfg.dense_steps, last) - first)
        return dense * self.warm_up_seconds + (last - first - dense) * self.seconds

    def at(self, number: int) -> "Plan":
        """The plan of a stage of the length schedule; without a schedule, of the run."""
        if not self.stages:
            return self
        return dataclasses.replace(self.stages[number], world=self.world, device=self.device)

    @property
    def shutdown_timeout(self) -> int:
        """Seconds that torchrun must wait at the end of this run; 0: those that it waits anyway."""
        return shutdown_timeout(self.cfg, self.world.size, self.longest_step)

    def change(self, **settings) -> "Plan":
        """The same on as many GPUs, which are not here, with other settings."""
        return self.other(dataclasses.replace(self.asked, **settings))

    def other(self, cfg: TrainConfig, ranks: int = 0) -> "Plan":
        """Another request on such GPUs, by default on as many."""
        return on_ranks(cfg, ranks or self.world.size, self.gpu)

    def words(self) -> str:
        """The request in words."""
        return (
            f"{self.cfg.model_size} ({self.config.num_params():,} parameters), "
            f"{self.cfg.batch_size} x {self.cfg.row_tokens:,} tokens, {self.cfg.dtype}"
        )

    def breakdown(self) -> dict[str, int]:
        """What the peak is made of; the sum is the live peak."""
        found = self.needs
        name = found.peak_stage
        return {"parameters and optimizer": found.static, name: found.peak - found.static}

    def command(self) -> str:
        """What trains the request."""
        return command(self.asked, self.world, self.shutdown_timeout)

    def search_command(self) -> str:
        """What finds levers with which so many GPUs hold the request, on any machine: of a length
        schedule the stage that needs most.
        """
        asked = self._worst_stage.asked if self.stages else self.asked
        # a GPU is looked for, whose layers are simulated as they are without compilation
        ranks_per_row = self.asked.context_parallel_size
        asked = dataclasses.replace(
            asked, device="auto", compile=False, context_parallel_size=ranks_per_row
        )
        task = f"--task {asked.TASK}" if asked.TASK != "train" else ""
        ranks = f"--nproc {self.world.size}" if self.world.size > 1 else ""
        card = self.card.name if self.card else DEFAULT
        wanted = f"--solve levers --gpu {shlex.quote(card)}"
        words = ["python profile_memory.py", task, *flags(asked), ranks, wanted]
        return " ".join(filter(None, words))

    def costs(self) -> str:
        """What a step and the whole run take, in words."""
        if not self.needs.host:
            return f"time: {self.time()}"
        moved = f"host memory: {self.host_gib:.2f} GiB per rank, moving it takes more time"
        return f"time: {self.time()}; {moved}"

    def time(self) -> str:
        """The time of a step and of the whole run, in words."""
        if self.stages:
            return f"about {duration(self.total_seconds)} for {self.cfg.max_steps:,} steps"
        return run_words(self.cfg, self.seconds, self.warm_up_seconds, self._timed_on)

    def shortage(self) -> str:
        """What is needed and what is available, for a plan that does not fit."""
        live_gib = self.peak / GIB + self.hidden_gib
        if live_gib > self.available_gib:
            in_warm_up = self.needs.peak_stage == WARM_UP
            where = " in the indexer's dense warm-up" if in_warm_up else ""
            return (
                f"each rank needs {live_gib:.1f} GiB{where} "
                f"and {self.available_gib:.1f} GiB are available"
            )
        if self.needed_gib > self.available_gib:
            return (
                f"each rank needs {self.needed_gib:.1f} GiB, because the allocator reserves "
                f"{self.reserved_gib:.1f} GiB, and {self.available_gib:.1f} GiB are available"
            )
        return (
            f"levers need {self.host_gib:.1f} GiB of host memory per rank "
            f"and {self.host_available_gib:.1f} GiB are available"
        )

    def table(self) -> str:
        """The plan for the screen; every figure is computed."""
        model = self.cfg.init_from or self.cfg.model_size
        rows = [
            f"plan (computed, torch {torch.__version__}): "
            f"{model} ({self.config.num_params():,} parameters), "
            f"context {self.cfg.context_length:,}, {self.cfg.attention_type} attention, "
            f"{self.cfg.dtype}, {self.world.size} rank(s) on {self._place}"
        ]
        if self.sharing:
            rows.append(f"  {'shared rows':<20}{self.sharing}")
        for stage, size in self.needs.stages.items():
            rows.append(_row(stage, size / GIB))
            if self.asked.plan and stage == self.needs.peak_stage:
                rows += self._terms(stage)
        if self.device.type != "cpu":
            rows.append(_row("live at the peak", self.peak / GIB))
            kind = "expandable" if reserve.expandable_segments() else "classic"
            rows.append(_row("reserved for it", self.reserved_gib, f", in {kind} segments"))
        rows.append(_row("needed", self.needed_gib, f" (peak: {self.needs.peak_stage})"))
        rows.append(_row("available", self.available_gib, f" ({self._source()})"))
        if self.needs.host:
            known = "" if self.card else f", {self.host_available_gib:.2f} available"
            rows.append(_row("host memory", self.host_gib, known))
        if self.fits:
            rows += [*self._stage_rows(), f"  {'time':<20}{self.time()}"]
        return "\n".join(rows)

    @property
    def _place(self) -> str:
        return self.card.name if self.card else self.device.type

    def _stage_rows(self) -> list[str]:
        """What each stage of the length schedule needs; the rows above are those of the worst."""
        rows = []
        for number, own in enumerate(self.stages):
            stage = self.cfg.stages()[number]
            steps = stage.last_step - stage.first_step
            seconds = own._seconds_between(stage.first_step, stage.last_step) / steps
            micro_batch = f"{own.cfg.batch_size} x {own.cfg.context_length:,} tokens"
            note = (
                f": {micro_batch}, theta {own.config.rope_theta:g}, "
                f"{time_words(seconds, steps, self._timed_on)}"
            )
            rows.append(_row(f"stage {number + 1}", own.needed_gib, note))
        return rows

    def _terms(self, stage: str) -> list[str]:
        """What the memory of a stage is made of, without what rounds to nothing."""
        rows = []
        for name, size in self.needs.sizes[stage].items():
            gib = f"{size / GIB:>10.2f}"
            if float(gib):
                rows.append(f"  {'':<20}{gib}   {name}")
        return rows

    def _source(self) -> str:
        """What `available_gib` is a part of."""
        if self.device.type == "cpu":
            return f"this machine's free memory / {self.world.local_size} rank(s)"
        return self.card.name if self.card else "the GPU"


def _row(name: str, gib: float, note: str = "") -> str:
    return f"  {name:<20}{gib:>10.2f} GiB per rank{note}"


# ---- what the machine has


def available_gib(device: torch.device, world: World) -> float:
    """Memory that one rank may use: what its GPU has free, or its part of the host's memory."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free / GIB
    return host_available_bytes() / world.local_size / GIB


def host_available_bytes() -> int:
    """Memory of this machine that can be allocated, within the limit of its cgroup.

    On Linux MemAvailable, which counts caches that can be reclaimed; elsewhere physical memory.
    A cgroup counts files that were read as used memory, and gives back the inactive ones.
    """
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    try:
        with open("/sys/fs/cgroup/memory.max") as file:
            limit = int(file.read())
        with open("/sys/fs/cgroup/memory.current") as file:
            used = int(file.read())
        with open("/sys/fs/cgroup/memory.stat") as file:
            counts = dict(line.split() for line in file)
    except (OSError, ValueError):  # memory.max says "max" if the cgroup has no limit
        return free
    reclaimable = int(counts["inactive_file"])
    return min(free, limit - used + reclaimable)


# ---- the plan


def on_ranks(cfg: TrainConfig, ranks: int = 1, gpu: str = "cuda") -> Plan:
    """A request on so many GPUs that are not here, or on so many ranks of a CPU."""
    world = World(size=ranks, local_size=ranks)
    device = torch.device("cpu" if cfg.device == "cpu" else "cuda")
    return Plan(cfg, cfg, cfg.model(), world, device, gpu=gpu)


def plan(
    cfg: TrainConfig,
    config: ModelConfig,
    world: World,
    device: torch.device,
    available: float | None = None,
    card: Card | None = None,
) -> Plan:
    """The plan of a request; it allocates nothing.

    `available`: GiB for one rank; by default, what this machine has. `card`: the GPU of each rank,
    if it is not here. ValueError if the ranks do not divide, or if the GPU's attention cannot
    compute in the precision that was asked for.
    """
    check_replicas(world, cfg.dp_replicate, cfg.context_ranks)
    if available is None:
        available = available_gib(device, world)
    if cfg.length_schedule:
        return _worst_stage(cfg, world, device, available, card)

    timed = card or installed_card(device)
    gpu = timed.name if timed else "cuda"
    request = Plan(cfg, cfg, config, world, device, available, gpu=gpu, card=card)
    candidates = [_with_ranks_per_row(request, size) for size in _ranks_per_row(cfg, world)]
    chosen = _fewest_ranks_per_row(candidates)

    if device.type == "cuda":
        _check_precision(chosen.cfg, config)
    return chosen


def on_cards(cfg: TrainConfig, world: World, card: Card) -> Plan:
    """The plan on GPUs that are not here, one for each rank."""
    return plan(cfg, cfg.model(), world, torch.device("cuda"), card.gib, card)


def _worst_stage(
    cfg: TrainConfig,
    world: World,
    device: torch.device,
    available: float,
    card: Card | None,
) -> Plan:
    """The plan of the stage that needs most, with those of all; as many ranks share a row in each
    as one of them needs.
    """

    def planned(cfg: TrainConfig) -> list[Plan]:
        own = [stage.of_its_steps() for stage in cfg.stages()]
        return [plan(one, one.model(), world, device, available, card) for one in own]

    ranks = max(one.cfg.context_ranks for one in planned(cfg))
    fixed = dataclasses.replace(cfg, context_parallel_size=ranks)
    stages = planned(fixed)
    worst = max(stages, key=_is_worse)
    return dataclasses.replace(worst, asked=cfg, cfg=fixed, stages=tuple(stages))


def _is_worse(stage: Plan) -> tuple[bool, float]:
    """What stages are sorted by; a stage that cannot fit is not simulated for it."""
    return not stage.fits, math.inf if stage.is_hopeless else stage.needed_gib


def _check_precision(cfg: TrainConfig, config: ModelConfig):
    """ValueError for fp32 with gathered keys, if their attention on a GPU has no fp32 kernel."""
    if cfg.dtype != "fp32" or cfg.context_ranks == 1:
        return
    if cfg.context_choice(config).mode == "gather_kv":
        raise ValueError(
            "--dtype fp32 with --context_parallel_mode gather_kv: on a GPU this attention runs "
            "only in bf16: use --dtype bf16, or --context_parallel_mode ulysses"
        )


def _ranks_per_row(cfg: TrainConfig, world: World) -> list[int]:
    """Numbers of ranks that may share a row, ascending; only one number if the user gave it."""
    if cfg.context_parallel_size:
        return [cfg.context_parallel_size]
    ranks = world.size // cfg.dp_replicate
    sizes = sizes_that_share(cfg, cfg.context_length, ranks)
    return [size for size in sizes if ranks % size == 0 and _allowed(cfg, size)]


def sizes_that_share(cfg: TrainConfig, tokens: int, ranks: int) -> list[int]:
    """How many of the ranks may share a row of so many tokens."""
    if cfg.SAMPLES:
        return [1]
    config = cfg.model()
    unfit = unfit_exchanges(config.attention.name)
    mode = cfg.context_parallel_mode
    return context.allowed_sizes(mode, unfit, config.num_kv_heads, tokens, ranks)


def _allowed(cfg: TrainConfig, size: int) -> bool:
    """Whether the other settings let `size` ranks share a row."""
    try:
        dataclasses.replace(cfg, context_parallel_size=size)
    except ValueError:
        return False
    return True


def _with_ranks_per_row(request: Plan, size: int) -> Plan:
    """The plan if `size` ranks share each row."""
    run = dataclasses.replace(request.cfg, context_parallel_size=size)
    sharing = ""
    if size > 1:
        mode, why = run.context_choice(request.config)
        sharing = f"{size} ranks share each row by {mode} ({why})"
    return dataclasses.replace(request, cfg=run, sharing=sharing)


def _fewest_ranks_per_row(plans: list[Plan]) -> Plan:
    """The first plan below what one rank should take, else the first that fits, else the first."""
    unshared = plans[0]
    if len(plans) == 1:
        return unshared
    limit = unshared.available_gib
    reason = "that are available"
    if unshared.device.type == "cpu" and limit > CPU_RANK_GIB:
        limit = CPU_RANK_GIB
        reason = "that a rank should take of a CPU's memory"

    fitting = (plan for plan in plans if plan.fits)  # on the device and on the host
    best = next(fitting, unshared)
    crowded = best.fits and best.device.type == "cpu" and best.needed_gib > limit
    if crowded:
        best = next((plan for plan in fitting if plan.needed_gib <= limit), best)
    if best is unshared:
        return unshared

    why = f"without sharing, a rank needs {unshared.needed_gib:.2f} of the {limit:.2f} GiB {reason}"
    return dataclasses.replace(best, sharing=f"{best.sharing}; {why}")


# ---- its command

# Settings whose default is not what the folder of --init_from says, so that a command names them.
NAMED_WITH_WEIGHTS = {"context_length", "rope_theta", "rope_scaling"}


def command(cfg: TrainConfig, world: World, timeout: int = 0) -> str:
    """The shell command of a configuration: the settings that differ from the defaults, and those
    that --init_from would otherwise decide. `timeout`: the seconds that torchrun must wait.
    """
    words = [_launcher(world, cfg.PROGRAM), *flags(cfg)]
    if timeout:
        words.insert(0, f"{dist.TIMEOUT}={timeout}")
    return " ".join(words)


def flags(cfg: TrainConfig) -> list[str]:
    """The flags of a configuration that say more than the defaults."""
    words = []
    named = NAMED_WITH_WEIGHTS if cfg.init_from else ()
    for spec in dataclasses.fields(cfg):
        value = getattr(cfg, spec.name)
        default = () if spec.default is dataclasses.MISSING else spec.default
        differs = value != default and spec.name not in ("plan", "config", "fit")
        if differs or spec.name in named:
            words.append(flag_of(spec, value))
    return words


def shutdown_timeout(cfg: TrainConfig, ranks: int, step_seconds: float) -> int:
    """Seconds that torchrun must wait for a run that is asked to stop, so that its micro-batch
    ends: as many as it was told, and more if steps are slow; 0 if it does so anyway. How long a
    save takes is known only in the run, which then warns.
    """
    if ranks == 1:
        return 0
    told = math.ceil(dist.told_patience(os.environ) or 0)
    micro_batch = step_seconds / cfg.accumulation(ranks)
    if micro_batch <= dist.patience(dist.DEFAULT_PATIENCE, 0.0):
        return told
    return max(told, dist.enough_seconds(micro_batch, 0.0))


def _launcher(world: World, program: str) -> str:
    if world.size == 1:
        return f"python {program}"

    machines = ""
    if world.size > world.local_size:
        nodes = world.size // world.local_size
        machines = f"--nnodes={nodes} --node_rank=N --master_addr=HOST "
    return f"torchrun {machines}--nproc_per_node={world.local_size} {program}"


def flag_of(spec: dataclasses.Field, value: object) -> str:
    """The flag that sets a field to `value`."""
    if spec.type is bool:
        return f"--{spec.name}" if value else f"--no_{spec.name}"
    if value == spec.metadata["bare"]:
        return f"--{spec.name}"
    values = value if spec.metadata["many"] else [str(value)]
    return f"--{spec.name} {shlex.join(values)}"
