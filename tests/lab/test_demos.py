"""The two demos of training from rewards, which docs/LAB.md tells of, and what they must reach."""

import json

import pytest

from lab import grade, intuitor
from tests.kit import records


@pytest.mark.slow
def test_a_policy_that_learns_from_its_certainty_is_right_more_often(tmp_path):
    intuitor.main(["--demo", "--output_dir", str(tmp_path / "demo"), "--eval_every", "90"])
    logged = records(tmp_path / "demo")
    first, *_, last = [record for record in logged if "validation_accuracy" in record]
    assert (first["step"], last["step"]) == (0, 90)
    assert last["validation_accuracy"] >= first["validation_accuracy"] + 0.2
    assert last["validation_self_certainty"] > first["validation_self_certainty"] + 0.3


@pytest.mark.slow
def test_a_policy_that_learns_through_the_reward_also_pleases_the_lexicon(tmp_path):
    grade.main(["--demo", "--output_dir", str(tmp_path / "demo")])
    score = json.loads((tmp_path / "demo" / "test.json").read_text())
    assert score["reward"] > 0.8 and score["gold"] > 0.85  # 0.51 and -0.08 before
