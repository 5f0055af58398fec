"""`profile_memory.py --step FILE.py` or `--hf FOLDER`: the memory of a step that is not longhaul's.

The file defines build() and step(state), as footprint.predict takes them. Of a Hugging Face folder
only the configuration is read: no weights, and no code that lies there.
"""

import functools
import importlib
import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from footprint import Report, predict
from longhaul import cli
from longhaul.cli import flag

OPENS = ("step", "hf")  # flags that lead here
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class StepConfig:
    """The flags of `profile_memory.py --step` and `--hf`."""

    step: str = flag("", "FILE.py[:build,step]: a file with build() and step(state)")
    hf: str = flag("", "Hugging Face folder whose config.json describes the model")
    device: str = flag("cuda", "device that is predicted", choices=("cpu", "cuda"))
    depth: int = flag(2, "of the module names that stages tell apart", at_least=1, at_most=99)
    html: str = flag("", "HTML file to write: the step's timeline and tables on one page")
    json: str = flag("", "JSON file to write, with every result")
    seq: int = flag(512, "tokens of a row, with --hf", at_least=1, at_most=2**31 - 1)
    batch: int = flag(1, "rows of a step, with --hf", at_least=1, at_most=2**31 - 1)
    dtype: str = flag("fp32", "of the parameters, with --hf", choices=tuple(DTYPES))
    autocast: str = flag("none", "compute precision, with --hf", choices=("none", "bf16"))
    optimizer: str = flag("adamw", "with --hf", choices=("adamw", "adamw_fused", "sgd"))
    checkpointing: bool = flag(False, "recompute activations in the backward, with --hf")

    def __post_init__(self):
        cli.check_ranges(self)
        if bool(self.step) == bool(self.hf):
            raise ValueError("--step FILE.py and --hf FOLDER say what is predicted: give one")


def is_asked_for(words: list[str]) -> bool:
    """Whether a command line is about a step that is not longhaul's."""
    names = {word.split("=")[0] for word in words}
    return any(f"--{name}" in names for name in OPENS)


def predicted(words: list[str], description: str) -> Report:
    """Predict what a command line asks for, print its tables and write its files."""
    cfg = cli.parse(StepConfig, words, description)
    build, step = of_file(cfg.step) if cfg.step else of_hugging_face(cfg)
    report = predict(build, step, cfg.device, depth=cfg.depth)
    print(report)
    if cfg.html:
        report.html(cfg.html, cfg.step or cfg.hf)
    if cfg.json:
        write(cfg.json, report)
    return report


def write(path: str, report: Report) -> None:
    """The results as JSON; ValueError if the file cannot be written."""
    try:
        Path(path).write_text(json.dumps(report.json(), indent=1), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--json {path} cannot be written ({error}): name another file") from None


# ---- a file


def of_file(words: str) -> tuple[Callable, Callable]:
    """The functions of "FILE.py" or "FILE.py:build,step"."""
    path, _, names = words.partition(":")
    build, _, step = (names or "build,step").partition(",")
    module = load(path)
    for name in (build, step):
        if not callable(getattr(module, name, None)):
            raise ValueError(
                f"--step {words}: {path} has no function {name!r}: define build() and step(state), "
                "or name them: --step FILE.py:my_build,my_step"
            )
    return getattr(module, build), getattr(module, step)


def load(path: str) -> ModuleType:
    """A Python file as a module; its errors are its own."""
    if not Path(path).is_file() or not path.endswith(".py"):
        raise ValueError(f"--step {path} is no Python file: give the path of one")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- a configuration of Hugging Face


def of_hugging_face(cfg: StepConfig) -> tuple[Callable, Callable]:
    """The build and the step of the model that a folder's config.json describes."""
    config = _configuration(cfg.hf)
    model_class = _model_class(config)
    make = functools.partial(_batch, model_class.__name__, config, cfg)
    return functools.partial(_build, model_class, config, cfg), functools.partial(_step, make, cfg)


def _configuration(folder: str):
    if not (Path(folder) / "config.json").is_file():
        raise ValueError(f"--hf {folder}: there is no config.json: give the folder of a model")
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("--hf needs transformers: pip install transformers")
    transformers = importlib.import_module("transformers")
    return transformers.AutoConfig.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )


def _model_class(config) -> type[nn.Module]:
    """The class that the configuration names."""
    transformers = importlib.import_module("transformers")
    names = config.architectures or []
    known = [name for name in names if hasattr(transformers, name)]
    if not known:
        raise ValueError(
            f"--hf: config.json names no architecture that transformers has ({names}): set "
            '"architectures", such as ["LlamaForCausalLM"]'
        )
    return getattr(transformers, known[0])


def _build(model_class: type[nn.Module], config, cfg: StepConfig):
    model = model_class(config).to(DTYPES[cfg.dtype]).train()
    if cfg.checkpointing:
        model.gradient_checkpointing_enable()
    if cfg.optimizer == "sgd":
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fused = True if cfg.optimizer == "adamw_fused" else None
    return model, torch.optim.AdamW(model.parameters(), fused=fused)


def _batch(name: str, config, cfg: StepConfig) -> dict[str, Tensor]:
    """What a model of this name is trained on."""
    if name.endswith("ForImageClassification"):
        size = config.image_size
        pixels = torch.randn(cfg.batch, config.num_channels, size, size, dtype=DTYPES[cfg.dtype])
        return {"pixel_values": pixels, "labels": torch.randint(config.num_labels, (cfg.batch,))}

    ids = torch.randint(config.get_text_config().vocab_size, (cfg.batch, cfg.seq))
    if name.endswith("ForSequenceClassification"):
        return {"input_ids": ids, "labels": torch.randint(config.num_labels, (cfg.batch,))}
    kinds = ("CausalLM", "MaskedLM", "ConditionalGeneration", "LMHeadModel")
    if name.endswith(kinds):
        return {"input_ids": ids, "labels": ids}
    raise ValueError(
        f"--hf: what {name} is trained on is not known here: write build() and step(state) into a "
        "file and give --step FILE.py"
    )


def _step(make: Callable[[], dict[str, Tensor]], cfg: StepConfig, state) -> None:
    model, optimizer = state
    with torch.autocast("cpu", torch.bfloat16, enabled=cfg.autocast == "bf16"):
        loss = model(**make()).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
