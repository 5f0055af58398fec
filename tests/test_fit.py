"""One ladder and one verdict serve --fit auto, --solve, --advise and the out-of-memory report."""

import dataclasses

import pytest
import torch

from footprint.cards.device import Placement, card
from footprint.steps.search import AS_ASKED, Found, Lever, Search, pulled
from lab.posttrain.config import IntuitorConfig
from longhaul.config import TrainConfig
from longhaul.dist import World
from longhaul.planner import advise, fit, plan, solve
from tests.tiers import slow

CFG = TrainConfig(model_size="0.6B", context_length=65536, batch_size=4, loss="standard")
SHALLOW = dataclasses.replace(CFG, model_overrides=("num_layers=1",))
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


def ladder(cfg: TrainConfig) -> list[tuple[str, TrainConfig]]:
    """The name and the request of each rung."""
    found = [(AS_ASKED, cfg)]
    for lever in fit.LEVERS:
        request = pulled(lever, found[-1][1])
        if request != found[-1][1]:
            found.append((lever.name, request))
    return found


def names(cfg: TrainConfig) -> list[str]:
    return [name for name, _ in ladder(cfg)]


def planned(available: float) -> plan.Plan:
    return plan.plan(SHALLOW, SHALLOW.model(), World(), torch.device("cuda"), available)


def test_every_rung_adds_one_lever_to_the_one_below():
    rungs = [request for _, request in ladder(CFG)]
    assert names(CFG) == RUNGS and rungs[0] == CFG
    settings = [vars(request) for request in rungs]
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
        {"master_weights"},
        {"attention_head_groups"},
    ]
    assert rungs[-1].rows_per_step(1) == CFG.rows_per_step(1)


def test_a_lever_that_is_on_already_gives_no_rung():
    asked = TrainConfig(gradient_checkpointing="full", loss="chunked", device="cpu")
    assert names(asked) == ["as asked", "tiled MLP", "head groups"]


def test_the_loss_in_tiles_is_no_rung_where_auto_takes_it_already():
    asked = TrainConfig(context_length=65536)
    assert names(asked)[:2] == ["as asked", "checkpointing"]


def test_a_reference_that_only_the_log_reads_is_the_last_to_go():
    asked = IntuitorConfig(kl_coef=0.0)
    assert asked.needs_reference
    *_, (name, request) = ladder(asked)
    assert name == "no reference" and not request.needs_reference
    for changes in (dict(kl_coef=0.1), dict(kl_coef=0.0, reward="self_certainty_offline")):
        *_, (name, request) = ladder(IntuitorConfig(**changes))
        assert name == "head groups" and request.needs_reference


def test_a_lever_that_other_settings_exclude_gives_no_rung():
    """Updates in the backward pass allow only one micro-batch."""
    asked = TrainConfig(batch_size=4, optimizer_in_backward=True, grad_clip=0.0, device="cpu")
    assert names(asked) == ["as asked", "checkpointing", "tiled MLP", "head groups"]
    assert ladder(asked)[-1][1].batch_size == 4


@pytest.mark.parametrize(
    "changes, ranks",
    [
        # `tiny` has 2 KV heads, which do not divide over 4
        slow(dict(context_parallel_size=4), 4),
        slow(dict(optimizer_in_backward=True, grad_clip=0.0, batch_size=4), 1),
        (dict(attention_head_groups=8, gradient_checkpointing="full"), 1),
    ],
    ids=str,
)
def test_proposals_leave_out_what_other_settings_exclude(changes, ranks):
    shallow = dict(model_size="0.6B", model_overrides=("num_layers=1",))
    cfg = TrainConfig(context_length=8192, **shallow, **changes)
    world = World(size=ranks, local_size=ranks)
    request = plan.plan(cfg, cfg.model(), world, torch.device("cuda"), 2.5)
    nearest = fit.closest(request)
    assert nearest.fits and nearest.asked.model_size == "tiny"

    hopeless = plan.plan(cfg, cfg.model(), world, torch.device("cuda"), 0.001)
    assert fit.closest(hopeless) is None


def test_solve_and_advise_climb_the_ladder_of_fit():
    of_fit = [lever.name for lever in fit.LEVERS]
    assert [lever.name for lever in solve.LEVERS] == of_fit
    levers = list(advise.changes_of_run(plan.on_ranks(CFG), card("H100")))
    first, *others = of_fit
    batches = ["micro-batches of 2", "micro-batches of 1"]
    assert [lever.name for lever in levers] == [first, *batches, *others, "the CPU"]


