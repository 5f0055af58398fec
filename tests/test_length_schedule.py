"""A length schedule: its stages, its order, and a run that changes length on the way."""

import json
import re
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from data.loader import Loader
from data.mixture import Corpus, Fraction, order
from data.staged import APART, Stage, Staged
from data.writer import write_dataset
from longhaul.checkpoint import start
from longhaul.config import TrainConfig
from longhaul.dist import World
from longhaul.planner import plan as planner
from longhaul.planner.reconcile import measure
from longhaul.planner.simulate import simulate
from longhaul.run import training
from tests import kit
from tests.ranks import run_program

CPU = torch.device("cpu")
SCHEDULE = "4096:1000,32768:500:2e6,131072:200"


def settings(schedule: str = SCHEDULE, **more) -> TrainConfig:
    return TrainConfig(model_size="tiny", length_schedule=schedule, **more)


# ---- the stages


def test_stages_have_their_lengths_steps_and_bases():
    stages = settings().stages()
    assert [(stage.first_step, stage.last_step) for stage in stages] == [
        (0, 1000),
        (1000, 1500),
        (1500, 1700),
    ]
    assert [stage.cfg.context_length for stage in stages] == [4096, 32768, 131072]
    # 1e6 is the model's own; the last one grows with the length from the one that is given
    assert [stage.cfg.rope_theta for stage in stages] == [1e6, 2e6, 8e6]


def test_without_bases_they_are_proportional_to_the_length():
    thetas = [
        stage.cfg.rope_theta for stage in settings("64:1,128:1,512:1", rope_theta=1e4).stages()
    ]
    assert thetas == [1e4, 2e4, 8e4]


def test_rope_scaling_leaves_the_base_as_it_is():
    scaled = dict(rope_scaling="yarn:16:64")
    stages = settings("64:1,512:1", **scaled).stages()
    assert [stage.cfg.rope_theta for stage in stages] == [1e6, 1e6]


@pytest.mark.parametrize("batch", [dict(batch_size=2), dict(global_batch_size=6)])
def test_every_step_has_the_same_tokens(batch):
    cfg = settings(**batch)
    tokens = {stage.cfg.rows_per_step(2) * stage.cfg.context_length for stage in cfg.stages()}
    assert tokens == {cfg.rows_per_step(2) * cfg.context_length}
    assert len({stage.cfg.accumulation(2) for stage in cfg.stages()}) == 1


def test_the_longest_length_and_all_steps_are_the_runs():
    assert (settings().context_length, settings().max_steps) == (131072, 1700)
    # a printed command names them next to the schedule
    assert settings(context_length=131072, max_steps=1700) == settings()


def test_without_a_schedule_the_run_is_its_only_stage():
    cfg = TrainConfig(max_steps=7)
    assert [(stage.first_step, stage.last_step, stage.cfg) for stage in cfg.stages()] == [
        (0, 7, cfg)
    ]


# ---- the order


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """300 documents of 3 to 200 tokens."""
    draw = np.random.default_rng(0)
    documents = [draw.integers(1, kit.VOCAB, size) for size in draw.integers(3, 200, 300)]
    folder = tmp_path_factory.mktemp("lengths") / "data"
    made = write_dataset(documents, folder, vocab_size=kit.VOCAB, eod_id=0, val_fraction=0.1)
    return Corpus("data", made, Fraction(1))


@pytest.fixture
def staged(corpus) -> Staged:
    """5 steps of 8 rows of 16, 3 of 4 of 32, then 2 of 64."""
    steps = {0: (16, 8), 5: (32, 4), 8: (64, 2)}
    return Staged(
        [Stage(first, order([corpus], tokens, rows)) for first, (tokens, rows) in steps.items()]
    )


def test_each_stage_reads_from_the_beginning_of_its_own_order(staged, corpus):
    for step, (tokens, rows, own) in {
        0: (16, 8, 0),
        4: (16, 8, 4),
        5: (32, 4, 0),
        7: (32, 4, 2),
        8: (64, 2, 0),
        9: (64, 2, 1),
    }.items():
        alone = Loader(corpus.dataset, tokens, rows)
        np.testing.assert_array_equal(staged.batch(step).tokens, alone.batch(own).tokens)


