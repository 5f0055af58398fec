"""lab.grade as a user runs it: figures, resume, ranks, validation, refusals."""

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train
from data.dataset import open_dataset
from data.writer import TokenizedDocument, write_dataset
from lab import grade
from lab.posttrain import grade_demo, reviews, reward
from lab.posttrain.config import GradeConfig
from lab.posttrain.grade import METHODS
from longhaul import cli, qwen3, step
from longhaul.checkpoint import load, resume
from longhaul.checkpoint import start as starting
from longhaul.config import TrainConfig
from longhaul.exits import NUMERICS
from tests import kit
from tests.kit import records, same_bits
from tests.ranks import run_program
from tests.tiers import slow

MODEL = (
    f"--model_size tiny --vocab_size {reviews.VOCABULARY} --context_length 32 --rope_theta 1e4 "
    "--dtype fp32 --device cpu --model_overrides hidden_size=32 num_layers=1 num_heads=2 "
    "num_kv_heads=2 head_dim=16 ffn_size=48"
)
SMALL = (
    "--context_length 32 --max_new_tokens 4 --gumbel_topk 24 --global_batch_size 4 "
    "--batch_size 2 --lr 1e-3"
)
SHORT = "--context_length 29 --max_new_tokens 1"  # which is planned in less time
VALIDATED = "--max_steps 4 --eval_every 2 --eval_rows 6"


