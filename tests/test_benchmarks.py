"""The benchmarks run at toy sizes and print their tables; what they time is checked by themselves first."""

import re

import pytest
import torch

from benchmarks import attention


@pytest.fixture(autouse=True)
def threads():
    """The benchmarks set one thread; the other tests have one already."""
    yield
    assert torch.get_num_threads() == 1


def test_the_attention_benchmark_prints_a_table_and_draws_it(monkeypatch, capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: the figure is not tested")
    picture = tmp_path / "attention.png"
    monkeypatch.setattr("sys.argv", ["attention", "--tokens", "1100", "2048", "--dtypes", "fp32", "--what", "forward", "training", "decode",
                                     "--png", str(picture)])
    attention.main()
    rows = re.findall(r"^\| (\w+) \| fp32 \| ([\d,]+) \| .* \| ([\d.]+) \|$", capsys.readouterr().out, re.M)
    assert [row[:2] for row in rows] == [(what, T) for what in ("forward", "training", "decode") for T in ("1,100", "2,048")]
    assert all(float(ratio) > 0 for *_, ratio in rows)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_attention_benchmark_refuses_to_time_what_is_wrong(monkeypatch):
    def wrong(*tensors, return_parts=False):
        parts = right(*tensors, return_parts=True)
        return parts | {"o": parts["o"] + 1e-4}
    right = attention.nsa_engine.nsa_attention
    monkeypatch.setattr(attention.nsa_engine, "nsa_attention", wrong)
    with pytest.raises(SystemExit, match="off by"):
        attention.refuse_if_wrong()
