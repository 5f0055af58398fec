"""What a lower precision costs: the same weights and tokens in float32 and in 16 bits.

    relative RMS   rms(x_16 - x_32) / rms(x_32) of the residual stream after a layer
    Jaccard        latents of an autoencoder that are active for x_16 and x_32, over those that are
                   for either: one autoencoder, trained on x_32, reads both
    match          the mean cosine of the directions of an autoencoder trained on x_32 with the
                   nearest ones of another trained on x_16, of live latents. Next to it is its noise
                   floor: the match with one trained on x_32 from another seed. A match above the
                   floor is within what chance does.
    patching       the largest |difference of effects|, and how many of the largest effects are
                   among the largest in both

A float of m stored bits of mantissa rounds by up to 2^-(m + 1) of its size: 2^-8 in bfloat16, 2^-11
in float16, which overflows above 65,504 instead.

Letters: B rows, T tokens of a row, t of a part of it, N tokens, D model width, L layers.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lab.analysis.activations import Rows, hooked, require_finite, run
from lab.analysis.autoencoder import Autoencoder, Match, jaccard
from lab.analysis.patching import REPLACED, TOP, Effects, Site
from longhaul import kernels
from model import Decoder, LayerCache, Rope

REFERENCE = "float32"
TILE = 4096  # tokens that an autoencoder reads at a time


class Expected(NamedTuple):
    """What a 16-bit precision is expected to cost; the figures are fractions, not percent."""

    least_rms: float
    most_rms: float
    least_jaccard: float


# Measured on a CPU with tiny after 200 steps, on 8,192 tokens of source, by
# layer: float16 0.034% to 0.058%, bfloat16 0.28% to 0.47%, ratio 8.0 to 8.1. In layer 2, Jaccard
# 0.999 and 0.996, match 0.84 and 0.80, its floor 0.59. Initial weights are at the edge: 0.101% and
# 0.81% in the last layer.
EXPECTED = {
    "float16": Expected(0.0002, 0.001, 0.99),
    "bfloat16": Expected(0.0015, 0.008, 0.95),
}
EXPECTED_RATIO = (5.0, 11.0)  # of the relative RMS of bfloat16 to that of float16
EXPECTED_TOP = TOP - 1


# ---- the same weights in another precision


def at_precision(model: Decoder, dtype: str) -> Decoder:
    """A decoder that computes in `dtype` with the parameters and the tables of positions of an
    unsharded one, which they share: only what is cast on use takes memory.
    """
    config = dataclasses.replace(model.config, compute_dtype=dtype)
    with torch.device("meta"):
        twin = kernels.decoder(config)
    twin.load_state_dict(model.state_dict(), assign=True)
    twin.tie_weights()
    twin.rotary = model.rotary
    return twin.requires_grad_(False)


# ---- activations


class Cost(NamedTuple):
    """Of a layer in a precision; None without an autoencoder."""

    relative_rms: float
    jaccard: float | None


class Sums:
    """What is added up over the tokens of a layer, float64 on the device, with an autoencoder or
    without.
    """

    def __init__(self, device: torch.device, autoencoder: Autoencoder | None = None):
        self.autoencoder = autoencoder
        self.error = torch.zeros((), dtype=torch.float64, device=device)
        self.size = torch.zeros((), dtype=torch.float64, device=device)
        self.jaccard = torch.zeros((), dtype=torch.float64, device=device)
        self.tokens = 0

    def add(self, reference_ND: Tensor, x_ND: Tensor) -> None:
        """Take in the activations of some tokens in both precisions."""
        sae = self.autoencoder
        tiles = zip(reference_ND.split(TILE), x_ND.split(TILE), strict=True)
        for reference_nD, x_nD in tiles:
            difference_nD = x_nD.float() - reference_nD.float()
            self.error += difference_nD.square().sum()
            self.size += reference_nD.float().square().sum()
            self.tokens += len(x_nD)
            if sae is not None:
                codes = sae.encode(reference_nD), sae.encode(x_nD)
                self.jaccard += len(x_nD) * jaccard(*codes, len(sae.decoder))

    def cost(self) -> Cost:
        """The figures of all tokens that were taken in."""
        relative_rms = (self.error / self.size).sqrt().item()
        if self.autoencoder is None:
            return Cost(relative_rms, None)
        return Cost(relative_rms, (self.jaccard / self.tokens).item())


def sums_of(
    layers: Sequence[int], autoencoders: Mapping[int, Autoencoder], device: torch.device
) -> dict[int, Sums]:
    """What is added up for each of these layers."""
    return {layer: Sums(device, autoencoders.get(layer)) for layer in layers}


def compare_rows(
    reference: Decoder, other: Decoder, rows: Rows, sums: Mapping[int, Sums], chunk: int = 0
) -> None:
    """Add rows to the sums of each layer. ValueError if the other precision overflows.

    Both models go from layer to layer in step, so that one layer's activations exist at a time.
    """
    step = InStep(other)

    def compare(layer: int, inputs: tuple, x_BtD: Tensor) -> None:
        other_BtD = step.layer(layer, *inputs)
        if layer in sums:
            sums[layer].add(x_BtD.flatten(0, 1), other_BtD.flatten(0, 1))

    with contextlib.ExitStack() as hooks:
        for layer, block in enumerate(reference.layers):
            hooks.enter_context(hooked(block, functools.partial(compare, layer)))
        run(reference, rows[0], max(sums), doc_ids=rows[1], chunk=chunk)

    sizes = torch.stack([total.error for total in sums.values()])
    if not sizes.isfinite().all():
        require_finite(reference, rows, chunk)
        require_finite(other, rows, chunk)


class InStep:
    """A decoder that follows another one's forward, layer by layer: the embeddings, positions and
    documents are those that the other one was given, its activations and its cache its own.
    """

    def __init__(self, model: Decoder):
        self.model = model
        self.x_BtD: Tensor | None = None  # what the next layer reads
        # by the other model's caches, with which they go
        self.caches: WeakKeyDictionary[LayerCache, LayerCache] = WeakKeyDictionary()

    def layer(self, layer: int, x_BtD: Tensor, rope: Rope, documents, cache) -> Tensor:
        """What this model's layer makes of its own activations, after that layer of the other one,
        whose inputs are given.
        """
        if layer == 0:
            self.x_BtD = x_BtD.to(self.model.config.dtype)
        own = None if cache is None else self._cache(cache, x_BtD.shape[1])
        block = self.model.layers[layer]
        self.x_BtD = block(self.x_BtD, rope, documents, own)
        return self.x_BtD

    def _cache(self, cache: LayerCache, tokens: int) -> LayerCache:
        """The own cache next to one that has just taken in so many tokens."""
        if cache not in self.caches:
            config = self.model.config
            keys = cache.k_BSGK
            shape = tuple(keys.shape)
            attention = self.model.layers[0].attention
            self.caches[cache] = attention.cache(shape, keys.device, config.dtype)
        own = self.caches[cache]
        own.length = cache.length - tokens
        return own


# ---- patching


class Circuits(NamedTuple):
    """How far two tables of effects agree."""

    max_delta: float  # the largest |difference|
    overlap: int  # places that are among the largest in both
    of: int  # the largest that are compared; 0 if there are too few to choose from


def compare_effects(reference: Effects, other: Effects) -> Circuits:
    """The agreement of the effects of two precisions on the same prompts.

    Only what can differ has a rank: not an effect that is exactly 0, and not the column of the
    replaced tokens, whose positions have their own columns. At most half of the places that have a
    rank in either precision are called the largest, since all of them always agree.
    """
    delta = (other.effect_L2C - reference.effect_L2C).abs().max().item()
    first = _ranked(reference)
    second = _ranked(other)
    of = min(TOP, len(first.keys() | second.keys()) // 2)
    shared = set(_largest(first, of)) & set(_largest(second, of))
    return Circuits(delta, len(shared), of)


def _ranked(effects: Effects) -> dict[Site, float]:
    """The sizes of the effects that have a rank, by place."""
    return {site: abs(value) for site, value in effects.by_site() if value and site[-1] != REPLACED}


def _largest(sizes: Mapping[Site, float], count: int) -> list[Site]:
    """The places of the largest sizes; of equal ones the first."""
    return sorted(sizes, key=lambda site: -sizes[site])[:count]


# ---- the table


@dataclass(frozen=True)
class PrecisionCost:
    """A 16-bit precision's part of the table; what was left out is None or empty."""

    dtype: str
    layers: Mapping[int, Cost]
    matches: Mapping[int, Match]  # with retrained dictionaries
    circuits: Circuits | None = None


