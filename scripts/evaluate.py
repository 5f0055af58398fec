"""Does a model use its context? `python -m scripts.evaluate --checkpoint runs/quickstart`.

It prints the validation loss, the loss by position, the context gain, retrieval by length and the
memory that it took, next to the plan. The model is a checkpoint of longhaul or a Hugging Face
folder. `--against` compares two of them over the same documents and items. One process
evaluates. docs/EVALUATION.md says what the figures mean.
"""

import argparse
import dataclasses
import gc
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
from base.flags import Parser, precision
from base.machine import peak_memory_gib
from base.untrusted import read_json, refuse_pickle
from data import hugging_face
from data.corpus import prepare_embedded
from data.dataset import Dataset
from data.load_tokenizer import hash_of_ids
from data.mixture import EMBEDDED, Corpus, open_corpora
from data.progress import bar, duration
from longhaul import flops, lengths, qwen3
from longhaul.checkpoint import start
from longhaul.checkpoint.format import Checkpoint
from longhaul.checkpoint.load import check_tokenizer, load_model, newest, verified
from longhaul.cli import known_words
from longhaul.config import (
    EVALS,
    SHORTEST_EVAL,
    TrainConfig,
)
from longhaul.dist import World, named_device
from longhaul.evals import heatmap
from longhaul.evals.compare import Comparison
from longhaul.evals.measures import Asked, Measures, Report
from longhaul.evals.position import Losses
from longhaul.evals.score import Item, ModelScorer, Scorer, Scores, text_sizes
from longhaul.evals.tasks import ALL_TASKS, TASKS
from longhaul.kinds import add_attention, attention_kind, read_with
from longhaul.memory import evaluation as planner
from longhaul.memory.plan import available_gib
from longhaul.parallel import apply
from model import Decoder, ModelConfig

COLUMNS = 100  # of the table
INDENT = 19  # of its figures
UNBROKEN = "\u00a0"  # a space at which no line is folded
CLEAR_REFS = Path("/proc/self/clear_refs")  # Linux: "5" resets the peak of resident memory
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


# ---- the command line


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(
        prog="python -m scripts.evaluate",
        description="Whether a model uses its context: validation loss, loss by position, context "
        "gain, retrieval. See docs/EVALUATION.md.",
        formatter_class=argparse.HelpFormatter,
    )
    add_what(parser)
    add_where(parser)
    return parser


def add_what(parser: Parser):
    """The flags that say what is measured."""
    parser.add_argument(
        "--checkpoint",
        required=True,
        metavar="DIR",
        help="a step-* folder, a run's folder, whose newest checkpoint is taken, or a Hugging Face "
        "folder",
    )
    parser.add_argument(
        "--against", metavar="DIR", help="a second model, compared with the first pair by pair"
    )
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="folder made by data.prepare, or several with their shares; by default the run's own",
    )
    parser.add_argument(
        "--evals",
        metavar="NAMES",
        help=f"what to measure, of {','.join(EVALS)}; by default all that the data allow",
    )
    parser.add_argument(
        "--context_length",
        type=int,
        default=0,
        metavar="N",
        help="tokens of a validation row; 0: as in training (default: 0)",
    )
    parser.add_argument(
        "--batches",
        type=int,
        default=32,
        metavar="N",
        help="rows of each validation split, at most, for losses and for gain (default: 32)",
    )
    parser.add_argument(
        "--lengths",
        metavar="N,N",
        help="retrieval: tokens of a row; by default powers of two from 1,024 to --context_length",
    )
    parser.add_argument(
        "--tasks",
        metavar="NAMES",
        help=f"retrieval: of {','.join(ALL_TASKS)} (default: {','.join(TASKS)})",
    )
    parser.add_argument(
        "--items",
        type=int,
        default=32,
        metavar="N",
        help="retrieval: items of each task at each length (default: 32)",
    )


def add_where(parser: Parser):
    """The flags that say how it is computed, and where the results go."""
    parser.add_argument(
        "--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)"
    )
    parser.add_argument(
        "--dtype",
        type=precision,
        choices=tuple(DTYPES),
        help="compute precision; by default the run's own",
    )
    add_attention(parser)
    parser.add_argument(
        "--chunk",
        default="auto",
        metavar="N",
        help="rows pass in parts of N tokens over the KV cache; 0: whole; auto: whole if memory "
        "holds that (default: auto)",
    )
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="write DIR/eval.json, all figures and those by document, and DIR/heatmap.png, "
        "retrieval by depth and length",
    )


def main(args: list[str] | None = None):
    """Evaluate; bad input ends with one line and exit code 2."""
    parser = build_parser()
    given = parser.parse_args(args)
    try:
        evaluate(given)
    except (ValueError, OSError) as error:
        parser.refuse(error)


def evaluate(given: argparse.Namespace):
    """Measure, print the table, and write the files."""
    names = EVALS if given.evals is None else known_words("--evals", given.evals, EVALS)
    check_flags(given, names)
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

    asked = asked_for(given, names, models[0])
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
        own_peak = reset_peak(device) or not results
        results.append(measured(opened, measures, plan, device, own_peak))
        show(results[-1], names)
    comparison = None
    if given.against:
        comparison = Comparison(results[0].report, results[1].report)
        print(f"\nthis: {models[0].folder}\nother: {models[1].folder}")
        print("\n".join(comparison.lines()))
    if given.output:
        write(Path(given.output), record(models, results, comparison), results[0].report)


