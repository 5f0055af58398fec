"""Pictures of a report as inline SVG: lines over a number, and cells by row and column.

Every point and cell has its text as a title, so that no reader depends on the colours, which are
those of Okabe and Ito for lines, and viridis for cells.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape

from footprint.html import element, title

Number = float | None  # None: there is no number
Points = Sequence[tuple[float, Number]]

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c8c8c")
VIRIDIS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
EMPTY = "var(--band)"  # of a cell without a number

WIDTH = 620
HEIGHT = 220  # of the area of lines
LEFT = 70
TOP = 12
RIGHT = 12
BELOW = 42
LABELS = 5  # at an axis, at most
CELL = 26  # height of a cell
ROW_LABEL = 84


def short(value: Number) -> str:
    """A number with three digits; a dash if there is none."""
    if value is None or math.isnan(value):
        return "-"
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.2e}"
    return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"


# ---- lines


def lines(
    series: Mapping[str, Points],
    x_name: str,
    y_name: str,
    log: bool = False,
) -> str:
    """A line for each name. log: the vertical axis is logarithmic, and takes numbers above 0."""
    known = {name: _numbers(points, log) for name, points in series.items()}
    xs = [x for points in known.values() for x, _ in points]
    ys = [y for points in known.values() for _, y in points]
    if not xs:
        return "<p>No number to draw.</p>"
    scale = _Scale((min(xs), max(xs)), _range(ys, log), log)

    parts = [_axes(scale, x_name, y_name)]
    for index, (name, points) in enumerate(known.items()):
        parts.append(_line(name, points, COLOURS[index % len(COLOURS)], scale))
    return _svg(parts, TOP + HEIGHT + BELOW, f"{y_name} by {x_name}") + _key(list(known))


def _numbers(points: Points, log: bool) -> list[tuple[float, float]]:
    """The points that can be drawn."""
    return [(x, y) for x, y in points if y is not None and (y > 0 or not log)]


def _range(ys: list[float], log: bool) -> tuple[float, float]:
    """What the vertical axis spans: from 0 unless it is logarithmic or a number is below."""
    low = min(ys)
    high = max(ys)
    if log:
        return low / 1.2, high * 1.2
    low = min(0.0, low)
    room = high - low if high > low else 1.0
    return low, high + 0.05 * room


class _Scale:
    """Maps numbers to the coordinates of the picture."""

    def __init__(
        self,
        x: tuple[float, float],
        y: tuple[float, float],
        log: bool,
    ):
        self.x_range = x
        self.y_range = y
        self.log = log

    def x(self, value: float) -> float:
        low, high = self.x_range
        part = (value - low) / (high - low) if high > low else 0.5
        return round(LEFT + part * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        low, high = self.y_range
        part = (value - low) / (high - low)
        if self.log:
            part = math.log(value / low) / math.log(high / low)
        return round(TOP + HEIGHT * (1 - part), 1)

    def y_labels(self) -> list[float]:
        """Numbers at the vertical axis."""
        low, high = self.y_range
        steps = range(LABELS)
        if self.log:
            return [low * (high / low) ** (step / (LABELS - 1)) for step in steps]
        return [low + (high - low) * step / (LABELS - 1) for step in steps]

    def x_labels(self) -> list[float]:
        """Numbers at the horizontal axis: whole ones."""
        low, high = self.x_range
        found = {round(low + (high - low) * step / (LABELS - 1)) for step in range(LABELS)}
        return sorted(found)


def _axes(
    scale: _Scale,
    x_name: str,
    y_name: str,
) -> str:
    rows = []
    for value in scale.y_labels():
        y = scale.y(value)
        rows.append(element("path", d=f"M{LEFT},{y:g}H{WIDTH - RIGHT}", stroke="var(--line)"))
        rows.append(_text(short(value), LEFT - 6, y + 4, "end"))
    for value in scale.x_labels():
        rows.append(_text(f"{value:,}", scale.x(value), TOP + HEIGHT + 18, "middle"))
    rows.append(_text(escape(x_name), (LEFT + WIDTH) / 2, TOP + HEIGHT + 36, "middle"))
    rows.append(_text(escape(y_name), LEFT + 6, TOP + 12, "start"))
    return "".join(rows)


def _line(
    name: str,
    points: list[tuple[float, float]],
    colour: str,
    scale: _Scale,
) -> str:
    corners = [f"{scale.x(x):g},{scale.y(y):g}" for x, y in points]
    path = ""
    if len(corners) > 1:
        outline = "M" + "L".join(corners)
        path = element("path", d=outline, fill="none", stroke=colour, stroke_width=2)
    if len(corners) > 80:  # the points of a curve would hide it
        return element("g", title(name) + path)

    dots = []
    for x, y in points:
        words = title(f"{name}, {short(x)}: {short(y)}")
        dots.append(element("circle", words, cx=scale.x(x), cy=scale.y(y), r=3.5, fill=colour))
    return path + "".join(dots)


def _key(names: list[str]) -> str:
    """The colour of each line; nothing for a single one."""
    if len(names) < 2:
        return ""
    found = []
    for index, name in enumerate(names):
        colour = COLOURS[index % len(COLOURS)]
        dot = f'<span class="dot" style="background:{colour}"></span>'
        found.append(f"<li>{dot}{escape(name)}</li>")
    return f'<ul class="key">{"".join(found)}</ul>'


# ---- cells


def cells(
    values: Sequence[Sequence[Number]],
    rows: Sequence[str],
    columns: Sequence[str],
    what: str,
    x_name: str,
) -> str:
    """A cell for each number, the lighter the larger; what: of the numbers, for readers."""
    known = [value for row in values for value in row if value is not None]
    if not known:
        return "<p>No number to draw.</p>"
    low = min(known)
    high = max(known)
    width = (WIDTH - ROW_LABEL - RIGHT) / len(columns)

    parts = []
    for index, row in enumerate(values):
        y = TOP + index * CELL
        parts.append(_text(escape(rows[index]), ROW_LABEL - 6, y + 17, "end"))
        for place, value in enumerate(row):
            words = f"{rows[index]}, {columns[place]}: {short(value)}"
            left = ROW_LABEL + place * width
            parts.append(_cell(value, (low, high), (left, y, width), words))

    floor = TOP + len(values) * CELL
    every = math.ceil(46 / width)  # labels need so much room
    for place in range(0, len(columns), every):
        middle = ROW_LABEL + (place + 0.5) * width
        parts.append(_text(escape(columns[place]), middle, floor + 16, "middle"))
    parts.append(_text(escape(x_name), (ROW_LABEL + WIDTH) / 2, floor + 34, "middle"))
    note = f"<p class=faint>{escape(what)}: {short(low)} (dark) to {short(high)} (light)</p>"
    return _svg(parts, floor + BELOW, what) + note


def _cell(
    value: Number,
    span: tuple[float, float],
    box: tuple[float, float, float],
    words: str,
) -> str:
    """box: left, top, width."""
    left, top, width = box
    fill = EMPTY if value is None else _viridis(value, *span)
    shape = element(
        "rect", title(words), x=round(left, 1), y=top, width=round(width, 1), height=CELL, fill=fill
    )
    if width < 40 or value is None:
        return shape
    low, high = span
    is_light = value > low + 0.6 * (high - low)
    ink = "#000" if is_light else "#fff"
    label = element(
        "text",
        short(value),
        x=round(left + width / 2, 1),
        y=top + 17,
        text_anchor="middle",
        style=f"fill:{ink}",
        pointer_events="none",
    )
    return shape + label


def _viridis(
    value: float,
    low: float,
    high: float,
) -> str:
    """The colour of a number between the smallest and the largest."""
    part = (value - low) / (high - low) if high > low else 0.5
    place = part * (len(VIRIDIS) - 1)
    index = min(int(place), len(VIRIDIS) - 2)
    share = place - index
    pairs = zip(VIRIDIS[index], VIRIDIS[index + 1], strict=True)
    mixed = [round(a + share * (b - a)) for a, b in pairs]
    return f"rgb({mixed[0]},{mixed[1]},{mixed[2]})"


# ---- both


def _text(
    words: str,
    x: float,
    y: float,
    anchor: str,
) -> str:
    return element("text", words, x=round(x, 1), y=round(y, 1), text_anchor=anchor, class_="faint")


def _svg(
    parts: list[str],
    height: float,
    label: str,
) -> str:
    return element(
        "svg",
        "".join(parts),
        viewBox=f"0 0 {WIDTH} {height:g}",
        role="img",
        aria_label=escape(label),
        style=f"max-width:{WIDTH}px",
    )
