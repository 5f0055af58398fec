"""lab.intuitor and lab.grade as a user runs them: figures, resume, ranks, validation, refusals."""

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
from data import sums
from data.writer import TokenizedDocument, write_dataset
from lab import grade, intuitor
from lab.posttrain import reward
from lab.posttrain.config import GradeConfig, IntuitorConfig
from longhaul import cli, qwen3
from longhaul.checkpoint import load, resume
from longhaul.checkpoint.format import checksum
from longhaul.exits import NUMERICS
from scripts import evaluate
from tests import kit
from tests.kit import records, same_bits
from tests.ranks import run_program

END, VOCABULARY = 14, 15
MODEL = (
    "--model_size tiny --vocab_size 15 --context_length 16 --rope_theta 1e4 --dtype fp32 "
    "--device cpu --model_overrides hidden_size=32 num_layers=1 num_heads=2 num_kv_heads=2 "
    "head_dim=16 ffn_size=48 tie_embeddings=false"
)
SHORT = "--context_length 8 --max_new_tokens 1"  # which is planned in less time
VALIDATED = "--max_steps 4 --eval_every 2 --eval_rows 6"
MAIN = {"intuitor": intuitor.main, "grade": grade.main}
FLAGS = {
    "intuitor": "--max_response_length 10 --group_size 4 --batch_size 2",
    # of prompts of several lengths
    "grade": "--reward_checkpoint {folder}/reward --data {folder}/lengths --batch_size 1 "
    "--max_new_tokens 3 --gumbel_topk 8 --context_length 12",
}
PROGRAMS = list(MAIN)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Sums in `asked`, prompts of several lengths in `lengths`, too few in `few`, too long ones in
    `long`; a first model in `base`, and a reward model of its body in `reward`.
    """
    folder = tmp_path_factory.mktemp("policies")
    assert sums.main(["--output", str(folder / "asked"), "--worked", "1"]) == 0
    write_prompts(folder / "lengths", [n % 6 + 2 for n in range(60)])
    write_prompts(folder / "few", [3] * 4)
    write_prompts(folder / "long", [12] * 16)
    first_model(folder, folder / "base", 12)

    body = load.load_model(load.verified(load.newest(folder / "base")), dtype="float32")
    judge = reward.RewardModel(body)
    judge.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    reward.save(judge, folder / "reward")
    return folder


def write_prompts(out: Path, lengths: list[int]):
    """A dataset of prompts of so many tokens, without answers."""
    draw = np.random.default_rng(0)
    texts = [np.append(draw.integers(0, END, length), END) for length in lengths]
    made = [TokenizedDocument(tokens) for tokens in texts]
    write_dataset(made, out, vocab_size=VOCABULARY, eod_id=END, val_fraction=0.2)


def first_model(folder: Path, out: Path, steps: int):
    flags = f"{MODEL} --data {folder}/asked --output_dir {out} --max_steps {steps} --lr 3e-3"
    more = "--schedule constant --warmup_steps 2 --batch_size 8 --eval_every 0"
    train.main(f"{flags} {more}".split())


def words(program: str, folder: Path, out: Path, more: str = "") -> list[str]:
    given = f"--checkpoint {folder}/base --data {folder}/asked --output_dir {out} --device cpu"
    usual = "--dtype fp32 --eval_every 0 --global_batch_size 4 --lr 1e-3"
    flags = f"{given} {usual} {FLAGS[program]} {more}"
    return kit.last_given(flags.format(folder=folder).split())


def run(program: str, folder: Path, out: Path, more: str = ""):
    MAIN[program](words(program, folder, out, more))


def refused(capsys, *given) -> tuple[int, str]:
    """The exit code of a run, and the last line that it prints."""
    with pytest.raises(SystemExit) as stop:
        run(*given)
    said = capsys.readouterr()
    return stop.value.code, (said.out + said.err).strip().splitlines()[-1]


@pytest.fixture(scope="module")
def wholes(folder) -> dict[str, Path]:
    """A run of each program of 4 steps that nothing disturbed, validated twice."""
    for program in PROGRAMS:
        run(program, folder, folder / f"whole-{program}", f"{VALIDATED} --save_every 2")
    return {program: folder / f"whole-{program}" for program in PROGRAMS}


# ---- what a run says


def test_each_step_says_what_the_policy_did(wholes):
    steps = kit.steps(wholes["intuitor"] / "metrics.jsonl")
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    for record in steps:
        assert record["kl"] >= -1e-6
        assert 0 <= record["accuracy"] <= 1
        assert 0 <= record["truncated"] <= 1
        assert 0 < record["response_tokens"] <= 10
        assert record["self_certainty"] > 0
        assert record["reward"] > 0
        assert record["sampling_s"] > 0
    assert steps[0]["kl"] < 1e-6  # the reference is the policy before its first step
    assert steps[-1]["kl"] > steps[0]["kl"]


def test_each_step_says_reward_kl_and_what_the_mixtures_leave_out(wholes):
    steps = kit.steps(wholes["grade"] / "metrics.jsonl")
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    for record in steps:
        assert 0 < record["reward"] < 1
        assert 0 < record["topk_mass"] <= 1 + 1e-6
        assert 0 < record["response_length"] <= 3
        expected = 0.1 * record["kl"] - record["reward"]
        assert record["loss"] == pytest.approx(expected, abs=1e-5)
    assert steps[0]["kl"] < 1e-6 < steps[-1]["kl"]


@pytest.mark.parametrize(
    "program, name", [("intuitor", "validation_accuracy"), ("grade", "val_reward_mean")]
)
def test_answers_to_validation_prompts_are_logged(wholes, program, name):
    found = [record for record in records(wholes[program]) if name in record]
    assert [record["step"] for record in found] == [0, 2, 4]
    assert all(0 <= record[name] <= 1 for record in found)
    events = EventAccumulator(str(wholes[program] / "tensorboard")).Reload()
    tag = name.replace("_", "/", 1)
    assert [event.step for event in events.Scalars(tag)] == [0, 2, 4]
    assert [event.step for event in events.Scalars("train/reward")] == [1, 2, 3, 4]


def source(out: Path, step: int) -> dict:
    return json.loads((out / f"step-{step:08}" / "manifest.json").read_text())["source"]


def test_a_checkpoint_has_the_folder_of_the_reference(wholes, folder):
    expected = str(folder / "base" / "step-00000012")
    assert source(wholes["intuitor"], 4)["reference"] == expected


@pytest.mark.slow
def test_the_kl_is_logged_as_long_as_a_reference_is_held(folder, tmp_path):
    held, free = tmp_path / "held", tmp_path / "free"
    run("intuitor", folder, held, "--kl_coef 0 --max_steps 2")
    assert all(record["kl"] > -1e-6 for record in records(held))
    assert records(held)[1]["kl"] > 0

    run("intuitor", folder, free, "--kl_coef 0 --max_steps 2 --no_keep_reference")
    assert not any("kl" in record for record in records(free))
    assert same_bits(held, free)

    run("intuitor", folder, held, "--kl_coef 0 --max_steps 3 --no_keep_reference")
    two, three = (source(held, step) for step in (2, 3))
    assert len(two["reference_sha256"]) == 64
    for name in ("reference", "reference_sha256"):
        assert three[name] == two[name]


@pytest.mark.slow
def test_a_policy_that_has_diverged_ends_in_one_line(folder, tmp_path, capsys):
    policy = load.load_model(load.verified(load.newest(folder / "base")), dtype="float32")
    policy.norm.weight.data.fill_(3e38)
    qwen3.to_hf(policy, tmp_path / "diverged")
    more = f"--checkpoint {tmp_path}/diverged {SHORT}"
    code, line = refused(capsys, "grade", folder, tmp_path / "run", more)
    assert code == NUMERICS
    assert "step 1" in line
    assert "tau 2" in line


# ---- going on


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_run_that_goes_on_ends_with_the_same_bits(program, folder, wholes, tmp_path):
    out = shutil.copytree(wholes[program], tmp_path / "run")
    shutil.rmtree(out / "step-00000004")  # as if it had been killed before
    run(program, folder, out, f"{VALIDATED} --save_every 2")
    assert same_bits(out, wholes[program])


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_ranks_learn_the_same(program, folder, wholes):
    """Also from prompts of several lengths, of which they count the tokens alike."""
    out = folder / f"ranks-{program}"
    run_program(MAIN[program], 2, words(program, folder, out, f"{VALIDATED} --batch_size 1"))
    mine, theirs = records(out), records(wholes[program])
    assert len(mine) == len(theirs)
    for found, expected in zip(mine, theirs, strict=True):
        assert found.keys() >= expected.keys() - {"sampling_s"}
        for name in ("tokens", "accuracy", "response_tokens", "truncated"):
            assert found.get(name) == expected.get(name)
        for name in ("loss", "reward", "kl", "grad_norm", "topk_mass", "val_reward_mean"):
            assert found.get(name) == pytest.approx(expected.get(name), abs=2e-5)
        for name in ("validation_accuracy", "validation_self_certainty"):
            assert found.get(name) == pytest.approx(expected.get(name), abs=2e-5)


@pytest.mark.slow
def test_a_reference_stays_the_one_that_the_run_began_with(folder, tmp_path, capsys):
    """Also if the run that it came from has gone on; another one, or none, is refused."""
    base = tmp_path / "base"
    shutil.copytree(folder / "base", base)
    given = "intuitor", folder, tmp_path / "run"
    run(*given, f"--checkpoint {base} --max_steps 1")
    first_model(folder, base, 13)
    assert (base / "step-00000013").exists()
    run(*given, f"--checkpoint {base} --max_steps 2")
    old = str(base / "step-00000012")
    assert source(tmp_path / "run", 2)["reference"] == old

    shutil.rmtree(old)
    shutil.copytree(base / "step-00000013", old)
    code, line = refused(capsys, *given, f"--checkpoint {base} --max_steps 3")
    assert code
    assert old in line
    shutil.rmtree(old)
    code, line = refused(capsys, *given, f"--checkpoint {base} --max_steps 3")
    assert code
    assert old in line


def test_frozen_embeddings_stay_those_of_the_first_model(folder, tmp_path):
    run("grade", folder, tmp_path, f"{SHORT} --freeze_embeddings --max_steps 2")
    first, last = kit.weights(folder / "base"), kit.weights(tmp_path)
    kept = {name for name, weight in last.items() if torch.equal(weight, first[name])}
    assert kept == {"model.embed.weight", "model.lm_head.weight"}


def test_a_run_that_is_extended_says_how_tau_jumps():
    cfg = GradeConfig(max_steps=4)
    recorded = json.loads(json.dumps(dataclasses.asdict(cfg)))
    longer = dataclasses.replace(cfg, max_steps=7)
    torch_now = dict(threads=torch.get_num_threads(), torch=torch.__version__)
    checkpoint = SimpleNamespace(step=4, config=recorded, **torch_now)
    (said,) = resume.changes(checkpoint, longer)
    assert "tau 0.5 -> 0.794" in said


# ---- what is refused


@pytest.mark.slow
@pytest.mark.parametrize(
    "program, flags, named",
    [
        ("intuitor", "--data {folder}/long", "12 tokens"),
        ("intuitor", "--data {folder}/few", "step"),
        ("grade", "--data {folder}/long --context_length 12", "12 tokens"),
        ("grade", "--batch_size 2", "--batch_size 1"),
    ],
)
def test_prompts_that_do_not_fit_are_refused_before_anything_is_written(
    program, flags, named, folder, tmp_path, capsys
):
    code, line = refused(capsys, program, folder, tmp_path / "run", flags)
    assert code == 2
    assert named in line
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_resume_may_not_change_what_the_policy_learns_from(folder, wholes, capsys):
    more = "--max_steps 5 --reward label"
    code, line = refused(capsys, "intuitor", folder, wholes["intuitor"], more)
    assert code
    assert "--reward" in line


@pytest.mark.parametrize("resumed", ["auto", "named"])
def test_a_manifest_without_what_the_policy_learns_from_is_refused(
    wholes, folder, tmp_path, capsys, resumed
):
    out = shutil.copytree(wholes["intuitor"], tmp_path / "whole")
    for path in out.glob("step-*/manifest.json"):
        manifest = json.loads(path.read_text())
        del manifest["config"]["kl_coef"], manifest["config"]["reward"]
        path.write_text(json.dumps(manifest | {"checksum": checksum(manifest)}))

    more = "--max_steps 5"
    if resumed == "named":
        more += f" --resume {out}/step-00000004"
        out = tmp_path / "new"
    code, line = refused(capsys, "intuitor", folder, out, more)
    assert code
    assert "kl_coef, reward" in line


def test_a_run_of_train_py_is_not_resumed_as_a_policy(folder, tmp_path, capsys):
    more = f"--resume {folder}/base/step-00000012"
    code, line = refused(capsys, "intuitor", folder, tmp_path / "new", more)
    assert code
    assert "lab.intuitor" in line


# ---- flags, and other programs that read a policy's checkpoint


def test_flags_of_other_programs_have_their_own_meaning():
    assert cli.parse(GradeConfig, ["--no-checkpoint"]).gradient_checkpointing == "none"
    assert cli.parse(GradeConfig, []).gradient_checkpointing == "full"
    clipped = cli.parse(IntuitorConfig, ["--clip", "0.3", "--grad_clip", "2"])
    assert (clipped.policy_loss().clip, clipped.grad_clip) == (0.3, 2)
    with pytest.raises(ValueError, match="--clip"):
        cli.parse(GradeConfig, ["--clip", "0.3"])


def test_a_policy_is_evaluated_and_trained_further(wholes, folder, tmp_path, capsys):
    whole = wholes["intuitor"]
    checkpoint = f"--checkpoint {whole} --device cpu"
    evaluate.main(f"{checkpoint} --data {folder}/asked --evals loss --batches 2".split())
    assert "validation loss" in capsys.readouterr().out

    paths = f"--init_from {whole} --data {folder}/asked --output_dir {tmp_path}/further"
    small = "--max_steps 1 --batch_size 2 --eval_every 0 --context_length 16"
    train.main(f"{paths} {small} --device cpu --dtype fp32".split())
    assert len(records(tmp_path / "further"))
