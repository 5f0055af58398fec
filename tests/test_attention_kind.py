"""A kind of attention of a user's: docs/ARCHITECTURE.md adds block-mean attention, and this file
runs the document's own code.
"""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

import train
from longhaul import cli, kernels
from longhaul.checkpoint.load import load_model, newest, verified
from longhaul.config import TrainConfig
from longhaul.flops import keys_read, train_flops
from longhaul.kinds import KINDS, Kind
from longhaul.planner.verify_kind import verify_kind
from model import Attention, ModelConfig, NSAConfig
from tests import kit, oracle, test_selectors
from tests.ranks import run_ranks
from tests.test_selectors import (
    SHAPE,
    assert_shares_are_those_of_one_process,
    build,
    relative,
    tokens,
)

DOCUMENT = Path(__file__).parent.parent / "docs" / "ARCHITECTURE.md"
TINY = {"model_size": "tiny", "attention_type": "block_mean", "context_length": 2048}


def example() -> str:
    """The block of Python code that adds an attention."""
    _, section = DOCUMENT.read_text(encoding="utf-8").split("## Adding an attention")
    return re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]


def add_block_mean() -> type:
    """Run the example and return the class of its settings."""
    names: dict = {"__name__": "block_mean"}
    exec(compile(example(), str(DOCUMENT), "exec"), names)
    return names["BlockMean"]


@pytest.fixture(autouse=True)
def kind():
    """The example's settings, whose row is in the table during a test only."""
    before = dict(KINDS)
    yield add_block_mean()(r=16, top=2)
    KINDS.clear()
    KINDS.update(before)


