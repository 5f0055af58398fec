"""The timeline of a step as a picture (SVG): a file of its own, or part of a page.

Memory is stacked by category over the events of the step. Lines show the peak and what the caching
allocator reserves; two rows below name the phases and the stages. Sizes are bytes; GiB = 2^30
bytes.
"""

from dataclasses import dataclass

import footprint.answers.svg as svg
from footprint.answers.svg import Scale
from footprint.cards.allocator import GIB, MIB, Replay
from footprint.record.timeline import Sizes, alike, peak_times, sizes_at, used_categories
from footprint.record.trace import Storage, Trace, first_of_each

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
EDGE = WIDTH - RIGHT
ACROSS = EDGE - LEFT

LOOK = """
.classic, .expandable { stroke: var(--faint); stroke-dasharray: 9 4; }
.expandable { stroke-dasharray: 2 4; }
.stage { fill: var(--faint); stroke: var(--paper); }
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


# ---- moments


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


def moments(trace: Trace, x: Scale) -> list[Column]:
    """The largest moment of each of COLUMNS equal parts."""
    events = int(x.high - x.low)
    times = peak_times(trace, lambda time: COLUMNS * (time - x.low) // events)
    lefts = [round(LEFT + ACROSS * index / COLUMNS, 1) for index in times]
    rights = [*lefts[1:], EDGE]
    found = sizes_at(trace, times.values()).items()
    return [Column(*moment, *ends) for moment, *ends in zip(found, lefts, rights, strict=True)]


# ---- areas and axis


def areas(drawn: list[Column], y: Scale) -> str:
    """One area per category, from the floor; those that end lower are drawn over the others."""
    shapes = []
    heights = [0] * len(drawn)
    for name, fill in COLOURS.items():
        for index, column in enumerate(drawn):
            heights[index] += column.sizes.get(name, 0)
        tops = [y(height) for height in heights]
        rights = [column.right for column in drawn]
        shapes.append(svg.area(FLOOR, LEFT, zip(rights, tops, strict=True), fill=fill))
    return "".join(reversed(shapes))


def axis(y: Scale) -> str:
    """Horizontal lines at round amounts, and the unit."""
    unit, name = (GIB, "GiB") if y.high >= 2 * GIB else (MIB, "MiB")
    lines = svg.rows(Scale(0, y.high / unit, FLOOR, TOP), LEFT, EDGE)
    return svg.text(name, LEFT - 8, TOP - 10, "faint end") + lines


# ---- phases and stages


def band(starts: list[tuple[int, str]], x: Scale, top: float) -> str:
    """A row of boxes, each with its name if the name has room."""
    merged = first_of_each(starts)
    ends = [time for time, _ in merged[1:]] + [x.high]
    shades: dict[str, float] = {}
    boxes = []
    for (start, name), end in zip(merged, ends, strict=True):
        left = x(max(start, x.low))
        width = x(min(end, x.high)) - left
        if width <= 0:
            continue
        shade = shades.setdefault(name, 0.12 + 0.1 * (len(shades) % 5))
        shape = svg.box(left, top, width, 18, class_="stage", fill_opacity=shade)
        if width > 7.5 * len(name):
            shape += svg.text(name, left + width / 2, top + 13, "middle")
        boxes.append(svg.element("g", svg.title(name) + shape))
    return "".join(boxes)


# ---- marks


def _reserved(found: Replay, y: Scale) -> str:
    words = f"reserved, {found.segments} segments: {amount(found.peak_reserved)}"
    level = y(found.peak_reserved)
    rule = svg.line([(LEFT, level), (EDGE, level)], words, class_=found.segments)
    return rule + svg.text(words, EDGE - 4, level - 4, "faint end")


def _peak(words: str, x: float, y: float) -> str:
    rule = svg.line([(x, FLOOR), (x, y)], class_="mark")
    point = svg.dot(x, y, r=4.5, class_="mark")

    # The words lie on the side that has more room.
    if x > WIDTH / 2:
        return rule + point + svg.text(words, x - 8, y - 7, "mark end")
    return rule + point + svg.text(words, x + 8, y - 7, "mark")


# ---- tooltips


def hovers(trace: Trace, drawn: list[Column]) -> str:
    """Columns whose tooltips describe their moment."""
    boxes = []
    alive = trace.alive_at([column.time for column in drawn])
    for column, storages in zip(drawn, alive, strict=True):
        words = tooltip(trace, column, storages)
        width = column.right - column.left
        boxes.append(svg.box(column.left, TOP, width, HEIGHT, words, class_="hover"))
    return "".join(boxes)


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
    x = Scale(first, last + 1, LEFT, EDGE)
    y = Scale(0, round(1.06 * highest), FLOOR, TOP)
    drawn = moments(trace, x)
    peak = max(drawn, key=lambda column: column.total)
    summary = f"peak {amount(peak.total)} in {trace.stage_at(peak.time)}"
    phases = [(time, phase.replace("recompute", "backward")) for time, phase in trace.phases]
    note = f"allocations and releases in their order ({len(trace.events):,} events; not seconds)"
    used = used_categories(column.sizes for column in drawn)
    colours = {name: COLOURS[name] for name in used}
    below = FLOOR + BANDS + 40

    parts = [
        svg.element("style", LOOK),
        axis(y),
        areas(drawn, y),
        band(phases, x, FLOOR + 6),
        band(trace.stages, x, FLOOR + 26),
        *(_reserved(each, y) for each in replays),
        _peak(summary, x(peak.time), y(peak.total)),
        svg.text(note, LEFT, FLOOR + BANDS + 14),
        svg.key(colours, LEFT, below - 8, ACROSS // len(used), 0),
        hovers(trace, drawn),
    ]
    label = f"Stacked memory over the step: {summary}"
    more = {"id": "timeline", "tabindex": 0, "data_peak": drawn.index(peak)}
    return svg.picture(WIDTH, below, label, parts, **more)
