"""The memory of an evaluation, predicted like that of a training step: the real ModelScorer scores
one row on fake tensors, through the levers of the run.

A row passes whole, or in parts of `chunk` tokens over the KV cache. `parts_that_fit` chooses. Sizes
are bytes unless a name says GiB; GiB = 2^30 bytes.
"""

import functools
from typing import Any, NamedTuple

import torch

from footprint.record.trace import Trace
from longhaul import step
from longhaul.config import TrainConfig
from longhaul.evals.score import Item, ModelScorer
from longhaul.kinds import attention_kind
from longhaul.planner.batches import CPU
from longhaul.planner.needs import CUDA_CONTEXT_GIB, PROCESS_GIB
from longhaul.planner.program import Program
from longhaul.planner.simulate import trace
from model import GIB

FEWER, LAYERS = 2, 3  # layers of the two simulations from which a deeper model's peak follows
CHUNKS = (4096, 1024)  # tokens of a part, tried in this order


# ---- the peak


def peak(cfg: TrainConfig, tokens: int, **asked: Any) -> int:
    """Live bytes of one rank at the peak of scoring a row of `tokens` tokens, weights included;
    `asked` as for `simulate`.

    Every layer is like the others, so the peak is affine in their number.
    """
    scored = functools.partial(simulate, cfg, tokens, **asked)
    layers = cfg.model().num_layers
    if layers <= LAYERS:
        return scored().peak()[0]

    low, _ = scored(layers=FEWER).peak()
    high, _ = scored(layers=LAYERS).peak()
    return low + (layers - FEWER) * (high - low)


def simulate(
    cfg: TrainConfig,
    tokens: int,
    *,
    chunk: int = 0,
    ranks: int = 1,
    target: str = "cuda",
    layers: int = 0,
    trained: bool = False,
    every_tile: bool = False,
) -> Trace:
    """The trace of scoring one row of `tokens` tokens that all have a label.

    layers, every_tile: as for a training step. trained: the optimizer has its states, as it does if
    a training run evaluates.
    """
    program = Scoring(cfg, tokens, chunk, trained, ranks, layers, device=target)
    return trace(program, target, every_tile)


class Scoring(Program):
    """A row of `tokens` tokens that all have a label is scored, whole or in parts of `chunk`."""

    def __init__(
        self,
        cfg: TrainConfig,
        tokens: int,
        chunk: int,
        trained: bool,
        *args,
        **options,
    ):
        super().__init__(cfg, *args, **options)
        self.tokens = tokens
        self.chunk = chunk
        self.trained = trained

    def first(self, state: step.TrainState) -> None:
        """The optimizer has its states if a training run evaluates."""
        if self.trained:
            super().first(state)

    def step(self, state: step.TrainState) -> None:
        """A row is scored."""
        scorer = ModelScorer(state.model, self.device, self.chunk)
        rows = [torch.zeros((1, self.tokens), dtype=torch.long, device=CPU) for _ in range(2)]
        if self.cfg.context_ranks > 1:  # else they would follow from values
            rows.append(torch.zeros_like(rows[0]))
        scorer.score(Item(*rows))


# ---- whole rows or parts


class Planned(NamedTuple):
    """How a row is scored, and what that needs on a device."""

    tokens: int
    chunk: int  # 0: the row passes whole
    peak: int  # live bytes
    hidden_gib: float  # of the process or the CUDA context, which no tensor shows

    @property
    def gib(self) -> float:
        """What the device must hold: on a CPU the resident memory of the process."""
        return self.peak / GIB + self.hidden_gib

    @property
    def gib_of_tensors(self) -> float:
        """What CUDA's allocator should report."""
        return self.peak / GIB

    @property
    def how(self) -> str:
        """How rows pass, in words."""
        rows = f"rows of {self.tokens:,} tokens"
        if self.chunk:
            return f"{rows} in parts of {self.chunk:,} over the KV cache"
        return f"whole {rows}"

    def words(self) -> str:
        """One line for the screen."""
        return f"{self.gib:.2f} GiB planned for {self.how}"

    def check(self, available_gib: float) -> None:
        """ValueError if that is more than there is."""
        if self.gib > available_gib:
            raise ValueError(
                f"scoring {self.tokens:,} tokens needs {self.gib:.1f} GiB, and {available_gib:.1f} "
                "are available: evaluate shorter rows"
            )


def planned(cfg: TrainConfig, tokens: int, device: torch.device, chunk: int = 0) -> Planned:
    """The plan of scoring a row by one process on `device`."""
    hidden_gib = PROCESS_GIB if device.type == "cpu" else CUDA_CONTEXT_GIB
    return Planned(tokens, chunk, peak(cfg, tokens, chunk=chunk, target=device.type), hidden_gib)


def plan_that_fits(
    cfg: TrainConfig, tokens: int, device: torch.device, available_gib: float
) -> Planned:
    """The whole row if it fits, because that is fastest, else the largest parts that fit.

    ValueError if nothing fits.
    """
    found = planned(cfg, tokens, device)
    if found.gib > available_gib and attention_kind(cfg).prompt_in_parts:
        for chunk in CHUNKS:
            if chunk < tokens and found.gib > available_gib:
                found = planned(cfg, tokens, device, chunk)

    found.check(available_gib)
    return found
