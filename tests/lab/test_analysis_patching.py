"""Activation patching: equal to a float64 forward written out, finds a planted copy head, gives 0
on one that is cut off, and refuses a model that tells nothing apart.

The planted model copies by hand-set weights: the head of layer 0 tells each position the token
before it; the head of layer 2 looks for the position whose previous token is its own, and says the
token there. Layer 1 has the same head, and nothing leaves it.
"""

import numpy as np
import pytest
import torch

from lab.analysis.activations import hooked
from lab.analysis.patching import (
    CannotCopy,
    Pairs,
    Patching,
    copy_pairs,
    span_name,
    spans,
)
from longhaul import kernels
from model import Decoder, ModelConfig, NSAConfig

V = 48  # tokens; a head matches them in pairs that rotary positions hardly turn
T = 24
ROTATED = 8  # pairs of a head that do turn: by them it looks one position back
SHARPNESS = 8.0


def planted_config(**changes) -> ModelConfig:
    return ModelConfig(
        **{
            "vocab_size": V,
            "hidden_size": 3 * V + 1,  # the token, the one before it, what is said, a constant
            "num_layers": 3,
            "num_heads": 1,
            "num_kv_heads": 1,
            "head_dim": 64,
            "ffn_size": 16,
            "tie_embeddings": False,
            "rope_theta": 1e16,
            **changes,
        }
    )


TOKEN = slice(0, V)
BEFORE = slice(V, 2 * V)
SAID = slice(2 * V, 3 * V)
CONSTANT = 3 * V


@torch.no_grad()
def planted_copy_head(**changes) -> Decoder:
    """The model of this file's head line."""
    model = kernels.decoder(planted_config(**changes))
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.zero_()
    one = torch.eye(V)
    model.embed.weight[:, TOKEN] = one
    model.embed.weight[:, CONSTANT] = 1
    model.lm_head.weight[:, SAID] = one

    looks_back, _, copies = [layer.attention for layer in model.layers]
    for layer in model.layers:
        layer.attention.q_norm.weight.fill_(SHARPNESS)
        layer.attention.k_norm.weight.fill_(SHARPNESS)

    half = model.config.head_dim // 2
    angle_k = model.config.rope_theta ** -(torch.arange(ROTATED) / half)
    looks_back.q_proj.weight[:ROTATED, CONSTANT] = 1
    looks_back.k_proj.weight[:ROTATED, CONSTANT] = angle_k.cos()
    looks_back.k_proj.weight[half : half + ROTATED, CONSTANT] = angle_k.sin()
    looks_back.v_proj.weight[:V, TOKEN] = one
    looks_back.o_proj.weight[BEFORE, :V] = one

    for layer in model.layers[1:]:
        head = layer.attention
        still = [*range(ROTATED, half), *range(half + ROTATED, 2 * half)]
        head.q_proj.weight[still, TOKEN] = one
        head.k_proj.weight[still, BEFORE] = one
        head.v_proj.weight[:V, TOKEN] = one
    copies.o_proj.weight[SAID, :V] = one
    return model


@pytest.fixture(scope="module")
def model():
    return planted_copy_head()


@pytest.fixture(scope="module")
def pairs():
    return copy_pairs([random_text(4000)], T, 12)


def random_text(tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, V, tokens).astype(np.uint16)


# ---- pairs


def test_pairs_are_copies_that_one_token_decides(pairs):
    assert pairs.clean_BT.shape == pairs.corrupt_BT.shape == (12, T)
    columns = (x.tolist() for x in pairs)
    for clean, corrupt, answer, foil in zip(*columns, strict=True):
        question = clean[-1]
        assert corrupt[-1] == question
        after = {b for a, b in zip(clean, clean[1:], strict=False) if a == question}
        assert answer in after
        assert foil in clean and foil not in after | {question}

        changed = [t for t in range(T) if clean[t] != corrupt[t]]
        expected = [t for t in range(1, T) if (clean[t - 1], clean[t]) == (question, answer)]
        assert changed == expected and expected
        assert all(corrupt[t] == foil for t in changed)


def test_the_answer_follows_in_the_text():
    text = random_text(400)
    pairs = copy_pairs([text], T, 5)
    windows = np.lib.stride_tricks.sliding_window_view(text, T + 1).tolist()
    for clean, answer in zip(pairs.clean_BT.tolist(), pairs.answer_B.tolist(), strict=True):
        assert [*clean, answer] in windows


