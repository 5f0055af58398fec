"""Tasks of lm-evaluation-harness: `python -m scripts.lm_eval --checkpoint DIR --tasks a,b`.

It needs the optional extra lm_eval. The numbers are those of the harness with `--model hf` on the
exported folder; docs/EVALUATION.md says where the two differ. Many tasks download their data from
the Hugging Face Hub; a task defined in a YAML file of --include_path may read a local file.
"""

import argparse
import difflib
import importlib.util
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

from base.flags import PRECISIONS, Parser, precision
from data.load_tokenizer import AnyTokenizer, find_tokenizer, load_tokenizer
from longhaul import qwen3
from longhaul.checkpoint.load import check_tokenizer, load_model, newest, verified
from longhaul.dist import named_device
from longhaul.generate import cast_matrices
from longhaul.run.start import trained_context
from model import Decoder

INSTALL = "pip install -e '.[lm_eval]', or pip install lm_eval"
# exceptions of these packages are of a network
NETWORK = {"aiohttp", "httpx", "httpx2", "requests", "urllib3"}


class Evaluated(NamedTuple):
    """A model on the CPU, its tokenizer, and the tokens that its positions reach."""

    model: Decoder
    tokenizer: AnyTokenizer
    window: int


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(description=__doc__.splitlines()[0], prog="python -m scripts.lm_eval")
    parser.add_argument(
        "--checkpoint",
        required=True,
        metavar="DIR",
        help="a step-* folder, a run's folder, whose newest checkpoint is taken, or a Hugging Face "
        "Qwen3 folder",
    )
    parser.add_argument(
        "--tasks", required=True, metavar="A,B", help="names of tasks, groups or tags; * matches"
    )
    parser.add_argument(
        "--include_path",
        default=None,
        metavar="DIR",
        help="folder with tasks of your own as YAML files, besides those of the harness",
    )
    parser.add_argument(
        "--limit", type=int, default=None, help="only so many documents of each task; default: all"
    )
    parser.add_argument(
        "--num_fewshot",
        type=int,
        default=None,
        help="examples before each question; default: what the task says",
    )
    parser.add_argument(
        "--batch_size",
        type=int,
        default=64,
        help="texts that pass through the model at once, at most; they are packed into one row",
    )
    parser.add_argument(
        "--max_length",
        type=int,
        default=None,
        help="the window in tokens: longer prompts are refused, longer texts are scored in "
        "windows; default: what the model was trained for",
    )
    parser.add_argument(
        "--tokenizer",
        default=None,
        help="sentencepiece model, tokenizer.json or a folder with one; default: the checkpoint's",
    )
    parser.add_argument(
        "--device", default="auto", help="where to compute: auto, cpu, cuda or cuda:N"
    )
    parser.add_argument(
        "--dtype",
        type=precision,
        choices=("fp32", "bf16"),
        default="fp32",
        help="compute precision",
    )
    parser.add_argument(
        "--output", default=None, metavar="FILE.json", help="also write all results to this file"
    )
    parser.add_argument(
        "--offline", action="store_true", help="ask no network: only data that is here already"
    )
    return parser


def main(args: list[str] | None = None):
    """Evaluate and print the harness's table; bad input ends with one line and exit code 2."""
    parser = build_parser()
    given = parser.parse_args(args)
    try:
        evaluate(given)
    except ValueError as error:
        parser.error(str(error))


def evaluate(given: argparse.Namespace):
    """Load tasks and model, run the tasks, print and write the results."""
    check(given)
    if given.offline:
        go_offline()
    require_extra()
    device = named_device(given.device)
    folder = Path(given.checkpoint)
    tokenizer = load_tokenizer(tokenizer_path(folder, given.tokenizer))

    tasks, manager = load_tasks(given.tasks.split(","), given.include_path)
    evaluated = opened(folder, tokenizer, PRECISIONS[given.dtype])
    results = run(given, evaluated, device, tasks, manager)
    show(results)
    if given.output:
        write(results, Path(given.output))


def check(given: argparse.Namespace):
    """ValueError for numbers and paths that cannot be."""
    for name in ("limit", "batch_size", "max_length"):
        value = getattr(given, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} {value} is out of range: give at least 1")
    if given.num_fewshot is not None and given.num_fewshot < 0:
        raise ValueError(f"--num_fewshot {given.num_fewshot} is out of range: give at least 0")

    if given.include_path and not Path(given.include_path).is_dir():
        raise ValueError(
            f"--include_path {given.include_path} is no folder: name one with YAML files"
        )
    if given.output and not Path(given.output).resolve().parent.is_dir():
        raise ValueError(f"--output {given.output}: its folder does not exist: make it first")
    if given.output and Path(given.output).is_dir():
        raise ValueError(f"--output {given.output} is a folder: name a file, such as lm_eval.json")


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
    for name in matched(names, manager, include_path):
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


def matched(names: list[str], manager, include_path: str | None = None) -> list[str]:
    """The names of tasks, without patterns; ValueError for one that matches none."""
    found: list[str] = []
    for name in names:
        fitting = manager.match_tasks([name]) if name else []
        if not fitting:
            raise ValueError(unknown(name, manager.all_tasks, include_path))
        found += [task for task in fitting if task not in found]
    return found