# ---- what is asked


def check_flags(given: argparse.Namespace, names: tuple[str, ...]):
    """ValueError for numbers that cannot be, and for flags without an effect."""
    for flag in ("batches", "items"):
        value = getattr(given, flag)
        if value < 1:
            raise ValueError(f"--{flag} {value} is out of range: give at least 1")
    if given.context_length < 2 and given.context_length:
        raise ValueError(
            f"--context_length {given.context_length} is out of range: give at least 2, or 0 for "
            "the context of training"
        )
    if given.chunk != "auto" and not re.fullmatch(r"\d{1,9}", given.chunk):
        raise ValueError(f"--chunk {given.chunk[:40]} is no number of tokens: give auto, 0 or more")
    for flag in ("lengths", "tasks"):
        if getattr(given, flag) is not None and "retrieval" not in names:
            raise ValueError(
                f"--{flag} is of retrieval, which --evals leaves out: drop it, or add retrieval"
            )


def require(measures: Measures, given: argparse.Namespace):
    """ValueError if a measure that was named is impossible; others are only left out."""
    for name, reason in measures.impossible.items():
        if given.evals or (name == "retrieval" and (given.lengths or given.tasks)):
            raise ValueError(f"{name} cannot be measured: {reason}")


def asked_for(given: argparse.Namespace, names: tuple[str, ...], opened: "Opened") -> Asked:
    """What the flags ask for; ValueError for tasks and lengths that cannot be. Losses by position
    come from the pass of the validation loss.
    """
    context = given.context_length or opened.context
    tasks = tuple(TASKS)
    if given.tasks is not None:
        tasks = known_words("--tasks", given.tasks, tuple(ALL_TASKS))
    return Asked(
        context_length=context,
        names=tuple(dict.fromkeys("loss" if name == "position" else name for name in names)),
        rows=given.batches,
        lengths=lengths_of(given.lengths, context),
        tasks=tasks,
        items=given.items,
        vocab_size=opened.config.vocab_size,
        seed=opened.cfg.seed,
        key_tokens=True,
        documents=documents_read(opened.cfg, context),
    )


def documents_read(cfg: TrainConfig, context: int) -> range | None:
    """The lengths of the documents that the run would read at a context; None: all."""
    return dataclasses.replace(cfg, length_schedule="", context_length=context).document_lengths


def lengths_of(words: str | None, context: int) -> tuple[int, ...]:
    """The numbers of --lengths, rising; by default powers of two up to the context."""
    if words is None:
        return lengths.doublings(SHORTEST_EVAL, context)
    return lengths.numbers("--lengths", words)


# ---- the model


@dataclass(frozen=True)
class Opened:
    """A checkpoint or a Hugging Face folder that was checked; its weights are not read yet."""

    folder: Path
    cfg: TrainConfig  # as one process evaluates it
    config: ModelConfig
    context: int  # tokens of a row, if no flag says
    reach: int  # the longest context that its positions were trained for
    checkpoint: Checkpoint | None  # None for a Hugging Face folder

    @classmethod
    def of(cls, folder: str, dtype: str | None, device: torch.device) -> "Opened":
        """ValueError or CheckpointError for a folder without a sound model."""
        path = Path(folder)
        refuse_pickle(path)
        if (path / "config.json").is_file():
            return cls._of_hugging_face(path, dtype)

        checkpoint = verified(newest(path))
        cfg = for_one_process(recorded_settings(checkpoint), dtype, device)
        reach = start.trained_context(checkpoint)
        return cls(checkpoint.folder, cfg, cfg.model(), cfg.context_length, reach, checkpoint)

    @classmethod
    def _of_hugging_face(cls, path: Path, dtype: str | None) -> "Opened":
        """Computed in bf16 if the weights are, else in fp32, and stored so."""
        config = ModelConfig(**qwen3.read_config(path))
        settings = start.completed({"init_from": str(path), "eval_every": 0})
        cfg = TrainConfig(**settings, dtype=dtype or dtype_of_folder(path), device="cpu")
        if cfg.dtype == "bf16":
            cfg = dataclasses.replace(cfg, master_weights="none")
        reach = config.rope_reach
        return cls(path, cfg, cfg.model(), cfg.context_length, reach, None)

    def read_with(self, attention: str | None, blocks: Sequence[str]) -> "Opened":
        """The same model with another attention, if one is given."""
        config = read_with(self.config, attention, blocks)
        if config == self.config:
            return self
        cfg = dataclasses.replace(self.cfg, attention_type=attention, blocks=tuple(blocks))
        return dataclasses.replace(self, cfg=cfg, config=config)

    def load(self, device: torch.device) -> Decoder:
        """The model on `device`, with the levers of its run that a forward has."""
        dtype = DTYPES[self.cfg.dtype]
        if self.checkpoint is None:
            name = str(dtype).removeprefix("torch.")
            attention = self.config.attention
            model = qwen3.from_hf(
                self.folder, device, dtype, compute_dtype=name, attention=attention
            )
        else:
            model = load_model(
                self.checkpoint,
                device,
                self.config.compute_dtype,
                self.config.kernels,
                attention=self.config.attention,
            )
            if self.cfg.weights_in_compute_dtype:
                model.to(dtype)
        return apply.apply(model, self.cfg, None)

    def words(self, device: torch.device) -> str:
        """The model in a line."""
        kind = f"{self.config.attention.name} attention, {self.cfg.dtype} on {device}"
        return f"{self.folder}: {self.config.num_params():,} parameters, {kind}"


