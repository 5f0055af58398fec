"""Rows and steps without a target: they are counted before training, and have no loss."""

import dataclasses
import json

import numpy as np
import pytest
import torch

import train
from data import dataset as dataset_module
from data import report
from data.dataset import Dataset
from data.loader import IGNORE, Loader
from data.writer import TokenizedDocument, write_dataset
from longhaul import step
from longhaul.run import health
from scripts import evaluate
from tests import kit
from tests import test_indexed_model as indexed
from tests.ranks import run_ranks
from tests.test_numerics import dataset as plain_rows  # noqa: F401  (a fixture)
from tests.test_numerics import one_process, poisoned_step
from tests.test_step import CFG, VOCAB, batch
from tests.tiers import slow

PROMPT = 300  # tokens of a document before those that are learned: most rows have no target
ANSWER = 3


def answered(folder, count: int = 24, prompt: int = PROMPT, **settings) -> Dataset:
    """Documents whose last ANSWER tokens and end are learned."""
    draw = np.random.default_rng(prompt)
    documents = []
    for _ in range(count):
        ids = draw.integers(1, kit.VOCAB, prompt + ANSWER)
        learned = np.arange(len(ids)) >= prompt
        documents.append(TokenizedDocument(ids, learned=learned))
    given = dict(vocab_size=kit.VOCAB, eod_id=0, val_fraction=0.2, masked=True) | settings
    return write_dataset(documents, folder, **given)


def ends_only(folder) -> Dataset:
    """Half of the rows are full of documents of nothing but their end, which is no target."""
    draw = np.random.default_rng(0)
    documents = [draw.integers(1, kit.VOCAB, kit.CONTEXT - 1) for _ in range(30)]
    documents += [np.zeros(1, int)] * (30 * kit.CONTEXT)
    return write_dataset(documents, folder, vocab_size=kit.VOCAB, eod_id=0, val_fraction=0.2)


def without_labels(micros: list[dict]) -> list[dict]:
    return [micro | {"labels_BT": torch.full_like(micro["labels_BT"], IGNORE)} for micro in micros]


def trained(data, out, *more: str) -> list[dict]:
    """The steps of a small run."""
    train.main(kit.arguments(data, out, "--max_steps 24", *more))
    return kit.steps(out / "metrics.jsonl")


def validations(out) -> list[dict]:
    return [line for line in kit.records(out) if "validation_loss" in line]


# ---- a step


