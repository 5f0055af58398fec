"""profile_memory.py: its table, its JSON, what it finds, and one line for whatever is wrong."""

import dataclasses
import json
import shlex
from typing import NamedTuple

import pytest
import torch

import profile_memory
from footprint.steps.search import Verdict, placed
from longhaul import cli
from longhaul.config import TrainConfig
from longhaul.planner import solve
from longhaul.planner.needs import demand
from longhaul.planner.simulate import profile
from model import GIB
from tests.tiers import slow

SMALL = ["--model_size", "tiny", "--context_length", "512"]
ONE_LAYER = ["--model_overrides", "num_layers=1"]


class Answer(NamedTuple):
    text: str
    verdict: Verdict


def solved(*request) -> Answer:
    """What --solve says."""
    said = []
    verdict = solve.solve(*request, said.append)
    return Answer("\n".join(said), verdict)


def test_the_table_names_its_units_and_the_json_holds_everything(tmp_path, capsys):
    assert profile_memory.main([*SMALL, "--json", str(tmp_path / "out.json")]) == 0
    text = capsys.readouterr().out
    assert "live GiB" in text
    assert text.startswith(f"predicted for a GPU (CUDA) with torch {torch.__version__}, one of 1 ")
    assert "a step" in text and "for 1,000 steps (roofline" in text
    assert "<- peak" in text
    assert "24 GB, 40 GB, 48 GB, 80 GB, 96 GB, 141 GB, 192 GB fits" in text
    assert "= device" in text

    found = json.loads((tmp_path / "out.json").read_text())
    assert found["torch"] == torch.__version__
    peak = found["peak_live_bytes"]
    assert found["waterfall"]["classic"]["reserved"] == found["peak_reserved_bytes"] > peak
    assert peak == profile(TrainConfig(model_size="tiny", context_length=512)).peak
    assert peak == found["stages"][found["peak_stage"]]["total"]
    assert peak == sum(found["categories"].values())
    assert found["top_tensors"][0]["bytes"] >= found["top_tensors"][-1]["bytes"]
    assert found["config"]["context_length"] == 512


def test_measure_runs_the_step_on_this_machine_and_agrees(capsys):
    assert profile_memory.main([*SMALL, "--dtype", "fp32", "--device", "cpu", "--measure"]) == 0
    rows = capsys.readouterr().out.splitlines()
    row = next(row for row in rows if row.startswith("allocator peak"))
    assert abs(float(row.split()[-1].rstrip("%"))) < 0.01


def test_the_html_page_shows_every_layer(tmp_path, capsys):
    path = tmp_path / "page.html"
    args = [*SMALL, "--model_overrides", "num_layers=9", "--html", str(path)]
    assert profile_memory.main(args) == 0
    text = path.read_text()
    assert "layers.8" in text
    assert "predicted for a GPU (CUDA)" in text
    assert "cards: 8 GB, 12 GB, 16 GB, 24 GB" in text
    assert "command: python train.py --model_size tiny" in text


def test_the_html_page_of_a_policy_has_its_stages(tmp_path, capsys):
    path = tmp_path / "page.html"
    policy = ["--task", "intuitor", "--vocab_size", "1000", "--max_response_length", "30"]
    args = [*SMALL, *policy, "--model_overrides", "num_layers=1", "--html", str(path)]
    assert profile_memory.main(args) == 0
    text = path.read_text()
    assert "rollout" in text and "reference.layers.* forward" in text
    assert "-m lab.intuitor --model_size tiny" in text


@pytest.mark.slow
def test_levers_are_found_and_the_verdict_says_whether_anything_changed():
    long = TrainConfig(model_size="tiny", model_overrides=("num_layers=1",), context_length=32768)
    answer = solved(long, "levers", 0.85, 1)
    assert answer.verdict is Verdict.AFTER_CHANGES
    assert answer.text.splitlines()[-1] == (
        "python train.py --model_size tiny --context_length 32768 --model_overrides num_layers=1 "
        "--gradient_checkpointing --mlp_tiles"
    )

    tiny = dataclasses.replace(long, context_length=512)
    assert solved(tiny, "levers", 24.0, 1).verdict is Verdict.FITS
    # two ranks take 1 GiB more for NCCL
    assert solved(tiny, "world_size", 0.6, 2).verdict is Verdict.AFTER_CHANGES
    assert solved(tiny, "world_size", 1.0, 2).verdict is Verdict.FITS
    assert solved(tiny, "world_size", 0.57, 1).verdict is Verdict.NOTHING


