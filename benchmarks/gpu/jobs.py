"""The parts of `python -m benchmarks.gpu`: each is a list of jobs, most important first over all
parts.

exact.py      what every figure rests on: the tests marked gpu, and the Triton tile bodies
loss.py       the vocabulary loss against its peers
attention.py  dense and sparse attention against theirs: forward, training, decoding
step.py       whole training steps, and transformers' beside them
memory.py     predicted against measured: stages, workspaces, the allocator's replay
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.record import Run


@dataclass(frozen=True)
class Place:
    """Where the jobs run and at which sizes; toy sizes show that everything runs, and claim
    nothing.
    """

    device: torch.device
    toy: bool

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"


@dataclass(frozen=True)
class Job:
    """One line of a part. Importance orders all jobs, 1 first; `seconds` is what it may take on a
    GPU, by estimate, and bounds its rounds.
    """

    name: str
    importance: int
    seconds: float
    run: Callable[[Run], None]
