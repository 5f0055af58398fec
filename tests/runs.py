"""Small training runs: their data and flags, a run in this process, and what it leaves behind."""

import contextlib
import io
import json
import shlex
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import train
from base.flags import underscored
from data.writer import write_dataset

VOCAB, CONTEXT = 64, 32
SMALL = shlex.split(
    f"--model_size tiny --vocab_size {VOCAB} --context_length {CONTEXT} --warmup_steps 2 "
    "--eval_every 0 --dtype fp32 --device cpu --model_overrides hidden_size=32 num_layers=2 "
    "num_heads=2 num_kv_heads=1 head_dim=32 ffn_size=48"
)


def dataset(folder: Path, rows: int = 40) -> Path:
    """About `rows` rows of random ids in documents of many lengths."""
    draw = np.random.default_rng(0)
    documents = (
        draw.integers(1, VOCAB, size) for size in draw.integers(3, 3 * CONTEXT, rows * 2 // 3)
    )
    write_dataset(documents, folder, vocab_size=VOCAB, eod_id=0, val_fraction=0.1)
    return folder


def arguments(folder: Path, out: Path, *more: str) -> list[str]:
    """Flags of a small run of the data in `folder`."""
    return [*SMALL, "--data", str(folder), "--output_dir", str(out), *more]


def last_given(args: list[str]) -> list[str]:
    """`args` with the last value of each flag that is given twice, which train.py refuses."""
    values: dict[str, list[str]] = {}
    flag = ""
    for word in args:
        if word.startswith("--"):
            flag = underscored(word).split("=")[0]
            values[flag] = []
        values[flag].append(word)
    return [word for words in values.values() for word in words]


def run(words: list[str], code: int = 0) -> str:
    """What a run of train.py in this process says before it ends with this code."""
    said = io.StringIO()
    ended = 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            train.main(last_given(words))
        except SystemExit as stop:
            ended = stop.code
    assert ended == code, said.getvalue()
    return said.getvalue()


def wait_for(condition: Callable[[], bool], seconds: float = 300):
    """Until `condition()` holds; fails after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "what was waited for did not come"
        time.sleep(0.002)


def steps_logged(out: Path) -> int:
    """Steps in metrics.jsonl so far."""
    path = out / "metrics.jsonl"
    return len(steps(path)) if path.exists() else 0


def steps(path: Path) -> list[dict]:
    """The records of steps in metrics.jsonl, without validations and without a torn line."""
    whole = [line for line in path.read_text().splitlines() if line.endswith("}")]
    return [record for record in map(json.loads, whole) if "loss" in record]


def same_end(out: Path, whole: Path) -> bool:
    """Whether two runs ended with the same bits and logged the same losses."""
    return final_bits(out) == final_bits(whole) and losses(out) == losses(whole)


def losses(out: Path) -> list[float | None]:
    """The loss of every step; None without labels."""
    return [record["loss"] for record in steps(out / "metrics.jsonl")]


def final_bits(out: Path) -> list[bytes]:
    """The shards of the newest checkpoint."""
    newest = max(out.glob("step-????????"))
    return [path.read_bytes() for path in sorted(newest.glob("rank-*"))]


def exit_record(out: Path) -> dict:
    """exit.json of a run."""
    return json.loads((out / "exit.json").read_text())
