"""A sparse autoencoder: activations as sums of few directions of a dictionary (Gao et al. 2024,
arXiv 2406.04093).

    y = x / rms(x)                      what the model's next RMSNorm makes of x, but for its weight
    z = ReLU(TopK((y - b) E^T + c))     k latents of M are active at most
    y' = z W + b                        W has unit rows, the dictionary's directions
    loss = sum (y' - y)^2 / sum (y - mean y)^2 + AUXILIARY * sum (y' + z' W - y)^2 / sum (y' - y)^2

The loss without its second term is the share of the variance that is left unexplained. A latent
that was not active for long is dead. z' are the largest latents among the dead: they learn what the
others leave, and so come to life. The gradient of W is projected orthogonal to its rows, because a
step along a row is undone when the row gets its length back.

Departures from the paper: y is not centred, because RMSNorm does not centre it either; b begins as
the mean and not the geometric median; the learning rate is that of far fewer tokens.

Letters: N tokens of a step, D model width, M latents, k active latents.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from model import Device

AUXILIARY = 1 / 32  # weight of the loss of the dead latents
MOST_UNTIL_DEAD = 10_000_000  # tokens
UNTIL_DEAD = 1 / 20  # of the training, where that is less
WARM_UP = 1 / 50  # of the training
DECAY = 1 / 5  # of the training, at its end
ADAM = {"betas": (0.9, 0.999), "eps": 6.25e-10}
EPS = 1e-12  # added to the mean square of an activation, which may be all zero
RUN = 8  # steps after which it is seen whether latents are dead
FOUND = 0.95  # cosine from which two directions count as the same


@dataclass(frozen=True)
class Settings:
    """Of an autoencoder and its training."""

    width: int = 2  # latents per model width
    k: int = 8  # active latents of a token, at most
    tokens: int = 2_000_000  # of the whole training; activations may be repeated
    step_tokens: int = 2048
    lr: float = 0.0  # 0: by the number of latents
    seed: int = 0

    def latents(self, D: int) -> int:
        """M for a model of width D."""
        return self.width * D

    def learning_rate(self, D: int) -> float:
        """The highest of the training: the paper's falls with the root of the number of latents."""
        return self.lr or 1e-3 * math.sqrt(2**12 / self.latents(D))

    @property
    def until_dead(self) -> int:
        """Tokens without activity after which a latent is dead."""
        return min(MOST_UNTIL_DEAD, math.ceil(UNTIL_DEAD * self.tokens))


class Code(NamedTuple):
    """The latents of N tokens: the k largest, 0 where fewer are active, and their indices."""

    value_Nk: Tensor
    index_Nk: Tensor


class Autoencoder(nn.Module):
    """Encoder and dictionary in fp32. Both begin with the same random directions.

    alive  [M] whether each latent was active lately, as its training has left it: the direction of
           a dead one says nothing, and is mostly what it was at the beginning
    """

    def __init__(
        self,
        D: int,
        settings: Settings,
        device: Device = "cpu",
    ):
        super().__init__()
        M = settings.latents(D)
        self.k = settings.k
        draw = torch.Generator().manual_seed(settings.seed)
        rows_MD = torch.randn(M, D, generator=draw).to(device)
        rows_MD /= rows_MD.norm(dim=1, keepdim=True)

        self.encoder = nn.Parameter(rows_MD.clone())
        self.encoder_bias = nn.Parameter(torch.zeros(M, device=device))
        self.decoder = nn.Parameter(rows_MD)
        self.bias = nn.Parameter(torch.zeros(D, device=device))
        self.register_buffer("alive", torch.ones(M, dtype=torch.bool, device=device))

    @property
    def directions(self) -> Tensor:
        """The dictionary's rows of live latents."""
        return self.decoder[self.alive]

    def latents(self, y_ND: Tensor) -> Tensor:
        """All latents [N, M] of scaled activations, before the k largest are chosen."""
        return torch.addmm(self.encoder_bias, y_ND - self.bias, self.encoder.t())

    def forward(self, y_ND: Tensor) -> Tensor:
        """y', the reconstruction of scaled activations."""
        return self.decoded(largest(self.latents(y_ND), self.k))

    def decoded(self, z_NM: Tensor) -> Tensor:
        """y' of latents."""
        return torch.addmm(self.bias, z_NM, self.decoder)

    @torch.no_grad()
    def encode(self, x_ND: Tensor) -> Code:
        """The active latents of activations."""
        value_Nk, index_Nk = self.latents(scaled(x_ND)).topk(self.k)
        return Code(value_Nk.relu(), index_Nk)

    @torch.no_grad()
    def unexplained(self, x_ND: Tensor) -> Tensor:
        """The share of the variance of activations that the reconstruction leaves, 0-d."""
        y_ND = scaled(x_ND)
        return (self(y_ND) - y_ND).square().sum() / variation(y_ND)


