"""`footprint --step FILE.py` and `footprint --hf MODEL`: the memory of a step, what fits a card,
and what to change.

The file defines build() and step(state), as footprint.predict takes them; if step has parameters
`batch` and `seq`, the flags of that name set them. Of a Hugging Face model only the configuration
is read. See docs/FOOTPRINT.md.
"""

import contextlib
import dataclasses
import functools
import inspect
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from footprint.answers.report import Report
from footprint.cards.allocator import GIB
from footprint.cards.device import HALF_SINCE, Card, Placement, card
from footprint.cards.device import SIZES as CARD_SIZES
from footprint.pretend.owners import holdings
from footprint.python import users_file
from footprint.python.patches import defaults_kept
from footprint.python.refusal import Refused, place_of
from footprint.python.users_file import UsersFile
from footprint.steps import flags, hub, hugging_face
from footprint.steps.flags import between, flag
from footprint.steps.hugging_face import DTYPES, OPTIMIZERS, spellings
from footprint.steps.prediction import NEEDS_CUDA, predict
from footprint.steps.search import MOST as MOST_TRIED
from footprint.steps.search import (
    VERDICTS,
    Bounds,
    Found,
    Lever,
    Say,
    Search,
    Tried,
    Verdict,
    note_on_size,
)

OF_HF = ("dtype", "autocast", "optimizer", "checkpointing")  # build() decides them otherwise
SIZES = ("batch", "seq")
AUTOCASTS = ("none", *spellings("bf16"))
STANDARD_OUTPUT = "-"  # instead of a file, for --json without a name
SOLVES = {"context": "seq", "batch": "batch"}  # --solve -> the flag that it sets
UNITS = {"batch": 1, "seq": 64}  # rows, tokens: what is solved for is a multiple
MOST = 2**31 - 1  # rows, tokens
MOST_RANKS = 2**16
DEFAULT_GIB = CARD_SIZES["80 GB"]  # of the card that --solve looks at
MANY = 8  # ranks that --advise tries at most, unless --gpus says otherwise


@dataclass(frozen=True)
class OnCard:
    """The card that shall hold a step, and the files of the answers."""

    gpu: str = flag("", "name of the card that shall hold the step, such as H100")
    gpu_memory_gib: float = flag(
        0.0,
        f"memory of one GPU, instead of --gpu; --solve assumes {DEFAULT_GIB:g} if neither is given",
        "--vram",
        type=flags.number,
    )
    cc: int = flag(
        0,
        "compute capability x 10 of the GPU, such as 86, instead of that of --gpu, or 80",
        type=between(0, 999),
    )
    html: str = flag("", "file to write: the timeline and the tables on one page")
    json: str = flag(
        "",
        "file to write: every result; without a name, standard output, and all else goes to "
        "standard error",
        nargs="?",
        const=STANDARD_OUTPUT,
    )

    @property
    def has_card(self) -> bool:
        return bool(self.gpu or self.gpu_memory_gib)

    @property
    def target(self) -> str:
        """What footprint predicts for: workspaces of kernels, and times, differ by card."""
        if self.gpu:
            return self.card().name
        return "cpu" if self.device == "cpu" else "cuda"

    @property
    def searches(self) -> str:
        """The flag of a search that is asked for, or nothing."""
        if self.advise:
            return "--advise"
        return "--solve" if self.solve != "none" else ""

    def card(self) -> Card:
        """The card of --gpu or --vram; for --solve one of DEFAULT_GIB if neither is given."""
        gib = self.gpu_memory_gib
        if self.solve != "none" and not self.has_card:
            gib = DEFAULT_GIB
        return card(self.gpu, gib, self.cc)


