"""Scores by depth and length as a picture: an RGB array for TensorBoard, and PNG bytes for a file.

One panel for each table: a row for each part of the context, its beginning at the top, and a column
for each length. Every cell has its score in percent, so that no reader depends on the colours;
these are viridis, whose lightness rises with the score for colour-blind readers and in grey too.
Letters: H and W pixels, E parts of the row, L lengths.
"""

import math
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

VIRIDIS = [(68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37)]
BLACK = (0, 0, 0)
WHITE = (255, 255, 255)
NOTHING = (225, 225, 225)  # a cell in which nothing was asked

SCALE = 2  # pixels for each dot of a letter
LETTER = 6 * SCALE  # width with the space behind it
LETTER_HEIGHT = 7 * SCALE  # without what hangs below the line
LINE = 14 * SCALE
PANELS = 4  # in a row of the picture
LABEL = 6 * LETTER  # width of the labels of rows
LEGEND = 32  # width of the colour scale


# --------------------------------------------------------------------------- the picture


def picture(tables: Mapping[str, NDArray], lengths: Sequence[int]) -> NDArray[np.uint8]:
    """The tables [E, L] of scores 0..1 with their names, as RGB [H, W, 3]; NaN cells are grey.

    ValueError without a table, and for one that has not a column for each length.
    """
    if not tables:
        raise ValueError("there is no table to draw: pass at least one")
    for name, scores_EL in tables.items():
        if scores_EL.shape[1] != len(lengths):
            raise ValueError(
                f"{name} has {scores_EL.shape[1]} columns for {len(lengths)} lengths: pass one "
                "column for each length"
            )

    columns = [in_words(length) for length in lengths]
    width = cell_width(tables, columns)
    panels = [panel(name, scores_EL, columns, width) for name, scores_EL in tables.items()]
    lines = [panels[first : first + PANELS] for first in range(0, len(panels), PANELS)]
    body = np.concatenate([side_by_side(line, min(PANELS, len(panels))) for line in lines])
    legend = colour_scale(len(body), panels[0].shape[0])
    return np.concatenate([body, legend], axis=1)


def cell_width(names: Iterable[str], columns: Sequence[str]) -> int:
    """Pixels of a cell, in which "100" and the length find room, and all cells the name."""
    widest = max(len(words) for words in ["100", *columns])
    longest = max(len(name) for name in names)
    return LETTER * max(widest + 1, math.ceil(longest / len(columns)))


