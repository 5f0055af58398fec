"""`build` makes the model and its optimizer, and `train_step` runs one step. Training, simulation,
profiling and tests all use these two functions, so none of them can drift from what runs.

Letters: B rows of a micro-batch, T context length, R rows that the loader gives to this rank.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from data.loader import Batch
from longhaul import dist, kernels, optim
from longhaul.config import TrainConfig
from longhaul.kinds import attention_kind
from longhaul.parallel import apply
from model import IGNORE, Decoder, ModelConfig, OnHost

MicroBatch = dict[str, Tensor | OnHost]  # what an objective's loss reads
MustStop = Callable[[], bool]  # whether the run was asked to stop, the same on all ranks
ONE_PROCESS = dist.World()


class Objective(Protocol):
    """What a step minimises: sum of `loss` over all micro-batches of all ranks.

    Pretraining's is `NextToken`; lab/posttrain/ has those of post-training. One may stand
    around another, such as that of layers with losses of their own.
    """

    measures: tuple[str, ...] = ()  # what `after_backward` returns, by name

    def weight(self, micro: MicroBatch) -> Tensor:
        """What a micro-batch adds to the divisor of the loss, such as its valid tokens: a whole
        number, 0-d.
        """

    def loss(self, model: Decoder, micro: MicroBatch, divisor: Tensor) -> Tensor:
        """The micro-batch's share of the loss, 0-d: its sum / divisor, which is the sum of all
        weights over micro-batches and ranks, or infinity if that is 0.
        """

    def tokens(self, micro: MicroBatch, ranks: int) -> int:
        """Tokens of the micro-batch, padding included, and of those that the other ones of so many
        ranks run at the same time; the host knows them without waiting for the device.
        """

    def after_backward(self, model: Decoder) -> Tensor:
        """Called behind the backward of each micro-batch: figures of it, [2, measures], which are
        sums and by what they are to be divided.
        """
        return torch.empty((2, len(self.measures)), device=model.norm.weight.device)


class NextToken(Objective):
    """The mean cross-entropy of the next token. A micro-batch is Decoder.forward's arguments."""

    def weight(self, micro: MicroBatch) -> Tensor:
        return (micro["labels_BT"] != IGNORE).sum()

    def loss(self, model: Decoder, micro: MicroBatch, divisor: Tensor) -> Tensor:
        return model(**micro, num_valid=divisor)

    def tokens(self, micro: MicroBatch, ranks: int) -> int:
        return ranks * micro["tokens_BT"].numel()  # all rows have the context length


@dataclass
class TrainState:
    """What a training step reads and changes."""

    cfg: TrainConfig
    model: Decoder
    optimizer: torch.optim.Optimizer
    device: torch.device
    world: dist.World
    mesh: DeviceMesh | None = None  # of the data-parallel ranks; None for one process
    objective: Objective = field(default_factory=NextToken)
    step: int = 0  # optimizer steps done
    tokens: int = 0  # tokens seen, padding included
    # whether a first step has checked its labels, at the cost of a host synchronisation
    checked: bool = False
    data: dict = field(default_factory=dict)  # the loader's state, as the checkpoint keeps it
    figures: Tensor | None = None  # of the newest step on this rank, as `after_backward`
    weight: Tensor | None = None  # of the newest step, as `count_valid`
    listeners: list[Callable[[str], None]] = field(default_factory=list)  # of the step's stages

    def stage(self, name: str) -> None:
        """Tell whoever listens that this stage of the step begins; the model's own stages have
        hooks on its modules.
        """
        for listener in self.listeners:
            listener(name)


@dataclass
class StepResult:
    """One step's figures. `loss`, `weight` and `grad_norm` are 0-d tensors of the host."""

    loss: Tensor | None  # mean over the global valid tokens, nats; None without any
    weight: Tensor  # what it is the mean over: pretraining's global valid tokens
    grad_norm: Tensor  # before clipping
    lr: float
    # what the objective measured, by name; NaN if there was nothing to measure
    figures: dict[str, Tensor] = field(default_factory=dict)
    # whether the gradient norm was NaN or infinite on any rank, so that none took the step
    skipped: bool = False


