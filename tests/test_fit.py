"""One ladder and one verdict serve --fit auto, --solve, --advise and the out-of-memory report."""

import dataclasses

import pytest
import torch

from data.progress import duration
from footprint.device import card
from longhaul.config import TrainConfig
from longhaul.dist import World
from longhaul.memory import advise, fit, plan, solve
from longhaul.memory.estimate import estimate
from longhaul.memory.fit import Verdict
from longhaul.posttrain.config import IntuitorConfig

CFG = TrainConfig(model_size="0.6B", context_length=65536, batch_size=4, loss="standard")
RUNGS = [
    "as asked",
    "chunked loss",
    "checkpointing",
    "micro-batches of one row",
    "tiled MLP",
    "offloaded activations",
    "offloaded optimizer",
    "head groups",
]


@pytest.fixture(autouse=True)
def reserved_by_the_closed_form(monkeypatch):
    """No simulation: tests/test_reserve.py has what the allocator reserves."""

    def live(cfg, ranks, capacity):
        return estimate(cfg, cfg.model(), ranks).peak

    monkeypatch.setattr(plan.reserve, "reserved", live)


def planned(available: float) -> plan.Plan:
    return plan.plan(CFG, CFG.model(), World(), torch.device("cuda"), available)


def test_the_exit_code_of_a_verdict_is_0_2_or_3():
    codes = {verdict: verdict.exit_code for verdict in Verdict}
    assert codes == {Verdict.FITS: 0, Verdict.AFTER_CHANGES: 2, Verdict.NOTHING: 3}


def test_every_rung_adds_one_lever_to_the_one_below():
    rungs = list(fit.ladder(CFG))
    assert [rung.lever for rung in rungs] == RUNGS
    assert rungs[0].request == CFG
    settings = [vars(rung.request) for rung in rungs]
    changed = [
        {name for name in low if low[name] != high[name]}
        for low, high in zip(settings, settings[1:], strict=False)
    ]
    assert changed == [
        {"loss"},
        {"gradient_checkpointing"},
        {"batch_size", "gradient_accumulation_steps"},
        {"mlp_tiles"},
        {"offload_activations"},
        {"offload_optimizer"},
        {"attention_head_groups"},
    ]
    assert rungs[-1].request.rows_per_step(1) == CFG.rows_per_step(1)


def test_a_lever_that_is_on_already_gives_no_rung():
    asked = TrainConfig(gradient_checkpointing="full", loss="chunked", device="cpu")
    assert [rung.lever for rung in fit.ladder(asked)] == ["as asked", "tiled MLP", "head groups"]


def test_the_loss_in_tiles_is_no_rung_where_auto_takes_it_already():
    asked = TrainConfig(context_length=65536)
    assert [rung.lever for rung in fit.ladder(asked)][:2] == ["as asked", "checkpointing"]


def test_a_reference_that_only_the_log_reads_is_the_last_to_go():
    asked = IntuitorConfig(kl_coef=0.0)
    assert asked.needs_reference
    *_, last = fit.ladder(asked)
    assert last.lever == "no reference" and not last.request.needs_reference
    for changes in (dict(kl_coef=0.1), dict(kl_coef=0.0, reward="self_certainty_offline")):
        *_, last = fit.ladder(IntuitorConfig(**changes))
        assert last.lever == "head groups" and last.request.needs_reference


def test_a_lever_that_other_settings_exclude_gives_no_rung():
    """Updates in the backward pass allow only one micro-batch."""
    asked = TrainConfig(batch_size=4, optimizer_in_backward=True, grad_clip=0.0, device="cpu")
    rungs = list(fit.ladder(asked))
    assert [rung.lever for rung in rungs] == [
        "as asked",
        "checkpointing",
        "tiled MLP",
        "head groups",
    ]
    assert rungs[-1].request.batch_size == 4


