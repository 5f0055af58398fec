"""What turns gradients into an update: learning rate, parameter groups, the optimizer, clipping."""

import math

import torch
from torch import Tensor

from longhaul.dist import local_shard
from longhaul.kinds import attention_kind
from longhaul.lengths import rate_schedule
from longhaul.optimizers import OPTIMIZERS, Muon
from model import Decoder

# ---- schedule


def learning_rate(step: int, cfg) -> float:
    """Learning rate of optimizer step `step` (0-based): linear warmup, then `cfg.schedule`.

    cosine: lr * (m + (1-m) * (1 + cos(pi*u)) / 2) over the steps after warmup, m = min_ratio.
    wsd: constant, then linear to m*lr over the last `decay_fraction` of the run (Hu et al. 2024).
    constant: constant.
    """
    schedule = rate_schedule(cfg.schedule)
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / cfg.warmup_steps
    if schedule.kind == "constant":
        return cfg.lr

    start = cfg.warmup_steps
    if schedule.kind == "wsd":
        start = max(start, round(cfg.max_steps * (1 - schedule.decay_fraction)))

    # The last step of the run, not the one after it, has the final learning rate.
    last = cfg.max_steps - 1
    done = min(max(step - start, 0) / max(last - start, 1), 1.0)
    left = 1 - done if schedule.kind == "wsd" else (1 + math.cos(math.pi * done)) / 2
    return cfg.lr * (schedule.min_ratio + (1 - schedule.min_ratio) * left)


# ---- optimizer


def parameter_groups(model: Decoder, weight_decay: float, muon: bool = False) -> list[dict]:
    """Matrices decay; vectors (norms, biases) do not. Muon's third group has layers' matrices."""
    matrices = []
    vectors = []
    layer_matrices = []
    for name, p in model.named_parameters():
        if p.ndim < 2:
            vectors.append(p)
        elif muon and name.startswith("layers."):
            layer_matrices.append(p)
        else:
            matrices.append(p)

    groups = [
        dict(params=matrices, weight_decay=weight_decay),
        dict(params=vectors, weight_decay=0.0),
    ]
    if muon:
        groups.append(dict(params=layer_matrices, weight_decay=weight_decay, muon=True))
    return groups


def build_optimizer(model: Decoder, cfg) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter 2019) of torch, or an optimizer of optimizers.py."""
    takes_matrices = issubclass(OPTIMIZERS[cfg.optimizer].optimizer, Muon)
    groups = parameter_groups(model, cfg.weight_decay, takes_matrices)
    adam = cfg.adam_numbers()
    common = dict(lr=cfg.lr, betas=(adam.beta1, adam.beta2), eps=adam.eps)

    if _is_plain(cfg):
        # torch's fused kernel refuses meta tensors.
        device = next(model.parameters()).device.type
        return torch.optim.AdamW(groups, **common, fused=device in ("cpu", "cuda"))

    kind = OPTIMIZERS[cfg.optimizer]
    optimizer = kind.optimizer(
        groups,
        kind.moments,
        **common,
        seed=cfg.seed,
        host=cfg.master_weights == "host",
    )
    if cfg.optimizer_in_backward:
        optimizer.update_in_backward()
    return optimizer


def _is_plain(cfg) -> bool:
    """Whether no lever changes how weights and moments are stored, or when they are updated."""
    if cfg.optimizer_in_backward:
        return False
    return cfg.optimizer == "adamw" and cfg.master_weights == "fp32"


# ---- gradient norm


def global_norm(model: Decoder, optimizer: torch.optim.Optimizer, cfg) -> Tensor:
    """The global gradient norm before clipping, a 0-d fp32 tensor; gradients are clipped.

    If weights are updated in the backward, it is the norm of the gradients that they were updated
    with, and nothing is clipped.
    """
    if not cfg.optimizer_in_backward:
        return clip_gradients(model, cfg.grad_clip)

    total = torch.stack(optimizer.squares).sum()
    optimizer.squares.clear()
    parameter = next(model.parameters())
    return _sum_over_shards(total, parameter).sqrt().float()


def clip_gradients(model: Decoder, largest: float) -> Tensor:
    """Scale gradients down to the global norm `largest` (0: never) and return the norm before.

    Parameters that learn from a loss of their own are scaled apart from the others, so that neither
    changes the other's updates. The norm is that of all, a 0-d fp32 tensor. If it is not finite the
    caller must skip the step: scaling one infinite element makes it NaN, and then its weight.
    """
    squares = [_clip(gradients, largest) for gradients in _families(model) if gradients]
    return torch.stack(squares).sum().sqrt().float()


def _families(model: Decoder) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of the model's loss, and those of losses that layers have of their own."""
    kind = attention_kind(model.config)
    of_model = []
    of_layers = []
    for name, p in model.named_parameters():
        if p.grad is not None:
            family = of_layers if kind.is_learner(name) else of_model
            family.append(p.grad)
    return of_model, of_layers


def _clip(gradients: list[Tensor], largest: float) -> Tensor:
    """The square of the norm before, 0-d in fp64."""
    local = [local_shard(gradient) for gradient in gradients]
    total = torch.stack([_sum_of_squares(gradient) for gradient in local]).sum()
    square = _sum_over_shards(total, gradients[0])

    if largest > 0:
        scale = (largest / (square.sqrt() + 1e-6)).clamp(max=1.0).float()
        torch._foreach_mul_(local, scale)
    return square


def _sum_of_squares(gradient: Tensor) -> Tensor:
    """The sum of squares, a 0-d fp64 tensor.

    A matrix is summed in fp32 along its last dimension and in fp64 over the rest: one fp32 sum over
    millions of elements is off by 5e-5, and by more or less depending on where shards are cut.
    A vector is cut along its only dimension, so all of its sum is fp64.
    """
    if gradient.ndim < 2:
        return gradient.double().square().sum()
    wide = torch.promote_types(gradient.dtype, torch.float32)
    squares = torch.linalg.vector_norm(gradient, dim=-1, dtype=wide).double().square()
    return squares.sum()


def _sum_over_shards(total: Tensor, like: Tensor) -> Tensor:
    """`total` summed over the ranks among which tensors such as `like` are sharded.

    Replicas hold the same shards and are not summed over. A NaN on one rank reaches all.
    """
    if not hasattr(like, "device_mesh"):
        return total
    for dim, placement in enumerate(like.placements):
        if placement.is_shard():
            torch.distributed.all_reduce(total, group=like.device_mesh.get_group(dim))
    return total
