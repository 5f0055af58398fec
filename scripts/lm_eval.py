"""lm-evaluation-harness on a model of sparse attention:
`python -m scripts.lm_eval --checkpoint DIR --tasks a,b`.

It needs the optional extra lm_eval. A dense model needs only the harness: export it, and run
`lm_eval --model hf` on the folder. The numbers are computed alike; docs/EVALUATION.md says where
the two differ. Many tasks download their data from the Hugging Face Hub; a task defined in a YAML
file of --include_path may read a local file.
"""

import importlib.util
import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from data.load_tokenizer import AnyTokenizer
from longhaul import cli
from longhaul.cli import flag
from longhaul.dist import named_device
from longhaul.generate import cast_matrices
from model import Standard
from scripts.source import Source, SourceConfig, tokenizer_of

INSTALL = "pip install lm_eval tokenizers"
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
    cli.run(LmEvalConfig, evaluate, args, "scripts.lm_eval", __doc__.split("\n\n")[0])


def evaluate(given: LmEvalConfig):
    """Load tasks and model, run the tasks, print and write the results."""
    if given.offline:
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}  # read when imported
    require_extra()
    source = Source.open(given.checkpoint)
    refuse_dense(source, given.tasks)
    tokenizer = tokenizer_of(source, given.tokenizer)
    results = run(given, source, tokenizer)

    from lm_eval.utils import handle_non_serializable, make_table

    print(make_table(results))
    if results.get("groups"):
        print(make_table(results, "groups"))
    if given.output:
        text = json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False)
        Path(given.output).write_text(text + "\n", encoding="utf-8")
        print(f"wrote {given.output}")


def require_extra():
    """ValueError if the harness is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError(f"the package lm_eval is not installed: {INSTALL}")


def refuse_dense(source: Source, tasks: str):
    """ValueError for a model that the harness can read by itself."""
    if source.config.attention.name != Standard.name:
        return
    folder = source.folder
    export = ""
    if source.checkpoint is not None:
        folder = "EXPORTED"
        export = (
            f"python -m scripts.convert_qwen3 --checkpoint {source.folder} --output {folder} && "
        )
    raise ValueError(
        f"{source.folder} has standard attention, which lm_eval reads by itself: run `{export}"
        f"lm_eval --model hf --model_args pretrained={folder},add_bos_token=False --tasks {tasks}`"
    )


def run(given: LmEvalConfig, source: Source, tokenizer: AnyTokenizer) -> dict[str, Any]:
    """The harness's results, without its samples."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from longhaul.evals.harness import LonghaulLM

    manager = TaskManager(include_path=given.include_path or None)
    tasks = load_tasks([name.strip() for name in given.tasks.split(",")], manager)
    device = named_device(given.device)
    model = source.load_in(device, given.dtype)
    if device.type == "cuda":
        cast_matrices(model)
    window = given.max_length or source.reach
    stops = source.stop_ids(tokenizer)
    results = simple_evaluate(
        LonghaulLM(model, tokenizer, window, device, given.batch_size, stops),
        tasks=tasks,
        task_manager=manager,
        num_fewshot=None if given.num_fewshot < 0 else given.num_fewshot,
        limit=given.limit or None,
        log_samples=False,
    )
    results["config"] |= {
        "model_args": {"checkpoint": given.checkpoint, "dtype": given.dtype, "window": window},
        "batch_size": given.batch_size,
        "device": str(device),
    }
    return results


def load_tasks(names: list[str], manager) -> list:
    """The harness's groups and tasks of these names and patterns, with their data; ValueError for
    what is unknown or cannot be loaded.
    """
    found: dict[str, Any] = {}
    for pattern in names:
        matched = manager.match_tasks([pattern])
        if not matched:
            raise ValueError(f"--tasks: {pattern!r} is unknown: give names from `lm_eval ls tasks`")
        for name in matched:
            found |= load_task(name, manager)
    return list(found.values())


def load_task(name: str, manager) -> dict[str, Any]:
    """The group of this name, or its tasks by theirs."""
    try:
        loaded = manager.load(name)
    except OF_TASKS as error:
        words = " ".join(str(error).split())[:200]
        raise ValueError(
            f"task {name} cannot be loaded ({type(error).__name__}, {words}): it may need another "
            "package, a network (run it once where there is one, and copy ~/.cache/huggingface), "
            "or other settings in its YAML file"
        ) from None
    group = loaded["groups"].get(name)
    return {name: group} if group else loaded["tasks"]


if __name__ == "__main__":
    # end quietly if the reader of a pipe has had enough
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    main()
