"""Group A of the fault matrix: what happens to processes.

Every row ends with the same command given again, whose last weights must be those of a run that
nothing happened to.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import data.corpus
import data.dataset
from base import durable
from longhaul import step
from longhaul.checkpoint import load
from longhaul.evals import score
from longhaul.parallel import apply
from longhaul.run import heartbeat
from selfcheck.faults import crash
from selfcheck.faults.rows import Row, require
from tests import runs

ROOT = Path(__file__).parent.parent.parent
STEPS = ["--max_steps", "8", "--save_every", "3"]
ENDLESS = ["--max_steps", "1000000", "--save_every", "1000000", "--schedule", "constant"]


def whole_run(folder: Path, *more: str) -> tuple[Path, list[str]]:
    """(data, flags) after a run in folder/whole that nothing happens to."""
    source = runs.dataset(folder / "data")
    runs.finish(runs.arguments(source, folder / "whole", *more), folder / "whole.log")
    return source, list(more)


def again(folder: Path, args: list[str], name: str) -> str:
    """The remedy: the same command to its end, which must be that of folder/whole. What it said."""
    child = runs.finish(args, folder / f"{name}.again")
    require(
        runs.same_end(folder / name, folder / "whole"),
        f"{name}: other bits than the uninterrupted run",
    )
    return child.words()


# ------------------------------------------------------------------------------------------ kill -9


def killed_at_random(trials: int, folder: Path) -> str:
    """Row 1: lives of random length; a run that ends is compared, and a new one begins."""
    start = time.monotonic()
    source, more = whole_run(folder, *STEPS)
    lasts, draw = time.monotonic() - start, random.Random(0)
    kills = ended = 0
    while kills < trials or (folder / f"run{ended}").exists():
        name = f"run{ended}"
        child = runs.start(runs.arguments(source, folder / name, *more), folder / f"{name}.log")
        child.process.join(draw.uniform(0, 0.9 * lasts) if kills < trials else 120)
        if child.process.is_alive():
            kills += 1
            child.kill()
            continue
        require(child.wait() == 0, f"exit code {child.process.exitcode}: {child.words()[-600:]}")
        require(
            runs.same_end(folder / name, folder / "whole"),
            f"after {kills} kills: other bits than the uninterrupted run",
        )
        shutil.rmtree(folder / name)
        ended += 1
    return f"{kills} kills in {ended} runs, all finals bit-identical"


def killed_at_each_call(trials: int, folder: Path) -> str:
    """Row 2: before each call that changes the disk; writes of tensors are sampled, the others all
    taken where trials allow.
    """
    source, more = whole_run(folder, "--max_steps", "3", "--save_every", "1")
    calls: list[str] = []
    listing = folder / "calls"
    runs.finish(
        runs.arguments(source, folder / "counted", *more),
        folder / "counted.log",
        before=lambda: crash.watch(lambda index, name: listing.open("a").write(f"{name}\n")),
    )
    calls = listing.read_text().split()
    points = [index for index, name in enumerate(calls) if name != "write" or index % 16 == 0]
    points = points[:: max(1, len(points) // trials)]
    for index in points:
        args = runs.arguments(source, folder / f"at{index}", *more)
        runs.finish(
            args,
            folder / "killed.log",
            -signal.SIGKILL,
            before=partial(crash.watch, partial(crash.kill_at, index)),
        )
        again(folder, args, f"at{index}")
        shutil.rmtree(folder / f"at{index}")
    return (
        f"killed before {len(points)} of {len(calls)} calls of 3 saves and 1 pruning; each "
        "went on to the same bits"
    )


def killed_while_pruning(trials: int, folder: Path) -> str:
    """Row 12: in the middle of deleting an old checkpoint, and just before and after the rename
    that begins it.
    """
    source, more = whole_run(folder, "--max_steps", "4", "--save_every", "1")
    for name, fault in dict(
        half=crash.half_deleted, renamed=crash.before_deleting, standing=crash.before_pruning
    ).items():
        args = runs.arguments(source, folder / name, *more)
        runs.finish(args, folder / f"{name}.log", -signal.SIGKILL, before=fault)
        newest = max((folder / name).glob("step-????????"))
        load.verified(newest)
        require(
            newest.name == "step-00000003", f"{newest} is not the checkpoint that was just written"
        )
        require("resumed" in again(folder, args, name), "the run began anew")
    return (
        "killed at 3 moments of a pruning: the newest checkpoint verifies, and the run went on "
        "from it"
    )


# -------------------------------------------------------------------------------------- other ranks


def lose_sooner():
    """Declare a rank lost after 3 seconds instead of 60."""
    heartbeat.LOST = 3.0


def lost_rank(
    number: int,
    folder: Path,
    which: Sequence[int],
    words: Callable[[str], None] = lambda text: None,
) -> str:
    """Send one of two ranks `number`; the other must end within 60 seconds, naming it."""
    source, took = runs.dataset(folder / "data"), []
    for lost in which:
        out = folder / f"run{lost}"
        ranks = runs.start_ranks(
            runs.arguments(source, out, *ENDLESS), folder / f"log{lost}", 2, before=lose_sooner
        )
        runs.wait_for(lambda out=out: runs.steps_logged(out) > 3)
        start = time.monotonic()
        ranks[lost].signal(number)
        code = ranks[1 - lost].wait(60)
        took.append(time.monotonic() - start)
        ranks[lost].kill()
        said = ranks[1 - lost].words()
        require(code == 7, f"exit code {code}, not 7: {said[-600:]}")
        require(
            f"rank {lost}" in ranks[1 - lost].last_line(),
            f"rank {lost} is not named: {ranks[1 - lost].last_line()}",
        )
        require(runs.exit_record(out)["code"] == 7, "exit.json has another code")
        words(said)
    return (
        f"the other rank ended after {max(took):.1f} s with code 7, naming it; exit.json says "
        "so too"
    )


def killed_rank(trials: int, folder: Path) -> str:
    """Row 4."""
    return lost_rank(signal.SIGKILL, folder, (1, 0))


def stopped_rank(trials: int, folder: Path) -> str:
    """Row 5: the one that holds the store, which then answers nobody. tests/test_heartbeat.py has
    the other.
    """
    dumped = "most recent call first"
    said = lost_rank(
        signal.SIGSTOP, folder, (0,), lambda said: require(dumped in said, "no stack dump")
    )
    return f"{said}; stacks on screen"


# ------------------------------------------------------------------------------------------ signals


def held(module, name: str, marker: Path, seconds: float, call: int = 1):
    """Replace a function by itself, which first leaves a file `marker` and waits, at its call
    number `call`.
    """
    original, calls = getattr(module, name), []

    def waiting(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            marker.touch()
            pause(seconds)
        return original(*args, **kwargs)

    setattr(module, name, waiting)


def compiling(marker: Path):
    """Let layers be compiled by a backend that leaves a file and takes its time, as a real one
    does.
    """

    def backend(graph, inputs):
        marker.touch()
        time.sleep(0.2)
        return graph.forward

    def compile_layers(model):
        for layer in model.layers:
            layer.forward = runs.torch.compile(layer.forward, backend=backend)

    apply.compile_layers = compile_layers


PHASES = {  # where the run is when the signal comes: (flags, what holds it there)
    "step": ([], lambda marker: held(step, "count_valid", marker, 0.3, 5)),
    "between micro-batches": (
        ["--gradient_accumulation_steps", "4"],
        lambda marker: held(step.Decoder, "forward", marker, 0.3, 18),
    ),
    "evaluation": (
        ["--eval_every", "4"],
        lambda marker: held(score.ModelScorer, "score", marker, 0.3),
    ),
    "save": ([], lambda marker: held(durable, "fsync", marker, 0.3, 6)),
    "compilation": (["--compile", "--max_steps", "2"], compiling),
    "background save": (["--async_save"], lambda marker: held(durable, "fsync", marker, 0.3, 6)),
}


def terminated(trials: int, folder: Path) -> str:
    """Row 6: evaluations and saves in the background change no bit, so most phases have one whole
    run.
    """
    source = runs.dataset(folder / "data")
    wholes: dict[tuple, Path] = {}
    for phase, (flags, hold) in PHASES.items():
        inside = folder / phase.replace(" ", "-")
        inside.mkdir()
        marker, more = inside / "marker", [*STEPS, *flags]
        before = partial(hold, inside / "unused") if phase == "compilation" else lambda: None
        kind = tuple(flag for flag in flags if phase in ("between micro-batches", "compilation"))
        if kind not in wholes:
            wholes[kind] = inside / "whole"
            whole = runs.arguments(source, wholes[kind], *STEPS, *kind)
            runs.finish(whole, inside / "whole.log", before=before)
        child = runs.start(
            runs.arguments(source, inside / "run", *more),
            inside / "log",
            before=partial(hold, marker),
        )
        runs.wait_for(marker.exists, words=f"{phase}: never came there: {child.words()[-400:]}")
        child.signal(signal.SIGTERM)
        require(
            child.wait() == 75,
            f"{phase}: exit code {child.process.exitcode}: {child.words()[-600:]}",
        )
        saved_once(inside / "run", child, phase)
        runs.finish(runs.arguments(source, inside / "run", *more), inside / "again", before=before)
        require(
            runs.same_end(inside / "run", wholes[kind]), f"{phase}: other bits after the resume"
        )
    preparing(folder)
    return (
        f"75 and one save at its step in {', '.join(PHASES)}; 75 with nothing to save in data "
        "preparation; the same bits afterwards"
    )


def saved_once(out: Path, child: runs.Child, where: str):
    """The newest checkpoint is of the last step, was written once, and exit.json says all that."""
    record, newest = runs.exit_record(out), load.latest(out)
    require(
        record["code"] == 75 and "same command" in record["remedy"],
        f"{where}: exit.json is {record}",
    )
    require(
        newest is not None and newest.step == record["last_step"] > 0,
        f"{where}: {newest} with {record}",
    )
    require(child.words().count(f"saved {newest.folder}") == 1, f"{where}: not saved once")


def preparing(folder: Path):
    """A signal in data preparation ends it; the same command prepares it again."""

    def small(marker: Path):
        data.corpus.prepare_embedded = partial(
            data.corpus.prepare_embedded,
            vocab_size=512,
            max_bytes=300_000,
            cache_dir=folder / "cache",
            workers=1,
        )
        held(data.corpus, "build_dataset", marker, 0.3)

    args = [
        *runs.SMALL,
        "--output_dir",
        str(folder / "embedded"),
        "--max_steps",
        "2",
        "--vocab_size",
        "512",
    ]
    child = runs.start(args, folder / "preparing", before=partial(small, folder / "marker"))
    runs.wait_for((folder / "marker").exists)
    child.signal(signal.SIGTERM)
    require(
        child.wait() == 75 and "nothing to save" in child.last_line(),
        f"data preparation: {child.words()[-600:]}",
    )
    runs.finish(args, folder / "prepared", before=partial(small, folder / "marker"))


def terminated_group(trials: int, folder: Path) -> str:
    """Row 7: all ranks at once, and again when torchrun repeats it; then under torchrun itself."""
    source = runs.dataset(folder / "data")
    out, args = folder / "run", runs.arguments(source, folder / "run", *ENDLESS)
    ranks = runs.start_ranks(args, folder / "log", 2)
    runs.wait_for(lambda: runs.steps_logged(out) > 3)
    for _ in range(2):
        for rank in ranks:
            rank.signal(signal.SIGTERM)
        time.sleep(0.1)
    codes = [rank.wait(30) for rank in ranks]
    require(codes == [75, 75], f"exit codes {codes}: {ranks[0].words()[-600:]}")
    saved_once(out, ranks[0], "two ranks")
    launched = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "train.py", *args],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    before = runs.exit_record(out)["last_step"]
    runs.wait_for(
        lambda: not (out / "exit.json").exists() and runs.steps_logged(out) > before + 3, 120
    )
    launched.send_signal(signal.SIGTERM)
    launched.wait(60)
    record = runs.exit_record(out)
    require(
        record["code"] == 75 and record["last_step"] > before,
        f"under torchrun exit.json is {record}",
    )
    require(
        load.latest(out).step == record["last_step"],
        "under torchrun nothing was saved",
    )
    return (
        "both ranks 75 with one save, also where the signal comes twice; under torchrun "
        "exit.json has 75, and the checkpoint is there"
    )


def slow_down(step_marker: Path, save_marker: Path):
    """In the child: hold a step for a moment and a save for long, and mark that they began."""
    # the fifth step comes after the first checkpoint, and no other is due then
    held(step, "count_valid", step_marker, 0.3, 5)
    held(durable, "rename", save_marker, 30, 5)


def interrupted_twice(trials: int, folder: Path) -> str:
    """Row 8: the first begins a save that takes long, the second comes in the middle of it.
    tests/test_supervise.py has SIGTERM.
    """
    source, more = whole_run(folder, *STEPS)
    marker, args = folder / "marker", runs.arguments(source, folder / "run", *more)
    begun = folder / "step"
    child = runs.start(args, folder / "log", before=partial(slow_down, begun, marker))
    runs.wait_for(begun.exists)
    child.signal(signal.SIGINT)
    runs.wait_for(marker.exists, words=f"no save began: {child.words()[-400:]}")
    time.sleep(1.2)
    child.signal(signal.SIGINT)
    code = child.wait(60)
    require(code == 128 + signal.SIGINT, f"code {code}: it waited for the save, which ends with 75")
    require(load.latest(folder / "run") is not None, "the checkpoint before is gone")
    again(folder, args, "run")
    return "the second left at once, the checkpoint before is whole, the same bits afterwards"


ALLOWED = 8  # seconds that a launcher waits, as a rank is told
SLOW = 12.0  # seconds of a micro-batch
IMPATIENT = {1: [], 2: ["--async_save"], 4: ["--dp_replicate", "2"]}  # numbers of ranks, and flags


def slow_steps(first: int):
    """In a child: each step from the number `first` on computes for SLOW seconds."""
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(ALLOWED)
    original = step.gradients

    def gradients(state, *args):
        if state.step + 1 >= first:
            pause(SLOW)
        return original(state, *args)

    step.gradients = gradients


def pause(seconds: float):
    """A sleep that goes on after a signal."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)


