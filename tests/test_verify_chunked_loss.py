"""verify_chunked_loss.py as a user runs it: the documented lines, the exit code, and that it can
fail.
"""

import pytest

import verify_chunked_loss as verify

SMALL = ["--device", "cpu", "--seq_len", "96", "--hidden_size", "32", "--vocab_size", "20000"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_documented_cases_are_printed_and_every_check_passes(capsys, dtype):
    assert verify.main([*SMALL, "--dtype", dtype]) == 0
    out = capsys.readouterr().out
    for line in (
        "Test 1: seq_len=4096, logits=1.16GiB, should_chunk=False\n  ✓ Standard loss used",
        "Test 2: seq_len=40000, logits=11.32GiB, should_chunk=True\n  ✓ Chunked loss used (memory efficient)",
        "Test 3: seq_len=131072, logits=37.09GiB, should_chunk=True\n  ✓ Chunked loss used (memory efficient)",
        "0 failed",
    ):
        assert line in out
    assert "negative control: the naive loop keeps" in out


def test_a_wrong_loss_is_found_out_with_exit_code_1(monkeypatch, capsys):
    monkeypatch.setitem(verify.LOSSES, "chunked", verify.naive_loop)  # keeps every logit
    assert verify.main(SMALL) == 1
    assert "✗ FAILED" in capsys.readouterr().out
    monkeypatch.setitem(
        verify.LOSSES, "chunked", lambda h, w, y: verify.chunked_loss(h, w, y) * 1.01
    )
    assert verify.main(SMALL) == 1


@pytest.mark.parametrize(
    "flags", [["--seq_len", "0"], ["--dtype", "int8"], ["--seqlen", "5"], ["--device", "cuda"]]
)
def test_bad_input_ends_with_exit_code_2(flags, capsys):
    import torch

    if "cuda" in flags and torch.cuda.is_available():
        pytest.skip("this machine has a GPU, so --device cuda is no bad input")
    with pytest.raises(SystemExit) as stop:
        verify.main(flags)
    assert stop.value.code == 2 and len(capsys.readouterr().err.strip().splitlines()) == 1