@pytest.mark.parametrize(
    "changes, ranks",
    [
        # `tiny` has 2 KV heads, which do not divide over 4
        (dict(context_parallel_size=4), 4),
        pytest.param(
            dict(optimizer_in_backward=True, grad_clip=0.0, batch_size=4), 1, marks=pytest.mark.slow
        ),
        pytest.param(
            dict(attention_head_groups=8, gradient_checkpointing="full"), 1, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_proposals_leave_out_what_other_settings_exclude(changes, ranks):
    cfg = TrainConfig(context_length=65536, **changes)
    world = World(size=ranks, local_size=ranks)
    request = plan.plan(cfg, cfg.model(), world, torch.device("cuda"), 6.0)
    nearest = fit.closest(request)
    assert nearest.fits and nearest.asked.model_size in ("tiny", "0.6B")

    hopeless = plan.plan(cfg, cfg.model(), world, torch.device("cuda"), 0.001)
    assert fit.closest(hopeless) is None


def test_solve_and_advise_climb_the_ladder_of_fit():
    cfg = dataclasses.replace(CFG, loss="auto")
    rungs = [name for name in RUNGS[1:] if name != "chunked loss"]
    assert [one.name for one in solve.rungs(cfg, 1)] == ["as asked", *(f"+ {x}" for x in rungs)]
    asked = advise.request("train", cfg)
    found = [rung.lever for rung in advise.ladder(asked, card("H100"))]
    batches = ["micro-batches of 2", "micro-batches of 1"]
    ladder = [name for name in rungs if name != "micro-batches of one row"]
    assert found == ["as asked", *batches, *ladder, "the CPU"]


def on_cpu(monkeypatch, seconds: float) -> plan.Plan:
    """The 4B on a CPU with 16 GiB on which every step takes so long."""
    monkeypatch.setattr(plan, "step_seconds", lambda *request: seconds)
    cfg = TrainConfig(context_length=4096)
    return plan.plan(cfg, cfg.model(), World(), torch.device("cpu"), 16.0)


@pytest.mark.parametrize(
    "seconds, steps, warmup", [(0.5, 1000, 100), (2.0, 400, 40), (130.0, 6, 0), (900.0, 1, 0)]
)
def test_a_proposal_for_a_cpu_ends_within_15_minutes(seconds, steps, warmup, monkeypatch):
    request = on_cpu(monkeypatch, seconds)
    nearest = fit.closest(request)
    assert (nearest.asked.max_steps, nearest.asked.warmup_steps) == (steps, warmup)
    assert nearest.cfg.max_steps == steps

    words, shell = fit.proposal(nearest, request).split("\n")
    assert f"a step, {duration(seconds * steps)} for {steps:,} step" in words
    shortened = steps < 1000
    assert ("all 1,000 steps" in words) == shortened == (f"--max_steps {steps}" in shell)
    assert not shortened or f"--warmup_steps {warmup}" in shell


def test_a_proposal_that_teaches_nothing_comes_with_a_command_that_does(monkeypatch):
    request = on_cpu(monkeypatch, 130.0)
    nearest = fit.closest(request)
    monkeypatch.setattr(plan, "step_seconds", lambda *_: 1.5)
    words, shell = fit.proposal(nearest, request).split("\n")
    assert words.startswith("to see a small model learn (about 1.5 s a step")
    assert "--model_size tiny" in words and "--max_steps 200" in words
    assert "--max_steps 6" in shell

    given = dataclasses.replace(request, asked=dataclasses.replace(request.asked, init_from="x"))
    assert fit._instructive(given) == ""


def test_a_step_of_more_than_15_minutes_is_not_proposed(monkeypatch):
    assert fit.closest(on_cpu(monkeypatch, 901.0)) is None


@pytest.mark.parametrize("rows, sizes", [(1, []), (4, [2, 1]), (6, [3, 1]), (7, [1]), (9, [3, 1])])
def test_micro_batches_shrink_to_divisors(rows, sizes):
    assert advise.smaller_batches(rows) == sizes


def test_the_first_rung_that_fits_is_chosen():
    needed = [planned(1e6).needed_gib]
    for rung in list(fit.ladder(CFG))[1:]:
        needed.append(fit.replanned(planned(1e6), rung.request).needed_gib)
    assert fit.fitted(planned(needed[0])) == fit.Fit(Verdict.FITS, planned(needed[0]))

    request = planned(needed[2])
    found = fit.fitted(request)
    assert found.verdict is Verdict.AFTER_CHANGES
    assert found.plan.asked.gradient_checkpointing == "full"
    assert found.plan.asked.batch_size == CFG.batch_size
    assert fit.fitted(planned(min(needed) - 0.01)) == fit.Fit(Verdict.NOTHING, None)