# ---- building


def build(
    cfg: TrainConfig,
    model_config: ModelConfig,
    device: torch.device | str,
    world: dist.World = ONE_PROCESS,
    mesh: DeviceMesh | None = None,
) -> TrainState:
    """Model and optimizer on `device`, sharded over `mesh`, with the weights of `cfg.seed`; on meta
    nothing is allocated.

    `cfg.context_ranks` neighbouring ranks share their rows: each is given whole rows and works on
    its part of their tokens.
    """
    context_mesh = dist.context_mesh(world, torch.device(device), cfg.context_ranks)
    model = skeleton(cfg, model_config, mesh, context_mesh)
    return fill(model, cfg, device, world, mesh)


def skeleton(
    cfg: TrainConfig,
    model_config: ModelConfig,
    mesh: DeviceMesh | None = None,
    context_mesh: DeviceMesh | None = None,
) -> Decoder:
    """The model on meta with every lever applied: the first half of `build`. It is separate because
    a simulation turns to fake tensors between the two.
    """
    with torch.device("meta"):
        model = kernels.decoder(model_config)
    if cfg.weights_in_compute_dtype:
        model.to(model_config.dtype)
    return apply.apply(model, cfg, mesh, context_mesh)


def fill(
    model: Decoder,
    cfg: TrainConfig,
    device: torch.device | str,
    world: dist.World,
    mesh: DeviceMesh | None,
) -> TrainState:
    """Memory and weights for a skeleton, and its optimizer: the second half of `build`."""
    device = torch.device(device)
    materialise(model, cfg.seed, device)
    optimizer = optim.build_optimizer(model, cfg)
    state = TrainState(cfg, model, optimizer, device, world, mesh)
    state.objective = attention_kind(model.config).objective(state.objective, state)
    return state


def materialise(model: Decoder, seed: int, device: torch.device):
    """Memory and random weights for a skeleton; on meta it stays one."""
    if device.type == "meta":
        return
    model.to_empty(device=device)
    model.tie_weights()
    model.init_weights(seed)


def frozen(
    cfg: TrainConfig,
    model_config: ModelConfig,
    device: torch.device | str,
    mesh: DeviceMesh | None = None,
) -> Decoder:
    """A model that is read and never trained, such as a policy's reference, with the levers of
    `build` and no optimizer.
    """
    model = skeleton(cfg, model_config, mesh)
    materialise(model, cfg.seed, torch.device(device))
    return model.requires_grad_(False)


# ---- a batch


def micro_batches(rows: Batch, size: int, device: torch.device) -> list[MicroBatch]:
    """The loader's arrays [R, T] as micro-batches of `size` rows on `device`; document ids stay on
    the host.
    """
    starts = range(0, len(rows.tokens), size)
    return [_micro_batch(rows, slice(start, start + size), device) for start in starts]


def _micro_batch(rows: Batch, part: slice, device: torch.device) -> MicroBatch:
    return {
        "tokens_BT": _on_device(rows.tokens[part], device),
        "labels_BT": _on_device(rows.labels[part], device),
        "positions": _on_device(rows.positions[part], device),
        "doc_ids": OnHost(torch.from_numpy(rows.doc_ids[part])),
    }


def _on_device(array, device: torch.device) -> Tensor:
    host = torch.from_numpy(array)
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)


def count_valid(batch: list[MicroBatch], state: TrainState) -> Tensor:
    """The weights of all micro-batches of all ranks, which divide the summed loss; pretraining's
    are positions with a target. There is no host synchronisation.
    """
    local = torch.stack([state.objective.weight(micro) for micro in batch]).sum()
    total = dist.all_sum(local.to(state.device))
    return total // state.cfg.context_ranks  # ranks that share rows have counted the same ones


