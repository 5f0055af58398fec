"""The micro-batches of a step of pretraining, with values or without."""

from collections.abc import Iterator

import numpy as np
import torch

from data.loader import Batch
from longhaul import step
from longhaul.config import TrainConfig
from model import OnHost

CPU = torch.device("cpu")
MICRO_BATCHES = 4  # that run: the others are like them


def row_batch(cfg: TrainConfig, ranks: int = 1) -> list[step.MicroBatch]:
    """One step's micro-batches as the trainer makes them, on the CPU: every row is one document,
    all labels are valid.
    """
    return _batch(cfg.accumulation(ranks) * cfg.batch_size, cfg.context_length, cfg.batch_size)


def _batch(rows: int, tokens: int, size: int) -> list[step.MicroBatch]:
    """`rows` rows of `tokens` tokens, in micro-batches of `size` rows."""
    shape = (rows, tokens)
    whole = Batch(
        tokens=np.zeros(shape, dtype=np.int64),
        labels=np.zeros(shape, dtype=np.int64),
        positions=np.zeros(shape, dtype=np.int64),
        doc_ids=np.zeros(shape, dtype=np.int32),
    )
    batch = step.micro_batches(whole, size, CPU)
    # without document ids, a row of one document takes the same path
    return [micro | {"doc_ids": None} for micro in batch]


class FewOfMany(list):
    """The micro-batches of a step that run, and the bytes of the others, which are alike."""

    def __init__(self, running: list[step.MicroBatch], others: int, device: torch.device):
        super().__init__(running)
        size = others * sum(tensor.nbytes for tensor in tensors_of(running[:1]))
        self.others = torch.empty(size, dtype=torch.uint8, device=device)


def tensors_of(batch: list[step.MicroBatch]) -> Iterator[torch.Tensor]:
    """Every tensor of a step's micro-batches."""
    if isinstance(batch, FewOfMany):
        yield batch.others
    for micro in batch:
        for value in micro.values():
            if isinstance(value, OnHost):
                yield value.tensor
            elif isinstance(value, torch.Tensor):
                yield value


def fake_batch(
    cfg: TrainConfig,
    ranks: int,
    every: bool = True,
    device: torch.device = CPU,
) -> list[step.MicroBatch]:
    """`row_batch` on fake tensors, made from rows of one token, so that nothing long exists.

    Without `every`, of more than four micro-batches four run, or three: an even number of them is
    added in pairs.
    """
    number = cfg.accumulation(ranks)
    running = number if every or number <= MICRO_BATCHES else MICRO_BATCHES - number % 2
    short = _batch(running * cfg.batch_size, 1, cfg.batch_size)
    found = [
        {name: _stretched(value, cfg.context_length, device) for name, value in micro.items()}
        for micro in short
    ]
    return found if running == number else FewOfMany(found, number - running, device)


def _stretched(
    value: torch.Tensor | None,
    tokens: int,
    device: torch.device,
) -> torch.Tensor | None:
    """A tensor like `value`, without values, whose rows have `tokens` tokens."""
    if value is None:
        return None
    return torch.empty((len(value), tokens), dtype=value.dtype, device=device)
