"""Does a model use its context? `python -m scripts.evaluate --checkpoint runs/quickstart`.

It prints the validation loss, the loss by position, the context gain, retrieval by length and the
memory that it took, next to the plan. The model is a checkpoint of longhaul or a Hugging Face
folder. `--against` compares two of them over the same documents and items. One process
evaluates. docs/EVALUATION.md says what the figures mean.
"""

import dataclasses
import math
import re
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from base import durable
from base.flags import PRECISIONS, precision
from base.machine import peak_memory_gib
from base.untrusted import read_json
from data.corpus import prepare_embedded
from data.dataset import Dataset
from data.load_tokenizer import Ids
from data.mixture import EMBEDDED, Corpus, open_corpora
from data.progress import bar, duration
from longhaul import cli, flops, lengths
from longhaul.checkpoint import start
from longhaul.checkpoint.format import Checkpoint
from longhaul.cli import flag, known_words
from longhaul.config import EVALS, SHORTEST_EVAL, TrainConfig
from longhaul.dist import World, named_device
from longhaul.evals.compare import Comparison
from longhaul.evals.measures import Asked, Measures, Report
from longhaul.evals.position import Losses
from longhaul.evals.score import Item, ModelScorer, Scorer, Scores, text_sizes
from longhaul.evals.tasks import ALL_TASKS, TASKS
from longhaul.kinds import attention_kind
from longhaul.parallel import apply
from longhaul.planner import evaluation as planner
from longhaul.planner.plan import available_gib
from model import Decoder, ModelConfig
from scripts.source import Source, SourceConfig, check_ids

COLUMNS = 100  # of the table
INDENT = 19  # of its figures


# ---- the command line


@dataclass(frozen=True)
class EvaluateConfig(SourceConfig):
    """The flags."""

    dtype: str = cli.changed_flag(
        SourceConfig, "dtype", default="", help="compute precision; empty: the run's own"
    )
    against: str = flag("", "a second model, compared with the first pair by pair")
    data: str = flag(
        "", "folder made by data.prepare, or several with their shares; empty: the run's own"
    )
    evals: str = flag("", f"what to measure, of {','.join(EVALS)}; empty: all that the data allow")
    context_length: int = flag(0, "tokens of a validation row; 0: as in training", at_least=0)
    batches: int = flag(
        32, "rows of each validation split, at most, for losses and for gain", at_least=1
    )
    lengths: str = flag(
        "",
        "retrieval: tokens of a row, with commas; empty: powers of two from 1,024 to "
        "--context_length",
    )
    tasks: str = flag("", f"retrieval: of {','.join(ALL_TASKS)}; empty: {','.join(TASKS)}")
    items: int = flag(32, "retrieval: items of each task at each length", at_least=1)
    chunk: str = flag(
        "auto",
        "rows pass in parts of so many tokens over the KV cache; 0: whole; auto: whole if memory "
        "holds that",
    )
    output: str = flag(
        "",
        "write eval.json, all figures and those by document, and heatmap.svg, retrieval by depth "
        "and length, into this folder",
    )

    def __post_init__(self):
        super().__post_init__()
        if self.context_length == 1:
            raise ValueError(
                "--context_length 1 is out of range: give at least 2, or 0 for the context of "
                "training"
            )
        if self.chunk != "auto" and not re.fullmatch(r"\d{1,9}", self.chunk):
            raise ValueError(
                f"--chunk {self.chunk[:40]} is no number of tokens: give auto, 0 or more"
            )
        for name in ("lengths", "tasks"):
            if getattr(self, name) and "retrieval" not in self.names:
                raise ValueError(
                    f"--{name} is of retrieval, which --evals leaves out: drop it, or add retrieval"
                )

    @property
    def names(self) -> tuple[str, ...]:
        """The measures; ValueError for one that is not known."""
        return known_words("--evals", self.evals, EVALS) if self.evals else EVALS

    def asked(self, opened: "Opened") -> Asked:
        """What is measured; ValueError for tasks and lengths that cannot be. Losses by position
        come from the pass of the validation loss.
        """
        context = self.context_length or opened.context
        tasks = tuple(TASKS)
        if self.tasks:
            tasks = known_words("--tasks", self.tasks, tuple(ALL_TASKS))
        rows = lengths.doublings(SHORTEST_EVAL, context)
        if self.lengths:
            rows = lengths.numbers("--lengths", self.lengths)
        return Asked(
            context_length=context,
            names=tuple(dict.fromkeys("loss" if n == "position" else n for n in self.names)),
            rows=self.batches,
            lengths=rows,
            tasks=tasks,
            items=self.items,
            vocab_size=opened.config.vocab_size,
            seed=opened.cfg.seed,
            key_tokens=True,
            documents=documents_read(opened.cfg, context),
        )


