"""The timeline of a step as a picture (SVG): a file of its own, or part of a page.

Memory is stacked by category over the events of the step. Lines show the peak and what the caching
allocator reserves; two rows below name the phases and the stages. Every part has its text as an SVG
title, so that the picture is complete without a script. The colours are Okabe and Ito's, which
colour-blind readers can tell apart. Sizes are bytes; GiB = 2^30 bytes.
"""

from dataclasses import dataclass
from html import escape

from footprint.allocator import GIB, MIB, Replay
from footprint.svg import PALETTE, nice, title
from footprint.timeline import Sizes, alike, peak_times, sizes_at, used_categories
from footprint.trace import Storage, Trace, first_of_each

# From the bottom to the top: what changes least lies below
COLOURS = {
    "parameter": "#0072b2",
    "optimizer": "#e69f00",
    "buffer": "#8c8c8c",
    "input": "#f0e442",
    "unsharded": "#56b4e9",
    "gradient": "#d55e00",
    "activation": "#009e73",
    "temporary": "#cc79a7",
    "workspace": "#7a3b8f",
}

# In the units of the picture
WIDTH = 1200
HEIGHT = 440  # of the stacked areas
LEFT = 64
TOP = 26
RIGHT = 14
BANDS = 46  # height of the two rows below the areas
FLOOR = TOP + HEIGHT
ACROSS = WIDTH - LEFT - RIGHT

WORDS = """
svg { font: 13px system-ui, sans-serif; }
text { fill: var(--ink); }
.faint { fill: var(--faint); }
.end { text-anchor: end; }
.middle { text-anchor: middle; font-size: 12px; }
.grid { stroke: var(--line); }
.classic, .expandable { stroke: var(--faint); stroke-dasharray: 9 4; }
.expandable { stroke-dasharray: 2 4; }
.box { fill: var(--faint); stroke: var(--paper); }
.hover { fill: transparent; }
path.mark { stroke: var(--mark); stroke-width: 1.5; stroke-dasharray: 4 3; }
circle.mark { fill: var(--mark); }
text.mark { font-weight: 650; stroke: var(--paper); stroke-width: 4; paint-order: stroke; }
"""
COLUMNS = 240  # of the areas; each shows its largest moment and has a tooltip
NAMED = 6  # tensors that a tooltip names


# ---- words


def amount(size: int) -> str:
    """Bytes with a unit that suits them."""
    return f"{size / GIB:,.2f} GiB" if size >= GIB else f"{size / MIB:,.1f} MiB"


def line(group: dict) -> str:
    """A group of tensors as one line."""
    size = amount(group["bytes"] * group["count"])
    if group["count"] > 1:
        size = f"{group['count']} x {amount(group['bytes'])} = {size}"
    shape = " x ".join(str(length) for length in group["shape"]) or "scalar"
    tensor = f"[{shape}] {group['dtype']}"
    return f"{size}  {group['category']}  {tensor}  {group['module'] or '(top)'}  {group['op']}"


# ---- shapes


def text(
    words: str,
    x: float,
    y: float,
    kind: str = "faint",
) -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>'


def level(y: float, kind: str, words: str = "") -> str:
    """A line from the left to the right."""
    return f'<path d="M{LEFT},{y:g}H{WIDTH - RIGHT}" class="{kind}">{title(words)}</path>'


# ---- coordinates


@dataclass(frozen=True)
class Scale:
    """Maps event time and bytes to the coordinates of the picture."""

    first: int
    after: int  # the last time
    top: int

    def column(self, time: int) -> int:
        return COLUMNS * (time - self.first) // (self.after - self.first)

    def x(self, time: int) -> float:
        part = (time - self.first) / (self.after - self.first)
        return round(LEFT + ACROSS * min(max(part, 0), 1), 1)

    def y(self, size: float) -> float:
        return round(FLOOR - HEIGHT * size / self.top, 1)


@dataclass(frozen=True)
class Column:
    """The largest moment of a part of the step, which is drawn until the next one begins."""

    time: int
    sizes: Sizes
    left: float
    right: float

    @property
    def total(self) -> int:
        return sum(self.sizes.values())


def columns(trace: Trace, scale: Scale) -> list[Column]:
    times = peak_times(trace, scale.column)
    lefts = [round(LEFT + ACROSS * index / COLUMNS, 1) for index in times]
    rights = [*lefts[1:], WIDTH - RIGHT]
    moments = sizes_at(trace, times.values()).items()
    return [Column(*moment, *ends) for moment, *ends in zip(moments, lefts, rights, strict=True)]


# ---- areas and axis


def areas(drawn: list[Column], scale: Scale) -> str:
    """One area per category, from the floor; those that end lower are drawn over the others."""
    shapes = []
    heights = [0] * len(drawn)
    for name, colour in COLOURS.items():
        steps = []
        for index, column in enumerate(drawn):
            heights[index] += column.sizes.get(name, 0)
            steps.append(f"V{scale.y(heights[index]):g}H{column.right:g}")
        outline = f"M{LEFT},{FLOOR}{''.join(steps)}V{FLOOR}Z"
        shapes.append(f'<path d="{outline}" fill="{colour}"/>')
    return "".join(reversed(shapes))


