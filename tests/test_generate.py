"""Sampling: the filters, greedy decoding against full forwards, seeds, limits; scripts.generate and
scripts.evaluate as a user runs them.
"""

import contextlib
import dataclasses
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train
from data import prepare
from data.writer import write_dataset
from longhaul import kernels
from longhaul.checkpoint.load import load_model, verified
from longhaul.clock import ClockedCache
from longhaul.generate import (
    PREFILL_CHUNK,
    CapturedSteps,
    NotANumber,
    cache_bytes,
    cast_matrices,
    cuda_graph,
    generate,
)
from longhaul.kinds import StandardKind
from longhaul.sampling import draw, filtered
from longhaul.sparse.indexer import Indexed
from model import ModelConfig, NSAConfig, Standard
from scripts import evaluate as evaluate_script
from scripts import generate as generate_script
from tests.tiers import slow

ROOT = Path(__file__).parent.parent
SMALL = (
    "--model_size tiny --model_overrides num_layers=1 --max_steps 2 --device cpu --dtype fp32 "
    "--eval_every 0"
)


@pytest.fixture(scope="module")
def decoder():
    return kernels.decoder(ModelConfig.preset("tiny", vocab_size=50, num_layers=2))


def test_top_k_keeps_the_k_most_probable_in_their_proportions():
    p = filtered(torch.tensor([1.0, 3.0, 2.0, 0.0]), 1.0, 2, 1.0)
    assert (
        p[0] == p[3] == 0
        and float(p[1] / p[2]) == pytest.approx(torch.tensor(1.0).exp().item())
        and float(p.sum()) == pytest.approx(1)
    )


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    for mass, kept in ((0.4, 1), (0.5, 1), (0.51, 2), (0.8, 2), (0.96, 4), (1.0, 4)):
        assert int((filtered(logits, 1.0, 0, mass) > 0).sum()) == kept, mass


@pytest.mark.parametrize("top_k, top_p", [(0, 1.0), (2, 1.0), (0, 0.6), (3, 0.7)])
def test_rows_are_drawn_with_the_probabilities_that_filters_leave(top_k, top_p):
    logits = torch.tensor([[0.5, -1.0, 2.0, 0.1], [0.0, 1.0, -1.0, 0.3]])
    uniform = torch.arange(20_000, dtype=torch.float64).repeat_interleave(2) / 20_000
    drawn = draw(logits.repeat(20_000, 1), uniform, 0.8, top_k, top_p).view(-1, 2)
    for row in (0, 1):
        p = filtered(logits[row], 0.8, top_k, top_p)
        share = drawn[:, row].bincount(minlength=4) / len(drawn)
        assert (share - p / p.sum()).abs().max() < 2e-4


def test_a_low_temperature_sharpens_and_a_high_one_flattens():
    logits = torch.tensor([0.0, 1.0])
    assert (
        filtered(logits, 0.1, 0, 1.0)[1] > 0.9999
        and abs(filtered(logits, 100.0, 0, 1.0)[1] - 0.5) < 0.01
    )


