"""An analysis from its settings to its results, part by part.

What a part computes is a function of a model, samples and settings, so that the planner runs the
same ones on fake tensors. `Analysis` runs them one after the other, and leaves out what refuses.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from base import durable
from base.tensors import read_tensors, write_tensors
from data.progress import bar
from lab.analysis import autoencoder
from lab.analysis.activations import Consume, require_finite, stream
from lab.analysis.activations import run as forward
from lab.analysis.autoencoder import Autoencoder, Match, Trainer, dictionary_match
from lab.analysis.config import AnalysisConfig, Measures
from lab.analysis.distance import CHUNK, LayerDistances, measured
from lab.analysis.patching import Effects, Pairs, Patching, copy_pairs
from lab.analysis.precision import (
    Cost,
    PrecisionCost,
    PrecisionTable,
    at_precision,
    compare_effects,
    compare_rows,
    sums_of,
)
from lab.analysis.samples import Rows, Samples
from lab.analysis.statistics import LayerStatistics
from longhaul.exits import BAD_INPUT, DONE
from model import Decoder

MOST_TOKENS = 1_000_000  # of the texts in which copies are looked for
PROBE = 4096  # tokens of the first rows, which show at once whether a precision overflows

# Measures the peak of memory, which is its value's `peak_bytes` behind it; None if nobody measures
Meter = Callable[[Decoder], contextlib.AbstractContextManager]


class Source(Protocol):
    """Rows of tokens, such as Samples."""

    context_length: int

    def __len__(self) -> int:
        """How many there are."""

    def rows(self, first: int, last: int) -> Rows:
        """Rows first .. last - 1."""


def batches(samples: Source, batch_size: int, what: str = "") -> Iterator[Rows]:
    """All samples, the last ones as a smaller batch. What they are read for is shown, if given."""
    firsts = firsts_of(samples, batch_size)
    with bar(what, len(firsts), disable=not what) as progress:
        for first in firsts:
            yield batch(samples, first, batch_size)
            progress.update()


def firsts_of(samples: Source, batch_size: int) -> range:
    """The first row of each batch."""
    return range(0, len(samples), batch_size)


def batch(samples: Source, first: int, batch_size: int) -> Rows:
    """The batch that begins with row `first`; the last one may be smaller."""
    return samples.rows(first, min(first + batch_size, len(samples)))


# ---- statistics


def statistics(
    model: Decoder, samples: Source, measures: Measures, batch_size: int, what: str = ""
) -> dict[int, LayerStatistics]:
    """The totals of each layer's residual stream over all samples."""
    device = model.embed.weight.device
    width = model.config.hidden_size
    totals = {layer: LayerStatistics(width, device) for layer in measures.chosen(model.config)}

    def consume(layer: int, site: str, x_BtD: Tensor) -> None:
        totals[layer].add(x_BtD)

    for rows in batches(samples, batch_size, what):
        read(model, rows, tuple(totals), consume, measures.chunk)
    return totals


def read(
    model: Decoder, rows: Rows, layers: Sequence[int], consume: Consume, chunk: int = 0
) -> None:
    """The residual streams of rows, layer by layer."""
    stream(
        model,
        rows.tokens_BT,
        layers,
        ("residual",),
        consume,
        doc_ids=rows.doc_ids_BT,
        chunk=chunk,
    )


# ---- how far back heads look


def distances(
    model: Decoder, samples: Source, measures: Measures, batch_size: int, what: str = ""
) -> dict[int, LayerDistances]:
    """The totals of each layer's attention by distance over all samples."""
    device = model.embed.weight.device
    tokens = len(samples) * samples.context_length
    every = 1
    if measures.queries:
        every = max(1, round(tokens / max(measures.queries, CHUNK)))
    totals = {
        layer: LayerDistances(model.config, device, every)
        for layer in measures.chosen(model.config)
    }

    last = max(totals)
    with measured(model, totals):
        for rows in batches(samples, batch_size, what):
            forward(model, rows.tokens_BT, last, doc_ids=rows.doc_ids_BT, chunk=measures.chunk)
    return totals


# ---- patching


def prompt_pairs(samples: Samples, measures: Measures, seed: int) -> Pairs:
    """Prompts from the copies in the samples' split. ValueError if it has none."""
    texts = samples.texts(measures.prompt_length, MOST_TOKENS)
    return copy_pairs(texts, measures.prompt_length, measures.prompts, seed)


# ---- sparse autoencoders


def activations(
    model: Decoder, samples: Source, layer: int, first: int, batch_size: int, chunk: int
) -> Tensor:
    """The residual stream after a layer, [N, D], over the batch that begins with row `first`."""
    found: list[Tensor] = []

    def consume(layer: int, site: str, x_BtD: Tensor) -> None:
        found.append(x_BtD.flatten(0, -2))

    read(model, batch(samples, first, batch_size), (layer,), consume, chunk)
    return found[0] if len(found) == 1 else torch.cat(found)


