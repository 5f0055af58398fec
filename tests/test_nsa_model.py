"""Native Sparse Attention inside the decoder: decoding, packing, levers, initial values, weights of
other models, no leak.
"""

import dataclasses
import functools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import model
from base import machine
from longhaul import kernels, qwen3, step
from longhaul.config import TrainConfig
from longhaul.generate import generate
from longhaul.kinds import attention_kind
from longhaul.parallel import apply
from longhaul.sparse import nsa
from model import Decoder, ModelConfig, NSAConfig, Standard
from tests.tiers import few_fast, slow

ROOT = Path(__file__).parent.parent
SIZES = dict(
    cmp_block=8, cmp_stride=4, sel_block=16, sel_count=5, window=24
)  # sparse from 80 tokens on
KINDS = pytest.mark.parametrize(
    "kind",
    few_fast(
        [{}, dict(kv="separate"), dict(cmp_kind="mean"), dict(kv="separate", cmp_kind="mean")], 3
    ),
    ids=str,
)


@pytest.fixture(params=["engine", "plain"])
def either(request, monkeypatch):
    """Runs a test twice: with longhaul/sparse/nsa/, and with the plain functions of model.py."""
    if request.param == "plain":
        monkeypatch.setattr(kernels, "choose", lambda config: model.Ops())


def build(kind=None, **changes) -> Decoder:
    """A small decoder whose gates and compression have left their initial values."""
    config = ModelConfig.preset(
        "tiny",
        **{
            **dict(
                vocab_size=97,
                num_layers=2,
                hidden_size=64,
                num_heads=4,
                head_dim=16,
                ffn_size=96,
                attention=NSAConfig(**SIZES, **kind or {}),
            ),
            **changes,
        },
    )
    decoder, generator = kernels.decoder(config), torch.Generator().manual_seed(1)
    for name, parameter in decoder.named_parameters():
        if ".sparse." in name:
            parameter.data.normal_(0, 0.3, generator=generator)
    return decoder


def tokens(rows=2, length=200, seed=0):
    return torch.randint(97, (rows, length), generator=torch.Generator().manual_seed(seed))


@KINDS
@torch.no_grad()
def test_a_prompt_in_any_parts_and_then_token_by_token_gives_the_full_forward(kind, either):
    decoder, x = build(kind), tokens()
    full = decoder(x)
    for parts in ([150] + [1] * 50, [1] * 200, [100, 60, 1, 39], [7, 193]):
        cache = decoder.new_cache(2, 210)
        pieces = [decoder(part, cache=cache) for part in x.split(parts, 1)]
        assert cache.length == 200
        assert (torch.cat(pieces, 1) - full).abs().max() <= 1e-5 * full.abs().max(), parts


@KINDS
@torch.no_grad()
def test_bf16_decoding_stays_within_its_rounding_of_the_full_forward(kind, either):
    decoder, x = build(kind, compute_dtype="bfloat16"), tokens()
    cache = decoder.new_cache(2, 200)
    decoded = torch.cat(
        [decoder(part, cache=cache) for part in x.split([150] + [1] * 50, 1)], 1
    ).float()
    full = decoder(x).float()
    assert (decoded - full).norm() <= 1.5e-2 * full.norm()


@torch.no_grad()
def test_decoding_follows_positions_of_every_row_and_then_the_default_ones(either):
    decoder, x = build(), tokens()
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


@pytest.mark.parametrize("attention", [Standard(), NSAConfig(**SIZES)], ids=["standard", "nsa"])
@torch.no_grad()
def test_a_cache_that_is_too_small_names_what_it_needs_and_stays_as_it_was(attention, either):
    decoder, x = build(attention=attention), tokens()
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


@KINDS
def test_building_a_model_draws_no_random_number(kind):
    torch.manual_seed(0)
    build(kind)
    drawn = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(1))


@KINDS
def test_packed_documents_equal_separate_ones_forward_and_backward(kind, either):
    decoder = build(kind)
    x = tokens()
    lengths = [[130, 1, 69], [12, 188]]
    ids = torch.tensor([[i for i, n in enumerate(row) for _ in range(n)] for row in lengths])
    weight = torch.randn(2, 200, 97, generator=torch.Generator().manual_seed(2))
    packed = decoder(x, doc_ids=ids)
    grads = torch.autograd.grad((packed * weight).sum(), decoder.parameters())
    alone = [
        torch.cat([decoder(part) for part in row[None].split(sizes, 1)], 1)
        for row, sizes in zip(x, lengths)
    ]
    assert (packed - torch.cat(alone)).abs().max() <= 1e-5 * packed.abs().max()
    for (name, _), got, want in zip(
        decoder.named_parameters(),
        grads,
        torch.autograd.grad((torch.cat(alone) * weight).sum(), decoder.parameters()),
    ):
        assert want.abs().max() > 0 and (got - want).abs().max() <= 2e-5 * want.abs().max(), name