def impatient_launcher(trials: int, folder: Path) -> str:
    """Row 49: at random moments of micro-batches that take longer than the launcher waits."""
    source = runs.dataset(folder / "data")
    draw = random.Random(0)
    longest = 0.0
    for trial in range(trials):
        for size, more in IMPATIENT.items():
            name = f"{size}-ranks-{trial}"
            args = runs.arguments(source, folder / name, *STEPS, *more)
            ranks = runs.start_ranks(args, folder / f"{name}.log", size, partial(slow_steps, 3))
            runs.wait_for(lambda out=folder / name: runs.steps_logged(out) > 1)
            # what is left of the micro-batch is longer than the launcher waits
            time.sleep(draw.uniform(0, 0.3 * SLOW))
            longest = max(longest, stopped_in_time(folder / name, ranks))
    again_with_ranks(folder, source, 2)
    named_although_asked(folder / "lost", source)
    return (
        f"{3 * trials} stops with 1, 2 and 4 ranks: 75 after at most {longest:.1f} of {ALLOWED} s, "
        "with the last whole step saved; the same bits afterwards; a rank that is killed at such a "
        "moment is named by the one that is asked to stop"
    )


def named_although_asked(out: Path, source: Path):
    """torchrun stops the other ranks when one is killed: their rescue must not wait for it."""
    args = runs.arguments(source, out, *STEPS)
    first, second = runs.start_ranks(args, out.with_suffix(".log"), 2, partial(slow_steps, 3))
    runs.wait_for(lambda: runs.steps_logged(out) > 1)
    second.signal(signal.SIGKILL)
    first.signal(signal.SIGTERM)
    code = first.wait(30)
    require(code == 7, f"exit code {code}: {first.words()[-600:]}")
    require("rank 1 of 2 was killed" in first.last_line(), f"the last line is {first.last_line()}")