def train_autoencoder(
    model: Decoder,
    samples: Source,
    measures: Measures,
    layer: int,
    batch_size: int,
    seed: int = 0,
    what: str = "",
) -> Trainer:
    """The autoencoder of a layer, trained on the samples again and again."""
    settings = settings_of(measures, seed)
    trainer = Trainer(model.config.hidden_size, settings, model.embed.weight.device)
    firsts = firsts_of(samples, batch_size)

    def part(number: int) -> Tensor:
        first = firsts[number % len(firsts)]
        return activations(model, samples, layer, first, batch_size, measures.chunk)

    with bar(what, settings.tokens, disable=not what) as progress:
        autoencoder.fit(trainer, part, lambda one: progress.update(one.tokens - progress.n))
    return trainer


def settings_of(measures: Measures, seed: int = 0) -> autoencoder.Settings:
    """Those of an autoencoder and its training."""
    return autoencoder.Settings(
        width=measures.sae_width, k=measures.sae_k, tokens=measures.sae_tokens, seed=seed
    )


def autoencoder_record(trainer: Trainer) -> dict:
    """What became of the training."""
    dead = trainer.dead().double().mean().item()
    return {
        "latents": len(trainer.idle_M),
        "k": trainer.settings.k,
        "tokens": trainer.tokens,
        "unexplained": trainer.losses[-1],
        "dead": dead,
        "losses": trainer.losses,
    }


# ---- what a precision costs


def costs(
    model: Decoder,
    other: Decoder,
    samples: Source,
    measures: Measures,
    batch_size: int,
    autoencoders: Mapping[int, Autoencoder],
    what: str = "",
) -> dict[int, Cost]:
    """What the precision of `other`, which has the same weights, costs the residual stream of each
    layer over all samples.
    """
    sums = sums_of(measures.chosen(model.config), autoencoders, model.embed.weight.device)
    for rows in batches(samples, batch_size, what):
        compare_rows(model, other, rows, sums, measures.chunk)
    return {layer: of_layer.cost() for layer, of_layer in sums.items()}


# ---- all parts


Part = Callable[[str], dict]  # its result, by its name


