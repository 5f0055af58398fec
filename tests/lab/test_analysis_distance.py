"""How far back heads look, against dense float64 probabilities [T, T]."""

import functools
import math

import pytest
import torch

from lab.analysis import distance
from lab.analysis.activations import run
from lab.analysis.distance import LayerDistances, bucket_name, bucket_of, measured
from longhaul import kernels
from model import Decoder, ModelConfig, NSAConfig, Standard
from tests.lab.test_analysis_activations import SPARSE

V, HEADS = 97, 8
LAYERS = (0, 1)
CLOSE = dict(rel=1e-5, abs=1e-6)


@functools.cache
def decoder(attention: str = "standard", dtype: str = "float32", **nsa) -> Decoder:
    """Large weights, so that heads differ and look at single keys."""
    sizes = dict(vocab_size=V, hidden_size=32, num_layers=2, ffn_size=48, init_std=0.5)
    kinds = {"standard": Standard(), "nsa": NSAConfig(**vars(SPARSE) | nsa)}
    config = ModelConfig.preset("tiny", attention=kinds[attention], compute_dtype=dtype, **sizes)
    return kernels.decoder(config)


def rows(tokens: int, count: int = 2) -> torch.Tensor:
    return torch.randint(V, (count, tokens), generator=torch.Generator().manual_seed(0))


def documents(tokens: int, lengths: tuple[int, ...] = (1, 70, 29)) -> torch.Tensor:
    bounds = torch.tensor(lengths).cumsum(0)
    return torch.bucketize(torch.arange(tokens), bounds, right=True).expand(2, tokens)


def profiles(model: Decoder, tokens_BT: torch.Tensor, every: int = 1, **how) -> dict:
    """{layer: {part: Profile}}"""
    totals = {layer: LayerDistances(model.config, every=every) for layer in LAYERS}
    with measured(model, totals):
        run(model, tokens_BT, max(LAYERS), **how)
    return {layer: of_layer.result() for layer, of_layer in totals.items()}


# --------------------------------------------------------------------------- the reference


def text_inputs(model: Decoder, tokens_T: torch.Tensor) -> dict:
    """{layer: what its attention reads of one document by itself, and its compressed keys}."""
    found = {}

    def keep(layer, attention, args):
        x, rope, layout, _ = args
        inputs = attention.inputs(x, rope, attention.project(x, rope))
        found[layer] = (attention, inputs, rope, layout)

    handles = [
        model.layers[layer].attention.register_forward_pre_hook(
            functools.partial(lambda layer, *args: keep(layer, *args), layer)
        )
        for layer in LAYERS
    ]
    with torch.no_grad():
        model(tokens_T[None])
    for handle in handles:
        handle.remove()
    return found


