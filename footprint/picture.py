"""The timeline of a step as a picture (SVG): a file of its own, or part of a page.

Memory is stacked by category over the events of the step. Lines show the peak and what the caching
allocator reserves; two rows below name the phases and the stages. Every part has its text as an SVG
title, so that the picture is complete without a script. The colours are Okabe and Ito's, which
colour-blind readers can tell apart. Sizes are bytes; GiB = 2^30 bytes.
"""

from html import escape
from itertools import groupby

from footprint.allocator import GIB, MIB, Replay
from footprint.html import PALETTE, nice, title
from footprint.timeline import Moment, alike, by_name, columns, largest, moments, sampled
from footprint.trace import CATEGORIES, Storage, Trace, first_of_each

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
COLUMNS = 240  # of the areas; each has a tooltip
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


class Scale:
    """Maps event time and bytes to the coordinates of the picture."""

    def __init__(self, first: int, last: int, top: int):
        self.first = first
        self.last = max(last, first + 1)
        self.top = max(top, 1)

    def x(self, time: float) -> float:
        part = (time - self.first) / (self.last - self.first)
        part = min(max(part, 0), 1)
        return round(LEFT + part * (WIDTH - LEFT - RIGHT), 1)

    def y(self, size: float) -> float:
        return round(FLOOR - HEIGHT * size / self.top, 1)


# ---- areas and axis


def areas(points: list[Moment], scale: Scale) -> str:
    """One stacked area per category.

    Memory keeps its level until the next moment, so that the outlines run in steps.
    """
    shapes = []
    starts = [scale.x(point.time) for point in points]
    ends = [*starts[1:], scale.x(scale.last)]
    base = [0] * len(points)
    for name, colour in COLOURS.items():
        index = CATEGORIES.index(name)
        top = [low + point.sizes[index] for low, point in zip(base, points, strict=True)]
        if top != base:
            upper = _steps(ends, top, scale)
            lower = _steps(starts[::-1], base[::-1], scale)
            outline = f"M{starts[0]:g},{FLOOR}{upper}{lower}Z"
            shapes.append(f'<path d="{outline}" fill="{colour}"/>')
        base = top
    return "".join(shapes)


def _steps(ends: list[float], heights: list[int], scale: Scale) -> str:
    """A line that keeps each height until its end."""
    parts = []
    for y, same in groupby(zip(ends, map(scale.y, heights), strict=True), lambda pair: pair[1]):
        *_, (end, _) = same
        parts.append(f"V{y:g}H{end:g}")
    return "".join(parts)


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


def bands(trace: Trace, scale: Scale) -> str:
    """Two rows below the areas: the phases, and the stages."""
    named = [(time, phase.replace("recompute", "backward")) for time, phase in trace.phases]
    return _band(named, scale, FLOOR + 6) + _band(trace.stages, scale, FLOOR + 26)


def _band(starts: list[tuple[int, str]], scale: Scale, y: int) -> str:
    """A row of boxes, each with its name if the name has room."""
    merged = first_of_each(starts)
    ends = [time for time, _ in merged[1:]] + [scale.last]
    shades: dict[str, float] = {}
    boxes = []
    for (start, name), end in zip(merged, ends, strict=True):
        left = scale.x(start)
        width = scale.x(end) - left
        if width <= 0:
            continue
        shade = shades.setdefault(name, 0.12 + 0.1 * (len(shades) % 5))
        size = f'width="{width:.1f}" height="18" fill-opacity="{shade:.2f}"'
        boxes.append(f'<g>{title(name)}<rect class="box" x="{left}" y="{y}" {size}/>')
        if width > 7.5 * len(name):
            boxes.append(text(name, left + width / 2, y + 13, "middle"))
        boxes.append("</g>")
    return "".join(boxes)


# ---- marks


def _reserved(found: Replay, scale: Scale) -> str:
    words = f"reserved, {found.segments} segments: {amount(found.peak_reserved)}"
    y = scale.y(found.peak_reserved)
    return level(y, found.segments, words) + text(words, WIDTH - RIGHT - 4, y - 4, "faint end")


