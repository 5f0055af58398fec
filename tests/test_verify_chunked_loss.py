"""verify_chunked_loss.py as a user runs it: the documented lines, the exit code, and proof that it
can fail.
"""

import pytest

import verify_chunked_loss as verify
from longhaul.vocab import loss as vocab_loss
from longhaul.vocab import statistics
from tests.tiers import slow

SMALL = ["--device", "cpu", "--seq_len", "96", "--hidden_size", "32", "--vocab_size", "20000"]


@pytest.mark.parametrize("dtype", ["bfloat16", slow("float32")])
def test_the_documented_cases_are_printed_and_every_check_passes(capsys, dtype):
    assert verify.main([*SMALL, "--dtype", dtype]) == 0
    out = capsys.readouterr().out
    chunked = "should_chunk=True\n  ✓ Chunked loss used (memory efficient)"
    for line in (
        "Test 1: seq_len=4096, logits=1.16GiB, should_chunk=False\n  ✓ Standard loss used",
        f"Test 2: seq_len=40000, logits=11.32GiB, {chunked}",
        f"Test 3: seq_len=131072, logits=37.09GiB, {chunked}",
        "0 failed",
    ):
        assert line in out
    assert "negative control: the naive loop keeps" in out


def failures(capsys, dtype: str) -> list[str]:
    """Run the checks, which must fail; the texts of those that did."""
    assert verify.main([*SMALL, "--dtype", dtype]) == 1
    lines = capsys.readouterr().out.splitlines()
    return [line.split("FAILED: ")[1] for line in lines if "✗ FAILED: " in line]


@pytest.mark.slow
def test_a_loss_that_keeps_every_logit_is_found(monkeypatch, capsys):
    monkeypatch.setitem(verify.LOSSES, "chunked", verify.naive_loop)
    assert any("bytes per token are kept" in text for text in failures(capsys, "float32"))


@pytest.mark.slow
def test_a_loss_that_is_one_percent_off_is_found(monkeypatch, capsys):
    def wrong(*args, **options):
        return verify.linear_cross_entropy(*args, **options) * 1.01

    monkeypatch.setitem(verify.LOSSES, "chunked", wrong)
    assert "the loss is that of float64 within 1e-3 nats" in failures(capsys, "float32")


@pytest.mark.slow
def test_a_labels_logit_that_is_rounded_to_bf16_is_found(monkeypatch, capsys):
    exact = vocab_loss.target_logits

    def rounded(hidden_nD, *args):
        logits_n = exact(hidden_nD, *args)
        return logits_n.bfloat16().to(logits_n.dtype)

    for module in (vocab_loss, statistics):
        monkeypatch.setattr(module, "target_logits", rounded)
    for name in verify.TORCH_LOSSES:  # no check reads them
        monkeypatch.delitem(verify.LOSSES, name)
    assert failures(capsys, "bfloat16") == [
        "each token's loss is free of the rounding of its label's logit"
    ]