def unknown(name: str, known: list[str], include_path: str | None) -> str:
    """What to say of a name that is no task."""
    nearest = difflib.get_close_matches(name, known, n=3)
    if nearest:
        return f"--tasks: {name!r} is unknown: did you mean {' or '.join(nearest)}?"
    if include_path:
        return (
            f"--tasks: {name!r} is unknown: define it in a YAML file of {include_path}, and see "
            "whether that can be parsed, because the harness passes over one that cannot"
        )
    return (
        f"--tasks: {name!r} is unknown: give names from `lm_eval ls tasks`, or --include_path with "
        "a YAML file that defines it"
    )


def loaded(name: str, manager) -> list:
    """The group of this name, or the tasks; ValueError if they or their data cannot be had."""
    try:
        found = manager.load(name)
    except ImportError as error:
        raise ValueError(f"task {name} needs another package: {one_line(error)}") from None
    except Exception as error:  # of the harness and of datasets; what has no remedy is raised again
        if is_network(error):
            raise ValueError(
                f"task {name} has no data here and cannot download it ({one_line(error)}): run it "
                "once where there is a network, and copy ~/.cache/huggingface"
            ) from None
        if is_wrong_task(error):
            raise ValueError(broken(name, error, manager.task_index.get(name))) from None
        raise
    group = found["groups"].get(name)
    return [group] if group else list(found["tasks"].values())


def broken(name: str, error: Exception, entry: Any) -> str:
    """What to say of a task that the harness cannot load; `entry` is its place in the index."""
    kind = type(error).__name__
    where = getattr(entry, "yaml_path", None) or "the YAML file that defines it"
    if isinstance(error, FileNotFoundError):
        remedy = f"correct dataset_path and dataset_kwargs in {where}"
    elif isinstance(error, TypeError) and "dataset_path" not in (getattr(entry, "cfg", None) or {}):
        remedy = f"give dataset_path in {where}"
    else:
        remedy = f"correct {where} or its data"
    return f"task {name} cannot be loaded ({kind}, {one_line(error)}): {remedy}"


def is_network(error: Exception) -> bool:
    """Whether an exception is of the network."""
    of_system = isinstance(error, (ConnectionError, TimeoutError))
    return of_system or not NETWORK.isdisjoint(packages(error))


def is_wrong_task(error: Exception) -> bool:
    """Whether an exception is of the kind that a wrong setting of a task, or wrong data, raise."""
    of_settings = isinstance(error, (OSError, ValueError, TypeError, LookupError))
    return of_settings or "datasets" in packages(error)


def packages(error: Exception) -> set[str]:
    """The packages that define an exception and what it is derived from."""
    return {kind.__module__.partition(".")[0] for kind in type(error).__mro__}


def one_line(error: Exception) -> str:
    """The beginning of an exception's message, in one line."""
    return " ".join(str(error).split())[:200]


# ---- the model


def tokenizer_path(folder: Path, given: str | None) -> Path:
    """The tokenizer that is given, or that of the checkpoint; ValueError if it has none."""
    if given:
        return Path(given)
    home = folder if is_hugging_face(folder) else newest(folder).parent
    found = find_tokenizer(home)
    if found is None:
        raise ValueError(f"{home} has no tokenizer: give --tokenizer PATH")
    return found


def opened(folder: Path, tokenizer: AnyTokenizer, dtype: str) -> Evaluated:
    """What is evaluated, from a Hugging Face folder or a checkpoint of longhaul."""
    if is_hugging_face(folder):
        model = qwen3.from_hf(folder, compute_dtype=dtype)
        return Evaluated(model, tokenizer, model.config.rope_reach)

    checkpoint = verified(newest(folder))
    check_tokenizer(checkpoint, tokenizer.sha256, tokenizer.path, str(tokenizer.path))
    return Evaluated(load_model(checkpoint, dtype=dtype), tokenizer, trained_context(checkpoint))


def is_hugging_face(folder: Path) -> bool:
    """Whether a folder is of Hugging Face, not of longhaul."""
    return (folder / "config.json").is_file()


# ---- running


def run(
    given: argparse.Namespace, evaluated: Evaluated, device, tasks: list, manager
) -> dict[str, Any]:
    """The harness's results, without its samples."""
    from lm_eval import simple_evaluate

    from longhaul.evals.harness import LonghaulLM

    model = evaluated.model.to(device)
    if device.type == "cuda":
        cast_matrices(model)
    lm = LonghaulLM(
        model,
        evaluated.tokenizer,
        given.max_length or evaluated.window,
        device,
        batch_size=given.batch_size,
    )
    results = simple_evaluate(
        lm,
        tasks=tasks,
        task_manager=manager,
        num_fewshot=given.num_fewshot,
        limit=given.limit,
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
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--output {path} cannot be written ({error}): name another") from None
    print(f"wrote {path}")


if __name__ == "__main__":
    # end quietly if the reader of a pipe has had enough
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    main()
