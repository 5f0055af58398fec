"""Optimizers that need less memory on the device: bf16 or 8-bit moments, no master copy, states in
host memory, Muon.

Each works on the shard of a parameter that this rank holds, one slab of it at a time, so that only
one slab's moments exist in fp32: decode them, run torch's AdamW in fp32, encode them.

State bytes per parameter: adamw 8, adamw_bf16 4, adamw_8bit 2.03, Muon 4 for the layers' matrices.
A bf16 parameter without a master copy takes 2 bytes, an fp32 one 4.
"""

import dataclasses
import functools
import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from base import machine
from longhaul.dist import local_shard, shard_like
from longhaul.staging import Staging, slabs

BLOCK = 256  # elements that share a scale in 8 bits (Dettmers et al. 2022)
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # coefficients of Muon (Jordan et al. 2024)


# ---- stochastic rounding


def generator(device: torch.device, *key) -> torch.Generator | None:
    """A generator seeded only by `key`, so that a resumed run repeats its draws; None on meta."""
    if device.type == "meta":
        return None
    digest = hashlib.sha256(repr(key).encode()).digest()
    seed = int.from_bytes(digest[:8], "little") >> 1
    return torch.Generator(device).manual_seed(seed)


def rounded(
    x: Tensor,
    dtype: torch.dtype,
    draw: torch.Generator | None,
) -> Tensor:
    """fp32 x in `dtype`; bf16 by stochastic rounding.

    An update is often smaller than half the distance between two bf16 numbers, and rounding to the
    nearest would drop it every time. Rounding up with the probability of what is cut off keeps the
    mean exact: random bits are added to the 16 that bf16 does not have, and the sum is cut.
    """
    if dtype != torch.bfloat16:
        return x.to(dtype)
    noise = torch.randint(2**16, x.shape, generator=draw, dtype=torch.int32, device=x.device)
    bits = noise.add_(x.view(torch.int32)).bitwise_and_(-(2**16))
    return bits.view(torch.float32).to(dtype)


def store(
    target: Tensor,
    new: Tensor,
    skip: Tensor | None = None,
) -> None:
    """Write `new` into the target, unless `skip`, which the device decides: the host never reads it
    and so does not wait for it. None stands for no.
    """
    if skip is None:
        target.copy_(new)
    else:
        torch.where(skip, target, new, out=target)


# ---- how moments are stored


