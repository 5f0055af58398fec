"""lab.intuitor as a user runs it: figures, resume, ranks, validation, refusals."""

import json
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train
from data import sums
from data.writer import TokenizedDocument, write_dataset
from lab import intuitor
from lab.posttrain import demo
from lab.posttrain.config import GradeConfig, IntuitorConfig
from longhaul import cli
from longhaul.checkpoint.format import checksum
from scripts import evaluate
from tests import kit
from tests.kit import records, same_bits
from tests.ranks import run_program
from tests.tiers import slow

MODEL = (
    "--model_size tiny --vocab_size 15 --context_length 16 --rope_theta 1e4 --dtype fp32 "
    "--device cpu --model_overrides hidden_size=32 num_layers=1 num_heads=2 num_kv_heads=2 "
    "head_dim=16 ffn_size=48 tie_embeddings=false"
)
SMALL = "--max_response_length 10 --group_size 4 --global_batch_size 4 --batch_size 2 --lr 1e-3"
VALIDATED = "--max_steps 4 --eval_every 2 --eval_rows 6"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Prompts in `asked`, too few in `few`, too long ones in `long`, and a first model of a few
    steps in `base`.
    """
    folder = tmp_path_factory.mktemp("intuitor")
    assert sums.main(["--output", str(folder / "asked"), "--worked", "1"]) == 0
    write_prompts(folder / "few", 3, 3)
    write_prompts(folder / "long", 12, 7)
    first_model(folder, folder / "base", 12)
    return folder


def write_prompts(out: Path, count: int, tokens: int):
    """A dataset of documents without answers."""
    made = [TokenizedDocument(np.array([*range(tokens), 14])) for _ in range(count)]
    write_dataset(made, out, vocab_size=15, eod_id=14, val_fraction=0)


def first_model(folder: Path, out: Path, steps: int):
    flags = f"{MODEL} --data {folder}/asked --output_dir {out} --max_steps {steps} --lr 3e-3"
    more = "--schedule constant --warmup_steps 2 --batch_size 8 --eval_every 0"
    train.main(f"{flags} {more}".split())


def words(folder: Path, out: Path, more: str = "") -> list[str]:
    given = f"--checkpoint {folder}/base --data {folder}/asked --output_dir {out} --device cpu"
    flags = f"{given} --dtype fp32 --eval_every 0 {SMALL} {more}"
    return kit.last_given(flags.split())


def run(folder: Path, out: Path, more: str = ""):
    intuitor.main(words(folder, out, more))


@pytest.fixture(scope="module")
def whole(folder) -> Path:
    """A run of 4 steps that nothing disturbed, validated twice."""
    out = folder / "whole"
    run(folder, out, f"{VALIDATED} --save_every 2")
    return out


# ---- what a run says


def test_each_step_says_what_the_policy_did(whole):
    steps = [record for record in records(whole) if "loss" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    for record in steps:
        assert record["kl"] >= -1e-6
        assert 0 <= record["accuracy"] <= 1 and 0 <= record["truncated"] <= 1
        assert 0 < record["response_tokens"] <= 10
        assert record["self_certainty"] > 0 and record["reward"] > 0
        assert record["sampling_s"] > 0
    assert steps[0]["kl"] < 1e-6  # the reference is the policy before its first step
    assert steps[-1]["kl"] > steps[0]["kl"]


def test_validation_prompts_are_answered_and_logged(whole):
    found = [record for record in records(whole) if "validation_accuracy" in record]
    assert [record["step"] for record in found] == [0, 2, 4]
    assert all(0 <= record["validation_truncated"] <= 1 for record in found)
    events = EventAccumulator(str(whole / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("validation/accuracy")] == [0, 2, 4]
    assert [event.step for event in events.Scalars("train/reward")] == [1, 2, 3, 4]


def source(out: Path, step: int) -> dict:
    return json.loads((out / f"step-{step:08}" / "manifest.json").read_text())["source"]


def test_a_checkpoint_has_the_folder_of_the_reference(whole, folder):
    assert source(whole, 4)["reference"] == str(folder / "base" / "step-00000012")


@pytest.mark.slow
def test_the_kl_is_logged_as_long_as_a_reference_is_held(folder, tmp_path, capsys):
    run(folder, tmp_path / "held", "--kl_coef 0 --max_steps 2")
    assert all(record["kl"] > -1e-6 for record in records(tmp_path / "held"))
    assert records(tmp_path / "held")[1]["kl"] > 0
    assert "the KL is not measured" not in capsys.readouterr().out

    run(folder, tmp_path / "free", "--kl_coef 0 --max_steps 2 --no_keep_reference")
    assert not any("kl" in record for record in records(tmp_path / "free"))
    assert "the KL is not measured" in capsys.readouterr().out
    assert same_bits(tmp_path / "held", tmp_path / "free")

    run(folder, tmp_path / "held", "--kl_coef 0 --max_steps 3 --no_keep_reference")
    two, three = (source(tmp_path / "held", step) for step in (2, 3))
    assert len(two["reference_sha256"]) == 64
    for name in ("reference", "reference_sha256"):
        assert three[name] == two[name]


# ---- going on


@pytest.mark.slow
def test_ranks_sample_the_same_responses_and_learn_the_same(folder, whole):
    out = folder / "of-ranks"
    run_program(intuitor.main, 2, words(folder, out, f"{VALIDATED} --batch_size 1"))
    one = [record for record in records(whole) if "loss" in record]
    many = [record for record in records(out) if "loss" in record]
    for name in ("accuracy", "response_tokens", "truncated", "tokens"):
        assert [record[name] for record in many] == [record[name] for record in one]
    for name in ("loss", "reward", "kl", "grad_norm"):
        expected = [record[name] for record in one]
        assert [record[name] for record in many] == pytest.approx(expected, abs=2e-5)
    validated = ("validation_accuracy", "validation_self_certainty")
    one, many = (
        [record[name] for record in records(out) for name in validated if name in record]
        for out in (whole, out)
    )
    assert many == pytest.approx(one, abs=2e-5) and len(many) == 6


@pytest.mark.slow
def test_an_extended_run_has_the_bits_and_the_reference_of_a_whole_one(
    folder, whole, tmp_path, capsys
):
    """Also if the run that the reference came from has gone on; a reference that is another, or
    gone, is refused.
    """
    base = tmp_path / "base"
    shutil.copytree(folder / "base", base)
    flags = f"--checkpoint {base}"
    run(folder, tmp_path / "run", f"{flags} --max_steps 2")

    first_model(folder, base, 13)
    assert (base / "step-00000013").exists()
    run(folder, tmp_path / "run", f"{flags} --max_steps 4")
    assert same_bits(tmp_path / "run", whole)

    old = base / "step-00000012"
    shutil.rmtree(old)
    shutil.copytree(base / "step-00000013", old)
    with pytest.raises(SystemExit):
        run(folder, tmp_path / "run", f"{flags} --max_steps 5")
    assert "is not the one that this run began with: put that one back" in capsys.readouterr().err

    shutil.rmtree(old)
    with pytest.raises(SystemExit):
        run(folder, tmp_path / "run", f"{flags} --max_steps 5")
    assert "step-00000012 is not there any more: put it back" in capsys.readouterr().err


# ---- what is refused


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--max_response_length 16", "--max_response_length 16 leaves no token of"),
        slow("--data {folder}/long", "prompt of 7 tokens, and the context leaves 6"),
        ("--group_size 1", "--group_size 1 is out of range: give a number of at least 2"),
        ("--temperature 0", "--temperature 0 is out of range: give 1e-06 to 1000"),
        ("--temperature nan", "--temperature nan is out of range"),
        ("--clip 0", "--clip_ratio 0 is out of range: give a number above 0 and below 1"),
        ("--reward applause", "--reward 'applause' is unknown"),
        ("--length_schedule 8:1,16:1", "unknown flag --length_schedule"),
        ("--attention_type nsa", "--attention_type nsa cannot share a prompt"),
        slow("--data {folder}/few", "fewer than the 4 of one step"),
        ("--checkpoint {folder}/nothing", "nothing"),
        ("--vocab_size 16", "--vocab_size 16"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(folder, tmp_path, capsys, flags, said):
    out = tmp_path / "run"
    with pytest.raises(SystemExit) as stop:
        run(folder, out, flags.format(folder=folder))
    assert stop.value.code == 2
    assert said in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.slow
def test_a_reward_by_answers_is_refused_without_them(folder, tmp_path, capsys):
    write_prompts(tmp_path / "data", 12, 3)
    with pytest.raises(SystemExit) as stop:
        run(folder, tmp_path / "run", f"--data {tmp_path}/data --reward label")
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "--reward label compares responses with answers" in line
    assert not (tmp_path / "run").exists()


def test_clip_is_the_policys():
    clipped = cli.parse(IntuitorConfig, ["--clip", "0.3", "--grad_clip", "2"])
    assert (clipped.policy_loss().clip, clipped.grad_clip) == (0.3, 2)
    with pytest.raises(ValueError, match="--clip"):
        cli.parse(GradeConfig, ["--clip", "0.3"])


@pytest.mark.slow
def test_a_resume_may_not_change_what_the_policy_learns_from(folder, whole, capsys):
    with pytest.raises(SystemExit):
        run(folder, whole, "--max_steps 5 --reward label")
    assert "--reward: recorded self_certainty, now label" in capsys.readouterr().err


# ---- the demo


@pytest.mark.parametrize("missing", ["checkpoint", "data"])
def test_what_a_run_begins_with_must_be_named(folder, tmp_path, capsys, missing):
    given = {"checkpoint": folder / "base", "data": folder / "asked"}
    del given[missing]
    with pytest.raises(SystemExit) as stop:
        intuitor.main([word for name, path in given.items() for word in (f"--{name}", str(path))])
    assert stop.value.code == 2
    assert f"--{missing} is missing" in capsys.readouterr().err


def test_nothing_is_made_for_a_wrong_command_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        intuitor.main(["--demo", "--output_dir", str(tmp_path / "demo"), "--group_size", "1"])
    assert stop.value.code == 2
    assert "--group_size 1 is out of range" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_demo_deletes_nothing_that_it_did_not_make(tmp_path, capsys):
    (tmp_path / "demo-made").mkdir()
    (tmp_path / "demo-made" / "mine").write_text("mine")
    with pytest.raises(SystemExit) as stop:
        intuitor.main(["--demo", "--output_dir", str(tmp_path / "demo")])
    assert stop.value.code == 2
    assert "demo-made was not made by a demo: choose another" in capsys.readouterr().err
    assert (tmp_path / "demo-made" / "mine").exists()


def test_what_a_killed_demo_had_half_made_is_made_anew(tmp_path):
    made = tmp_path / "demo-made"
    flags = ["--demo", "--output_dir", str(tmp_path / "demo"), "--seed", "3"]
    tried = []

    def make(folder: Path, seed: int):
        tried.append(seed)
        assert not (folder / "half").exists()
        (folder / "half").touch()
        if len(tried) == 1:
            raise KeyboardInterrupt

    settings = (intuitor.IntuitorConfig, flags, intuitor.DEMO, intuitor.MADE, make)
    with pytest.raises(KeyboardInterrupt):
        demo.prepared(*settings)
    assert demo.prepared(*settings)["data"] == str(made / "asked")
    demo.prepared(*settings)
    assert tried == [3, 3]


def test_a_second_process_of_a_demo_waits_for_a_folder_that_is_half_made(tmp_path, monkeypatch):
    """It once refused a folder that the first process had just made, and that had no marker yet."""
    made = tmp_path / "demo-made"
    made.mkdir()
    (made / "demo.json.temporary").touch()
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    done = {"program": intuitor.IntuitorConfig.PROGRAM, "seed": 0, "done": True}
    first = threading.Timer(0.5, (made / demo.MARKER).write_text, [json.dumps(done)])
    first.start()
    flags = ["--demo", "--output_dir", str(tmp_path / "demo")]
    added = demo.prepared(intuitor.IntuitorConfig, flags, intuitor.DEMO, intuitor.MADE, None)
    assert not first.is_alive()
    assert added["data"] == str(made / intuitor.MADE["data"])


def test_a_demo_with_another_seed_is_asked_for_another_folder(tmp_path, capsys):
    flags = ["--demo", "--output_dir", str(tmp_path / "demo")]
    settings = (intuitor.DEMO, intuitor.MADE, lambda folder, seed: None)
    demo.prepared(intuitor.IntuitorConfig, flags, *settings)
    with pytest.raises(SystemExit) as stop:
        demo.prepared(intuitor.IntuitorConfig, [*flags, "--seed", "1"], *settings)
    assert stop.value.code == 2
    said = "demo-made was made by lab.intuitor with --seed 0: choose another --output_dir"
    assert said in capsys.readouterr().err


def test_a_launcher_is_not_inherited():
    given = {"RANK": "1", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "1"}
    assert demo.without_launcher(given) == {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("resume", ["auto", "named"])
def test_a_manifest_without_what_the_policy_learns_from_is_refused(
    whole, folder, tmp_path, capsys, resume
):
    out = tmp_path / "whole"
    shutil.copytree(whole, out)
    for path in out.glob("step-*/manifest.json"):
        manifest = json.loads(path.read_text())
        del manifest["config"]["kl_coef"], manifest["config"]["reward"]
        path.write_text(json.dumps(manifest | {"checksum": checksum(manifest)}))

    more = "--max_steps 5"
    if resume == "named":
        more += f" --resume {out}/step-00000004"
        out = tmp_path / "new"
    with pytest.raises(SystemExit) as stop:
        run(folder, out, more)
    assert stop.value.code
    said = capsys.readouterr()
    assert "manifest.json lacks kl_coef, reward: use another checkpoint" in said.err + said.out


def test_a_run_of_train_py_is_not_resumed_as_a_policy(folder, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(folder, tmp_path / "new", f"--resume {folder}/base/step-00000012")
    said = capsys.readouterr().err
    assert "holds another run" in said and "program: recorded train.py, now -m lab.intuitor" in said


# ---- other programs read a policy's checkpoint


def test_a_policy_is_evaluated_exported_and_trained_further(whole, folder, tmp_path, capsys):
    checkpoint = f"--checkpoint {whole} --device cpu"
    evaluate.main(f"{checkpoint} --data {folder}/asked --evals loss --batches 2".split())
    assert "validation loss" in capsys.readouterr().out

    flags = f"--init_from {whole} --data {folder}/asked --output_dir {tmp_path}/further"
    rest = (
        "--max_steps 1 --batch_size 2 --eval_every 0 --device cpu --dtype fp32 --context_length 16"
    )
    train.main(f"{flags} {rest}".split())
    assert len(records(tmp_path / "further"))