# ---- one step


def train_step(
    state: TrainState, batch: list[MicroBatch], must_stop: MustStop | None = None
) -> StepResult | None:
    """One optimizer step over the micro-batches of `batch`.

    The loss is the sum over every rank's and micro-batch's tokens / global number of valid tokens,
    or what another objective makes of them.
    A step without any valid token has no loss: all gradients are 0, and the optimizer takes them.
    FSDP2 averages gradients over ranks, so each rank's share is multiplied by their number before
    the backward. `must_stop()` is asked between micro-batches; if it is true, the step is given up,
    nothing has changed, and None is returned.
    """
    loss = gradients(state, batch, must_stop)
    return None if loss is None else update(state, batch, loss)


def gradients(
    state: TrainState, batch: list[MicroBatch], must_stop: MustStop | None = None
) -> Tensor | None:
    """This rank's share of the loss, with every parameter's gradient computed; None if the step was
    given up.
    """
    model = state.model
    model.validate = not state.checked
    state.checked = True

    state.weight = count_valid(batch, state)
    # of a step that asks for nothing, the layers learn nothing by losses of their own, either
    divisor = state.weight.float().masked_fill(state.weight == 0, torch.inf)
    total = torch.zeros((), device=state.device)
    set_learning_rate(state)

    measured = []
    for index, micro in enumerate(batch):
        if index and must_stop is not None and must_stop():
            state.optimizer.zero_grad(set_to_none=True)
            return None
        loss = state.objective.loss(model, micro, divisor)
        (loss * state.world.size).backward()
        measured.append(state.objective.after_backward(model))
        total += loss.detach()
    state.figures = torch.stack(measured).sum(0)
    return total


def set_learning_rate(state: TrainState):
    """Set this step's learning rate, before the backward, in which some optimizers already update
    weights.
    """
    for group in state.optimizer.param_groups:
        group["lr"] = optim.learning_rate(state.step, state.cfg)


def update(state: TrainState, batch: list[MicroBatch], local_loss: Tensor) -> StepResult:
    """Clip, step the optimizer, count: the second half of a step, after `gradients`."""
    cfg = state.cfg
    if not cfg.optimizer_in_backward:  # whose updates have taken the norm's parts already
        state.stage("gradient norm")
    norm = optim.global_norm(state.model, state.optimizer, cfg)

    # replicas may disagree about the norm, so the step is taken only if all ranks find it finite
    own = torch.stack([local_loss, norm.isfinite().float()])
    found = dist.all_sum(torch.cat([own, state.figures.flatten()]))
    weight = state.weight
    if norm.device.type == "cuda":
        # all figures at once: the only time in a step that the host waits for the device
        norm, weight, *found = torch.cat([norm[None], weight[None], found]).cpu()
    loss, finite_ranks, *figures = found
    all_finite = norm.is_meta or bool(finite_ranks == state.world.size)
    if all_finite:
        state.stage("optimizer")
        state.optimizer.step()
    elif cfg.optimizer_in_backward:
        state.optimizer.uncount_skipped()
    state.optimizer.zero_grad(set_to_none=True)

    state.step += 1
    ranks = state.world.size // cfg.context_ranks
    state.tokens += sum(state.objective.tokens(micro, ranks) for micro in batch)
    has_loss = norm.is_meta or bool(weight > 0)
    return StepResult(
        loss=loss if has_loss else None,
        weight=weight,
        grad_norm=norm,
        lr=state.optimizer.param_groups[0]["lr"],
        skipped=not all_finite,
        figures=_figures(state, figures),
    )


def _figures(state: TrainState, sums: list[Tensor]) -> dict[str, Tensor]:
    """What the objective measured on all ranks, by name."""
    names = state.objective.measures
    totals, counts = sums[: len(names)], sums[len(names) :]
    return {name: total / count for name, total, count in zip(names, totals, counts, strict=True)}