def _peak(peak: Moment, stage: str, scale: Scale) -> str:
    x = scale.x(peak.time)
    y = scale.y(peak.total)
    words = f"peak {amount(peak.total)} in {stage}"
    rule = f'<path class="mark" d="M{x:g},{FLOOR}V{y:g}"/>'
    point = f'<circle class="mark" cx="{x}" cy="{y}" r="4.5"/>'

    # The words lie on the side that has more room.
    if x > WIDTH / 2:
        return rule + point + text(words, x - 8, y - 7, "mark end")
    return rule + point + text(words, x + 8, y - 7, "mark")


# ---- tooltips


def hovers(trace: Trace, found: list[Moment], scale: Scale) -> tuple[str, int]:
    """Columns whose tooltips describe their largest moment, and the index of the peak's column."""
    groups = columns(found, COLUMNS)
    chosen = [largest(group) for group in groups]
    lefts = [scale.x(group[0].time) for group in groups]
    rights = lefts[1:] + [scale.x(scale.last)]
    alive = trace.alive_at([moment.time for moment in chosen])

    rows = []
    for left, right, moment, storages in zip(lefts, rights, chosen, alive, strict=True):
        box = f'x="{left}" y="{TOP}" width="{max(right - left, 0.1):.1f}" height="{HEIGHT}"'
        words = title(tooltip(trace, moment, storages))
        rows.append(f'<rect class="hover" {box}>{words}</rect>')
    return "".join(rows), chosen.index(largest(found))


def tooltip(trace: Trace, moment: Moment, alive: list[Storage]) -> str:
    """Where the step is at a moment, how much is alive, and the largest tensors."""
    place = trace.stage_at(moment.time)
    module = trace.module_at(moment.time)
    if module:
        place = f"{place}, {module}"
    rows = [f"{amount(moment.total)} alive in {place} (event {moment.time:,})"]

    workspace = moment.sizes[CATEGORIES.index("workspace")]
    if workspace:
        rows.append(f"{amount(workspace)}  workspace inside the operator")
    rows += [line(group) for group in alike(alive, NAMED)]
    return "\n".join(rows)


# ---- the picture


def picture(trace: Trace, replays: tuple[Replay, Replay]) -> str:
    """The timeline; `replays` are classic and expandable. ValueError for a trace without events."""
    found = moments(trace)
    peak = largest(found)
    stage = trace.stage_at(peak.time)
    highest = max(peak.total, *(each.peak_reserved for each in replays))
    scale = Scale(found[0].time, found[-1].time, round(1.06 * highest))
    below = FLOOR + BANDS + 40
    tooltips, index = hovers(trace, found, scale)
    note = f"allocations and releases in their order ({len(trace.events):,} events; not seconds)"
    summary = (
        f"Stacked memory over the step: from {amount(found[0].total)} at its start to "
        f"{amount(peak.total)} at the peak, in {stage}."
    )
    reserved = "".join(_reserved(each, scale) for each in replays)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" id="timeline" viewBox="0 0 {WIDTH} {below}"
role="img" aria-label="{escape(summary)}" tabindex="0" data-peak="{index}">
<style>{PALETTE}{WORDS}</style>
<rect width="{WIDTH}" height="{below}" fill="var(--paper)"/>
{axis(scale)}{areas(sampled(found, COLUMNS), scale)}{bands(trace, scale)}
{reserved}{_peak(peak, stage, scale)}
{text(note, LEFT, FLOOR + BANDS + 14)}{_key(found, below - 8)}{tooltips}</svg>"""


def _key(found: list[Moment], y: int) -> str:
    """The colours of the categories that occur, in one row."""
    sizes = [by_name(moment) for moment in found]
    used = [name for name in COLOURS if any(name in each for each in sizes)]
    parts = []
    for place, name in enumerate(used):
        x = LEFT + place * (WIDTH - LEFT - RIGHT) // len(used)
        parts.append(f'<rect x="{x}" y="{y - 10}" width="11" height="11" fill="{COLOURS[name]}"/>')
        parts.append(text(name, x + 16, y, ""))
    return "".join(parts)