def dtype_of_folder(folder: Path) -> str:
    """The precision in which a Hugging Face folder is computed: bf16 if it says so, else fp32."""
    config = read_json(folder / "config.json")
    named = config.get("dtype") or config.get("torch_dtype")  # transformers 5 and 4
    return "bf16" if named == "bfloat16" else "fp32"


def for_one_process(cfg: TrainConfig, dtype: str | None, device: torch.device) -> TrainConfig:
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


def open_data(opened: Opened, path: str | None) -> tuple[Corpus, ...]:
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
    checkpoint = opened.checkpoint
    if checkpoint is not None and checkpoint.identity:
        given = f"--data {dataset.path}"
        check_tokenizer(checkpoint, dataset.tokenizer_sha256, dataset.tokenizer_path, given)
    else:
        folder = opened.folder if checkpoint is None else opened.folder.parent
        theirs = hugging_face.hash_of_folder(folder)
        ours = dataset.tokenizer_path and hash_of_ids(dataset.tokenizer_path)
        if theirs and ours and theirs != ours:
            raise ValueError(
                f"--data {dataset.path} has a different tokenizer from {folder}: prepare the data "
                f"with --tokenizer {folder}"
            )
    if dataset.vocab_size > opened.config.vocab_size:
        raise ValueError(
            f"--data {dataset.path} has {dataset.vocab_size:,} ids, and {opened.folder} knows "
            f"{opened.config.vocab_size:,}: prepare the data with the tokenizer of the model"
        )


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


def reset_peak(device: torch.device) -> bool:
    """Let the peak of memory begin anew, without a model before; whether the system can do that."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True


def measured(
    opened: Opened, measures: Measures, plan: planner.Planned, device: torch.device, own_peak: bool
) -> Result:
    """Run the measures on a model; `own_peak`: the peak of memory is not of another model."""
    begin = time.monotonic()
    scorer = ModelScorer(opened.load(device), device, plan.chunk)
    total = Counter(opened.config)
    measures.run(total)

    with bar("evaluating", total.operations, unit="FLOP", unit_scale=True) as progress:
        report = measures.run(Watched(scorer, opened.config, progress))
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


class Counter:
    """A scorer that only counts the operations that a model will need."""

    def __init__(self, config: ModelConfig):
        self.config = config
        self.operations = 0.0

    def score(self, item: Item, *, hits: bool = False) -> Scores:
        """Nothing."""
        self.operations += operations(self.config, item)
        nothing_BT = torch.zeros(item.labels_BT.shape, dtype=torch.float64)
        return Scores(nothing_BT, nothing_BT.bool() if hits else None)


class Watched:
    """A scorer that says on standard error how far it is."""

    def __init__(self, scorer: Scorer, config: ModelConfig, progress: tqdm):
        self.scorer = scorer
        self.config = config
        self.progress = progress

    def score(self, item: Item, *, hits: bool = False) -> Scores:
        """The scores of the scorer."""
        scores = self.scorer.score(item, hits=hits)
        self.progress.update(operations(self.config, item))
        return scores


def operations(config: ModelConfig, item: Item) -> float:
    """Floating-point operations that grow like those of scoring an item."""
    total = 0.0
    for of_row in text_sizes(item):
        for tokens in of_row:
            total += flops.train_flops(config, tokens, flops.pairs(config, tokens))
    return total


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
        print("\n".join(folded(line)))


def folded(line: str) -> list[str]:
    """The parts of a line, divided behind commas, semicolons and bars if that is enough."""
    divide = textwrap.TextWrapper(
        COLUMNS,
        subsequent_indent=" " * INDENT,
        break_on_hyphens=False,
        break_long_words=False,
    ).wrap
    parts = divide(re.sub(r"(?<![,;|]) ", UNBROKEN, line))
    if max(map(len, parts), default=0) > COLUMNS:
        parts = divide(line)
    return [part.replace(UNBROKEN, " ") for part in parts]


# ---- the files


def make_output(folder: Path):
    """Make the folder; ValueError if its files cannot be written, before any computing."""
    for name in ("eval.json", "heatmap.png"):
        if (folder / name).is_dir():
            raise ValueError(f"--output {folder}: {name} in it is a folder: name another place")
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
    if report.heatmap is not None:
        written.append(folder / "heatmap.png")
        durable.write_bytes(written[1], heatmap.png(report.heatmap))
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