def compute_sparse_by(core, decoder):
    for layer in decoder.layers:
        layer.attention.ops = dataclasses.replace(layer.attention.ops, sparse=core)


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
def test_the_engine_in_the_decoder_equals_the_plain_version(packed):
    decoder, x = build(), tokens()
    ids = (torch.arange(200) >= 90).expand(2, -1) if packed else None
    results = []
    for core in (nsa.nsa_attention, model.plain_nsa_attention):
        compute_sparse_by(core, decoder)
        logits = decoder(x, doc_ids=ids)
        results.append([logits, *torch.autograd.grad(logits.square().sum(), decoder.parameters())])
    for got, want in zip(*results):
        assert (got - want).abs().max() <= 3e-5 * want.abs().max()


def test_the_trainer_takes_the_engine_and_a_decoder_alone_the_plain_version():
    config = build(kernels="torch").config
    for decoder, core, cache in (
        (kernels.decoder(config), nsa.nsa_attention, nsa.NSAState),
        (Decoder(config), model.plain_nsa_attention, model.SparseCache),
    ):
        assert decoder.layers[0].attention.ops.sparse is core
        assert type(decoder.new_cache(1, 8).layers[0]) is cache


class OnCuda(machine.Platform):
    """A platform that computes every tensor on CUDA."""

    def device(self, x):
        return torch.device("cuda")


def test_auto_takes_the_triton_twin_on_cuda_and_the_engine_on_a_cpu(monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(
        kernels, "nsa_attention", lambda _, fused=False: "triton" if fused else "engine"
    )
    core = kernels.sparse_core(build().config)
    assert core(torch.empty(0)) == "engine"
    with machine.running_on(OnCuda()):
        assert core(torch.empty(0)) == "triton"


def test_auto_without_triton_takes_the_engine_and_warns_on_cuda(monkeypatch):
    monkeypatch.setitem(sys.modules, "longhaul.sparse.triton", None)
    config = build().config
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
        ((8, 0), 166_912, None),
        ((9, 0), 232_448, None),
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


def test_a_later_token_changes_no_earlier_logit(either):
    decoder, x = build(), tokens(1)
    other = x.clone()
    other[:, 120:] = (other[:, 120:] + 1) % 97
    with torch.no_grad():
        assert torch.equal(decoder(x)[:, :120], decoder(other)[:, :120])


def test_training_starts_from_open_gates_and_mean_pooling():
    fresh = kernels.decoder(build().config)
    for layer in fresh.layers:
        sparse = layer.attention.sparse
        assert (
            not sparse.gate.bias.any()
            and not sparse.compressor.k_w2.any()
            and not sparse.compressor.v_w2.any()
        )
        assert sparse.compressor.norm_weight.eq(1).all() and sparse.compressor.k_w1.std() > 0.01


@pytest.mark.parametrize(
    "changes, packed",
    [
        (dict(gradient_checkpointing="full"), False),
        (dict(gradient_checkpointing="full", loss="chunked"), True),
        slow(dict(compile=True), True),
    ],
    ids=str,
)
def test_levers_change_no_gradient(changes, packed, either, monkeypatch):
    # without code for the CPU, which takes long and is tested by test_context.py
    compiling = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", compiling)
    cfg, x = TrainConfig(**{"compile": False, **changes}), tokens(2, 161)
    batch = dict(
        tokens_BT=x[:, :-1],
        labels_BT=x[:, 1:],
        doc_ids=(torch.arange(160) >= 90).expand(2, -1) if packed else None,
    )
    results = []
    for with_levers in (False, True):
        decoder = build(loss=cfg.loss)
        if with_levers:
            apply.apply(decoder, cfg, None)
        loss = decoder(**batch)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in decoder.parameters())])
    for got, want in zip(*results):
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def test_bf16_trains_close_to_fp32():
    x = tokens(2, 161)
    losses = [build(compute_dtype=dtype)(x[:, :-1], x[:, 1:]) for dtype in ("float32", "bfloat16")]
    assert abs(losses[0] - losses[1]) < 0.02 * losses[0] and losses[1].dtype == torch.float32


def test_sampling_over_the_cache_is_greedy_decoding_of_the_full_forward():
    decoder, prompt = build(), tokens(1, 120)[0].tolist()
    drawn, ids = list(generate(decoder, prompt, 12, temperature=0)), list(prompt)
    with torch.no_grad():
        for token in drawn:
            assert decoder(torch.tensor([ids]))[0, -1].argmax() == token
            ids.append(token)


