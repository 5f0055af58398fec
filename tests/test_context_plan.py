"""How ranks share rows, decided before a run: the mode, the number of ranks, what is refused.

The last test trains with each mode.
"""

import dataclasses
import re

import pytest
import torch

import train
from longhaul import cli, config_checks, dist
from longhaul.config import TrainConfig
from longhaul.exits import WorldError
from longhaul.kinds import unfit_exchanges
from longhaul.parallel import context
from longhaul.planner import fit
from longhaul.planner import plan as planner
from longhaul.planner.needs import PROCESS_GIB, needs
from tests import kit
from tests.ranks import run_program

CPU = torch.device("cpu")
TWO = dist.World(0, 2, 0, 2)
LONG = TrainConfig(
    model_size="tiny",
    model_overrides=("num_layers=1",),
    attention_type="nsa",
    context_length=262_144,
)


# ---- the mode


@pytest.mark.parametrize(
    "ranks, mode, why",
    [  # the 4B: 32 query heads, 8 key/value heads
        (2, "gather_kv", "moves 0.80 of the bytes of ulysses"),
        (4, "ulysses", "moves 0.62 of the bytes of gather_kv"),
        (8, "ulysses", "of the bytes of gather_kv"),
        (16, "gather_kv", "not ulysses"),
    ],
    ids=str,
)
def test_the_mode_moves_fewer_bytes_or_is_the_only_one(ranks, mode, why):
    choice = context.choose("auto", unfit_exchanges("standard"), 32, 8, 131_072, ranks, 2)
    assert choice.mode == mode
    assert why in choice.why


def test_sparse_attention_keeps_whole_groups_of_heads_on_a_rank():
    assert context.choose("auto", unfit_exchanges("nsa"), 32, 8, 131_072, 8, 2).mode == "ulysses"
    with pytest.raises(ValueError, match=r"--context_parallel_size from \[1, 2, 4, 8\]"):
        context.choose("auto", unfit_exchanges("nsa"), 32, 8, 131_072, 16, 2)


def test_ranks_that_do_not_divide_are_refused():
    for ranks, replicas, sharing, allowed in (
        (2, 1, 4, "1, 2"),
        (6, 2, 2, "1, 3"),
        (4, 3, 1, "1, 2, 4"),
    ):
        with pytest.raises(ValueError, match=rf"choose from \[{allowed}\]"):
            dist.check_replicas(dist.World(0, ranks), replicas, sharing)


def test_a_global_batch_that_the_ranks_do_not_divide_is_refused_with_the_sizes_that_work():
    with pytest.raises(WorldError, match=r"one of \[1, 2, 3, 6\]"):
        TrainConfig(global_batch_size=6).accumulation(4)
    with pytest.raises(WorldError, match="2 share each row"):
        TrainConfig(context_parallel_size=2, global_batch_size=3).accumulation(4)


def test_fp32_with_gathered_keys_is_refused_on_a_gpu(monkeypatch):
    monkeypatch.setattr(planner, "available_gib", lambda device, world: 40.0)

    def plan(cfg):
        return planner.plan(cfg, cfg.model(), TWO, torch.device("cuda"))

    cfg = TrainConfig(model_size="tiny", dtype="fp32")
    assert plan(cfg).cfg.context_parallel_size == 1
    with pytest.raises(ValueError, match="--dtype"):
        plan(dataclasses.replace(cfg, context_parallel_size=2, context_parallel_mode="gather_kv"))


def test_a_mode_without_ranks_to_share_warns():
    assert "context_parallel_mode" in config_checks.ineffective_settings(
        TrainConfig(context_parallel_mode="ulysses")
    )


# ---- the number of ranks


def planned(cfg: TrainConfig, available: float, world: dist.World = TWO) -> planner.Plan:
    return planner.plan(cfg, cfg.model(), world, CPU, available)


def ranks_per_row(cfg: TrainConfig, available: float, world: dist.World = TWO) -> int:
    return planned(cfg, available, world).cfg.context_parallel_size


@pytest.mark.slow
def test_ranks_share_a_row_that_one_cannot_hold_and_the_plan_says_so():
    longer = dataclasses.replace(LONG, context_length=294_912)
    plan = planned(longer, 5.0)
    assert plan.cfg.context_parallel_size == 2
    assert plan.fits
    assert re.search(
        r"2 ranks share each row by ulysses \(.*\); without sharing, a rank needs \d\.\d\d of the "
        "4.00 GiB",
        plan.table(),
    )

    shorter = dataclasses.replace(LONG, context_length=8192)
    unshared = dataclasses.replace(LONG, context_parallel_size=1)
    assert ranks_per_row(shorter, 5.0) == 1
    assert ranks_per_row(LONG, 5.0, dist.World()) == 1
    assert ranks_per_row(unshared, 16.0) == 1


@pytest.mark.slow
def test_the_fewest_ranks_that_hold_a_row_share_it():
    world = dist.World(0, 8, 0, 8)
    cfg = dataclasses.replace(LONG, attention_type="standard", dtype="fp32")
    assert [ranks_per_row(cfg, available, world) for available in (5.0, 3.0, 1.7)] == [2, 4, 8]


@pytest.mark.slow
def test_the_refusal_names_the_command_whose_ranks_share_rows(monkeypatch):
    monkeypatch.setattr(planner, "step_seconds", lambda *request: 1.0)
    nearest = fit.closest(planned(LONG, PROCESS_GIB + 2.3))
    launcher, words = planner.command(nearest.asked, TWO).split(" train.py ")
    assert launcher == "torchrun --nproc_per_node=2"
    assert nearest.asked.context_parallel_size == 0
    assert nearest.cfg.context_parallel_size == 2
    assert cli.parse(TrainConfig, words.split()) == nearest.asked


@pytest.mark.slow
def test_a_rank_of_two_needs_half_the_activations():
    def peak(cfg: TrainConfig, sharing: int, ranks: int) -> int:
        shared = dataclasses.replace(cfg, context_parallel_size=sharing)
        return needs(shared, ranks).peak

    assert 0.45 < peak(LONG, 2, 2) / peak(LONG, 1, 2) < 0.6
    checkpointed = dataclasses.replace(
        LONG, attention_type="standard", gradient_checkpointing="full"
    )
    assert peak(checkpointed, 4, 4) < 0.6 * peak(checkpointed, 1, 4)


# ---- train.py


@pytest.mark.slow
def test_a_run_of_ranks_that_share_rows_resumes_on_one_rank_and_back_with_the_same_rows(
    tmp_path,
):
    data, folder = kit.dataset(tmp_path / "data"), tmp_path / "run"
    args = "--save_every 3 --eval_every 3 --eval_rows 2 --schedule constant"
    two = "--context_parallel_size 2 --model_overrides num_layers=2 num_kv_heads=2"

    def shared(mode: str, steps: int):
        more = f"--max_steps {steps} {two} --context_parallel_mode {mode}"
        output = run_program(train.main, 2, kit.arguments(data, folder, args, more))
        assert f"2 ranks share each row by {mode}" in output
        assert "validation loss" in output

    shared("ulysses", 3)
    kit.run(kit.arguments(data, folder, args, two, "--max_steps 6 --context_parallel_size 1"))
    shared("gather_kv", 9)

    whole = tmp_path / "whole"
    kit.run(kit.arguments(data, whole, args, two, "--max_steps 9 --context_parallel_size 1"))
    assert kit.losses(folder) == pytest.approx(kit.losses(whole), rel=1e-5)