def test_the_order_is_the_same_for_two_ranks(staged):
    for step in (4, 5, 8):
        shares = [staged.batch(step, rank, 2).tokens for rank in range(2)]
        np.testing.assert_array_equal(np.concatenate(shares), staged.batch(step).tokens)


def test_a_position_names_one_row_of_the_run(staged):
    assert list(staged.positions(4))[0] == 32
    assert list(staged.positions(5)) == [APART, APART + 1, APART + 2, APART + 3]
    assert staged.state(5) == {"seed": 0, "epoch": 0, "position": 0, "stage": 1}
    assert staged.state(9)["stage"] == 2 and staged.state(9)["position"] == 2


def test_skipped_rows_are_those_of_their_stage(staged):
    skip = ((3, 5), (APART + 1, APART + 2))
    skipping = staged.without(skip)
    assert list(skipping.positions(0)) == [0, 1, 2, 5, 6, 7, 8, 9]
    assert list(skipping.positions(5)) == [APART, APART + 2, APART + 3, APART + 4]
    assert list(skipping.positions(8)) == list(staged.positions(8))
    assert skipping.state(6)["skip"] == [list(span) for span in skip]


def test_tokens_of_corpora_are_counted_over_all_stages(corpus):
    halves = [Corpus(name, corpus.dataset, Fraction(1, 2)) for name in ("a", "b")]
    stages = [Stage(0, order(halves, 16, 8)), Stage(5, order(halves, 32, 4))]
    assert Staged(stages).tokens_seen(7) == {"a": 7 * 64, "b": 7 * 64}


# ---- a run


def arguments(corpus, out, *more: str) -> list[str]:
    flags = ["--length_schedule", "8:2,16:2,32:2", "--short_fraction", "0.25", *more]
    return kit.arguments(corpus.dataset.path, out, *flags)


def run(corpus, out, *more: str):
    train.main(arguments(corpus, out, *more))


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "run"
    run(corpus, out, "--save_every", "1", "--keep_last", "9", "--eval_every", "2")
    return out


def manifest(out, step: int) -> dict:
    return json.loads((out / f"step-{step:08d}" / "manifest.json").read_text())


def test_a_run_changes_length_and_base_at_the_edges(finished):
    found = [manifest(finished, step) for step in range(1, 7)]
    assert [one["config"]["context_length"] for one in found] == [8, 8, 16, 16, 32, 32]
    bases = [one["model_config"]["rope_theta"] for one in found]
    assert bases == [1e6, 1e6, 2e6, 2e6, 4e6, 4e6]
    assert [one["tokens"] for one in found] == [32 * step for step in range(1, 7)]
    # at the edge, the next step is the first of the next stage
    assert [one["data"]["stage"] for one in found] == [0, 1, 1, 2, 2, 2]


def test_the_learning_rate_is_that_of_the_whole_run(finished):
    rates = [record["lr"] for record in kit.steps(finished / "metrics.jsonl")]
    assert rates[:2] == [1.5e-4, 3e-4] and rates == sorted(rates[:2]) + sorted(rates[2:])[::-1]


@pytest.mark.parametrize("step", [2, 3])
def test_a_run_resumed_in_a_stage_or_at_an_edge_ends_with_the_same_bits(
    step, finished, corpus, tmp_path
):
    run(corpus, tmp_path / "run", "--resume", str(finished / f"step-{step:08d}"))
    assert kit.final_bits(tmp_path / "run") == kit.final_bits(finished)
    assert kit.losses(tmp_path / "run") == kit.losses(finished)[step:]


@pytest.mark.slow
def test_two_ranks_resume_at_an_edge_with_the_losses_of_one(corpus, tmp_path):
    whole = tmp_path / "whole"
    flags = ["--global_batch_size", "2", "--save_every", "2", "--keep_last", "9"]
    run(corpus, whole, *flags)
    resumed = [*flags, "--resume", str(whole / "step-00000002")]
    run_program(train.main, 2, arguments(corpus, tmp_path / "run", *resumed))
    assert kit.losses(tmp_path / "run") == pytest.approx(kit.losses(whole)[2:], abs=1e-5)


