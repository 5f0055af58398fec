"""A shuffled order without an array: position -> row by a keyed bijection of [0, n).

Imports nothing of ours. A 6-round balanced Feistel network permutes the smallest power of four that
holds n; a value
that lands at n or above is permuted again until it is below (cycle walking, under 4 passes on
average), which keeps the
map one-to-one. State is three numbers, so any position of any epoch is computed directly. Ranges of
positions may be left
out: the positions that remain close up.
"""

import re
from collections.abc import Iterable, Sequence

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
        raise ValueError(
            f"positions are {positions.min()} to {positions.max()}: allowed are 0 to {n - 1} (n = {n})"
        )
    half, keys = _half_bits(n), _round_keys(seed, epoch)
    rows = _feistel(positions.astype(np.uint64), half, keys)
    while (outside := rows >= n).any():
        rows[outside] = _feistel(rows[outside], half, keys)
    return rows.astype(np.int64)


Ranges = Sequence[tuple[int, int]]  # rising and disjoint; each is [begin, end)


def parse_ranges(words: Iterable[str]) -> Ranges:
    """Ranges of "a:b" words. Raises ValueError for a word that is none."""
    for word in words:
        if not re.fullmatch(r"\d{1,18}:\d{1,18}", word) or int(word.split(":")[0]) >= int(
            word.split(":")[1]
        ):
            raise ValueError(
                f"the rows {word!r}: give ranges a:b with a < b, such as 4096:4160, which leaves out 4096 to 4159"
            )
    return merged([tuple(map(int, word.split(":"))) for word in words])


def merged(ranges: Iterable[Sequence[int]]) -> Ranges:
    """The same positions as rising, disjoint ranges."""
    rising: list[tuple[int, int]] = []
    for begin, end in sorted(map(tuple, ranges)):
        if rising and begin <= rising[-1][1]:
            rising[-1] = rising[-1][0], max(end, rising[-1][1])
        else:
            rising.append((begin, end))
    return tuple(rising)


def ranges_of(positions: Iterable[int]) -> Ranges:
    """The ranges of any positions."""
    return merged((position, position + 1) for position in positions)


def words_of(ranges: Ranges) -> tuple[str, ...]:
    """What `parse_ranges` reads."""
    return tuple(f"{begin}:{end}" for begin, end in ranges)


def before(ranges: Ranges, limit: int) -> Ranges:
    """The part of `ranges` below `limit`."""
    return tuple((begin, min(end, limit)) for begin, end in ranges if begin < limit)


def around(index: int, skipped: Ranges) -> int:
    """The position that comes after `index` others when `skipped` is left out."""
    for begin, end in skipped:
        if index < begin:
            break
        index += end - begin
    return index


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
