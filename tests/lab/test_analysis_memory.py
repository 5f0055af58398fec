"""Planned peaks of an analysis against real parts under the tracker, and what is said of them."""

import dataclasses
import re
import shlex

import pytest
import torch

import profile_memory
from lab import run_full_analysis
from lab.analysis import memory as analysis
from lab.analysis.config import AnalysisConfig, Measures
from lab.analysis.samples import Rows
from longhaul import cli, kernels
from model import ModelConfig, NSAConfig
from tests.lab.test_analysis_run import made  # noqa: F401  (a fixture)
from tests.tiers import slow

CPU = torch.device("cpu")
FEW = Measures(
    sae_tokens=3000, prompts=4, prompt_length=200, spans=4, compare="float32,bfloat16", queries=0
)
SETTINGS = {
    "standard": (ModelConfig.preset("tiny", vocab_size=500, num_layers=3), FEW),
    "nsa": (
        ModelConfig.preset("tiny", vocab_size=500, num_layers=3, attention=NSAConfig(window=128)),
        FEW,
    ),
    "parts": (
        ModelConfig.preset("tiny", vocab_size=500, num_layers=3),
        dataclasses.replace(FEW, chunk=128),
    ),
}


class RandomSamples(analysis.FakeSamples):
    """Rows of random tokens: one document each, as a plan assumes."""

    def rows(self, first: int, last: int) -> Rows:
        make = torch.Generator().manual_seed(first)
        shape = (last - first, self.context_length)
        return Rows(torch.randint(0, 500, shape, generator=make), None)


class PackedSamples(RandomSamples):
    """Rows of documents of many lengths, the longest of them twice."""

    LENGTHS = (100, 300, 37, 193, 70, 120, 300, 280)

    def rows(self, first: int, last: int) -> Rows:
        tokens_BT = super().rows(first, last).tokens_BT
        doc_ids_T = torch.arange(len(self.LENGTHS)).repeat_interleave(torch.tensor(self.LENGTHS))
        return Rows(tokens_BT, doc_ids_T.view(-1, self.context_length)[: len(tokens_BT)])


@pytest.fixture(autouse=True)
def without_a_refusal(monkeypatch):
    """Random weights do not tell prompts apart, which is not what is tested here."""
    monkeypatch.setattr("lab.analysis.patching.LEAST_DIFFERENCE", 0.0)


def asked(name: str) -> analysis.Analysed:
    config, measures = SETTINGS[name]
    return analysis.Analysed(config, measures, 2, 300)


# --------------------------------------------------------------------------- planned and real


MEASURED = [part for part in analysis.PARTS if part != "loading"]


def check_part(part: str, what: analysis.Analysed, samples: RandomSamples):
    """The planned peak of a part is the measured one."""
    planned = analysis.peak(what, "cpu", part)
    model = kernels.decoder(what.config)
    with analysis.meter(model, CPU) as meter:
        analysis.PARTS[part](model, samples, what)
    assert planned == pytest.approx(meter.peak_bytes, rel=0.05)


def test_a_model_that_is_loaded_has_its_tied_head_twice_until_it_is_tied():
    config = SETTINGS["standard"][0]
    with torch.device("meta"):
        skeleton = kernels.decoder(config).to(config.dtype)
    tracker = analysis.PeakTracker()
    with tracker:
        model = skeleton.to_empty(device="cpu")
        model.tie_weights()
    assert analysis.peak(asked("standard"), "cpu", "loading") == tracker.peak > tracker.live


def test_distances_are_planned_where_they_are_measured():
    assert "distances" in analysis.names(asked("standard"))
    assert "distances" not in analysis.names(asked("nsa"))


# a plan that reads every tile of every head takes seconds, as does one of many parts of a row
CASES = [("standard", part) for part in MEASURED if part != "distances"]
CASES += [slow("standard", "distances")]
CASES += [slow("parts", part) for part in ("patching", "distances", "costs")]
CASES += [slow("nsa", part) for part in ("patching", "costs")]


@pytest.mark.parametrize("name, part", CASES)
def test_each_part_is_planned_within_five_percent(name, part):
    what = asked(name).shallow(2, 2)
    check_part(part, what, RandomSamples(2, what.context_length))


@pytest.mark.parametrize("part", [slow("statistics"), "sae"])
def test_packed_rows_in_parts_are_planned_within_five_percent(part):
    what = dataclasses.replace(asked("parts"), context_length=700, longest=300).shallow(1, 1)
    check_part(part, what, PackedSamples(2, what.context_length))