def axis(scale: Scale) -> str:
    """Horizontal lines at round amounts, and the unit."""
    unit, name = (GIB, "GiB") if scale.top >= 2 * GIB else (MIB, "MiB")
    step = nice(scale.top / unit / 6)
    rows = [text(name, LEFT - 8, TOP - 10, "faint end")]
    for count in range(int(scale.top / unit / step) + 1):
        y = scale.y(count * step * unit)
        rows.append(level(y, "grid"))
        rows.append(text(f"{count * step:g}", LEFT - 8, y + 4, "faint end"))
    return "".join(rows)


# ---- phases and stages


def band(starts: list[tuple[int, str]], scale: Scale, y: int) -> str:
    """A row of boxes, each with its name if the name has room."""
    merged = first_of_each(starts)
    ends = [time for time, _ in merged[1:]] + [scale.after]
    shades: dict[str, float] = {}
    boxes = []
    for (start, name), end in zip(merged, ends, strict=True):
        left = scale.x(start)
        width = scale.x(end) - left
        if width <= 0:
            continue
        shade = shades.setdefault(name, 0.12 + 0.1 * (len(shades) % 5))
        size = f'width="{width:.1f}" height="18" fill-opacity="{shade:.2f}"'
        words = text(name, left + width / 2, y + 13, "middle") if width > 7.5 * len(name) else ""
        box = f'<rect class="box" x="{left}" y="{y}" {size}/>'
        boxes.append(f"<g>{title(name)}{box}{words}</g>")
    return "".join(boxes)


# ---- marks


def _reserved(found: Replay, scale: Scale) -> str:
    words = f"reserved, {found.segments} segments: {amount(found.peak_reserved)}"
    y = scale.y(found.peak_reserved)
    return level(y, found.segments, words) + text(words, WIDTH - RIGHT - 4, y - 4, "faint end")


def _peak(peak: Column, words: str, scale: Scale) -> str:
    x = scale.x(peak.time)
    y = scale.y(peak.total)
    rule = f'<path class="mark" d="M{x:g},{FLOOR}V{y:g}"/>'
    point = f'<circle class="mark" cx="{x}" cy="{y}" r="4.5"/>'

    # The words lie on the side that has more room.
    if x > WIDTH / 2:
        return rule + point + text(words, x - 8, y - 7, "mark end")
    return rule + point + text(words, x + 8, y - 7, "mark")


# ---- tooltips


def hovers(trace: Trace, drawn: list[Column]) -> str:
    """Columns whose tooltips describe their moment."""
    rows = []
    alive = trace.alive_at([column.time for column in drawn])
    for column, storages in zip(drawn, alive, strict=True):
        width = column.right - column.left
        box = f'x="{column.left}" y="{TOP}" width="{width:.1f}" height="{HEIGHT}"'
        words = title(tooltip(trace, column, storages))
        rows.append(f'<rect class="hover" {box}>{words}</rect>')
    return "".join(rows)


def tooltip(trace: Trace, column: Column, alive: list[Storage]) -> str:
    """Where the step is at a moment, how much is alive, and the largest tensors."""
    place = trace.stage_at(column.time)
    module = trace.module_at(column.time)
    if module:
        place = f"{place}, {module}"
    rows = [f"{amount(column.total)} alive in {place} (event {column.time:,})"]

    workspace = column.sizes.get("workspace")
    if workspace:
        rows.append(f"{amount(workspace)}  workspace inside the operator")
    rows += [line(group) for group in alike(alive, NAMED)]
    return "\n".join(rows)


# ---- the picture


def picture(trace: Trace, replays: tuple[Replay, Replay]) -> str:
    """The timeline; `replays` are classic and expandable. ValueError for a trace without events."""
    if not trace.events:
        raise ValueError("the trace has no events: nothing was recorded, so record a step first")
    highest = max(trace.peak()[0], *(each.peak_reserved for each in replays))
    first, last = trace.events[0].time, trace.events[-1].time
    scale = Scale(first, last + 1, round(1.06 * highest))
    drawn = columns(trace, scale)
    peak = max(drawn, key=lambda column: column.total)
    summary = f"peak {amount(peak.total)} in {trace.stage_at(peak.time)}"

    below = FLOOR + BANDS + 40
    note = f"allocations and releases in their order ({len(trace.events):,} events; not seconds)"
    phases = [(time, phase.replace("recompute", "backward")) for time, phase in trace.phases]
    bands = band(phases, scale, FLOOR + 6) + band(trace.stages, scale, FLOOR + 26)
    reserved = "".join(_reserved(each, scale) for each in replays)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" id="timeline" viewBox="0 0 {WIDTH} {below}"
role="img" aria-label="Stacked memory over the step: {escape(summary)}" tabindex="0"
data-peak="{drawn.index(peak)}">
<style>{PALETTE}{WORDS}</style>
<rect width="{WIDTH}" height="{below}" fill="var(--paper)"/>
{axis(scale)}{areas(drawn, scale)}{bands}
{reserved}{_peak(peak, summary, scale)}
{text(note, LEFT, FLOOR + BANDS + 14)}{_key(drawn, below - 8)}{hovers(trace, drawn)}</svg>"""


def _key(drawn: list[Column], y: int) -> str:
    """The colours of the categories that occur, in one row."""
    used = used_categories(column.sizes for column in drawn)
    parts = []
    for place, name in enumerate(used):
        x = LEFT + place * ACROSS // len(used)
        parts.append(f'<rect x="{x}" y="{y - 10}" width="11" height="11" fill="{COLOURS[name]}"/>')
        parts.append(text(name, x + 16, y, ""))
    return "".join(parts)