def stopped_in_time(out: Path, ranks: list[runs.Child]) -> float:
    """Interrupt one rank; seconds until all have ended with every whole step saved."""
    start = time.monotonic()
    ranks[-1].signal(signal.SIGINT)
    codes = [rank.wait(30) for rank in ranks]
    seconds = time.monotonic() - start
    require(codes == [75] * len(ranks), f"exit codes {codes}: {ranks[0].words()[-600:]}")
    require(seconds < ALLOWED, f"ended after {seconds:.1f} s")
    said = ranks[0].words()
    require("asked to stop: " in said and "to leave at once" in said, "not acknowledged")
    require("same command" in ranks[0].last_line(), f"the last line is {ranks[0].last_line()}")
    saved_once(out, ranks[0], out.name)
    require(runs.exit_record(out)["last_step"] == runs.steps_logged(out), "a whole step was lost")
    require(not (out / ".lock").exists(), "the lock was left behind")
    return seconds


def again_with_ranks(folder: Path, source: Path, size: int):
    """The first run that was stopped goes on to the bits of one that nothing happened to."""
    for name in ("whole", f"{size}-ranks-0"):
        args = runs.arguments(source, folder / name, *STEPS)
        codes = [rank.wait() for rank in runs.start_ranks(args, folder / f"{name}.again", size)]
        require(codes == [0] * size, f"{name}: exit codes {codes}")
    require(
        runs.same_end(folder / f"{size}-ranks-0", folder / "whole"),
        "other bits than the uninterrupted run",
    )