def test_qwen3_weights_start_a_sparse_model_and_what_nsa_adds_starts_fresh(tmp_path):
    dense = kernels.decoder(dataclasses.replace(build().config, attention=Standard()))
    qwen3.to_hf(dense, tmp_path / "qwen3")
    sparse = qwen3.from_hf(tmp_path / "qwen3", attention=NSAConfig(**SIZES))
    theirs = dict(dense.named_parameters())
    for name, parameter in sparse.named_parameters():
        if ".sparse." in name:
            assert parameter.isfinite().all()
        else:
            assert torch.equal(parameter, theirs[name]), name
    with pytest.raises(ValueError, match="no counterpart in transformers"):
        qwen3.to_hf(sparse, tmp_path / "again")


def test_a_dtype_that_the_branches_cannot_run_is_refused_when_the_model_is_built():
    with pytest.raises(ValueError, match="float32, bfloat16 or float16"):
        build(compute_dtype="float64")


TRITON = """
import torch
from longhaul.kernels import decoder as build
from model import ModelConfig, NSAConfig
sizes = NSAConfig(cmp_block=4, cmp_stride=2, sel_block=8, sel_count=4, window=8)
shape = dict(vocab_size=50, num_layers=1, hidden_size=32, num_heads=4, head_dim=16, ffn_size=32)
config = ModelConfig.preset(
    "tiny", **shape, attention=sizes, kernels="{kernels}", loss="standard"
)
decoder, x = build(config), torch.arange(60)[None] % 50
loss = decoder(x[:, :-1], x[:, 1:])
loss.backward()
print(loss.item(), sum(p.grad.square().sum() for p in decoder.parameters()).item())
"""


def run_kernels(kernels, **environment):
    script = TRITON.format(kernels=kernels)
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


@pytest.mark.slow
def test_the_triton_twin_in_the_decoder_equals_the_engine_and_says_where_it_runs():
    pytest.importorskip(
        "triton", reason="triton is not installed: the twin in the decoder is not tested"
    )
    engine, twin = (run_kernels(kernels, TRITON_INTERPRET="1") for kernels in ("torch", "triton"))
    assert [float(x) for x in twin.stdout.split()] == pytest.approx(
        [float(x) for x in engine.stdout.split()], rel=1e-5
    ), twin.stderr
    refused = run_kernels("triton", TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES="").stderr
    assert (
        "ValueError: the Triton kernels of sparse attention were given torch.float32 on cpu;"
        in refused
        and "TRITON_INTERPRET=1" in refused
    )


def test_a_sparse_configuration_survives_the_run_record():
    cfg = TrainConfig(model_size="tiny", attention_type="nsa", blocks=("kv=separate", "window=128"))
    again = TrainConfig(
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in json.loads(json.dumps(dataclasses.asdict(cfg))).items()
        }
    )
    assert again.model() == cfg.model() and again.model().attention == NSAConfig(
        kv="separate", window=128
    )


# ---- no leak: the loss of random tokens stays above their entropy, unless a branch sees the label


def random_tokens_loss(core, steps=80) -> float:
    """Mean training loss of the last quarter, on fresh tokens drawn uniformly from 16."""
    cfg = TrainConfig(
        model_size="tiny",
        model_overrides=(
            "num_layers=1",
            "hidden_size=64",
            "num_heads=4",
            "head_dim=16",
            "ffn_size=96",
        ),
        vocab_size=16,
        context_length=128,
        attention_type="nsa",
        blocks=tuple(f"{k}={v}" for k, v in SIZES.items()),
        dtype="fp32",
        lr=1e-2,
        warmup_steps=5,
        max_steps=steps,
        schedule="constant",
    )
    state = step.build(cfg, cfg.model(), "cpu")
    compute_sparse_by(core, state.model)
    losses = []
    for index in range(steps):
        x = torch.randint(16, (4, 129), generator=torch.Generator().manual_seed(index))
        losses.append(
            float(step.train_step(state, [dict(tokens_BT=x[:, :-1], labels_BT=x[:, 1:])]).loss)
        )
    return sum(losses[-steps // 4 :]) / (steps // 4)


@pytest.mark.slow
def test_training_on_random_tokens_stays_above_their_entropy():
    assert random_tokens_loss(nsa.nsa_attention) > math.log(16) - 0.01


@pytest.mark.slow
def test_the_leak_guard_notices_a_window_that_sees_one_token_ahead():
    def leaky(q, k_slc, v_slc, k_cmp, v_cmp, k_win, v_win, *more):
        return nsa.nsa_attention(
            q, k_slc, v_slc, k_cmp, v_cmp, k_win.roll(-1, 1), v_win.roll(-1, 1), *more
        )

    assert random_tokens_loss(leaky) < math.log(16) - 0.2