class Plain:
    """Moments in `dtype`."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def new(self, name: str, like: Tensor) -> dict[str, Tensor]:
        """State tensors of a moment before the first step."""
        return {name: torch.zeros_like(like, dtype=self.dtype)}

    def read(
        self,
        state: dict[str, Tensor],
        name: str,
        slab: slice,
    ) -> Tensor:
        """The moment in fp32; for fp32 moments the stored tensor itself."""
        return state[name][slab].float()

    def write(
        self,
        state: dict[str, Tensor],
        name: str,
        slab: slice,
        x: Tensor,
        draw: torch.Generator | None,
        skip: Tensor | None = None,
    ) -> None:
        """Store what `read` gave and AdamW has updated in place, unless `skip`."""
        if self.dtype != torch.float32:
            store(state[name][slab], rounded(x, self.dtype, draw), skip)


class EightBit:
    """Moments as 8-bit codes, with one fp32 scale for each 256 elements of the last dimension.

    The codes stand for unevenly spaced values (8-bit Adam, Dettmers et al. 2022). A positive second
    moment never becomes 0, because its update would then divide by eps.
    """

    def new(self, name: str, like: Tensor) -> dict[str, Tensor]:
        """State tensors of a moment before the first step."""
        blocks = -(-like.shape[-1] // BLOCK)
        shape = (*like.shape[:-1], blocks)
        zero = 0 if name == "exp_avg_sq" else 127  # the code of 0
        return {
            name: torch.full_like(like, zero, dtype=torch.uint8),
            f"{name}_scale": torch.zeros(shape, dtype=torch.float32, device=like.device),
        }

    def read(
        self,
        state: dict[str, Tensor],
        name: str,
        slab: slice,
    ) -> Tensor:
        """The moment in fp32."""
        values = _code(name, state[name].device)[state[name][slab].int()]
        return values.mul_(_spread(state[f"{name}_scale"][slab], values))

    def write(
        self,
        state: dict[str, Tensor],
        name: str,
        slab: slice,
        x: Tensor,
        draw: torch.Generator | None,
        skip: Tensor | None = None,
    ) -> None:
        """Store x, unless `skip`: a new scale for each block, and for each element the code of the
        nearest value.
        """
        padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % BLOCK))
        blocks = padded.unflatten(-1, (-1, BLOCK))
        scale = blocks.abs().amax(-1)
        code = _code(name, x.device)
        index = torch.bucketize(
            x / _spread(scale, x).clamp(min=torch.finfo(torch.float32).tiny),  # 0 among zeros
            (code[1:] + code[:-1]) / 2,  # where one code's values end and the next one's begin
            out_int32=True,
        )
        if name == "exp_avg_sq":
            index = torch.where(x > 0, index.clamp_(min=1), index)

        store(state[name][slab], index.to(torch.uint8), skip)
        store(state[f"{name}_scale"][slab], scale, skip)


def _spread(scale: Tensor, like: Tensor) -> Tensor:
    """The scale of each element."""
    return scale.repeat_interleave(BLOCK, -1)[..., : like.shape[-1]]


_CODES: dict[tuple, Tensor] = {}


def _code(name: str, device: torch.device) -> Tensor:
    """The 256 values that the codes stand for, ascending, made once per device."""
    if (name, device) in _CODES:
        return _CODES[name, device]
    code = torch.tensor(_values(name), dtype=torch.float32, device=device)
    # A simulation's tensor has no values that a real run could use later.
    if type(code) is Tensor:
        _CODES[name, device] = code
    return code


@functools.cache
def _values(name: str) -> tuple[float, ...]:
    """The values of the codes: 0, 1, and seven decades, each with twice as many values as the last.

    A decade's values are the means between evenly spaced edges from 0.1 to 1; those of the first
    moment have both signs. In plain Python, because a simulation's tensors cannot be read.
    """
    signed = name == "exp_avg"
    values = [0.0, 1.0]
    for decade in range(7):
        cells = 2**decade if signed else 2 ** (decade + 1)
        for cell in range(cells):
            mean = (0.1 + 0.9 * (cell + 0.5) / cells) * 10.0 ** (decade - 6)
            values.append(mean)
            if signed:
                values.append(-mean)
    return tuple(sorted(values))


# ---- the optimizers


class AdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter 2019) with the arithmetic of torch's own.

    moments: how the moments of matrices are stored; those of vectors (norms, biases) are fp32. bf16
    parameters without a master copy are updated by stochastic rounding.
    host=True: moments and an fp32 master copy stay in host memory, 12 bytes per parameter, and are
    updated there.
    """

    def __init__(
        self,
        groups: list[dict],
        moments: Plain | EightBit,
        betas: tuple[float, float],
        eps: float,
        lr: float,
        seed: int = 0,
        host: bool = False,
    ):
        super().__init__(groups, dict(lr=lr, betas=betas, eps=eps))
        self.moments = moments
        self.vector_moments = Plain(torch.float32)
        self.seed = seed
        self.host = host
        self.squares: list[Tensor] = []
        # parameters that the last backward has updated, and whether the device skipped them
        self.undecided: list[tuple[Tensor, Tensor]] = []
        self.staging = Staging()

        parameters = [p for group in self.param_groups for p in group["params"]]
        self.index = {p: i for i, p in enumerate(parameters)}

    def new_state(self, p: Tensor) -> dict[str, Tensor]:
        """A parameter's state before its first step: tensors of this rank's shard."""
        like = local_shard(p).detach()
        if self.host:
            on_host = torch.empty_like(
                like, device="meta" if like.is_meta else "cpu", dtype=torch.float32
            )
            like = on_host.copy_(like)

        moments = self._moments(p)
        state = moments.new("exp_avg", like) | moments.new("exp_avg_sq", like)
        state["step"] = torch.zeros((), dtype=torch.float32)
        if self.host:
            state["master"] = like
        return state

    def _moments(self, p: Tensor) -> Plain | EightBit:
        return self.moments if p.ndim >= 2 else self.vector_moments

    def update_in_backward(self) -> None:
        """From now on, update every parameter as soon as its gradient is complete, and free that.

        Gradients of one layer exist at a time. A shard whose gradient is not finite stays as it is:
        a GPU decides that itself, so that the host can queue the rest of the backward meanwhile.
        `squares` collects the sums of squares for the gradient norm.
        """
        for group in self.param_groups:
            for p in group["params"]:
                p.register_post_accumulate_grad_hook(functools.partial(self._update_now, group))

    def _update_now(self, group: dict, p: Tensor) -> None:
        square = torch.linalg.vector_norm(local_shard(p.grad), dtype=torch.float64).square()
        self.squares.append(square)
        if square.device.type == "cuda" and not self.host:
            skip = ~square.isfinite()
            self.update(p, group, skip)
            self.undecided.append((p, skip))
        elif square.is_meta or square.isfinite():
            self.update(p, group)
        p.grad = None

    def uncount_skipped(self) -> None:
        """After a backward whose norm was not finite: the parameters that the device skipped have
        made no step. Waits for the device.
        """
        for p, skip in self.undecided:
            if skip:
                self.state[p]["step"] -= 1
        self.undecided.clear()

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Update every parameter that has a gradient."""
        self.undecided.clear()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group)

    @torch.no_grad()
    def update(
        self,
        p: Tensor,
        group: dict,
        skip: Tensor | None = None,
    ) -> None:
        """One step of one parameter, from its gradient; `skip` is a number of the device, where all
        of the parameter stays as it is if it is true.
        """
        if not self.state[p]:
            self.state[p] = self.new_state(p)
        state = self.state[p]
        state["step"] += 1

        weight = local_shard(p)
        grad = local_shard(p.grad)
        draw = self._draw(p, state["exp_avg"].device)
        if not self.host:
            for slab in slabs(weight):
                self._update_slab(p, weight, grad[slab], slab, group, draw, skip)
            return

        master = state["master"]
        for slab, on_host in self.staging.slabs_on_host(grad):
            self._update_slab(p, master, on_host, slab, group, draw)
            # to the nearest: the master copy keeps what rounding drops
            self.staging.give_back(weight[slab], master[slab])

    def _steps(self, p: Tensor) -> int:
        """The number of p's steps, this one included."""
        return 0 if local_shard(p).is_meta else int(self.state[p]["step"])

    def _draw(self, p: Tensor, device: torch.device) -> torch.Generator | None:
        """The random bits of this step's rounding; replicas of a shard draw the same ones."""
        return generator(device, self.seed, self.index[p], self._steps(p), _shard_index(p))

    def _update_slab(
        self,
        p: Tensor,
        target: Tensor,
        grad: Tensor,
        slab: slice,
        group: dict,
        draw: torch.Generator | None,
        skip: Tensor | None = None,
    ) -> None:
        state = self.state[p]
        moments = self._moments(p)
        weight = target[slab].float()
        m = moments.read(state, "exp_avg", slab)
        v = moments.read(state, "exp_avg_sq", slab)

        # Made on the device: a copy of the host's number would wait for all that is queued there.
        # adamw adds one to it.
        before = self._steps(p) - 1
        steps_before = torch.full((), before, dtype=torch.float32, device=weight.device)
        adamw(
            [weight],
            [grad.float()],
            [m],
            [v],
            [],
            [steps_before],
            fused=weight.device.type in ("cpu", "cuda"),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            found_inf=None if skip is None else skip.float(),
        )

        # The order is that of the draws, which a resumed run repeats.
        moments.write(state, "exp_avg", slab, m, draw, skip)
        moments.write(state, "exp_avg_sq", slab, v, draw, skip)
        if target.dtype != torch.float32:
            store(target[slab], rounded(weight, target.dtype, draw), skip)


