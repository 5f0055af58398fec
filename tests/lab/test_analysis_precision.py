"""What precision costs: figures equal to float64, in the expected ranges on a model that has
learned to copy, with the noise floor next to them; an overflow is found where it happens.

The model is trained here, in about a second: two layers that repeat a period of 12 tokens. Random
initial weights would do for the errors of activations, but they have no circuit to compare.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch

from lab.analysis.activations import overflow, require_finite, stream
from lab.analysis.autoencoder import (
    Autoencoder,
    Match,
    Settings,
    Trainer,
    dictionary_match,
    fit,
)
from lab.analysis.patching import Effects, Patching, copy_pairs
from lab.analysis.precision import (
    EXPECTED,
    EXPECTED_RATIO,
    Circuits,
    Cost,
    PrecisionCost,
    PrecisionTable,
    at_precision,
    compare_effects,
    compare_rows,
    sums_of,
)
from longhaul import kernels
from model import Decoder, ModelConfig

CPU = torch.device("cpu")
V = 32
PERIOD = 12
CONFIG = ModelConfig(
    vocab_size=V,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=96,
    rope_theta=100.0,
)
SAE = Settings(k=4, tokens=20_000, step_tokens=512)


def periodic(rows: int, draw: torch.Generator) -> torch.Tensor:
    return torch.randint(0, V, (rows, PERIOD), generator=draw).repeat(1, 4)


@pytest.fixture(scope="module")
def model() -> Decoder:
    """A model that repeats what stood 12 tokens before."""
    model = kernels.decoder(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    draw = torch.Generator().manual_seed(0)
    for _ in range(100):
        rows_BT = periodic(16, draw)[:, : 3 * PERIOD]
        labels_BT = rows_BT[:, 1:].clone()
        labels_BT[:, : PERIOD - 1] = -100
        loss = model(rows_BT[:, :-1], labels_BT)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def rows_BT() -> torch.Tensor:
    return periodic(16, torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def low(model) -> dict[str, Decoder]:
    return {dtype: at_precision(model, dtype) for dtype in EXPECTED}


def residuals(model, rows_BT, layer: int) -> torch.Tensor:
    parts = []
    stream(model, rows_BT, [layer], ["residual"], lambda *found: parts.append(found[-1]))
    return parts[0].flatten(0, 1)


def trained(model, layer: int, seed: int) -> Autoencoder:
    def part(number: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(number)
        return residuals(model, periodic(32, draw), layer)

    return fit(Trainer(64, dataclasses.replace(SAE, seed=seed)), part)


def activation_costs(reference, other, parts, layers, autoencoders=None, chunk=0):
    """The costs of layers over parts of the tokens."""
    sums = sums_of(layers, autoencoders or {}, CPU)
    for rows in parts:
        compare_rows(reference, other, rows, sums, chunk)
    return {layer: total.cost() for layer, total in sums.items()}


@pytest.fixture(scope="module")
def sae(model) -> Autoencoder:
    return trained(model, 1, seed=0)


# ---- the same weights in another precision


@pytest.mark.parametrize("dtype", EXPECTED)
def test_the_twin_computes_what_a_model_in_that_precision_does(dtype, model, low, rows_BT):
    cast = kernels.decoder(dataclasses.replace(CONFIG, compute_dtype=dtype)).requires_grad_(False)
    cast.load_state_dict(model.state_dict())
    for parameter in cast.parameters():
        if parameter.ndim == 2:  # on a CPU the norms multiply by fp32 weights
            parameter.data = parameter.to(cast.config.dtype)
    cast.tie_weights()
    assert torch.equal(low[dtype](rows_BT), cast(rows_BT))


def test_the_twin_shares_its_parameters(model, low):
    for twin in low.values():
        for name, parameter in model.named_parameters():
            assert twin.get_parameter(name).data_ptr() == parameter.data_ptr()
    assert model.config.compute_dtype == "float32"


# ---- activations


@pytest.mark.parametrize("chunk", [0, 10])
@pytest.mark.parametrize("dtype", EXPECTED)
def test_the_error_of_activations_equals_float64(dtype, chunk, model, low, rows_BT):
    parts = [(rows_BT[:10], None), (rows_BT[10:], None)]
    found = activation_costs(model, low[dtype], parts, [0, 1], chunk=chunk)
    for layer in (0, 1):
        x_ND = residuals(model, rows_BT, layer).double()
        error_ND = residuals(low[dtype], rows_BT, layer).double() - x_ND
        expected = error_ND.square().mean().sqrt() / x_ND.square().mean().sqrt()
        # in parts other sums are rounded, which changes the errors themselves a little
        tolerance = 0.1 if chunk else 1e-5
        assert found[layer].relative_rms == pytest.approx(expected.item(), rel=tolerance)
        assert found[layer].jaccard is None


def test_documents_of_packed_rows_are_apart(model, low, rows_BT):
    doc_ids = (torch.arange(rows_BT.shape[1]) >= 20).long().expand_as(rows_BT)
    packed = activation_costs(model, low["bfloat16"], [(rows_BT, doc_ids)], [1])
    pieces = [(rows_BT[:, :20], None), (rows_BT[:, 20:], None)]
    apart = activation_costs(model, low["bfloat16"], pieces, [1])
    assert packed[1].relative_rms == pytest.approx(apart[1].relative_rms, rel=0.1)


def test_jaccard_equals_sets_of_latents(model, low, rows_BT, sae):
    found = activation_costs(model, low["bfloat16"], [(rows_BT, None)], [1], {1: sae})
    of_tokens = []
    sets = []
    for each in (model, low["bfloat16"]):
        value_Nk, index_Nk = sae.encode(residuals(each, rows_BT, 1))
        rows = zip(value_Nk.tolist(), index_Nk.tolist(), strict=True)
        sets.append([{i for v, i in zip(*row, strict=True) if v > 0} for row in rows])
    for a, b in zip(*sets, strict=True):
        of_tokens.append(len(a & b) / len(a | b) if a | b else 1.0)
    assert found[1].jaccard == pytest.approx(sum(of_tokens) / len(of_tokens), abs=1e-6)
    assert found[1].jaccard < 1


# ---- overflow


@pytest.fixture
def overflowing(model) -> Decoder:
    """The model with an MLP in layer 1 whose output passes 65,504 in float16."""
    large = kernels.decoder(CONFIG)
    large.load_state_dict(model.state_dict())
    with torch.no_grad():
        large.layers[1].mlp.down_proj.weight *= 1e6
        large.layers[1].mlp.down_proj.weight.clamp_(-6e4, 6e4)
    return large.requires_grad_(False)


@pytest.mark.parametrize("chunk", [0, 10])
def test_an_overflow_is_found_where_it_happens(chunk, overflowing, rows_BT):
    rows = (rows_BT, None)
    half = at_precision(overflowing, "float16")
    assert overflow(half, rows, chunk) == (1, "mlp")
    with pytest.raises(ValueError, match="MLP of layer 1.*--dtype"):
        require_finite(half, rows, chunk)

    require_finite(overflowing, rows, chunk)
    require_finite(at_precision(overflowing, "bfloat16"), rows, chunk)


def test_weights_that_are_not_finite_are_named(model, rows_BT):
    broken = kernels.decoder(CONFIG)
    broken.load_state_dict(model.state_dict())
    with torch.no_grad():
        broken.layers[0].attention.o_proj.weight[0, 0] = math.nan
    with pytest.raises(ValueError, match="attention of layer 0"):
        require_finite(broken, (rows_BT, None))


# ---- the whole table


@pytest.fixture(scope="module")
def table(model, low, rows_BT, sae) -> PrecisionTable:
    draw = torch.Generator().manual_seed(2)
    pairs = copy_pairs(list(periodic(30, draw).numpy()), 24, 16)
    effects = Patching(model, pairs, rows=16).effects([0, 1])
    costs = []
    for dtype, other in low.items():
        layers = activation_costs(model, other, [(rows_BT, None)], [0, 1], {1: sae})
        match = dictionary_match(sae.directions, trained(other, 1, seed=0).directions)
        found = Patching(other, pairs, rows=16).effects([0, 1])
        circuits = compare_effects(effects, found)
        costs.append(PrecisionCost(dtype, layers, {1: match}, circuits))
    floor = dictionary_match(sae.directions, trained(model, 1, seed=1).directions)
    return PrecisionTable(tuple(costs), {1: floor})


@pytest.mark.slow
def test_the_costs_are_in_the_expected_ranges(table):
    least, most = EXPECTED_RATIO
    assert all(least <= ratio <= most for ratio in table.ratios.values())
    for cost in table.costs:
        expected = EXPECTED[cost.dtype]
        for layer in (0, 1):
            rms = cost.layers[layer].relative_rms
            assert expected.least_rms <= rms <= expected.most_rms
        assert cost.layers[1].jaccard >= expected.least_jaccard
        assert cost.circuits.overlap >= 7
        assert 0 < cost.circuits.max_delta < 0.02
    assert table.unexpected() == []


@pytest.mark.slow
def test_a_retrained_dictionary_differs_less_than_the_noise_floor(table):
    floor = table.floors[1]
    assert floor.mean < 0.95
    for cost in table.costs:
        assert cost.matches[1].mean > floor.mean


def test_what_is_unexpected_is_said():
    fine = PrecisionCost("float16", {3: Cost(0.0005, 0.98)}, {}, Circuits(0.3, 5, 8))
    coarse = PrecisionCost("bfloat16", {3: Cost(0.009, None)}, {})
    words = PrecisionTable((fine, coarse), {}).unexpected()
    for said, figure in zip(words, ("Jaccard 0.980", "5 of the 8", "0.9000%", "18.0"), strict=True):
        assert figure in said
    assert PrecisionTable((fine,), {3: Match(0.5, 0.2)}).ratios == {}


def effects(values) -> Effects:
    return Effects((0,), ("0", "1"), tuple(values), clean=1.0, corrupt=0.0, pairs=1, length=2)


def test_only_effects_that_can_differ_have_a_rank():
    one = effects([0.9, 0.0, 0.0, 0.4])
    other = effects([0.8, 0.0, 0.0, 0.3])
    assert compare_effects(one, other) == Circuits(pytest.approx(0.1), 1, 1)

    # the replaced tokens' effects are those of other columns once more
    replaced = [dataclasses.replace(x, columns=("0", "replaced")) for x in (one, other)]
    assert compare_effects(*replaced) == Circuits(pytest.approx(0.1), 0, 0)
    assert compare_effects(effects([0.0] * 4), effects([0.0] * 4)) == Circuits(0.0, 0, 0)


def test_circuits_are_compared_by_their_places():
    one = effects([0.9, 0.1, -0.5, 0.0])
    other = effects([0.8, 0.1, -0.5, 0.3])
    assert compare_effects(one, other) == Circuits(pytest.approx(0.3), 2, 2)

    # all places together are always the same ones
    turned = effects([0.1, 0.9, 0.8, 0.01])
    assert compare_effects(effects([0.9, 0.1, 0.2, 0.3]), turned) == Circuits(
        pytest.approx(0.8), 0, 2
    )
    # a place without an effect is not among the largest
    alone = effects([0.9, 0.0, 0.0, 0.0])
    several = effects([0.8, 0.7, 0.1, 0.1])
    assert compare_effects(alone, several).overlap == 1

    long = [np.linspace(1, 0, 20), np.linspace(0, 1, 20)]
    first, last = (dataclasses.replace(effects(x), columns=tuple("abcdefghij")) for x in long)
    assert compare_effects(first, last) == Circuits(pytest.approx(1.0), 0, 8)
