"""lab.run_full_analysis as a user runs it: the result, killed runs, the report, bad input.

The model is the planted copy head of test_analysis_patching.py in a Hugging Face folder, and the
data are random texts that repeat themselves.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from base.flags import underscored
from data.dataset import open_dataset
from data.writer import write_dataset
from lab import run_full_analysis
from lab.analysis import parts as parts_of
from lab.analysis import run as running
from lab.analysis.patching import Patching
from lab.analysis.samples import Samples
from longhaul import qwen3
from model import Decoder
from tests.lab.test_analysis_patching import V, planted_copy_head
from tests.tiers import slow

ROOT = Path(__file__).parent.parent.parent
LENGTH = 60  # tokens of a text
FEW = "--context_length 40 --num-samples 6 --batch-size 2 --prompts 4 --prompt_length 24 --spans 4"
SAE = "--sae_tokens 300 --sae-width 2 --sae-k 4"


def texts(count: int) -> Iterator[np.ndarray]:
    """Eleven random tokens, said again and again, with the end of a document."""
    draw = np.random.default_rng(0)
    for _ in range(count):
        once = draw.permutation(V - 1)[:11]
        yield np.append(np.resize(once, LENGTH - 1), V - 1)


def planted_model() -> Decoder:
    """As in that file; a folder of Hugging Face takes a theta below 10^12."""
    return planted_copy_head(rope_theta=9e11)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with `model` and `data`."""
    folder = tmp_path_factory.mktemp("analysis")
    qwen3.to_hf(planted_model(), folder / "model")
    write_dataset(texts(40), folder / "data", vocab_size=V, eod_id=V - 1, val_fraction=0.25)
    return folder


def command(made: Path, out: Path, more: str = SAE) -> list[str]:
    words = f"--checkpoint {made}/model --data {made}/data --out {out} --device cpu {FEW} {more}"
    return words.split()


@pytest.fixture(scope="module")
def done(made) -> Path:
    """A finished analysis of all parts."""
    out = made / "done"
    words = command(made, out, f"{SAE} --compare float32,bfloat16")
    assert run_full_analysis.main(words) == 0
    return out


def read(out: Path) -> dict:
    return json.loads((out / "analysis.json").read_text())


def without_costs(result: dict) -> dict:
    """All but what each run measures anew."""
    found = {name: part["result"] for name, part in result["parts"].items()}
    return {"settings": result["settings"], "parts": found}


# --------------------------------------------------------------------------- the result


def test_statistics_are_those_of_the_rows(made, done):
    samples = Samples(open_dataset(made / "data").split("val"), 40, 6)
    model = planted_model()
    rows = samples.rows(0, 6)
    found = {0: [], 1: [], 2: []}
    running.read(model, rows, (0, 1, 2), lambda layer, _, x: found[layer].append(x.double()))
    for layer, (x_BTD,) in found.items():
        figures = read(done)["parts"]["statistics"]["result"][str(layer)]
        assert figures["rms"] == pytest.approx(x_BTD.square().mean().sqrt().item(), rel=1e-6)
        assert figures["max_abs"] == pytest.approx(x_BTD.abs().max().item(), rel=1e-6)
        assert figures["tokens"] == 240


def test_patching_finds_the_copy_head_and_nothing_in_the_one_cut_off(done):
    tables = {layer: read(done)["parts"][f"patching-{layer:02}"]["result"] for layer in range(3)}
    attention = {layer: table["values"][: len(table["columns"])] for layer, table in tables.items()}
    last = tables[0]["columns"].index("23")
    assert attention[2][last] == pytest.approx(1, abs=0.05)
    assert set(attention[1]) == {0.0}
    assert tables[0]["clean"] - tables[0]["corrupt"] > 1


def test_the_head_that_looks_back_looks_one_token_back(done):
    distances = read(done)["parts"]["distances"]["result"]
    (mean,) = distances["0"]["all"]["distance"]
    assert 0.9 < mean < 1.1
    assert distances["2"]["all"]["distance"][0] > 5


def test_the_precision_table_has_its_noise_floor(done):
    table = read(done)["parts"]["precision"]["result"]
    layers = table["precisions"]["bfloat16"]["layers"]
    assert layers.keys() == {"0", "1", "2"}
    for figures in layers.values():
        assert figures["match"]["mean"] > figures["noise_floor"]["mean"]
        assert 0 <= figures["jaccard"] <= 1
    assert table["precisions"]["bfloat16"]["patching"]["of"] == 0  # the planted head is alone


