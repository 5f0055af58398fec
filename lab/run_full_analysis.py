"""What is inside a model: `python -m lab.run_full_analysis --checkpoint DIR --out DIR`.

It reads rows of the validation split and writes DIR/report.txt and DIR/analysis.json. The model is
a checkpoint of longhaul or a Hugging Face folder. A command that was killed continues
with the parts that are done; on a finished folder it prints the result. docs/LAB.md says what
the figures mean.
"""

import base.installed  # noqa: F401  (first: a missing package is answered in one line)

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch

from base.flags import line_and_code
from data.dataset import Dataset
from data.progress import duration
from lab.analysis import memory as planner
from lab.analysis import report
from lab.analysis.config import AnalysisConfig
from lab.analysis.parts import REPORT, RESULT, Parts
from lab.analysis.run import Analysis, prompt_pairs
from lab.analysis.samples import Samples
from longhaul import cli
from longhaul.checkpoint import start
from longhaul.dist import World, named_device
from longhaul.memory.plan import available_gib
from model import Decoder, ModelConfig
from scripts.evaluate import Opened, check_data, note_if_beyond, open_data, print_folded

# Settings that decide no result: where it is computed from, and where it goes
ELSEWHERE = {"checkpoint", "data", "out"}


def main(args: list[str] | None = None) -> int:
    """The command line; returns the exit code, and bad input ends with one line and 2."""
    try:
        cfg = cli.parse(AnalysisConfig, args, __doc__.splitlines()[0])
        analyse(cfg)
    except (ValueError, OSError) as error:
        line, code = line_and_code(error)
        print(f"lab.run_full_analysis: error: {line}", file=sys.stderr)
        return code
    return 0


def analyse(cfg: AnalysisConfig):
    """Run what is not done yet, print the result and write the report."""
    device = named_device(cfg.device)
    opened = Opened.of(cfg.checkpoint, "fp32", device)
    config = dataclasses.replace(opened.config, compute_dtype=cfg.dtype)
    cfg.check_model(config)

    dataset = the_data(cfg, opened)
    context = cfg.context_length or opened.context
    samples = Samples(dataset.split(cfg.split), context, cfg.num_samples, cfg.seed)
    settings = identity(cfg, config, opened, dataset, context, device)
    parts = Parts(Path(cfg.out), settings)
    if parts.finished() is None:
        note_if_beyond(opened, context)
        run(cfg, config, opened, samples, parts, device)
    show(parts)


def run(
    cfg: AnalysisConfig,
    config: ModelConfig,
    opened: Opened,
    samples: Samples,
    parts: Parts,
    device: torch.device,
):
    """The parts that are not done, and the files of the result."""
    pairs = None
    if not cfg.skip_patching:
        pairs = prompt_pairs(samples, cfg, cfg.seed)
        found = len(pairs.clean_BT)
        if found < cfg.prompts:
            print(f"{'prompts':<19}found {found} of {cfg.prompts} pairs")
    plan = planner.plan(cfg, config, samples.context_length, device.type, samples.longest)
    plan.check(available_gib(device, World()))
    print(f"{opened.folder}: {config.num_params():,} parameters, {cfg.dtype} on {device}")
    print_folded(f"{'memory':<19}{plan.line()}")

    def load(dtype: str) -> Decoder:
        return load_in(opened, dtype, device)

    def meter(model: Decoder) -> planner.Meter:
        return planner.meter(model, device)

    with parts.locked():
        analysis = Analysis(cfg, config, samples, pairs, load, parts, meter)
        done = analysis.run()
        unmeasured = {*analysis.left_out, "loading"}
        result = {
            "checkpoint": str(opened.folder),
            "settings": parts.settings,
            "planned_bytes": {
                name: peak for name, peak in plan.peaks.items() if name not in unmeasured
            },
            "left_out": analysis.left_out,
            "parts": done,
        }
        parts.finish(result, report.text(result))


def load_in(opened: Opened, dtype: str, device: torch.device) -> Decoder:
    """The model on `device`, its weights and what it computes in a precision by its name in torch.

    Each weight is converted as it is read, so that they never exist in another precision as a
    whole.
    """
    return opened.load_in(device, dtype, getattr(torch, dtype))


def the_data(cfg: AnalysisConfig, opened: Opened) -> Dataset:
    """The dataset whose rows are read; ValueError unless it is one, with the model's ids."""
    corpora = open_data(opened, cfg.data)
    if len(corpora) > 1:
        names = ", ".join(corpus.name for corpus in corpora)
        raise ValueError(f"the run was trained on {names}: name one of them with --data")
    dataset = corpora[0].dataset
    check_data(opened, dataset)
    return dataset


def identity(
    cfg: AnalysisConfig,
    config: ModelConfig,
    opened: Opened,
    dataset: Dataset,
    context: int,
    device: torch.device,
) -> dict[str, Any]:
    """All that decides a result, by the names of the flags."""
    found = {}
    for spec in dataclasses.fields(cfg):
        if spec.name not in ELSEWHERE:
            found[spec.name] = getattr(cfg, spec.name)
    return found | {
        "checkpoint": start.digest(opened.folder)[:16],
        "data": dataset.fingerprint[:16],
        "context_length": context,
        "layers": ",".join(str(layer) for layer in cfg.chosen(config)),
        "compare": ",".join(cfg.precisions()),
        "device": device.type,
    }


def show(parts: Parts):
    """Print the result of a finished analysis, and where it is."""
    result = parts.finished()
    assert result is not None, "the analysis is finished"
    for line in report.lines(result):
        print_folded(line)
    seconds = sum(part["seconds"] for part in result["parts"].values())
    print_folded(f"{'time':<19}{duration(seconds)}")
    print_folded(f"{'written':<19}{parts.folder / REPORT}, {parts.folder / RESULT}")


if __name__ == "__main__":
    sys.exit(main())
