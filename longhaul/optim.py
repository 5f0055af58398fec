"""The optimizer and its schedules, pure functions of the step. Imports model.py and longhaul.optimizers
of ours.
"""

import math

import torch

from longhaul import optimizers
from model import Decoder


def learning_rate(step: int, cfg) -> float:
    """Learning rate of optimizer step `step` (0-based): linear warmup, then `cfg.schedule`.

    cosine: lr * (m + (1-m) * (1 + cos(pi*u)) / 2) over the steps after warmup, m = min_lr_ratio.
    wsd: constant, then linear to m*lr over the last `decay_fraction` of the run (Hu et al. 2024).
    constant: constant.
    """
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / cfg.warmup_steps
    if cfg.schedule == "constant":
        return cfg.lr
    start = cfg.warmup_steps
    if cfg.schedule == "wsd":
        start = max(start, round(cfg.max_steps * (1 - cfg.decay_fraction)))
    done = min(max(step - start, 0) / max(cfg.max_steps - 1 - start, 1), 1.0)
    shape = 1 - done if cfg.schedule == "wsd" else (1 + math.cos(math.pi * done)) / 2
    return cfg.lr * (cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * shape)


MOMENTS = {
    "adamw": optimizers.Plain(torch.float32),
    "adamw_bf16": optimizers.Plain(torch.bfloat16),
    "adamw_8bit": optimizers.EightBit(),
    "muon": optimizers.Plain(torch.float32),
}


def parameter_groups(model: Decoder, weight_decay: float, muon: bool = False) -> list[dict]:
    """Matrices decay, vectors (norms, biases) do not; with `muon` the layers' matrices are a group
    of their own.
    """
    named = list(model.named_parameters())
    hidden = [p for name, p in named if muon and p.ndim >= 2 and name.startswith("layers.")]
    kept = {id(p) for p in hidden}
    groups = [
        dict(
            params=[p for _, p in named if p.ndim >= 2 and id(p) not in kept],
            weight_decay=weight_decay,
        ),
        dict(params=[p for _, p in named if p.ndim < 2], weight_decay=0.0),
    ]
    return groups + [dict(params=hidden, weight_decay=weight_decay, muon=True)] * muon


def build_optimizer(model: Decoder, cfg) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter 2019), torch's own and fused where the device has it (fused
    refuses meta), or one of states.py.
    """
    device = next(model.parameters()).device.type
    groups = parameter_groups(model, cfg.weight_decay, cfg.optimizer == "muon")
    common = dict(lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.adam_eps)
    if (
        cfg.optimizer == "adamw"
        and cfg.master_weights == "fp32"
        and not (cfg.offload_optimizer or cfg.optimizer_in_backward)
    ):
        return torch.optim.AdamW(groups, **common, fused=device in ("cpu", "cuda"))
    kind = optimizers.Muon if cfg.optimizer == "muon" else optimizers.AdamW
    optimizer = kind(
        groups, MOMENTS[cfg.optimizer], **common, seed=cfg.seed, host=cfg.offload_optimizer
    )
    if cfg.optimizer_in_backward:
        optimizer.update_in_backward()
    return optimizer


def global_norm(model: Decoder, optimizer: torch.optim.Optimizer, cfg) -> torch.Tensor:
    """The global gradient norm, a 0-d fp32 tensor, after clipping to cfg.grad_clip; with updates in
    the backward, of what they saw.
    """
    if not cfg.optimizer_in_backward:
        return clip_gradients(model, cfg.grad_clip)
    total = torch.stack(optimizer.squares).sum()
    optimizer.squares.clear()
    return _over_shards(total, next(model.parameters())).sqrt().float()


def clip_gradients(model: Decoder, largest: float) -> torch.Tensor:
    """The global gradient norm before clipping, a 0-d fp32 tensor; gradients are scaled where it
    exceeds `largest` (0: never).

    One infinite element would make its weight NaN after scaling: the caller skips the step where
    the norm is not finite.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    local = [g.to_local() if hasattr(g, "to_local") else g for g in gradients]
    total = torch.stack([_sum_of_squares(g) for g in local]).sum()
    norm = _over_shards(total, gradients[0]).sqrt()
    if largest > 0:
        torch._foreach_mul_(local, (largest / (norm + 1e-6)).clamp(max=1.0).float())
    return norm.float()


def _sum_of_squares(gradient: torch.Tensor) -> torch.Tensor:
    """In fp64 over rows that are summed in fp32: one fp32 sum over millions is off by 5e-5, and by
    where shards are cut. Vectors are cut within their one row: all in fp64.
    """
    if gradient.ndim < 2:
        return gradient.double().square().sum()
    return (
        torch.linalg.vector_norm(
            gradient, dim=-1, dtype=torch.promote_types(gradient.dtype, torch.float32)
        )
        .double()
        .square()
        .sum()
    )


def _over_shards(total: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`total` summed over the ranks among which tensors such as `like` are cut (replicas hold the
    same shards); a NaN so reaches all.
    """
    if hasattr(like, "device_mesh"):
        for dim, placement in enumerate(like.placements):
            if placement.is_shard():
                torch.distributed.all_reduce(total, group=like.device_mesh.get_group(dim))
    return total
