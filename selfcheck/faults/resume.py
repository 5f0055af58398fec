"""Group C of the fault matrix: what a resume means. Imports train, longhaul, data and
selfcheck.faults of ours.
"""

import json
import math
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch._guards import detect_fake_mode

from base import tensors
from data import loader
from longhaul import optim, step
from longhaul.checkpoint.format import CheckpointError, checksum
from longhaul.checkpoint.load import verified
from longhaul.checkpoint.resume import check_complete
from longhaul.run import training
from selfcheck.faults.rows import Row, require
from tests import runs

CONSTANT = ["--schedule", "constant", "--save_every", "1000"]


def extended(
    folder: Path, source: Path, name: str, parts: list[tuple[int, int, list[str]]], **options
) -> Path:
    """A run that is continued: for each (ranks, last step, flags) the same folder once more."""
    for ranks, last, flags in parts:
        args = runs.arguments(source, folder / name, *CONSTANT, *flags, "--max_steps", str(last))
        log = folder / f"{name}-{last}"
        for child in (
            runs.start_ranks(args, log, ranks, **options)
            if ranks > 1
            else [runs.start(args, log, **options)]
        ):
            require(child.wait() == 0, f"{name}: {child.words()[-600:]}")
    return folder / name


def noting(path: Path):
    """Write down every training row that is read: its position and the row of the packing plan."""
    original = loader.Loader.batch

    def batch(self, *args):
        lines = [f"{position} {self.row_index(position)}\n" for position in self.positions(*args)]
        with path.open("a") as file:
            file.write("".join(lines))
        return original(self, *args)

    loader.Loader.batch = batch


def noted(path: Path) -> list[tuple[int, int]]:
    """Those rows by position: ranks write them down in any order."""
    return sorted(tuple(map(int, line.split())) for line in path.read_text().splitlines())


# -------------------------------------------------------------------------------------------- order


def epochs(trials: int, folder: Path) -> str:
    """Row 21."""
    source = runs.dataset(folder / "data", 16)
    epoch = loader.Loader(runs.data.dataset.open_dataset(source), runs.CONTEXT, 2).rows_per_epoch
    steps = math.ceil(epoch / 2)  # of two rows
    moments = steps - 1, steps, 2 * steps + 2
    total, batch = 2 * steps + 4, ["--global_batch_size", "2"]
    whole = extended(
        folder, source, "whole", [(1, total, batch)], before=partial(noting, folder / "rows")
    )
    parts = extended(
        folder,
        source,
        "parts",
        [(1, last, batch) for last in (*moments, total)],
        before=partial(noting, folder / "rows-parts"),
    )
    require(noted(folder / "rows-parts") == noted(folder / "rows"), "other rows")
    require(runs.same_end(parts, whole), "other bits")
    return (
        f"{epoch} rows an epoch; resumed at the last batch, the end and in the third epoch: same "
        "rows, same bits"
    )