def probabilities(q_THK, k_SGK, seen: torch.Tensor) -> torch.Tensor:
    """[H, T, S] in float64; seen [T, S] or [H, T, S]; 0 for a query that sees no key."""
    q = q_THK.double().transpose(0, 1)
    k = k_SGK.double().transpose(0, 1).repeat_interleave(len(q) // k_SGK.shape[1], 0)
    logits = q @ k.mT / math.sqrt(q.shape[-1])
    return logits.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()


def dense_parts(attention, inputs, rope, layout) -> dict:
    """{part: (probabilities [H, T, S], distances [T, S], gates [T, H])} of one document."""
    T = inputs[0].shape[1]
    t = torch.arange(T)
    back = t[:, None] - t
    if len(inputs) == 3:
        q, k = inputs[0][0], inputs[1][0]
        return {"all": (probabilities(q, k, back >= 0), back, torch.ones(T, HEADS))}

    cfg = attention.sparse.cfg
    q, k, v, raw, v_raw, k_win, v_win, gates = inputs
    cos, sin = rope

    def rotate_as(x, centre):
        a, b = x.chunk(2, -1)
        c, s = cos[:, centre], sin[:, centre]
        return torch.cat([a * c - b * s, b * c + a * s], -1).to(x.dtype)

    k_cmp, v_cmp = attention.sparse.compressor(raw, v_raw, rotate_as, layout)
    parts = attention.ops.sparse(q, k, v, k_cmp, v_cmp, k_win, v_win, gates, cfg, return_parts=True)
    block = torch.arange(k_cmp.shape[1])
    ended = block * cfg.cmp_stride + cfg.cmp_block - 1 <= t[:, None]
    middle = t[:, None] - (block * cfg.cmp_stride + cfg.cmp_block // 2)

    own = t // cfg.sel_block
    chosen_TGS = (parts["block_idx"][0][..., None] == own).any(2)
    M = HEADS // k.shape[2]
    chosen_HTS = chosen_TGS.transpose(0, 1).repeat_interleave(M, 0) & (back >= 0)
    near = (back >= 0) & (back < cfg.window)

    found = {
        "compressed": (probabilities(q[0], k_cmp[0], ended), middle, gates[0, ..., 0]),
        "selected": (probabilities(q[0], k[0], chosen_HTS), back, gates[0, ..., 1]),
        "window": (probabilities(q[0], k_win[0], near), back, gates[0, ..., 2]),
    }
    values = dict(compressed=v_cmp, selected=v, window=v_win)
    outputs = dict(compressed="o_cmp", selected="o_slc", window="o_win")
    for name, (p, _, _) in found.items():  # these are the probabilities that attention uses
        v_HSK = values[name][0].double().transpose(0, 1).repeat_interleave(M, 0)
        o_THK = (p @ v_HSK).transpose(0, 1)
        close = 1e-4 if q.dtype == torch.float32 else 0.02
        expected = parts[outputs[name]][0].double()
        torch.testing.assert_close(o_THK, expected, atol=close, rtol=close, msg=name)
    return found


def reference(model: Decoder, texts: list[torch.Tensor], queries=slice(None)) -> dict:
    """{layer: {part: (share [H, buckets], distance [H], gate [H], queries)}} over all documents."""
    sums: dict = {layer: {} for layer in LAYERS}
    for text in texts:
        for layer, seen in text_inputs(model, text).items():
            for name, (p, back, gate) in dense_parts(*seen).items():
                p = p[:, queries]
                back = back[queries]
                gate = gate[queries]
                bucket = torch.where(back > 0, back.clamp(min=1).double().log2().floor() + 1, 0)
                shares = [p.masked_fill(bucket != b, 0).sum((1, 2)) for b in range(20)]
                far = (p * back).sum((1, 2))
                count = int((p.sum(-1)[0] > 0.5).sum())
                sums[layer].setdefault(name, []).append(
                    (torch.stack(shares, 1), far, gate.double().sum(0), count, len(gate))
                )
    return {
        layer: {name: averaged(found) for name, found in parts.items()}
        for layer, parts in sums.items()
    }


def averaged(found: list[tuple]) -> tuple:
    share, far, gate, count, tokens = (sum(column) for column in zip(*found, strict=True))
    return share / max(count, 1), far / max(count, 1), gate / tokens, count


def assert_same(found: dict, expected: dict) -> None:
    for layer, parts in expected.items():
        assert found[layer].keys() == {name for name, x in parts.items() if x[-1]}
        for name, profile in found[layer].items():
            share, far, gate, count = parts[name]
            assert profile.queries == count, name
            for head in range(HEADS):
                width = len(profile.buckets)
                assert profile.share[head] == pytest.approx(share[head, :width].tolist(), **CLOSE)
                assert sum(profile.share[head]) == pytest.approx(1, abs=1e-6)
            assert profile.distance == pytest.approx(far.tolist(), **CLOSE)
            assert profile.gate == pytest.approx(gate.tolist(), **CLOSE)


# --------------------------------------------------------------------------- against the reference


@pytest.mark.parametrize("tokens", [1, 64, 199])
@pytest.mark.parametrize("attention", ["standard", "nsa"])
def test_profiles_are_those_of_dense_probabilities(attention, tokens):
    model = decoder(attention)
    found = profiles(model, rows(tokens))
    assert_same(found, reference(model, list(rows(tokens))))


@pytest.mark.parametrize("attention, dtype", [("standard", "float16"), ("nsa", "bfloat16")])
def test_low_precision(attention, dtype):
    model = decoder(attention, dtype)
    found = profiles(model, rows(100))
    assert_same(found, reference(model, list(rows(100))))


@pytest.mark.parametrize("attention", ["standard", "nsa"])
def test_documents_of_packed_rows_are_apart(attention):
    model = decoder(attention)
    found = profiles(model, rows(100), doc_ids=documents(100))
    texts = [text for row in rows(100) for text in row.split([1, 70, 29])]
    assert_same(found, reference(model, texts))


@pytest.mark.parametrize("nsa", [dict(kv="separate"), dict(cmp_kind="mean", sel_init=0, window=3)])
def test_other_settings_of_sparse_attention(nsa):
    model = decoder("nsa", **nsa)
    assert_same(profiles(model, rows(131)), reference(model, list(rows(131))))


@pytest.mark.parametrize("attention, tile", [("standard", 5000), ("nsa", 1), ("nsa", 5000)])
def test_small_tiles_of_keys(attention, tile, monkeypatch):
    monkeypatch.setattr(distance, "CPU_TILE", tile)
    model = decoder(attention)
    assert_same(profiles(model, rows(90)), reference(model, list(rows(90))))


@pytest.mark.parametrize("chunk, packed", [(1, True), (37, False), (37, True), (64, True)])
def test_parts_over_the_cache_are_the_whole_row(chunk, packed):
    model = decoder()
    doc_ids = documents(100) if packed else None
    found = profiles(model, rows(100), doc_ids=doc_ids, chunk=chunk)
    texts = list(rows(100))
    if packed:
        texts = [text for row in texts for text in row.split([1, 70, 29])]
    assert_same(found, reference(model, texts))


def test_one_chunk_of_queries_in_so_many_is_measured():
    model = decoder()
    totals = LayerDistances(model.config, every=3)
    (start,) = totals.starts(0, 150)
    found = profiles(model, rows(150, 1), every=3)
    chosen = torch.arange(start, min(start + 64, 150))
    assert_same(found, reference(model, list(rows(150, 1)), chosen))


@pytest.mark.parametrize("every", [4, 24])
def test_rows_of_equal_length_are_measured_at_all_their_positions(every):
    totals = LayerDistances(decoder().config, every=every)
    starts = [start for _ in range(400) for start in totals.starts(0, 16 * 64)]
    assert len(starts) == pytest.approx(400 * 16 / every, abs=1)
    count = torch.tensor(starts).div(64).long().bincount(minlength=16)
    assert count.min() > 0
    assert sum(starts) / len(starts) == pytest.approx(15 * 64 / 2, rel=0.1)


# --------------------------------------------------------------------------- known figures


@pytest.mark.parametrize(
    "distance_, name",
    [(0, "0"), (1, "1"), (2, "2 to 3"), (3, "2 to 3"), (1500, "1,024 to 2,047")],
)
def test_buckets_have_names(distance_, name):
    assert bucket_name(bucket_of(distance_)) == name


# --------------------------------------------------------------------------- totals


def totals_of(tokens_BT: torch.Tensor, model: Decoder, start: dict | None = None) -> LayerDistances:
    totals = LayerDistances(model.config)
    if start is not None:
        totals.load_state_dict(start)
    with measured(model, {1: totals}):
        run(model, tokens_BT, max(LAYERS))
    return totals


@pytest.mark.parametrize("attention", ["standard", "nsa"])
def test_merged_and_continued_totals_are_those_of_all_rows(attention, tmp_path):
    model = decoder(attention)
    both = totals_of(rows(80), model).result()

    first = totals_of(rows(80)[:1], model)
    torch.save(first.state_dict(), tmp_path / "totals.pt")
    saved = torch.load(tmp_path / "totals.pt", weights_only=True)
    continued = totals_of(rows(80)[1:], model, saved)
    assert continued.result() == both

    first.merge(totals_of(rows(80)[1:], model))
    assert_same({1: first.result()}, {1: reference(model, list(rows(80)))[1]})
    assert all(profile.record()["share"] == profile.share for profile in both.values())


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(ValueError, match="every=0 chunks of queries are measured: give 1 or more"):
        LayerDistances(decoder().config, every=0)
    with pytest.raises(ValueError, match="of compressed, selected, window and of all: merge those"):
        LayerDistances(decoder().config).merge(LayerDistances(decoder("nsa").config))
    with (
        pytest.raises(ValueError, match="layer 2 is out of range"),
        measured(decoder(), {2: LayerDistances(decoder().config)}),
    ):
        pass