def test_the_command_around_a_loss_spike_is_that_of_the_whole_run(
    corpus, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(TrainConfig, "LOSS_SPIKE", 1e-9)
    run(corpus, tmp_path / "run", "--length_schedule", "8:17,32:3")
    said = capsys.readouterr().out
    at, command = re.search(
        r"LOSS SPIKE at step (18|19|20): .* (python train.py .*)", said
    ).groups()
    words = command.split()
    assert words[words.index("--length_schedule") + 1] == "8:17,32:3"
    first, last = words[words.index("--skip_rows") + 1].split(":")
    # the last stage begins after 17 steps and has a row a step
    assert int(first) == APART + int(at) - 18
    assert int(last) == int(first) + 1

    train.main(words[2:])
    around = Path(words[words.index("--output_dir") + 1])
    final = json.loads((around / "step-00000020" / "manifest.json").read_text())
    assert final["data"]["skip"] == [[int(first), int(last)]]


def test_a_stage_is_freed_before_the_next_one_is_built(corpus, tmp_path, monkeypatch):
    alive = []
    build = training.build

    def counting(ready):
        alive.append([kept() is not None for kept in models])
        state = build(ready)
        models.append(weakref.ref(state.model))
        return state

    models: list[weakref.ref] = []
    monkeypatch.setattr(training, "build", counting)
    run(corpus, tmp_path / "run", "--async_save")
    assert alive == [[], [False], [False, False]]


def test_the_first_stage_may_change_the_base_of_the_weights_it_starts_from(finished):
    for schedule, theta in (("32:1,64:1", 4e6), ("64:1:8e6", 8e6)):
        given = {"init_from": str(finished), "length_schedule": schedule}
        cfg = TrainConfig(**start.completed(given))
        assert cfg.stages()[0].cfg.rope_theta == theta


def test_whole_documents_are_those_of_each_stage_and_of_one_run(corpus, tmp_path, capsys):
    flags = ("--short_fraction", "0", "--whole_documents", "--eval_every", "6", "--save_every", "3")
    flags += ("--keep_last", "9")
    run(corpus, tmp_path / "run", *flags)
    said = capsys.readouterr().out
    for tokens in (8, 16, 32):
        assert f"they are in documents of more than {tokens} tokens (--whole_documents)" in said

    resumed = ("--resume", str(tmp_path / "run" / "step-00000003"))
    run(corpus, tmp_path / "again", *flags, *resumed)
    assert kit.final_bits(tmp_path / "again") == kit.final_bits(tmp_path / "run")


# ---- what it needs


def shape(schedule: str, **more) -> TrainConfig:
    small = ("hidden_size=64", "num_layers=2", "ffn_size=96")
    return settings(
        schedule, model_overrides=small, vocab_size=512, dtype="fp32", device="cpu", **more
    )


def test_the_predicted_peak_of_a_later_stage_is_the_trackers():
    stage = shape("64:1,256:1").stages()[1]
    predicted, _ = simulate(stage.cfg, target="cpu").peak()
    measured = measure(stage.cfg)["peak_live_bytes"]
    assert predicted == pytest.approx(measured, rel=0.01)


@pytest.mark.slow
def test_the_stage_that_needs_most_decides():
    cfg = shape("64:3,128:2,256:1", attention_type="nsa", blocks=("sel_count=3", "window=32"))
    plan = planner.plan(cfg, cfg.model(), World(), CPU, available=64.0)
    needed = [one.needed_gib for one in plan.stages]
    assert plan.needed_gib == max(needed) and len(needed) == 3
    steps = [3, 2, 1]
    seconds = [one.seconds * count for one, count in zip(plan.stages, steps, strict=True)]
    assert plan.total_seconds == pytest.approx(sum(seconds))
    assert [one.cfg.context_length for one in plan.stages] == [64, 128, 256]

    words = plan.table()
    assert all(f"stage {number}" in words for number in (1, 2, 3))
    short = planner.plan(cfg, cfg.model(), World(), CPU, available=max(needed) - 1e-3)
    assert not short.fits