@dataclass(frozen=True)
class StepConfig(OnCard):
    """The flags of `footprint --step` and `footprint --hf`."""

    step: str = flag("", "FILE.py[:build,step]: a file with build() and step(state)")
    hf: str = flag(
        "",
        "Hugging Face folder whose config.json describes the model, or the model's name on the "
        "hub, such as Qwen/Qwen3-8B",
    )
    device: str = flag("cuda", "device that is predicted", choices=("cpu", "cuda"))
    depth: int = flag(2, "of the module names that stages tell apart", type=between(1, 99))
    svg: str = flag("", "file to write: the timeline alone")
    seq: int = flag(
        512, "tokens of a row; with --step the argument seq of step", type=between(1, MOST)
    )
    batch: int = flag(
        1, "rows of a rank; with --step the argument batch of step", type=between(1, MOST)
    )
    dtype: str = flag("fp32", "of the parameters, with --hf", choices=tuple(DTYPES))
    autocast: str = flag("none", "compute precision, with --hf", choices=AUTOCASTS)
    optimizer: str = flag("adamw", "with --hf", choices=OPTIMIZERS)
    checkpointing: bool = flag(False, "recompute activations in the backward, with --hf")
    answer: tuple[str, ...] = flag(
        (),
        "value that is read from a tensor in a line of the step, such as mine.py:12=False",
        nargs="+",
    )
    fsdp: int = flag(
        1,
        "ranks that share the model (FSDP2); with --step build() shards it",
        type=between(1, MOST_RANKS),
    )
    solve: str = flag(
        "none",
        "what to find: the longest row or the most rows",
        choices=("none", "context", "batch"),
    )
    advise: bool = flag(False, "say what to change so that the step fits --gpu or --vram")
    gpus: int = flag(
        MANY, "most GPUs that share the model, with --advise", type=between(1, MOST_RANKS)
    )

    def __post_init__(self):
        if bool(self.step) == bool(self.hf):
            raise ValueError("--step FILE.py and --hf FOLDER say what is predicted: give one")
        if self.advise and self.solve != "none":
            raise ValueError("--solve and --advise answer different questions: give one")
        if self.device == "cpu" and self.searches:
            raise ValueError(f"{self.searches} looks for what fits a GPU: drop --device cpu")
        if self.device == "cpu" and self.has_card:
            raise ValueError("--gpu and --vram say what a GPU holds: drop them, or --device cpu")
        self.answers()

    def answers(self) -> dict[str, object]:
        """The values of --answer by their lines."""
        return flags.answers(self.answer)


def shown(line: str) -> None:
    """Print a line at once: a search takes seconds for each."""
    print(line, flush=True)


def main(words: list[str], say: Say = shown) -> int:
    """Answer a command line, say it line by line, and write its files; the exit code."""
    parser = flags.step_parser(
        StepConfig,
        prog="footprint",
        usage="footprint --step FILE.py [flags]\n       footprint --hf MODEL [flags]",
        description="The memory of a step, what fits a card, and what to change.",
    )
    typed = flags.given(parser, words)
    cfg = StepConfig(**typed)
    _check_questions(cfg, typed.keys())
    with apart_from_json(cfg.json), defaults_kept():
        return _answer(cfg, typed, say)


def _answer(cfg: StepConfig, typed: Mapping[str, Any], say: Say) -> int:
    """Predict, search or advise, as it is asked for; the exit code."""
    on = cfg.card() if cfg.searches or cfg.has_card else None
    note = note_on_size(cfg.gpu_memory_gib)
    if note:
        say(note)
    asked = typed.keys()
    predicted = of_file(cfg, asked) if cfg.step else of_hugging_face(cfg, asked, say)

    if not cfg.searches:
        return _predict(cfg, on, predicted, say).exit_code
    room = int(on.gib * GIB)
    search = Search(functools.partial(_judged, predicted, room), room, say)
    say(f"on {on.name} ({on.gib:g} GiB); all figures predicted for torch {torch.__version__}, GiB")
    say(search.head())
    best, words = _advised(cfg, on, search) if cfg.advise else _solved(cfg, search)
    smallest = min(search.tried, key=lambda one: one.device)
    report = (best or smallest).found.report
    say(f"\n{report}\n")
    say(words)
    code = search.verdict(best).exit_code
    tried = [one.as_json() for one in search.tried]
    answer = dataclasses.asdict(best.request) if best else None
    _write(cfg, report, {"verdict": code, "answer": answer, "tried": tried})
    return code


# ---- what fits


class Answer(NamedTuple):
    """The request that answers, or None, and the answer in words."""

    best: Tried | None
    words: str


def _judged(predicted: Callable[[StepConfig], Report], room: int, cfg: StepConfig) -> Found:
    report = predicted(cfg)
    asked = report.demand
    return Found(report.peak, asked.least_bytes, asked.placement(room), report=report)


def _segments(one: Tried) -> str:
    """What else has to be set for a candidate that fits."""
    if one.found.placement is not Placement.EXPANDABLE:
        return ""
    return ", with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def _solved(cfg: StepConfig, search: Search) -> Answer:
    """The most rows or tokens with which the step fits the card."""
    name = SOLVES[cfg.solve]
    bounds = Bounds(UNITS[name], nearly=name == "seq")
    best = search.largest(
        f"--{name}", getattr(cfg, name), functools.partial(_set, cfg, name), bounds
    )
    if best is None:
        smallest = min(getattr(one.request, name) for one in search.tried)
        return Answer(None, f"not even --{name} {smallest} fits")
    limit = ""
    if bounds.low == bounds.most:
        few = bounds.most < MOST_TRIED
        limit = " (the model has no more positions)" if few else " (no more are tried)"
    words = f"the largest --{name} that fits: {bounds.low:,}{limit}{_segments(best)}"
    return Answer(best, words)


