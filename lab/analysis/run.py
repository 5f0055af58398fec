"""An analysis from its settings to its results, part by part.

Each part is a function of a model, samples and settings, so that the planner runs the same ones on
fake tensors. `Analysis` runs those that are not on the disk yet, and keeps each there.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from data.progress import bar
from lab.analysis import autoencoder
from lab.analysis.activations import Consume, require_finite, stream
from lab.analysis.activations import run as forward
from lab.analysis.autoencoder import Autoencoder, Match, Trainer, dictionary_match
from lab.analysis.config import AnalysisConfig, Measures
from lab.analysis.distance import CHUNK, LayerDistances, measured
from lab.analysis.parts import Partial, Parts, flattened, nested
from lab.analysis.patching import CannotCopy, Effects, Pairs, Patching, copy_pairs, joined
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
from lab.analysis.statistics import LayerStatistics, Magnitude
from model import Decoder, ModelConfig

MOST_TOKENS = 1_000_000  # of the texts in which copies are looked for
PROBE = 4096  # tokens of the first rows, which show at once whether a precision overflows


class Source(Protocol):
    """Rows of tokens, such as Samples."""

    context_length: int

    def __len__(self) -> int:
        """How many there are."""

    def rows(self, first: int, last: int) -> Rows:
        """Rows first .. last - 1."""


class Peak(Protocol):
    """A meter of memory, after it was read."""

    peak_bytes: int | None  # None if nobody measures


Meter = Callable[[Decoder], contextlib.AbstractContextManager[Peak]]


class Totals(Protocol):
    """What is summed over batches, for a layer."""

    def state_dict(self) -> dict:
        """All of it, for a file."""

    def load_state_dict(self, state: dict) -> None:
        """Continue from that."""


def over_batches(
    what: str,
    firsts: Sequence[int],
    totals: Mapping[int, Totals],
    add: Callable[[int], None],
    partial: Partial | None,
) -> None:
    """Call add(first), which adds to the totals by layer, for each batch, whose first row is given.

    partial: from which it continues, and where it saves its progress; without one nothing is
    shown.
    """
    if partial is None:
        for first in firsts:
            add(first)
        return

    done = _continue(totals, partial.load())
    with bar(what, len(firsts), done) as progress:
        for first in firsts[done:]:
            add(first)
            progress.update()
            if partial.is_due():
                states = {str(layer): of_layer.state_dict() for layer, of_layer in totals.items()}
                partial.save(flattened({"batches": progress.n} | states))


def _continue(totals: Mapping[int, Totals], stored: Mapping[str, Tensor]) -> int:
    """Fill the totals, and return how many batches they have."""
    if not stored:
        return 0
    found = nested(stored)
    for layer, of_layer in totals.items():
        of_layer.load_state_dict(found[str(layer)])
    return found["batches"]


def firsts_of(samples: Source, batch_size: int) -> range:
    """The first row of each batch."""
    return range(0, len(samples), batch_size)


def batch(samples: Source, first: int, batch_size: int) -> Rows:
    """The batch that begins with row `first`; the last one may be smaller."""
    return samples.rows(first, min(first + batch_size, len(samples)))


# ---- statistics


def statistics(
    model: Decoder,
    samples: Source,
    measures: Measures,
    batch_size: int,
    partial: Partial | None = None,
) -> dict[int, LayerStatistics | Magnitude]:
    """The totals of each layer's residual stream over all samples. Of the last layer, which every
    overflow reaches, the magnitude is there even if it is not among those that are looked at.
    """
    device = model.embed.weight.device
    width = model.config.hidden_size
    last = model.config.num_layers - 1
    totals: dict[int, LayerStatistics | Magnitude] = {last: Magnitude(device)}
    totals |= {layer: LayerStatistics(width, device) for layer in measures.chosen(model.config)}

    def consume(layer: int, site: str, x_BtD: Tensor) -> None:
        totals[layer].add(x_BtD)

    def add(first: int) -> None:
        rows = batch(samples, first, batch_size)
        read(model, rows, tuple(totals), consume, measures.chunk)

    over_batches("statistics", firsts_of(samples, batch_size), totals, add, partial)
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


def check_finite(
    found: Mapping[int, LayerStatistics | Magnitude],
    model: Decoder,
    samples: Source,
    measures: Measures,
    batch_size: int,
) -> str:
    """ValueError if the numbers of a layer that is looked at overflowed: it names the first layer
    of all in which they do, which need not be one of those. What overflows behind them is returned
    in words, which are empty if nothing does.
    """
    if all(totals.is_finite() for totals in found.values()):
        return ""
    layers = measures.chosen(model.config)
    may_refuse = not all(found[layer].is_finite() for layer in layers)
    words = ""
    for first in firsts_of(samples, batch_size):
        rows = batch(samples, first, batch_size)
        words = require_finite(model, rows, measures.chunk, layers[-1]) or words
        if words and not may_refuse:
            break
    return words


# ---- how far back heads look


def distances(
    model: Decoder,
    samples: Source,
    measures: Measures,
    batch_size: int,
    partial: Partial | None = None,
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

    def add(first: int) -> None:
        rows = batch(samples, first, batch_size)
        with measured(model, totals):
            last = max(totals)
            forward(model, rows.tokens_BT, last, doc_ids=rows.doc_ids_BT, chunk=measures.chunk)

    over_batches("distances", firsts_of(samples, batch_size), totals, add, partial)
    return totals


# ---- patching


def prompt_pairs(samples: Samples, measures: Measures, seed: int) -> Pairs:
    """Prompts from the copies in the samples' split. ValueError if it has none."""
    texts = samples.texts(measures.prompt_length, MOST_TOKENS)
    return copy_pairs(texts, measures.prompt_length, measures.prompts, seed)


