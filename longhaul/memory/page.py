"""One self-contained HTML page of a simulated step: memory over its timeline as a picture, and its
tables.

No network, no external file. Without JavaScript the picture, its tooltips (SVG titles) and all
tables are there; the script only
shows the tooltip's text beside the picture and moves it with the arrow keys. Colours are Okabe and
Ito's, told apart by colour-blind
readers. Sizes are bytes; GiB = 2^30 bytes. Imports longhaul.memory (allocator, device,
timeline, trace) of ours.
"""

from html import escape

from longhaul.memory.allocator import GIB, MIB, Replay
from longhaul.memory.device import replays as replays_of
from longhaul.memory.device import waterfall
from longhaul.memory.timeline import (
    Moment,
    alike,
    alive_at,
    columns,
    largest,
    moments,
    of_step,
    sampled,
    stages_at_peak,
)
from longhaul.memory.trace import CATEGORIES, Trace

COLOURS = dict(
    parameter="#0072b2",
    gradient="#d55e00",
    optimizer="#e69f00",
    unsharded="#56b4e9",
    activation="#009e73",
    temporary="#cc79a7",
    buffer="#8c8c8c",
    input="#f0e442",
    workspace="#7a3b8f",
)
STACK = (
    "parameter",
    "optimizer",
    "buffer",
    "input",
    "unsharded",
    "gradient",
    "activation",
    "temporary",
    "workspace",
)  # what stays lies below
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BANDS = (
    1200,
    440,
    64,
    26,
    14,
    46,
)  # of the picture, in its own units
PHASES = {
    "start": "forward",
    "embedding": "forward",
    "layer forward": "forward",
    "norm forward": "forward",
    "loss forward": "loss",
    "loss backward": "loss",
    "gradient norm": "optimizer",
    "optimizer": "optimizer",
}  # any other stage: backward
POINTS, HOVERS, NAMED = (
    480,
    240,
    6,
)  # columns of the areas, columns that answer the pointer, tensors that they name

STYLE = """
:root{--paper:#fff;--ink:#1b1f24;--faint:#5b6570;--line:#d5dae0;--band:#eef1f4;--mark:#b3261e;color-scheme:light dark}
@media(prefers-color-scheme:dark){:root{--paper:#14171a;--ink:#e8eaed;--faint:#a3acb6;--line:#363c43;--band:#22272c;--mark:#ff8a80}}
body{margin:0 auto;padding:1.2rem 1.5rem 3rem;max-width:1240px;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif}
h1{font-size:1.45rem;margin:0 0 .2rem}h2{font-size:1.12rem;margin:2rem 0 .5rem}p{margin:.3rem 0;max-width:75ch}
.faint,caption{color:var(--faint)}caption{text-align:left;padding-bottom:.3rem}
svg{width:100%;height:auto;display:block;font:13px system-ui,sans-serif}svg text{fill:var(--ink)}svg .faint{fill:var(--faint)}
svg:focus-visible{outline:3px solid #56b4e9}.hover{fill:transparent}.hover:hover,.hover.on{fill:var(--ink);fill-opacity:.16}
.key{display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;padding:0;list-style:none;margin:.5rem 0}
.dot{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.4em}
#told{display:block;white-space:pre-wrap;font:13px/1.45 ui-monospace,Menlo,Consolas,monospace;min-height:11.5em;background:var(--band);
border-radius:6px;padding:.6rem .8rem;overflow-x:auto}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.875rem;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .6rem;border-bottom:1px solid var(--line);text-align:left;white-space:nowrap}
thead th{border-bottom:2px solid var(--line)}.n{text-align:right}.sum th,.sum td{font-weight:650}.peak th,.peak td{color:var(--mark);font-weight:650}
"""
SCRIPT = """
(function(){
var told=document.getElementById('told'),picture=document.getElementById('timeline'),all=[].slice.call(picture.querySelectorAll('.hover')),now=-1;
var texts=all.map(function(r){var t=r.querySelector('title'),s=t.textContent;r.removeChild(t);return s});
function show(i){if(i<0||i>=all.length)return;if(now>=0)all[now].classList.remove('on');now=i;all[i].classList.add('on');told.textContent=texts[i]}
all.forEach(function(r,i){r.addEventListener('pointerenter',function(){show(i)})});
picture.addEventListener('keydown',function(e){var d={ArrowLeft:-1,ArrowRight:1,PageUp:-10,PageDown:10}[e.key];
if(d){e.preventDefault();show(Math.max(0,Math.min(all.length-1,now+d)))}});
show(+picture.getAttribute('data-peak'));
})();
"""


# ---- words


def gib(size: int) -> str:
    """Bytes as GiB."""
    return f"{size / GIB:,.3f}"