@dataclass(frozen=True)
class PrecisionTable:
    """All precisions against float32."""

    costs: tuple[PrecisionCost, ...]
    floors: Mapping[int, Match]  # of dictionaries of two seeds in float32

    @property
    def ratios(self) -> dict[int, float]:
        """The relative RMS of bfloat16 over that of float16 by layer; empty without both."""
        by_dtype = {cost.dtype: cost.layers for cost in self.costs}
        if not by_dtype.keys() >= EXPECTED.keys():
            return {}
        fine = by_dtype["float16"]
        coarse = by_dtype["bfloat16"]
        return {
            layer: coarse[layer].relative_rms / fine[layer].relative_rms
            for layer in fine
            if fine[layer].relative_rms
        }

    def record(self) -> dict:
        """The table for JSON."""
        return {
            "reference": REFERENCE,
            "precisions": {cost.dtype: _record(cost, self.floors) for cost in self.costs},
            "ratio_of_relative_rms": self.ratios,
            "unexpected": self.unexpected(),
        }

    def lines(self) -> list[str]:
        """The table in words, a line for each precision and layer, and what is unexpected."""
        lines = [HEADER]
        for cost in self.costs:
            lines += [_line(cost, layer, self.floors) for layer in cost.layers]
            if cost.circuits is not None:
                lines.append(_patching_line(cost.dtype, cost.circuits))
        return [*lines, *self.unexpected()]

    def unexpected(self) -> list[str]:
        """What lies outside the ranges that are expected of each precision, a sentence each."""
        found = [words for cost in self.costs for words in _unexpected(cost)]
        least, most = EXPECTED_RATIO
        for layer, ratio in self.ratios.items():
            if not least <= ratio <= most:
                found.append(
                    f"layer {layer}: the relative RMS of bfloat16 is {ratio:.1f} times float16's, "
                    f"expected {least:g} to {most:g}"
                )
        return found