def worlds(trials: int, folder: Path) -> str:
    """Row 22: `trials` steps of 2 rows for the bits, 6 rows where three ranks take part."""
    source, steps = runs.dataset(folder / "data"), trials
    two, six = (
        ["--global_batch_size", "2", "--grad_clip", "0.5"],
        ["--global_batch_size", "6"],
    )
    thirds = [steps // 3, 2 * steps // 3, steps]
    options = dict(before=partial(noting, folder / "rows2"))
    one = extended(folder, source, "one", [(1, steps, two)], **options)
    for name, ranks in dict(two=[2], back=[1, 2, 1]).items():
        parts = list(zip(ranks, thirds if len(ranks) > 1 else [steps], [two] * 3, strict=False))
        out = extended(folder, source, name, parts, before=partial(noting, folder / f"rows-{name}"))
        require(noted(folder / f"rows-{name}") == noted(folder / "rows2"), f"{name}: other rows")
        require(same_weights(out, one), f"{name}: other bits than one process")
    extended(folder, source, "six", [(1, 4, six)], before=partial(noting, folder / "rows6"))
    extended(
        folder,
        source,
        "three",
        [(2, 2, six), (3, 4, six)],
        before=partial(noting, folder / "rows-three"),
    )
    require(noted(folder / "rows-three") == noted(folder / "rows6"), "2 -> 3 ranks: other rows")
    refused = runs.start_ranks(
        runs.arguments(source, folder / "two", *CONSTANT, *two[2:], "--max_steps", str(steps + 1)),
        folder / "refused",
        3,
    )
    codes = [rank.wait() for rank in refused]
    require(
        codes == [7] * 3 and "one of [1, 2]" in refused[0].last_line(),
        f"{codes}: {refused[0].last_line()}",
    )
    return (
        f"after {steps} steps 1, 2 and 1->2->1 ranks have the same weights, "
        "moments and rows; 2->3 the same rows; 3 ranks for a "
        "batch of 2: code 7, sizes listed"
    )


def same_weights(out: Path, other: Path) -> bool:
    """Whether the newest checkpoints of two runs hold the same bits, for any number of ranks."""
    found, wanted = whole_tensors(out), whole_tensors(other)
    return found.keys() == wanted.keys() and all(
        torch.equal(value, wanted[name]) for name, value in found.items()
    )


def whole_tensors(out: Path) -> dict[str, torch.Tensor]:
    folder = max(out.glob("step-????????"))
    parts: dict[str, list] = {}
    for file, about in verified(folder).files.items():
        with tensors.opened(folder / file) as source:
            for name, (start, _) in about.ranges.items():
                parts.setdefault(name, []).append((start, source.get_tensor(name)))
    return {
        name: torch.cat([rows for _, rows in sorted(pieces, key=lambda piece: piece[0])])
        for name, pieces in parts.items()
    }


def micro_batches(trials: int, folder: Path) -> str:
    """Row 23."""
    source, batch = runs.dataset(folder / "data"), ["--global_batch_size", "4"]
    extended(folder, source, "whole", [(1, 6, batch)], before=partial(noting, folder / "rows"))
    parts = [
        (1, 2, [*batch, "--batch_size", "1"]),
        (1, 4, [*batch, "--batch_size", "4"]),
        (1, 6, ["--batch_size", "2"]),
    ]
    changed = extended(
        folder, source, "changed", parts, before=partial(noting, folder / "changed-rows")
    )
    require(noted(folder / "changed-rows") == noted(folder / "rows"), "other rows")
    near = all(
        abs(a - b) < 1e-4
        for a, b in zip(runs.losses(changed), runs.losses(folder / "whole"), strict=True)
    )
    require(near, "other losses")
    return "micro-batches of 1, 4 and 2 rows, a step of 4: same rows, same losses within 1e-4"


# ----------------------------------------------------------------------------------------- settings


def changed_settings(trials: int, folder: Path) -> str:
    """Row 24."""
    source, out = runs.dataset(folder / "data"), folder / "run"
    extended(folder, source, "run", [(1, 3, [])])
    new = ["--lr", "0.02", "--adam", "beta1=0.5"]
    args = runs.arguments(source, out, *CONSTANT, *new, "--max_steps", "6")
    refused = runs.finish(args, folder / "refused", 2)
    require(
        "--lr: recorded 0.0003, now 0.02, --adam: recorded [], now ['beta1=0.5']"
        in refused.last_line(),
        refused.last_line(),
    )
    require("--resume" in refused.last_line(), "the remedy is not named")

    def seen():
        original = optim.build_optimizer

        def build(*given):
            optimizer = original(*given)
            print("betas in use", optimizer.param_groups[0]["betas"])
            return optimizer

        optim.build_optimizer = build

    applied = runs.finish(
        [*args, "--resume", str(out / "step-00000003")], folder / "applied", before=seen
    )
    require(
        "changed since the checkpoint: lr 0.0003 -> 0.02" in applied.words()
        and "adam [] -> ['beta1=0.5']" in applied.words(),
        "not said",
    )
    rates = [json.loads(line)["lr"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    require(
        rates[3:] == [0.02] * 3 and "betas in use (0.5, 0.95)" in applied.words(),
        f"not applied: {rates}",
    )
    require(
        runs.losses(out)[4:] != runs.losses(extended(folder, source, "plain", [(1, 6, [])]))[4:],
        "the run is as it was without them",
    )
    return (
        "refused naming each; with --resume CHECKPOINT applied, said on screen and in "
        "TensorBoard, and the losses are others"
    )


def other_run(trials: int, folder: Path) -> str:
    """Row 25."""
    source = runs.dataset(folder / "data")
    extended(folder, source, "run", [(1, 2, [])])
    newest = folder / "run" / "step-00000002"
    other = "--context_length 16 --vocab_size 128 --rope_theta 5e5 --seed 3"
    for where in ([], ["--output_dir", str(folder / "other"), "--resume", str(newest)]):
        flags = [*CONSTANT, "--max_steps", "4", *other.split(), *where]
        child = runs.finish(runs.arguments(source, folder / "run", *flags), folder / "log", 2)
        for words in (
            "context_length: recorded 32, now 16",
            "vocab_size: recorded 64, now 128",
            "rope_theta",
            "seed: recorded 0, now 3",
        ):
            require(words in child.last_line(), f"{words} is not in: {child.last_line()}")
    return (
        "context, vocabulary, rotary base, seed: 2, field by field, in the run's folder and "
        "for a named checkpoint"
    )


def replaced_data(trials: int, folder: Path) -> str:
    """Row 26."""
    source = runs.dataset(folder / "data")
    extended(folder, source, "run", [(1, 2, [])])
    shard = source / "shard-00000.bin"
    shard.write_bytes(shard.read_bytes()[::-1])
    args = runs.arguments(source, folder / "run", *CONSTANT, "--max_steps", "4")
    child = runs.finish(args, folder / "log", 3)
    require("shard-00000.bin" in child.last_line(), child.last_line())
    shard.write_bytes(shard.read_bytes()[::-1])
    runs.finish(args, folder / "again")
    return "3, naming the shard; with the true one back, the run goes on"


def missing_state(trials: int, folder: Path) -> str:
    """Row 27: the learning rate and every random draw are functions of step and seed, so those are
    what must be there.
    """
    source = runs.dataset(folder / "data")
    extended(folder, source, "run", [(1, 2, [])])
    path = folder / "run" / "step-00000002" / "manifest.json"
    content = json.loads(path.read_text())
    args = runs.arguments(
        source, folder / "run", *CONSTANT, "--max_steps", "4", "--resume", str(path.parent)
    )
    gone = {
        name: {key: value for key, value in content.items() if key != name}
        for name in (
            "step",
            "tokens",
            "data",
            "config",
            "model_config",
            "world_size",
            "files",
            "identity",
            "rows_per_step",
            "threads",
            "torch",
        )
    }
    gone["config's lr"] = content | dict(
        config={key: value for key, value in content["config"].items() if key != "lr"}
    )
    cfg = runs.cli.parse(runs.TrainConfig, runs.last_given(args))
    for name, manifest in gone.items():
        write_manifest(path, manifest)
        require(is_refused(path.parent, cfg), f"a manifest without {name} was taken")
    started = {name: gone[name] for name in ("step", "identity")} | {
        "data's seed": content | dict(data={"epoch": 0, "position": 2}),
        "another position": content | dict(data=content["data"] | {"position": 1}),
    }
    for name, manifest in started.items():
        write_manifest(path, manifest)
        child = runs.finish(args, folder / "log", 4)
        require("use another checkpoint" in child.last_line(), f"{name}: {child.last_line()}")
    return f"without {', '.join([*gone, *started])}: refused, with code 4"


def write_manifest(path: Path, manifest: dict):
    path.write_text(json.dumps(manifest | dict(checksum=checksum(manifest))))


def is_refused(folder: Path, cfg: runs.TrainConfig) -> bool:
    """Whether a resume finds that the manifest of a checkpoint lacks something."""
    try:
        check_complete(verified(folder), cfg)
    except CheckpointError as error:
        return "use another checkpoint" in str(error)
    return False


def other_machine(trials: int, folder: Path) -> str:
    """Row 28."""
    source = runs.dataset(folder / "data")
    extended(folder, source, "run", [(1, 2, [])])

    def elsewhere():
        os.environ.pop("OMP_NUM_THREADS", None)  # a user's own would decide
        runs.longhaul.dist.cores = lambda: 2
        torch.__version__ = "2.99.0"

    child = runs.finish(
        runs.arguments(source, folder / "run", *CONSTANT, "--max_steps", "3"),
        folder / "log",
        before=elsewhere,
    )
    for words in (
        "warning: the checkpoint was written with threads=1, and this run has threads=2",
        "and this run has torch=2.99.0",
    ):
        require(words in child.words(), f"not said: {words}")
    quiet = runs.finish(
        runs.arguments(
            source,
            folder / "run",
            *CONSTANT,
            "--max_steps",
            "3",
            "--output_dir",
            str(folder / "new"),
        ),
        folder / "quiet",
    )
    require("was written with" not in quiet.words(), "warned without cause")
    return "warned of threads and of torch's version, and not otherwise"


# -------------------------------------------------------------------------------- length schedules

LENGTHS = ["--length_schedule", "8:2,16:2,32:2", "--short_fraction", "0.25"]


def killed_between_lengths(trials: int, folder: Path) -> str:
    """Row 50: after `trials` of 6 steps, before they are saved, and between two stages."""
    source = runs.dataset(folder / "data", 400)
    flags = [*LENGTHS, "--global_batch_size", "2", "--save_every", "1", "--eval_every", "2"]
    edge = dying_at_an_edge
    steps = [partial(dying_after, step) for step in range(1, 7, 6 // trials)]
    end_alike(folder, source, flags, 1, [edge, edge], steps)
    end_alike(folder, source, flags, 2, [edge])
    return (
        f"three stages of 2 steps, killed after {trials} steps and at both edges, on 2 ranks at "
        "the first edge: weights, moments and losses of the undisturbed run"
    )


def end_alike(folder: Path, source: Path, flags: list[str], ranks: int, *deaths: list[Callable]):
    """Run once undisturbed and once for each of `deaths`, which kill one life of a run each: all
    must end with the same bits.
    """
    whole = folder / f"{ranks}-ranks-0"
    for number, faults in enumerate([[], *deaths]):
        out = folder / f"{ranks}-ranks-{number}"
        args = runs.arguments(source, out, *flags)
        for fault in faults:
            require(0 not in lives(args, ranks, fault), f"{out.name}: it was not killed")
        codes = lives(args, ranks)
        require(codes == [0] * ranks, f"{out.name} ended with {codes}")
        require(runs.same_end(out, whole), f"{out.name}: other bits")


def lives(args: list[str], ranks: int, before: Callable = lambda: None) -> list[int]:
    """The exit codes of the ranks of one life of a run."""
    out = Path(args[args.index("--output_dir") + 1])
    log = out.with_name(f"{out.name}.log")
    if ranks == 1:
        return [runs.start(args, log, before).wait()]
    return [child.wait() for child in runs.start_ranks(args, log, ranks, before)]


def dying_after(last: int):
    """Die when a step is done, and not saved yet."""
    original = step.update

    def update(state, *given):
        result = original(state, *given)
        if state.step == last and detect_fake_mode() is None:  # not in the plan's simulation
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    step.update = update


def dying_at_an_edge():
    """Die when a stage is saved, before the next one is built."""
    training.free_memory = lambda: os.kill(os.getpid(), signal.SIGKILL)


# -------------------------------------------------------------------------------- indexed attention

INDEXED = ["--attention_type", "indexed", "--blocks", "count=2", "block=8", "head_dim=32"]


def killed_around_the_warmup(trials: int, folder: Path) -> str:
    """Row 51: a warm-up of two steps, on one rank and on two."""
    source = runs.dataset(folder / "data")
    flags = [*INDEXED, "--indexer_warmup", "2", "--max_steps", "4", "--save_every", "1"]
    for ranks, deaths in {1: (1, 2, 3), 2: (2,)}.items():
        end_alike(folder, source, flags, ranks, [partial(dying_after, step) for step in deaths])
    return (
        "killed in the warm-up, at its last step and behind it on 1 rank, at its last step on 2: "
        "weights, moments and losses of the undisturbed run"
    )


ROWS: list[Row] = [
    Row(
        21,
        "resume at the last batch of an epoch, at its end, in a later one",
        "rows of the uninterrupted run",
        epochs,
    ),
    Row(
        22,
        "other numbers of ranks: 2->1, 1->2, 2->3",
        "same rows; 1 and 2: same bits; indivisible: 7",
        worlds,
        4,
        200,
    ),
    Row(23, "micro-batch changed, global batch kept", "same rows", micro_batches),
    Row(24, "--lr or betas changed", "refused; overridden: applied and said", changed_settings),
    Row(25, "architecture, vocabulary or context differs", "2, field by field", other_run),
    Row(26, "a data shard replaced, same name and size", "3", replaced_data),
    Row(27, "schedule, random state or step missing", "4, never made up", missing_state),
    Row(28, "threads or torch differ", "warned", other_machine),
    Row(
        50,
        "killed in each stage of a length schedule and between them, 1 and 2 ranks",
        "same bits",
        killed_between_lengths,
        2,
        6,
    ),
    Row(
        51,
        "indexed attention, killed in the warm-up of its indexer, at its end and behind it",
        "same bits",
        killed_around_the_warmup,
    ),
]
