"""AdamW with moments of 8 bits, as a prediction needs it: its memory, not its numbers."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

BLOCK = 256  # elements of the last dimension that share a scale
SLAB = 2**24  # elements whose moments exist in fp32
MOMENTS = ("exp_avg", "exp_avg_sq")


class EightBitAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter 2019) that stores its moments as codes of 8 bits, with an fp32
    scale for each 256 elements (Dettmers et al. 2022): 2.03 bytes per parameter.

    The codes are evenly spaced here, and the moments are not corrected for their first steps.
    """

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"])

    def _update(self, parameter: nn.Parameter, rate: float) -> None:
        weights = _local(parameter)
        gradient = _local(parameter.grad)
        state = self.state[parameter]
        if not state:
            state.update(_new_state(weights))
        length = max(1, SLAB // max(1, weights[:1].numel()))
        for start in range(0, len(weights), length):
            slab = slice(start, start + length)
            stored = {name: tensor[slab] for name, tensor in state.items()}
            _update_slab(weights[slab], gradient[slab], stored, rate)


def _local(tensor: Tensor) -> Tensor:
    """The part that this rank holds."""
    held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return torch.atleast_1d(held.detach())


def _new_state(weights: Tensor) -> dict[str, Tensor]:
    blocks = -(-weights.shape[-1] // BLOCK)
    shape = (*weights.shape[:-1], blocks)
    state = {}
    for name in MOMENTS:
        state[name] = torch.zeros_like(weights, dtype=torch.uint8)
        state[f"{name}_scale"] = torch.zeros(shape, dtype=torch.float32, device=weights.device)
    return state


def _update_slab(
    weights: Tensor,
    gradient: Tensor,
    stored: dict[str, Tensor],
    rate: float,
) -> None:
    wide = weights.float()
    mean, square = (_read(stored, name) for name in MOMENTS)
    _advance(mean, square, gradient.float())
    wide.addcdiv_(mean, square.sqrt().add_(1e-8), value=-rate)

    _write(stored, "exp_avg", mean)
    _write(stored, "exp_avg_sq", square)
    weights.copy_(wide)


def _advance(mean: Tensor, square: Tensor, gradient: Tensor) -> None:
    mean.lerp_(gradient, 0.1)
    square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)


def _read(stored: dict[str, Tensor], name: str) -> Tensor:
    """A moment in fp32."""
    wide = stored[name].float()
    return wide.mul_(_spread(stored[f"{name}_scale"], wide))


def _write(stored: dict[str, Tensor], name: str, moment: Tensor) -> None:
    padded = nn.functional.pad(moment, (0, -moment.shape[-1] % BLOCK))
    scale = stored[f"{name}_scale"]
    scale.copy_(padded.unflatten(-1, (-1, BLOCK)).abs().amax(-1))
    stored[name].copy_(moment / _spread(scale, moment))


def _spread(scale: Tensor, like: Tensor) -> Tensor:
    """The scale of each element."""
    return scale.repeat_interleave(BLOCK, -1)[..., : like.shape[-1]]