def patching(model: Decoder, pairs: Pairs, measures: Measures, rows: int) -> Patching:
    """What patches the prompts, layer by layer. CannotCopy if the model does not tell clean from
    corrupt ones.
    """
    return Patching(model, pairs, rows=rows, most_spans=measures.spans, chunk=measures.chunk)


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
    file: Path | None = None,
) -> Trainer:
    """The autoencoder of a layer, trained on the samples again and again; it continues from `file`
    and keeps that up. Without one nothing is shown.
    """
    settings = settings_of(measures, seed)
    trainer = Trainer(model.config.hidden_size, settings, model.embed.weight.device)
    firsts = firsts_of(samples, batch_size)

    def part(number: int) -> Tensor:
        first = firsts[number % len(firsts)]
        return activations(model, samples, layer, first, batch_size, measures.chunk)

    if file is None:
        autoencoder.fit(trainer, part)
        return trainer
    with bar(f"autoencoder of layer {layer}", settings.tokens) as progress:
        autoencoder.fit(trainer, part, file, lambda one: progress.update(one.tokens - progress.n))
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
    partial: Partial | None = None,
) -> dict[int, Cost]:
    """What the precision of `other`, which has the same weights, costs the residual stream of each
    layer over all samples.
    """
    sums = sums_of(measures.chosen(model.config), autoencoders, model.embed.weight.device)

    def add(first: int) -> None:
        rows = batch(samples, first, batch_size)
        compare_rows(model, other, rows, sums, measures.chunk)

    what = f"costs of {other.config.compute_dtype}"
    over_batches(what, firsts_of(samples, batch_size), sums, add, partial)
    return {layer: of_layer.cost() for layer, of_layer in sums.items()}


# ---- all parts


Part = Callable[[], dict]  # makes the record of a part


