"""A predicted step as a snapshot that PyTorch's own tools read, without a GPU."""

import pickle

import pytest
import torch
from torch import nn
from torch.cuda import _memory_viz

from footprint import predict
from tests.footprint_models import trained


@pytest.fixture(scope="module")
def report():
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))

    return predict(*trained(make, lambda model: model(torch.randn(1024, 512)).square().mean()))


@pytest.fixture(scope="module")
def snapshot(report, tmp_path_factory):
    path = tmp_path_factory.mktemp("snapshot") / "memory.pickle"
    report.html(str(path))
    return pickle.loads(path.read_bytes())


def test_the_history_reaches_the_predicted_peak_and_every_release_is_of_an_allocation(
    report, snapshot
):
    alive: dict[int, int] = {}
    peak = 0
    for event in snapshot["device_traces"][0]:
        if event["action"] == "alloc":
            assert event["addr"] not in alive
            alive[event["addr"]] = event["size"]
            peak = max(peak, sum(alive.values()))
        elif event["action"] == "free_completed":
            del alive[event["addr"]]
    assert peak == report.peak

    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    held = {b["address"]: b["requested_size"] for b in blocks if b["state"] == "active_allocated"}
    assert held == alive


def test_segments_are_whole_and_as_large_as_what_was_reserved(snapshot):
    grown = [e for e in snapshot["device_traces"][0] if e["action"] == "segment_alloc"]
    sizes = {segment["address"]: segment["total_size"] for segment in snapshot["segments"]}
    assert sizes == {event["addr"]: event["size"] for event in grown}


def test_torchs_own_tools_read_it(snapshot):
    assert "allocated" in _memory_viz.segsum(snapshot)
    assert "cudaMalloc" in _memory_viz.trace(snapshot)
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "<script" in plot(snapshot)


def test_a_file_that_cannot_be_written_is_named(report, tmp_path):
    with pytest.raises(ValueError, match="cannot be written"):
        report.snapshot(str(tmp_path / "missing" / "memory.pickle"))
