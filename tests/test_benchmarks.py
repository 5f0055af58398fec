"""The benchmarks run at toy sizes, print their tables, and check what they time before they time
it.
"""

import re
from functools import partial
from xml.etree import ElementTree

import pytest
import torch

import train
from benchmarks import attention, on_gpu, selectors
from data import recall


@pytest.mark.slow
def test_the_attention_benchmark_prints_a_table_and_draws_it(capsys, tmp_path):
    """At the toy size of benchmarks.on_gpu."""
    (toy,) = {row.toy for row in on_gpu.ROWS if row.name.startswith("attention")}
    picture = tmp_path / "attention.svg"
    attention.main([*toy.split()[2:], "--svg", str(picture)])
    pattern = r"^\| (\w+) \| bf16 \| (300) \| .* \| ([\d.]+) \|$"
    rows = re.findall(pattern, capsys.readouterr().out, re.M)
    assert [row[0] for row in rows] == ["training", "decode"]
    assert all(float(ratio) > 0 for *_, ratio in rows)
    drawn = ElementTree.parse(picture).getroot()
    assert len(drawn.findall("{*}circle")) == 2


@pytest.mark.slow
def test_the_attention_benchmark_refuses_to_time_what_is_wrong(monkeypatch):
    for name in ("inputs", "indexer_inputs"):
        make = getattr(attention, name)
        few = partial(make, 300)
        monkeypatch.setattr(
            attention, name, lambda tokens, *rest, few=few, **more: few(*rest, **more)
        )
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

    assert share_of_best("exact", 11, q, k) == pytest.approx(1)
    assert 1 > share_of_best("exact", 4, q, k) > share_of_best("mean", 4, q, k)


def share_of_best(name: str, count: int, q: torch.Tensor, k: torch.Tensor) -> float:
    return selectors.share_of_best(selectors.settings(name, count), q, k, k)


@pytest.mark.slow
def test_models_are_read_and_trained_with_selectors_and_a_second_call_repeats_nothing(
    tmp_path,
    monkeypatch,
    capsys,
):
    seed = tmp_path / "seed-7"
    recall.main(
        ["--output", str(seed / "data-far"), "--lengths", "64:16", "256:32", "--tokens", "20000"]
    )
    shape = "hidden_size=16 num_layers=1 num_heads=2 num_kv_heads=2 head_dim=64 ffn_size=16"
    flags = f"--data {seed}/data-far --output_dir {seed}/far --context_length 256 --max_steps 1 "
    flags += f"--device cpu --dtype fp32 --eval_every 0 --vocab_size 385 --model_overrides {shape}"
    train.main(["--model_size", "tiny", *flags.split()])

    name = "indexed, 64 wide"
    short = {name: selectors.TRAINED[name]._replace(steps=2)}
    monkeypatch.setattr(selectors, "TRAINED", short)
    monkeypatch.setattr(selectors, "ROWS", selectors.SELECTORS | short)
    monkeypatch.setattr(selectors, "TRAINED_AT", 256)
    monkeypatch.setattr(selectors, "SHORTER", 1)
    monkeypatch.setattr(selectors, "TRAINED_WITH", 3)
    command = f"{tmp_path} --output {tmp_path}/out --lengths 256 --blocks 3 --items 2 --train"
    assert selectors.main(command.split()) == 0
    table = capsys.readouterr().out
    for name in selectors.ROWS:
        assert f"seed-7, {name}, 256, 3: " in table

    assert selectors.main(command.split()) == 0
    assert "seed-7" not in capsys.readouterr().out


@pytest.mark.slow
def test_times_of_selectors_are_printed_next_to_sdpa(capsys):
    assert selectors.main(["--times", "500", "--blocks", "4"]) == 0
    table = capsys.readouterr().out
    assert re.search(
        r"^\| 500 \| forward and backward \| [\d.]+ s( \| [\d.]+x){8} \|$", table, re.M
    )
    assert re.search(r"^\| \| one decoded token \| [\d.]+ ms( \| [\d.]+x){8} \|$", table, re.M)
