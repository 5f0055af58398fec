"""Optimizers whose states take less memory on the device: bf16 or 8-bit moments, no master copy,
states on the host, Muon.

Each works on the rows of a parameter that this rank holds, a slab of them at a time, so that fp32
copies of moments stay small: decode the slab's moments, run torch's AdamW on it in fp32, encode.
Imports torch alone.

State bytes per parameter: adamw 8, adamw_bf16 4, adamw_8bit 2.03, muon 4 for matrices of layers; a
bf16 parameter without master copy takes 2 where an fp32 one takes 4.
"""

import contextlib
import functools
import hashlib

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from model import platform

SLAB = 2**24  # elements whose moments exist in fp32 at once: 128 MiB
BLOCK = 256  # elements that share a scale in 8 bits (Dettmers et al. 2022)
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # of Muon (Jordan et al. 2024)


def local(tensor: Tensor) -> Tensor:
    """The rows of a tensor that this rank holds."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def generator(device: torch.device, *key) -> torch.Generator | None:
    """A generator that depends on `key` alone: a resumed run rounds as the run would have; None on
    meta.
    """
    if device.type == "meta":
        return None
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def rounded(x: Tensor, dtype: torch.dtype, draw: torch.Generator | None) -> Tensor:
    """x in `dtype`; to bf16 by stochastic rounding: up with the probability of what is cut off, so
    that the mean is exact.
    """
    if dtype != torch.bfloat16:
        return x.to(dtype)
    noise = torch.randint(2**16, x.shape, generator=draw, dtype=torch.int32, device=x.device)
    return noise.add_(x.view(torch.int32)).bitwise_and_(-(2**16)).view(torch.float32).to(dtype)


# ---- how moments are stored


class Plain:
    """Moments in `dtype`."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def new(self, name: str, like: Tensor) -> dict[str, Tensor]:
        return {name: torch.zeros_like(like, dtype=self.dtype)}

    def read(self, state: dict, name: str, rows: slice) -> Tensor:
        return state[name][rows].float()  # itself where it is fp32 already

    def write(self, state: dict, name: str, rows: slice, x: Tensor, draw):
        if self.dtype != torch.float32:
            state[name][rows] = rounded(x, self.dtype, draw)


