"""What many test files need: a tiny model and its batches, and small training runs: their data and
flags, a run in this process, and what it leaves behind.
"""

import contextlib
import io
import json
import shlex
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import train
from base.flags import underscored
from data.dataset import Dataset
from data.sources import TextFiles
from data.tokenizer import Tokenizer
from data.writer import write_dataset
from longhaul import kernels, step
from longhaul.config import TrainConfig
from model import Decoder, ModelConfig

VOCAB, CONTEXT = 64, 32

# ------------------------------------------------------------------------------------- a tiny model

TINY = dict(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32, ffn_size=48)


def overrides(sizes: dict[str, object]) -> tuple[str, ...]:
    """Sizes of a model as --model_overrides has them."""
    return tuple(f"{name}={value}" for name, value in sizes.items())


def decoder(seed: int = 0, **changes) -> Decoder:
    """A model of the sizes of TINY, but for the changes."""
    settings = dict(vocab_size=VOCAB, **TINY) | changes
    return kernels.decoder(ModelConfig.preset("tiny", **settings), seed)


def tiny_config(**changes) -> TrainConfig:
    """The settings of steps of the tiny model in fp32, but for the changes."""
    base = dict(
        model_size="tiny",
        vocab_size=VOCAB,
        context_length=CONTEXT,
        dtype="fp32",
        warmup_steps=1,
        model_overrides=overrides(TINY),
    )
    return TrainConfig(**base | changes)


def state(**changes) -> step.TrainState:
    """Before the first step of the tiny model on the CPU."""
    cfg = tiny_config(**changes)
    return step.build(cfg, cfg.model(), "cpu")


def batch(rows: int = 1, length: int = CONTEXT, seed: int = 0) -> list[step.MicroBatch]:
    """A micro-batch of random ids."""
    make = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (rows, length + 1), generator=make)
    return [dict(tokens_BT=ids[:, :-1], labels_BT=ids[:, 1:])]


# ------------------------------------------------------------------------------------ a small run


SMALL = shlex.split(
    f"--model_size tiny --vocab_size {VOCAB} --context_length {CONTEXT} --warmup_steps 2 "
    f"--eval_every 0 --dtype fp32 --device cpu --model_overrides {' '.join(overrides(TINY))}"
)


def dataset(folder: Path, rows: int = 40) -> Path:
    """About `rows` rows of random ids in documents of many lengths."""
    draw = np.random.default_rng(0)
    documents = (
        draw.integers(1, VOCAB, size) for size in draw.integers(3, 3 * CONTEXT, rows * 2 // 3)
    )
    write_dataset(documents, folder, vocab_size=VOCAB, eod_id=0, val_fraction=0.1)
    return folder


def arguments(folder: Path | str, out: Path, *more: str) -> list[str]:
    """Flags of a small run of the data in `folder`. Of a flag that is given twice the last holds;
    one of `more` may hold several flags.
    """
    given = [word for part in more for word in shlex.split(part)]
    return last_given([*SMALL, "--data", str(folder), "--output_dir", str(out), *given])


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


def trained(folder: Path, out: Path, *more: str) -> Path:
    """The folder of a small run of the data in `folder`."""
    run(arguments(folder, out, *more))
    return out


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


# ---------------------------------------------------------------------------- what a run has left


def records(out: Path) -> list[dict]:
    """The lines of metrics.jsonl, validations too."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def weights(out: Path) -> dict[str, torch.Tensor]:
    """What the last rank's shard of the newest checkpoint holds."""
    return load_file(max(out.glob("step-????????/rank-*")))


def same_bits(first: Path, second: Path) -> bool:
    """Whether two runs ended with the same weights."""
    mine, theirs = weights(first), weights(second)
    return all(torch.equal(value, theirs[name]) for name, value in mine.items())


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


# ---------------------------------------------------------------------- data sets, and refusals


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a data set, by their names."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def written_texts(dataset: Dataset) -> list[str]:
    """The text of every document, training first."""
    tokenizer = Tokenizer(dataset.tokenizer_path)
    found = []
    for split in dataset.splits.values():
        for document in range(split.num_documents):
            ids = split.read(document, 0, 10**9).tolist()
            assert ids[-1] == dataset.eod_id and dataset.eod_id not in ids[:-1]
            found.append(tokenizer.decode(ids))
    return found


def read_texts(*named: Path | str, **settings) -> list[str]:
    """The documents of files and folders, as a preparation reads them."""
    return [document.text for document in TextFiles(named, **settings).documents()]


def refused(capsys: pytest.CaptureFixture, main: Callable, words: list, code: int = 2) -> str:
    """The one line with which a command refuses these words."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == code
    return line