def main(args: list[str] | None = None):
    """Evaluate; bad input ends with one line and exit code 2."""
    cli.run(EvaluateConfig, evaluate, args, "scripts.evaluate", __doc__.splitlines()[0])


def evaluate(given: EvaluateConfig):
    """Measure, print the table, and write the files."""
    device = named_device(given.device)
    first = Opened.of(given.checkpoint, given.dtype, device)
    models = [first.read_with(given.attention_type, given.blocks)]
    if given.against:
        models.append(Opened.of(given.against, given.dtype, device))
        check_pair(*models)
    corpora = open_data(models[0], given.data)
    for corpus in corpora:
        check_context(given.context_length, corpus.dataset)
        for opened in models:
            check_data(opened, corpus.dataset)

    asked = given.asked(models[0])
    measures = Measures(corpora, asked)
    require(measures, given)
    tokens = longest_row(asked)
    plans = [planned(opened, tokens, given.chunk, device) for opened in models]
    for opened in models:
        note_if_beyond(opened, tokens)
    if given.output:
        make_output(Path(given.output))

    results = []
    for opened, plan in zip(models, plans, strict=True):
        print(opened.words(device))
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        # on a CPU it is the peak of the process, and so may be of the first model
        own_peak = device.type == "cuda" or not results
        results.append(measured(opened, measures, plan, device, own_peak))
        show(results[-1], given.names)
    comparison = None
    if given.against:
        comparison = Comparison(results[0].report, results[1].report)
        print(f"\nthis: {models[0].folder}\nother: {models[1].folder}")
        print("\n".join(comparison.lines()))
    if given.output:
        write(Path(given.output), record(models, results, comparison), results[0].report)


def require(measures: Measures, given: EvaluateConfig):
    """ValueError if a measure that was named is impossible; others are only left out."""
    for name, reason in measures.impossible.items():
        if given.evals or (name == "retrieval" and (given.lengths or given.tasks)):
            raise ValueError(f"{name} cannot be measured: {reason}")


def documents_read(cfg: TrainConfig, context: int) -> range | None:
    """The lengths of the documents that the run would read at a context; None: all."""
    return dataclasses.replace(cfg, length_schedule="", context_length=context).document_lengths


# ---- the model


@dataclass(frozen=True)
class Opened(Source):
    """A model with the settings of its run."""

    cfg: TrainConfig  # as one process evaluates it

    @classmethod
    def of(cls, named: str, dtype: str, device: torch.device) -> "Opened":
        """ValueError or CheckpointError for a folder without a sound model."""
        source = Source.open(named)
        dtype = precision(dtype)
        if source.checkpoint is None:
            cfg = settings_of_folder(source.folder, dtype)
        else:
            cfg = for_one_process(recorded_settings(source.checkpoint), dtype, device)
        return cls(source.folder, cfg.model(), source.checkpoint, source.reach, cfg)

    @property
    def context(self) -> int:
        """Tokens of a row, if no flag says."""
        return self.cfg.context_length

    def read_with(self, attention: str, blocks: Sequence[str]) -> "Opened":
        """The same model with another attention, if one is named."""
        opened = super().read_with(attention, blocks)
        if not attention:
            return opened
        cfg = dataclasses.replace(self.cfg, attention_type=attention, blocks=tuple(blocks))
        return dataclasses.replace(opened, cfg=cfg)

    def load(self, device: torch.device) -> Decoder:
        """The model on `device`, with the levers of its run that a forward has."""
        name = self.cfg.dtype
        model = self.load_in(device, name)
        if self.cfg.weights_in_compute_dtype:
            model.to(getattr(torch, PRECISIONS[name]))
        return apply.apply(model, self.cfg, None)

    def words(self, device: torch.device) -> str:
        """The model in a line."""
        kind = f"{self.config.attention.name} attention, {self.cfg.dtype} on {device}"
        return f"{self.folder}: {self.config.num_params():,} parameters, {kind}"


def settings_of_folder(folder: Path, dtype: str) -> TrainConfig:
    """Those that train a Hugging Face folder, computed and stored in bf16 if its weights are, else
    in fp32.
    """
    if not dtype:
        config = read_json(folder / "config.json")
        named = config.get("dtype") or config.get("torch_dtype")  # transformers 5 and 4
        dtype = "bf16" if named == "bfloat16" else "fp32"
    settings = start.completed({"init_from": str(folder), "eval_every": 0})
    cfg = TrainConfig(**settings, dtype=dtype, device="cpu")
    return dataclasses.replace(cfg, master_weights="none") if dtype == "bf16" else cfg


