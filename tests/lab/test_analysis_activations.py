"""Activations while a model runs: read at every site, whole rows and parts, and replaced."""

import copy
import functools

import pytest
import torch

from lab.analysis.activations import SITES, replaced, stream
from longhaul import kernels
from longhaul.parallel import checkpointing, tiling
from model import (
    Decoder,
    ModelConfig,
    NSAConfig,
    Standard,
    document_boundaries,
    document_positions,
)

T, V = 61, 97
D, L = 32, 3
SPARSE = NSAConfig(cmp_block=8, cmp_stride=4, sel_block=8, sel_count=4, window=16)
KINDS = {"standard": Standard(), "nsa": SPARSE}


@functools.cache
def decoder(attention: str = "standard", dtype: str = "float32") -> Decoder:
    sizes = dict(vocab_size=V, hidden_size=D, num_layers=L, ffn_size=48, init_std=0.1)
    config = ModelConfig.preset("tiny", attention=KINDS[attention], compute_dtype=dtype, **sizes)
    return kernels.decoder(config)


def rows(count: int = 2) -> torch.Tensor:
    return torch.randint(V, (count, T), generator=torch.Generator().manual_seed(0))


def documents(count: int = 2) -> torch.Tensor:
    """Each row holds documents of 1, 36 and 24 tokens."""
    bounds = torch.tensor([1, 37])
    return torch.bucketize(torch.arange(T), bounds, right=True).expand(count, T)


def collected(model: Decoder, tokens: torch.Tensor, **how) -> dict:
    """{(layer, site): x [B, T, D]} of all layers and sites."""
    parts: dict = {}

    def consume(layer: int, site: str, x: torch.Tensor) -> None:
        assert not x.requires_grad
        parts.setdefault((layer, site), []).append(x.clone())

    stream(model, tokens, range(L), SITES, consume, **how)
    whole = how.get("chunk", 0) == 0
    return {
        key: xs[0] if whole else torch.cat(xs, 1).view(*tokens.shape, D)
        for key, xs in parts.items()
    }


@torch.no_grad()
def by_hand(model: Decoder, tokens: torch.Tensor, doc_ids: torch.Tensor | None) -> dict:
    """The same, by the decoder's parts called one after another."""
    bounds = None if doc_ids is None else document_boundaries(doc_ids)
    rope = model.rotary(T, "cpu")
    if bounds is not None:
        rope = model.rotary.at(document_positions(bounds, tokens.shape))
    places = model.layers[0].attention.rows(bounds, tokens.shape, "cpu")
    x = model.embed(tokens).to(model.config.dtype)
    found = {}
    for index, block in enumerate(model.layers):
        found[index, "attention"] = block.attention(block.attention_norm(x), rope, places)
        x = x + found[index, "attention"]
        found[index, "mlp"] = block.mlp(block.mlp_norm(x))
        x = x + found[index, "mlp"]
        found[index, "residual"] = x
    return found


@pytest.mark.parametrize(
    "attention, packed, dtype",
    [
        ("standard", False, "float32"),
        ("standard", True, "bfloat16"),
        ("standard", True, "float16"),
        ("nsa", False, "bfloat16"),
        ("nsa", True, "float32"),
    ],
)
def test_every_site_is_what_the_layers_compute(attention, packed, dtype):
    model = decoder(attention, dtype)
    doc_ids = documents() if packed else None
    found = collected(model, rows(), doc_ids=doc_ids)
    expected = by_hand(model, rows(), doc_ids)
    assert found.keys() == expected.keys()
    for key, x in found.items():
        assert x.dtype == model.config.dtype and torch.equal(x, expected[key]), key


@pytest.mark.parametrize("chunk, packed", [(1, True), (7, False), (7, True), (61, True)])
def test_parts_over_the_cache_are_the_whole_row(chunk, packed):
    doc_ids = documents() if packed else None
    whole = collected(decoder(), rows(), doc_ids=doc_ids)
    parts = collected(decoder(), rows(), doc_ids=doc_ids, chunk=chunk)
    assert parts.keys() == whole.keys()
    for key, x in parts.items():
        torch.testing.assert_close(x, whole[key], atol=2e-6, rtol=2e-5, msg=str(key))


def test_only_what_is_asked_for_is_read_in_the_order_in_which_it_is_made():
    order = []
    stream(decoder(), rows(), [2, 0], ["residual", "mlp"], lambda *at: order.append(at[:2]))
    assert order == [(0, "mlp"), (0, "residual"), (2, "mlp"), (2, "residual")]


def test_levers_that_run_a_layer_in_parts_change_nothing():
    model = copy.deepcopy(decoder())
    tiling.tile_mlp(model, 3)
    tiling.group_heads(model, 2)
    checkpointing.checkpoint_layers(model)
    expected = collected(decoder(), rows())
    found = collected(model, rows())
    for key, x in found.items():
        torch.testing.assert_close(x, expected[key], atol=2e-6, rtol=2e-5)

    shapes = []

    def doubled(x: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(x.shape))
        return x * 2

    with replaced(model, 1, "mlp", doubled):
        collected(model, rows())
    assert shapes == [(2, T, D)]


# ---- replaced


@pytest.mark.parametrize("attention", ["standard", "nsa"])
@pytest.mark.parametrize("site", SITES)
def test_a_replaced_activation_is_what_the_rest_of_the_model_sees(attention, site):
    model = decoder(attention)
    plain = collected(model, rows())
    with replaced(model, 1, site, lambda x: x * 0.5):
        changed = collected(model, rows())

    torch.testing.assert_close(changed[1, site], plain[1, site] * 0.5)
    for key in [(0, "residual"), (0, "mlp")]:
        assert torch.equal(changed[key], plain[key])
    assert not torch.allclose(changed[2, "residual"], plain[2, "residual"])

    expected = plain[0, "residual"] + plain[1, "attention"] * 0.5
    if site == "attention":
        found = changed[1, "residual"] - changed[1, "mlp"]
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    if site == "residual":
        assert torch.equal(changed[1, "residual"], plain[1, "residual"] * 0.5)


def test_nothing_stays_in_the_model_even_after_an_error():
    model = copy.deepcopy(decoder())
    before = model(rows())

    def fails(*_):
        raise KeyError("stop")

    with pytest.raises(KeyError):
        stream(model, rows(), [1], ["mlp"], fails)
    with pytest.raises(KeyError), replaced(model, 1, "mlp", fails):
        model(rows())
    assert torch.equal(model(rows()), before)
    assert not any(module._forward_hooks for module in model.modules())
