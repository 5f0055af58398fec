"""Group D of the fault matrix: data. tests/test_data_*.py have what needs no run."""

import contextlib
import io
import random
import shutil
from pathlib import Path

from data import prepare, tokenizer
from selfcheck.faults.rows import Row, require
from tests import runs

ONE_STEP = ("--max_steps", "1")


def refused(
    data: Path, out: Path, code: int, *words: str, flags: tuple[str, ...] = ONE_STEP
) -> str:
    """The last line of a training run that must end with `code` and say all of `words`."""
    child = runs.finish(runs.arguments(data, out, *flags), out.with_suffix(".log"), code)
    for word in words:
        require(word in child.last_line(), f"{word!r} is not said: {child.last_line()}")
    return child.last_line()


def trains(data: Path, out: Path, *flags: str):
    """The remedy worked: the same run now ends with 0."""
    runs.finish(runs.arguments(data, out, *ONE_STEP, *flags), out.with_suffix(".again.log"))


def prepared(folder: Path, *flags) -> tuple[int, str]:
    """(exit code, what it says) of data.prepare with these flags, in this process."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = prepare.main([str(flag) for flag in flags])
    return code, said.getvalue()


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def text_of(seed: int, words: int = 200) -> str:
    """Words of a small language."""
    draw = random.Random(seed)
    return "".join(
        draw.choice(("alpha", "beta", "gamma", "delta", "\n", "x = 1", "  ", "return")) + " "
        for _ in range(words)
    )


def shared_tokenizer(folder: Path) -> Path:
    """A tokenizer of 300 pieces."""
    tokenizer.train([text_of(seed) for seed in range(20)], 300, folder / "shared.model")
    return folder / "shared.model"


# --------------------------------------------------------------------------------------------- rows


def truncated(trials: int, folder: Path) -> str:
    """Row 30."""
    data = runs.dataset(folder / "data")
    shard = data / "shard-00000.bin"
    whole, draw = shard.read_bytes(), random.Random(0)
    for trial in range(trials):
        size = draw.randrange(len(whole)) if trial else 0
        shard.write_bytes(whole[:size])
        refused(
            data,
            folder / f"run-{trial}",
            3,
            f"shard-00000.bin is damaged: expected {len(whole)} bytes, found {size}: restore it",
        )
        shard.write_bytes(whole)
        trains(data, folder / f"run-{trial}")
    return "exit code 3 with both sizes, before anything was written; restored, it trains"


def mismatch(trials: int, folder: Path) -> str:
    """Row 33: another tokenizer next to the ids, and a run continued on ids of another."""
    model = folder / "shared.model"
    (folder / "text").mkdir()
    for seed in range(30):
        (folder / "text" / f"{seed}.txt").write_text(text_of(seed))
    for name, seeds in (("one", range(20)), ("two", range(50, 90))):
        tokenizer.train([text_of(seed) for seed in seeds], 300, model)
        require(
            prepared(
                folder, "--input", folder / "text", "--output", folder / name, "--tokenizer", model
            )[0]
            == 0,
            "preparation failed",
        )
    flags = ("--vocab_size", "300", *ONE_STEP)
    trains(folder / "one", folder / "run", "--vocab_size", "300")
    refused(
        folder / "two",
        folder / "run",
        2,
        "tokenizer: ",
        flags=("--vocab_size", "300", "--max_steps", "2"),
    )
    kept = (folder / "one" / "tokenizer.model").read_bytes()
    shutil.copy(folder / "two" / "tokenizer.model", folder / "one" / "tokenizer.model")
    refused(
        folder / "one", folder / "other", 2, "the ids were made with another tokenizer", flags=flags
    )
    (folder / "one" / "tokenizer.model").write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    refused(
        folder / "one",
        folder / "third",
        2,
        "the ids were made with another tokenizer",
        "restore it",
        flags=flags,
    )
    (folder / "one" / "tokenizer.model").write_bytes(kept)
    trains(folder / "one", folder / "third", "--vocab_size", "300")
    return (
        "2 for a run on ids of another tokenizer, and for another model next to the ids; "
        "restored, it trains"
    )


ROWS: list[Row] = [
    Row(30, "truncated shard", "3, expected and actual sizes", truncated, 2, 50),
    Row(33, "tokenizer or data hash mismatch", "2", mismatch),
]
