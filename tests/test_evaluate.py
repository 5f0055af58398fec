"""scripts.evaluate as a user runs it: the table, the files, two models, Hugging Face folders."""

import contextlib
import dataclasses
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import train
from data import prepare
from scripts import convert_qwen3, evaluate

CPU = torch.device("cpu")
MODEL = (
    "--model_size tiny --vocab_size 600 --model_overrides num_layers=1 hidden_size=64 ffn_size=96 "
    "--context_length 256 --max_steps 2 --warmup_steps 1 --device cpu --dtype fp32 --eval_every 0"
)
FEW = "--device cpu --batches 3 --items 2 --lengths 128,256 --tasks single,copy"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A dataset `set`, and two runs of other seeds, `a` and `b`."""
    made = tmp_path_factory.mktemp("evaluate")
    words = (
        f"--input longhaul data --vocab_size 600 --val_fraction 0.2 --workers 1 --output {made}/set"
    )
    assert prepare.main(words.split()) == 0
    for seed, name in enumerate("ab"):
        run = f"--data {made}/set --output_dir {made}/{name} --seed {seed}"
        train.main([*MODEL.split(), *run.split()])
    return made


@pytest.fixture(scope="module")
def compared(folder) -> Path:
    """What `--against` wrote: eval.json, heatmap.svg and the table."""
    out = folder / "out"
    words = f"--checkpoint {folder}/a --against {folder}/b --output {out} {FEW}"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        evaluate.main(words.split())
    (out / "table.txt").write_text(printed.getvalue())
    return out


def printed(capsys, words: str) -> str:
    evaluate.main(words.split())
    return capsys.readouterr().out


def with_recorded(monkeypatch, **settings):
    """Let the checkpoints be of runs with other settings."""
    recorded = evaluate.recorded_settings

    def changed(checkpoint):
        return dataclasses.replace(recorded(checkpoint), **settings)

    monkeypatch.setattr(evaluate, "recorded_settings", changed)


def without_costs(table: str) -> list[str]:
    return table.split("\nmemory")[0].splitlines()


# --------------------------------------------------------------------------- the table


def test_the_table_has_every_measure_in_100_columns(compared):
    lines = (compared / "table.txt").read_text().splitlines()
    starts = [line[:19].strip() for line in lines]
    for name in ("validation loss", "by position", "context gain", "retrieval", "memory", "time"):
        assert starts.count(name) == 2  # of both models
    assert max(len(line) for line in lines if "/" not in line.split(":")[0]) <= 100


def test_figures_have_unit_interval_and_number(compared):
    table = (compared / "table.txt").read_text()
    assert re.search(r"validation loss +\d\.\d+ \+- \d\.\d+ nats/token \(\d+ documents\)", table)
    assert re.search(r"by position +0-16: \d\.\d+ \+- \d\.\d+ \(\d+\) \| ", table)
    assert re.search(r"memory +\d\.\d\d GiB peak of resident memory, planned \d\.\d\d GiB", table)
    assert "whole rows of 256 tokens" in table


@pytest.mark.slow
def test_the_measured_peak_is_near_the_planned_one(folder, tmp_path):
    """In a process of its own, because the figure is the peak of the whole process."""
    words = f"--checkpoint {folder}/a --device cpu --evals loss --output {tmp_path}"
    command = [sys.executable, "-m", "scripts.evaluate", *words.split()]
    subprocess.run(command, cwd=Path(__file__).parent.parent, check=True)
    memory = json.loads((tmp_path / "eval.json").read_text())["memory"]
    assert memory["measured_gib"] == pytest.approx(memory["planned_gib"], rel=0.25)


def test_json_has_the_figures_of_the_table_and_those_of_documents(compared):
    record = json.loads((compared / "eval.json").read_text())
    losses = record["loss"]["set"]
    table = (compared / "table.txt").read_text()
    assert f"validation loss    {losses['loss']:.4f} +- " in table
    documents = losses["per_document"]
    weighted = np.dot(documents["loss"], documents["tokens"]) / sum(documents["tokens"])
    assert weighted == pytest.approx(losses["loss"], rel=1e-9)
    assert {one["task"] for one in record["retrieval"]["scores"]} == {"single", "copy"}
    words = set(ElementTree.parse(compared / "heatmap.svg").getroot().itertext())
    assert {"mean", "single", "copy"} <= words


def test_a_place_that_cannot_be_written_is_refused_before_a_model_is_read(
    folder, capsys, monkeypatch
):
    monkeypatch.setattr(evaluate, "measured", None)
    with pytest.raises(SystemExit) as stop:
        evaluate.main(f"--checkpoint {folder}/a {FEW} --output /proc/nope".split())
    line = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 2 and "/proc/nope" in line
    assert re.search(r"cannot be written \(.+\): name another place$", line)


def test_losses_by_position_are_printed_only_if_asked_for(folder, capsys):
    words = f"--checkpoint {folder}/a --device cpu --batches 2 --evals "
    only_loss = printed(capsys, words + "loss")
    assert "validation loss" in only_loss and "by position" not in only_loss
    only_position = printed(capsys, words + "position")
    assert "by position" in only_position and "validation loss" not in only_position
    assert "context gain" not in only_loss + only_position


def test_rows_in_parts_have_the_figures_of_whole_rows(folder, capsys):
    words = f"--checkpoint {folder}/a {FEW}"
    whole = printed(capsys, f"{words} --chunk 0")
    parts = printed(capsys, f"{words} --chunk 100")
    assert without_costs(parts) == without_costs(whole)
    assert "rows of 256 tokens in parts of 100 over the KV cache" in " ".join(parts.split())


def test_a_model_of_standard_attention_is_read_sparsely(folder, capsys):
    words = f"--checkpoint {folder}/a {FEW}"
    dense = without_costs(printed(capsys, words))
    blocks = "--attention_type exact --blocks block=16 init=1 local=1"
    everything = without_costs(printed(capsys, f"{words} {blocks} count=16"))
    assert everything[1:] == dense[1:]
    few = without_costs(printed(capsys, f"{words} {blocks} count=2"))
    assert "exact attention" in few[0] and few[1:] != dense[1:]


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--attention_type nsa", "choose from"),
        ("--blocks count=2", "needs --attention_type"),
        ("--attention_type exact --blocks size=2", "give name=value"),
    ],
)
def test_an_attention_that_cannot_read_a_model_is_one_line(folder, capsys, flags, words):
    with pytest.raises(SystemExit) as stop:
        evaluate.main(f"--checkpoint {folder}/a --device cpu {flags}".split())
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 2 and words in line


def test_one_process_evaluates_whatever_levers_the_run_had(folder, capsys, monkeypatch):
    words = f"--checkpoint {folder}/a --device cpu --batches 2 --evals loss"
    plain = without_costs(printed(capsys, words))
    levers = dict(gradient_checkpointing="full", mlp_tiles=2, attention_head_groups=2)
    with_recorded(monkeypatch, context_parallel_size=2, **levers)
    assert without_costs(printed(capsys, words)) == plain


def test_fp32_is_computed_for_a_run_that_kept_no_fp32_weights(folder, monkeypatch):
    with_recorded(monkeypatch, dtype="bf16", master_weights="none")
    opened = evaluate.Opened.of(f"{folder}/a", "fp32", CPU)
    assert next(opened.load(CPU).parameters()).dtype == torch.float32
    kept = evaluate.Opened.of(f"{folder}/a", "", CPU)
    assert next(kept.load(CPU).parameters()).dtype == torch.bfloat16


def test_a_run_with_triton_kernels_is_evaluated_on_a_cpu(folder, monkeypatch):
    with_recorded(monkeypatch, kernels="triton")
    opened = evaluate.Opened.of(f"{folder}/a", "", CPU)
    checkpoint = dataclasses.replace(
        opened.checkpoint, model_config=opened.checkpoint.model_config | {"kernels": "triton"}
    )
    model = dataclasses.replace(opened, checkpoint=checkpoint).load(CPU)
    assert opened.config.kernels == model.config.kernels == "auto"

    on_cuda = evaluate.Opened.of(f"{folder}/a", "", torch.device("cuda"))
    assert on_cuda.cfg.kernels == "triton"


class WithoutValidation:
    splits = ("train",)


def test_a_corpus_without_validation_split_needs_no_context():
    for given in (0, 512):
        evaluate.check_context(given, WithoutValidation())


def test_what_the_data_do_not_allow_is_left_out_with_the_reason(folder, capsys):
    words = f"--checkpoint {folder}/a --device cpu --batches 1 --context_length 7"
    said = " ".join(printed(capsys, words).split())
    assert "left out gain: a context of 7 tokens is too short" in said
    assert "left out retrieval: " in said


def test_rows_beyond_the_training_context_are_noted(folder, capsys):
    words = f"--checkpoint {folder}/a --device cpu --batches 1 --evals loss --context_length 512"
    evaluate.main(words.split())
    said = capsys.readouterr().err
    assert "was trained for 256 tokens, and rows of 512 are longer" in said


def test_rows_beyond_memory_are_refused(folder, capsys, monkeypatch):
    monkeypatch.setattr(evaluate, "available_gib", lambda device, world: 0.1)
    for chunk in ("auto", "0", "64"):
        words = f"--checkpoint {folder}/a --device cpu --evals loss --chunk {chunk}"
        with pytest.raises(SystemExit) as stop:
            evaluate.main(words.split())
        (line,) = capsys.readouterr().err.splitlines()
        assert stop.value.code == 2 and line.endswith("are available: evaluate shorter rows")


def test_parts_of_an_attention_that_reads_rows_at_once_are_refused(folder):
    opened = evaluate.Opened.of(f"{folder}/a", "", CPU)
    cfg = dataclasses.replace(opened.cfg, attention_type="nsa")
    sparse = dataclasses.replace(opened, cfg=cfg, config=cfg.model())
    with pytest.raises(ValueError, match="--chunk 64: nsa attention reads .*: give --chunk 0"):
        evaluate.planned(sparse, 256, "64", CPU)
    assert evaluate.planned(sparse, 256, "auto", CPU).chunk == 0


# --------------------------------------------------------------------------- Hugging Face folders


def test_an_exported_folder_has_the_figures_of_its_checkpoint(folder, capsys):
    convert_qwen3.main(["--checkpoint", f"{folder}/a", "--output", f"{folder}/hf"])
    words = f"--data {folder}/set --context_length 256 {FEW} --checkpoint "
    capsys.readouterr()
    ours = without_costs(printed(capsys, words + f"{folder}/a"))
    theirs = without_costs(printed(capsys, words + f"{folder}/hf"))
    assert ours[1:] == theirs[1:]  # the first line names the folder


# --------------------------------------------------------------------------- two models


def test_a_model_compared_with_itself_differs_by_nothing(folder, capsys):
    table = printed(capsys, f"--checkpoint {folder}/a --against {folder}/a {FEW}")
    rows = re.findall(r"^(loss|gain|retrieval).* (\S+)  \[(\S+), (\S+)\]", table, re.MULTILINE)
    assert len(rows) > 4
    assert {float(number) for row in rows for number in row[1:]} == {0.0}


def test_differences_are_those_of_the_two_figures(compared):
    record = json.loads((compared / "eval.json").read_text())
    other = record["against"]
    difference = other["differences"]["loss"]
    first, second = record["loss"]["set"]["loss"], other["loss"]["set"]["loss"]
    assert difference["difference"] == pytest.approx(first - second)
    low, high = difference["interval"]
    assert low <= first - second <= high
    assert other["checkpoint"].endswith("b/step-00000002")


def test_a_peak_that_may_be_of_the_first_model_is_not_printed(folder, capsys):
    words = f"--checkpoint {folder}/a --against {folder}/b --device cpu --evals loss --batches 1"
    lines = printed(capsys, words).splitlines()
    first, second = (line for line in lines if line.startswith("memory"))
    assert re.search(r"\d GiB peak of resident memory, planned", first)
    assert "unknown peak of resident memory, planned" in second