def test_a_finished_analysis_is_printed_and_not_run(made, done, monkeypatch, capsys):
    monkeypatch.setattr(run_full_analysis, "load_in", None)
    before = {path: path.stat().st_mtime_ns for path in done.rglob("*")}
    assert run_full_analysis.main(command(made, done, f"{SAE} --compare fp32,bf16")) == 0
    assert {path: path.stat().st_mtime_ns for path in done.rglob("*")} == before
    printed = capsys.readouterr().out
    for name in ("layer 0", "distance 2", "patching", "autoencoder 1", "bfloat16", "memory"):
        assert f"\n{name}" in f"\n{printed}"
    assert str(done / "report.txt") in printed


def test_the_plan_of_each_part_is_within_five_percent_of_what_it_took(done):
    result = read(done)
    measured = run_full_analysis.report.measured_peaks(result)
    assert result["planned_bytes"].keys() == measured.keys() - {"precision"}
    for name, planned in result["planned_bytes"].items():
        assert planned == pytest.approx(measured[name], rel=0.05), name


def test_the_report_holds_every_line_that_is_printed(done):
    heading, rows, _, *lines = (done / "report.txt").read_text().splitlines()
    assert heading.startswith("Analysis of ") and rows.startswith("6 rows of 40 tokens ")
    assert lines == run_full_analysis.report.lines(read(done))
    assert "nan" not in "\n".join(lines)


# --------------------------------------------------------------------------- what is on the disk


def test_a_folder_of_another_version_is_refused(made, done, tmp_path, capsys):
    folder = shutil.copytree(done, tmp_path / "old")
    settings = json.loads((folder / "settings.json").read_text())
    (folder / "settings.json").write_text(json.dumps(settings | {"format": 1}))
    assert run_full_analysis.main(command(made, folder, f"{SAE} --compare float32,bf16")) == 2
    assert "an analysis by another version of longhaul: name another" in capsys.readouterr().err


class Stop(Exception):
    """Where a test ends a run."""


def test_an_unfinished_part_continues_with_the_batches_that_are_done(made, tmp_path, monkeypatch):
    words = command(made, tmp_path / "whole", "--skip_sae --skip_patching")
    assert run_full_analysis.main(words) == 0
    expected = without_costs(read(tmp_path / "whole"))

    read_rows = Samples.rows
    asked = []

    def rows(self, first, last):
        asked.append(first)
        if len(asked) % 3 == 0:
            raise Stop
        return read_rows(self, first, last)

    monkeypatch.setattr(parts_of, "EVERY", 0.0)
    monkeypatch.setattr(Samples, "rows", rows)
    words = command(made, tmp_path / "parts", "--skip_sae --skip_patching")
    while not (tmp_path / "parts" / "analysis.json").exists():
        with contextlib.suppress(Stop):
            run_full_analysis.main(words)
    # a life begins with the first rows; then statistics and distances, each batch once but for the
    # one that a life ended in
    assert asked == [0, 0, 2, 0, 2, 4, 0, 4, 0, 0, 0, 2, 0, 2, 4, 0, 4]
    assert without_costs(read(tmp_path / "parts")) == expected
    assert not list((tmp_path / "parts" / "parts").glob("*.partial"))


@pytest.mark.slow
def test_patches_and_costs_continue_with_the_batches_that_are_done(made, tmp_path, monkeypatch):
    more = "--skip_sae --layers 2 --compare float32,bfloat16"
    words = command(made, tmp_path / "whole", more)
    assert run_full_analysis.main(words) == 0
    expected = without_costs(read(tmp_path / "whole"))

    begun = []

    def ends_every_third(name, function):
        def called(*args):
            begun.append(name)
            if len(begun) % 3 == 0:
                raise Stop
            return function(*args)

        return called

    monkeypatch.setattr(parts_of, "EVERY", 0.0)
    monkeypatch.setattr(Patching, "add", ends_every_third("patches", Patching.add))
    monkeypatch.setattr(running, "compare_rows", ends_every_third("costs", running.compare_rows))
    words = command(made, tmp_path / "parts", more)
    stops = 0
    while not (tmp_path / "parts" / "analysis.json").exists():
        try:
            run_full_analysis.main(words)
        except Stop:
            stops += 1
    # two batches of prompts in each precision, three of rows, and those that a life ended in
    assert (begun.count("patches"), begun.count("costs"), stops) == (5, 5, 3)
    assert without_costs(read(tmp_path / "parts")) == expected


@pytest.mark.slow
def test_a_run_that_is_killed_continues_with_the_same_result(made, done, tmp_path):
    words = command(made, tmp_path / "killed", f"{SAE} --compare float32,bfloat16")
    run = [sys.executable, "-m", "lab.run_full_analysis", *words]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # as this process has
    process = subprocess.Popen(run, cwd=ROOT, stdout=subprocess.DEVNULL, env=one_thread)
    part = tmp_path / "killed" / "parts" / "sae-00.json"
    while not part.exists():
        assert process.poll() is None
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "analysis.json").exists()

    assert run_full_analysis.main(words) == 0
    assert without_costs(read(tmp_path / "killed")) == without_costs(read(done))


