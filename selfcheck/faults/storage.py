"""Group B of the fault matrix: disks that are full, lie, or fail."""

import contextlib
import errno
import io
import json
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from base import durable
from longhaul.checkpoint import load
from longhaul.run import log
from selfcheck.faults import crash, disks
from selfcheck.faults.rows import Row, require
from tests import runs

STEPS = ["--max_steps", "7", "--save_every", "3"]


# --------------------------------------------------------------------------------------------- full


def full_disk(trials: int, folder: Path) -> str:
    """Row 13: a real small disk where this process may mount one; then ENOSPC at every kind of
    call, once and for good.
    """
    source = runs.dataset(folder / "data")
    runs.finish(runs.arguments(source, folder / "whole", *STEPS), folder / "whole.log")
    size = sum(path.stat().st_size for path in max((folder / "whole").glob("step-*")).iterdir())
    real = disks.small_disk(folder / "disk", 12 * size)
    if real:
        _really_full(source, folder, size)
    points = {
        name: index
        for index, name in reversed(list(enumerate(_calls_of_second_save(source, folder))))
        if name != "-"
    }
    for name, index in points.items():
        for times, code in ((1, 0), (10**9, 6)):
            out = folder / f"{name}-{times}"
            child = runs.finish(
                runs.arguments(source, out, *STEPS),
                folder / f"{out.name}.log",
                code,
                before=partial(_refuse, name.split("-")[0], index, times),
            )
            _old_one_is_whole(out, child, code, folder, source)
    return (
        f"{'a really full disk, and ' if real else ''}ENOSPC at {', '.join(points)}: once: "
        "tried again and done; for good: code 6 with bytes, "
        "the checkpoint before verifies, and with space the same bits"
    )