@pytest.mark.parametrize(
    "attention, length",
    [
        (Standard(), 1),
        (Standard(), 5),
        slow(Standard(), PREFILL_CHUNK + 3),
        (NSAConfig(8, 4, 16, 3, window=24), 70),
        (Indexed(count=3, block=8, head_dim=32), 70),
    ],
)
def test_greedy_decoding_equals_the_argmax_of_full_forwards(attention, length):
    config = ModelConfig.preset("tiny", vocab_size=50, num_layers=2, attention=attention)
    decoder = kernels.decoder(config)
    prompt = torch.randint(50, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    got, tokens = list(generate(decoder, prompt, 6, temperature=0)), list(prompt)
    for _ in range(6):
        tokens.append(int(decoder(torch.tensor([tokens]))[0, -1].argmax()))
    assert got == tokens[length:]


def run_once(step, device):
    """In place of a capture: a step runs, and its repetition must overwrite what it did."""
    step()
    return step


# a compressed block has 8 tokens; from the 33rd on, some blocks are not read
STARTS = [("standard", "", 0, 9), slow("nsa", "shared", 0, 9), ("nsa", "separate", 35, 5)]


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # of Triton's interpreter
@pytest.mark.parametrize("attention_type, kv, start, count", STARTS)
def test_steps_of_fixed_shapes_have_the_logits_of_plain_ones(attention_type, kv, start, count):
    attention = Standard()
    if attention_type == "nsa":
        attention = NSAConfig(8, 4, 8, 4, 1, 2, 11, kv=kv)
    config = ModelConfig.preset(
        "tiny",
        vocab_size=64,
        num_layers=1,
        init_std=0.2,
        attention=attention,
    )
    decoder = kernels.decoder(config)
    by_clock = decoder
    if attention_type == "nsa":
        pytest.importorskip("triton", reason="triton is not installed: no layer takes a clock")
        by_clock = kernels.decoder(dataclasses.replace(config, kernels="triton"))
    for name, parameter in decoder.named_parameters():
        if name.endswith("_w2"):  # 0 at the start, so that compression would not depend on order
            torch.nn.init.normal_(parameter, std=0.3)
    tokens = torch.randint(64, (1, start + count), generator=torch.Generator().manual_seed(start))
    plain = decoder.new_cache(1, 65)
    fixed = by_clock.new_cache(1, 65)
    with torch.no_grad():
        if start:
            decoder(tokens[:, :start], cache=plain)
            decoder(tokens[:, :start], cache=fixed)
        clocked = ClockedCache(fixed, rows=1, capacity=65, device="cpu")
        steps = CapturedSteps(decoder, clocked, run_once)
        for token_11 in tokens[:, start:].split(1, dim=1):
            expected = decoder(token_11, cache=plain)[0, -1]
            torch.testing.assert_close(steps(token_11), expected, atol=5e-5, rtol=0)
    assert len(steps.steps) == (2 if attention_type == "nsa" else 1)


class Cuda:
    """Records on which device each call of torch.cuda was made."""

    def __init__(self):
        self.current = "cuda:0"
        self.calls = []

    @contextlib.contextmanager
    def device(self, device):
        before, self.current = self.current, device
        yield
        self.current = before

    def note(self, name):
        def call(*_, **__):
            self.calls.append((name, self.current))
            return SimpleNamespace(wait_stream=lambda _: None, replay=self.note("replay"))

        return call

    def entered(self, name):
        def enter(*_, stream=None):
            self.calls.append((name, self.current))
            return contextlib.nullcontext()

        return enter


def test_a_step_is_captured_and_repeated_on_the_device_of_the_model(monkeypatch):
    cuda = Cuda()
    monkeypatch.setattr(torch.cuda, "device", cuda.device)
    for name in ("Stream", "current_stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, cuda.note(name))
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, cuda.entered(name))

    repeat = cuda_graph(cuda.note("step"), "cuda:1")
    repeat()
    assert {device for _, device in cuda.calls} == {"cuda:1"}
    names = [name for name, _ in cuda.calls]
    assert names.count("step") == 2 and names[-1] == "replay"
    assert cuda.current == "cuda:0"


def test_a_cache_whose_clock_runs_takes_one_token(decoder):
    cache = ClockedCache(decoder.new_cache(1, 8), rows=1, capacity=8, device="cpu")
    with pytest.raises(ValueError, match="3 tokens for a cache whose clock runs: give one token"):
        decoder(torch.zeros(1, 3, dtype=torch.int64), cache=cache)


def test_matrices_in_the_compute_dtype_leave_the_logits_bit_identical():
    config = ModelConfig.preset("tiny", vocab_size=50, num_layers=2, compute_dtype="bfloat16")
    decoder = kernels.decoder(config)
    tokens = torch.arange(9)[None]
    before = decoder(tokens)
    cast_matrices(decoder)
    assert decoder.lm_head.weight is decoder.embed.weight
    assert decoder.lm_head.weight.dtype == torch.bfloat16
    assert decoder.norm.weight.dtype == torch.float32
    assert torch.equal(decoder(tokens), before)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0}, {"top_k": 0, "top_p": 0.9}])
def test_nothing_is_sampled_from_weights_that_are_no_numbers(sampling):
    decoder = kernels.decoder(ModelConfig.preset("tiny", vocab_size=50, num_layers=1))
    decoder.norm.weight.data[3] = float("nan")
    with pytest.raises(NotANumber, match="new token 1 .*: use an earlier checkpoint"):
        list(generate(decoder, [1, 2], 4, **sampling))