def block_mean_attention(q_THK, k_TGK, v_TGK, r: int, top: int) -> torch.Tensor:
    """softmax(q k^T / sqrt(K)) v over the query's own block up to itself and the `top` past blocks
    with the largest q . mean(k), one query of one head after the other.
    """
    T, H, K = q_THK.shape
    k_THK, v_THK = (x.repeat_interleave(H // x.shape[1], dim=1) for x in (k_TGK, v_TGK))
    rows = []
    for t in range(T):
        start = t - t % r
        means_NHK = k_THK[:start].reshape(-1, r, H, K).mean(1)
        heads = []
        for h in range(H):
            ranked = (means_NHK[:, h] @ q_THK[t, h]).argsort(descending=True)
            past = [torch.arange(n * r, (n + 1) * r) for n in ranked[:top].tolist()]
            keys = torch.cat([*past, torch.arange(start, t + 1)])
            weights = (k_THK[keys, h] @ q_THK[t, h] / K**0.5).softmax(0)
            heads.append(weights @ v_THK[keys, h])
        rows.append(torch.stack(heads))
    return torch.stack(rows)


def test_the_example_is_one_layer_its_settings_and_one_row(kind):
    assert len([line for line in example().splitlines() if line]) <= 65
    assert example().count("class ") == 3 and example().count("KINDS[") == 1
    assert issubclass(type(build(kind).layers[0].attention), Attention)
    assert issubclass(KINDS[kind.name], Kind)


def test_it_equals_a_dense_float64_reference_forward_and_backward_with_packed_documents(kind):
    decoder, x = build(kind), tokens()
    lengths = [[130, 1, 69], [12, 188]]
    ids = [[i for i, length in enumerate(row) for _ in range(length)] for row in lengths]
    logits = decoder(x, doc_ids=torch.tensor(ids))

    weights = {
        name: parameter.detach().double().requires_grad_()
        for name, parameter in decoder.named_parameters()
    }

    def attention(q, k, v):
        return block_mean_attention(q, k, v, kind.r, kind.top)

    truth = [
        oracle.decoder_logits(weights, decoder.config, document, attention)
        for row, sizes in zip(x, lengths, strict=True)
        for document in row.split(sizes)
    ]
    truth = torch.cat(truth).view(logits.shape)
    assert relative(logits, truth) <= 1e-5

    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    grads = torch.autograd.grad((logits * weight).sum(), decoder.parameters())
    wanted = torch.autograd.grad((truth * weight.double()).sum(), list(weights.values()))
    for name, grad, want in zip(weights, grads, wanted, strict=True):
        assert relative(grad, want) <= 2e-5, name


def test_flops_and_parameters_follow_the_row_and_the_layer(kind):
    config = build(kind).config
    met = keys_read(config, torch.arange(150))
    wanted = [min(t // 16, 2) * 16 + t % 16 + 1 + t // 16 / 6 for t in range(150)]
    assert met.tolist() == pytest.approx(wanted)
    assert config.num_params() == sum(p.numel() for p in build(kind).parameters())

    standard = ModelConfig.preset("tiny", **SHAPE)
    everything = dataclasses.replace(config, attention=dataclasses.replace(kind, r=150))
    assert train_flops(everything, 150, 0.0) == train_flops(standard, 150, 0.0)


def test_the_command_line_takes_it_and_context_parallelism_says_what_it_cannot_do():
    cfg = cli.parse(TrainConfig, ["--model_size", "tiny", "--attention_type", "block_mean"], "")
    assert cfg.model().attention.name == "block_mean"
    with pytest.raises(ValueError, match="gather_kv cannot serve block_mean attention, which is"):
        TrainConfig(**TINY, context_parallel_size=2, context_parallel_mode="gather_kv")


def shared_loss(world, x: torch.Tensor) -> list[torch.Tensor]:
    return test_selectors.shared_loss(world, add_block_mean()(r=16, top=2), x)


def test_two_ranks_that_share_rows_give_the_loss_and_gradient_of_one(kind):
    x = tokens(2, 201)
    assert_shares_are_those_of_one_process(kind, x, run_ranks(shared_loss, 2, x))


def test_a_run_warns_of_a_kind_that_is_not_verified_and_records_its_settings(tmp_path, capsys):
    data = kit.dataset(tmp_path / "data")
    for name in ("block_mean", "standard"):
        flags = ["--attention_type", name, "--max_steps", "1"]
        train.main(kit.arguments(data, tmp_path / name, *flags))
        said = [line for line in capsys.readouterr().out.splitlines() if "verify_kind" in line]
        assert len(said) == (name == "block_mean") and all(name in line for line in said)

    loaded = load_model(verified(newest(tmp_path / "block_mean")))
    assert loaded.config.attention == KINDS["block_mean"].config()


# ---- verify_kind


def passed(settings) -> dict[str, bool]:
    """Which checks hold, by a word of their name."""
    words = ("cache", "future", "packed", "checkpointing", "planned")
    checks = verify_kind(settings)
    assert len(checks) == len(words)
    return {word: holds for word, (name, holds, _) in zip(words, checks) if word in name}


ALL = dict.fromkeys(("cache", "future", "packed", "checkpointing", "planned"), True)


@pytest.mark.slow
def test_the_example_passes_every_check_of_verify_kind(kind):
    assert passed(kind) == ALL


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [NSAConfig(8, 4, 32, 4, window=32), test_selectors.SELECTORS["pooled"]]
)
def test_kinds_of_longhaul_pass_every_check(settings):
    assert passed(settings) == ALL


def broken(kind, **methods):
    """Settings of a kind like the example whose layer has other methods."""
    layer = type(build(kind).layers[0].attention)
    wrong = type("Wrong", (layer,), methods)

    @dataclasses.dataclass(frozen=True)
    class Broken(type(kind)):
        name = "broken"

        def layer(self, config, ops):
            return wrong(config, ops)

    KINDS["broken"] = type("BrokenKind", (KINDS[kind.name],), {"config": Broken})
    return Broken(kind.r, kind.top)


def test_a_kind_that_reads_the_future_fails_that_check(kind):
    def attend_document(layer, q, k, v):
        return kernels.sdpa(q, k, v, causal=False)

    wrong = broken(kind, attend_document=attend_document)
    # tokens that are decoded one by one cannot see what the full forward sees
    assert passed(wrong) == ALL | dict(future=False, cache=False)


@pytest.mark.slow
def test_a_kind_whose_documents_see_each_other_fails_that_check(kind):
    def packed(layer, inputs, rope, documents):
        return layer.attend_document(*inputs)

    assert passed(broken(kind, packed=packed)) == ALL | dict(packed=False)
