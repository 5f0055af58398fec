"""The order of rows: position -> row by a keyed permutation of [0, n), computed without an array.

A Feistel network of six rounds permutes the smallest power of four that holds n. A value that lands
at n or above is permuted again until it is below n (cycle walking, fewer than four passes on
average), which keeps the map one-to-one. The state is three numbers, {seed, epoch, position}, so
the row at any position of any epoch is computed directly.

Ranges of positions may be skipped; the positions that remain move up.
"""

import re
from collections.abc import Iterable, Sequence

import numpy as np

ROUNDS = 6
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, the step of splitmix64

LARGEST_POSITION = 2**53  # as in a checkpoint: larger numbers are not exact in every reader of JSON

Ranges = Sequence[tuple[int, int]]  # each is [begin, end); ascending and disjoint


# ---- the permutation


def permute(
    seed: int,
    epoch: int,
    n: int,
    position: int,
) -> int:
    """The row at `position` of an epoch of n rows. Raises ValueError unless 0 <= position < n."""
    if not 0 <= position < n:
        raise ValueError(f"position is {position}: allowed are 0 to {n - 1} (n = {n})")

    half_bits = _half_bits(n)
    keys = _round_keys(seed, epoch)
    row = _feistel(position, half_bits, keys)
    while row >= n:
        row = _feistel(row, half_bits, keys)
    return row


def mix(x: int | np.ndarray) -> int | np.ndarray:
    """splitmix64's finalizer, a one-to-one map of 64 bits; x is an int or a uint64 array."""
    x = x ^ (x >> 30)
    x = (x * 0xBF58476D1CE4E5B9) & MASK
    x = x ^ (x >> 27)
    x = (x * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def _half_bits(n: int) -> int:
    """Half the bits of the smallest power of four that is at least n."""
    bits = (n - 1).bit_length()
    return max(1, (bits + 1) // 2)


def _round_keys(seed: int, epoch: int) -> list[int]:
    key = mix((mix(seed & MASK) + GOLDEN + epoch) & MASK)
    return [mix((key + number * GOLDEN) & MASK) for number in range(1, ROUNDS + 1)]


def _feistel(
    x: int,
    half_bits: int,
    keys: list[int],
) -> int:
    mask = (1 << half_bits) - 1
    left = x >> half_bits
    right = x & mask
    for key in keys:
        mixed = mix(right ^ key) & mask
        left, right = right, left ^ mixed
    return (left << half_bits) | right


# ---- ranges of positions that are skipped


def parse_ranges(words: Iterable[str]) -> Ranges:
    """The ranges that "a:b" words name. Raises ValueError for any other word."""
    return merged([_parse_range(word) for word in words])


def _parse_range(word: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,18}):(\d{1,18})", word)
    if found is None or not int(found[1]) < int(found[2]) < LARGEST_POSITION:
        raise ValueError(
            f"the rows {word!r}: give ranges a:b with a < b, such as 4096:4160, "
            "which skips 4096 to 4159 (b below 2^53)"
        )
    return int(found[1]), int(found[2])


def format_ranges(ranges: Ranges) -> tuple[str, ...]:
    """The words from which `parse_ranges` makes these ranges."""
    return tuple(f"{begin}:{end}" for begin, end in ranges)


def merged(ranges: Iterable[Sequence[int]]) -> Ranges:
    """The same positions as ascending, disjoint ranges."""
    ascending: list[tuple[int, int]] = []
    for begin, end in sorted(tuple(span) for span in ranges):
        if ascending and begin <= ascending[-1][1]:
            last_begin, last_end = ascending.pop()
            ascending.append((last_begin, max(end, last_end)))
        else:
            ascending.append((begin, end))
    return tuple(ascending)


def ranges_of(positions: Iterable[int]) -> Ranges:
    """The ranges that hold exactly these positions."""
    return merged((position, position + 1) for position in positions)


def ranges_below(ranges: Ranges, limit: int) -> Ranges:
    """The part of `ranges` below `limit`."""
    return tuple((begin, min(end, limit)) for begin, end in ranges if begin < limit)


def ranges_within(
    ranges: Ranges,
    begin: int,
    end: int,
) -> Ranges:
    """The part of `ranges` between two positions, counted from the first of them."""
    found = []
    for first, last in ranges:
        first = max(first, begin)
        last = min(last, end)
        if first < last:
            found.append((first - begin, last - begin))
    return tuple(found)


def remaining_position(index: int, skipped: Ranges) -> int:
    """The position with number `index` among the positions that are not skipped."""
    position = index
    for begin, end in skipped:
        if position < begin:
            break
        position += end - begin
    return position
