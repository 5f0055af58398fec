"""What a run needs, compared with what there is: before a run, and for --plan.

A run that does not fit is refused before anything is allocated, and nothing smaller is ever trained
instead: --fit auto uses memory levers that leave model, context and batch as they are. The answer
to --plan is about this machine, or about GPUs that are not here; its exit code is that of every
answer about memory (footprint/steps/search.py).
"""

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future

import torch

from footprint.cards.device import DEFAULT, card
from footprint.steps.search import Verdict
from longhaul import dist, exits
from longhaul.checkpoint import resume
from longhaul.config import HERE, TrainConfig
from longhaul.kinds import attention_kind
from longhaul.planner import fit
from longhaul.planner import plan as planner
from longhaul.planner.plan import Plan
from longhaul.vocab.loss import choose_kernels

SMALLER = "give a smaller --batch_size, --context_length or --vocab_size"


def check_kernels(cfg: TrainConfig, device: torch.device):
    """ValueError if the kernels that were asked for cannot run here, or not with these sizes."""
    config = cfg.model()
    if cfg.kernels == "triton":
        choose_kernels("triton", torch.empty(0, device=device, dtype=config.dtype))
    attention_kind(config).check(config, device)


# ---- before a run


def ahead(
    cfg: TrainConfig,
    world: dist.World,
    device: torch.device,
) -> Callable[[], Plan]:
    """Rank 0 plans before the ranks meet, because the simulation of several takes their place in a
    process. The plan, or its refusal, is the result of the function that is returned.
    """
    found = Future()
    if world.rank == 0:
        try:
            found.set_result(fitting(planner.plan(cfg, cfg.model(), world, device)))
        except (ValueError, exits.Halt, exits.StorageError) as error:
            found.set_exception(error)
    return found.result


def shared(
    planned: Callable[[], Plan],
    world: dist.World,
    device: torch.device,
) -> Plan:
    """The plan of rank 0 on every rank, which prints it."""
    plan = dist.on_rank0(planned, world)
    plan = dataclasses.replace(plan, world=world, device=device)
    if world.rank == 0:  # a table measures how fast this machine is
        print(plan.table(), flush=True)
    return plan


def fitting(plan: Plan) -> Plan:
    """The plan if it fits, with --fit auto after the fewest levers; otherwise ValueError with what
    does fit.
    """
    if plan.fits:
        return plan
    # if a flag of the run in this folder was forgotten, that is what should be said
    resume.check_folder(plan.cfg)
    fitted = with_levers(plan)
    if fitted is not None:
        return fitted
    print(plan.table(), flush=True)
    words, _ = remedy(plan)
    raise ValueError(f"{plan.shortage()}; {words}")


def with_levers(plan: Plan) -> Plan | None:
    """With --fit auto, the plan that the fewest levers make fit, whose command is printed."""
    fitted = fit.fitted(plan) if plan.cfg.fit == "auto" else None
    if fitted is not None:
        print(f"--fit auto: {plan.shortage()}; this fits:\n{fitted.command()}", flush=True)
    return fitted


def remedy(plan: Plan) -> tuple[str, Verdict]:
    """What to do about a plan that does not fit: the closest command that runs here, or the one
    that looks for levers on any machine.
    """
    search = plan.search_command()
    if plan.card:
        return f"levers that make it fit are found by:\n{search}", Verdict.NOTHING
    nearest = fit.closest(plan)
    if nearest is not None:
        return fit.proposal(nearest, plan), Verdict.AFTER_CHANGES
    if plan.device.type == "cpu":
        return f"a GPU that holds it is found, without one, by:\n{search}", Verdict.NOTHING
    return f"nothing of longhaul fits here: {SMALLER}", Verdict.NOTHING


# ---- --plan


def answer(cfg: TrainConfig, world: dist.World) -> int:
    """Print the plan that --plan asks for; the exit code. A GPU that nobody has named cannot be too
    small.
    """
    asked = planned(cfg, world)
    plan = asked if asked.fits else with_levers(asked) or asked
    print(plan.table(), flush=True)
    if plan.fits:
        return Verdict.FITS.exit_code
    words, verdict = remedy(plan)
    print(f"{plan.shortage()}; {words}", flush=True)
    is_named = plan.card is None or cfg.plan != HERE
    return verdict.exit_code if is_named else Verdict.FITS.exit_code


def planned(cfg: TrainConfig, world: dist.World) -> Plan:
    """The plan on this machine, on the GPU that is named, or, if this machine has none and cannot
    hold the run, on the one that is rented most.
    """
    if cfg.plan != HERE:
        return planner.on_cards(cfg, world, card(cfg.plan))
    if cfg.device == "cpu" or dist.visible_gpus():
        return on_this_machine(cfg, world)
    if cfg.device == "auto":
        plan = on_this_machine(cfg, world)
        if plan.fits:
            return plan
        print("this machine has no GPU, and less memory than the run needs:", flush=True)
    return planner.on_cards(cfg, world, card(DEFAULT))


def on_this_machine(cfg: TrainConfig, world: dist.World) -> Plan:
    device = dist.choose_device(cfg.device, world)
    check_kernels(cfg, device)
    return planner.plan(cfg, cfg.model(), world, device)
