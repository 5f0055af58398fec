"""The benchmarks run at toy sizes, print their tables, and check what they time before they time
it.
"""

import json
import re

import pytest
import torch

from benchmarks import attention, selectors


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
    right = attention.nsa_engine.nsa_attention
    state = attention.nsa_decode.NSAState
    decode = state.decode

    def wrong_forward(*arguments, **options):
        result = right(*arguments, **options)
        return result if isinstance(result, dict) else result * 1.02

    def wrong_backward(q, *rest, **options):
        return right(q.detach() + 0.9 * (q - q.detach()), *rest, **options)

    for module, name, wrong, words in (
        (attention.nsa_engine, "nsa_attention", wrong_forward, "forward"),
        (attention.nsa_engine, "nsa_attention", wrong_backward, "gradient of input 0"),
        (state, "decode", lambda *x: decode(*x) * 1.02, "decoding"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, wrong)
            with pytest.raises(SystemExit, match=f"{words} .*off by"):
                attention.refuse_if_wrong("fp32")


def test_the_share_of_the_best_choice_is_that_of_dense_probabilities():
    make = torch.Generator().manual_seed(0)
    q = torch.randn(1, 700, 4, 16, generator=make) * 3
    k = torch.randn(1, 700, 2, 16, generator=make)
    mass_BCGN = selectors.masses_of_blocks(q[:, -9:], k, 64)
    logits = (q[0, -1, 3] @ k[0, :, 1].T) / 4
    expected_N = torch.stack([part.sum() for part in logits.softmax(0).split(64)])
    others = (q[0, -1, 2] @ k[0, :, 1].T / 4).softmax(0).split(64)
    mean_N = (expected_N + torch.stack([part.sum() for part in others])) / 2
    assert (mass_BCGN[0, -1, 1] - mean_N).abs().max() < 1e-6

    assert selectors.share_of_best(selectors.settings("exact", 11), q, k) == pytest.approx(1)
    shares = [
        selectors.share_of_best(selectors.settings(name, 4), q, k) for name in ("exact", "mean")
    ]
    assert 1 > shares[0] > shares[1]


def test_the_table_of_selectors_is_relative_to_standard_attention(tmp_path):
    for seed, found in enumerate((0.5, 0.25)):
        figures = {"standard, 4096, 0": {"retrieval": 0.5}}
        figures["exact, 4096, 16"] = {"retrieval": found, "recall": 0.75}
        for name, content in figures.items():
            (tmp_path / f"seed-{seed}, {name}.json").write_text(json.dumps(content))
    table = selectors.result_table(tmp_path, [4096], [16])
    assert "| exact | 0.75 (0.50 to 1.00), recall 0.75 |" in table and "| mean | - |" in table


def test_times_of_selectors_are_printed_next_to_sdpa(capsys):
    assert selectors.main(["--times", "1100", "--blocks", "4"]) == 0
    assert re.search(r"^\| 1,100 \| [\d.]+ s \| [\d.]+x", capsys.readouterr().out, re.M)