def write_reviews(folder: Path):
    """Reviews of which the first words are a prompt, and the rest is learned."""
    drawn = [review.tokens for review in reviews.reviews(300, 0)]
    write_dataset(
        [TokenizedDocument(one, 0, np.arange(len(one)) >= reviews.PROMPT) for one in drawn],
        folder,
        vocab_size=reviews.VOCABULARY,
        eod_id=reviews.END,
        val_fraction=0.1,
        masked=True,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Prompts of one length in `reviews`, of several in `asked`, too long ones in `long`, a first
    model in `base`, and a reward model of its body in `reward`.
    """
    folder = tmp_path_factory.mktemp("grade")
    write_reviews(folder / "reviews")
    flags = f"{MODEL} --data {folder}/reviews --output_dir {folder}/base --max_steps 8 --lr 3e-3"
    train.main(f"{flags} --warmup_steps 2 --batch_size 8 --eval_every 0".split())
    save_reward(folder / "base", folder / "reward")
    write_prompts(folder / "asked", [n % 6 + 2 for n in range(60)])
    write_prompts(folder / "long", [29] * 60)
    return folder


def save_reward(base: Path, out: Path):
    cfg = TrainConfig(**starting.completed({"init_from": str(base), "dtype": "fp32"}))
    body = step.frozen(cfg, cfg.model(), "cpu")
    starting.load_into(body, starting.read(str(base)))
    model = reward.RewardModel(body)
    generator = torch.Generator().manual_seed(0)
    model.weight.data.normal_(generator=generator)
    reward.save(model, out)


def words(folder: Path, out: Path, more: str = "") -> list[str]:
    given = f"--checkpoint {folder}/base --reward_checkpoint {folder}/reward"
    paths = f"{given} --data {folder}/reviews --output_dir {out}"
    flags = f"{paths} --dtype fp32 --device cpu --eval_every 0 {SMALL} {more}"
    return kit.last_given(flags.split())


def asked(folder: Path, out: Path, more: str) -> list[str]:
    """The flags of a run with prompts of several lengths."""
    return words(folder, out, f"--data {folder}/asked --batch_size 1 {more}")


def run(folder: Path, out: Path, more: str = ""):
    grade.main(words(folder, out, more))


def write_prompts(out: Path, lengths: list[int]):
    """A dataset of prompts of so many tokens."""
    draw = np.random.default_rng(0)
    words = [token for token in range(reviews.VOCABULARY) if token != reviews.END]
    texts = [np.array([*draw.choice(words, length), reviews.END]) for length in lengths]
    write_dataset(
        [TokenizedDocument(tokens) for tokens in texts],
        out,
        vocab_size=reviews.VOCABULARY,
        eod_id=reviews.END,
        val_fraction=0.2,
    )


@pytest.fixture(scope="module")
def whole(folder) -> Path:
    """A run of 4 steps that nothing disturbed, validated twice."""
    out = folder / "whole"
    grade.main(asked(folder, out, f"{VALIDATED} --save_every 2"))
    return out


def test_each_step_says_reward_kl_and_what_the_mixtures_leave_out(whole):
    steps = [record for record in records(whole) if "loss" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    for record in steps:
        assert 0 < record["reward"] < 1
        assert 0 < record["topk_mass"] <= 1 + 1e-6
        assert 0 < record["response_length"] <= 4
        expected = 0.1 * record["kl"] - record["reward"]
        assert record["loss"] == pytest.approx(expected, abs=1e-5)
    assert steps[0]["kl"] < 1e-6 < steps[-1]["kl"]


def test_the_reward_of_drawn_responses_to_validation_prompts_is_logged(whole):
    found = [record for record in records(whole) if "val_reward_mean" in record]
    assert [record["step"] for record in found] == [0, 2, 4]
    assert all(0 < record["val_reward_mean"] < 1 for record in found)
    events = EventAccumulator(str(whole / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("val/reward_mean")] == [0, 2, 4]
    assert [event.step for event in events.Scalars("train/reward")] == [1, 2, 3, 4]


def test_a_run_that_goes_on_ends_with_the_same_bits(folder, whole, tmp_path):
    out = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(out / "step-00000004")  # as if it had been killed before
    grade.main(asked(folder, out, f"{VALIDATED} --save_every 2"))
    assert same_bits(out, whole)


def test_the_flag_of_the_first_version_keeps_all_activations():
    assert cli.parse(GradeConfig, ["--no-checkpoint"]).gradient_checkpointing == "none"
    assert cli.parse(GradeConfig, []).gradient_checkpointing == "full"


@pytest.mark.slow
def test_ranks_learn_the_same(folder, whole):
    """Also from prompts of several lengths, of which they count the tokens alike."""
    out = folder / "of-ranks"
    run_program(grade.main, 2, asked(folder, out, VALIDATED))
    one = [record for record in records(whole) if "loss" in record]
    two = [record for record in records(out) if "loss" in record]
    assert [record["tokens"] for record in two] == [record["tokens"] for record in one]
    for name in ("loss", "reward", "kl", "grad_norm", "topk_mass"):
        expected = [record[name] for record in one]
        assert [record[name] for record in two] == pytest.approx(expected, abs=2e-5)
    one, many = (
        [record["val_reward_mean"] for record in records(out) if "val_reward_mean" in record]
        for out in (whole, out)
    )
    assert many == pytest.approx(one, abs=2e-5) and len(many) == 3


def test_a_run_that_is_extended_says_how_tau_jumps():
    cfg = GradeConfig(max_steps=4)
    recorded = json.loads(json.dumps(dataclasses.asdict(cfg)))
    longer = dataclasses.replace(cfg, max_steps=7)
    torch_now = dict(threads=torch.get_num_threads(), torch=torch.__version__)
    checkpoint = SimpleNamespace(step=4, config=recorded, **torch_now)
    said = "changed since the checkpoint: max_steps 4 -> 7 (tau 0.5 -> 0.794)"
    assert resume.changes(checkpoint, longer) == [said]


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--max_new_tokens 32", "--max_new_tokens 32 leaves no token of"),
        slow(f"--data {{}}/long {SHORT}", "prompt of 29 tokens, and the context leaves 28"),
        ("--gumbel_topk 105", "--gumbel_topk 105 exceeds the vocabulary of 104"),
        ("--method all --gumbel_topk -1", "--gumbel_topk -1 is out of range"),
        slow(f"--data {{}}/asked {SHORT}", "tokens, and the one before it "),
        ("--reward_checkpoint {}", "is no reward model, because it has no reward.safetensors"),
        ("--attention_type nsa", "nsa has no cache yet that gradients pass through: use standard"),
        ("--evals loss", "unknown flag --evals"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(folder, tmp_path, capsys, flags, said):
    out = tmp_path / "run"
    with pytest.raises(SystemExit) as stop:
        run(folder, out, flags.format(folder))
    assert stop.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and said in lines[0]
    assert not out.exists()


@pytest.mark.slow
def test_a_policy_that_has_diverged_ends_in_one_line(folder, tmp_path, capsys):
    policy = load.load_model(load.verified(load.newest(folder / "base")), dtype="float32")
    policy.norm.weight.data.fill_(3e38)
    qwen3.to_hf(policy, tmp_path / "diverged")
    with pytest.raises(SystemExit) as stop:
        run(folder, tmp_path / "run", f"--checkpoint {tmp_path}/diverged {SHORT}")
    assert stop.value.code == NUMERICS
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "step 1: " in line and "not finite at tau 2, with a largest finite |logit|" in line


# ---- the demo


@pytest.fixture
def short_demo(monkeypatch):
    """The demo with a first model and a reward model of one layer and a few steps."""
    monkeypatch.setitem(grade_demo.SHAPE, "num_layers", 1)
    monkeypatch.setattr(grade_demo, "BASE_STEPS", 5)
    monkeypatch.setattr(grade_demo, "REWARD_STEPS", 3)


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--method all --gumbel_topk 105", "--gumbel_topk 105 exceeds the vocabulary of 104"),
        ("--context_length 30", "prompts of 7 tokens and --max_new_tokens 25 exceed"),
    ],
)
def test_what_the_demo_cannot_run_is_refused_before_its_models_are_made(
    tmp_path, capsys, flags, said
):
    with pytest.raises(SystemExit) as stop:
        grade.main(["--demo", *flags.split(), "--output_dir", str(tmp_path / "demo")])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_the_demo_measures_every_method_by_prompts_that_nothing_saw(short_demo, tmp_path, capsys):
    out = tmp_path / "demo"
    more = "--demo --method all --max_steps 1 --max_new_tokens 2 --batch_size 4 --eval_every 0"
    words = [*more.split(), "--output_dir", str(out)]
    grade.main([*words, "--plan"])
    assert capsys.readouterr().out.count("plan (computed") == len(METHODS)

    grade.main(words)
    said = capsys.readouterr().out
    for method in METHODS:
        score = json.loads((out / method / "test.json").read_text())
        assert 0 < score["reward"] < 1 and -1 <= score["gold"] <= 1
        assert f"{method:<14} reward {score['reward']:.3f}" in said

    assert len(open_dataset(tmp_path / "demo-made" / "prompts").split("val").lengths) == 24

    # given again, nothing is made or trained anew
    made = (tmp_path / "demo-made" / "base" / "config.json").stat().st_mtime_ns
    grade.main(words)
    assert capsys.readouterr().out.count("nothing to do") == len(METHODS)
    assert (tmp_path / "demo-made" / "base" / "config.json").stat().st_mtime_ns == made
