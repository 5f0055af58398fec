"""The memory of one training step, predicted: the real `step.build` and `step.train_step` on fake
tensors, nothing allocated.

Fake tensors are on a fake CPU; where the target is CUDA, the model is told so and takes the same
paths as there. One rank of an FSDP2 run has a fake process group. Of the parts that a lever runs in
turn, which are alike, the first two and the last are run. The steady state is the second step: the
first has no optimizer states. Imports longhaul (activations, config, dist, states, step),
longhaul.memory (stages, trace, tracker, workspace), data.loader and model.py of ours.
"""

import contextlib
import dataclasses

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from data.loader import Batch
from longhaul import dist, step
from longhaul.config import TrainConfig
from longhaul.memory.platforms import predicting
from longhaul.memory.stages import Stages, label
from longhaul.memory.trace import Trace
from longhaul.memory.tracker import Tracker
from longhaul.memory.workspace import Workspaces


@contextlib.contextmanager
def one_rank_of(ranks: int):
    """A process group of `ranks` in which this process is rank 0 and nobody else exists; nothing
    for one rank.
    """
    if ranks == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def simulate(
    cfg: TrainConfig,
    ranks: int = 1,
    target: str = "cuda",
    layers: int = 0,
    every_part: bool = False,
) -> Trace:
    """The trace of the second step of one rank; `layers` replaces the model's number of layers,
    `every_part` leaves no alike part out.
    """
    config = cfg.model()
    if layers:
        config = dataclasses.replace(config, num_layers=layers)
    dist.check_replicas(dist.World(size=ranks), cfg.dp_replicate, cfg.context_ranks)
    world = dist.World(0, ranks)
    with one_rank_of(ranks):
        mesh, context_mesh = (
            dist.data_mesh(world, torch.device("cpu"), cfg.dp_replicate),
            dist.context_mesh(world, torch.device("cpu"), cfg.context_ranks),
        )
        tracker, skeleton = (
            Tracker(Workspaces(target), fake=True),
            step.skeleton(cfg, config, mesh, context_mesh),
        )
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            predicting(target, tracker, every_part),
            tracker,
        ):
            state = step.fill(skeleton, cfg, "cpu", world, mesh)
            trace = second_step(tracker, state, lambda: fake_batch(cfg, ranks))
    trace.config = dict(vars(cfg), ranks=ranks, target=target, layers=config.num_layers)
    return trace


def second_step(tracker: Tracker, state, batch) -> Trace:
    """Run two steps on micro-batches that `batch()` makes, and record the second."""
    stages = Stages(tracker, state)
    with stages.installed():
        step.train_step(state, batch())
        tracker.begin({})
        micro = batch()
        inputs = {
            tracker.register(value, "input")
            for part in micro
            for value in part.values()
            if value is not None
        }
        step.train_step(state, micro)
    label(tracker.trace, tracker, stages, inputs)
    return tracker.trace


def observe(cfg: TrainConfig, batch, world: dist.World = dist.World()) -> Trace:
    """The same trace from a real run on this machine's CPU; `batch()` makes one step's
    micro-batches.
    """
    tracker = Tracker(Workspaces("cpu"))
    mesh = dist.data_mesh(world, torch.device("cpu"), cfg.dp_replicate)
    with tracker:
        state = step.build(cfg, cfg.model(), "cpu", world, mesh)
        trace = second_step(tracker, state, batch)
    trace.config = dict(
        vars(cfg), ranks=world.size, target="cpu", layers=state.model.config.num_layers
    )
    return trace


def row_batch(cfg: TrainConfig, ranks: int = 1) -> list[dict]:
    """One step's micro-batches as the trainer makes them, on the CPU: every row one document, all
    labels valid.
    """
    shape = (cfg.accumulation(ranks) * cfg.batch_size, cfg.context_length)
    rows = Batch(
        *(np.zeros(shape, dtype=np.int64) for _ in range(3)),
        np.zeros(shape, dtype=np.int32),
    )
    batch = step.micro_batches(rows, cfg.batch_size, torch.device("cpu"))
    return [
        micro | dict(doc_ids=None) for micro in batch
    ]  # None, as one document per row takes the same path


def fake_batch(cfg: TrainConfig, ranks: int) -> list[dict]:
    """`row_batch` on fake tensors."""
    return [
        {
            name: None if value is None else torch.empty_like(value, device="cpu")
            for name, value in micro.items()
        }
        for micro in row_batch(cfg, ranks)
    ]
