"""The advisor, for cards that users name: which of them analyse a model of 1.2B parameters in fp32,
and which need half precision.
"""

import re

import pytest

import profile_memory

ANALYSIS = [
    "--advise",
    "--task",
    "analysis",
    "--dtype",
    "float32",
    "--model_size",
    "1.7B",
    "--context_length",
    "2048",
]


def advised(words: list[str], capsys) -> tuple[int, str]:
    code = profile_memory.main([*ANALYSIS, *words])
    return code, capsys.readouterr().out


@pytest.fixture(autouse=True)
def without_host_memory(monkeypatch):
    monkeypatch.setattr(profile_memory, "host_available_bytes", lambda: 1)


@pytest.mark.slow
def test_each_card_gets_its_precision(capsys):
    """The figures of docs/LAB.md, far above what patching of 16 short prompts takes; one test,
    because what was simulated is remembered.
    """
    rows = ["--batch_size", "20", "--skip_patching", "--model_overrides", "num_layers=18"]
    for card in (["--gpu", "RTX 3090"], ["--gpu", "V100 16GB"]):
        code, printed = advised([*rows, *card], capsys)
        assert code == 0 and "instead of fp32" not in printed
        assert re.search(r"as asked +8\.85 ", printed)

    cards = {"bf16": ["--gpu", "RTX 3080"], "fp16": ["--vram", "8", "--cc", "70"]}
    for precision, card in cards.items():
        code, printed = advised([*rows, *card], capsys)
        assert code == 2
        assert re.search(r"as asked +8\.85 +\d+\.\d\d  too small", printed)
        change = f"{precision} instead of fp32"
        assert re.search(rf"{change} +4\.71 +\d+\.\d\d  fits", printed)


@pytest.mark.slow
def test_a_card_that_holds_it_gets_no_change_and_one_that_holds_nothing_all(capsys):
    few = ["--skip_sae", "--skip_patching", "--layers", "0", "--batch_size", "2"]
    few += ["--model_overrides", "num_layers=2"]
    code, printed = advised([*few, "--gpu", "RTX 3090"], capsys)
    assert code == 0 and "instead of fp32" not in printed
    code, printed = advised([*few, "--vram", "1"], capsys)
    assert code == 3 and "bf16 instead of fp32" in printed and "+ the CPU" in printed


@pytest.mark.slow
def test_advice_for_training_climbs_to_the_host(capsys):
    model = ["--model_size", "1.7B", "--model_overrides", "num_layers=2"]
    args = ["--advise", "--vram", "6", *model, "--context_length", "32768"]
    assert profile_memory.main(args) == 2
    printed = capsys.readouterr().out
    assert "offloaded activations" in printed
    *_, host, command = printed.splitlines()
    assert (
        "host memory: " in host and host.startswith("time: ") and "--master_weights host" in command
    )
    row = next(line for line in printed.splitlines() if "offloaded activations" in line)
    assert row.endswith("saves nothing, left out") and "--offload_activations" not in command
