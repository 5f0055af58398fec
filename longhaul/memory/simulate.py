"""The memory of one training step, predicted: the real `step.build` and `step.train_step` run on
fake tensors, so nothing is allocated.

Fake tensors are on a fake CPU. If the target is CUDA, the model is told so and takes the paths that
it takes on a GPU. One rank of an FSDP2 run gets a fake process group. The trace is that of the
second step, which is like all that follow: the first one has no optimizer states.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from base.machine import deterministic
from footprint.prediction import fake_process_group
from footprint.trace import Trace
from footprint.tracker import Tracker
from longhaul import dist, step
from longhaul.config import TrainConfig
from longhaul.memory.batches import CPU, tensors_of
from longhaul.memory.platforms import predicting
from longhaul.memory.rehearsal import Rehearsal, rehearsal
from longhaul.memory.stages import label, telling
from longhaul.memory.workspace import Workspaces
from model import Decoder

MakeBatch = Callable[[], list[step.MicroBatch]]  # makes the micro-batches of one step
PLAIN = ("standard", "nsa")  # attention all of whose parameters learn, and that measures nothing
MOST_TOKENS = 2**31 - 1  # of a micro-batch: the bounds of documents are 32-bit numbers


def simulate(
    cfg: TrainConfig,
    ranks: int = 1,
    target: str = "cuda",
    layers: int = 0,
    every_tile: bool = False,
) -> Trace:
    """The trace of the second step of one rank; with two steps of an indexer's dense warm-up it is
    one of these.

    layers: replaces the model's number of layers. every_tile: runs all tiles of a loop, which are
    identical, instead of the first two and the last one, and all micro-batches instead of a few.
    ValueError if a micro-batch has more tokens than 32-bit positions count.
    """
    if cfg.batch_size * cfg.row_tokens > MOST_TOKENS:
        raise ValueError(
            f"--context_length {cfg.context_length} with --batch_size {cfg.batch_size}: a "
            f"micro-batch has at most {MOST_TOKENS:,} tokens: give a shorter context"
        )
    more = rehearsal(cfg, ranks, every_tile)
    with on_fake_tensors(cfg, ranks, target, layers, every_tile, more) as (tracker, state):
        from_zeros = _is_plain(cfg, ranks)
        return trace_second_step(tracker, state, more.batch, more.frozen, from_zeros)


@contextlib.contextmanager
def on_fake_tensors(
    cfg: TrainConfig,
    ranks: int,
    target: str,
    layers: int = 0,
    every_tile: bool = False,
    more: Rehearsal | None = None,
) -> Iterator[tuple[Tracker, step.TrainState]]:
    """A tracker, and what `step.build` makes on rank 0 of `ranks`, as if on the target, with what
    `more` adds: operators inside the `with` block allocate nothing. `layers` and `every_tile` are
    those of `simulate`.
    """
    more = more or Rehearsal(cfg, ranks, every_tile)
    config = cfg.model()
    if layers:
        config = dataclasses.replace(config, num_layers=layers)
    dist.check_replicas(dist.World(size=ranks), cfg.dp_replicate, cfg.context_ranks)
    world = dist.World(0, ranks)

    with fake_process_group(ranks):
        # the mesh and the model on meta are made before fake tensors begin
        mesh = dist.data_mesh(world, CPU, cfg.dp_replicate)
        context_mesh = dist.context_mesh(world, CPU, cfg.context_ranks)
        tracker = Tracker(Workspaces(target), fake=True)
        skeleton = step.skeleton(cfg, config, mesh, context_mesh)
        more.skeletons(config, mesh)

        fake_tensors = FakeTensorMode(allow_non_fake_inputs=True)
        on_target = predicting(target, tracker, every_tile)
        repeats = deterministic(cfg.deterministic and target == "cuda")
        with fake_tensors, on_target, repeats, tracker:
            state = step.fill(skeleton, cfg, "cpu", world, mesh)
            more.begin(tracker, state)
            yield tracker, state


def trace_real_run(cfg: TrainConfig, world: dist.World = step.ONE_PROCESS) -> Trace:
    """The same trace from a real run on this machine's CPU."""
    tracker = Tracker(Workspaces("cpu"))
    mesh = dist.data_mesh(world, CPU, cfg.dp_replicate)
    more = rehearsal(cfg, world.size, every=True)
    more.skeletons(cfg.model(), mesh)
    with tracker:
        state = step.build(cfg, cfg.model(), "cpu", world, mesh)
        more.begin(tracker, state)
        return trace_second_step(tracker, state, more.batch, more.frozen)


def trace_second_step(
    tracker: Tracker,
    state: step.TrainState,
    make_batch: MakeBatch,
    frozen: Mapping[str, Decoder] = MappingProxyType({}),
    from_zeros: bool = False,
) -> Trace:
    """Run two steps under the tracker and return the trace of the second; `frozen` are the models
    that the objective only reads, by name. from_zeros: the first step only makes the optimizer's
    states, from gradients of zeros, in half the time.
    """
    gradients: set[int] = set()

    def find_gradients(stage: str) -> None:
        if stage == "gradient norm":
            found = [p.grad for p in state.model.parameters() if p.grad is not None]
            gradients.clear()
            gradients.update(tracker.register(dist.local_shard(grad), "backward") for grad in found)

    state.listeners.append(find_gradients)
    with telling(tracker, state, frozen):
        if from_zeros:
            _make_states(state)
        else:
            step.train_step(state, make_batch())

        tracker.begin()
        batch = make_batch()
        inputs = {tracker.register(tensor, "input") for tensor in tensors_of(batch)}
        step.train_step(state, batch)

    state.listeners.remove(find_gradients)
    label(tracker.trace, tracker, state, gradients, inputs)
    return tracker.trace


def _is_plain(cfg: TrainConfig, ranks: int) -> bool:
    """Whether a first step leaves nothing but an optimizer state of each parameter."""
    if cfg.SAMPLES or cfg.optimizer_in_backward:
        return False
    return ranks == 1 and cfg.attention_type in PLAIN


def _make_states(state: step.TrainState) -> None:
    """An optimizer step whose gradients are zeros."""
    for parameter in state.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    state.step += 1
    state.checked = True
