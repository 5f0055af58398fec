"""Predicted peaks against those that others measured on GPUs: a sample of the benchmark's rows."""

import json
from xml.etree import ElementTree

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
    path = tmp_path / "peaks.svg"
    assert gpu_peaks.main(["--svg", str(path)]) == 0
    drawn = ElementTree.parse(path).getroot()
    points = [place(point) for point in drawn.findall("{*}circle")]
    assert len(points) == len(ROWS)
    by_peak = sorted(zip(ROWS, points), key=lambda pair: pair[0].published_mib)
    across = [x for _, (x, _) in by_peak]
    assert across == sorted(across) and across[0] < across[-1]
    for x, y in points:
        assert x - gpu_peaks.LEFT == pytest.approx(gpu_peaks.FLOOR - y, abs=0.11)


def place(point: ElementTree.Element) -> tuple[float, float]:
    return float(point.get("cx")), float(point.get("cy"))
