"""How far back heads look, against dense float64 probabilities [T, T]."""

import functools
import math

import pytest
import torch

from lab.analysis import distance
from lab.analysis.activations import NotMeasurable, run
from lab.analysis.distance import LayerDistances, Profile, bucket_name, bucket_of, measured
from longhaul import kernels
from model import Decoder, ModelConfig, NSAConfig

V, HEADS = 97, 8
LAYERS = (0, 1)
CLOSE = dict(rel=1e-5, abs=1e-6)
LENGTHS = [1, 70, 29]  # of the documents of a packed row


@functools.cache
def decoder(dtype: str = "float32") -> Decoder:
    """Large weights, so that heads differ and look at single keys."""
    sizes = dict(vocab_size=V, hidden_size=32, num_layers=2, ffn_size=48, init_std=0.5)
    return kernels.decoder(ModelConfig.preset("tiny", compute_dtype=dtype, **sizes))


def rows(tokens: int, count: int = 2) -> torch.Tensor:
    return torch.randint(V, (count, tokens), generator=torch.Generator().manual_seed(0))


def documents(tokens: int) -> torch.Tensor:
    bounds = torch.tensor(LENGTHS).cumsum(0)
    return torch.bucketize(torch.arange(tokens), bounds, right=True).expand(2, tokens)


def profiles(model: Decoder, tokens_BT: torch.Tensor, every: int = 1, **how) -> dict[int, Profile]:
    totals = {layer: LayerDistances(model.config, every=every) for layer in LAYERS}
    with measured(model, totals):
        run(model, tokens_BT, max(LAYERS), **how)
    return {layer: of_layer.result() for layer, of_layer in totals.items()}


# ---- the reference


@torch.no_grad()
def probabilities(model: Decoder, tokens_T: torch.Tensor) -> dict[int, torch.Tensor]:
    """{layer: [H, T, T]} of one document by itself, in float64."""
    found = {}

    def keep(layer: int, attention, args) -> None:
        x, rope, *_ = args
        q, k, _ = attention.inputs(x, rope, attention.project(x, rope))
        q_HTK = q[0].double().transpose(0, 1)
        k_HTK = k[0].double().transpose(0, 1).repeat_interleave(HEADS // k.shape[2], 0)
        logits = q_HTK @ k_HTK.mT / math.sqrt(q.shape[-1])
        later = torch.ones_like(logits, dtype=torch.bool).triu(1)
        found[layer] = logits.masked_fill(later, -torch.inf).softmax(-1)

    handles = [
        model.layers[layer].attention.register_forward_pre_hook(functools.partial(keep, layer))
        for layer in LAYERS
    ]
    model(tokens_T[None])
    for handle in handles:
        handle.remove()
    return found


def check(found: dict[int, Profile], texts, model: Decoder, queries=slice(None)) -> None:
    """The profiles are the means over all documents."""
    of_texts = [probabilities(model, text) for text in texts]
    for layer, profile in found.items():
        shares, far = [], []
        for of_layers in of_texts:
            p_HTT = of_layers[layer]
            t = torch.arange(p_HTT.shape[1])
            back = (t[:, None] - t).clamp(min=0)
            bucket = torch.where(back > 0, back.clamp(min=1).double().log2().floor() + 1, 0)
            kept = [p_HTT.masked_fill(bucket != b, 0).sum(2) for b in range(len(profile.buckets))]
            shares.append(torch.stack(kept, 2)[:, queries])
            far.append((p_HTT * back).sum(2)[:, queries])

        expected_HTB = torch.cat(shares, 1)
        assert profile.queries == expected_HTB.shape[1]
        expected_HB = expected_HTB.mean(1)
        torch.testing.assert_close(expected_HB.sum(1), torch.ones(HEADS, dtype=torch.float64))
        for share, expected_B in zip(profile.share, expected_HB.tolist(), strict=True):
            assert share == pytest.approx(expected_B, **CLOSE)
        assert profile.distance == pytest.approx(torch.cat(far, 1).mean(1).tolist(), **CLOSE)


# ---- against the reference


@pytest.mark.parametrize(
    "tokens, dtype", [(1, "float32"), (64, "float32"), (199, "float32"), (100, "float16")]
)
def test_profiles_are_those_of_dense_probabilities(tokens, dtype):
    model = decoder(dtype)
    check(profiles(model, rows(tokens)), rows(tokens), model)


def test_small_tiles_of_keys(monkeypatch):
    monkeypatch.setattr(distance, "CPU_TILE", 5000)
    check(profiles(decoder(), rows(90)), rows(90), decoder())


@pytest.mark.parametrize("chunk, packed", [(0, True), (37, False), (37, True), (64, True)])
def test_documents_and_parts_over_the_cache_are_those_of_whole_texts(chunk, packed):
    doc_ids = documents(100) if packed else None
    found = profiles(decoder(), rows(100), doc_ids=doc_ids, chunk=chunk)
    texts = list(rows(100))
    if packed:
        texts = [text for row in texts for text in row.split(LENGTHS)]
    check(found, texts, decoder())


# ---- a sample of the queries


def test_one_chunk_of_queries_in_so_many_is_measured():
    (start,) = LayerDistances(decoder().config, every=3).starts(0, 150)
    found = profiles(decoder(), rows(150, 1), every=3)
    check(found, rows(150, 1), decoder(), slice(start, min(start + 64, 150)))


@pytest.mark.parametrize("every", [4, 24])
def test_rows_of_equal_length_are_measured_at_all_their_positions(every):
    totals = LayerDistances(decoder().config, every=every)
    starts = [start for _ in range(400) for start in totals.starts(0, 16 * 64)]
    assert len(starts) == pytest.approx(400 * 16 / every, abs=1)
    count = torch.tensor(starts).div(64).long().bincount(minlength=16)
    assert count.min() > 0
    assert sum(starts) / len(starts) == pytest.approx(15 * 64 / 2, rel=0.1)


# ---- names and refusals


@pytest.mark.parametrize(
    "distance_, name",
    [(0, "0"), (1, "1"), (2, "2 to 3"), (3, "2 to 3"), (1500, "1,024 to 2,047")],
)
def test_buckets_have_names(distance_, name):
    assert bucket_name(bucket_of(distance_)) == name


def test_attention_of_several_softmaxes_is_refused():
    config = ModelConfig.preset("tiny", attention=NSAConfig())
    with pytest.raises(NotMeasurable, match="nsa"):
        LayerDistances(config)