class Analysis:
    """The parts of an analysis, one after the other.

    model   in the precision of --dtype
    folder  where autoencoders are written
    meter   measures the peak of memory while a part runs

    done       {name: {"result", "seconds", "peak_bytes"}} of the parts that have ended
    left_out   {name: reason} of those that refused with a ValueError; the others go on
    exit_code  that of the first refusal that is an error
    """

    def __init__(
        self, cfg: AnalysisConfig, model: Decoder, samples: Samples, folder: Path, meter: Meter
    ):
        self.cfg = cfg
        self.model = model
        self.samples = samples
        self.folder = folder
        self.meter = meter
        self.layers = cfg.chosen(model.config)
        self.done: dict[str, dict] = {}
        self.left_out: dict[str, str] = {}
        self.exit_code = DONE
        self.parts = self._parts()
        self._costs: dict[str, dict[int, Cost]] = {}
        self._effects: dict[str, Effects] = {}

    def run(self, keep: Callable[[], None]) -> None:
        """All parts; keep() is called after each. ValueError before the first one if the first rows
        overflow in layers that are looked at.
        """
        self._check(self.model)
        for name, part in self.parts.items():
            self._do(name, part)
            keep()

    def _parts(self) -> dict[str, Part]:
        """Those that are asked for by name, in their order."""
        cfg = self.cfg
        found: dict[str, Part] = {
            "patching": functools.partial(self._patch, cfg.dtype),
            "statistics": self._measure,
            "distances": self._look_back,
            "sae": functools.partial(self._train, cfg.dtype, cfg.seed),
        }
        if cfg.compare:
            found["sae-floor"] = functools.partial(self._train, cfg.dtype, cfg.seed + 1)
            for dtype in cfg.compared():
                found[f"costs-{dtype}"] = functools.partial(self._compare, dtype)
                found[f"sae-{dtype}"] = functools.partial(self._train, dtype, cfg.seed)
                found[f"patching-{dtype}"] = functools.partial(self._patch, dtype)
            found["precision"] = self._table

        skipped = {"sae": cfg.skip_sae, "patching": cfg.skip_patching}
        return {name: part for name, part in found.items() if not skipped.get(name.split("-")[0])}

    def _do(self, name: str, part: Part) -> None:
        begin = time.monotonic()
        try:
            with self.meter(self.model) as peak:
                result = part(name)
        except ValueError as refusal:
            self.left_out[name] = str(refusal)
            self.exit_code = self.exit_code or getattr(refusal, "exit_code", BAD_INPUT)
            return
        self.done[name] = {
            "result": result,
            "seconds": time.monotonic() - begin,
            "peak_bytes": peak.peak_bytes,
        }

    def _in(self, dtype: str) -> Decoder:
        """The model as it computes in a precision."""
        return self.model if dtype == self.cfg.dtype else at_precision(self.model, dtype)

    def _require_finite(self, model: Decoder, rows: Rows) -> None:
        require_finite(model, rows, self.cfg.chunk, self.layers[-1])

    def _check(self, model: Decoder) -> None:
        """Find out in the first seconds whether a precision overflows."""
        tokens_BT, doc_ids_BT = batch(self.samples, 0, self.cfg.batch_size)
        self._require_finite(model, Rows(tokens_BT[:, :PROBE], doc_ids_BT[:, :PROBE]))

    def _measure(self, name: str) -> dict:
        found = statistics(self.model, self.samples, self.cfg, self.cfg.batch_size, name)
        if not all(totals.is_finite() for totals in found.values()):
            for rows in batches(self.samples, self.cfg.batch_size):
                self._require_finite(self.model, rows)
        return {layer: totals.result()._asdict() for layer, totals in found.items()}

    def _look_back(self, name: str) -> dict:
        found = distances(self.model, self.samples, self.cfg, self.cfg.batch_size, name)
        return {layer: totals.result()._asdict() for layer, totals in found.items()}

    @functools.cached_property
    def _pairs(self) -> Pairs:
        return prompt_pairs(self.samples, self.cfg, self.cfg.seed)

    def _patch(self, dtype: str, name: str) -> dict:
        cfg = self.cfg
        prompts = Patching(
            self._in(dtype),
            self._pairs,
            rows=cfg.batch_size,
            most_spans=cfg.spans,
            chunk=cfg.chunk,
        )
        effects = prompts.effects(self.layers)
        self._effects[dtype] = effects
        return effects.record()

    def _train(self, dtype: str, seed: int, name: str) -> dict:
        model = self._in(dtype)
        return {layer: self._train_layer(model, seed, name, layer) for layer in self.layers}

    def _train_layer(self, model: Decoder, seed: int, name: str, layer: int) -> dict:
        what = f"{name}, layer {layer}"
        batch_size = self.cfg.batch_size
        trainer = train_autoencoder(model, self.samples, self.cfg, layer, batch_size, seed, what)
        durable.make_folder(self.folder)
        with durable.replacing(self._file(name, layer)) as temporary:
            write_tensors(temporary, dict(trainer.autoencoder.state_dict()))
        return autoencoder_record(trainer)

    def _file(self, name: str, layer: int) -> Path:
        """Where the autoencoder of a layer is."""
        return self.folder / f"{name}-{layer:02}.safetensors"

    def _autoencoder(self, name: str, layer: int) -> Autoencoder:
        """That of a part that has ended."""
        width = self.model.config.hidden_size
        device = self.model.embed.weight.device
        found = Autoencoder(width, settings_of(self.cfg), device)
        found.load_state_dict(read_tensors(self._file(name, layer)))
        return found

    def _compare(self, dtype: str, name: str) -> dict:
        other = self._in(dtype)
        self._check(other)
        autoencoders = {}
        if "sae" in self.done:
            autoencoders = {layer: self._autoencoder("sae", layer) for layer in self.layers}
        found = costs(
            self.model,
            other,
            self.samples,
            self.cfg,
            self.cfg.batch_size,
            autoencoders,
            name,
        )
        self._costs[dtype] = found
        return {layer: cost._asdict() for layer, cost in found.items()}

    def _table(self, name: str) -> dict:
        """The table of all precisions, from the parts before."""
        found = []
        for dtype, layers in self._costs.items():
            circuits = None
            if {dtype, self.cfg.dtype} <= self._effects.keys():
                circuits = compare_effects(self._effects[self.cfg.dtype], self._effects[dtype])
            found.append(PrecisionCost(dtype, layers, self._matches(f"sae-{dtype}"), circuits))
        table = PrecisionTable(tuple(found), self._matches("sae-floor"))
        return table.record() | {"lines": table.lines()}

    def _matches(self, name: str) -> dict[int, Match]:
        """How much of the dictionaries of --dtype those of another part have, by layer; none if one
        of the parts was skipped or left out.
        """
        if not {"sae", name} <= self.done.keys():
            return {}
        return {layer: self._match(name, layer) for layer in self.layers}

    def _match(self, name: str, layer: int) -> Match:
        own = self._autoencoder("sae", layer)
        other = self._autoencoder(name, layer)
        return dictionary_match(own.directions, other.directions)