# ----------------------------------------------------------------------------------------- the rest


def slow_save(trials: int, folder: Path) -> str:
    """Row 9. tests/test_rescue.py has a launcher that waits long enough."""
    source = runs.dataset(folder / "data")

    def launched():
        os.environ.update(TORCHELASTIC_RUN_ID="none", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="0")

    args = runs.arguments(source, folder / "run", *STEPS)
    said = runs.finish(args, folder / "log", before=launched).words()
    require(
        said.count("with a save") == 1 and said.count("a stop loses") == 1,
        f"said {said.count('a stop loses')} times",
    )
    return "warned once, after a save, naming TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


def stop_file(trials: int, folder: Path) -> str:
    """Row 10."""
    source, out = runs.dataset(folder / "data"), folder / "run"
    child = runs.start(runs.arguments(source, out, *ENDLESS), folder / "log")
    runs.wait_for(lambda: runs.steps_logged(out) > 3)
    (out / "STOP").touch()
    require(child.wait(30) == 75, f"exit code {child.process.exitcode}: {child.words()[-400:]}")
    saved_once(out, child, "STOP")
    require(not (out / "STOP").exists(), "the STOP file would stop the next start as well")
    step_before = runs.exit_record(out)["last_step"]
    runs.finish(
        runs.arguments(source, out, "--max_steps", str(step_before + 2), "--schedule", "constant"),
        folder / "again",
    )
    return "saved once, 75, the file is used up, and the run went on"


