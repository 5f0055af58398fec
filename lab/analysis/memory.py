"""The memory of an analysis, predicted: the functions of lab/analysis run on fake tensors, one
part after the other; and a meter of what a part really takes.

Every layer is like the others, so a peak is affine in their number and in the number of those that
are looked at. Layers behind the last of those only hold their weights. Sizes are bytes unless a
name says GiB; GiB = 2^30 bytes.
"""

import contextlib
import dataclasses
import functools
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from base.flags import PRECISIONS
from footprint.cards.device import HALF_SINCE, Card
from footprint.pretend.places import is_on_meta
from footprint.record.tracker import NO_STORAGE, Tracker
from footprint.steps.prediction import trace_two_steps
from footprint.steps.search import Found, Lever, placed
from lab.analysis import run
from lab.analysis.autoencoder import Autoencoder
from lab.analysis.config import AnalysisConfig, Measures
from lab.analysis.distance import has_distances
from lab.analysis.patching import PATCHED, Pairs, Patching
from lab.analysis.precision import at_precision
from lab.analysis.samples import Rows
from longhaul import kernels
from longhaul.kinds import attention_kind
from longhaul.planner.advise import Task, smaller_batches
from longhaul.planner.needs import CUDA_CONTEXT_GIB, PROCESS_GIB
from longhaul.planner.plan import flag_of
from longhaul.planner.simulate import on_target
from longhaul.planner.workspace import Workspaces
from model import GIB, Decoder, ModelConfig

FEWER, LAYERS = 3, 4  # layers of the simulations from which a deeper model's peak follows
CHUNK = 4096  # tokens of a part, if rows shall pass in parts


# ---- what a part really takes


class PeakTracker(Tracker):
    """A tracker that keeps the bytes alive and their peak, and no history of them."""

    def __init__(self):
        super().__init__(Workspaces("cpu"))
        self.live = 0
        self.peak = 0

    def _event(self, size: int, identity: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)
        if size < 0 and identity != NO_STORAGE and identity not in self.held:
            self.trace.storages.pop(identity, None)

    def _record(self, func, args, outputs) -> None:
        if any(map(is_on_meta, tree_leaves(outputs))):  # nothing is allocated
            return
        super()._record(func, args, outputs)
        for _, extra, _ in self.trace.workspaces:
            self.peak = max(self.peak, self.live + extra)
        self.trace.workspaces.clear()


@dataclass
class Meter:
    """The peak of the part that has ended, weights included."""

    peak_bytes: int | None = None


@contextlib.contextmanager
def meter(model: Decoder, device: torch.device) -> Iterator[Meter]:
    """What CUDA's allocator reports, or a tracker's count of all storages on a CPU."""
    found = Meter()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield found
        found.peak_bytes = torch.cuda.max_memory_allocated(device)
        return

    tracker = PeakTracker()
    for parameter in model.parameters():
        tracker.register(parameter, "parameter")
    with tracker:
        yield found
    found.peak_bytes = tracker.peak


# ---- what it should take


@dataclass(frozen=True)
class Analysed:
    """What is analysed: all that decides a peak. `config` has the precision.

    longest  tokens of the longest document of a row; 0: each row is one document. Rows that pass in
             parts pass document by document, so that this decides their peak
    """

    config: ModelConfig
    measures: Measures
    batch_size: int
    context_length: int
    longest: int = 0
    checkpoint: str = ""
    data: str = ""
    device: str = "cuda"

    def words(self) -> str:
        """What is analysed, in words."""
        layers = len(self.measures.chosen(self.config))
        parts = f" in parts of {self.measures.chunk:,}" if self.measures.chunk else ""
        return (
            f"{layers} layer(s), {self.batch_size} x {self.context_length:,} tokens{parts}, "
            f"{self.config.compute_dtype}"
        )

    def shallow(self, layers: int, chosen: int) -> "Analysed":
        """The same with other numbers of layers, the last of which are looked at."""
        return dataclasses.replace(
            self,
            config=dataclasses.replace(self.config, num_layers=layers),
            measures=dataclasses.replace(
                self.measures,
                layers=",".join(str(layer) for layer in range(layers - chosen, layers)),
            ),
        )

    def measure(self, **settings) -> "Analysed":
        """The same with other measures."""
        measures = dataclasses.replace(self.measures, **settings)
        return dataclasses.replace(self, measures=measures)

    def command(self) -> str:
        """The shell command: what differs from the defaults."""
        checkpoint = shlex.quote(self.checkpoint) if self.checkpoint else "DIR"
        words = [f"python -m lab.run_full_analysis --checkpoint {checkpoint}"]
        if self.data:
            words.append(f"--data {shlex.quote(self.data)}")
        words += [
            f"--context_length {self.context_length}",
            f"--batch_size {self.batch_size}",
            f"--dtype {self.config.compute_dtype}",
            f"--device {self.device}",
        ]
        for spec in dataclasses.fields(self.measures):
            value = getattr(self.measures, spec.name)
            if value != spec.default:
                words.append(flag_of(spec, value))
        return " ".join([*words, "--out analysis"])

    def breakdown(self) -> dict[str, int]:
        """What the peak is made of; the sum is the live peak."""
        found = planned(self)
        return {
            "weights": self.weights,
            f"highest part: {found.largest}": found.peaks[found.largest] - self.weights,
        }

    @property
    def weights(self) -> int:
        """Bytes of the model."""
        return self.config.num_params() * self.config.dtype.itemsize

    @property
    def last(self) -> int:
        """The deepest layer that is looked at."""
        return max(self.measures.chosen(self.config))