def panel(
    name: str,
    scores_EL: NDArray,
    columns: Sequence[str],
    width: int,
) -> NDArray:
    """One table with its name above, the lengths below, and the depths on the left."""
    depths, lengths = scores_EL.shape
    image = blank((depths + 3) * LINE, LABEL + lengths * width + LETTER)
    write(image, name, LINE // 2, LABEL + lengths * width // 2)

    for row, scores_L in enumerate(scores_EL):
        top = (row + 1) * LINE
        middle = top + LINE // 2
        write(image, f"{100 * (row + 0.5) / depths:.0f}%", middle, LABEL // 2)
        for column, score in enumerate(scores_L):
            left = LABEL + column * width
            cell = image[top : top + LINE - 1, left : left + width - 1]
            cell[:] = colour(score)
            write(image, percent(score), middle, left + width // 2, ink(score))

    below = (depths + 1) * LINE + LINE // 2
    for column, words in enumerate(columns):
        write(image, words, below, LABEL + column * width + width // 2)
    write(image, "depth", LINE // 2, LABEL // 2)
    return image


def side_by_side(panels: Sequence[NDArray], number: int) -> NDArray:
    """Panels next to each other; white where fewer than `number` are left."""
    height, width, _ = panels[0].shape
    missing = [blank(height, width)] * (number - len(panels))
    return np.concatenate([*panels, *missing], axis=1)


def colour_scale(height: int, panel_height: int) -> NDArray:
    """The colours from 100% at the top to 0% next to the first panel."""
    image = blank(height, LEGEND + LABEL + LETTER)
    bottom = panel_height - 2 * LINE
    for row in range(LINE, bottom):
        image[row, :LEGEND] = colour((bottom - 1 - row) / (bottom - 1 - LINE))
    for share in (1.0, 0.5, 0.0):
        row = round(LINE + (1 - share) * (bottom - LINE))
        write(image, percent(share) + "%", row, LEGEND + LABEL // 2)
    return image


# --------------------------------------------------------------------------- colours and words


def colour(score: float) -> tuple[int, int, int]:
    """The colour of a score 0..1, between the nearest anchors of viridis; grey for NaN."""
    if math.isnan(score):
        return NOTHING
    anchors = np.array(VIRIDIS)
    places = np.linspace(0, 1, len(anchors))
    return tuple(round(np.interp(score, places, channel)) for channel in anchors.T)


def ink(score: float) -> tuple[int, int, int]:
    """Black on a light colour, white on a dark one."""
    return BLACK if lightness(colour(score)) > 115 else WHITE


def lightness(rgb: Sequence[float]) -> float:
    """The luma of ITU-R BT.601, 0..255."""
    red, green, blue = rgb
    return 0.299 * red + 0.587 * green + 0.114 * blue


def percent(score: float) -> str:
    """A score as a whole number, "-" for NaN. 100 means that all are right, 0 that none is."""
    if math.isnan(score):
        return "-"
    if 0 < score < 1:
        return str(min(max(round(100 * score), 1), 99))
    return str(round(100 * score))


def in_words(length: int) -> str:
    """16384 as 16k."""
    return f"{length // 1024}k" if length % 1024 == 0 else f"{length:,}"


def blank(height: int, width: int) -> NDArray[np.uint8]:
    """A white image [H, W, 3]."""
    return np.full((height, width, 3), 255, dtype=np.uint8)


def write(
    image: NDArray,
    words: str,
    row: int,
    column: int,
    colour: tuple[int, int, int] = BLACK,
) -> None:
    """Write small letters and digits into the image, with their middle at row and column."""
    dots = np.concatenate([FONT[letter] for letter in words], axis=1)
    pixels = dots.repeat(SCALE, axis=0).repeat(SCALE, axis=1)
    height, width = pixels.shape
    top = row - LETTER_HEIGHT // 2
    left = column - (width - SCALE) // 2
    image[top : top + height, left : left + width][pixels] = colour


# --------------------------------------------------------------------------- PNG


def png(image: NDArray[np.uint8]) -> bytes:
    """The bytes of a PNG file of an RGB image [H, W, 3]."""
    height, width, _ = image.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, RGB
    lines = np.zeros((height, 1 + 3 * width), dtype=np.uint8)  # a line begins with its filter: none
    lines[:, 1:] = image.reshape(height, -1)

    body = zlib.compress(lines.tobytes(), level=9)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def chunk(kind: bytes, content: bytes) -> bytes:
    """A chunk of a PNG file: length, kind, content, checksum."""
    checksum = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)


# --------------------------------------------------------------------------- letters

# Five dots wide and nine high, of which two hang below the line.
GLYPHS = {
    "0123456789%.-,": """
.###.|..#..|.###.|.###.|...#.|#####|..##.|#####|.###.|.###.|##..#|.....|.....|.....
#...#|.##..|#...#|#...#|..##.|#....|.#...|....#|#...#|#...#|##.#.|.....|.....|.....
#...#|..#..|....#|....#|.#.#.|####.|#....|...#.|#...#|#...#|...#.|.....|.....|.....
#...#|..#..|..##.|..##.|#..#.|....#|####.|...#.|.###.|.####|..#..|.....|#####|.....
#...#|..#..|.#...|....#|#####|....#|#...#|..#..|#...#|....#|.#...|.....|.....|.....
#...#|..#..|#....|#...#|...#.|#...#|#...#|..#..|#...#|...#.|.#.##|..#..|.....|..#..
.###.|.###.|#####|.###.|...#.|.###.|.###.|..#..|.###.|.##..|#..##|..#..|.....|..#..
.....|.....|.....|.....|.....|.....|.....|.....|.....|.....|.....|.....|.....|.#...
.....|.....|.....|.....|.....|.....|.....|.....|.....|.....|.....|.....|.....|.....
""",
    "abcdefghijklm": """
.....|#....|.....|....#|.....|..##.|.....|#....|..#..|...#.|#....|.##..|.....
.....|#....|.....|....#|.....|.#...|.....|#....|.....|.....|#....|..#..|.....
.###.|####.|.###.|.####|.###.|####.|.####|#.##.|.##..|..##.|#..#.|..#..|##.#.
....#|#...#|#...#|#...#|#...#|.#...|#...#|##..#|..#..|...#.|#.#..|..#..|#.#.#
.####|#...#|#....|#...#|#####|.#...|#...#|#...#|..#..|...#.|##...|..#..|#.#.#
#...#|#...#|#...#|#...#|#....|.#...|#...#|#...#|..#..|...#.|#.#..|..#..|#.#.#
.####|####.|.###.|.####|.###.|.#...|.####|#...#|.###.|...#.|#..#.|.###.|#.#.#
.....|.....|.....|.....|.....|.....|....#|.....|.....|#..#.|.....|.....|.....
.....|.....|.....|.....|.....|.....|.###.|.....|.....|.##..|.....|.....|.....
""",
    "nopqrstuvwxyz": """
.....|.....|.....|.....|.....|.....|.#...|.....|.....|.....|.....|.....|.....
.....|.....|.....|.....|.....|.....|.#...|.....|.....|.....|.....|.....|.....
#.##.|.###.|####.|.####|#.##.|.####|####.|#...#|#...#|#...#|#...#|#...#|#####
##..#|#...#|#...#|#...#|##..#|#....|.#...|#...#|#...#|#.#.#|.#.#.|#...#|...#.
#...#|#...#|#...#|#...#|#....|.###.|.#...|#...#|#...#|#.#.#|..#..|#...#|..#..
#...#|#...#|#...#|#...#|#....|....#|.#..#|#..##|.#.#.|#.#.#|.#.#.|#...#|.#...
#...#|.###.|####.|.####|#....|####.|..##.|.##.#|..#..|.#.#.|#...#|.####|#####
.....|.....|#....|....#|.....|.....|.....|.....|.....|.....|.....|....#|.....
.....|.....|#....|....#|.....|.....|.....|.....|.....|.....|.....|.###.|.....
""",
}


def read_glyphs(glyphs: Mapping[str, str]) -> dict[str, NDArray[np.bool_]]:
    """The dots of each letter [9, 6], with an empty column behind it."""
    found = {" ": np.zeros((9, 6), dtype=bool)}
    for letters, art in glyphs.items():
        lines = [line.split("|") for line in art.split()]
        for place, letter in enumerate(letters):
            rows = [[dot == "#" for dot in line[place] + "."] for line in lines]
            found[letter] = np.array(rows)
    return found


FONT = read_glyphs(GLYPHS)