@pytest.mark.slow
def test_fewer_prompts_than_asked_for_are_said(made, tmp_path, capsys):
    words = command(made, tmp_path / "out", "--skip_sae --layers 2")
    for name, value in (("--prompts", "999"), ("--prompt_length", "57")):
        words[words.index(name) + 1] = value
    assert run_full_analysis.main(words) == 0
    found = read(tmp_path / "out")["parts"]["patching-02"]["result"]["pairs"]
    assert 0 < found < 999
    assert f"prompts            found {found} of 999 pairs\n" in capsys.readouterr().out


# --------------------------------------------------------------------------- bad input


def refused(words: list[str], capsys) -> str:
    """What is printed, in one line with a remedy."""
    capsys.readouterr()
    assert run_full_analysis.main(words) == 2
    printed = capsys.readouterr()
    line = printed.err.splitlines()[-1]
    assert line.startswith("lab.run_full_analysis: error: ")
    assert re.search(": [^:]+$", line)
    return line


@pytest.mark.parametrize(
    "more, message",
    [
        ("--layers ,", "--layers , names no layer: choose from 0, 1, 2"),
        ("--chunk 100", "which queries are measured: give a multiple of 64"),
        ("--layers -1", "--layers -1 is no layer of the model: choose from 0, 1, 2"),
        ("--layers 0,two", "--layers two is no layer of the model: choose from 0, 1, 2"),
        ("--layers 1,0,1", "--layers names 1 twice: name each layer once"),
        ("--num-samples 0", "--num_samples 0 is out of range: give at least 1"),
        ("--num-samples 99", "has 7 rows of 40 tokens: give 1 to 7"),
        ("--context_length 5000", "fewer than a row of --context_length 5000: give a shorter one"),
        ("--device cuda", "cuda"),
        ("--compare fp32,bf16,bfloat16", "twice: give each precision once"),
        ("--compare float32,int8", "--compare int8 is unknown: did you mean"),
        ("--compare fp32,bf16 --dtype bf16", "begins with the model in float32: drop --dtype"),
        ("--sae-k 291", "more than the 290 latents of --sae_width 2: give at most 290"),
        ("--prompt_length 200", "no token of"),
        ("--split test", "--split 'test' is unknown: choose from"),
        ("--checkpoint /nowhere", "/nowhere"),
        ("--out {made}/model", "holds files that are no analysis: name a new or empty folder"),
        ("--out {made}/data/manifest.json", "manifest.json is a file: name another folder"),
        ("--lyers 1", "unknown flag --lyers: did you mean --layers?"),
    ],
)
def test_bad_input_is_one_line_with_a_remedy_and_nothing_is_written(
    made, more, message, tmp_path, capsys
):
    if more.startswith("--device") and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    words = more.format(made=made).split()
    given = {underscored(word) for word in words}
    usual = command(made, tmp_path / "out")
    for name, value in zip(usual[::2], usual[1::2], strict=True):
        if underscored(name) not in given:
            words += [name, value]
    before = sorted(made.rglob("*"))
    assert message in refused(words, capsys)
    assert not (tmp_path / "out").exists()
    assert sorted(made.rglob("*")) == before


@pytest.mark.parametrize(
    "more, message",
    [
        (SAE.replace("300", "301"), "has an analysis with --sae_tokens 300"),
        (f"{SAE} --layers 0,1", "--layers 0,1,2, and this one has --layers 0,1"),
    ],
)
def test_other_settings_in_the_same_folder_are_refused_by_name(made, done, more, message, capsys):
    words = command(made, done, f"{more} --compare float32,bfloat16")
    line = refused(words, capsys)
    assert message.replace("has an analysis", "holds an analysis") in line
    assert line.endswith("give the same settings, or another --out")