@pytest.mark.parametrize("loss", ["standard", "chunked"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "muon"])
def test_a_step_without_targets_has_no_loss_and_is_a_step_of_zero_gradients(optimizer, loss):
    cfg = dataclasses.replace(CFG, optimizer=optimizer, loss=loss)
    state, other = (step.build(cfg, cfg.model(), "cpu") for _ in range(2))
    for one in (state, other):
        step.train_step(one, batch(0))
    result = step.train_step(state, without_labels(batch(1)))
    assert result.loss is None and result.weight == result.grad_norm == 0 and not result.skipped
    assert state.step == 2

    step.set_learning_rate(other)
    for parameter in other.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    other.optimizer.step()
    for one, two in zip(state.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_micro_batch_without_targets_leaves_the_loss_of_the_others():
    of_first, of_both = (step.build(CFG, CFG.model(), "cpu") for _ in range(2))
    first, second = batch(0)
    expected = step.train_step(of_first, [first])
    found = step.train_step(of_both, [*without_labels([second]), first])
    assert found.loss == expected.loss and found.weight == expected.weight == 4
    assert found.grad_norm == expected.grad_norm


def test_an_indexer_learns_nothing_in_a_step_without_targets():
    cfg = indexed.settings()
    state = step.build(cfg, cfg.model(), "cpu")
    result = step.train_step(state, without_labels([indexed.batch()]))
    assert result.loss is None and result.grad_norm == 0
    assert step.train_step(state, [indexed.batch()]).grad_norm > 0


def steps_of_ranks(world) -> list:
    """The losses and weights of three steps: labels on rank 0 only, on none, on both."""
    state = step.build(CFG, CFG.model(), "cpu", world)
    found = []
    for with_labels in ((0,), (), (0, 1)):
        own = batch(world.rank)
        if world.rank not in with_labels:
            own = without_labels(own)
        result = step.train_step(state, own)
        found.append((result.loss, int(result.weight)))
    return found


@pytest.mark.slow
def test_ranks_agree_on_a_step_of_which_one_or_none_has_targets():
    first, second = run_ranks(steps_of_ranks, 2)
    targets = sum(int((micro["labels_BT"] != IGNORE).sum()) for micro in batch(0))
    assert first == second
    assert [weight for _, weight in first] == [targets, 0, 2 * targets]
    assert first[1][0] is None and all(0 < first[index][0] < 2 * np.log(VOCAB) for index in (0, 2))


# ---- what a run says


@pytest.mark.parametrize("make", [answered, slow(ends_only)])
def test_a_run_counts_the_rows_without_targets_and_reports_no_loss_of_them(make, tmp_path, capsys):
    data = make(tmp_path / "data")
    records = trained(tmp_path / "data", tmp_path / "run", "--eval_every", "24", "--eval_rows", "1")
    loader = Loader(data, kit.CONTEXT, 1)
    targets = [int((loader.batch(index).labels != IGNORE).sum()) for index in range(24)]
    assert 0 < targets.count(0) < 24
    assert [record["targets"] for record in records] == targets
    for record, count in zip(records, targets, strict=True):
        assert (record["loss"] is None) == (record["perplexity"] is None) == (count == 0)

    said = capsys.readouterr().out
    before, after = said.split("step 1 of 24", 1)
    empty = int((loader.row_targets == 0).sum())
    assert f"warning: {empty:,} of {loader.rows_per_epoch:,} rows" in before
    assert f"no targets in {empty:,} rows" in before
    lines = [line for line in said.splitlines() if line.startswith("step ") and " lr " in line]
    assert any(": no targets, " in line for line in lines)
    assert "loss 0.0000" not in after and "SPIKE" not in after and "nan" not in after
    assert validations(tmp_path / "run")[0]["validation_tokens"] > 0


def test_a_run_whose_rows_all_have_targets_is_not_warned(tmp_path, capsys):
    answered(tmp_path / "data", 200, prompt=8)
    records = trained(tmp_path / "data", tmp_path / "run", "--whole_documents")
    assert all(record["loss"] and record["targets"] for record in records)
    said = capsys.readouterr().out
    assert "no target" not in said and "are targets of the loss" in said


def test_the_source_of_a_mixture_that_has_no_targets_is_named_and_not_validated(tmp_path, capsys):
    answered(tmp_path / "good", 200, prompt=8)
    # in the middle of a document is the only token that is learned, and training has it
    learned = np.arange(400) == 200
    documents = [
        TokenizedDocument(np.ones(400, int), learned=learned & (number != 0))
        for number in range(40)
    ]
    held_out = write_dataset(
        documents, tmp_path / "probe", vocab_size=64, eod_id=0, val_fraction=0.01, masked=True
    ).split("val")
    documents[int(held_out._documents[0])] = documents[0]
    given = dict(vocab_size=64, eod_id=0, val_fraction=0.01, masked=True)
    write_dataset(documents, tmp_path / "bad", **given)

    mixed = f"{tmp_path}/good:0.5,{tmp_path}/bad:0.5"
    records = trained(mixed, tmp_path / "run", "--eval_every", "12")
    said = capsys.readouterr().out
    assert "warning: bad: " in said and "warning: good: " not in said
    assert "no validation of bad: " in said and "nan" not in said
    assert 0 < [record["targets"] for record in records].count(0) < 24
    assert all(one["validation_loss"] > 0 for one in validations(tmp_path / "run"))

    with pytest.raises(SystemExit) as alone:
        words = f"--checkpoint {tmp_path}/run --data {tmp_path}/bad --evals loss --device cpu"
        evaluate.main(words.split())
    assert alone.value.code == 2
    assert "has a target" in capsys.readouterr().err


def test_validation_rows_without_targets_are_named_before_training_and_never_nan(tmp_path, capsys):
    learned = np.arange(100) > 50
    documents = [
        TokenizedDocument(np.ones(100, int), learned=learned & (number % 2 == 0))
        for number in range(40)
    ]
    given = dict(vocab_size=64, eod_id=0, val_fraction=0.01, masked=True)
    first = write_dataset(documents, tmp_path / "probe", **given)
    documents[int(first.split("val")._documents[0])] = documents[1]
    write_dataset(documents, tmp_path / "data", **given)

    trained(tmp_path / "data", tmp_path / "run", "--eval_every", "12")
    before, after = capsys.readouterr().out.split("step 1 of 24", 1)
    assert "no validation loss: none of the " in before
    assert "nan" not in after and not validations(tmp_path / "run")


# ---- spikes and streaks


@pytest.mark.parametrize("stretch", [1, 40, 1000])
def test_a_resumed_run_has_the_window_of_one_that_went_on_over_steps_without_targets(
    stretch, tmp_path
):
    whole = health.Spikes()
    lines = []
    for number in range(1, 200 + stretch):
        loss = None if 100 <= number < 100 + stretch else float(number)
        lines.append(json.dumps({"step": number, "loss": loss, "padding": "-" * 200}))
        if loss is not None:
            whole.score(loss)
    log = tmp_path / "metrics.jsonl"
    log.write_text("\n".join(lines) + "\n")
    assert health.Spikes(health.recent_losses(log, 10**6)).window == whole.window


def test_steps_without_targets_neither_end_a_streak_of_bad_ones_nor_join_the_window(
    tmp_path,
    plain_rows,  # noqa: F811
):
    state, loader, watch = one_process(tmp_path, plain_rows)
    micros = step.micro_batches(loader.batch(0), 4, state.device)
    watch.after(step.train_step(state, micros), print)
    watch.after(poisoned_step(state, loader), print)
    found = watch.after(step.train_step(state, without_labels(micros)), print)
    assert found == {"spike": None} and len(watch.spikes.window) == 1
    watch.after(poisoned_step(state, loader), print)
    assert watch.skipped == [2, 4] and "--lr 3e-05" in watch.way_back(("0:4",))
    watch.after(step.train_step(state, micros), print)
    watch.after(step.train_step(state, without_labels(micros)), print)
    watch.after(poisoned_step(state, loader), print)
    assert "--lr 0.0003" in watch.way_back(("0:4",))  # another step was taken since then


# ---- counts of the data


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("context", [1, 7, 64])
def test_targets_of_rows_are_those_of_their_labels(masked, context, tmp_path, monkeypatch):
    monkeypatch.setattr(dataset_module, "COUNT_TOKENS", 100)
    draw = np.random.default_rng(1)
    documents = []
    for size in draw.integers(0, 90, 60):
        learned = draw.random(size + 1) < 0.1 if masked else None
        documents.append(TokenizedDocument(draw.integers(0, 50, size + 1), learned=learned))
    made = write_dataset(
        documents, tmp_path / "d", vocab_size=50, eod_id=0, masked=masked, shard_tokens=300,
        val_fraction=0.3,
    )  # fmt: skip
    for split in ("train", "val"):
        loader = Loader(made, context, 1, split=split)
        found = {}
        for position in range(loader.rows_per_epoch):
            labels = loader.rows([position]).labels
            found[loader.row_index(position)] = int((labels != IGNORE).sum())
        assert [found[row] for row in range(len(found))] == loader.row_targets.tolist()
        assert loader.split.document_targets().sum() == loader.row_targets.sum()


def test_preparation_and_report_count_targets_and_rows_without_one(tmp_path):
    documents = [
        TokenizedDocument(np.ones(1500, int), learned=np.arange(1500) >= start)
        for start in (1498, 1400, 1500, 100)
    ]
    made = write_dataset(
        documents, tmp_path / "d", vocab_size=9, eod_id=0, val_fraction=0, masked=True
    )
    words = report.report(made)
    # the end of a document is learned if its last token is
    assert " 1,505 of these are targets of the loss (none in 1 of the documents), " in words[1]
    [cells] = [line.split() for line in words if line.startswith("    1,024 ")][1:]
    loader = Loader(made, 1024, 1)
    empty = int((loader.row_targets == 0).sum())
    assert empty > 0 and cells[1:3] == [f"{loader.rows_per_epoch:,}", f"{empty:,}"]
    warnings = [line for line in words if "no target, because" in line]
    assert "rows of 1,024 tokens" in warnings[0] and "--context_length" in warnings[0]


def test_preparation_and_report_of_data_without_marks_say_nothing_of_targets(tmp_path):
    made = write_dataset([np.arange(1, 9)] * 3, tmp_path / "d", vocab_size=9, eod_id=0)
    assert not any("target" in line for line in report.report(made))
