"""The optimizer and its schedules. Imports model.py of ours; schedules are pure functions of the step."""

import math

import torch

from model import Decoder


def learning_rate(step: int, cfg) -> float:
    """Learning rate of optimizer step `step` (0-based): linear warmup, then `cfg.schedule`.

    cosine: lr * (m + (1-m) * (1 + cos(pi*u)) / 2) over the steps after warmup, m = min_lr_ratio.
    wsd: constant, then linear to m*lr over the last `decay_fraction` of the run (Hu et al. 2024). constant: constant.
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


def parameter_groups(model: Decoder, weight_decay: float) -> list[dict]:
    """Two groups: matrices decay, vectors (norms, biases) do not."""
    parameters = list(model.parameters())
    return [dict(params=[p for p in parameters if p.ndim >= 2], weight_decay=weight_decay),
            dict(params=[p for p in parameters if p.ndim < 2], weight_decay=0.0)]


def build_optimizer(model: Decoder, cfg) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter 2019); fused where the device has it (fused refuses meta)."""
    device = next(model.parameters()).device.type
    return torch.optim.AdamW(parameter_groups(model, cfg.weight_decay), lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.adam_eps,
                             fused=device in ("cpu", "cuda"))


def clip_gradients(model: Decoder, largest: float) -> torch.Tensor:
    """The global gradient norm before clipping, a 0-d fp32 tensor; gradients are scaled where it exceeds `largest` (0: never).

    One infinite element would make its weight NaN after scaling: the caller skips the step where the norm is not finite.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    local = [g.to_local() if hasattr(g, "to_local") else g for g in gradients]
    total = torch.stack([_sum_of_squares(g) for g in local]).sum()
    for group in _shard_groups(gradients[0]):  # replicas hold the same shards: only these sums differ
        torch.distributed.all_reduce(total, group=group)
    norm = total.sqrt()
    if largest > 0:
        torch._foreach_mul_(local, (largest / (norm + 1e-6)).clamp(max=1.0).float())
    return norm.float()


def _sum_of_squares(gradient: torch.Tensor) -> torch.Tensor:
    """In fp64 over rows that are summed in fp32: one fp32 sum over millions is off by 5e-5, and by where shards are cut."""
    return torch.linalg.vector_norm(gradient, dim=-1).double().square().sum()


def _shard_groups(gradient: torch.Tensor) -> list:
    """The process groups over which a sharded gradient (DTensor) is cut; a NaN on one rank so reaches all."""
    if not hasattr(gradient, "device_mesh"):
        return []
    return [gradient.device_mesh.get_group(dim) for dim, placement in enumerate(gradient.placements) if placement.is_shard()]
