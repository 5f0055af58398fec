"""Evaluations in the loop: what they measure and leave out, what they log, and that training has
the same bits with them, without them, and when it is ended inside one.
"""

import dataclasses
import json
import math
import os
import signal
from fractions import Fraction

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train
from data import recall
from data.dataset import open_dataset
from data.loader import Loader
from data.mixture import Corpus
from data.recall import Form
from data.writer import write_dataset
from longhaul import config_checks, dist, step
from longhaul.config import TrainConfig
from longhaul.evals import measures, tasks
from longhaul.evals.heatmap import PIXELS
from longhaul.evals.measures import Asked, Measures
from longhaul.evals.score import Item, ModelScorer, Scores
from model import IGNORE
from tests import kit
from tests.ranks import run_ranks
from tests.test_evals_score import SMALL, built

VOCAB = 64
CONTEXT = 128
ALL = ("loss", "position", "gain", "retrieval")
EVALS = ["--evals", ",".join(ALL)]


def make(folder, seed: int = 0, longest: int = 400):
    draw = np.random.default_rng(seed)
    lengths = draw.integers(20, longest, 60)
    documents = [draw.integers(1, VOCAB, length) for length in lengths]
    return write_dataset(documents, folder, vocab_size=VOCAB, eod_id=0, val_fraction=0.3)


