"""What the planner runs: the state of a kind of run, and one step of it.

`Program` is pretraining. Settings of another kind name a class of their own, which adds its models,
its objective and its batches: `PLANNED` of longhaul/config.py.
"""

import dataclasses
import pkgutil

import torch

from footprint.pretend.places import StepTracker
from longhaul import dist
from longhaul import step as trainer
from longhaul.config import TrainConfig
from longhaul.parallel import apply
from longhaul.planner.batches import fake_batch, row_batch
from model import ModelConfig

# attention all of whose parameters learn, and that keeps nothing that it measures
PLAIN = ("standard", "nsa", "exact", "bounds", "pooled", "mean")

ROLLOUT, VALIDATION = "rollout", "validation"  # phases that a program announces


class Program:
    """Pretraining on one of several ranks: `build` makes the state, `step` runs one step of it, and
    `first` leaves what a first step leaves.

    layers: replaces the model's number of layers. every: all micro-batches of a step run, not only
    the first ones. real: tensors have values.
    """

    def __init__(
        self,
        cfg: TrainConfig,
        ranks: int = 1,
        layers: int = 0,
        every: bool = False,
        real: bool = False,
        device: str = "cpu",
    ):
        self.cfg = cfg
        self.ranks = ranks
        self.every = every
        self.real = real
        self.device = torch.device(device)
        self.world = dist.World(0, ranks)
        self.tracker: StepTracker | None = None  # of the prediction that runs
        self.rows: list[trainer.MicroBatch] = []  # that exist before a step
        self.config = cfg.model()
        if layers:
            self.config = dataclasses.replace(self.config, num_layers=layers)

    def build(self) -> trainer.TrainState:
        """The state of the run."""
        cfg = self.cfg
        dist.check_replicas(self.world, cfg.dp_replicate, cfg.context_ranks)
        mesh = dist.data_mesh(self.world, self.device, cfg.dp_replicate)
        state = trainer.build(cfg, self.config, self.device, self.world, mesh)
        if self.tracker:
            state.listeners.append(self.tracker.announce)
        self.begin(state, self.config, mesh)
        return state

    def begin(self, state: trainer.TrainState, config: ModelConfig, mesh) -> None:
        """What is added to the state."""
        if self.real:
            self.rows = row_batch(self.cfg, self.ranks)

    def first(self, state: trainer.TrainState) -> None:
        """A first step; where it leaves nothing but an optimizer state of each parameter, one whose
        gradients are zeros, in half the time.
        """
        cfg = self.cfg
        if self.real or cfg.optimizer_in_backward or cfg.attention_type not in PLAIN:
            self.train(state)
            return

        # text that the model writes before an update leaves tables of positions
        micro, *_ = self.batch(state)
        if self.ranks > 1:  # what FSDP gathers weights into stays, without memory
            with torch.no_grad():
                state.objective.loss(state.model, micro, torch.ones((), device=self.device))
            apply.reshard(state.model)
            self.read_figures(state)
        for parameter in state.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
        state.step += 1
        state.checked = True
        state.weight = torch.zeros((), dtype=torch.long, device=self.device)

    def step(self, state: trainer.TrainState) -> None:
        """What is planned: a training step."""
        self.train(state)

    def train(self, state: trainer.TrainState) -> None:
        """One training step, whose figures are read."""
        trainer.train_step(state, self.batch(state))
        self.read_figures(state)

    def read_figures(self, state: trainer.TrainState) -> None:
        """What an objective no longer holds when a run has read its figures."""

    def batch(self, state: trainer.TrainState) -> list[trainer.MicroBatch]:
        """What precedes the update, and its micro-batches."""
        return list(self.rows) or fake_batch(self.cfg, self.ranks, self.every, self.device)


def program_of(cfg: TrainConfig, *args, **options) -> Program:
    """The program of these settings."""
    return pkgutil.resolve_name(cfg.PLANNED)(cfg, *args, **options)
