"""Silent corruption: the gradients of a step computed twice must have the same bits. Imports
longhaul.step, longhaul.exits of ours.
"""

import torch

from longhaul import dist, step
from longhaul.exits import NumericalHalt


def audited_step(
    state: step.TrainState, batch: list[dict], must_stop=None
) -> step.StepResult | None:
    """`step.train_step`, its forward and backward run twice; NumericalHalt names the tensors whose
    bits differ, and no weight is changed.

    Costs a second forward and backward and no memory: what is compared is one number per gradient.
    On CUDA it takes deterministic kernels, since atomic additions would differ from run to run; an
    operator that has none raises.
    """
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(state.device.type == "cuda", warn_only=False)
    try:
        first = step.gradients(state, batch, must_stop)
        if first is None:
            return None
        expected = fingerprints(state.model)
        state.optimizer.zero_grad(set_to_none=True)
        second = step.gradients(state, batch, must_stop)
        if second is None:
            return None
        _compare(state, expected, fingerprints(state.model))
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    return step.update(state, batch, *second)


@torch.no_grad()
def fingerprints(model) -> torch.Tensor:
    """Per parameter the sum, modulo 2^64, of its local gradient's elements read as integers: any
    one flipped bit changes it.
    """
    return torch.stack(
        [_bits(p.grad).sum(dtype=torch.int64) for p in model.parameters() if p.grad is not None]
    )


def _bits(gradient: torch.Tensor) -> torch.Tensor:
    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return local.contiguous().view(
        {2: torch.int16, 4: torch.int32, 8: torch.int64}[local.element_size()]
    )


def _compare(state: step.TrainState, expected: torch.Tensor, found: torch.Tensor):
    names = [name for name, p in state.model.named_parameters() if p.grad is not None]
    wrong = [name for name, same in zip(names, (expected == found).tolist()) if not same]
    if dist.any_rank(bool(wrong)):
        where = (
            f"rank {state.world.rank}: {', '.join(wrong[:3])} and {len(wrong) - min(3, len(wrong))} more"
            if wrong
            else "another rank"
        )
        raise NumericalHalt(
            f"step {state.step + 1} computed twice gave other gradients the second time ({where}), no weight was changed: this "
            "machine computes wrongly; give the same command again on another"
        )
