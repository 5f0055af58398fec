"""The tool's tracker finds what torch's MemTracker finds."""

import pytest

from benchmarks import memory_tracker
from longhaul.config import TrainConfig


def test_the_tracker_finds_the_peak_that_torchs_memtracker_finds():
    cfg = TrainConfig(model_size="tiny", context_length=4096)
    assert memory_tracker.ours(cfg) == pytest.approx(
        memory_tracker.theirs(cfg), rel=memory_tracker.TOLERANCE
    )


@pytest.mark.slow
def test_the_benchmark_prints_its_table(capsys):
    memory_tracker.main(["--model_size", "tiny", "--layers", "2", "--context_length", "8192"])
    assert "tiny, 2 layers, 8,192 tokens" in capsys.readouterr().out
