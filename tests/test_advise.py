"""The advisor, for cards that users name: which of them analyse a model of 1.2B parameters in fp32,
and which need half precision.
"""

import re

import pytest

import profile_memory
from tests.tiers import slow

ANALYSIS = [
    "--advise",
    "--task",
    "analysis",
    "--dtype",
    "float32",
    "--model_size",
    "1.7B",
    "--model_overrides",
    "num_layers=18",
    "--context_length",
    "2048",
]


@pytest.mark.parametrize(
    "card, code, change",
    [
        # what is instead of fp32 is simulated too, 7 CPU-seconds for each precision
        slow(["--gpu", "RTX 3080"], 2, "bf16 instead of fp32"),
        slow(["--vram", "8", "--cc", "70"], 2, "fp16 instead of fp32"),
        (["--gpu", "RTX 3090"], 0, ""),
        slow(["--gpu", "V100 16GB"], 0, ""),
        slow(["--vram", "2"], 3, ""),
    ],
    ids=str,
)
def test_each_card_gets_its_precision(card, code, change, capsys, monkeypatch):
    monkeypatch.setattr(profile_memory, "host_available_bytes", lambda: 1)
    assert profile_memory.main([*ANALYSIS, "--batch_size", "20", *card]) == code
    printed = capsys.readouterr().out
    assert change in printed
    assert ("instead of fp32" in printed) == (code > 0)
    # the table of docs/LAB.md
    assert re.search(r"as asked +8\.85 ", printed)
    if code == 2:
        assert re.search(rf"{change} +4\.71 +\d+\.\d\d  fits", printed)


@pytest.mark.slow
def test_advice_for_training_climbs_to_the_host(capsys, monkeypatch):
    monkeypatch.setattr(profile_memory, "host_available_bytes", lambda: 1)
    args = ["--advise", "--gpu", "RTX 4090", "--model_size", "1.7B", "--context_length", "32768"]
    assert profile_memory.main(args) == 2
    printed = capsys.readouterr().out
    assert "offloaded activations" in printed
    *_, host, command = printed.splitlines()
    assert (
        "host memory: " in host and host.startswith("time: ") and "--master_weights host" in command
    )
    row = next(line for line in printed.splitlines() if "offloaded activations" in line)
    assert row.endswith("saves nothing, left out") and "--offload_activations" not in command