def for_one_process(cfg: TrainConfig, dtype: str, device: torch.device) -> TrainConfig:
    """The settings without those that need several ranks, a backward, or another device."""
    dtype = dtype or cfg.dtype
    return dataclasses.replace(
        cfg,
        length_schedule="",
        context_parallel_size=1,
        dp_replicate=1,
        compile=False,
        gradient_checkpointing="none",
        offload_activations=False,
        dtype=dtype,
        master_weights="fp32" if dtype == "fp32" else cfg.master_weights,
        kernels=cfg.kernels if device.type == "cuda" else "auto",
    )


def recorded_settings(checkpoint: Checkpoint) -> TrainConfig:
    """The settings of the run that wrote the checkpoint, without those that only a policy has; JSON
    has made lists of its tuples.
    """
    known = {spec.name for spec in dataclasses.fields(TrainConfig)}
    values = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in checkpoint.config.items()
        if name in known
    }
    return TrainConfig(**values)


def check_pair(first: Opened, second: Opened):
    """ValueError for two models that do not read the same ids."""
    sizes = [opened.config.vocab_size for opened in (first, second)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"--against {second.folder} knows {sizes[1]:,} ids, and {first.folder} {sizes[0]:,}: "
            "name two models with the same vocabulary"
        )


def note_if_beyond(opened: Opened, tokens: int):
    """Say it if rows are longer than the positions that the model was trained for."""
    if tokens > opened.reach:
        print(
            f"note: {opened.folder} was trained for {opened.reach:,} tokens, and rows of "
            f"{tokens:,} are longer",
            file=sys.stderr,
        )


# ---- the data


def open_data(opened: Opened, path: str) -> tuple[Corpus, ...]:
    """The corpora of --data, else of the run, else the embedded corpus that it was trained on."""
    if path or opened.cfg.data:
        return open_corpora(path or opened.cfg.data)
    if opened.checkpoint is None or not opened.checkpoint.identity:
        raise ValueError(
            f"{opened.folder} does not say what it was trained on: give --data, prepared with its "
            "tokenizer (python -m data.prepare --tokenizer)"
        )
    embedded = prepare_embedded(report=lambda *line: None)
    return (Corpus(EMBEDDED, embedded, Fraction(1)),)


def check_data(opened: Opened, dataset: Dataset):
    """ValueError unless the data have the ids that the model was trained on."""
    ids = Ids(dataset.tokenizer_sha256, dataset.tokenizer_path)
    check_ids(opened, dataset.vocab_size, ids, f"--data {dataset.path}")


def check_context(given: int, dataset: Dataset):
    """ValueError for a --context_length beyond the validation split, if there is one."""
    if not given or "val" not in dataset.splits:
        return
    tokens = dataset.split("val").num_tokens
    if given > tokens:
        raise ValueError(
            f"--context_length {given} is out of range: give 2 to {tokens}, the tokens of the "
            "validation split, or 0 for the context of training"
        )


# ---- measuring


@dataclass(frozen=True)
class Result:
    """A report, and what it took."""

    report: Report
    plan: planner.Planned
    # the peak of the process on a CPU, of the allocated memory on CUDA; None if that is unknown
    measured_gib: float | None
    seconds: float
    device: torch.device

    def memory(self) -> str:
        """Measured and planned, one line."""
        what = "resident" if self.device.type == "cpu" else "allocated"
        planned = self.plan.gib if self.device.type == "cpu" else self.plan.gib_of_tensors
        measured = "unknown"
        if self.measured_gib is not None:
            measured = f"{self.measured_gib:.2f} GiB"
        return f"{measured} peak of {what} memory, planned {planned:.2f} GiB ({self.plan.how})"

    def record(self) -> dict:
        """All figures for JSON, with those of each document."""
        return self.report.record(per_document=True) | {
            "memory": {
                "measured_gib": self.measured_gib,
                "planned_gib": self.plan.gib,
                "planned_live_bytes": self.plan.peak,
                "row_tokens": self.plan.tokens,
                "chunk": self.plan.chunk,
            },
            "total_seconds": self.seconds,
        }


def longest_row(asked: Asked) -> int:
    """Tokens of the longest row that is scored."""
    retrieved = asked.lengths if "retrieval" in asked.names else ()
    return max(asked.context_length, *retrieved, 0)


def measured(
    opened: Opened, measures: Measures, plan: planner.Planned, device: torch.device, own_peak: bool
) -> Result:
    """Run the measures on a model; `own_peak`: the peak of memory is not of another model."""
    begin = time.monotonic()
    scorer = ModelScorer(opened.load(device), device, plan.chunk)
    total = Watched(opened.config)
    measures.run(total)

    with bar("evaluating", total.operations, unit="FLOP", unit_scale=True) as progress:
        report = measures.run(Watched(opened.config, scorer, progress))
    assert report is not None, "nobody asked to stop"
    peak_gib = peak_memory_gib(device) if own_peak else None
    return Result(report, plan, peak_gib, time.monotonic() - begin, device)