def test_pairs_repeat_with_their_seed():
    text = random_text(4000)
    first, again, other = (copy_pairs([text], T, 5, seed) for seed in (0, 0, 1))
    assert torch.equal(first.clean_BT, again.clean_BT)
    assert torch.equal(first.foil_B, again.foil_B)
    assert not torch.equal(first.clean_BT, other.clean_BT)


def test_texts_without_copies_are_refused():
    with pytest.raises(ValueError, match="48"):
        copy_pairs([np.arange(48)], T, 3)
    # whatever follows A can only be B, and no third token is there to replace it
    with pytest.raises(ValueError, match="48"):
        copy_pairs([np.array([0, 1] * 24)], T, 3)


# ---- spans


@pytest.mark.parametrize("length, most", [(24, 32), (24, 24), (24, 5), (131_072, 32), (3, 2)])
def test_spans_cover_every_position_once(length, most):
    found = spans(length, most)
    assert len(found) == min(most, length)
    positions = [t for span in found for t in range(span.start, span.stop)]
    assert positions == list(range(length))
    assert found[-1] == slice(length - 1, length)


def test_spans_have_names():
    assert [span_name(span) for span in spans(9, 3)] == ["0-3", "4-7", "8"]


# ---- what it finds


def test_the_planted_copy_head_is_found(model, pairs):
    table = Patching(model, pairs).effects([0, 1, 2])
    assert table.clean > 1 and table.corrupt == pytest.approx(-table.clean, rel=1e-3)
    assert table.top(1) == [(2, "attention", str(T - 1))]

    effect_L2C = table.effect_L2C
    assert effect_L2C[2, 0, T - 1].item() == pytest.approx(1, abs=1e-4)
    effect_L2C[2, 0, T - 1] = 0
    assert effect_L2C.abs().max() < 1e-3
    assert "attention of layer 2 at position 23" in table.line()


def test_a_head_that_is_cut_off_has_no_effect(pairs):
    """The head of layer 1 is the copy head but for its output: it scores exactly 0, and 1 if the
    output is there and the other head's is not."""
    model = planted_copy_head()
    cut_off = Patching(model, pairs).effects([1]).effect_L2C[0]
    assert torch.equal(cut_off, torch.zeros_like(cut_off))

    connected, other = model.layers[1].attention, model.layers[2].attention
    with torch.no_grad():
        connected.o_proj.weight.copy_(other.o_proj.weight)
        other.o_proj.weight.zero_()
    patching = Patching(model, pairs)
    assert patching.effects([1]).effect_L2C[0][0, T - 1].item() == pytest.approx(1, abs=1e-4)
    cut_off = patching.effects([2]).effect_L2C[0]
    assert torch.equal(cut_off, torch.zeros_like(cut_off))


def test_a_model_that_does_not_copy_is_refused(pairs):
    model = planted_copy_head()
    with torch.no_grad():
        model.lm_head.weight.mul_(0.01)
    with pytest.raises(CannotCopy):
        Patching(model, pairs)


def test_logits_that_are_not_numbers_are_refused(pairs):
    model = planted_copy_head()
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="nan"):
        Patching(model, pairs)


# ---- against float64


def random_model(**changes) -> Decoder:
    config = ModelConfig(
        **{
            "vocab_size": V,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 8,
            "ffn_size": 48,
            "tie_embeddings": False,
            "init_std": 0.3,
            **changes,
        }
    )
    return kernels.decoder(config, seed=2)  # by chance it tells the prompts apart


@torch.no_grad()
def written_out(model, tokens_T, patches=()):
    """Logits [V] after a prompt, and what each layer's parts add, in float64; patches: (layer,
    site, positions, values)."""
    reference = kernels.decoder(ModelConfig(**(vars(model.config) | {"compute_dtype": "float64"})))
    reference.load_state_dict(model.state_dict())
    reference.double()
    rope = reference.rotary(len(tokens_T), tokens_T.device)
    x_1TD = reference.embed(tokens_T)[None]
    added = {}
    for number, block in enumerate(reference.layers):
        for site in ("attention", "mlp"):
            if site == "attention":
                add_1TD = block.attention(block.attention_norm(x_1TD), rope)
            else:
                add_1TD = block.mlp(block.mlp_norm(x_1TD))
            for layer, patched, positions, values_TD in patches:
                if (layer, patched) == (number, site):
                    add_1TD[0, positions] = values_TD[positions]
            added[number, site] = add_1TD[0].clone()
            x_1TD = x_1TD + add_1TD
    return reference.norm(x_1TD)[0, -1] @ reference.lm_head.weight.T, added


