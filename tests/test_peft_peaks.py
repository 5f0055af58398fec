"""Predicted memory of runs with adapters that others published: some rows of the benchmark."""

from importlib.util import find_spec

import pytest

from benchmarks import peft_peaks
from footprint.record.unroll import LAYERS, unroll
from tests.tiers import slow

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")

ROWS = {row.experiment: row for row in peft_peaks.rows()}
SAMPLE = [
    "beft/llama-3.2-3B-target-v_proj",
    "lora/llama-3.2-3B-rank32",
    slow("lora/llama-3.2-3B-rank32-dora"),
    slow("lora/llama-3.2-3B-rank32-lorafa"),
    slow("ia3/llama-3.2-3B-default"),
    slow("miss/llama-3.2-3B-default"),
]


@pytest.mark.parametrize("name", SAMPLE)
def test_a_published_run_with_adapters_is_predicted(name):
    row = ROWS[name]
    found = peft_peaks.predicted(row)
    assert found.idle == pytest.approx(row.idle, rel=peft_peaks.CLOSE)
    assert found.reserved == pytest.approx(row.reserved, rel=peft_peaks.CLOSE)


def test_five_layers_with_adapters_unroll_to_what_seven_are():
    """Also the gradients, keys and values that are alive before the step."""
    row = ROWS["lora/llama-3.2-3B-rank32"]
    whole = peft_peaks.prediction(peft_peaks.report_of(row, 7, 300).trace)
    short = peft_peaks.report_of(row, LAYERS, 300).trace
    unrolled = peft_peaks.prediction(unroll(short, 7))
    assert (unrolled.idle, unrolled.live) == (whole.idle, whole.live)
    assert unrolled.reserved == pytest.approx(whole.reserved, rel=0.005)


def test_every_run_has_its_source():
    source = peft_peaks.published()
    assert source["repository"] and source["commit"]
    assert len(ROWS) == len(source["runs"]) == 38