class FakeSamples:
    """Two batches of rows without values, of documents of `longest` tokens; by default every row is
    one document.
    """

    def __init__(self, rows: int, context_length: int, longest: int = 0):
        self.count = 2 * rows
        self.context_length = context_length
        # an array, because sizes of documents are read from it, and no fake tensor has values
        self.doc_ids_BT = None
        if longest:
            doc_ids_T = np.arange(context_length) // longest
            self.doc_ids_BT = np.tile(doc_ids_T, (rows, 1))

    def __len__(self) -> int:
        return self.count

    def rows(self, first: int, last: int) -> Rows:
        """Rows of zeros."""
        shape = (last - first, self.context_length)
        tokens_BT = torch.zeros(shape, dtype=torch.long, device="cpu")
        return Rows(tokens_BT, self.doc_ids_BT)


class FakePrompts(Patching):
    """Prompts without values, which a model tells apart all the same."""

    def _mean_difference(self, tokens_BT: Tensor) -> float:
        super()._mean_difference(tokens_BT)
        return float(tokens_BT is self.pairs.clean_BT)

    def _patched_rows(
        self, pairs: Pairs, differs_2BT: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Those of one forward from position 0, which is as large as any."""
        B, T = pairs.clean_BT.shape
        R = min(self.rows, len(PATCHED) * B * len(self.columns))
        rows_R3 = torch.zeros((R, 3), dtype=torch.long, device="cpu")
        yield rows_R3, torch.zeros((R, T), dtype=torch.bool, device="cpu"), 0


def built(config: ModelConfig, device: str) -> Decoder:
    """The model, its weights in config.compute_dtype."""
    with torch.device("meta"):
        skeleton = kernels.decoder(config).to(config.dtype)
    model = skeleton.to_empty(device=device)
    model.tie_weights()
    return model


def simulated(asked: Analysed, target: str, part: Callable) -> int:
    """Live bytes at the peak of a part: part(model, samples, asked)."""
    rows = min(asked.batch_size, asked.measures.num_samples)
    # the activations of all parts of a row are kept
    every_tile = asked.measures.chunk > 0 and part in (autoencoder, patching)
    longest = asked.longest if asked.measures.chunk else 0
    samples = FakeSamples(rows, asked.context_length, longest)

    def step(model: Decoder) -> None:
        part(model, samples, asked)

    with on_target(target=target, every_tile=every_tile) as tracker:
        build = functools.partial(built, asked.config, target)
        trace_two_steps(tracker, build, step, first=lambda model: None)
    if part is loading:
        return tracker.first_peak
    peak, _ = tracker.trace.peak()
    return peak


def loading(model: Decoder, samples: FakeSamples, asked: Analysed) -> None:
    """Nothing more than the model, whose tied head has memory of its own until it is tied."""


def statistics(model: Decoder, samples: FakeSamples, asked: Analysed) -> None:
    """The part of that name."""
    run.statistics(model, samples, asked.measures, asked.batch_size)


def autoencoder(model: Decoder, samples: FakeSamples, asked: Analysed) -> None:
    """The training of one autoencoder: a part of the activations, then a step with dead latents."""
    few = dataclasses.replace(asked.measures, sae_tokens=1)
    layer = asked.last
    trainer = run.train_autoencoder(model, samples, few, layer, asked.batch_size)
    x_ND = run.activations(model, samples, layer, 0, asked.batch_size, asked.measures.chunk)
    step = min(trainer.settings.step_tokens, len(x_ND))
    trainer.step(x_ND[torch.arange(step)], revive=True)


def distances(model: Decoder, samples: FakeSamples, asked: Analysed) -> None:
    """The part of that name, with every query."""
    every = dataclasses.replace(asked.measures, queries=0)
    run.distances(model, samples, every, asked.batch_size)


def patching(model: Decoder, samples: FakeSamples, asked: Analysed) -> None:
    """A layer's patches of one batch of prompts."""
    measures = asked.measures
    rows = min(asked.batch_size, measures.prompts)
    prompts_BT = torch.zeros((rows, measures.prompt_length), dtype=torch.long, device="cpu")
    token_B = torch.zeros(rows, dtype=torch.long, device="cpu")
    pairs = Pairs(prompts_BT, prompts_BT.clone(), token_B, token_B.clone())
    found = FakePrompts(
        model,
        pairs,
        rows=asked.batch_size,
        most_spans=measures.spans,
        chunk=measures.chunk,
    )
    found.effects([0])


def costs(model: Decoder, samples: FakeSamples, asked: Analysed) -> None:
    """What is compared: the largest precision, which needs most."""
    measures = asked.measures
    width = model.config.hidden_size
    autoencoders = {}
    if not measures.skip_sae:
        for layer in measures.chosen(model.config):
            autoencoders[layer] = Autoencoder(width, run.settings_of(measures), "cpu")
    other = at_precision(model, measures.compared()[0])
    run.costs(model, other, samples, measures, asked.batch_size, autoencoders)


PARTS: dict[str, Callable] = {
    "loading": loading,
    "patching": patching,
    "statistics": statistics,
    "distances": distances,
    "sae": autoencoder,
    "costs": costs,
}


def names(asked: Analysed) -> list[str]:
    """The parts that are measured."""
    measures = asked.measures
    skipped = {
        "distances": not has_distances(asked.config),
        "patching": measures.skip_patching,
        "sae": measures.skip_sae,
        "costs": not measures.compare,
    }
    return [name for name in PARTS if not skipped.get(name)]


# the forward of these ends at the last layer that is looked at
ENDS_EARLY = ("statistics", "distances", "sae", "costs")


@functools.cache
def peak(asked: Analysed, target: str, name: str) -> int:
    """Live bytes at the peak of a part, weights included."""
    if name not in ENDS_EARLY:
        return _from_few_layers(asked, target, PARTS[name])

    first = dataclasses.replace(asked.config, num_layers=asked.last + 1)
    read = dataclasses.replace(asked, config=first)
    return _from_few_layers(read, target, PARTS[name]) + asked.weights - read.weights


def _from_few_layers(asked: Analysed, target: str, part: Callable) -> int:
    """The peak of a part whose forward runs all layers."""
    layers = asked.config.num_layers
    chosen = len(asked.measures.chosen(asked.config))
    if layers <= LAYERS:
        return simulated(asked, target, part)

    base = simulated(asked.shallow(LAYERS, 1), target, part)
    per_layer = base - simulated(asked.shallow(FEWER, 1), target, part)
    found = base + (layers - LAYERS) * per_layer
    if chosen > 1:
        per_chosen = simulated(asked.shallow(LAYERS, 2), target, part) - base
        found += (chosen - 1) * per_chosen
    return found


def peaks(asked: Analysed, target: str) -> dict[str, int]:
    """Live bytes at the peak of each part."""
    return {name: peak(asked, target, name) for name in names(asked)}


@dataclass(frozen=True)
class Plan:
    """What an analysis needs on a device."""

    peaks: dict[str, int]
    target: str

    @property
    def largest(self) -> str:
        """The part with the highest peak."""
        return max(self.peaks, key=lambda name: self.peaks[name])

    @property
    def gib(self) -> float:
        """What the device must hold: live bytes, and what no tensor shows."""
        hidden = PROCESS_GIB if self.target == "cpu" else CUDA_CONTEXT_GIB
        return self.peaks[self.largest] / GIB + hidden

    def table(self) -> str:
        """The peaks, a line each."""
        rows = []
        for name, size in self.peaks.items():
            mark = "  (highest)" if name == self.largest else ""
            rows.append(f"  {name:<20}{size / GIB:>9.2f} GiB{mark}")
        return "\n".join(rows)

    def line(self) -> str:
        """The plan in words."""
        each = ", ".join(f"{name} {size / GIB:.2f}" for name, size in self.peaks.items())
        return f"{self.gib:.2f} GiB planned; tensors at the peak of each part (GiB): {each}"

    def check(self, available_gib: float) -> None:
        """ValueError if that is more than there is."""
        if self.gib > available_gib:
            raise ValueError(
                f"{self.largest} needs {self.gib:.1f} GiB, and {available_gib:.1f} are available: "
                "give a smaller --batch_size, or --chunk 4096, or see python profile_memory.py "
                "--advise --task analysis"
            )


def planned(asked: Analysed) -> Plan:
    """The plan of an analysis on its device."""
    target = "cpu" if asked.device == "cpu" else "cuda"
    return Plan(peaks(asked, target), target)


def plan(
    cfg: AnalysisConfig, config: ModelConfig, context_length: int, target: str, longest: int = 0
) -> Plan:
    """The plan of an analysis on "cpu" or "cuda". `longest` as in Analysed."""
    measures = measures_of(cfg)
    return planned(
        Analysed(config, measures, cfg.batch_size, context_length, longest, device=target)
    )


def measures_of(cfg: Measures) -> Measures:
    """What is measured, without the other settings."""
    return Measures(**{spec.name: getattr(cfg, spec.name) for spec in dataclasses.fields(Measures)})


# ---- what may be changed


def in_parts(asked: Analysed) -> Analysed:
    """Rows over the KV cache, if they are long enough and their attention allows it."""
    allowed = attention_kind(asked.config).prompt_in_parts
    if asked.measures.chunk or not allowed or asked.context_length <= CHUNK:
        return asked
    return asked.measure(chunk=CHUNK)


def fewer_layers(asked: Analysed, count: int) -> Analysed:
    """Only so many of the layers that are looked at, from the first to the last, evenly."""
    chosen = asked.measures.chosen(asked.config)
    kept = np.linspace(0, len(chosen) - 1, count).round().astype(int)
    return asked.measure(layers=",".join(str(chosen[index]) for index in kept))


def changes(asked: Analysed, card: Card) -> Iterator[Lever]:
    """Half precision, smaller batches, what is measured otherwise, in the end fewer layers, from
    the first to the last, and the CPU.
    """
    # what is compared begins with the model in float32
    if asked.config.compute_dtype == "float32" and not asked.measures.compare:
        half = "bf16" if card.cc >= HALF_SINCE else "fp16"
        yield Lever(f"{half} instead of fp32", functools.partial(in_precision, name=half))
    for rows in smaller_batches(asked.batch_size):
        yield Lever(f"micro-batches of {rows}", functools.partial(in_batches, rows=rows))
    yield Lever(f"rows in parts of {CHUNK:,}", in_parts)
    yield Lever("no sparse autoencoder (--skip-sae)", lambda asked: asked.measure(skip_sae=True))
    layers = len(asked.measures.chosen(asked.config))
    while layers > 1:
        layers //= 2
        yield Lever(f"{layers} layers (--layers)", functools.partial(fewer_layers, count=layers))
    yield Lever("the CPU", lambda asked: dataclasses.replace(asked, device="cpu"))


def in_precision(asked: Analysed, name: str) -> Analysed:
    """With the weights and activations of a precision."""
    config = dataclasses.replace(asked.config, compute_dtype=PRECISIONS[name])
    return dataclasses.replace(asked, config=config)


def in_batches(asked: Analysed, rows: int) -> Analysed:
    """With so many rows at once."""
    return dataclasses.replace(asked, batch_size=rows)


# ---- for --advise


def judged(room: int, asked: Analysed) -> Found:
    """The highest peak of the simulated parts, next to a device of `room` bytes."""
    found = planned(asked)
    return placed(found.peaks[found.largest], int(found.gib * GIB), room)


def notes(asked: Analysed, card: Card) -> list[str]:
    """What the figures assume."""
    if card.cc >= HALF_SINCE:
        return []
    return [
        "in fp16 the figures assume FlashAttention, which needs capability 8.0: the kernel of "
        "this card also holds keys and values for each query head"
    ]


TASK = Task(judged, changes, notes)
