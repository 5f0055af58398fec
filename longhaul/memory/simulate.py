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
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import model
from data.loader import Batch
from longhaul import dist, optimizers, step
from longhaul.config import TrainConfig
from longhaul.memory.stages import Stages, label
from longhaul.memory.trace import Trace
from longhaul.memory.tracker import Tracker
from longhaul.memory.workspace import Workspaces, few_of
from longhaul.parallel import checkpointing, tiling


class FusedRMSNorm(torch.autograd.Function):
    """What the fused kernel of CUDA allocates: the result and one fp32 number per row, kept beside
    x; in the backward the gradients.
    """

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad):
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def rms_norm(x, shape, weight, eps):
    """F.rms_norm, by its fused kernel."""
    return FusedRMSNorm.apply(x, weight)


def flash_attention(q_BHTK, k_BGSK, v_BGSK, attn_mask=None, is_causal=False, enable_gqa=False):
    """FlashAttention as CUDA runs it, which takes grouped heads as they are."""
    return torch.ops.aten._scaled_dot_product_flash_attention(
        q_BHTK, k_BGSK, v_BGSK, 0.0, is_causal
    )[0]


@contextlib.contextmanager
def as_on(target: str):
    """Model code runs as on the target device, "cpu" or "cuda"."""
    if target == "cpu":
        yield
        return
    tiles = model.default_tiles

    def cuda_tiles(N, V, device, kernels):
        return tiles(N, V, torch.device("cuda"), kernels)

    with (
        mock.patch.object(model, "default_tiles", cuda_tiles),
        mock.patch.object(F, "rms_norm", rms_norm),
        mock.patch.object(F, "scaled_dot_product_attention", flash_attention),
        mock.patch.object(torch.Tensor, "is_cuda", property(lambda tensor: True)),
    ):
        yield


@contextlib.contextmanager
def apart(tracker: Tracker, target: str):
    """Where the target is CUDA, what levers keep on the host is no memory of the device, and what
    comes back is.
    """
    if target == "cpu":
        yield
        return
    there, update, fresh = (
        checkpointing.to_host,
        optimizers.AdamW.update,
        optimizers.AdamW.new_state,
    )

    def to_host(x):
        with tracker.on_host():
            return there(x)

    def on_host(method):
        def run(optimizer, *args):
            with tracker.on_host() if optimizer.host else contextlib.nullcontext():
                return method(optimizer, *args)

        return run

    with (
        mock.patch.object(checkpointing, "to_host", to_host),
        mock.patch.object(checkpointing, "from_host", lambda host, _: torch.empty_like(host)),
        mock.patch.object(optimizers.AdamW, "update", on_host(update)),
        mock.patch.object(optimizers.AdamW, "new_state", on_host(fresh)),
    ):
        yield


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
        parts = mock.patch.object(tiling, "range", range if every_part else few_of, create=True)
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            as_on(target),
            apart(tracker, target),
            parts,
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
