"""What is inside a model: `python -m lab.run_full_analysis --checkpoint DIR --out DIR`.

It reads rows of the validation split and writes DIR/report.txt and DIR/analysis.json after each
part. The model is a checkpoint of longhaul or a Hugging Face folder. A part that refuses is named
in the report, and the exit code is that of the first refusal. docs/LAB.md says what the figures
mean.
"""

import base.with_torch  # noqa: F401  (first: a missing package is answered in one line)

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch

from base import durable
from base.flags import line_and_code
from data.dataset import Dataset
from data.progress import duration
from lab.analysis import memory as planner
from lab.analysis import report
from lab.analysis.config import AnalysisConfig
from lab.analysis.run import Analysis
from lab.analysis.samples import Samples
from longhaul import cli
from longhaul.checkpoint import start
from longhaul.dist import World, named_device
from longhaul.planner.plan import available_gib
from model import Decoder
from scripts.evaluate import Opened, check_data, note_if_beyond, open_data, print_folded

RESULT = "analysis.json"
REPORT = "report.txt"


def main(args: list[str] | None = None) -> int:
    """The command line; returns the exit code, and bad input ends with one line and 2."""
    try:
        cfg = cli.parse(AnalysisConfig, args, __doc__.splitlines()[0])
        return analyse(cfg)
    except (ValueError, OSError) as error:
        line, code = line_and_code(error)
        print(f"lab.run_full_analysis: error: {line}", file=sys.stderr)
        return code


def analyse(cfg: AnalysisConfig) -> int:
    """Run the parts, print the result and write the report; returns the exit code."""
    device = named_device(cfg.device)
    opened = Opened.of(cfg.checkpoint, "fp32", device)
    config = dataclasses.replace(opened.config, compute_dtype=cfg.dtype)
    cfg.check_model(config)
    dataset = the_data(cfg, opened)
    context = cfg.context_length or opened.context
    samples = Samples(dataset.split(cfg.split), context, cfg.num_samples, cfg.seed)
    folder = Path(cfg.out)
    check_new(folder)
    note_if_beyond(opened, context)

    plan = planner.plan(cfg, config, context, device.type, samples.longest)
    plan.check(available_gib(device, World()))
    print(f"{opened.folder}: {config.num_params():,} parameters, {cfg.dtype} on {device}")
    print_folded(f"{'memory':<19}{plan.line()}")

    # each weight is converted as it is read, so that they never exist in another precision as a
    # whole
    model = opened.load_in(device, cfg.dtype, getattr(torch, cfg.dtype))

    def meter(model: Decoder) -> planner.Meter:
        return planner.meter(model, device)

    analysis = Analysis(cfg, model, samples, folder, meter)
    planned = {name: peak for name, peak in plan.peaks.items() if name != "loading"}
    about = {
        "checkpoint": str(opened.folder),
        "settings": settings(cfg, analysis, opened, dataset, context, device),
        "planned_bytes": planned,
    }
    analysis.run(lambda: keep(folder, results(about, analysis)))
    show(folder, results(about, analysis))
    return analysis.exit_code


def check_new(folder: Path):
    """ValueError unless a folder of results can be made there, and nothing is overwritten."""
    for path in (folder, *folder.parents):
        if path.exists() and not path.is_dir():
            raise ValueError(f"--out {folder}: {path} is a file: name another folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"--out {folder} holds files: name a new or empty folder")


def the_data(cfg: AnalysisConfig, opened: Opened) -> Dataset:
    """The dataset whose rows are read; ValueError unless it is one, with the model's ids."""
    corpora = open_data(opened, cfg.data)
    if len(corpora) > 1:
        names = ", ".join(corpus.name for corpus in corpora)
        raise ValueError(f"the run was trained on {names}: name one of them with --data")
    dataset = corpora[0].dataset
    check_data(opened, dataset)
    return dataset


def settings(
    cfg: AnalysisConfig,
    analysis: Analysis,
    opened: Opened,
    dataset: Dataset,
    context: int,
    device: torch.device,
) -> dict[str, Any]:
    """All that decides a result, by the names of the flags."""
    return dataclasses.asdict(cfg) | {
        "checkpoint": start.digest(opened.folder)[:16],
        "data": dataset.fingerprint[:16],
        "context_length": context,
        "layers": ",".join(str(layer) for layer in analysis.layers),
        "compare": ",".join(cfg.precisions()),
        "device": device.type,
    }


def results(about: dict, analysis: Analysis) -> dict:
    """All that is known so far."""
    over = analysis.done.keys() | analysis.left_out.keys()
    return about | {
        "parts": analysis.done,
        "left_out": analysis.left_out,
        "missing": [name for name in analysis.parts if name not in over],
    }


def keep(folder: Path, result: dict):
    """Write the result, and the report."""
    durable.make_folder(folder)
    with durable.replacing(folder / REPORT) as temporary:
        durable.write_bytes(temporary, report.text(result).encode())
    durable.write_json(folder / RESULT, result)


def show(folder: Path, result: dict):
    """Print the result, and where it is."""
    for line in report.lines(result):
        print_folded(line)
    seconds = sum(part["seconds"] for part in result["parts"].values())
    print_folded(f"{'time':<19}{duration(seconds)}")
    print_folded(f"{'written':<19}{folder / REPORT}, {folder / RESULT}")


if __name__ == "__main__":
    sys.exit(main())