def planned(opened: Opened, tokens: int, chunk: str, device: torch.device) -> planner.Planned:
    """How the longest row passes; ValueError if it does not fit."""
    available = available_gib(device, World())
    if chunk == "auto":
        return planner.plan_that_fits(opened.cfg, tokens, device, available)
    if int(chunk) and not attention_kind(opened.config).prompt_in_parts:
        raise ValueError(
            f"--chunk {chunk}: {opened.config.attention.name} attention reads a row at once: give "
            "--chunk 0"
        )
    plan = planner.planned(opened.cfg, tokens, device, int(chunk))
    plan.check(available)
    return plan


@dataclass
class Watched:
    """A scorer that counts the operations of a model, and says on a bar how far it is; without a
    scorer it only counts.
    """

    config: ModelConfig
    scorer: Scorer | None = None
    progress: tqdm | None = None
    operations: float = 0.0

    def score(self, item: Item, *, hits: bool = False) -> Scores:
        """The scores of the scorer."""
        sizes = [tokens for row in text_sizes(item) for tokens in row]
        done = sum(map(self._operations, sizes))
        self.operations += done
        if self.scorer is None:
            nothing_BT = torch.zeros(item.labels_BT.shape, dtype=torch.float64)
            return Scores(nothing_BT, nothing_BT.bool() if hits else None)
        scores = self.scorer.score(item, hits=hits)
        self.progress.update(done)
        return scores

    def _operations(self, tokens: int) -> float:
        """Floating-point operations that grow like those of scoring so many tokens."""
        return flops.train_flops(self.config, tokens, flops.pairs(self.config, tokens))


# ---- the table


def show(result: Result, names: tuple[str, ...]):
    """Print the table of a model."""
    report = result.report
    for corpus, losses in report.losses.items():
        of = f" of {corpus}" if len(report.losses) > 1 else ""
        context = report.asked.context_length
        print(f"validation{of} over {losses.tokens:,} tokens at context {context:,}")
        if "loss" in names:
            print_folded(losses.line())
        if "loss" in names and math.isnan(losses.bits_per_nat):
            reason = "unknown: the data does not say how many bytes of text its tokens are"
            print_folded(f"{'bits per byte':<{INDENT}}{reason}")
        if "position" in names:
            print_folded(by_position(losses))

    for line in report.lines(loss=False):
        print_folded(line)
    print_folded(f"{'memory':<{INDENT}}{result.memory()}")
    print_folded(f"{'time':<{INDENT}}{duration(result.seconds)}")


def by_position(losses: Losses) -> str:
    """The loss of each bucket with its interval."""
    cells = []
    for bucket in losses.buckets:
        half = bucket.interval.half(digits=3)
        cells.append(f"{bucket.name}: {bucket.loss:.3f}{half} ({bucket.documents:,})")
    words = f"{' | '.join(cells)} nats/token (documents)"
    return f"{'by position':<{INDENT}}{words}"


def print_folded(text: str):
    """Print lines of at most COLUMNS characters; what is folded goes below the figures."""
    for line in text.splitlines():
        print("\n".join(fold(line)))


fold = textwrap.TextWrapper(
    COLUMNS,
    subsequent_indent=" " * INDENT,
    break_on_hyphens=False,
    break_long_words=False,
).wrap


# ---- the files


def make_output(folder: Path):
    """Make the folder; ValueError if its files cannot be written, before any computing."""
    try:
        durable.make_folder(folder)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(
            f"--output {folder} cannot be written ({error.strerror}): name another place"
        ) from None


def write(folder: Path, figures: dict[str, Any], report: Report):
    """Write the figures and the picture, and say so."""
    written = [folder / "eval.json"]
    durable.write_json(written[0], figures)
    if report.retrieved:
        written.append(folder / "heatmap.svg")
        durable.write_bytes(written[1], report.retrieved.picture().encode())
    print_folded(f"{'written':<{INDENT}}{', '.join(map(str, written))}")


def record(
    models: list[Opened], results: list[Result], comparison: Comparison | None
) -> dict[str, Any]:
    """All figures for JSON."""
    first, *others = (
        {"checkpoint": str(opened.folder), **result.record()}
        for opened, result in zip(models, results, strict=True)
    )
    if comparison:
        first["against"] = others[0] | {"differences": comparison.record()}
    return first


if __name__ == "__main__":
    main()