class Analysis:
    """The parts of an analysis, each run unless it is on the disk.

    pairs   the prompts that are patched, if any
    load    makes the model in a precision by its name in torch
    meter   measures the peak of memory while a part runs
    """

    def __init__(
        self,
        cfg: AnalysisConfig,
        config: ModelConfig,
        samples: Source,
        pairs: Pairs | None,
        load: Callable[[str], Decoder],
        parts: Parts,
        meter: Meter,
    ):
        self.cfg = cfg
        self.config = config
        self.samples = samples
        self.pairs = pairs
        self.load = load
        self.parts = parts
        self.meter = meter
        self.notes: dict[str, str] = {}  # of parts
        self.left_out: dict[str, str] = {}  # why, by the kind of part

    @functools.cached_property
    def model(self) -> Decoder:
        """The model in the precision of --dtype."""
        return self.load(self.cfg.dtype)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that are looked at."""
        return self.cfg.chosen(self.config)

    def run(self) -> dict[str, dict]:
        """The records of all parts: {"result", "seconds", "peak_bytes", "note"} of each."""
        if self._left():
            self._check()
        for name, part in self._left().items():
            self._do(name, part)
        return {name: self.parts.record(name) for name in self.todo()}

    def _left(self) -> dict[str, Part]:
        """The parts that are not on the disk."""
        todo = self.todo()
        return {name: part for name, part in todo.items() if self.parts.known(name) is None}

    def _check(self) -> None:
        """Find out in the first seconds what a part would meet after hours. ValueError if the first
        rows overflow in a precision, in layers that are looked at. Patching is left out if the
        model does not tell its prompts apart in each precision.
        """
        tokens_BT, doc_ids_BT = batch(self.samples, 0, self.cfg.batch_size)
        rows = tokens_BT[:, :PROBE], doc_ids_BT[:, :PROBE]
        for dtype in self.cfg.precisions() or (self.cfg.dtype,):
            model = self._at(dtype)
            words = require_finite(model, rows, self.cfg.chunk, self.layers[-1])
            if words:
                self.notes["statistics" if dtype == self.cfg.dtype else f"costs-{dtype}"] = words
            if not self.cfg.skip_patching:
                self._try_prompts(dtype)

    def _try_prompts(self, dtype: str) -> None:
        """Leave out patching, in all precisions, if there is nothing to patch in this one."""
        try:
            self._prompts(dtype)
        except CannotCopy as reason:
            self.left_out["patching"] = f"in {dtype} {reason}"
            self.cfg = dataclasses.replace(self.cfg, skip_patching=True)

    def todo(self) -> dict[str, Part]:
        """All parts by name, in their order."""
        found: dict[str, Part] = {}
        dtype = self.cfg.dtype
        if not self.cfg.skip_patching:
            found |= self._of_layers("patching", self._patching, dtype)
        found["statistics"] = self._statistics
        found["distances"] = self._distances
        if not self.cfg.skip_sae:
            found |= self._of_layers("sae", self._autoencoder, dtype, self.cfg.seed)
        if self.cfg.compare:
            found |= self._of_precisions()
        return found

    def _of_precisions(self) -> dict[str, Part]:
        """The parts of --compare."""
        found: dict[str, Part] = {}
        seed = self.cfg.seed
        if not self.cfg.skip_sae:
            found |= self._of_layers("sae-floor", self._autoencoder, self.cfg.dtype, seed + 1)
        for dtype in self.cfg.compared():
            found[f"costs-{dtype}"] = functools.partial(self._costs, dtype)
            if not self.cfg.skip_sae:
                found |= self._of_layers(f"sae-{dtype}", self._autoencoder, dtype, seed)
            if not self.cfg.skip_patching:
                found |= self._of_layers(f"patching-{dtype}", self._patching, dtype)
        return found | {"precision": self._precision}

    def _of_layers(self, kind: str, part: Callable[..., dict], *args: object) -> dict[str, Part]:
        """A part for each layer: part(name, layer, *args)."""
        found: dict[str, Part] = {}
        for layer in self.layers:
            name = name_of(kind, layer)
            found[name] = functools.partial(part, name, layer, *args)
        return found

    @functools.cache  # noqa: B019  (as long as the analysis itself)
    def _at(self, dtype: str) -> Decoder:
        """The model as it computes in a precision."""
        return self.model if dtype == self.cfg.dtype else at_precision(self.model, dtype)

    def _do(self, name: str, part: Part) -> None:
        begin = time.monotonic()
        with self.meter(self.model) as peak:
            result = part()
        record = {
            "result": result,
            "seconds": time.monotonic() - begin,
            "peak_bytes": peak.peak_bytes,
            "note": self.notes.pop(name, ""),
        }
        self.parts.keep(name, record)

    def _statistics(self) -> dict:
        partial = self.parts.partial("statistics")
        found = statistics(self.model, self.samples, self.cfg, self.cfg.batch_size, partial)
        words = check_finite(found, self.model, self.samples, self.cfg, self.cfg.batch_size)
        if words:
            self.notes["statistics"] = words
        return {str(layer): found[layer].result().record() for layer in self.layers}

    def _distances(self) -> dict:
        partial = self.parts.partial("distances")
        found = distances(self.model, self.samples, self.cfg, self.cfg.batch_size, partial)
        records = {}
        for layer, totals in found.items():
            profiles = totals.result()
            records[str(layer)] = {name: one.record() for name, one in profiles.items()}
        return records

    @functools.cache  # noqa: B019  (as long as the analysis itself)
    def _prompts(self, dtype: str) -> Patching:
        assert self.pairs is not None, "patching is not skipped"
        return patching(self._at(dtype), self.pairs, self.cfg, self.cfg.batch_size)

    def _patching(self, name: str, layer: int, dtype: str) -> dict:
        prompts = self._prompts(dtype)
        gains = prompts.gains()
        add = functools.partial(prompts.add, gains, layer)
        over_batches(name, prompts.starts(), {layer: gains}, add, self.parts.partial(name))
        return prompts.table([layer], prompts.effect(gains)[None]).record()

    def _autoencoder(self, name: str, layer: int, dtype: str, seed: int) -> dict:
        self.parts.begin()
        trainer = train_autoencoder(
            self._at(dtype),
            self.samples,
            self.cfg,
            layer,
            self.cfg.batch_size,
            seed,
            self.parts.file(name, "partial"),
        )
        self.parts.keep_tensors(name, dict(trainer.autoencoder.state_dict()))
        return autoencoder_record(trainer)

    def _costs(self, dtype: str) -> dict:
        cfg = self.cfg
        autoencoders = {}
        if not cfg.skip_sae:
            for layer in self.layers:
                autoencoders[layer] = self._stored_autoencoder("sae", layer)
        partial = self.parts.partial(f"costs-{dtype}")
        found = costs(
            self.model,
            self._at(dtype),
            self.samples,
            cfg,
            cfg.batch_size,
            autoencoders,
            partial,
        )
        return {str(layer): cost._asdict() for layer, cost in found.items()}

    def _stored_autoencoder(self, kind: str, layer: int) -> Autoencoder:
        """A finished autoencoder."""
        device = self.model.embed.weight.device
        found = Autoencoder(self.config.hidden_size, settings_of(self.cfg), device)
        found.load_state_dict(self.parts.tensors(name_of(kind, layer)))
        return found

    def _precision(self) -> dict:
        """The table of all precisions, from the parts before."""
        floors = {}
        if not self.cfg.skip_sae:
            floors = self._matches("sae-floor")
        found = [self._cost_of(dtype) for dtype in self.cfg.compared()]
        table = PrecisionTable(tuple(found), floors)
        return table.record() | {"lines": table.lines()}

    def _cost_of(self, dtype: str) -> PrecisionCost:
        records = self.parts.record(f"costs-{dtype}")["result"]
        layers = {int(layer): Cost(**record) for layer, record in records.items()}
        matches = {}
        if not self.cfg.skip_sae:
            matches = self._matches(f"sae-{dtype}")
        circuits = None
        if not self.cfg.skip_patching:
            effects = [self._effects(kind) for kind in ("patching", f"patching-{dtype}")]
            circuits = compare_effects(*effects)
        return PrecisionCost(dtype, layers, matches, circuits)

    def _matches(self, kind: str) -> dict[int, Match]:
        """How much of the dictionaries of float32 others have."""
        return {
            layer: dictionary_match(
                self._stored_autoencoder("sae", layer).directions,
                self._stored_autoencoder(kind, layer).directions,
            )
            for layer in self.layers
        }

    def _effects(self, kind: str) -> Effects:
        """The table of all layers."""
        tables = [self.parts.record(name_of(kind, layer))["result"] for layer in self.layers]
        return joined(tables)


def name_of(kind: str, layer: int) -> str:
    """The name of a layer's part."""
    return f"{kind}-{layer:02}"
