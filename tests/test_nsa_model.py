"""Native Sparse Attention inside the decoder: packing, bf16, kernels, initial values, errors.
test_selectors.py has what all selectors must show.
"""

import dataclasses
import re
import sys

import pytest
import torch

import model
from longhaul import kernels
from longhaul.kinds import attention_kind
from longhaul.planner.simulate import on_target
from longhaul.sparse import nsa
from model import Decoder, ModelConfig, NSAConfig, Standard
from tests.test_selectors import NSA, SEPARATE, build, tokens


@pytest.fixture(params=["engine", "plain"])
def either(request, monkeypatch):
    """Runs a test twice: with longhaul/sparse/nsa/, and with the plain functions of model.py."""
    if request.param == "plain":
        monkeypatch.setattr(kernels, "choose", lambda config: model.Ops())


@pytest.mark.parametrize("sizes", [NSA, SEPARATE], ids=["nsa", "separate, mean"])
@torch.no_grad()
def test_bf16_decoding_stays_within_its_rounding_of_the_full_forward(sizes, either):
    decoder, x = build(sizes, compute_dtype="bfloat16"), tokens()
    cache = decoder.new_cache(2, 200)
    decoded = torch.cat(
        [decoder(part, cache=cache) for part in x.split([150] + [1] * 50, 1)], 1
    ).float()
    full = decoder(x).float()
    assert (decoded - full).norm() <= 1.5e-2 * full.norm()


@torch.no_grad()
def test_decoding_follows_positions_of_every_row_and_then_the_default_ones(either):
    decoder, x = build(NSA), tokens()
    rows = torch.stack((torch.arange(200) + 1000, torch.arange(200) * 2 + 7))
    for positions, later in ((rows, rows), (torch.arange(200).expand(2, -1), None)):
        cache = decoder.new_cache(2, 200)
        pieces = [decoder(x[:, :150], positions=positions[:, :150], cache=cache)]
        pieces += [
            decoder(
                x[:, t : t + 1],
                positions=None if later is None else later[:, t : t + 1],
                cache=cache,
            )
            for t in range(150, 200)
        ]
        full = decoder(x, positions=positions)
        assert (torch.cat(pieces, 1) - full).abs().max() <= 1e-5 * full.abs().max()


@torch.no_grad()
def test_a_second_part_of_several_chunks_of_queries_equals_the_full_forward(either, monkeypatch):
    monkeypatch.setattr(model, "CHUNK_LOGITS", 1)  # chunks of 16 queries
    decoder, x = build(NSA), tokens()
    cache = decoder.new_cache(2, 200)
    pieces = [decoder(part, cache=cache) for part in x.split([75, 125], 1)]
    full = decoder(x)
    assert (torch.cat(pieces, 1) - full).abs().max() <= 1e-5 * full.abs().max()


@pytest.mark.parametrize("attention", [Standard(), NSA], ids=["standard", "nsa"])
@torch.no_grad()
def test_a_cache_that_is_too_small_names_what_it_needs_and_stays_as_it_was(attention, either):
    decoder, x = build(attention), tokens()
    cache = decoder.new_cache(2, 160)
    first = decoder(x[:, :150], cache=cache)
    with pytest.raises(
        ValueError, match="holds 160 positions and 161 are needed: build it with max_length >= 161"
    ):
        decoder(x[:, 150:161], cache=cache)
    for rows in (x[:1], torch.cat((x, x))):
        with pytest.raises(
            ValueError,
            match=f"holds 2 rows and {len(rows)} are given: build it with batch_size={len(rows)}",
        ):
            decoder(rows[:, 150:152], cache=cache)
    rest = decoder(x[:, 150:160], cache=cache)
    full = decoder(x[:, :160])
    assert (torch.cat((first, rest), 1) - full).abs().max() <= 1e-5 * full.abs().max()


def compute_sparse_by(core, decoder):
    for layer in decoder.layers:
        layer.attention.ops = dataclasses.replace(layer.attention.ops, sparse=core)


def test_the_engine_in_the_decoder_equals_the_plain_version():
    decoder, x = build(NSA), tokens()
    ids = (torch.arange(200) >= 90).expand(2, -1)
    results = []
    for core in (nsa.nsa_attention, model.plain_nsa_attention):
        compute_sparse_by(core, decoder)
        logits = decoder(x, doc_ids=ids)
        results.append([logits, *torch.autograd.grad(logits.square().sum(), decoder.parameters())])
    for got, want in zip(*results):
        assert (got - want).abs().max() <= 3e-5 * want.abs().max()


