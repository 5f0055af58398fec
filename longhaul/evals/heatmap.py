"""Scores by depth and length as a picture (SVG), and as colours alone for TensorBoard.

One panel for each table: a row for each part of the context, its beginning at the top, and a column
for each length. Every cell has its score in percent, so that no reader depends on the colours.
Letters: H and W pixels, E parts of the row, L lengths.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from footprint.answers import svg

LABEL = 48  # width of the depths, and of the numbers of the legend
CELL = 52
LINE = 22
LETTER = 8  # width, at most
PANELS = 4  # next to each other
SHADES = 20  # of the legend
PIXELS = 16  # of a cell in TensorBoard
NOTHING = 225  # grey: a cell in which nothing was asked


def picture(tables: Mapping[str, NDArray], lengths: Sequence[int]) -> str:
    """The tables [E, L] of scores 0..1 with their names; NaN cells are grey."""
    depths = max(len(scores_EL) for scores_EL in tables.values())
    longest = max(len(name) for name in tables)
    width = LABEL + max(CELL * len(lengths), LETTER * longest) + LINE
    height = LINE * (depths + 3)

    parts = []
    for place, (name, scores_EL) in enumerate(tables.items()):
        left = LABEL + width * (place % PANELS)
        top = LINE + height * (place // PANELS)
        parts.append(panel(name, scores_EL, lengths, left, top))
    right = width * min(PANELS, len(tables))
    parts.append(legend(right, LINE, LINE * depths))

    below = height * math.ceil(len(tables) / PANELS)
    label = "Share of the values found, by length and depth"
    return svg.picture(right + 2 * LABEL, below, label, parts)


def panel(
    name: str,
    scores_EL: NDArray,
    lengths: Sequence[int],
    left: float,
    top: float,
) -> str:
    """One table with its name above, the lengths below, and the depths on the left."""
    parts = [svg.text(name, left, top - 7, "")]
    parts.append(svg.text("depth", left - 8, top - 7, "faint end"))
    columns = [in_words(length) for length in lengths]
    for row, scores_L in enumerate(scores_EL):
        y = top + LINE * row
        depth = f"{100 * (row + 0.5) / len(scores_EL):.0f}%"
        parts.append(svg.text(depth, left - 8, y + 16, "faint end"))
        for place, score in enumerate(scores_L):
            frame = (left + CELL * place, y, CELL - 1, LINE - 1)
            where = f"{name}, {columns[place]} tokens, depth {depth}"
            parts.append(svg.cell(score, frame, percent(score), where))

    below = top + LINE * len(scores_EL) + 16
    for place, words in enumerate(columns):
        parts.append(svg.text(words, left + CELL * (place + 0.5), below, "faint middle"))
    return "".join(parts)


def legend(left: float, top: float, height: float) -> str:
    """The colours from 100% at the top to 0%."""
    parts = []
    shade = height / SHADES
    for step in range(SHADES):
        fill = f"rgb{svg.colour(1 - (step + 0.5) / SHADES)}"
        parts.append(svg.box(left, top + shade * step, LINE, shade + 0.5, fill=fill))
    for share in (0, 0.5, 1):
        y = top + height * (1 - share) + 4
        parts.append(svg.text(f"{share:.0%}", left + LINE + 6, y))
    return "".join(parts)


def pixels(scores_EL: NDArray) -> NDArray[np.uint8]:
    """A table as RGB [H, W, 3]: its colours without words."""
    image_EL3 = np.full((*scores_EL.shape, 3), NOTHING, dtype=np.uint8)
    for place in np.argwhere(~np.isnan(scores_EL)):
        image_EL3[tuple(place)] = svg.colour(scores_EL[tuple(place)])
    return image_EL3.repeat(PIXELS, axis=0).repeat(PIXELS, axis=1)


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
