"""A shuffled order without an array: position -> row by a keyed bijection of [0, n).

Imports nothing of ours. A 6-round balanced Feistel network permutes the smallest power of four that holds n; a value
that lands at n or above is permuted again until it is below (cycle walking, under 4 passes on average), which keeps the
map one-to-one. State is three numbers, so any position of any epoch is computed directly.
"""

import numpy as np

ROUNDS = 6
MASK = (1 << 64) - 1


def permute(seed: int, epoch: int, n: int, position: int) -> int:
    """The row at `position` of an epoch of n rows. Raises ValueError unless 0 <= position < n."""
    if not 0 <= position < n:
        raise ValueError(f"position is {position}: allowed are 0 to {n - 1} (n = {n})")
    half, keys = _half_bits(n), _round_keys(seed, epoch)
    row = _feistel(position, half, keys)
    while row >= n:
        row = _feistel(row, half, keys)
    return row


def permute_array(seed: int, epoch: int, n: int, positions: np.ndarray) -> np.ndarray:
    """`permute` of many positions at once, int64 [any shape] -> int64 of that shape."""
    positions = np.asarray(positions)
    if positions.size and not (0 <= positions.min() and positions.max() < n):
        raise ValueError(f"positions are {positions.min()} to {positions.max()}: allowed are 0 to {n - 1} (n = {n})")
    half, keys = _half_bits(n), _round_keys(seed, epoch)
    rows = _feistel(positions.astype(np.uint64), half, keys)
    while (outside := rows >= n).any():
        rows[outside] = _feistel(rows[outside], half, keys)
    return rows.astype(np.int64)


def mix(x):
    """splitmix64's finalizer, 64 bits -> 64 bits, one-to-one; x an int or a uint64 array."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def _half_bits(n: int) -> int:
    return max(1, ((n - 1).bit_length() + 1) // 2)


def _round_keys(seed: int, epoch: int) -> list[int]:
    key = mix(mix(seed & MASK) + 0x9E3779B97F4A7C15 + epoch & MASK)
    return [mix(key + round * 0x9E3779B97F4A7C15 & MASK) for round in range(1, ROUNDS + 1)]


def _feistel(x, half: int, keys: list[int]):
    mask = (1 << half) - 1
    left, right = x >> half, x & mask
    for key in keys:
        left, right = right, left ^ (mix(right ^ key) & mask)
    return left << half | right