def two_jobs(trials: int, folder: Path) -> str:
    """Row 11: also by two ranks, and a dead holder's lock is taken over."""
    source, out = runs.dataset(folder / "data"), folder / "run"
    args = runs.arguments(source, out, *ENDLESS)
    first = runs.start(args, folder / "first")
    runs.wait_for(lambda: runs.steps_logged(out) > 1)
    second = runs.finish(args, folder / "second", 2)
    require(
        f"process {first.process.pid} on {os.uname().nodename}" in second.last_line(),
        second.last_line(),
    )
    ranks = runs.start_ranks(args, folder / "third", 2)
    require([rank.wait(60) for rank in ranks] == [2, 2], "two ranks were not refused")
    before = runs.steps_logged(out)
    runs.wait_for(lambda: runs.steps_logged(out) > before, words="the first job was disturbed")
    first.kill()
    last = runs.finish([*args[:-6], "--max_steps", "3", "--schedule", "constant"], folder / "last")
    require(
        f"process {first.process.pid}" in last.words() and "taken over" in last.words(),
        last.words()[-400:],
    )
    return (
        "the second, of one rank or two, exits 2 naming process and host; a dead job's lock is "
        "taken over"
    )


ROWS: list[Row] = [
    Row(
        1,
        "kill -9 at random moments",
        "bit-identical finals",
        killed_at_random,
        5,
        1000,
    ),
    Row(
        2,
        "kill at each call of a save that changes the disk",
        "every one resumes",
        killed_at_each_call,
        4,
        10000,
    ),
    Row(
        3,
        "power loss: prefixes of a save's write log",
        "durable checkpoints survive",
        crash.power_loss,
    ),
    Row(4, "one of 2 ranks killed", "the other exits within 60 s, naming it", killed_rank),
    Row(
        5,
        "one of 2 ranks stopped",
        "timeout, stack dump, 7",
        stopped_rank,
    ),
    Row(
        6,
        "SIGTERM in step, evaluation, save, data preparation, compilation",
        "one save, 75",
        terminated,
    ),
    Row(
        7,
        "SIGTERM to the whole group",
        "one save, 75",
        terminated_group,
    ),
    Row(
        8,
        "SIGINT twice",
        "the first saves, the second leaves within 2 s",
        interrupted_twice,
    ),
    Row(
        49,
        "SIGINT in a micro-batch longer than the launcher waits",
        "the last whole step saved in time, 75",
        impatient_launcher,
        1,
        20,
    ),
    Row(9, "shutdown timeout shorter than a save", "warned at the first save", slow_save),
    Row(10, "a STOP file", "one save, 75", stop_file),
    Row(11, "two jobs in one run folder", "the second exits 2, naming the first", two_jobs),
    Row(12, "killed while pruning", "the newest checkpoint intact", killed_while_pruning),
]