class Muon(AdamW):
    """Muon (Jordan et al. 2024) for the groups marked `muon`, AdamW for the others.

    B = mu B + g; W -= lr * 0.2 sqrt(max(W.shape)) * orthogonal(g + mu B), with mu = 0.95.

    The update has the size of AdamW's, so that one learning rate serves both (Liu et al. 2025).
    With FSDP each rank orthogonalises the whole matrix and keeps its shard. Matrix products may
    round otherwise on another rank, so replicas of a shard take the weights of the first one.
    """

    momentum = 0.95

    def new_state(self, p: Tensor) -> dict[str, Tensor]:
        """A parameter's state before its first step: tensors of this rank's shard."""
        if not self._is_orthogonalised(p):
            return super().new_state(p)
        return {
            "momentum": torch.zeros_like(local_shard(p), dtype=torch.float32),
            "step": torch.zeros((), dtype=torch.float32),
        }

    def _is_orthogonalised(self, p: Tensor) -> bool:
        groups = [group for group in self.param_groups if group.get("muon")]
        return any(p is other for group in groups for other in group["params"])

    @torch.no_grad()
    def update(
        self,
        p: Tensor,
        group: dict,
        skip: Tensor | None = None,
    ) -> None:
        """One step of one parameter, from its gradient."""
        if not group.get("muon"):
            super().update(p, group, skip)
            return
        assert skip is None  # never in the backward, which has no whole matrices

        if not self.state[p]:
            self.state[p] = self.new_state(p)
        state = self.state[p]
        state["step"] += 1

        # Nesterov: the momentum of the next step, which is g + mu B with the new B.
        grad = local_shard(p.grad).float()
        momentum = state["momentum"].mul_(self.momentum).add_(grad)
        direction = orthogonal(_full_matrix(grad.add(momentum, alpha=self.momentum), p))

        weight = local_shard(p)
        rate = 0.2 * max(p.shape) ** 0.5 * group["lr"]
        decayed = weight.float().mul_(1 - group["lr"] * group["weight_decay"])
        wide = decayed.sub_(local_shard(shard_like(direction, p)), alpha=rate)
        weight.copy_(rounded(wide, weight.dtype, self._draw(p, weight.device)))
        _share_with_replicas(weight, p)


