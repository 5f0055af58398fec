"""Tasks of lm-evaluation-harness: `python -m scripts.lm_eval --checkpoint DIR --tasks a,b`.

It needs the optional extra lm_eval. The numbers are those of the harness with `--model hf` on the
exported folder; docs/EVALUATION.md says where the two differ. Many tasks download their data from
the Hugging Face Hub; a task defined in a YAML file of --include_path may read a local file.
"""

import difflib
import importlib.util
import json
import logging
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from data.load_tokenizer import AnyTokenizer
from longhaul import cli
from longhaul.cli import flag
from longhaul.dist import named_device
from longhaul.generate import cast_matrices
from scripts.source import Source, SourceConfig, tokenizer_of

INSTALL = "pip install -e '.[lm_eval]', or pip install lm_eval"
# What a task raises whose settings are wrong, or whose data cannot be had.
OF_TASKS = (ImportError, OSError, ValueError, TypeError, LookupError)


@dataclass(frozen=True)
class LmEvalConfig(SourceConfig):
    """The flags."""

    LEFT_OUT: ClassVar[frozenset[str]] = frozenset({"attention_type", "blocks"})

    tasks: str = flag("", "names of tasks, groups or tags with commas; * matches")
    include_path: str = flag(
        "", "folder with tasks of your own as YAML files, besides those of the harness"
    )
    limit: int = flag(0, "only so many documents of each task; 0: all", at_least=0)
    num_fewshot: int = flag(
        -1, "examples before each question; -1: what the task says", at_least=-1
    )
    batch_size: int = flag(
        64,
        "texts that pass through the model at once, at most; they are packed into one row",
        at_least=1,
    )
    max_length: int = flag(
        0,
        "the window in tokens: longer prompts are refused, longer texts are scored in windows; 0: "
        "what the model was trained for",
        at_least=0,
    )
    tokenizer: str = flag(
        "", "sentencepiece model, tokenizer.json or a folder with one; empty: the checkpoint's"
    )
    output: str = flag("", "also write all results to this JSON file")
    offline: bool = flag(False, "ask no network: only data that is here already")

    def __post_init__(self):
        super().__post_init__()
        cli.require(self, "tasks")
        if self.include_path and not Path(self.include_path).is_dir():
            raise ValueError(
                f"--include_path {self.include_path} is no folder: name one with YAML files"
            )
        output = Path(self.output).resolve()
        if self.output and (output.is_dir() or not output.parent.is_dir()):
            raise ValueError(f"--output {self.output}: name a file in a folder that exists")


def main(args: list[str] | None = None):
    """Evaluate and print the harness's table; bad input ends with one line and exit code 2."""
    cli.run(LmEvalConfig, evaluate, args, "scripts.lm_eval", __doc__.splitlines()[0])


def evaluate(given: LmEvalConfig):
    """Load tasks and model, run the tasks, print and write the results."""
    if given.offline:
        go_offline()
    require_extra()
    device = named_device(given.device)
    source = Source.open(given.checkpoint)
    tokenizer = tokenizer_of(source, given.tokenizer)

    tasks, manager = load_tasks(given.tasks.split(","), given.include_path)
    results = run(given, source, tokenizer, device, tasks, manager)
    show(results)
    if given.output:
        write(results, Path(given.output))


def go_offline():
    """Tell the libraries of Hugging Face, which read this when they are imported."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        os.environ[name] = "1"


def require_extra():
    """ValueError if the harness is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError(f"the package lm_eval is not installed: {INSTALL}")


# ---- the tasks


def load_tasks(names: list[str], include_path: str | None) -> tuple[list, Any]:
    """The harness's objects of these tasks with their data, and the TaskManager that knows them.

    ValueError for a name that is unknown, and for data that cannot be had.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of every default of a task
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # of every attempt to connect
    names = [name.strip() for name in names]
    manager = task_manager(names, include_path)
    tasks = []
    for name in matched(names, manager):
        print(f"loading the data of {name}", file=sys.stderr)
        tasks += loaded(name, manager)
    return tasks, manager


def task_manager(names: list[str], include_path: str | None):
    """What knows the tasks of a folder, and those of the harness if they are needed: reading its
    14,000 takes 6 seconds (measured on a CPU).
    """
    from lm_eval.tasks import TaskManager

    if include_path:
        own = TaskManager(include_path=include_path, include_defaults=False)
        if set(names) <= set(own.all_subtasks):
            return own
    print("reading the list of tasks", file=sys.stderr)
    return TaskManager(include_path=include_path)


def matched(names: list[str], manager) -> list[str]:
    """The names of tasks, without patterns; ValueError for one that matches none."""
    found: dict[str, None] = {}
    for name in names:
        fitting = manager.match_tasks([name])
        if not fitting:
            nearest = difflib.get_close_matches(name, manager.all_tasks, n=3)
            remedy = f"did you mean {' or '.join(nearest)}?"
            if not nearest:
                remedy = "give names from `lm_eval ls tasks`, or of a YAML file that can be parsed"
            raise ValueError(f"--tasks: {name!r} is unknown: {remedy}")
        found |= dict.fromkeys(fitting)
    return list(found)


def loaded(name: str, manager) -> list:
    """The group of this name, or the tasks; ValueError if they or their data cannot be had."""
    try:
        found = manager.load(name)
    except OF_TASKS as error:
        words = " ".join(str(error).split())[:200]
        raise ValueError(
            f"task {name} cannot be loaded ({type(error).__name__}, {words}): it may need another "
            "package, a network (run it once where there is one, and copy ~/.cache/huggingface), "
            "or other settings in its YAML file"
        ) from None
    group = found["groups"].get(name)
    return [group] if group else list(found["tasks"].values())


# ---- running


def run(
    given: LmEvalConfig,
    source: Source,
    tokenizer: AnyTokenizer,
    device: torch.device,
    tasks: list,
    manager,
) -> dict[str, Any]:
    """The harness's results, without its samples."""
    from lm_eval import simple_evaluate

    from longhaul.evals.harness import LonghaulLM

    model = source.load_in(device, given.dtype)
    if device.type == "cuda":
        cast_matrices(model)
    window = given.max_length or source.reach
    lm = LonghaulLM(
        model,
        tokenizer,
        window,
        device,
        batch_size=given.batch_size,
        stop_ids=source.stop_ids(tokenizer),
    )
    results = simple_evaluate(
        lm,
        tasks=tasks,
        task_manager=manager,
        num_fewshot=None if given.num_fewshot < 0 else given.num_fewshot,
        limit=given.limit or None,
        log_samples=False,
    )
    results["config"] |= {
        "model_args": {"checkpoint": given.checkpoint, "dtype": given.dtype, "window": lm.window},
        "batch_size": given.batch_size,
        "device": str(device),
    }
    return results


def show(results: dict[str, Any]):
    """Print the harness's tables."""
    from lm_eval.utils import make_table

    print(make_table(results))
    if results.get("groups"):
        print(make_table(results, "groups"))


def write(results: dict[str, Any], path: Path):
    """Write the results as JSON."""
    from lm_eval.utils import handle_non_serializable

    text = json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    # end quietly if the reader of a pipe has had enough
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    main()
