"""footprint/: its predictions for one of several ranks against gloo ranks that run, and what it
refuses there.
"""

import functools
import sys

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from footprint import Refused, Report, predict
from longhaul import dist
from tests.footprint_models import (
    OVER_RANKS,
    Transformer,
    loss_of,
    observe,
    tokens,
    train,
    with_optimizer,
)
from tests.ranks import run_ranks

BUILD, STEP = OVER_RANKS["FSDP2, transformer"]
PARAMETERS = sum(parameter.nbytes for parameter in Transformer().parameters())


@functools.cache
def predicted(name: str, ranks: int) -> Report:
    return predict(*OVER_RANKS[name], "cpu", world_size=ranks)


# ---- ranks that run


def observed_each(world: dist.World, names: list[str]) -> list[int]:
    """The peak of each step as the tracker sees it."""
    torch.set_num_threads(1)
    return [observe(*OVER_RANKS[name]).peak for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("ranks, spread", [(2, ("FSDP2", "DDP")), (4, ("HSDP",))])
def test_the_predicted_peak_is_that_of_ranks_that_run_byte_for_byte(ranks, spread):
    """A thread of gloo may hold a buffer longer than the step does, by the rank and the moment:
    then that rank's peak is higher by the buffer.
    """
    names = [name for name in OVER_RANKS if name.startswith(spread)]
    observed = run_ranks(observed_each, ranks, names)
    for name, found in zip(names, zip(*observed, strict=True), strict=True):
        expected = predicted(name, ranks).peak
        assert min(found) == expected and max(found) <= 1.25 * expected, f"{name}: {found}"


# ---- what a rank holds


def test_fsdp2_shards_parameters_gradients_and_states_and_gathers_them_layer_by_layer():
    report = predicted("FSDP2, transformer", 2)
    at_update = report.stages["optimizer"]
    for category in ("parameter", "gradient"):
        assert at_update[category] == PARAMETERS // 2
    assert at_update["optimizer"] == pytest.approx(PARAMETERS, rel=1e-3)
    assert "unsharded" not in at_update
    assert 0 < report.stages["layers.* forward"]["unsharded"] < PARAMETERS
    of_eight = predict(BUILD, STEP, "cpu", world_size=8).stages["optimizer"]
    assert of_eight["parameter"] == PARAMETERS // 8


def test_the_norm_of_sharded_gradients_is_read_as_any_number():
    found = []

    def step(state):
        model, optimizer = state
        loss_of(model, tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not torch.isfinite(norm) or torch.isnan(norm):
            raise ValueError("the norm is not finite")
        optimizer.step()
        optimizer.zero_grad()
        found.append(f"{norm.item():.1f} {norm:.1f} {float(norm):.1f}")

    report = predict(BUILD, step, "cpu", world_size=2)
    assert found[0] == "1.0 1.0 1.0"
    finite, *tried = report.assumed
    assert "finite" in finite
    assert tried and all("is taken as 1" in words for words in tried)


def test_ddp_holds_whole_parameters_and_a_bucket_for_each_gradient():
    alone = predict(with_optimizer(Transformer), STEP, "cpu")
    report = predicted("DDP, transformer", 2)
    buckets = report.by_stage["end"] - alone.by_stage["end"]
    assert buckets == pytest.approx(PARAMETERS, rel=1e-3)
    assert report.stages["optimizer"]["parameter"] == PARAMETERS
    assert predicted("DDP, transformer", 8).peak == report.peak


# ---- refusals


def with_a_hook():
    model = DistributedDataParallel(Transformer())
    model.register_comm_hook(None, lambda *_: None)
    return model


def in_a_group() -> DistributedDataParallel:
    torch.distributed.init_process_group("gloo")
    return DistributedDataParallel(Transformer())


@pytest.mark.parametrize(
    "model, ranks, words",
    [
        (with_a_hook, 2, "communication hooks are not predicted"),
        (lambda: DistributedDataParallel(Transformer()), 1, "give world_size above 1"),
        (Transformer, 0, "world_size 0 is out of range"),
    ],
)
def test_what_cannot_work_over_ranks_is_refused_in_one_line(model, ranks, words):
    with pytest.raises(Refused, match=words) as error:
        predict(with_optimizer(model), functools.partial(train, batch=tokens), "cpu", ranks)
    assert "\n" not in str(error.value)


def test_fsdp2_and_ddp_run_on_one_rank_and_leave_nothing_behind(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    excepthook = sys.excepthook
    before = predicted("FSDP2, transformer", 2)
    alone = predict(BUILD, STEP, "cpu")
    assert alone.stages["optimizer"]["parameter"] > 1.9 * before.stages["optimizer"]["parameter"]
    replicated = with_optimizer(in_a_group)
    assert predict(replicated, STEP, "cpu").peak
    joined = predict(replicated, STEP, "cpu", world_size=2)
    assert joined.peak == predicted("DDP, transformer", 2).peak
    assert not torch.distributed.is_initialized()
    assert predict(BUILD, STEP, "cpu", world_size=2).peak == before.peak
    assert sys.excepthook is excepthook