@pytest.mark.parametrize(
    "part, layers",
    [("statistics", ""), *(slow(part, "0,1,2,4") for part in analysis.PARTS)],
)
def test_few_layers_extrapolate_to_what_all_layers_take(part, layers):
    what = asked("standard")
    config = dataclasses.replace(what.config, num_layers=6)
    measures = dataclasses.replace(what.measures, layers=layers)
    deep = dataclasses.replace(what, config=config, measures=measures)
    expected = analysis.simulated(deep, "cpu", analysis.PARTS[part])
    assert analysis.peak(deep, "cpu", part) == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
def test_a_comparison_holds_the_activations_of_one_layer():
    what = asked("standard")
    peaks = []
    for layers in ("2", "0,1,2"):
        measures = dataclasses.replace(what.measures, layers=layers, skip_sae=True)
        found = dataclasses.replace(what, measures=measures)
        peaks.append(analysis.simulated(found, "cpu", analysis.costs))
    one, all_layers = peaks
    activation = what.context_length * what.config.hidden_size * 4
    assert all_layers - one < 0.01 * activation


@pytest.mark.slow
def test_a_comparison_in_parts_grows_by_a_second_cache_alone():
    measures = dataclasses.replace(FEW, chunk=512, skip_sae=True)
    what = dataclasses.replace(asked("parts"), measures=measures).shallow(1, 1)

    def bytes_per_token(part) -> float:
        sizes = [
            analysis.simulated(dataclasses.replace(what, context_length=T), "cpu", part)
            for T in (8192, 16_384)
        ]
        return (sizes[1] - sizes[0]) / 8192

    config = what.config
    cache = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim  # bfloat16
    assert bytes_per_token(analysis.costs) <= bytes_per_token(analysis.statistics) + 1.05 * cache


def test_the_meter_keeps_no_history():
    tracker = analysis.PeakTracker()
    with tracker:
        for _ in range(50):
            x = torch.zeros(1000)
            y = x + 1
            del x, y
    assert tracker.peak == 8000 and tracker.live == 0
    assert not tracker.trace.events and not tracker.trace.storages


@pytest.mark.slow
def test_131072_tokens_take_no_more_than_training_on_them():
    from longhaul.config import TrainConfig
    from longhaul.planner.simulate import simulate

    T = 131_072
    cfg = TrainConfig(
        model_size="tiny",
        model_overrides=("num_layers=1",),
        context_length=T,
        dtype="fp32",
        device="cpu",
        gradient_checkpointing="full",
    )
    trained, _ = simulate(cfg, target="cpu").peak()
    measures = Measures(chunk=4096, compare="float32,bfloat16")
    what = analysis.Analysed(cfg.model(), measures, 1, T)
    for name, size in analysis.peaks(what, "cpu").items():
        assert size < trained, name


# --------------------------------------------------------------------------- what is said

SMALL = "--task analysis --model_size tiny --context_length 512 --skip_sae"


def said(words: str, capsys, code: int = 0) -> str:
    assert profile_memory.main(words.split()) == code
    return capsys.readouterr().out


def test_the_plan_has_a_line_for_each_part(capsys, tmp_path):
    words = "--batch_size 1 --device cpu --model_overrides num_layers=2"
    text = said(f"{SMALL} {words} --json {tmp_path}/plan.json", capsys)
    for name in ("patching", "statistics", "distances", "device"):
        assert re.search(rf"^  {name} +\d+\.\d\d GiB", text, re.M)
    assert "sae" not in text and text.count("(highest)") == 1
    assert "2 layer(s), 1 x 512 tokens, bfloat16" in text


@pytest.mark.slow
def test_the_command_of_a_comparison_is_one_that_the_program_takes(capsys):
    words = f"{SMALL} --batch_size 2 --skip_patching --layers 0 --compare float32,bfloat16"
    profile_memory.main([*words.split(), "--advise", "--vram", "0.7"])
    text = capsys.readouterr().out
    assert "instead of fp32" not in text and "bfloat16 " not in text.replace(",bfloat16", "")
    line = text.splitlines()[-1].removeprefix("run: ")
    found = cli.parse(AnalysisConfig, shlex.split(line)[3:], "")
    assert found.dtype == "float32" and found.precisions() == ("float32", "bfloat16")


@pytest.mark.slow
def test_the_printed_command_runs(made, tmp_path, capsys):  # noqa: F811
    words = (
        f"--advise --task analysis --checkpoint {made}/model --data {made}/data --vram 8 "
        "--context_length 40 --batch_size 2 --num_samples 6 --layers 0,2 "
        "--skip_patching --skip_sae --dtype float32"
    )
    line = said(words, capsys).splitlines()[-1].removeprefix("run: ")
    assert "--layers 0,2" in line and line.startswith("python -m lab.run_full_analysis ")
    given = shlex.split(line)[3:]
    given[given.index("--device") + 1] = "cpu"  # as on a machine with that card
    given[given.index("--out") + 1] = str(tmp_path / "out")
    assert run_full_analysis.main(given) == 0
    assert (tmp_path / "out" / "report.txt").exists()