def _set(cfg: StepConfig, name: str, value: object) -> StepConfig:
    return dataclasses.replace(cfg, **{name: value})


def _changes(asked: StepConfig, card: Card) -> Iterator[Lever]:
    """What can be changed, the cheapest first."""

    def change(name: str, code: str, **settings: Any) -> Lever:
        return Lever(name, lambda cfg: dataclasses.replace(cfg, **settings), code)

    if asked.optimizer == "adamw":
        code = "torch.optim.AdamW(..., fused=True)"
        yield change("AdamW fused", code, optimizer="adamw_fused")
    if DTYPES[asked.dtype] is torch.float32 and asked.autocast == "none" and card.cc >= HALF_SINCE:
        code = 'with torch.autocast("cuda", torch.bfloat16): the forward and the loss'
        yield change("autocast to bf16", code, autocast="bf16")
    if not asked.checkpointing:
        code = "model.gradient_checkpointing_enable()"
        yield change("gradient checkpointing", code, checkpointing=True)
    if asked.optimizer in ("adamw", "adamw_fused"):
        code = "an AdamW that stores its moments in 8 bits"
        yield change("AdamW with 8-bit states", code, optimizer="adamw_8bit")
    rows = asked.batch
    while rows > 1:
        rows //= 2
        code = f"micro-batches of {rows} rows: more of them make a step"
        yield change(f"{rows} rows of a micro-batch", code, batch=rows)
    ranks = 2 * asked.fsdp
    while ranks <= asked.gpus:
        yield change(f"FSDP2 over {ranks} GPUs", "fully_shard", fsdp=ranks)
        ranks *= 2


def _advised(cfg: StepConfig, card: Card, search: Search) -> Answer:
    """The changes that make the step fit the card."""
    climbed = search.climb(cfg, list(_changes(cfg, card)))
    best = climbed.best
    if not best.fits:
        return Answer(None, "no change is enough: give --gpus, --seq or --vram")
    rows = ["fits after these changes:" if climbed.made else "fits as asked"]
    rows += [f"  {change.name}: {change.code}" for change in climbed.made]
    return Answer(best, "\n".join(rows) + _segments(best))


# ---- the command line and its files


def _check_questions(cfg: StepConfig, typed: Set[str]) -> None:
    """ValueError for a flag of a question that is not asked."""
    if "gpus" in typed and not cfg.advise:
        raise ValueError("--gpus is for --advise: give --advise, or --fsdp for a number of ranks")
    if "cc" in typed and not (cfg.has_card or cfg.searches):
        raise ValueError("--cc is about the card of --gpu or --vram: give one")


def _predict(
    cfg: StepConfig, on: Card | None, predicted: Callable[[StepConfig], Report], say: Say
) -> Verdict:
    """Predict the step as it is asked for; and whether a card that is given holds it."""
    report = predicted(cfg)
    say(str(report))
    if on is None:
        _write(cfg, report, {})
        return Verdict.FITS

    placement = report.demand.placement(int(on.gib * GIB))
    say(f"on {on.name} ({on.gib:g} GiB): {placement}")
    _write(cfg, report, {"card": on.name, "placement": placement})
    return VERDICTS[placement]


def _write(cfg: StepConfig, report: Report, more: dict) -> None:
    """The page and the results, with `more`."""
    if cfg.html:
        report.html(cfg.html, cfg.step or cfg.hf)
    if cfg.svg:
        report.svg(cfg.svg)
    if cfg.json:
        write_json(cfg.json, report.json() | more)


def apart_from_json(path: str) -> contextlib.redirect_stdout:
    """Inside the `with` block, prints go to standard error if the JSON goes to standard output."""
    return contextlib.redirect_stdout(sys.stderr if path == STANDARD_OUTPUT else sys.stdout)


