"""`profile_memory.py --step FILE.py` or `--hf FOLDER`: the memory of a step that is not longhaul's.

The file defines build() and step(state), as footprint.predict takes them; if step has parameters
`batch` and `seq`, the flags of that name set them. Of a Hugging Face folder only the configuration
is read. See docs/FOOTPRINT.md.
"""

import functools
import importlib.util
import inspect
import json
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from footprint import Report, predict
from footprint.device import card
from footprint.owners import holdings
from longhaul import cli
from longhaul.cli import flag
from longhaul.memory.fit import Verdict
from longhaul.memory.hugging_face import DTYPES, OPTIMIZERS, Training
from longhaul.memory.search import Say, advise, solve

OPENS = ("step", "hf")  # flags that lead here
OF_HF = ("dtype", "autocast", "optimizer", "checkpointing")  # build() decides them otherwise
SIZES = ("batch", "seq")
SOLVES = {"context": "seq", "batch": "batch"}  # --solve -> the flag that it sets
MOST = 2**31 - 1  # rows, tokens
MOST_RANKS = 2**16
DEFAULT_GIB = 80.0  # of the card that --solve looks at
MANY = 8  # ranks that --advise tries at most, unless --gpus says otherwise


@dataclass(frozen=True)
class StepConfig:
    """The flags of `profile_memory.py --step` and `--hf`."""

    step: str = flag("", "FILE.py[:build,step]: a file with build() and step(state)")
    hf: str = flag("", "Hugging Face folder whose config.json describes the model")
    device: str = flag("cuda", "device that is predicted", choices=("cpu", "cuda"))
    depth: int = flag(2, "of the module names that stages tell apart", at_least=1, at_most=99)
    html: str = flag("", "HTML file to write: the step's timeline and tables on one page")
    svg: str = flag("", "SVG file to write: the timeline alone")
    json: str = flag("", "JSON file to write, with every result")
    seq: int = flag(
        512, "tokens of a row; with --step the argument seq of step", at_least=1, at_most=MOST
    )
    batch: int = flag(
        1, "rows of a rank; with --step the argument batch of step", at_least=1, at_most=MOST
    )
    dtype: str = flag("fp32", "of the parameters, with --hf", choices=tuple(DTYPES))
    autocast: str = flag("none", "compute precision, with --hf", choices=("none", "bf16"))
    optimizer: str = flag("adamw", "with --hf", choices=OPTIMIZERS)
    checkpointing: bool = flag(False, "recompute activations in the backward, with --hf")
    fsdp: int = flag(
        1,
        "ranks that share the model (FSDP2); with --step build() shards it",
        at_least=1,
        at_most=MOST_RANKS,
    )
    solve: str = flag(
        "none", "what to find: the longest row or the most rows", (), ("none", "context", "batch")
    )
    advise: bool = flag(False, "say what to change so that the step fits --gpu or --vram")
    gpu: str = flag("", "name of the card, with --solve and --advise")
    gpu_memory_gib: float = flag(
        0.0,
        f"memory of one GPU, instead of --gpu; --solve assumes {DEFAULT_GIB:g} if neither is given",
        ("vram",),
    )
    cc: int = flag(
        0,
        "compute capability x 10 of the GPU, such as 86; 0: that of --gpu, or 80",
        at_least=0,
        at_most=999,
    )
    gpus: int = flag(
        MANY, "most GPUs that share the model, with --advise", at_least=1, at_most=MOST_RANKS
    )

    def __post_init__(self):
        cli.check_ranges(self)
        if bool(self.step) == bool(self.hf):
            raise ValueError("--step FILE.py and --hf FOLDER say what is predicted: give one")
        if self.advise and self.solve != "none":
            raise ValueError("--solve and --advise answer different questions: give one")
        if self.device == "cpu" and (self.advise or self.solve != "none"):
            asked = "--advise" if self.advise else "--solve"
            raise ValueError(f"{asked} looks for what fits a GPU: drop --device cpu")

    def training(self) -> Training:
        """How the model of --hf is trained."""
        return Training(
            self.hf,
            self.seq,
            self.batch,
            self.dtype,
            self.autocast,
            self.optimizer,
            self.checkpointing,
            self.fsdp,
        )


def is_asked_for(words: list[str]) -> bool:
    """Whether a command line is about a step that is not longhaul's."""
    names = {word.split("=")[0] for word in words}
    return any(f"--{name}" in names for name in OPENS)


def main(words: list[str], say: Say) -> int:
    """Answer a command line, say it line by line, and write its files; the exit code."""
    typed = cli.given(StepConfig, words, __doc__.splitlines()[0])
    cfg = StepConfig(**typed)
    predicted = of_file(cfg, typed.keys()) if cfg.step else of_hugging_face

    if cfg.solve == "none" and not cfg.advise:
        report = predicted(cfg)
        say(str(report))
        _write(cfg, report, {})
        return Verdict.FITS.exit_code

    if cfg.advise:
        found = advise(cfg, card(cfg.gpu, cfg.gpu_memory_gib, cfg.cc), predicted, say)
    else:
        gib = cfg.gpu_memory_gib or (0.0 if cfg.gpu else DEFAULT_GIB)
        found = solve(cfg, SOLVES[cfg.solve], card(cfg.gpu, gib, cfg.cc), predicted, say)
    if found.report:
        say(f"\n{found.report}\n")
    say(found.words)
    _write(cfg, found.report, found.as_json())
    return found.verdict.exit_code


def _write(cfg: StepConfig, report: Report, more: dict) -> None:
    """The page and the results, with `more`; ValueError if a file cannot be written."""
    if cfg.html:
        report.html(cfg.html, cfg.step or cfg.hf)
    if cfg.svg:
        report.svg(cfg.svg)
    if not cfg.json:
        return
    found = report.json() | more
    try:
        Path(cfg.json).write_text(json.dumps(found, indent=1), encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"--json {cfg.json} cannot be written ({error}): name another file"
        ) from None


def of_hugging_face(cfg: StepConfig) -> Report:
    """The prediction of a Hugging Face folder."""
    build, step = cfg.training().functions()
    return predict(build, step, cfg.device, cfg.fsdp, cfg.depth)


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

    def predicted(cfg: StepConfig) -> Report:
        given = {name: getattr(cfg, name) for name in sizes}
        checked = functools.partial(_built, build, cfg.fsdp)
        one_step = functools.partial(step, **given)
        return predict(checked, one_step, cfg.device, cfg.fsdp, cfg.depth)

    return predicted


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


def _functions(words: str) -> tuple[Callable, Callable]:
    """build and step."""
    path, _, names = words.partition(":")
    build, _, step = (names or "build,step").partition(",")
    module = _load(path)
    for name in (build, step):
        if not callable(getattr(module, name, None)):
            raise ValueError(
                f"--step {words}: {path} has no function {name!r}: define build() and step(state), "
                "or name them: --step FILE.py:my_build,my_step"
            )
    return getattr(module, build), getattr(module, step)


def _load(path: str) -> ModuleType:
    """A Python file as a module; its errors are its own."""
    if not Path(path).is_file() or not path.endswith(".py"):
        raise ValueError(f"--step {path} is no Python file: give the path of one")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