def amount(size: int) -> str:
    """Bytes with the unit that suits them."""
    return f"{size / GIB:,.2f} GiB" if size >= GIB else f"{size / MIB:,.1f} MiB"


def shape(group: dict) -> str:
    """2 x 3 float32."""
    return " x ".join(map(str, group["shape"])) or "scalar"


def line(group: dict) -> str:
    """A group of tensors as one line."""
    times = f"{group['count']} x {amount(group['bytes'])} = " if group["count"] > 1 else ""
    return (
        f"{times}{amount(group['bytes'] * group['count'])}  {group['category']}  [{shape(group)}] {group['dtype']}  "
        f"{group['module'] or '(top)'}  {group['op']}"
    )


# ---- the picture


class Scale:
    """Event time and bytes to the picture's coordinates."""

    def __init__(self, first: int, last: int, top: int):
        self.first, self.last, self.top = first, max(last, first + 1), max(top, 1)
        self.floor = TOP + HEIGHT

    def x(self, time: float) -> float:
        part = min(max((time - self.first) / (self.last - self.first), 0), 1)
        return round(LEFT + part * (WIDTH - LEFT - RIGHT), 1)

    def y(self, size: float) -> float:
        return round(self.floor - HEIGHT * size / self.top, 1)


def areas(points: list[Moment], scale: Scale) -> str:
    """One stacked area per category; memory keeps its level until the next moment, so lines run in
    steps.
    """
    base, shapes = [0] * len(points), []
    for name in STACK:
        top = [low + point.sizes[CATEGORIES.index(name)] for low, point in zip(base, points)]
        if top != base:
            outline = _steps(points, top, scale) + _steps(points, base, scale)[::-1]
            shapes.append(f'<path d="M{"L".join(outline)}Z" fill="{COLOURS[name]}"/>')
        base = top
    return "".join(shapes)


def _steps(points: list[Moment], heights: list[int], scale: Scale) -> list[str]:
    """Corners "x,y" of a step line; corners that repeat or lie within a level are left out."""
    corners = []
    for index, (point, height) in enumerate(zip(points, heights)):
        level = f"{scale.y(height):g}"
        after = points[index + 1].time if index + 1 < len(points) else scale.last
        start, end = f"{scale.x(point.time):g},{level}", f"{scale.x(after):g},{level}"
        if len(corners) > 1 and corners[-1] == start and corners[-2].endswith("," + level):
            corners.pop()
        corners += [end] if start == end or corners and corners[-1] == start else [start, end]
    return corners


def axis(scale: Scale) -> str:
    """Horizontal lines at round amounts."""
    unit, name = (GIB, "GiB") if scale.top >= 2 * GIB else (MIB, "MiB")
    step = nice(scale.top / unit / 6)
    rows = [f'<text x="{LEFT - 8}" y="{TOP - 10}" text-anchor="end" class="faint">{name}</text>']
    for count in range(int(scale.top / unit / step) + 1):
        y = scale.y(count * step * unit)
        rows.append(
            f'<path d="M{LEFT},{y:g}H{WIDTH - RIGHT}" stroke="var(--line)"/>'
            f'<text x="{LEFT - 8}" y="{y + 4:g}" text-anchor="end" class="faint">{count * step:g}</text>'
        )
    return "".join(rows)