class EightBit:
    """Moments as codes of a dynamic map and one fp32 scale for each 256 elements of a row (8-bit
    Adam, Dettmers et al. 2022).

    A positive second moment never becomes 0: its update would divide by eps.
    """

    def new(self, name: str, like: Tensor) -> dict[str, Tensor]:
        shape = (*like.shape[:-1], -(-like.shape[-1] // BLOCK))
        return {
            name: torch.full_like(like, _zero(name), dtype=torch.uint8),
            f"{name}_scale": torch.zeros(shape, dtype=torch.float32, device=like.device),
        }

    def read(self, state: dict, name: str, rows: slice) -> Tensor:
        values = _code(name, state[name].device)[state[name][rows].int()]
        return values.mul_(_spread(state[f"{name}_scale"][rows], values))

    def write(self, state: dict, name: str, rows: slice, x: Tensor, draw):
        blocks = torch.nn.functional.pad(x, (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
        scale = blocks.abs().amax(-1)
        code = _code(name, x.device)
        index = torch.bucketize(
            x / _spread(scale, x).clamp(min=torch.finfo(torch.float32).tiny),
            (code[1:] + code[:-1]) / 2,
            out_int32=True,
        )
        if name == "exp_avg_sq":
            index = torch.where(x > 0, index.clamp_(min=1), index)
        state[name][rows], state[f"{name}_scale"][rows] = index.to(torch.uint8), scale


def _spread(scale: Tensor, like: Tensor) -> Tensor:
    return scale.repeat_interleave(BLOCK, -1)[..., : like.shape[-1]]


def _zero(name: str) -> int:
    """The code of 0."""
    return 0 if name == "exp_avg_sq" else 127


_CODES: dict[tuple, Tensor] = {}


def _code(name: str, device: torch.device) -> Tensor:
    """The 256 values that a code stands for, increasing; kept per device, but not one of a
    simulation's tensors without values.
    """
    if (name, device) in _CODES:
        return _CODES[name, device]
    code = torch.tensor(_values(name), dtype=torch.float32, device=device)
    if type(code) is Tensor:
        _CODES[name, device] = code
    return code


@functools.cache
def _values(name: str) -> tuple[float, ...]:
    """0, 1, and seven decades with twice as many values in each next one: the means between evenly
    spaced edges from 0.1 to 1.

    Plain Python: a simulation's tensors have no values that could be read here.
    """
    signed, values = name == "exp_avg", [0.0, 1.0]
    for decade in range(7):
        cells = 2**decade * (1 if signed else 2)
        means = [(0.1 + 0.9 * (cell + 0.5) / cells) * 10.0 ** (decade - 6) for cell in range(cells)]
        values += means + [-mean for mean in means] * signed
    return tuple(sorted(values))


# ---- the optimizers


class AdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter 2019), the same arithmetic as torch's; `moments`: how matrices'
    moments are stored.

    Vectors (norms, biases) keep fp32 moments. bf16 parameters, which have no master copy, are
    updated by stochastic rounding.
    host=True: moments and an fp32 master copy stay in host memory, 12 bytes per parameter, and are
    updated there.
    """

    def __init__(
        self,
        groups: list[dict],
        moments,
        betas: tuple[float, float],
        eps: float,
        lr: float,
        seed: int = 0,
        host: bool = False,
    ):
        super().__init__(groups, dict(lr=lr, betas=betas, eps=eps))
        self.moments, self.vector_moments, self.seed, self.host = (
            moments,
            Plain(torch.float32),
            seed,
            host,
        )
        self.squares: list[Tensor] = []
        self.index = {
            p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])
        }

    def new_state(self, p: Tensor) -> dict[str, Tensor]:
        """A parameter's state before its first step: tensors of this rank's rows."""
        like = local(p).detach()
        if self.host:
            like = torch.empty_like(
                like, device="meta" if like.is_meta else "cpu", dtype=torch.float32
            ).copy_(like)
        moments = self._moments(p)
        state = {
            **moments.new("exp_avg", like),
            **moments.new("exp_avg_sq", like),
            "step": torch.zeros((), dtype=torch.float32),
        }
        return state | (dict(master=like) if self.host else {})

    def _moments(self, p: Tensor):
        return self.moments if p.ndim >= 2 else self.vector_moments

    def update_in_backward(self):
        """From now on every parameter is updated as soon as its gradient is there, which is then
        freed: gradients of one layer
        exist at a time. Rows whose gradient is not finite stay as they are. `squares` collects the
        sums of squares.
        """
        for group in self.param_groups:
            for p in group["params"]:
                p.register_post_accumulate_grad_hook(functools.partial(self._update_now, group))

    def _update_now(self, group: dict, p: Tensor):
        square = torch.linalg.vector_norm(local(p.grad), dtype=torch.float64).square()
        self.squares.append(square)
        if square.is_meta or square.isfinite():
            with self._memory():
                self.update(p, group)
        p.grad = None

    @torch.no_grad()
    def step(self, closure=None):
        with self._memory():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        self.update(p, group)

    def _memory(self) -> contextlib.AbstractContextManager:
        """Entered around updates: where their tensors are."""
        return platform().host_memory() if self.host else contextlib.nullcontext()

    @torch.no_grad()
    def update(self, p: Tensor, group: dict):
        """One parameter's step from its gradient."""
        if not self.state[p]:
            self.state[p] = self.new_state(p)
        state, weight, grad = self.state[p], local(p), local(p.grad)
        state["step"] += 1
        draw = generator(
            state["exp_avg"].device,
            self.seed,
            self.index[p],
            int(state["step"]) if not weight.is_meta else 0,
            _rank(p),
        )
        target = state["master"] if self.host else weight
        for rows in slabs(target):
            self._slab(p, target, grad[rows].to(target.device), rows, group, draw)
        if self.host:
            weight.copy_(
                target.to(weight.dtype), non_blocking=True
            )  # to the nearest: the master copy is what learns

    def _slab(self, p: Tensor, target: Tensor, grad: Tensor, rows: slice, group: dict, draw):
        state, moments = self.state[p], self._moments(p)
        weight, m, v = (
            target[rows].float(),
            moments.read(state, "exp_avg", rows),
            moments.read(state, "exp_avg_sq", rows),
        )
        before = state["step"] - 1  # adamw adds one
        adamw(
            [weight],
            [grad.float()],
            [m],
            [v],
            [],
            [before.to(weight.device)],
            fused=weight.device.type in ("cpu", "cuda"),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        moments.write(state, "exp_avg", rows, m, draw)
        moments.write(state, "exp_avg_sq", rows, v, draw)
        if target.dtype != torch.float32:
            target[rows] = rounded(weight, target.dtype, draw)


def slabs(x: Tensor):
    """Ranges of rows of at most SLAB elements."""
    size = max(1, SLAB // max(1, x[:1].numel()))
    return [slice(a, min(a + size, len(x))) for a in range(0, len(x), size)]


def _rank(p: Tensor) -> int:
    """Which rows of p this rank holds, by number: replicas, which hold the same, round alike."""
    if not hasattr(p, "device_mesh"):
        return 0
    return next(
        p.device_mesh.get_local_rank(dim)
        for dim, placement in enumerate(p.placements)
        if placement.is_shard()
    )


class Muon(AdamW):
    """Muon (Jordan et al. 2024) for the groups marked `muon`, AdamW for the others.

    B = mu B + g; W -= lr * 0.2 sqrt(max(rows, columns)) * orthogonal(g + mu B), mu = 0.95: the
    update has AdamW's size, so one
    learning rate serves both (Liu et al. 2025). Under FSDP each rank makes the whole matrix
    orthogonal and keeps its rows.
    """

    momentum = 0.95

    def new_state(self, p: Tensor) -> dict[str, Tensor]:
        if not self._orthogonal(p):
            return super().new_state(p)
        return {
            "momentum": torch.zeros_like(local(p), dtype=torch.float32),
            "step": torch.zeros((), dtype=torch.float32),
        }

    def _orthogonal(self, p: Tensor) -> bool:
        return any(
            group.get("muon") and any(p is other for other in group["params"])
            for group in self.param_groups
        )

    @torch.no_grad()
    def update(self, p: Tensor, group: dict):
        if not group.get("muon"):
            return super().update(p, group)
        if not self.state[p]:
            self.state[p] = self.new_state(p)
        state, weight, grad = self.state[p], local(p), local(p.grad).float()
        state["step"] += 1
        state["momentum"].mul_(self.momentum).add_(grad)
        direction = orthogonal(_whole(grad.add(state["momentum"], alpha=self.momentum), p))
        rate = 0.2 * max(p.shape) ** 0.5 * group["lr"]
        wide = (
            weight.float()
            .mul_(1 - group["lr"] * group["weight_decay"])
            .sub_(_own_rows(direction, p), alpha=rate)
        )
        weight.copy_(
            rounded(
                wide,
                weight.dtype,
                generator(weight.device, self.seed, self.index[p], int(state["step"]), _rank(p)),
            )
        )


def orthogonal(x: Tensor, steps: int = 5) -> Tensor:
    """Near U V^T of x = U S V^T, by Newton-Schulz in bf16: singular values end within 0.7 and 1.2."""
    a, b, c = NEWTON_SCHULZ
    y = (x.mT if x.shape[0] > x.shape[1] else x).bfloat16()
    y = y / (y.norm() + 1e-7)
    for _ in range(steps):
        gram = y @ y.mT
        y = torch.addmm(a * y, torch.addmm(b * gram, gram, gram, beta=1, alpha=c), y)
    return (y.mT if x.shape[0] > x.shape[1] else y).float()


def _whole(rows: Tensor, p: Tensor) -> Tensor:
    """The matrix of which each rank holds rows, as parameter p is sharded."""
    if not hasattr(p, "device_mesh"):
        return rows
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        rows, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    ).full_tensor()


def _own_rows(whole: Tensor, p: Tensor) -> Tensor:
    if not hasattr(p, "device_mesh"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None).to_local()