def test_a_model_that_cannot_copy_is_analysed_without_patching(made, tmp_path, capsys):
    model = planted_model()
    with torch.no_grad():
        model.layers[2].attention.o_proj.weight.zero_()
    qwen3.to_hf(model, tmp_path / "model")
    words = command(made, tmp_path / "out", f"{SAE} --layers 2 --compare float32,bfloat16")
    words[1] = str(tmp_path / "model")
    assert run_full_analysis.main(words) == 0
    assert re.search(r"\npatching +left out: ", capsys.readouterr().out)

    result = read(tmp_path / "out")
    assert result["left_out"].keys() == {"patching"}
    assert result["parts"].keys() >= {"statistics", "distances", "sae-02", "precision"}
    assert not any(name.startswith("patching") for name in result["parts"])
    assert result["planned_bytes"].keys() == {"statistics", "distances", "sae", "costs"}
    report = (tmp_path / "out" / "report.txt").read_text()
    assert "less than 0.1 apart" in report and "\nbfloat16" in report

    # a run that was killed before its last part leaves the same out
    for name in ("analysis.json", "parts/precision.json"):
        (tmp_path / "out" / name).unlink()
    assert run_full_analysis.main(words) == 0
    assert without_costs(read(tmp_path / "out")) == without_costs(result)
    assert read(tmp_path / "out")["left_out"] == result["left_out"]


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory) -> Path:
    """The model with an MLP in layer 1 that passes 65,504."""
    folder = tmp_path_factory.mktemp("overflowing")
    model = planted_model()
    with torch.no_grad():
        model.layers[1].mlp.down_proj.weight.fill_(3e4)
        for name in ("gate_proj", "up_proj"):
            getattr(model.layers[1].mlp, name).weight.fill_(1.0)
    qwen3.to_hf(model, folder)
    return folder


@pytest.mark.parametrize(
    "where, more",
    [
        ("first rows", ""),
        ("later rows", "--skip_patching"),
        slow("later rows", "--skip_patching --layers 2"),
    ],
)
def test_an_overflow_in_fp16_names_the_layer_and_leaves_nothing(
    made, overflowing, more, where, tmp_path, capsys, monkeypatch
):
    if where == "later rows":
        monkeypatch.setattr(running, "require_finite", after_one_call(running.require_finite))
    words = command(made, tmp_path / "out", f"--skip_sae --dtype float16 {more}")
    words[1] = str(overflowing)
    monkeypatch.setattr(parts_of, "EVERY", 0.0)
    line = refused(words, capsys)
    assert "overflows in the MLP of layer 1" in line
    assert line.endswith(": use bfloat16 in --dtype or --compare")
    assert not (tmp_path / "out").exists()


def test_a_comparison_is_refused_before_its_first_part(
    made, overflowing, tmp_path, capsys, monkeypatch
):
    do = running.Analysis._do
    monkeypatch.setattr(running.Analysis, "_do", None)
    words = command(made, tmp_path / "out", "--skip_patching --compare float32,float16")
    words[1] = str(overflowing)
    assert "float16 overflows in the MLP of layer 1" in refused(words, capsys)

    of_float32 = Patching._mean_difference

    def told_apart_in_float32(self, tokens_BT):
        in_float32 = self.model.config.compute_dtype == "float32"
        return of_float32(self, tokens_BT) if in_float32 else 0.0

    monkeypatch.setattr(Patching, "_mean_difference", told_apart_in_float32)
    monkeypatch.setattr(running.Analysis, "_do", do)
    words = command(made, tmp_path / "out", "--skip_sae --layers 2 --compare float32,bfloat16")
    assert run_full_analysis.main(words) == 0
    assert read(tmp_path / "out")["left_out"]["patching"].startswith("in bfloat16 ")


@pytest.mark.parametrize(
    "where, more",
    [
        ("later rows", "--dtype float16"),
        ("first rows", "--compare float32,float16"),
    ],
)
def test_an_overflow_behind_the_layers_that_are_looked_at_is_said(
    made, overflowing, where, more, tmp_path, capsys, monkeypatch
):
    if where == "later rows":  # as if the first rows gave no sign of it
        monkeypatch.setattr(running, "require_finite", after_one_call(running.require_finite))
    words = command(made, tmp_path / "out", f"--skip_sae --skip_patching --layers 0 {more}")
    words[1] = str(overflowing)
    assert run_full_analysis.main(words) == 0
    sentence = "float16 overflows in the MLP of layer 1, whose activations pass 65,504"
    assert f"note               {sentence}" in capsys.readouterr().out
    report = (tmp_path / "out" / "report.txt").read_text()
    assert f"{sentence}; no figure here depends on it" in report
    figures = read(tmp_path / "out")["parts"]["statistics"]["result"]
    assert figures.keys() == {"0"} and figures["0"]["fp16_headroom"] > 1


def after_one_call(function):
    """The function, whose first call says nothing."""
    calls = []

    def called(*args):
        calls.append(args)
        return function(*args) if len(calls) > 1 else ""

    return called


def test_two_runs_do_not_share_a_folder(made, tmp_path, capsys):
    folder = tmp_path / "out"
    folder.mkdir()
    with parts_of.Parts(folder, {}).locked():
        line = refused(command(made, folder, "--skip_sae --skip_patching"), capsys)
    assert "another process" in line and not list(folder.iterdir())