HEADER = f"{'precision':<10}{'layer':>6}{'RMS error':>11}{'Jaccard':>9}{'match':>8}{'floor':>8}"


def _record(cost: PrecisionCost, floors: Mapping[int, Match]) -> dict:
    layers = {}
    for layer, found in cost.layers.items():
        match = cost.matches.get(layer)
        floor = floors.get(layer)
        layers[layer] = found._asdict() | {
            "match": None if match is None else match._asdict(),
            "noise_floor": None if floor is None else floor._asdict(),
        }
    circuits = None if cost.circuits is None else cost.circuits._asdict()
    return {"layers": layers, "patching": circuits}


def _line(cost: PrecisionCost, layer: int, floors: Mapping[int, Match]) -> str:
    found = cost.layers[layer]
    match = cost.matches.get(layer)
    floor = floors.get(layer)
    return (
        f"{cost.dtype:<10}{layer:>6}{found.relative_rms:>11.4%}{_number(found.jaccard):>9}"
        f"{_number(match and match.mean):>8}{_number(floor and floor.mean):>8}"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _patching_line(dtype: str, circuits: Circuits) -> str:
    words = f"{dtype:<10}patching: largest change of an effect {circuits.max_delta:.4f}, "
    if not circuits.of:
        return words + "too few effects to compare the largest"
    return words + f"{circuits.overlap} of the {circuits.of} largest effects are the same"


def _unexpected(cost: PrecisionCost) -> list[str]:
    expected = EXPECTED[cost.dtype]
    words = []
    for layer, found in cost.layers.items():
        where = f"{cost.dtype}, layer {layer}:"
        if not expected.least_rms <= found.relative_rms <= expected.most_rms:
            words.append(
                f"{where} relative RMS {found.relative_rms:.4%}, expected "
                f"{expected.least_rms:.2%} to {expected.most_rms:.2%}"
            )
        if found.jaccard is not None and not found.jaccard >= expected.least_jaccard:
            words.append(
                f"{where} Jaccard {found.jaccard:.3f}, expected {expected.least_jaccard} or more"
            )
    circuits = cost.circuits
    if circuits is not None and circuits.overlap < min(EXPECTED_TOP, circuits.of):
        words.append(
            f"{cost.dtype}: {circuits.overlap} of the {circuits.of} largest effects are the same, "
            f"expected {min(EXPECTED_TOP, circuits.of)} or more"
        )
    return words
