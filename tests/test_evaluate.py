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
from tests.kit import refused

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
    words = f"--input data --vocab_size 600 --val_fraction 0.3 --workers 1 --output {made}/set"
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
    with contextlib.redirect_stdout(io.StringIO()) as said:
        evaluate.main(words.split())
    (out / "table.txt").write_text(said.getvalue())
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


def figures(compared: Path) -> list[str]:
    """The lines of the table of model a, without the first, which names it, and without costs."""
    return without_costs((compared / "table.txt").read_text())[1:]


# --------------------------------------------------------------------------- the table


def test_the_table_has_every_measure_with_unit_interval_and_number_in_100_columns(compared):
    table = (compared / "table.txt").read_text()
    starts = [line[:19].strip() for line in table.splitlines()]
    for name in ("validation loss", "by position", "context gain", "retrieval", "memory", "time"):
        assert starts.count(name) == 2  # of both models
    assert max(len(line) for line in table.splitlines() if "/" not in line.split(":")[0]) <= 100
    assert re.search(r"validation loss +\d\.\d+ \+- \d\.\d+ nats/token \(\d+ documents\)", table)
    assert re.search(r"by position +0-16: \d\.\d+ \+- \d\.\d+ \(\d+\) \| ", table)

    # the peak of the process may be of the first model
    first, second = (line for line in table.splitlines() if line.startswith("memory"))
    assert re.search(r"memory +\d\.\d\d GiB peak of resident memory, planned \d\.\d\d GiB", first)
    assert re.search(r"memory +unknown peak of resident memory, planned \d\.\d\d GiB", second)


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
    assert f"validation loss    {losses['loss']:.4f} +- " in (compared / "table.txt").read_text()
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
    words = f"--checkpoint {folder}/a {FEW} --output /proc/nope"
    assert "/proc/nope" in refused(capsys, evaluate.main, words.split())


def test_one_process_measures_what_is_asked_whatever_levers_the_run_had(
    folder, capsys, monkeypatch
):
    words = f"--checkpoint {folder}/a --device cpu --batches 2 --evals "
    only_position = printed(capsys, words + "position")
    assert "by position" in only_position and "validation loss" not in only_position
    only_loss = printed(capsys, words + "loss")
    assert "validation loss" in only_loss and "by position" not in only_loss

    levers = dict(gradient_checkpointing="full", mlp_tiles=2, attention_head_groups=2)
    with_recorded(monkeypatch, context_parallel_size=2, **levers)
    assert without_costs(printed(capsys, words + "loss")) == without_costs(only_loss)


def test_rows_in_parts_have_the_figures_of_whole_rows(folder, compared, capsys):
    parts = printed(capsys, f"--checkpoint {folder}/a {FEW} --chunk 100")
    assert without_costs(parts)[1:] == figures(compared)
    assert "in parts of 100" in " ".join(parts.split())


def test_a_model_of_standard_attention_is_read_sparsely(folder, compared, capsys):
    blocks = "--attention_type exact --blocks block=16 init=1 local=1"
    words = f"--checkpoint {folder}/a {blocks}"
    assert without_costs(printed(capsys, f"{words} count=16 {FEW}"))[1:] == figures(compared)
    one = "--device cpu --evals loss --batches 3"
    few = without_costs(printed(capsys, f"{words} count=2 {one}"))
    assert "exact attention" in few[0]
    assert few[1].startswith("validation") and few[2] not in figures(compared)


def test_a_run_on_a_gpu_without_fp32_weights_is_evaluated_on_a_cpu_and_in_fp32(folder, monkeypatch):
    with_recorded(monkeypatch, dtype="bf16", master_weights="none", kernels="triton")
    opened = evaluate.Opened.of(f"{folder}/a", "fp32", CPU)
    assert next(opened.load(CPU).parameters()).dtype == torch.float32

    kept = evaluate.Opened.of(f"{folder}/a", "", CPU)
    model_config = kept.checkpoint.model_config | {"kernels": "triton"}
    checkpoint = dataclasses.replace(kept.checkpoint, model_config=model_config)
    model = dataclasses.replace(kept, checkpoint=checkpoint).load(CPU)
    assert next(model.parameters()).dtype == torch.bfloat16
    assert kept.config.kernels == model.config.kernels == "auto"

    on_cuda = evaluate.Opened.of(f"{folder}/a", "", torch.device("cuda"))
    assert on_cuda.cfg.kernels == "triton"


class WithoutValidation:
    splits = ("train",)


def test_a_corpus_without_validation_split_needs_no_context():
    for given in (0, 512):
        evaluate.check_context(given, WithoutValidation())


def test_what_the_data_do_not_allow_is_left_out_with_the_reason(folder, capsys):
    words = f"--checkpoint {folder}/a --device cpu --batches 1 --context_length 7"
    said = printed(capsys, words)
    assert "left out gain: " in " ".join(said.split())
    assert "left out retrieval: " in " ".join(said.split())


def test_rows_beyond_the_training_context_are_noted(folder, capsys):
    words = f"--checkpoint {folder}/a --device cpu --batches 1 --evals loss --context_length"
    evaluate.main([*words.split(), "512"])
    assert "256 tokens, and rows of 512" in capsys.readouterr().err
    evaluate.main([*words.split(), "256"])
    assert "note" not in capsys.readouterr().err


def test_rows_beyond_memory_are_refused(folder, capsys, monkeypatch):
    monkeypatch.setattr(evaluate, "available_gib", lambda device, world: 0.1)
    for chunk in ("auto", "0", "64"):
        words = f"--checkpoint {folder}/a --device cpu --evals loss --chunk {chunk}"
        line = refused(capsys, evaluate.main, words.split())
        assert line.endswith("evaluate shorter rows")


def test_parts_of_an_attention_that_reads_rows_at_once_are_refused(folder):
    opened = evaluate.Opened.of(f"{folder}/a", "", CPU)
    cfg = dataclasses.replace(opened.cfg, attention_type="nsa")
    sparse = dataclasses.replace(opened, cfg=cfg, config=cfg.model())
    with pytest.raises(ValueError, match="--chunk 64: .*: give --chunk 0"):
        evaluate.planned(sparse, 256, "64", CPU)
    assert evaluate.planned(sparse, 256, "auto", CPU).chunk == 0


def test_an_exported_folder_has_the_figures_of_its_checkpoint(folder, compared, capsys):
    convert_qwen3.main(["--checkpoint", f"{folder}/a", "--output", f"{folder}/hf"])
    capsys.readouterr()
    words = f"--data {folder}/set --context_length 256 {FEW} --checkpoint {folder}/hf"
    assert without_costs(printed(capsys, words))[1:] == figures(compared)


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