def nice(raw: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is no less than `raw`."""
    power = 10 ** (len(str(int(raw))) - 1) if raw >= 1 else 0.01
    return next(factor * power for factor in (1, 2, 5, 10, 20, 50, 100) if factor * power >= raw)


def bands(trace: Trace, scale: Scale) -> str:
    """Two rows below the picture: phases with their names, and stages, which name themselves where
    there is room.
    """
    phases = [(time, PHASES.get(name, "backward")) for time, name in trace.stages]
    return _band(phases, scale, scale.floor + 6, 20, True) + _band(
        trace.stages, scale, scale.floor + 28, 16, False
    )


def _band(starts: list[tuple[int, str]], scale: Scale, y: float, height: int, strong: bool) -> str:
    kept = [
        start
        for index, start in enumerate(starts)
        if start[0] <= scale.last and (not index or start[1] != starts[index - 1][1])
    ]
    small = "" if strong else ' font-size="11"'
    rows, tints = (
        [],
        {
            name: 0.12 + 0.1 * (index % 5)
            for index, name in enumerate(dict.fromkeys(name for _, name in kept))
        },
    )
    for index, (time, name) in enumerate(kept):
        left, right = (
            scale.x(time),
            scale.x(kept[index + 1][0] if index + 1 < len(kept) else scale.last),
        )
        if right <= left:
            continue
        text = f'<text x="{(left + right) / 2:g}" y="{y + height - 5:g}" text-anchor="middle"{small}>{name}</text>'
        rows.append(
            f'<g><title>{name}</title><rect x="{left:g}" y="{y:g}" width="{right - left:g}" height="{height}" fill="var(--faint)" '
            f'fill-opacity="{tints[name]:.2f}" stroke="var(--paper)"/>{text if right - left > 7.5 * len(name) else ""}</g>'
        )
    return "".join(rows)


def marks(trace: Trace, peak: Moment, replays: tuple[Replay, Replay], scale: Scale) -> str:
    """The peak, and what the allocator reserves."""
    rows = []
    for found, dash in zip(replays, ("9 4", "2 4")):
        y = scale.y(found.peak_reserved)
        rows.append(
            f'<path d="M{LEFT},{y:g}H{WIDTH - RIGHT}" stroke="var(--faint)" stroke-dasharray="{dash}"><title>reserved, {found.segments} '
            f'segments: {amount(found.peak_reserved)}</title></path><text x="{WIDTH - RIGHT - 4}" y="{y - 4:g}" text-anchor="end" class="faint">'
            f"reserved, {found.segments} segments: {amount(found.peak_reserved)}</text>"
        )
    x, y = scale.x(peak.time), scale.y(peak.total)
    side, shift = ("end", -8) if x > WIDTH / 2 else ("start", 8)
    words = f"peak {amount(peak.total)} in {trace.stage_at(peak.time)}"
    return "".join(rows) + (
        f'<path d="M{x:g},{scale.floor}V{y:g}" stroke="var(--mark)" stroke-width="1.5" stroke-dasharray="4 3"/>'
        f'<circle cx="{x:g}" cy="{y:g}" r="4.5" fill="var(--mark)"/>'
        f'<text x="{x + shift:g}" y="{y - 7:g}" text-anchor="{side}" font-weight="650" '
        f'stroke="var(--paper)" stroke-width="4" paint-order="stroke">{words}</text>'
    )


def hovers(trace: Trace, found: list[Moment], scale: Scale) -> tuple[str, int]:
    """Columns that tell the largest tensors of their largest moment, and the index of the peak's
    column.
    """
    groups = columns(found, HOVERS)
    chosen = [largest(group) for group in groups]
    edges = [scale.x(group[0].time) for group in groups] + [scale.x(scale.last)]
    rows = []
    for index, (time, alive) in enumerate(alive_at(trace, [moment.time for moment in chosen])):
        module = trace.module_at(time)
        inside = chosen[index].sizes[CATEGORIES.index("workspace")]
        words = [
            f"{amount(chosen[index].total)} alive in {trace.stage_at(time)}{f', {module}' if module else ''} (event {time:,})",
            *([f"{amount(inside)}  workspace inside the operator"] if inside else []),
            *map(line, alike(alive, NAMED)),
        ]
        rows.append(
            f'<rect class="hover" x="{edges[index]:g}" y="{TOP}" width="{max(edges[index + 1] - edges[index], 0.1):.1f}" '
            f'height="{HEIGHT}" fill="transparent"><title>{escape(chr(10).join(words))}</title></rect>'
        )
    return "".join(rows), chosen.index(largest(found))


def picture(trace: Trace, found: list[Moment], replays: tuple[Replay, Replay]) -> str:
    """The timeline as inline SVG."""
    peak = largest(found)
    scale = Scale(
        found[0].time,
        found[-1].time,
        round(1.06 * max(peak.total, *(each.peak_reserved for each in replays))),
    )
    columns_, index = hovers(trace, found, scale)
    words = (
        f"Stacked memory over the step: from {amount(found[0].total)} at its start to {amount(peak.total)} at the peak, in "
        f"{trace.stage_at(peak.time)}."
    )
    return (
        f'<svg id="timeline" viewBox="0 0 {WIDTH} {TOP + HEIGHT + BANDS + 18}" role="img" aria-label="{escape(words)}" tabindex="0" '
        f'data-peak="{index}">{axis(scale)}{areas(sampled(found, POINTS), scale)}{bands(trace, scale)}'
        f'{marks(trace, peak, replays, scale)}{columns_}<text x="{LEFT}" y="{TOP + HEIGHT + BANDS + 14}" class="faint" font-size="12">'
        f"allocations and releases in their order ({len(trace.events):,} events; not seconds)</text></svg>"
    )


# ---- the tables


def table(caption: str, head: list[str], rows: list[tuple[str, list[str]]], words: int = 1) -> str:
    """rows: (class of the row, cells); the first `words` columns hold words, the others numbers."""

    def cell(index: int, value: str, head: bool) -> str:
        tag, scope = (
            ("th", f' scope="{"col" if head else "row"}"') if head or not index else ("td", "")
        )
        number = "" if index < words else ' class="n"'
        return f"<{tag}{scope}{number}>{value}</{tag}>"

    def row(kind: str, values: list[str], head: bool = False) -> str:
        return f'<tr class="{kind}">{"".join(cell(index, value, head) for index, value in enumerate(values))}</tr>'

    body = "".join(row(kind, values) for kind, values in rows)
    return f'<div class="wide"><table><caption>{caption}</caption><thead>{row("", head, True)}</thead><tbody>{body}</tbody></table></div>'


def swatch(category: str) -> str:
    """A category's name with its colour."""
    return f'<span class="dot" style="background:{COLOURS[category]}"></span>{category}'


def stage_table(stages: dict[str, dict[str, int]]) -> str:
    """Category x stage, each stage at its largest moment."""
    used = [name for name in CATEGORIES if any(sizes.get(name) for sizes in stages.values())]
    top = max(sum(sizes.values()) for sizes in stages.values())
    rows = [
        (
            "peak" if sum(sizes.values()) == top else "",
            [stage, *(gib(sizes.get(name, 0)) for name in used), gib(sum(sizes.values()))],
        )
        for stage, sizes in stages.items()
    ]
    return table(
        "Live GiB at each stage's own peak; the largest in red",
        ["stage", *map(swatch, used), "total"],
        rows,
    )


def tensor_table(groups: list[dict]) -> str:
    """The largest tensors at the peak."""
    head = [
        "tensor of",
        "category",
        "born in",
        "shape",
        "dtype",
        "operator",
        "count",
        "GiB each",
        "GiB",
    ]
    rows = [
        (
            "",
            [
                escape(group["module"] or "(top)"),
                swatch(group["category"]),
                group["stage"],
                shape(group),
                group["dtype"],
                escape(group["op"]),
                str(group["count"]),
                gib(group["bytes"]),
                gib(group["bytes"] * group["count"]),
            ],
        )
        for group in groups
    ]
    return table(
        "Storages alive at the peak, largest together first; layers.* counts all layers",
        head,
        rows,
        words=6,
    )


def waterfall_table(replays: tuple[Replay, Replay], ranks: int) -> str:
    """Live, reserved, device, for both kinds of segments."""
    columns_ = [dict(waterfall(found, ranks)) for found in replays]
    rows = [
        (
            "sum" if name in ("live", "reserved", "device") else "",
            [name, *(gib(column[name]) for column in columns_)],
        )
        for name in columns_[0]
    ]
    rows.append(("", ["fragmentation", *(f"{found.fragmentation:.1%}" for found in replays)]))
    return table(
        "GiB; reserved: a replay through a model of the caching allocator",
        ["", *(f"{found.segments} segments" for found in replays)],
        rows,
    )


# ---- the page


def page(
    trace: Trace,
    title: str,
    note: str = "",
    ranks: int = 1,
    stages: dict[str, dict[str, int]] | None = None,
    replays: tuple[Replay, Replay] | None = None,
) -> str:
    """The page as text.

    stages: stage -> category -> bytes where they are known better than from the trace (a shallow
    trace, extrapolated); replays: classic
    and expandable, if they are there already. ValueError for a trace without events.
    """
    trace = of_step(trace)
    found = moments(trace)
    replays = replays or replays_of(trace)
    ((_, alive),) = alive_at(trace, [largest(found).time])
    used = [
        name
        for index, name in enumerate(CATEGORIES)
        if any(moment.sizes[index] for moment in found)
    ]
    key = "".join(f"<li>{swatch(name)}</li>" for name in used)
    settings = [("", [escape(name), escape(str(value))]) for name, value in trace.config.items()]
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>
<h1>{escape(title)}</h1><p class="faint">{escape(note)}</p>
<p>Live peak <strong>{amount(largest(found).total)}</strong> in {trace.stage_at(largest(found).time)}; reserved
{amount(replays[0].peak_reserved)} with classic and {amount(replays[1].peak_reserved)} with expandable segments. GiB = 2<sup>30</sup> bytes.</p>
<h2>The step</h2><ul class="key">{key}</ul>{picture(trace, found, replays)}
<output id="told" for="timeline" aria-live="polite">Point at the picture: its tooltip names the largest tensors of that moment.</output>
<h2>From live to device</h2>{waterfall_table(replays, ranks)}
<h2>Category by stage</h2>{stage_table(stages or stages_at_peak(trace, found))}
<h2>Largest tensors at the peak</h2>{tensor_table(alike(alive, 40))}
<h2>Settings</h2>{table("What was simulated", ["setting", "value"], settings, words=2)}
</main><script>{SCRIPT}</script></body></html>
"""


def write(path: str, text: str):
    """The page as a file; ValueError where it cannot be written."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ValueError(f"--html {path} cannot be written: {error}") from None