@pytest.fixture(scope="module", autouse=True)
def few_items():
    """Two items of each task at each length, instead of 32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measures, "ITEMS", 2)
        yield


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return make(tmp_path_factory.mktemp("data") / "set")


@pytest.fixture(scope="module")
def corpus(dataset):
    return Corpus("set", dataset, Fraction(1))


def asked(**changes) -> Asked:
    given = dict(context_length=CONTEXT, names=ALL, lengths=(104, 128), items=2, vocab_size=VOCAB)
    return Asked(**given | changes)


class Uniform:
    """A model that finds all tokens equally likely; every answer is wrong."""

    def __init__(self):
        self.lengths: list[int] = []  # of the rows that were scored

    def score(self, item: Item, *, hits: bool = False) -> Scores:
        self.lengths.append(item.tokens_BT.shape[1])
        valid_BT = item.labels_BT != IGNORE
        nll_BT = torch.full(valid_BT.shape, math.log(VOCAB), dtype=torch.float64)
        hit_BT = torch.zeros_like(valid_BT) if hits else None
        return Scores(nll_BT.masked_fill(~valid_BT, 0), hit_BT)


# --------------------------------------------------------------------------- measures


@pytest.fixture(scope="module")
def report(corpus):
    return Measures([corpus], asked()).run(Uniform())


def test_all_measures_are_in_the_record_the_lines_and_the_scalars(report):
    record = json.loads(json.dumps(report.record(), allow_nan=False))
    assert record["loss"]["set"]["loss"] == pytest.approx(math.log(VOCAB))
    assert record["gain"]["set"]["all"]["gain"] == pytest.approx(0)
    assert [one["length"] for one in record["retrieval"]["mean"]] == [104, 128]
    assert record["left_out"] == {} and record["seconds"] > 0

    begun = [line.split("  ")[0] for line in report.lines()]
    assert begun == ["validation loss", "by position", "context gain", "retrieval"]
    assert report.lines(loss=False) == report.lines()[1:]
    assert {"position/64-128", "gain/all", "retrieval/mean_128"} <= report.scalars().keys()

    detailed = report.record(per_document=True)
    counts = detailed["loss"]["set"]["per_document"]["tokens"]
    assert sum(counts) == record["loss"]["set"]["tokens"]
    assert detailed["gain"]["set"]["per_document"]["all"]["tokens"]
    assert "per_document" not in record["loss"]["set"]


def test_only_what_was_asked_is_measured(corpus):
    scorer = Uniform()
    report = Measures([corpus], asked(names=("position",), rows=3)).run(scorer)
    assert scorer.lengths == [CONTEXT] * 3
    assert [line.split("  ")[0] for line in report.lines()] == ["by position"]
    assert Measures([corpus], asked(names=())).run(Uniform()).lines() == []


class ByToken(Uniform):
    """The loss of a token follows from its id, its label and its place."""

    def score(self, item: Item, *, hits: bool = False) -> Scores:
        found = super().score(item, hits=hits)
        places = torch.arange(item.tokens_BT.shape[1]) if item.positions is None else item.positions
        mixed = item.tokens_BT * 31 + item.labels_BT * 17 + places
        return found._replace(nll_BT=(mixed % 1009).double().masked_fill(found.nll_BT == 0, 0))


def test_the_gain_is_that_of_the_documents_that_are_read(corpus):
    def found(*names: str) -> dict:
        asked_for = asked(names=names, rows=10**6, documents=range(100, 301), context_length=300)
        return Measures([corpus], asked_for).run(ByToken()).record()

    both = found("loss", "gain")
    assert both["gain"] == found("gain")["gain"]
    lengths = corpus.dataset.split("val").lengths
    chosen = ((lengths >= 100) & (lengths < 301)).sum()
    assert both["loss"]["set"]["documents"] == both["gain"]["set"]["documents"] == chosen > 1


def test_a_corpus_with_targets_has_losses_of_them_and_questions_of_its_ids(tmp_path):
    form = Form(length=200, pairs=8)
    words = f"--output {tmp_path}/recall --lengths 200:8 --tokens 8000 --periodic 0 --seed 1"
    assert recall.main([*words.split(), "--val_fraction", "0.5"]) == 0
    dataset = open_dataset(tmp_path / "recall")
    corpus = Corpus("recall", dataset, Fraction(1))

    small = asked(context_length=200, vocab_size=0, lengths=(150, 200), rows=10**6)
    both = Measures([corpus], small).run(ByToken()).record()
    losses = both["loss"]["recall"]
    assert losses["tokens"] == form.asked * losses["documents"]
    gain_only = dataclasses.replace(small, names=("gain",))
    assert both["gain"] == Measures([corpus], gain_only).run(ByToken()).record()["gain"]
    values = len(recall.VALUES)
    by_form = {one["task"]: one["chance_by_form"] for one in both["retrieval"]["scores"]}
    assert by_form["single"] == pytest.approx(1 / values)


def test_several_corpora_have_figures_of_their_own(tmp_path, corpus):
    other = Corpus("other", make(tmp_path / "other", seed=1), Fraction(1))
    report = Measures([corpus, other], asked()).run(Uniform())
    assert report.losses.keys() == {"set", "other"}
    names = [line.split()[-1] for line in report.lines()[:4]]
    assert names == ["[set]", "[set]", "[other]", "[other]"]
    assert {"gain/all/set", "gain/all/other", "retrieval/mean_104"} <= report.scalars().keys()


@pytest.mark.parametrize("forwards", [3, 40])
def test_a_run_that_is_asked_to_stop_has_no_report(corpus, forwards):
    scorer = Uniform()
    stop = lambda: len(scorer.lengths) >= forwards  # noqa: E731
    prepared = Measures([corpus], asked(rows=5))
    assert prepared.run(scorer, must_stop=stop) is None
    assert len(scorer.lengths) == forwards


def test_what_cannot_be_measured_is_left_out_with_its_reason_or_refused(tmp_path, corpus):
    short = Corpus("short", make(tmp_path / "short", longest=30), Fraction(1))
    prepared = Measures([short], asked(names=("loss", "gain", "retrieval"), lengths=()))
    report = prepared.run(Uniform())
    assert report.found.keys() == {"loss"}
    assert report.left_out.keys() == {"gain", "retrieval"}
    for line, reason in zip(report.lines()[-2:], report.left_out.values(), strict=True):
        assert line.endswith(reason)

    Measures([corpus], asked()).require()
    short_context = Measures([corpus], asked(names=("gain",), context_length=7))
    long_needles = Measures([corpus], asked(names=("retrieval",), lengths=(20,)))
    for impossible, words in ((prepared, "gain"), (short_context, "7"), (long_needles, "20")):
        with pytest.raises(ValueError, match=words):
            impossible.require()


@pytest.mark.parametrize("name", ["position", "retrieval"])
def test_without_validation_documents_the_remedy_is_a_flag_of_the_preparation(tmp_path, name):
    given = dict(vocab_size=VOCAB, eod_id=0, val_fraction=0)
    dataset = write_dataset([np.arange(1, 50)] * 3, tmp_path / "set", **given)
    prepared = Measures([Corpus("set", dataset, Fraction(1))], asked(names=(name,)))
    report = prepared.run(Uniform())
    assert not report.found
    [reason] = report.left_out.values()
    assert "--val_fraction" in reason and reason in report.lines()[0]


def test_an_item_that_cannot_be_made_is_refused_before_any_is_scored(tmp_path):
    draw = np.random.default_rng(0)
    documents = [draw.integers(1, 17, 6000) for _ in range(12)]
    few = write_dataset(documents, tmp_path / "few", vocab_size=17, eod_id=0, val_fraction=0.5)
    questions = dict(names=("retrieval",), lengths=(9000,), context_length=9000, vocab_size=17)
    multikey = asked(**questions, tasks=("multikey",), items=12)
    Measures([Corpus("few", few, Fraction(1))], dataclasses.replace(multikey, items=1)).require()

    prepared = Measures([Corpus("few", few, Fraction(1))], multikey)
    with pytest.raises(ValueError, match="multikey"):
        prepared.require()
    assert "retrieval" in prepared.run(Uniform()).left_out


# --------------------------------------------------------------------------- the flags


def settings(**changes) -> TrainConfig:
    given = dict(model_size="tiny", device="cpu", dtype="fp32", context_length=5000)
    return TrainConfig(**given | changes)


def test_lengths_of_retrieval_are_powers_of_two_up_to_the_context():
    assert settings().retrieval_lengths() == (1024, 2048, 4096)
    assert settings(context_length=4096).retrieval_lengths() == (1024, 2048, 4096)
    assert settings(context_length=100).retrieval_lengths() == (100,)


def test_flags_of_evaluations_that_are_off_are_left_alone():
    cfg = settings(eval_every=0, evals="needle")
    assert config_checks.ineffective_settings(cfg) == []


# --------------------------------------------------------------------------- train.py


def arguments(dataset, out, *more: str) -> list[str]:
    flags = ["--context_length", str(CONTEXT), "--schedule", "constant", "--eval_rows", "3", *more]
    return kit.arguments(dataset.path, out, *flags)


@pytest.fixture(scope="module")
def evaluated(dataset, tmp_path_factory):
    """A run of 4 steps with all measures after 2 and 4."""
    out = tmp_path_factory.mktemp("evaluated") / "run"
    train.main(arguments(dataset, out, "--max_steps", "4", "--eval_every", "2", *EVALS))
    return out


def records(out) -> list[dict]:
    return [json.loads(line) for line in (out / "eval.jsonl").read_text().splitlines()]


def test_an_evaluation_changes_no_bit_of_training(evaluated, dataset, tmp_path):
    train.main(arguments(dataset, tmp_path / "run", "--max_steps", "4", "--eval_every", "0"))
    assert kit.same_end(tmp_path / "run", evaluated)
    assert not (tmp_path / "run" / "eval.jsonl").exists()


def test_every_evaluation_is_an_object_of_eval_jsonl(evaluated):
    first, last = records(evaluated)
    assert (first["step"], last["step"]) == (2, 4)
    lines = map(json.loads, (evaluated / "metrics.jsonl").read_text().splitlines())
    validations = [record for record in lines if "validation_loss" in record]
    for record, validation in zip((first, last), validations, strict=True):
        (losses,) = record["loss"].values()
        assert losses["loss"] == validation["validation_loss"]
        assert losses["tokens"] == validation["validation_tokens"]
        buckets = losses["by_position"]
        total = sum(bucket["loss"] * bucket["tokens"] for bucket in buckets)
        assert abs(total / losses["tokens"] - losses["loss"]) < 1e-9
        assert record["gain"]["set"]["all"]["tokens"] > 0
        assert len(record["retrieval"]["scores"]) == 6


def test_tensorboard_has_the_curves_of_all_measures(evaluated):
    events = EventAccumulator(str(evaluated / "tensorboard")).Reload()
    wanted = {"validation/loss", "position/16-32", "gain/all", "retrieval/mean_128"}
    assert wanted <= set(events.Tags()["scalars"])
    images = [name for name in events.Tags()["images"] if name.startswith("retrieval/scores/")]
    assert len(images) == 7  # six tasks and their mean
    (first, last) = events.Images("retrieval/scores/mean")
    assert (first.step, last.step) == (2, 4)
    assert first.height == tasks.DEPTHS * PIXELS

    points = [(point.step, point.value) for point in events.Scalars("position/16-32")]
    expected = [record["loss"]["set"]["by_position"][1]["loss"] for record in records(evaluated)]
    assert points == [(2, pytest.approx(expected[0])), (4, pytest.approx(expected[1]))]


def test_a_resumed_run_drops_later_evaluations_and_goes_on_without_what_is_impossible(
    dataset, tmp_path, capsys
):
    """The first life has the default measures."""
    out = tmp_path / "run"
    flags = ["--eval_every", "1", "--context_length", "20", "--max_steps"]
    train.main(arguments(dataset, out, *flags, "1"))
    said = capsys.readouterr().out
    (record,) = records(out)
    assert record.keys() == {"step", "time", "loss", "left_out", "seconds"}
    assert f"validation loss {record['loss']['set']['loss']:.4f} nats" in said
    assert "by position" in said and "retrieval" not in said

    with open(out / "eval.jsonl", "a") as file:  # as a killed run leaves it
        file.write('{"step": 2, "loss": {}}\n{"step": 3, "lo')
    train.main(arguments(dataset, out, *flags, "2", "--evals", "loss,retrieval"))
    first, last = records(out)
    assert (first, last["step"]) == (record, 2)
    assert "retrieval" in last["left_out"] and "loss" in last


def test_a_stage_is_evaluated_at_its_own_context(dataset, tmp_path):
    out = tmp_path / "run"
    flags = ["--length_schedule", "32:1,128:1", "--eval_every", "1", "--context_length", "128"]
    train.main(arguments(dataset, out, *flags, "--max_steps", "2", *EVALS))
    first, last = records(out)
    assert first["loss"]["set"]["by_position"][-1]["last"] == 32
    assert last["loss"]["set"]["by_position"][-1]["last"] == 128
    assert (first["gain"]["set"]["short"], last["gain"]["set"]["short"]) == (16, 64)
    assert first["left_out"].keys() == {"retrieval"} and last["left_out"] == {}
    assert [one["task"] for one in last["retrieval"]["scores"]] == [*tasks.TASKS]


# --------------------------------------------------------------------------- several ranks


SETTINGS = [
    dict(context_parallel_size=2, context_parallel_mode="gather_kv"),
    dict(dtype="bf16", master_weights="none"),  # rounds at random
]


def trained(world: dist.World, folder: str, changes: dict, evaluate: bool) -> list[torch.Tensor]:
    """Weights, gradients' norms and optimizer states after three steps."""
    state = built(changes, world)
    sharing = state.cfg.context_ranks
    readers = world.size // sharing
    loader = Loader(open_dataset(folder), SMALL["context_length"], readers)
    corpus = Corpus("set", loader.dataset, Fraction(1))
    small = asked(context_length=64, lengths=(104,), rows=2, items=1)
    prepared = Measures([corpus], small) if evaluate else None

    bits = []
    for index in range(3):
        rows = loader.batch(index, world.rank // sharing, readers)
        result = step.train_step(state, step.micro_batches(rows, 1, state.device))
        bits += [torch.as_tensor(result.loss), torch.as_tensor(result.grad_norm)]
        if prepared and index == 1:
            scorer = ModelScorer(state.model, "cpu")
            report = prepared.run(scorer, world=world, ranks_per_row=sharing)
            assert report.found.keys() == {"loss", "gain", "retrieval"}

    for parameter in state.model.parameters():
        bits.append(dist.local_shard(parameter.detach()))
        for value in state.optimizer.state[parameter].values():
            bits.append(dist.local_shard(torch.as_tensor(value)))
    return [x.clone() for x in bits]


def differences(world: dist.World, folder: str, settings: list[dict]) -> list[int]:
    """How many tensors differ after a training with evaluations, for each of the settings."""
    found = []
    for changes in settings:
        without = trained(world, folder, changes, evaluate=False)
        evaluated = trained(world, folder, changes, evaluate=True)
        pairs = list(zip(without, evaluated, strict=True))
        assert len(pairs) > 20
        found.append(sum(not torch.equal(a, b) for a, b in pairs))
    return found


@pytest.mark.slow
def test_evaluations_change_no_bit_whatever_ranks_share(dataset):
    folder = str(dataset.path)
    assert run_ranks(differences, 2, folder, SETTINGS) == [[0] * 2] * 2


# --------------------------------------------------------------------------- ended


@pytest.mark.slow
def test_a_run_that_is_ended_in_an_evaluation_resumes_to_the_same_bits(
    evaluated, dataset, tmp_path, monkeypatch
):
    out = tmp_path / "run"
    words = arguments(dataset, out, "--max_steps", "4", "--eval_every", "2", *EVALS)
    words += ["--save_every", "1"]
    scored = ModelScorer.score
    calls = []

    def score(self, item: Item, *, hits: bool = False) -> Scores:
        calls.append(item)
        if len(calls) == 8:
            os.kill(os.getpid(), signal.SIGTERM)
        return scored(self, item, hits=hits)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(ModelScorer, "score", score)
        train.main(words)
    assert stop.value.code == 75
    assert not (out / "eval.jsonl").exists()  # it ended inside the first evaluation
    assert max(path.name for path in out.glob("step-*")) == "step-00000002"

    train.main(words)
    assert kit.same_end(out, evaluated)
    assert [record["step"] for record in records(out)] == [4]
