"""Pictures as SVG text: lines, areas, cells and points, as a file of their own or on a page.

Every part can have its text as a tooltip, so that a picture is complete without a script and no
reader depends on its colours: those of Okabe and Ito, and viridis for shares, both of which
colour-blind readers can tell apart. x grows to the right and y downwards.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c8c8c")
VIRIDIS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
PALETTE = """
:root {
  --paper: #fff; --ink: #1b1f24; --faint: #5b6570; --line: #d5dae0; --band: #eef1f4;
  --mark: #b3261e; color-scheme: light dark;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171a; --ink: #e8eaed; --faint: #a3acb6; --line: #363c43; --band: #22272c;
    --mark: #ff8a80;
  }
}
"""
STYLE = """
svg { font: 13px system-ui, sans-serif; }
text { fill: var(--ink); }
.faint { fill: var(--faint); }
.grid { stroke: var(--line); }
.black { fill: #000; }
.white { fill: #fff; }
.end { text-anchor: end; }
.middle { text-anchor: middle; }
"""
ROOM = 50  # between two labels of an axis, at least


# ---- elements


def element(
    tag: str,
    content: str = "",
    **attributes: object,
) -> str:
    """An SVG element; in the names of attributes `_` stands for `-`, and `class_` for class."""
    words = [tag]
    for name, value in attributes.items():
        name = name.rstrip("_").replace("_", "-")
        if isinstance(value, float):
            value = round(value, 2)
        words.append(f'{name}="{escape(str(value))}"')
    opening = " ".join(words)
    return f"<{opening}>{content}</{tag}>" if content else f"<{opening}/>"


def title(words: str) -> str:
    """The tooltip of the element that it lies in."""
    return element("title", escape(words)) if words else ""


def text(
    words: str,
    x: float,
    y: float,
    kind: str = "faint",
) -> str:
    """Words from x on; the kinds "end" and "middle" say which part of them is at x."""
    return element("text", escape(words), x=x, y=y, class_=kind)


def box(
    x: float,
    y: float,
    width: float,
    height: float,
    words: str = "",
    **look: object,
) -> str:
    """A rectangle with a tooltip."""
    return element("rect", title(words), x=x, y=y, width=width, height=height, **look)


def dot(
    x: float,
    y: float,
    words: str = "",
    **look: object,
) -> str:
    """A point with a tooltip."""
    return element("circle", title(words), cx=x, cy=y, **look)


def line(
    points: Iterable[tuple[float, float]],
    words: str = "",
    **look: object,
) -> str:
    """A line through points, with a tooltip."""
    corners = "L".join(f"{x:g},{y:g}" for x, y in points)
    return element("path", title(words), d=f"M{corners}", fill="none", **look)


def area(
    floor: float,
    left: float,
    steps: Iterable[tuple[float, float]],
    **look: object,
) -> str:
    """A filled area over the floor; steps: the right end and the height of each."""
    outline = "".join(f"V{y:g}H{right:g}" for right, y in steps)
    return element("path", d=f"M{left:g},{floor:g}{outline}V{floor:g}Z", **look)


def key(
    colours: Mapping[str, str],
    x: float,
    y: float,
    across: float,
    down: float,
) -> str:
    """What each colour stands for: the first name at x, y, the next ones `across` and `down`."""
    parts = []
    for name, colour in colours.items():
        parts.append(box(x, y - 10, 11, 11, fill=colour))
        parts.append(text(name, x + 16, y, ""))
        x += across
        y += down
    return "".join(parts)


def picture(
    width: float,
    height: float,
    label: str,
    parts: Iterable[str],
    **more: object,
) -> str:
    """The whole: a file of its own, or part of a page. label: for those who cannot see it."""
    paper = box(0, 0, width, height, fill="var(--paper)")
    content = element("style", PALETTE + STYLE) + paper + "\n".join(parts)
    return element(
        "svg",
        content,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_label=label,
        **more,
    )


# ---- axes


@dataclass(frozen=True)
class Scale:
    """Maps numbers from `low` to `high` to coordinates from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    base: int = 0  # of a logarithmic scale

    @classmethod
    def around(
        cls,
        numbers: Iterable[float],
        start: float,
        end: float,
        base: int,
    ) -> "Scale":
        """A logarithmic scale from a power of the base to another one, with all numbers."""
        powers = [round(math.log(number, base), 9) for number in numbers]
        low = math.floor(min(powers))
        high = max(math.ceil(max(powers)), low + 1)
        return cls(float(base) ** low, float(base) ** high, start, end, base)

    def __call__(self, number: float) -> float:
        part = (number - self.low) / (self.high - self.low)
        if self.base:
            part = math.log(number / self.low) / math.log(self.high / self.low)
        return round(self.start + part * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        """Round numbers: powers of the base, or about six steps from 0."""
        if self.base:
            count = round(math.log(self.high / self.low, self.base))
            return [self.low * self.base**power for power in range(count + 1)]
        step = _round_up(self.high / 6)
        return [step * count for count in range(int(self.high / step) + 1)]

    def labels(self) -> list[float]:
        """The ticks for whose numbers there is room."""
        ticks = self.ticks()
        return ticks[:: math.ceil(ROOM * len(ticks) / abs(self.end - self.start))]


def _round_up(number: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is not smaller."""
    unit = 10.0 ** math.floor(math.log10(number))
    return next(step * unit for step in (1, 2, 5, 10) if step * unit >= number)


def rows(
    y: Scale,
    left: float,
    right: float,
) -> str:
    """Horizontal lines at the numbers of an axis, which stand to the left."""
    parts = []
    for number in y.ticks():
        place = y(number)
        parts.append(line([(left, place), (right, place)], class_="grid"))
    for number in y.labels():
        parts.append(text(f"{number:,g}", left - 8, y(number) + 4, "faint end"))
    return "".join(parts)


def columns(
    x: Scale,
    floor: float,
    top: float,
) -> str:
    """Vertical lines at the numbers of an axis, which stand below."""
    parts = []
    for number in x.ticks():
        place = x(number)
        parts.append(line([(place, floor), (place, top)], class_="grid"))
    for number in x.labels():
        parts.append(text(f"{number:,g}", x(number), floor + 18, "faint middle"))
    return "".join(parts)


# ---- cells


def colour(share: float) -> tuple[int, int, int]:
    """Red, green and blue of a share 0..1: viridis, whose lightness rises with the share."""
    place = share * (len(VIRIDIS) - 1)
    index = min(int(place), len(VIRIDIS) - 2)
    pairs = zip(VIRIDIS[index], VIRIDIS[index + 1], strict=True)
    red, green, blue = (round(low + (place - index) * (high - low)) for low, high in pairs)
    return red, green, blue


def cell(
    share: float,
    frame: tuple[float, float, float, float],
    words: str,
    tooltip: str,
) -> str:
    """A coloured cell with its words; NaN is grey. frame: x, y, width and height."""
    x, y, width, height = frame
    fill = "var(--band)"
    ink = "faint"
    if not math.isnan(share):
        fill = f"rgb{colour(share)}"
        ink = "black" if share > 0.45 else "white"
    shape = box(x, y, width, height, fill=fill)
    label = text(words, x + width / 2, y + height / 2 + 5, f"{ink} middle")
    return element("g", title(tooltip) + shape + label)