def orthogonal(x: Tensor) -> Tensor:
    """About U V^T of x = U S V^T, by Newton-Schulz in bf16; singular values end in 0.7 to 1.2."""
    a, b, c = NEWTON_SCHULZ
    is_tall = x.shape[0] > x.shape[1]  # the smaller of x x^T and x^T x costs less
    y = (x.mT if is_tall else x).bfloat16()
    y = y.to(machine.product_dtype(y))
    y = y / (y.norm() + 1e-7)
    for _ in range(5):
        gram = y @ y.mT
        y = torch.addmm(a * y, torch.addmm(b * gram, gram, gram, beta=1, alpha=c), y)
    return (y.mT if is_tall else y).float()


# ---- shards of parameters


def _shard_index(p: Tensor) -> int:
    """Which shard of p this rank holds, by number."""
    if not hasattr(p, "device_mesh"):
        return 0
    sharded = [dim for dim, placement in enumerate(p.placements) if placement.is_shard()]
    return p.device_mesh.get_local_rank(sharded[0])


def _share_with_replicas(shard: Tensor, p: Tensor) -> None:
    """Give all replicas of this shard of p the bits of the first one."""
    if not hasattr(p, "device_mesh"):
        return
    for dim, placement in enumerate(p.placements):
        if placement.is_replicate():
            group = p.device_mesh.get_group(dim)
            torch.distributed.broadcast(shard, group=group, group_src=0)


def _full_matrix(shard: Tensor, p: Tensor) -> Tensor:
    """The matrix that is sharded as parameter p is, gathered from all ranks."""
    if not hasattr(p, "device_mesh"):
        return shard
    from torch.distributed.tensor import DTensor

    sharded = DTensor.from_local(
        shard, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )
    return sharded.full_tensor()


# ---- what --optimizer and --adam may name


@dataclass(frozen=True)
class Adam:
    """The numbers of AdamW: the decay rates of its two moments, and what is added to the root of
    the second one. ValueError if they are out of range.
    """

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8

    def __post_init__(self):
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(
                    f"--adam {name}={value} is out of range: give a number of at least 0 and below "
                    "1"
                )
        if not 0 < self.eps <= 1:
            raise ValueError(
                f"--adam eps={self.eps} is out of range: give a number above 0 and at most 1"
            )

    def changed_pairs(self) -> tuple[str, ...]:
        """The numbers that differ from their defaults, in the one spelling of --adam."""
        numbers = dataclasses.asdict(self).items()
        return tuple(f"{name}={value}" for name, value in numbers if value != getattr(Adam, name))


@dataclass(frozen=True)
class OptimizerKind:
    """A row of OPTIMIZERS."""

    optimizer: type[AdamW]
    moments: Plain | EightBit


OPTIMIZERS = {
    "adamw": OptimizerKind(AdamW, Plain(torch.float32)),
    "adamw_bf16": OptimizerKind(AdamW, Plain(torch.bfloat16)),
    "adamw_8bit": OptimizerKind(AdamW, EightBit()),
    "muon": OptimizerKind(Muon, Plain(torch.float32)),
}
