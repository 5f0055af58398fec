"""The two demos of training from rewards, which docs/LAB.md tells of: what they make, and what they
must reach.
"""

import json
import threading
from pathlib import Path

import pytest

from data.dataset import open_dataset
from lab import grade, intuitor
from lab.posttrain import demo, grade_demo
from lab.posttrain.config import IntuitorConfig
from lab.posttrain.grade import METHODS
from tests.kit import records

# ---- what they reach


@pytest.mark.slow
def test_a_policy_that_learns_from_its_certainty_is_right_more_often(tmp_path):
    fewer = ["--max_steps", "60", "--eval_every", "60"]  # than a user's 90
    intuitor.main(["--demo", "--output_dir", str(tmp_path / "demo"), *fewer])
    logged = records(tmp_path / "demo")
    first, *_, last = [record for record in logged if "validation_accuracy" in record]
    assert (first["step"], last["step"]) == (0, 60)
    assert last["validation_accuracy"] >= first["validation_accuracy"] + 0.2
    assert last["validation_self_certainty"] > first["validation_self_certainty"] + 0.3


@pytest.mark.slow
def test_a_policy_that_learns_through_the_reward_also_pleases_the_lexicon(monkeypatch, tmp_path):
    monkeypatch.setattr(grade_demo, "BASE_STEPS", 150)  # half of a user's
    monkeypatch.setattr(grade_demo, "REWARD_STEPS", 300)
    grade.main(["--demo", "--output_dir", str(tmp_path / "demo")])
    score = json.loads((tmp_path / "demo" / "test.json").read_text())
    assert score["reward"] > 0.8 and score["gold"] > 0.85  # 0.51 and -0.08 before


@pytest.mark.slow
def test_every_method_is_measured_by_prompts_that_nothing_saw(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(grade_demo.SHAPE, "num_layers", 1)
    monkeypatch.setattr(grade_demo, "BASE_STEPS", 5)
    monkeypatch.setattr(grade_demo, "REWARD_STEPS", 3)
    out = tmp_path / "demo"
    short = "--max_steps 1 --context_length 8 --max_new_tokens 1 --batch_size 4 --eval_every 0"
    words = ["--demo", "--method", "all", *short.split(), "--output_dir", str(out)]
    grade.main([*words, "--plan"])
    assert capsys.readouterr().out.count("plan (computed") == len(METHODS)

    grade.main(words)
    said = capsys.readouterr().out
    for method in METHODS:
        score = json.loads((out / method / "test.json").read_text())
        assert 0 < score["reward"] < 1
        assert -1 <= score["gold"] <= 1
        assert f"{method:<14} reward {score['reward']:.3f}" in said
    assert len(open_dataset(tmp_path / "demo-made" / "prompts").split("val").lengths) == 24

    # given again, nothing is made or trained anew
    made = (tmp_path / "demo-made" / "base" / "config.json").stat().st_mtime_ns
    grade.main(words)
    assert capsys.readouterr().out.count("nothing to do") == len(METHODS)
    assert (tmp_path / "demo-made" / "base" / "config.json").stat().st_mtime_ns == made


# ---- what they make


def prepared(out: Path, make, *more: str) -> dict:
    flags = ["--demo", "--output_dir", str(out), *more]
    return demo.prepared(IntuitorConfig, flags, intuitor.DEMO, intuitor.MADE, make)


def test_a_demo_deletes_nothing_that_it_did_not_make(tmp_path, capsys):
    mine = tmp_path / "demo-made" / "mine"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(SystemExit) as stop:
        prepared(tmp_path / "demo", None)
    assert stop.value.code == 2
    assert "demo-made" in capsys.readouterr().err
    assert mine.exists()


def test_what_a_killed_demo_had_half_made_is_made_anew(tmp_path, capsys):
    tried = []

    def make(folder: Path, seed: int):
        tried.append(seed)
        assert not (folder / "half").exists()
        (folder / "half").touch()
        if len(tried) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepared(tmp_path / "demo", make, "--seed", "3")
    added = prepared(tmp_path / "demo", make, "--seed", "3")
    assert added["data"] == str(tmp_path / "demo-made" / "asked")
    prepared(tmp_path / "demo", make, "--seed", "3")
    assert tried == [3, 3]

    # what was made with a seed serves no other one
    with pytest.raises(SystemExit) as stop:
        prepared(tmp_path / "demo", make, "--seed", "1")
    assert stop.value.code == 2
    assert "--seed 3" in capsys.readouterr().err


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
    added = prepared(tmp_path / "demo", None)
    assert not first.is_alive()
    assert added["data"] == str(made / intuitor.MADE["data"])


def test_a_launcher_is_not_inherited():
    given = {"RANK": "1", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "1"}
    assert demo.without_launcher(given) == {"OMP_NUM_THREADS": "1"}
