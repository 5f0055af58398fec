"""THE path: `build` makes the model and its optimizer, `train_step` is one step. Training,
simulation, profiling and tests all come through here, so none of them can drift from what runs.

Imports model.py, longhaul.dist, longhaul.optim, longhaul.parallel.apply of ours.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from longhaul import dist, optim
from longhaul.parallel import apply
from model import IGNORE, Decoder, ModelConfig


@dataclass
class TrainState:
    """What a training step reads and changes."""

    cfg: object  # TrainConfig
    model: Decoder
    optimizer: torch.optim.Optimizer
    device: torch.device
    world: dist.World
    mesh: object = None  # DeviceMesh of the data-parallel ranks; None for one process
    step: int = 0  # optimizer steps done
    tokens: int = 0  # tokens seen, padding included
    checked: bool = (
        False  # whether a first step has checked its labels, at the cost of a host synchronisation
    )
    data: dict = field(default_factory=dict)  # the loader's state, as the checkpoint keeps it


@dataclass
class StepResult:
    """One step's figures; `loss` and `grad_norm` are 0-d tensors on the device, read when they are
    logged.
    """

    loss: Tensor  # mean over the global valid tokens, nats
    grad_norm: Tensor  # before clipping
    lr: float
    num_valid: Tensor  # global count of positions with a target
    local_loss: Tensor | None = None  # this rank's share of `loss`
    # whether the gradient norm was NaN or infinite on any rank, so that none took the step
    skipped: bool = False


def build(
    cfg, model_config: ModelConfig, device, world: dist.World = dist.World(), mesh=None
) -> TrainState:
    """Model and optimizer on `device`, sharded over `mesh`, with the weights of `cfg.seed`; on meta
    nothing is allocated.

    `cfg.context_ranks` neighbouring ranks share their rows: each is given them whole and works on
    its part of the tokens.
    """
    context_mesh = dist.context_mesh(world, torch.device(device), cfg.context_ranks)
    return fill(skeleton(cfg, model_config, mesh, context_mesh), cfg, device, world, mesh)


def skeleton(cfg, model_config: ModelConfig, mesh=None, context_mesh=None) -> Decoder:
    """The model on meta with every lever applied: first half of `build`, apart because fake tensors
    begin after it.
    """
    with torch.device("meta"):
        model = Decoder(model_config)
    if cfg.weights_in_compute_dtype:
        model.to(model_config.dtype)
    return apply.apply(model, cfg, mesh, context_mesh)


def fill(model: Decoder, cfg, device, world: dist.World, mesh) -> TrainState:
    """Memory and weights for a skeleton, and its optimizer: second half of `build`."""
    device = torch.device(device)
    if device.type != "meta":
        model.to_empty(device=device)
        model.tie_weights()
        model.init_weights(cfg.seed)
    return TrainState(cfg, model, optim.build_optimizer(model, cfg), device, world, mesh)


def micro_batches(rows, size: int, device: torch.device) -> list[dict]:
    """Micro-batches of `size` rows on `device` from the loader's arrays [R, T]; document ids stay
    on the host.

    `rows` has numpy arrays tokens, labels, positions, doc_ids.
    """

    def on_device(name: str, part: slice) -> Tensor:
        host = torch.from_numpy(getattr(rows, name)[part])
        return (
            host.pin_memory().to(device, non_blocking=True)
            if device.type == "cuda"
            else host.to(device)
        )

    parts = [slice(start, start + size) for start in range(0, len(rows.tokens), size)]
    return [
        dict(
            tokens_BT=on_device("tokens", part),
            labels_BT=on_device("labels", part),
            positions=on_device("positions", part),
            doc_ids=torch.from_numpy(rows.doc_ids[part]),
        )
        for part in parts
    ]


def count_valid(batch: list[dict], state: TrainState) -> Tensor:
    """Positions with a target in all micro-batches of all ranks: the one divisor of the loss. No
    host synchronisation.
    """
    local = torch.stack([(micro["labels_BT"] != IGNORE).sum() for micro in batch]).sum()
    return (
        dist.all_sum(local.to(state.device)) // state.cfg.context_ranks
    )  # which all counted the same rows


def train_step(state: TrainState, batch: list[dict], must_stop=None) -> StepResult | None:
    """One optimizer step over the micro-batches `batch` (keyword arguments of Decoder.forward).

    The loss is sum over every rank's and micro-batch's tokens / global number of valid tokens.
    FSDP2 averages gradients over ranks, so each rank's share is multiplied by their number before
    the backward. `must_stop()`, the same on all ranks, is asked between micro-batches; where it is
    true the step is given up, nothing has changed, and None is returned.
    """
    computed = gradients(state, batch, must_stop)
    return None if computed is None else update(state, batch, *computed)


def gradients(state: TrainState, batch: list[dict], must_stop=None) -> tuple[Tensor, Tensor] | None:
    """(this rank's loss, global number of valid tokens) and every parameter's gradient; None where
    it was given up.
    """
    model = state.model
    model.validate, state.checked = not state.checked, True
    num_valid = count_valid(batch, state)
    divisor = num_valid.clamp(min=1).float()
    total = torch.zeros((), device=state.device)
    set_learning_rate(state)
    pairs = (
        Pairs(model)
        if state.cfg.pairwise_accumulation
        and state.world.size == 1
        and len(batch) > 2
        and len(batch) % 2 == 0
        else None
    )
    for index, micro in enumerate(batch if pairs is None else pairs.order(batch)):
        if index and must_stop is not None and must_stop():
            state.optimizer.zero_grad(set_to_none=True)
            return None
        loss = model(**micro, num_valid=divisor)
        (loss * state.world.size).backward()
        total += loss.detach()
        if pairs is not None and index % 2:
            pairs.add(last=index == len(batch) - 1)
    return total, num_valid


class Pairs:
    """Micro-batches of one process summed as two would: ((g0 + g2) + (g1 + g3)), the first of each
    pair being rank 0's.

    Sums of two are exact to the bit whoever adds them, and sums of more depend on their order.
    Costs one more gradient.
    """

    def __init__(self, model: Decoder):
        self.parameters, self.sums = list(model.parameters()), {}

    def order(self, batch: list[dict]) -> list[dict]:
        half = len(batch) // 2
        return [micro for pair in zip(batch[:half], batch[half:]) for micro in pair]

    def add(self, last: bool):
        """Take the gradient of a pair into the sums; after the last one they are the gradients."""
        for p in self.parameters:
            if p.grad is not None:
                self.sums[p] = self.sums[p].add_(p.grad) if p in self.sums else p.grad
            p.grad = self.sums.get(p) if last else None


def set_learning_rate(state: TrainState):
    """This step's, before the backward: updates in the backward use it."""
    for group in state.optimizer.param_groups:
        group["lr"] = optim.learning_rate(state.step, state.cfg)


def update(state: TrainState, batch: list[dict], total: Tensor, num_valid: Tensor) -> StepResult:
    """Clip, step the optimizer, count: what follows once the gradients are there."""
    cfg, lr = state.cfg, optim.learning_rate(state.step, state.cfg)
    norm = optim.global_norm(state.model, state.optimizer, cfg)
    loss, fine = dist.all_sum(
        torch.stack([total, norm.isfinite().float()])
    )  # fine: ranks whose norm is neither NaN nor inf
    takes_it = norm.is_meta or bool(
        fine == state.world.size
    )  # the same on all ranks, though replicas may have differed
    if takes_it:
        state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    state.step += 1
    state.tokens += sum(micro["tokens_BT"].numel() for micro in batch) * (
        state.world.size // cfg.context_ranks
    )
    return StepResult(loss, norm, lr, num_valid, total, not takes_it)


@torch.no_grad()
def evaluate(
    state: TrainState, batches: list[list[dict]], must_stop=None
) -> tuple[float, int] | None:
    """Mean loss in nats over all valid tokens of `batches` and of all ranks, and their number; None
    where `must_stop()` gave it up.
    """
    total, count = torch.zeros((), device=state.device, dtype=torch.float64), 0
    for batch in batches:
        for micro in batch:
            if must_stop is not None and must_stop():
                return None
            total += state.model(**micro, num_valid=1.0).double()
        count += int(count_valid(batch, state))
    apply.reshard(state.model)
    return float(dist.all_sum(total)) / max(count, 1), count