def test_equal_seeds_repeat_and_others_differ(decoder):
    texts = [
        list(generate(decoder, [1, 2], 20, temperature=1.0, top_k=0, seed=seed))
        for seed in (3, 3, 4)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_the_stop_token_ends_the_text_and_ids_stay_below_the_tokenizers_vocabulary(decoder):
    first = next(generate(decoder, [1], 1, temperature=0))
    assert list(generate(decoder, [1], 9, temperature=0, stop_ids=[first])) == []
    assert max(generate(decoder, [1], 40, temperature=5.0, top_k=0, vocab_size=7)) < 7


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripts")
    words = "--input longhaul --vocab_size 600 --val_fraction 0.2 --workers 1 --output"
    assert prepare.main([*words.split(), str(folder / "set")]) == 0
    settings = f"--vocab_size 600 --context_length 64 --data {folder / 'set'}"
    train.main([*SMALL.split(), *settings.split(), "--output_dir", str(folder / "run")])
    return folder / "run"


def test_scripts_generate_streams_the_prompt_and_its_continuation(run, capsys):
    generate_script.main(
        ["--checkpoint", str(run), "--prompt", "def é", "--max-new-tokens", "12", "--device", "cpu"]
    )
    captured = capsys.readouterr()
    assert (
        captured.out.startswith("def é")
        and len(captured.out) > len("def é\n")
        and "tokens/s" in captured.err
    )


def test_scripts_generate_reads_a_model_of_standard_attention_sparsely(run, capsys):
    ids = [str(number) for number in range(3, 40)]
    flags = ["--checkpoint", str(run), "--max_new_tokens", "9", "--device", "cpu", "--ids", *ids]
    sparsely = ["--attention_type", "exact", "--blocks", "count=8", "block=8", "init=0", "local=1"]
    printed = []
    for more in ([], sparsely):
        generate_script.main([*flags, "--temperature", "0", *more])
        printed.append(capsys.readouterr())
    assert printed[0].out == printed[1].out
    assert "exact attention reads 8 blocks of 8 tokens" in printed[1].err


def test_scripts_generate_says_that_an_attention_is_slow_on_the_device(run, capsys, monkeypatch):
    monkeypatch.setattr(StandardKind, "warning", lambda config, device: f"slow on {device}")
    flags = ["--checkpoint", str(run), "--ids", "1", "--max_new_tokens", "1", "--device", "cpu"]
    generate_script.main(flags)
    assert "warning: slow on cpu" in capsys.readouterr().err


# ---- tokenizers and ids


def refusal(script, capsys, *words) -> str:
    """The one line on standard error with which the script ends."""
    with pytest.raises(SystemExit) as stop:
        script.main([str(word) for word in words])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def test_a_copy_of_the_checkpoints_tokenizer_is_taken(run, tmp_path, capsys):
    copy = shutil.copy(run / "tokenizer.model", tmp_path / "copy.model")
    flags = f"--checkpoint {run} --device cpu --max_new_tokens 3 --temperature 0 --prompt def"
    generate_script.main([*flags.split(), "--tokenizer", str(copy)])
    with_copy = capsys.readouterr().out
    generate_script.main(flags.split())
    assert capsys.readouterr().out == with_copy


def test_ids_go_in_and_come_out_without_a_tokenizer(run, tmp_path, capsys):
    bare = tmp_path / "bare"
    shutil.copytree(run / "step-00000002", bare / "step-00000002")
    flags = f"--checkpoint {bare} --device cpu --max_new_tokens 6 --temperature 0"
    generate_script.main([*flags.split(), "--ids", "5", "300", "7"])
    ids = [int(word) for word in capsys.readouterr().out.split()]
    model = load_model(verified(bare / "step-00000002"), "cpu", "float32")
    assert ids == [5, 300, 7, *generate(model, [5, 300, 7], 6, temperature=0)]

    said = refusal(generate_script, capsys, *flags.split(), "--prompt", "x")
    assert "has no tokenizer: give --tokenizer PATH, or --ids instead of --prompt" in said


def test_cache_bytes_are_those_of_the_cache():
    config = ModelConfig.preset("tiny")
    with torch.device("meta"):
        kept = kernels.decoder(config).new_cache(1, 100).layers
    tensors = [tensor for layer in kept for tensor in (layer.k_BSGK, layer.v_BSGK)]
    assert cache_bytes(config, 100) == sum(tensor.nbytes for tensor in tensors)


def test_bits_per_byte_of_data_without_bytes_are_called_unknown(run, tmp_path, capsys):
    ids = np.random.default_rng(0).integers(1, 600, (8, 90))
    write_dataset(ids, tmp_path / "ids", vocab_size=600, eod_id=0, val_fraction=0.5)
    settings = f"--data {tmp_path / 'ids'} --output_dir {tmp_path / 'run'} --context_length 64"
    train.main(["--vocab_size", "600", *settings.split(), *SMALL.split()])
    capsys.readouterr()
    evaluate_script.main(["--checkpoint", str(tmp_path / "run"), "--device", "cpu"])
    out = capsys.readouterr().out
    assert "bits per byte      unknown: the data does not say" in out and "nan" not in out
