"""What a run of lab.grade or lab.intuitor left in its folder."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file


def records(out: Path) -> list[dict]:
    """The lines of its metrics."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def weights(out: Path) -> dict[str, torch.Tensor]:
    """The last rank's shard of the newest checkpoint."""
    return load_file(sorted(out.glob("step-*/rank-*"))[-1])


def same_bits(first: Path, second: Path) -> bool:
    """Whether two runs ended with the same weights."""
    mine, theirs = weights(first), weights(second)
    return all(torch.equal(value, theirs[name]) for name, value in mine.items())
