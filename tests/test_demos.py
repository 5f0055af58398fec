"""The two demos of training from rewards, which docs/LAB.md tells of, and what they must reach."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def demo(module: str, folder: Path) -> list[dict]:
    """The records of a demo that ran to its end."""
    done = subprocess.run(
        [sys.executable, "-m", module, "--demo", "--output_dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_policy_that_learns_from_its_certainty_is_right_more_often(tmp_path):
    first, last = first_and_last(demo("scripts.intuitor", tmp_path / "demo"))
    assert (first["step"], last["step"]) == (0, 90)
    assert last["validation_accuracy"] >= first["validation_accuracy"] + 0.2
    assert last["validation_self_certainty"] > first["validation_self_certainty"] + 0.3


def first_and_last(records: list[dict]) -> tuple[dict, dict]:
    """The first validation of a run of Intuitor, and the last one."""
    first, *_, last = [record for record in records if "validation_accuracy" in record]
    return first, last


@pytest.mark.slow
def test_a_policy_that_learns_through_the_reward_also_pleases_the_lexicon(tmp_path):
    demo("scripts.grade", tmp_path / "demo")
    score = json.loads((tmp_path / "demo" / "test.json").read_text())
    assert score["reward"] > 0.8 and score["gold"] > 0.85  # 0.51 and -0.08 before