def write_json(path: str, found: dict | list) -> None:
    """Write results as JSON."""
    text = json.dumps(found, indent=1)
    if path == STANDARD_OUTPUT:
        print(text, file=sys.__stdout__, flush=True)
    else:
        Path(path).write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _worded_for_the_shell() -> Iterator[None]:
    """A refusal inside the `with` block that asks for an answer names the flag, and PyTorch logs no
    traceback of an error that is told in one line.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_off, log.disabled = log.disabled, True
    try:
        yield
    except Refused as refusal:
        raise Refused(flags.shell_words(refusal)) from refusal
    finally:
        log.disabled = was_off


def of_hugging_face(cfg: StepConfig, typed: Set[str], say: Say) -> Callable[[StepConfig], Report]:
    """What predicts a Hugging Face model; `typed`: the flags of the command line."""
    folder = hub.model_folder(cfg.hf, say)
    told = functools.partial(hugging_face.told_in_one_line, cfg.hf)
    with told():
        reads_tokens = hugging_face.reads_tokens(folder)
    if not reads_tokens and ("seq" in typed or cfg.solve == "context"):
        asked = "--seq" if "seq" in typed else "--solve context"
        raise ValueError(f"{asked}: the model of {cfg.hf} reads no rows of tokens: drop it")
    make = functools.partial(hugging_face.functions, folder)
    return functools.partial(_predicted, make, told)


def _predicted(make: Callable, told: Callable, cfg: StepConfig) -> Report:
    """The report on build() and step(state), as make(cfg) gives them; inside told(), errors are
    told in one line.
    """
    with _worded_for_the_shell(), told():
        build, step = make(cfg)
        target = cfg.card() if cfg.cc else cfg.target
        return predict(build, step, target, cfg.fsdp, cfg.depth, cfg.answers())


# ---- a file


def of_file(cfg: StepConfig, typed: Set[str]) -> Callable[[StepConfig], Report]:
    """What predicts the functions of "FILE.py" or "FILE.py:build,step"; `typed`: the flags of the
    command line.
    """
    build, step = _functions(cfg.step)
    parameters = inspect.signature(step).parameters
    solved = SOLVES.get(cfg.solve)
    _check_flags(cfg, typed, solved, parameters)
    sizes = [name for name in SIZES if name in parameters and (name in typed or name == solved)]
    _check_arguments(cfg.step, "build()", build)
    _check_arguments(cfg.step, "step(state)", step, "state", **dict.fromkeys(sizes))

    def made(cfg: StepConfig) -> tuple[Callable, Callable]:
        given = {name: getattr(cfg, name) for name in sizes}
        return functools.partial(_built, build, cfg.fsdp), functools.partial(step, **given)

    return functools.partial(_predicted, made, users_file.told_in_one_line)


def _check_arguments(words: str, call: str, function: Callable, *args: Any, **given: Any) -> None:
    """ValueError if a function of the file cannot be called as it will be."""
    try:
        inspect.signature(function).bind(*args, **given)
    except TypeError as error:
        raise ValueError(
            f"--step {words}: {function.__name__} cannot be called as {call} ({error}): define it "
            "so, with defaults for other parameters"
        ) from None


def _check_flags(cfg: StepConfig, typed: Set[str], solved: str | None, parameters) -> None:
    """ValueError for a flag that would change nothing."""
    if cfg.advise:
        raise ValueError(
            "--advise changes what --hf describes, and a file decides for itself: use --solve "
            "batch, or change the file"
        )
    for name in OF_HF:
        if name in typed:
            raise ValueError(f"--{name} is for --hf; with --step, build() decides it: drop it")
    for name in SIZES:
        if (name in typed or name == solved) and name not in parameters:
            asked = f"--{name}" if name in typed else f"--solve {cfg.solve}"
            raise ValueError(
                f"{asked}: step() of {cfg.step} has no parameter {name!r}: define step(state, "
                f"{name}=...)"
            )


def _built(build: Callable[[], object], ranks: int) -> object:
    """What build() returns; ValueError if it is for one rank and there are several."""
    state = build()
    if ranks > 1 and not any(_is_shared(value) for value in holdings(state)):
        raise ValueError(
            f"--fsdp {ranks}: build() shares its model with no other rank: call fully_shard on it, "
            "or wrap it in DistributedDataParallel"
        )
    return state


def _is_shared(value: object) -> bool:
    if not isinstance(value, nn.Module):
        return False
    if any(isinstance(module, DistributedDataParallel) for module in value.modules()):
        return True
    return any(isinstance(parameter, DTensor) for parameter in value.parameters())


@contextlib.contextmanager
def _without_a_gpu() -> Iterator[None]:
    """What the top of a file asks of a GPU is refused on a machine that has none."""
    try:
        yield
    except (AssertionError, RuntimeError) as error:
        if not any(words in str(error) for words in NEEDS_CUDA):
            raise
        raise Refused(
            f"{place_of(error.__traceback__)}: the top of the file runs as it is, and this machine "
            'has no CUDA device: make what is on "cuda" in build(), where it means the card that '
            "is predicted"
        ) from error


def _functions(words: str) -> tuple[Callable, Callable]:
    """build and step."""
    path, _, names = words.partition(":")
    build, _, step = (names or "build,step").partition(",")
    file = UsersFile(path)
    with users_file.told_in_one_line(), _without_a_gpu():
        module = file.load()
    for name in (build, step):
        if not callable(getattr(module, name, None)):
            raise ValueError(
                f"--step {words}: {path} has no function {name!r}: define build() and step(state), "
                "or name them: --step FILE.py:my_build,my_step"
            )
    return file.function(getattr(module, build)), file.function(getattr(module, step))
