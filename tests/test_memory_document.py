"""docs/MEMORY.md is what the tool computes, and the tool's tracker finds what torch's MemTracker
finds.
"""

from pathlib import Path

import pytest

from benchmarks import memory_tracker
from longhaul.config import TrainConfig
from longhaul.memory import document

TEXT = (Path(__file__).parent.parent / "docs" / "MEMORY.md").read_text()
FAST = {"Logits", "Soft tokens", "Rewards over the vocabulary"}
SECTIONS = [
    pytest.param(title, marks=() if title in FAST else pytest.mark.slow)
    for title in document.SECTIONS
]


@pytest.mark.parametrize("title", SECTIONS)
def test_the_document_holds_what_the_tool_computes(title):
    assert f"## {title}\n\n{document.SECTIONS[title]()}\n" in TEXT


def test_the_document_has_no_other_words():
    assert TEXT.startswith(document.HEAD) and TEXT.count("\n## ") == len(document.SECTIONS)


def test_the_tracker_finds_the_peak_that_torchs_memtracker_finds():
    cfg = TrainConfig(model_size="tiny", context_length=4096)
    assert memory_tracker.ours(cfg) == pytest.approx(
        memory_tracker.theirs(cfg), rel=memory_tracker.TOLERANCE
    )


@pytest.mark.slow
def test_the_benchmark_prints_its_table(capsys):
    memory_tracker.main(["--model_size", "tiny", "--layers", "2", "--context_length", "8192"])
    assert "tiny, 2 layers, 8,192 tokens" in capsys.readouterr().out