def test_every_rung_keeps_the_ranks_that_share_a_row_or_the_request_is_refused(capsys):
    shared = TrainConfig(model_size="tiny", context_length=2048, context_parallel_size=2)
    answer = solved(shared, "world_size", 24.0, 4)
    lines = answer.text.splitlines()
    assert lines[2].split()[0] == "2"  # which fits, so that 4 are not tried
    assert "--nproc_per_node=2" in lines[-1]

    with pytest.raises(ValueError, match="use --gpus 2"):
        solved(shared, "levers", 24.0, 1)
    assert profile_memory.main([*SMALL, "--context_parallel_size", "2"]) == 2
    assert "--context_parallel_size 2 does not divide the 1 rank(s)" in capsys.readouterr().err


def test_ranks_that_fit_only_with_a_lever_come_with_its_flag():
    cfg = TrainConfig(model_size="tiny", context_length=65536)
    plain = demand(cfg).least_bytes / GIB
    answer = solved(cfg, "world_size", 0.6 * plain, 1)
    *_, words, _, shell = answer.text.splitlines()
    assert words == ("as asked, 1 GPU(s) are too few; with the settings below 1 are enough")
    assert shell.endswith("--context_length 65536 --gradient_checkpointing")
    assert answer.verdict is Verdict.AFTER_CHANGES


def test_the_number_of_gpus_follows_from_the_ranks(capsys):
    args = [*SMALL, "--solve", "world_size", "--gpu", "H100"]
    assert profile_memory.main([*args, "--nproc", "16"]) == 0
    assert "world_size: 16 GPU(s)" in capsys.readouterr().out
    assert profile_memory.main(args) == 0
    assert "world_size: 8 GPU(s)" in capsys.readouterr().out
    assert profile_memory.main([*args, "--gpus", "2"]) == 0
    assert "world_size: 2 GPU(s)" in capsys.readouterr().out


def test_rows_too_many_for_the_shortest_context_are_refused():
    many = TrainConfig(model_size="tiny", batch_size=3_000_000)
    with pytest.raises(ValueError, match="give a smaller --batch_size"):
        solved(many, "context", 1.5, 1)


def test_three_gpus_do_not_share_rows_that_three_does_not_divide(monkeypatch):
    def judged(room, run):
        size = 40_000 * run.cfg.context_length // run.cfg.context_ranks
        return placed(size, size, room)

    monkeypatch.setattr(solve, "judged", judged)
    cfg = TrainConfig(model_size="tiny", model_overrides=("num_layers=1",), context_length=98304)
    answer = solved(cfg, "context", 4.0, 3)
    assert "--nproc_per_node=3" in answer.text
    assert "--context_parallel_size" not in answer.text


@pytest.mark.slow
def test_the_longest_context_fills_the_device_or_the_next_does_not_fit():
    cfg = TrainConfig(
        model_size="tiny",
        model_overrides=("num_layers=1",),
        gradient_checkpointing="full",
        optimizer="adamw_bf16",
    )
    answer = solved(cfg, "context", 1.5, 1)
    commands = [line for line in answer.text.splitlines() if " train.py " in line]
    assert len(commands) == 2  # as asked, and with every lever
    lengths = []
    for words in commands:
        found = cli.parse(TrainConfig, shlex.split(words.split(" train.py ")[1]))
        lengths.append(found.context_length)
        longer = dataclasses.replace(found, context_length=found.context_length + 1024)
        least, more = demand(found).least_bytes / GIB, demand(longer).least_bytes / GIB
        assert found.context_length % 1024 == 0 and least <= 1.5
        assert least >= 0.995 * 1.5 or more > 1.5 or found.context_length > 200 * 1024
    assert lengths[0] < lengths[1]


@pytest.mark.parametrize(
    "args, code, words",
    [
        slow(
            ["--vram", "9", "--model_size", "4B", "--context_length", "16384", *ONE_LAYER],
            2,
            "run: python train.py",
        ),
        (["--gpu", "H200", "--model_size", "tiny"], 0, "verdict: fits\n"),
        slow(["--vram", "0.4", "--model_size", "tiny", *ONE_LAYER], 3, "verdict: does not fit\n"),
    ],
)
def test_advice_says_what_to_change_and_exits_with_the_verdict(
    args, code, words, capsys, monkeypatch
):
    monkeypatch.setattr(profile_memory, "host_available_bytes", lambda: GIB // 4)
    assert profile_memory.main(["--advise", *args]) == code
    assert words in capsys.readouterr().out