def test_the_trainer_takes_the_engine_and_a_decoder_alone_the_plain_version():
    config = build(NSA, kernels="torch").config
    for decoder, core, cache in (
        (kernels.decoder(config), nsa.nsa_attention, nsa.NSAState),
        (Decoder(config), model.plain_nsa_attention, model.SparseCache),
    ):
        assert decoder.layers[0].attention.ops.sparse is core
        assert type(decoder.new_cache(1, 8).layers[0]) is cache


def test_auto_takes_the_triton_twin_on_cuda_and_the_engine_on_a_cpu(monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(
        kernels, "nsa_attention", lambda _, fused=False: "triton" if fused else "engine"
    )
    core = kernels.sparse_core(build(NSA).config)
    assert core(torch.empty(0)) == "engine"
    with on_target():
        assert core(torch.empty(0, device="cuda")) == "triton"


def test_auto_without_triton_takes_the_engine_and_warns_on_cuda(monkeypatch):
    monkeypatch.setitem(sys.modules, "longhaul.sparse.triton", None)
    config = build(NSA).config
    assert kernels.sparse_core(config) is nsa.nsa_attention
    kind = attention_kind(config)
    assert kind.warning(config, "cpu") is None
    assert re.search("slowly.*pip install triton", kind.warning(config, "cuda"))
    with pytest.raises(ValueError, match="pip install triton, or choose kernels='auto' or 'torch'"):
        kind.check(dataclasses.replace(config, kernels="triton"))


class Card:
    """What torch tells about a card."""

    def __init__(self, capability, shared):
        self.major, self.minor = capability
        self.shared_memory_per_block_optin = shared


@pytest.mark.parametrize(
    "capability, shared, words",
    [
        ((7, 5), 65_536, "capability >= 8.0.*--kernels torch"),
        ((8, 0), 65_536, "need 90,112 bytes of shared memory, and cuda has 65,536: .*torch"),
        ((8, 6), 101_376, None),
    ],
)
def test_a_card_that_cannot_run_the_kernels_is_told_before_the_first_step(
    monkeypatch, capability, shared, words
):
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Card(capability, shared))
    config = ModelConfig.preset("4B", attention=NSAConfig(), compute_dtype="bfloat16")
    warning = attention_kind(config).warning(config, "cuda")
    if words is None:
        assert warning is None
    else:
        assert re.search(words, warning)
        assert "\n" not in warning
        asked = dataclasses.replace(config, kernels="triton")
        with pytest.raises(ValueError, match=words):
            attention_kind(config).check(asked, "cuda")


def test_training_starts_from_open_gates_and_mean_pooling():
    fresh = kernels.decoder(build(NSA).config)
    for layer in fresh.layers:
        sparse = layer.attention.sparse
        assert (
            not sparse.gate.bias.any()
            and not sparse.compressor.k_w2.any()
            and not sparse.compressor.v_w2.any()
        )
        assert sparse.compressor.norm_weight.eq(1).all() and sparse.compressor.k_w1.std() > 0.01


def test_a_dtype_that_the_branches_cannot_run_is_refused_when_the_model_is_built():
    with pytest.raises(ValueError, match="float32, bfloat16 or float16"):
        build(NSA, compute_dtype="float64")


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # of Triton's interpreter
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for CPUs")
def test_the_triton_twin_in_the_decoder_equals_the_engine_and_says_where_it_runs(monkeypatch):
    tiles = pytest.importorskip("longhaul.sparse.triton.tiles", reason="triton is not installed")
    sizes = NSAConfig(cmp_block=4, cmp_stride=2, sel_block=8, sel_count=4, window=8)
    x = torch.arange(44)[None]

    def run(kernels):
        shape = dict(vocab_size=50, num_layers=1, hidden_size=32, ffn_size=32)
        decoder = build(sizes, **shape, kernels=kernels, loss="standard")
        loss = decoder(x[:, :-1], x[:, 1:])
        loss.backward()
        return loss.item(), sum(p.grad.square().sum() for p in decoder.parameters()).item()

    assert run("triton") == pytest.approx(run("torch"), rel=1e-5)
    monkeypatch.setattr(tiles, "INTERPRETED", False)
    with pytest.raises(ValueError, match="were given torch.float32 on cpu;.*TRITON_INTERPRET=1"):
        run("triton")
