"""lab.run_full_analysis as a user runs it: the result, parts that refuse, bad input.

The model is the planted copy head of test_analysis_patching.py in a Hugging Face folder, and the
data are random texts that repeat themselves.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from data.dataset import open_dataset
from data.writer import write_dataset
from lab import run_full_analysis
from lab.analysis import memory, report
from lab.analysis import run as running
from lab.analysis.samples import Samples
from longhaul import qwen3
from model import Decoder
from tests.lab.test_analysis_patching import V, planted_copy_head

LENGTH = 60  # tokens of a text
FEW = "--context_length 40 --num-samples 6 --batch-size 2 --prompts 2 --prompt_length 24 --spans 2"
SAE = "--sae_tokens 160 --sae-width 2 --sae-k 4"


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


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory) -> Path:
    """The model with an MLP in layer 1 that passes 65,504, and nothing that copies."""
    folder = tmp_path_factory.mktemp("overflowing")
    model = planted_model()
    with torch.no_grad():
        model.layers[1].mlp.down_proj.weight.fill_(3e4)
        for name in ("gate_proj", "up_proj"):
            getattr(model.layers[1].mlp, name).weight.fill_(1.0)
        model.layers[2].attention.o_proj.weight.zero_()
    qwen3.to_hf(model, folder)
    return folder


def analyse(made: Path, out: Path, more: str, model: Path | None = None, code: int = 0) -> dict:
    """What analysis.json holds after the command."""
    model = model or made / "model"
    words = f"--checkpoint {model} --data {made}/data --out {out} --device cpu {FEW} {more}"
    assert run_full_analysis.main(words.split()) == code
    return read(out) if out.exists() else {}


def read(out: Path) -> dict:
    return json.loads((out / "analysis.json").read_text())


@pytest.fixture(scope="module")
def done(made) -> Path:
    """A finished analysis of all parts."""
    analyse(made, made / "done", f"{SAE} --compare float32,bfloat16")
    return made / "done"


@pytest.fixture(autouse=True)
def unplanned(monkeypatch):
    """All runs but `done` are not planned, which would take most of their time."""
    nothing = memory.Plan({"loading": 0}, "cpu")
    monkeypatch.setattr(memory, "plan", lambda *_: nothing)


# ---- the result


def test_statistics_are_those_of_the_rows(made, done):
    samples = Samples(open_dataset(made / "data").split("val"), 40, 6)
    rows = samples.rows(0, 6)
    found = {0: [], 1: [], 2: []}

    def keep(layer: int, _, x_BTD: torch.Tensor) -> None:
        found[layer].append(x_BTD.double())

    running.read(planted_model(), rows, (0, 1, 2), keep)
    for layer, (x_BTD,) in found.items():
        figures = read(done)["parts"]["statistics"]["result"][str(layer)]
        assert figures["rms"] == pytest.approx(x_BTD.square().mean().sqrt().item(), rel=1e-6)
        assert figures["max_abs"] == pytest.approx(x_BTD.abs().max().item(), rel=1e-6)
        assert figures["tokens"] == 240


def test_heads_are_found_by_what_they_do(done):
    parts = read(done)["parts"]
    table = parts["patching"]["result"]
    effect_L2C = np.reshape(table["values"], (3, 2, -1))
    last = table["columns"].index("23")
    assert effect_L2C[2, 0, last] == pytest.approx(1, abs=0.05)
    assert not effect_L2C[1, 0].any()
    assert table["clean"] - table["corrupt"] > 1

    distances = parts["distances"]["result"]
    assert distances["0"]["distance"][0] == pytest.approx(1, abs=0.1)
    assert distances["2"]["distance"][0] > 5


def test_the_precision_table_has_its_noise_floor(done):
    table = read(done)["parts"]["precision"]["result"]["precisions"]["bfloat16"]
    assert table["layers"].keys() == {"0", "1", "2"}
    for figures in table["layers"].values():
        assert figures["match"]["mean"] > figures["noise_floor"]["mean"]
        assert 0 <= figures["jaccard"] <= 1
    assert table["patching"]["of"] == 0  # the planted head is alone


def test_the_plan_of_each_part_is_within_five_percent_of_what_it_took(done):
    result = read(done)
    measured = report.measured_peaks(result["parts"])
    assert result["planned_bytes"].keys() == measured.keys() - {"precision"}
    for name, planned in result["planned_bytes"].items():
        assert planned == pytest.approx(measured[name], rel=0.05), name


def test_the_report_has_a_line_of_every_part(done):
    result = read(done)
    assert not result["missing"]
    assert not result["left_out"]
    text = (done / "report.txt").read_text()
    for name in ("layer 0", "distance 2", "patching", "autoencoder 1", "bfloat16", "memory"):
        assert f"\n{name}" in text
    assert "nan" not in text
    saved = [path.name for path in done.glob("*.safetensors")]
    assert len(saved) == 9  # three layers, their noise floor, and bfloat16


def test_figures_are_on_the_disk_after_each_part(made, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(running.Analysis, "_look_back", stop)
    with pytest.raises(KeyboardInterrupt):
        analyse(made, tmp_path / "out", "--skip_sae --skip_patching")
    result = read(tmp_path / "out")
    assert result["parts"].keys() == {"statistics"}
    assert result["missing"] == ["distances"]
    assert "not done yet" in (tmp_path / "out" / "report.txt").read_text()


# ---- parts that refuse


def test_a_model_that_cannot_copy_is_analysed_without_patching(made, overflowing, tmp_path):
    result = analyse(made, tmp_path / "out", "--skip_sae --layers 2", overflowing)
    assert result["left_out"].keys() == {"patching"}
    assert result["parts"].keys() == {"statistics", "distances"}
    assert "\npatching" in (tmp_path / "out" / "report.txt").read_text()


def test_a_comparison_of_what_overflows_has_the_other_precision(made, overflowing, tmp_path):
    more = "--skip_sae --skip_patching --layers 1 --compare float32,float16,bfloat16"
    result = analyse(made, tmp_path / "out", more, overflowing, code=2)
    assert result["left_out"].keys() == {"costs-float16"}
    assert "MLP of layer 1" in result["left_out"]["costs-float16"]
    assert result["parts"]["precision"]["result"]["precisions"].keys() == {"bfloat16"}


def test_autoencoders_that_refuse_are_left_out_of_the_comparison(made, tmp_path, monkeypatch):
    def refuse(*_):
        raise ValueError("the loss is nan: lower the rate")

    monkeypatch.setattr(running.Analysis, "_train", refuse)
    more = "--skip_patching --layers 1 --compare float32,bfloat16"
    result = analyse(made, tmp_path / "out", more, code=2)
    assert result["left_out"].keys() == {"sae", "sae-floor", "sae-bfloat16"}
    table = result["parts"]["precision"]["result"]["precisions"]["bfloat16"]
    assert table["layers"]["1"]["jaccard"] is None
    assert table["layers"]["1"]["relative_rms"] > 0


def test_an_overflow_in_the_first_rows_names_the_layer_and_leaves_nothing(
    made, overflowing, tmp_path, capsys
):
    more = "--skip_sae --skip_patching --dtype float16"
    assert not analyse(made, tmp_path / "out", more, overflowing, code=2)
    line = capsys.readouterr().err.splitlines()[-1]
    assert "MLP of layer 1" in line
    assert "--dtype" in line


def test_an_overflow_in_later_rows_leaves_out_what_depends_on_it(
    made, overflowing, tmp_path, monkeypatch
):
    monkeypatch.setattr(running.Analysis, "_check", lambda *_: None)
    result = analyse(made, tmp_path / "out", "--skip_sae --dtype float16", overflowing, code=2)
    assert result["left_out"].keys() == {"patching", "statistics", "distances"}
    assert "MLP of layer 1" in result["left_out"]["statistics"]


def test_an_overflow_behind_the_layers_that_are_looked_at_does_not_matter(
    made, overflowing, tmp_path
):
    more = "--skip_sae --skip_patching --layers 0 --dtype float16"
    figures = analyse(made, tmp_path / "out", more, overflowing)["parts"]["statistics"]["result"]
    assert figures.keys() == {"0"}
    assert figures["0"]["fp16_headroom"] > 1
