"""Predicted peaks against those that others measured on GPUs: a sample of the benchmark's rows."""

import json
import re

import pytest

from benchmarks import gpu_peaks

ROWS = list(gpu_peaks.rows())
SAMPLE = {
    "softmax": 2,
    "fused_rms_norm": 1,
    "layer_norm": 1,
    "group_norm": 2,
    "tiled_swiglu": 2,
    "swiglu": 1,
    "linear_grpo": 1,
    "rope": 1,
    "sparse_multi_token_attention": 1,
}


def sample() -> list[gpu_peaks.Row]:
    found = []
    for step, count in SAMPLE.items():
        found += [row for row in ROWS if row.step == step][:count]
    return found


@pytest.mark.parametrize("row", sample(), ids=lambda row: f"{row.card} {row.words}")
def test_a_peak_that_others_measured_is_predicted(row):
    predicted = gpu_peaks.predicted_mib(row)
    assert predicted == pytest.approx(row.published_mib, rel=gpu_peaks.EXACT)


def test_every_row_has_its_source_and_a_step():
    groups = json.loads(gpu_peaks.MEASURED.read_text())["measured"]
    assert len(ROWS) == sum(len(group["peaks_mib"]) for group in groups) == 134
    for group in groups:
        assert group["step"] in gpu_peaks.STEPS
        assert group["repository"] and group["commit"] and group["date"]


def test_the_picture_has_a_point_for_each_row_and_equal_values_on_its_diagonal(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(gpu_peaks, "predicted_mib", lambda row: row.published_mib)
    drawn = tmp_path / "peaks.svg"
    assert gpu_peaks.main(["--svg", str(drawn)]) == 0
    points = re.findall(r'cx="([\d.]+)" cy="([\d.]+)" r="4"', drawn.read_text())
    assert len(points) == len(ROWS)
    for x, y in points:
        across = float(x) - gpu_peaks.LEFT
        assert 0 < across < gpu_peaks.FLOOR - gpu_peaks.TOP
        assert across == pytest.approx(gpu_peaks.FLOOR - float(y), abs=0.11)
