"""--dtype takes the same names in every command, as a user gives them."""

import importlib

import pytest

import profile_memory
import verify_chunked_loss
from base import flags

SPELLINGS = ("bf16", "bfloat16", "torch.bfloat16", "fp32", "float32", "torch.float32")
HALF = ("fp16", "float16", "torch.float16")
# What goes wrong behind --dtype, so that a command ends at once: its line names the folder.
LATER = {
    "scripts.generate": "--checkpoint /nowhere --ids 1",
    "scripts.evaluate": "--checkpoint /nowhere",
    "scripts.lm_eval": "--checkpoint /nowhere --tasks x",
    "lab.reward": "--checkpoint /nowhere --data /nowhere --output /nowhere/else",
    "scripts.convert_qwen3": "--checkpoint /nowhere --output /nowhere/else",
    "lab.run_full_analysis": "--checkpoint /nowhere --out /nowhere/else",
}
WITH_HALF = ("scripts.convert_qwen3", "lab.run_full_analysis")


def refusal(name: str, spelling: str, capsys) -> str:
    """The one line in which a script ends."""
    script = importlib.import_module(name)
    try:
        code = script.main([*LATER[name].split(), "--dtype", spelling])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("name", LATER)
def test_every_script_takes_every_spelling(name, capsys, monkeypatch):
    if name == "scripts.lm_eval":
        monkeypatch.setattr("scripts.lm_eval.require_extra", lambda: None)
    for spelling in SPELLINGS + (HALF if name in WITH_HALF else ()):
        said = refusal(name, spelling, capsys)
        assert "/nowhere" in said and "--dtype" not in said, spelling


BF16 = SPELLINGS[:3]


@pytest.mark.parametrize("flag, spellings", [("--dtype", SPELLINGS), ("--autocast", BF16)])
def test_planning_takes_every_spelling(flag, spellings, capsys):
    for spelling in spellings:
        assert profile_memory.main(["--hf", "/nowhere", flag, spelling]) == 2
        assert "/nowhere" in capsys.readouterr().err


@pytest.mark.parametrize("spelling", SPELLINGS + HALF)
def test_the_loss_is_verified_in_every_spelling(spelling):
    words = "--seq_len 8 --hidden_size 8 --vocab_size 32 --device cpu --dtype"
    given = verify_chunked_loss.parsed([*words.split(), spelling])
    assert given.dtype == flags.precision(spelling)