def scaled(x_ND: Tensor) -> Tensor:
    """x / rms(x) in fp32."""
    x_ND = x_ND.float()
    return x_ND * (x_ND.square().mean(1, keepdim=True) + EPS).rsqrt()


def variation(y_ND: Tensor) -> Tensor:
    """sum (y - mean y)^2, at least a rounding error of it."""
    centred_ND = y_ND - y_ND.mean(0)
    return centred_ND.square().sum().clamp(min=EPS * y_ND.numel())


def largest(latents_NM: Tensor, k: int) -> Tensor:
    """ReLU of the k largest latents of each token, 0 elsewhere: [N, M]."""
    value_Nk, index_Nk = latents_NM.topk(k)
    return torch.zeros_like(latents_NM).scatter(1, index_Nk, value_Nk.relu())


# ---- training


class Trainer:
    """Trains an autoencoder on activations that it is given part by part."""

    def __init__(
        self,
        D: int,
        settings: Settings,
        device: Device = "cpu",
    ):
        self.settings = settings
        self.autoencoder = Autoencoder(D, settings, device)
        self.highest_lr = settings.learning_rate(D)
        self.optimizer = torch.optim.Adam(self.autoencoder.parameters(), fused=True, **ADAM)

        M = settings.latents(D)
        self.idle_M = torch.zeros(M, dtype=torch.int64, device=device)  # tokens since last active
        self.tokens = 0
        self.parts = 0
        self.losses: list[float] = []  # mean unexplained share of each run of steps

    @property
    def done(self) -> bool:
        """Whether all tokens of the training were seen."""
        return self.tokens >= self.settings.tokens

    def dead(self) -> Tensor:
        """Whether each latent is dead, [M]."""
        return self.idle_M > self.settings.until_dead

    def add(self, x: Tensor) -> float:
        """Train on a part of the activations, [..., D], in a random order and in steps of equal
        size, until the training is done; returns the mean unexplained share of its last steps.
        ValueError if that is not finite.
        """
        settings = self.settings
        x_ND = x.flatten(0, -2)
        draw = torch.Generator().manual_seed(settings.seed * 2**32 + self.parts)
        order_N = torch.randperm(len(x_ND), generator=draw).to(x.device)
        steps_left = math.ceil((settings.tokens - self.tokens) / settings.step_tokens)
        order_N = order_N[: max(1, steps_left) * settings.step_tokens]
        # in runs of a few steps, so that a part of any size trains as small ones do
        runs = max(1, round(len(order_N) / (settings.step_tokens * RUN)))
        for order_n in order_N.tensor_split(runs):
            loss = self._run(x_ND, order_n)
        self.parts += 1
        self._mark_alive()
        return loss

    def _run(self, x_ND: Tensor, order_n: Tensor) -> float:
        """A few steps on these activations; returns the mean of their losses, and keeps it."""
        revive = bool(self.dead().any())
        steps = max(1, round(len(order_n) / self.settings.step_tokens))
        losses = [self.step(x_ND[order], revive) for order in order_n.tensor_split(steps)]
        loss = torch.stack(losses).mean().item()
        if not math.isfinite(loss):
            raise ValueError(
                f"the autoencoder's loss is {loss} in part {self.parts} of its activations, which "
                "are not finite, or its learning rate is too high: check the activations, or give "
                "a lower rate"
            )
        self.losses.append(loss)
        return loss

    def _mark_alive(self) -> None:
        self.autoencoder.alive.copy_(~self.dead())

    def step(self, x_ND: Tensor, revive: bool = True) -> Tensor:
        """One step of Adam; returns the unexplained share before it, 0-d on the device.

        revive: compute the loss of the dead latents, which is 0 if there are none.
        """
        y_ND = scaled(x_ND)
        if not self.tokens:
            self._start_at(y_ND)
        unexplained, loss = self._loss(y_ND, revive)
        loss.backward()
        self._update()
        self.tokens += len(y_ND)
        return unexplained.detach()

    @torch.no_grad()
    def _start_at(self, y_ND: Tensor) -> None:
        self.autoencoder.bias.copy_(y_ND.mean(0))

    def _loss(self, y_ND: Tensor, revive: bool) -> tuple[Tensor, Tensor]:
        """The unexplained share, and what is minimised."""
        latents_NM = self.autoencoder.latents(y_ND)
        z_NM = largest(latents_NM, self.autoencoder.k)
        error_ND = self.autoencoder.decoded(z_NM) - y_ND
        left = error_ND.square().sum()
        unexplained = left / variation(y_ND)

        active_M = (z_NM > 0).any(0)
        self.idle_M = torch.where(active_M, 0, self.idle_M + len(y_ND))
        if not revive:
            return unexplained, unexplained

        among_dead_NM = latents_NM.masked_fill(~self.dead(), -torch.inf)
        by_dead_NM = largest(among_dead_NM, max(1, y_ND.shape[1] // 2))
        rest_ND = error_ND.detach() + by_dead_NM @ self.autoencoder.decoder
        auxiliary = rest_ND.square().sum() / left.detach().clamp(min=EPS)
        return unexplained, unexplained + AUXILIARY * auxiliary

    @torch.no_grad()
    def _update(self) -> None:
        """Project the dictionary's gradient, step, and give its rows their length back."""
        rows_MD = self.autoencoder.decoder
        along_M = torch.einsum("md,md->m", rows_MD.grad, rows_MD)
        rows_MD.grad.addcmul_(rows_MD, along_M[:, None], value=-1)

        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        rows_MD /= rows_MD.norm(dim=1, keepdim=True)

    def _learning_rate(self) -> float:
        """Linear at both ends of the training, constant between them."""
        done = self.tokens / self.settings.tokens
        step = self.settings.step_tokens / self.settings.tokens
        rising = (done + step) / (WARM_UP + step)
        falling = (1 - done) / DECAY
        return self.highest_lr * max(0.0, min(1.0, rising, falling))


def fit(
    trainer: Trainer,
    part: Callable[[int], Tensor],
    tell: Callable[[Trainer], None] = lambda trainer: None,
) -> Autoencoder:
    """Train to the end on part(0), part(1), ...: activations [..., D] that the number decides.
    `tell` is called after each part.
    """
    while not trainer.done:
        trainer.add(part(trainer.parts))
        tell(trainer)
    return trainer.autoencoder


# ---- comparing


class Match(NamedTuple):
    """How well the directions of a dictionary are found in another: the mean of their largest
    cosines, and the share of them that is at least FOUND.
    """

    mean: float
    share: float


@torch.no_grad()
def dictionary_match(directions_AD: Tensor, others_MD: Tensor) -> Match:
    """Match of unit directions, each with the nearest of the others; 0 if there are none."""
    if not len(directions_AD) or not len(others_MD):
        return Match(0.0, 0.0)
    cosine_A = (directions_AD @ others_MD.t()).amax(1)
    found_A = cosine_A >= FOUND
    return Match(cosine_A.mean().item(), found_A.double().mean().item())


def jaccard(
    a: Code,
    b: Code,
    latents: int,
) -> Tensor:
    """Latents active in both over latents active in either, the mean over tokens, 0-d; a token
    without any active latent counts as 1.
    """
    in_a_NM = _active(a, latents)
    in_b_NM = _active(b, latents)
    both_N = (in_a_NM & in_b_NM).sum(1)
    either_N = (in_a_NM | in_b_NM).sum(1)
    return torch.where(either_N > 0, both_N / either_N.clamp(min=1), 1.0).mean()


def _active(code: Code, latents: int) -> Tensor:
    """Whether each latent is active, [N, M]."""
    active_Nk = code.value_Nk > 0
    none_NM = active_Nk.new_zeros(len(active_Nk), latents)
    return none_NM.scatter(1, code.index_Nk, active_Nk)
