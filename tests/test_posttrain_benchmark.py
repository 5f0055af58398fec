"""benchmarks.posttrain at small sizes: its tables, and that it times nothing that is wrong."""

import dataclasses
import json

import pytest

from benchmarks import posttrain

SMALL = (
    "--rounds 1 --num_layers 1 --vocab_size 300 --prompt_vocab_size 300 --gumbel_topk 16 "
    "--soft_prompt 4 --soft_response 4 --prompt 64 --response 8 --group_size 4"
)


@pytest.mark.slow
def test_both_parts_have_their_tables(tmp_path, capsys):
    assert posttrain.main([*SMALL.split(), "--out", str(tmp_path)]) == 0
    tables = json.loads((tmp_path / "results.json").read_text())["tables"]
    grade, shared = tables["grade"]["rows"], tables["shared_prompt"]["rows"]
    assert len(grade) == 4 and len(shared) == 2
    assert all(row["CPU seconds"] > 0 for row in (*grade, *shared))
    assert grade[0]["less memory"] == 1.0 and grade[1]["less memory"] > 1.0
    assert shared[1]["less saved"] > 1.5  # 288 tokens against 96
    assert "one row, the prompt once" in capsys.readouterr().out


def test_steps_that_disagree_are_told_apart():
    cfg = posttrain.PosttrainConfig(num_layers=1, prompt_vocab_size=50, prompt=9, response=3)
    packed, separate = posttrain.prompt_steps(cfg)
    assert posttrain.differs(packed, separate) == ""
    scaled = dataclasses.replace(packed, loss=lambda: 1.001 * packed.loss())
    assert "gradients off by 1.0e-03" in posttrain.differs(scaled, separate)


def test_a_mixture_larger_than_the_vocabulary_is_refused(capsys):
    assert posttrain.main(["--vocab_size", "100", "--gumbel_topk", "101"]) == 2
    assert "--gumbel_topk 101 exceeds --vocab_size 100: give at most 100" in capsys.readouterr().err


def test_numbers_out_of_range_are_refused(capsys):
    assert posttrain.main(["--rounds", "0"]) == 2
    words = "--rounds 0 is out of range: give a number of at least 1"
    assert words in capsys.readouterr().err
