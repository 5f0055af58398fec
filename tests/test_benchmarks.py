"""The benchmarks run at toy sizes, print their tables, and check what they time before they time
it.
"""

import re

import pytest
import torch

from benchmarks import attention


@pytest.fixture(autouse=True)
def threads():
    """Restore the number of threads, which the benchmarks set to one."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_the_attention_benchmark_prints_a_table_and_draws_it(monkeypatch, capsys, tmp_path):
    pytest.importorskip(
        "matplotlib", reason="matplotlib is not installed: the figure is not tested"
    )
    picture = tmp_path / "attention.png"
    monkeypatch.setattr(
        "sys.argv",
        [
            "attention",
            "--tokens",
            "1100",
            "2048",
            "--dtypes",
            "fp32",
            "--what",
            "forward",
            "training",
            "decode",
            "--png",
            str(picture),
        ],
    )
    attention.main()
    rows = re.findall(
        r"^\| (\w+) \| fp32 \| ([\d,]+) \| .* \| ([\d.]+) \|$", capsys.readouterr().out, re.M
    )
    assert [row[:2] for row in rows] == [
        (what, T) for what in ("forward", "training", "decode") for T in ("1,100", "2,048")
    ]
    assert all(float(ratio) > 0 for *_, ratio in rows)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_attention_benchmark_refuses_to_time_what_is_wrong(monkeypatch):
    right, decode = attention.nsa_engine.nsa_attention, attention.nsa_decode.nsa_decode

    def wrong_forward(*arguments, **options):
        result = right(*arguments, **options)
        return result if isinstance(result, dict) else result * 1.02

    def wrong_backward(q, *rest, **options):
        return right(q.detach() + 0.9 * (q - q.detach()), *rest, **options)

    for module, name, wrong, words in (
        (attention.nsa_engine, "nsa_attention", wrong_forward, "forward"),
        (attention.nsa_engine, "nsa_attention", wrong_backward, "gradient of input 0"),
        (attention.nsa_decode, "nsa_decode", lambda *x: decode(*x) * 1.02, "decoding"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, wrong)
            with pytest.raises(SystemExit, match=f"{words} .*off by"):
                attention.refuse_if_wrong("fp32")