def on_cpu(monkeypatch, seconds: float) -> plan.Plan:
    """A small request on a CPU on which every step takes so long."""
    monkeypatch.setattr(plan, "step_seconds", lambda *request: seconds)
    cfg = TrainConfig(model_size="tiny", model_overrides=("num_layers=1",), context_length=512)
    return plan.plan(cfg, cfg.model(), World(), torch.device("cpu"), 16.0)


def test_a_run_of_more_than_a_day_is_not_proposed_for_a_cpu(monkeypatch):
    """Of a request of 1,000 steps."""
    nearest = fit.closest(on_cpu(monkeypatch, 86.0))
    assert nearest.asked.max_steps == 1000
    assert fit.closest(on_cpu(monkeypatch, 87.0)) is None


@pytest.mark.parametrize(
    "cfg",
    [
        TrainConfig(model_size="0.6B", context_length=8192),
        TrainConfig(model_size="0.6B", context_length=8192, attention_type="nsa"),
        slow(IntuitorConfig(model_size="0.6B", context_length=4096, kl_coef=0.0)),
    ],
    ids=["standard", "nsa", "policy"],
)
@pytest.mark.parametrize("available", [1.0, 12.0])
def test_on_a_cpu_no_other_model_and_no_other_context_is_tried(cfg, available, monkeypatch):
    monkeypatch.setattr(plan, "step_seconds", lambda *request: 1.0)
    tried = []
    monkeypatch.setattr(fit, "_runs_here", lambda one: tried.append(one.asked))
    request = plan.on_ranks(dataclasses.replace(cfg, device="cpu"))
    request = dataclasses.replace(request, available_gib=available)
    assert fit.closest(request) is None
    assert tried
    assert {(one.model_size, one.context_length) for one in tried} == {
        (cfg.model_size, cfg.context_length)
    }


@pytest.mark.parametrize("schedule", ["", "4096:2,8192:2"])
def test_what_no_lever_moves_off_a_cpu_is_refused_without_a_simulation(schedule, monkeypatch):
    lengths = dict(length_schedule=schedule) if schedule else dict(context_length=131072)
    cfg = TrainConfig(model_size="4B", device="cpu", **lengths)
    monkeypatch.setattr(plan, "needs", None)
    request = plan.plan(cfg, cfg.model(), World(), torch.device("cpu"), 16.0)
    assert fit.fitted(request) is None
    assert fit.closest(request) is None


@pytest.mark.parametrize("rows, sizes", [(1, []), (4, [2, 1]), (6, [3, 1]), (7, [1]), (9, [3, 1])])
def test_micro_batches_shrink_to_divisors(rows, sizes):
    assert advise.smaller_batches(rows) == sizes


def needed(cfg: TrainConfig) -> float:
    return plan.plan(cfg, cfg.model(), World(), torch.device("cuda"), 1e6).needed_gib


def test_the_first_rung_that_fits_is_chosen():
    sizes = [needed(request) for _, request in ladder(SHALLOW)]
    assert fit.fitted(planned(sizes[0])) == planned(sizes[0])

    found = fit.fitted(planned(sizes[2]))
    assert found.asked.gradient_checkpointing == "full"
    assert found.asked.batch_size == CFG.batch_size
    assert fit.fitted(planned(min(sizes) - 0.01)) is None


# ---- the search itself


def search_of(sizes: dict[frozenset, int], room: int) -> Search:
    """Requests are sets of levers, and need what the table says."""

    def judge(request: frozenset) -> Found:
        size = sizes[request]
        return Found(size, size, Placement.FITS if size <= room else Placement.TOO_SMALL)

    return Search(judge, room, said.append)


said: list[str] = []
A, B, C = (Lever(name, lambda request, name=name: request | {name}) for name in "abc")


def test_a_lever_that_saves_nothing_is_left_out_and_tried_again_after_the_others():
    sizes = {frozenset(): 9, frozenset("a"): 9, frozenset("b"): 6, frozenset("ab"): 4}
    found = search_of(sizes, 4).climb(frozenset(), [A, B])
    assert found.best.request == frozenset("ab") and found.made == [B, A]
    assert "left out" in said[1] and "left out" not in said[2]


def test_a_lever_that_the_request_fits_without_is_taken_back():
    sizes = {frozenset(): 9, frozenset("a"): 8, frozenset("ab"): 7, frozenset("abc"): 3}
    sizes |= {frozenset("ac"): 4, frozenset("bc"): 6, frozenset("c"): 5}
    found = search_of(sizes, 4).climb(frozenset(), [A, B, C])
    assert found.made == [A, C] and found.best.found.device == 4


def test_if_nothing_fits_the_search_ends_with_what_needs_least():
    sizes = {frozenset(): 9, frozenset("a"): 8, frozenset("ab"): 8}
    found = search_of(sizes, 4).climb(frozenset(), [A, B])
    assert not found.best.fits and found.made == [A]
