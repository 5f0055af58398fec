"""One sampler: the loop that decodes, the random numbers, and how logits become a token.

Every random number is a hash of its seed and of where it is used: the step, the prompt, the
response to it and the position in that. Neither what else is sampled at the same time, nor the
number of ranks, nor a resume changes a draw, and all devices draw alike. `generate` draws as a
rollout does the one response to one prompt.

Letters: B prompts, R rows, V vocabulary, K ids of a row.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from data.order import GOLDEN, MASK, mix

Read = TypeVar("Read")  # what a forward takes
Token = TypeVar("Token")  # what is made of it for all rows, with what the caller keeps of it

# Temperatures that can be sampled with. Below, logits overflow; above, all tokens are alike.
COLDEST = 1e-6
HOTTEST = 1e3


def decode(
    make: Callable[[int, Read], Token],
    first: Read,
    following: Callable[[Token], Read],
    most: int,
) -> Iterator[Token]:
    """Up to `most` tokens, each made of what follows the one before: `make(position, read)` runs
    the model and chooses, `following(token)` is what the next forward reads.

    A forward runs when its token is asked for, so whoever stops asking has paid for no other.
    """
    token = make(0, first)
    yield token
    for position in range(1, most):
        token = make(position, following(token))
        yield token


# ---- random numbers


def hashed(seed: int, *coordinates: Sequence[int]) -> np.ndarray:
    """A number for each place of a grid, uint64 [of the length of each of the coordinates]."""
    key = np.array(mix(seed & MASK), dtype=np.uint64)
    for coordinate in np.ix_(*coordinates):
        key = mix(key + (coordinate.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN))
    return key


def uniforms(
    seed: int,
    step: int,
    prompts: Sequence[int],
    responses: int,
    positions: int,
) -> np.ndarray:
    """Numbers in [0, 1), float64 [prompts, responses, positions]."""
    key = hashed(seed, [step], prompts, range(responses), range(positions))
    return (key[0] >> np.uint64(11)) * 2.0**-53


def row_seeds(seed: int, step: int, prompts: Sequence[int]) -> Tensor:
    """The seed [B] of each prompt's noise, int64 on the host."""
    return torch.from_numpy(hashed(seed, [step], prompts)[0].view(np.int64))


def hashed_noise(seed_B: Tensor, position: int, ids_BK: Tensor) -> Tensor:
    """Gumbel noise [B, K] in fp32, -log(-log u), where u is a hash of (seed, position, token).

    The K likeliest tokens so get the noise that they have among all tokens, on every device, and a
    checkpoint gets it again. u has 52 bits and lies inside (0, 1): no noise is infinite.
    """
    key_B = mix_bits(seed_B + _signed((position + 1) * GOLDEN))
    bits_BK = mix_bits(key_B[:, None] + (ids_BK + 1) * _signed(GOLDEN))
    u_BK = (_shift(bits_BK, 12).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(u_BK)).float()


def mix_bits(x: Tensor) -> Tensor:
    """`data.order.mix` of int64 tensors, whose products wrap around."""
    x = x ^ _shift(x, 30)
    x = x * _signed(0xBF58476D1CE4E5B9)
    x = x ^ _shift(x, 27)
    x = x * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """x >> bits of a number without sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    """The int64 with the 64 low bits of a number."""
    number &= MASK
    return number - (1 << 64) if number >> 63 else number


# ---- a token


def check_sampling(temperature: float, top_k: int, top_p: float):
    """ValueError for settings that cannot be sampled with; temperature 0 is greedy."""
    if temperature != 0 and not COLDEST <= temperature <= HOTTEST:
        raise ValueError(
            f"temperature {temperature:g} is out of range: give 0 for the most probable token, or "
            f"{COLDEST:g} to {HOTTEST:g}"
        )
    if top_k < 0:
        raise ValueError(f"top_k {top_k} is out of range: give at least 1, or 0 for all tokens")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p {top_p} is out of range: give a number above 0 and at most 1")


def filtered(
    logits_RV: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
) -> Tensor:
    """Probabilities [R, V], in fp32 or better, after temperature, top-k and nucleus filtering
    (Holtzman et al. 2020), in this order. Those of a nucleus are left as they are, so they add up
    to less than 1.

    top_k 0 and top_p 1 filter nothing. The nucleus is the smallest set of the most probable tokens
    whose probabilities add up to top_p or more.
    """
    logits_RV = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32)) / temperature
    if top_k:
        largest_RK = logits_RV.topk(min(top_k, logits_RV.shape[-1])).values
        logits_RV = logits_RV.masked_fill(logits_RV < largest_RK[..., -1:], -torch.inf)

    p_RV = logits_RV.softmax(-1)
    if top_p < 1:
        sorted_p_RV, order_RV = p_RV.sort(descending=True)
        mass_before_RV = sorted_p_RV.cumsum(-1) - sorted_p_RV
        sorted_p_RV = sorted_p_RV.masked_fill(mass_before_RV >= top_p, 0.0)
        p_RV = p_RV.scatter(
            -1, order_RV, sorted_p_RV
        )  # an index by a mask would wait for the device
    return p_RV


def draw(
    logits_RV: Tensor,
    uniform_R: Tensor,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Tensor:
    """A token of each row by the inverse of the distribution function: the first one at which the
    sum of probabilities, which is taken in float64, exceeds the random number.
    """
    if temperature == 0:
        return logits_RV.argmax(-1)
    sum_RV = filtered(logits_RV, temperature, top_k, top_p).cumsum(-1, dtype=torch.float64)
    wanted_R1 = uniform_R[:, None] * sum_RV[:, -1:]
    token_R1 = torch.searchsorted(sum_RV, wanted_R1, right=True)
    return token_R1.squeeze(1).clamp(max=logits_RV.shape[1] - 1)