def expected_effects(model, pairs, columns):
    """The whole table by one prompt, layer, site and column after another."""

    def difference(logits_V, b):
        return (logits_V[pairs.answer_B[b]] - logits_V[pairs.foil_B[b]]).item()

    B = len(pairs.answer_B)
    clean = [written_out(model, pairs.clean_BT[b]) for b in range(B)]
    corrupt = [written_out(model, pairs.corrupt_BT[b]) for b in range(B)]
    clean_mean = sum(difference(clean[b][0], b) for b in range(B)) / B
    corrupt_mean = sum(difference(corrupt[b][0], b) for b in range(B)) / B
    effects = torch.zeros(model.config.num_layers, 2, columns + 1, dtype=torch.float64)
    for layer, site in np.ndindex(model.config.num_layers, 2):
        name = ("attention", "mlp")[site]
        for column in range(columns + 1):
            total = 0.0
            for b in range(B):
                positions = pairs.clean_BT[b] != pairs.corrupt_BT[b]
                if column < columns:
                    positions = torch.arange(T)[spans(T, columns)[column]]
                patches = [(layer, name, positions, clean[b][1][layer, name])]
                total += difference(written_out(model, pairs.corrupt_BT[b], patches)[0], b)
            effects[layer, site, column] = (total / B - corrupt_mean) / (clean_mean - corrupt_mean)
    return effects, clean_mean, corrupt_mean


def test_effects_equal_a_forward_written_out(pairs):
    model = random_model()
    few = Pairs(*(x[:3] for x in pairs))
    expected, clean, corrupt = expected_effects(model, few, 4)
    table = Patching(model, few, rows=2, most_spans=4).effects([0, 1])
    assert abs(clean - corrupt) > 0.3
    assert (table.clean, table.corrupt) == pytest.approx((clean, corrupt), abs=1e-5)
    torch.testing.assert_close(table.effect_L2C, expected, rtol=1e-4, atol=1e-5)
    assert (table.effect_L2C.abs() > 1e-3).sum() >= 10  # a table that says something


def test_a_patched_run_begins_with_the_first_patched_position(pairs):
    """What stands before it is that of the corrupt prompt, in every run."""
    one = Pairs(*(x[:1] for x in pairs))
    passed = []

    def count(inputs, _):
        passed.append(tuple(inputs[0].shape[:2]))

    model = random_model()
    with hooked(model.layers[1], count):
        Patching(model, one, rows=2, most_spans=T).effects([1])
    first = int((one.clean_BT != one.corrupt_BT)[0].nonzero()[0])
    patched = [tokens for rows, tokens in passed if rows == 2]  # both sites of a column
    assert patched == [T - first, *range(T - first, 0, -1)]


def test_no_layer_reads_the_prompts_twice(pairs):
    one = Pairs(*(x[:1] for x in pairs))
    model = random_model(num_layers=3)
    patching = Patching(model, one, rows=2)
    passed = []
    with hooked(model.layers[0], lambda inputs, _: passed.append(len(inputs[0]))):
        patching.effects([1, 2])
    assert passed == [1, 1]  # the clean and the corrupt one


@pytest.mark.parametrize("chunk", [5, 24])
def test_prompts_in_parts_give_the_same_effects(chunk, pairs):
    model = random_model()
    few = Pairs(*(x[:3] for x in pairs))
    whole = Patching(model, few, most_spans=4).effects([0]).effect_L2C[0]
    in_parts = Patching(model, few, most_spans=4, chunk=chunk).effects([0]).effect_L2C[0]
    torch.testing.assert_close(in_parts, whole, rtol=1e-4, atol=1e-5)


def test_native_sparse_attention_is_patched_too(pairs):
    small = NSAConfig(cmp_block=4, cmp_stride=2, sel_block=4, sel_count=3, window=8)
    model = random_model(attention=small, init_std=0.6)
    effect_2C = Patching(model, pairs, rows=12, most_spans=2).effects([1]).effect_L2C[0]
    assert effect_2C[0, 1].abs() > 1e-3
    # what the last layer adds before the last position is read by nobody
    assert effect_2C[:, 0].abs().max() < 1e-6