def _really_full(source: Path, folder: Path, size: int):
    out = folder / "disk" / "run"
    args = runs.arguments(source, out, *STEPS)

    def fill_up(index: int, name: str):
        if (
            name == "write"
            and (out / "step-00000003").exists()
            and not (folder / "disk" / "ballast").exists()
        ):
            disks.fill(folder / "disk", size // 2)

    child = runs.finish(args, folder / "full.log", 6, before=lambda: crash.watch(fill_up))
    require("No space left" in child.last_line(), child.last_line())
    load.verified(out / "step-00000003")
    (folder / "disk" / "ballast").unlink()
    runs.finish(args, folder / "space.log")
    require(runs.same_end(out, folder / "whole"), "other bits than the uninterrupted run")


def _calls_of_second_save(source: Path, folder: Path) -> list[str]:
    """The calls of storage by number: "-" but for those of the second save, of which the one that
    follows its rename is "fsync-last".
    """
    listing, out = folder / "calls", folder / "counted"

    def note(index: int, name: str):
        inside, last = (
            (out / ".tmp-step-00000006").exists(),
            name == "fsync" and (out / "step-00000006").exists(),
        )
        words = "fsync-last" if last else "-"
        if inside and name != "remove":  # a removal needs no space
            words = name
        with listing.open("a") as file:
            file.write(f"{words}\n")

    runs.finish(
        runs.arguments(source, out, *STEPS),
        folder / "counted.log",
        before=lambda: crash.watch(note),
    )
    return listing.read_text().split()


def _refuse(wanted: str, index: int, times: int):
    """ENOSPC from call number `index` on, `times` times, wherever `wanted` is called."""
    refused = []

    def before(number: int, name: str):
        if number >= index and name == wanted and len(refused) < times:
            refused.append(number)
            raise OSError(errno.ENOSPC, "No space left on device")

    crash.watch(before)


def _old_one_is_whole(out: Path, child: runs.Child, code: int, folder: Path, source: Path):
    if code:
        require(
            "bytes" in child.last_line() and "free space" in child.last_line(), child.last_line()
        )
        load.verified(out / "step-00000003")
        require(
            not list(out.glob(".tmp-step-*/*.safetensors")) or code, "half a checkpoint was left"
        )
        runs.finish(runs.arguments(source, out, *STEPS), folder / f"{out.name}.again")
    require(
        runs.same_end(out, folder / "whole"), f"{out.name}: other bits than the uninterrupted run"
    )
    shutil.rmtree(out)


def little_space(trials: int, folder: Path) -> str:
    """Row 14."""
    source = runs.dataset(folder / "data")
    real = disks.small_disk(folder / "disk", 400_000)  # less than two checkpoints of 600 kB
    args = runs.arguments(source, folder / "disk" / "run", *STEPS)
    before = (
        (lambda: None) if real else lambda: setattr(durable, "free_bytes", lambda path: 400_000)
    )
    child = runs.finish(args, folder / "log", 2, before=before)
    require(
        "more checkpoint(s) of this model need" in child.last_line(),
        child.last_line(),
    )
    require(not (folder / "disk" / "run").exists(), "something was written")
    return (
        "2 before step 1, nothing written "
        f"({'a real small disk' if real else 'simulated: no disk may be mounted here'}): "
        f"{child.last_line()[-120:]}"
    )


def full_log(trials: int, folder: Path) -> str:
    """Row 20."""
    source, out = runs.dataset(folder / "data"), folder / "run"
    real = disks.small_disk(folder / "disk", 65536)

    def begin():
        if real:
            disks.fill(folder / "disk", 8192)
            out.mkdir(exist_ok=True)
            (folder / "disk" / "tensorboard").mkdir()
        original = log.Logger.__init__

        def to_small_disk(self, where, **settings):
            original(self, folder / "disk" if real else where, **settings)

        log.Logger.__init__ = to_small_disk
        if not real:
            append = log._append_line
            log._append_line = lambda path, record: append(Path("/dev/full"), record)

    child = runs.finish(
        runs.arguments(
            source, out, "--max_steps", "200", "--save_every", "100", "--schedule", "constant"
        ),
        folder / "log",
        before=begin,
    )
    require(
        child.words().count("warning: the log cannot be written") == 1,
        f"warned {child.words().count('the log cannot be')} times",
    )
    load.verified(out / "step-00000200")
    return f"200 steps, 2 saves, one warning ({'a full disk' if real else '/dev/full'})"


# --------------------------------------------------------------------------------------------- lies


def two_checkpoints(folder: Path, ranks: int = 1) -> tuple[list[str], Path]:
    """(flags, run folder) of a run with the checkpoints of steps 3 and 6."""
    args = runs.arguments(
        runs.dataset(folder / "data"), folder / "run", "--max_steps", "6", "--save_every", "3"
    )
    for child in (
        runs.start_ranks(args, folder / "log", ranks)
        if ranks > 1
        else [runs.start(args, folder / "log")]
    ):
        require(child.wait() == 0, child.words()[-600:])
    return args, folder / "run"


def falls_back(out: Path, where: str):
    """The newest checkpoint is damaged: it is set aside with a loud line and the one before is
    found. Its name is given back.
    """
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        found = load.latest(out)
    require(found is not None and found.step == 3, f"{where}: {found} was taken")
    require(
        "DAMAGED CHECKPOINT" in said.getvalue() and (out / "step-00000006.corrupt").exists(),
        f"{where}: no loud line",
    )
    (out / "step-00000006.corrupt").rename(out / "step-00000006")


def flip(path: Path, draw: random.Random) -> Callable[[], None]:
    """Flip one random bit of a file; returns what mends it."""
    content = path.read_bytes()
    position, bit = draw.randrange(len(content)), draw.randrange(8)
    path.write_bytes(
        content[:position] + bytes([content[position] ^ 1 << bit]) + content[position + 1 :]
    )
    return lambda: path.write_bytes(content) and None


def flipped_bits(trials: int, folder: Path) -> str:
    """Row 15: and a damaged checkpoint that is named. tests/test_data_shards.py flips data."""
    args, out = two_checkpoints(folder)
    draw, newest = random.Random(0), out / "step-00000006"
    manifest = json.loads((newest / "manifest.json").read_text())
    harmless = 0
    for index in range(trials):
        path = draw.choice(sorted(newest.iterdir()))
        mend = flip(path, draw)
        if path.name == "manifest.json" and means(path, manifest):
            harmless += 1
        else:
            falls_back(out, f"flip {index} in {path.name}")
        mend()
    flip(max(newest.glob("rank-*")), draw)
    named = runs.finish(
        [*args, "--resume", str(newest), "--max_steps", "7", "--schedule", "constant"],
        folder / "named",
        4,
    )
    require("use another checkpoint" in named.last_line(), named.last_line())
    return (
        f"{trials} flips: all detected, the checkpoint before used (but {harmless} in a manifest "
        "that says the same, 1E-08 for 1e-08); named: code 4"
    )


def means(path: Path, content: dict) -> bool:
    """Whether a file of JSON still has this content."""
    try:
        return json.loads(path.read_text(encoding="utf-8")) == content
    except ValueError:
        return False


def broken_files(trials: int, folder: Path) -> str:
    """Row 16, of a checkpoint by two ranks."""
    args, out = two_checkpoints(folder, 2)
    newest = out / "step-00000006"
    first, second = sorted(newest.glob("rank-*"))

    def swap():
        first.rename(newest / "between")
        second.rename(first)
        (newest / "between").rename(second)

    kept = {path: path.read_bytes() for path in newest.iterdir()}
    faults = dict(
        truncated=lambda: first.write_bytes(kept[first][:-8]),
        longer=lambda: first.write_bytes(kept[first] + b"\0"),
        zeroed=lambda: first.write_bytes(kept[first][:4096] + bytes(4096) + kept[first][8192:]),
        deleted=first.unlink,
        swapped=swap,
        emptied=lambda: second.write_bytes(b""),
        folder=lambda: (first.unlink(), first.mkdir()),
    )
    for name, fault in faults.items():
        fault()
        falls_back(out, name)
        shutil.rmtree(newest)
        newest.mkdir()
        for path, content in kept.items():
            path.write_bytes(content)
    first.unlink()
    runs.finish(
        [
            *args,
            "--resume",
            str(newest),
            "--global_batch_size",
            "2",
            "--max_steps",
            "7",
            "--schedule",
            "constant",
        ],
        folder / "named",
        4,
    )
    return f"{', '.join(faults)}: all detected, the checkpoint before used; named: code 4"


def failing_reads(trials: int, folder: Path) -> str:
    """Row 19: the function that reads a checkpoint reports EIO."""
    args, out = two_checkpoints(folder)
    longer = [*args, "--max_steps", "7"]

    def failing(times: int):
        original, failed = durable.read, []

        def read(file, size: int) -> bytes:
            if len(failed) < times:
                failed.append(1)
                raise OSError(errno.EIO, "Input/output error")
            return original(file, size)

        durable.read = read

    child = runs.finish(longer, folder / "always", 6, before=partial(failing, 10**9))
    require(
        "tried 4 times" in child.last_line() and "check the disk" in child.last_line(),
        child.last_line(),
    )
    require(not list(out.glob("*.corrupt")), "a checkpoint that could not be read was set aside")
    runs.finish(longer, folder / "thrice", before=partial(failing, 3))
    return "3 times: read at the 4th; always: code 6, and nothing is renamed"


ROWS: list[Row] = [
    Row(
        13,
        "disk full in a save",
        "tried twice, old checkpoint intact, 6 with bytes needed",
        full_disk,
    ),
    Row(14, "free space for less than 2 checkpoints", "2 before step 1", little_space),
    Row(
        15,
        "one bit flipped in a checkpoint",
        "detected, the checkpoint before used; named: 4",
        flipped_bits,
        50,
        5000,
    ),
    Row(
        16,
        "shards truncated, zeroed, deleted, swapped",
        "detected, the checkpoint before used; named: 4",
        broken_files,
    ),
    Row(19, "EIO on read", "tried again 3 times, then 6", failing_reads),
    Row(20, "disk of the log full", "training goes on, one warning", full_log),
]
