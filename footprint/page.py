"""One self-contained HTML page of a simulated step: its timeline as a picture, and its tables.

The page needs no network and no other file. Without JavaScript the picture, its tooltips and all
tables are there; the script only shows the text of a tooltip below the picture, and moves it with
the arrow keys. Sizes are bytes; GiB = 2^30 bytes.
"""

from html import escape

from footprint.allocator import Replay
from footprint.device import TOTALS, waterfall
from footprint.device import replays as replays_of
from footprint.html import STYLE as BASE
from footprint.html import table
from footprint.picture import COLOURS, amount, gib, picture, shape
from footprint.timeline import (
    Moment,
    alike,
    alive_at,
    largest,
    moments,
    of_step,
    stages_at_peak,
    used_categories,
)
from footprint.trace import CATEGORIES, Trace

TENSORS = 40  # groups of tensors in the table

STYLE = (
    BASE
    + """
.hover { fill: transparent; }
.hover:hover, .hover.on { fill: var(--ink); fill-opacity: .16; }
.key {
  display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; margin: .5rem 0; padding: 0;
  list-style: none;
}
.dot {
  display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .4em;
}
#details {
  display: block; white-space: pre-wrap; min-height: 11.5em; overflow-x: auto;
  font: 13px/1.45 ui-monospace, Menlo, Consolas, monospace;
  background: var(--band); border-radius: 6px; padding: .6rem .8rem;
}
td:nth-child(4), td:last-child { overflow-wrap: anywhere; }
.kind { white-space: nowrap; }
"""
)
SCRIPT = """
(function () {
  var details = document.getElementById("details");
  var picture = document.getElementById("timeline");
  var columns = Array.from(picture.querySelectorAll(".hover"));
  var texts = columns.map(function (column) {
    var title = column.querySelector("title");
    column.removeChild(title);
    return title.textContent;
  });
  var now = -1;

  function show(index) {
    if (index < 0 || index >= columns.length) return;
    if (now >= 0) columns[now].classList.remove("on");
    now = index;
    columns[now].classList.add("on");
    details.textContent = texts[now];
  }

  columns.forEach(function (column, index) {
    column.addEventListener("pointerenter", function () { show(index); });
  });
  picture.addEventListener("keydown", function (event) {
    var steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 };
    var step = steps[event.key];
    if (!step) return;
    event.preventDefault();
    show(Math.max(0, Math.min(columns.length - 1, now + step)));
  });
  show(Number(picture.getAttribute("data-peak")));
})();
"""


# ---- tables


def swatch(category: str) -> str:
    """A category's name with its colour."""
    dot = f'<span class="dot" style="background:{COLOURS[category]}"></span>'
    return f'<span class="kind">{dot}{category}</span>'


def stage_table(stages: dict[str, dict[str, int]]) -> str:
    """Category x stage, each stage at its largest moment."""
    used = used_categories(stages)
    peak = max(sum(sizes.values()) for sizes in stages.values())
    rows = []
    for stage, sizes in stages.items():
        total = sum(sizes.values())
        figures = [gib(sizes.get(name, 0)) for name in used]
        kind = "peak" if total == peak else ""
        rows.append((kind, [stage, *figures, gib(total)]))

    caption = "Live GiB at each stage's own peak; the largest in red"
    head = ["stage", *(swatch(name) for name in used), "total"]
    return table(caption, head, rows)


def tensor_table(groups: list[dict]) -> str:
    """The largest tensors at the peak."""
    sizes = ["GiB", "count", "GiB each"]
    words = ["tensor of", "category", "shape", "dtype", "allocated in", "operator"]
    rows = []
    for group in groups:
        cells = [
            gib(group["bytes"] * group["count"]),
            str(group["count"]),
            gib(group["bytes"]),
            escape(group["module"] or "(top)"),
            swatch(group["category"]),
            shape(group),
            group["dtype"],
            group["stage"],
            escape(group["op"]),
        ]
        rows.append(("", cells))

    caption = "Storages alive at the peak, the largest groups first; layers.* counts all layers"
    head = sizes + words
    return table(caption, head, rows, words=range(len(sizes), len(head)))


def waterfall_table(replays: tuple[Replay, Replay], ranks: int) -> str:
    """Live, reserved and device memory, for both kinds of segments."""
    classic, expandable = (dict(waterfall(found, ranks)) for found in replays)
    rows = []
    for name in classic:
        kind = "sum" if name in TOTALS else ""
        rows.append((kind, [name, gib(classic[name]), gib(expandable[name])]))
    fragmentation = [f"{found.fragmentation:.1%}" for found in replays]
    rows.append(("", ["fragmentation", *fragmentation]))

    caption = "GiB; reserved: a replay through a model of the caching allocator"
    head = ["", *(f"{found.segments} segments" for found in replays)]
    return table(caption, head, rows)


def settings_table(settings: dict) -> str:
    """The settings that were simulated."""
    rows = [("", [escape(name), escape(str(value))]) for name, value in settings.items()]
    return table("What was simulated", ["setting", "value"], rows, words=(0, 1))


# ---- the page


def page(
    trace: Trace,
    title: str,
    note: str = "",
    ranks: int = 1,
    stages: dict[str, dict[str, int]] | None = None,
    replays: tuple[Replay, Replay] | None = None,
    facts: dict[str, str] | None = None,
) -> str:
    """The page as text; ValueError for a trace without events.

    facts: what else stands at the top, such as the cards that hold the step and the command.

    stages: stage -> category -> bytes, if they are known better than from the trace (from a shallow
    trace, extrapolated). replays: classic and expandable, if they were computed before.
    """
    trace = of_step(trace)
    found = moments(trace)
    if replays is None:
        replays = replays_of(trace)
    if stages is None:
        stages = stages_at_peak(trace, found)
    peak = largest(found)
    ((_, alive),) = alive_at(trace, [peak.time])

    sections = [
        ("The step", _key(found) + picture(trace, found, replays) + _details()),
        ("From live to device", waterfall_table(replays, ranks)),
        ("Category by stage", stage_table(stages)),
        ("Largest tensors at the peak", tensor_table(alike(alive, TENSORS))),
        ("Settings", settings_table(trace.config)),
    ]
    body = "\n".join(f"<h2>{heading}</h2>{content}" for heading, content in sections)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>
<h1>{escape(title)}</h1><p class="faint">{escape(note)}</p>
{_summary(peak, trace.stage_at(peak.time), replays)}
{_facts(facts or {})}
{body}
</main><script>{SCRIPT}</script></body></html>
"""


def _summary(peak: Moment, stage: str, replays: tuple[Replay, Replay]) -> str:
    classic, expandable = (amount(found.peak_reserved) for found in replays)
    return (
        f"<p>Live peak <strong>{amount(peak.total)}</strong> in {stage}; reserved {classic} with "
        f"classic and {expandable} with expandable segments. GiB = 2<sup>30</sup> bytes.</p>"
    )


def _facts(facts: dict[str, str]) -> str:
    """A line each: its name and its text, which may be a command."""
    lines = []
    for name, text in facts.items():
        lines.append(f"<p>{escape(name)}: <code>{escape(text)}</code></p>")
    return "\n".join(lines)


def _key(found: list[Moment]) -> str:
    """The colours of the categories that occur."""
    used = []
    for index, name in enumerate(CATEGORIES):
        if any(moment.sizes[index] for moment in found):
            used.append(f"<li>{swatch(name)}</li>")
    return f'<ul class="key">{"".join(used)}</ul>'


def _details() -> str:
    """Where the script shows the text of a tooltip."""
    return (
        '<output id="details" for="timeline" aria-live="polite">Point at the picture: its tooltip '
        "names the largest tensors of that moment.</output>"
    )


def write(path: str, text: str):
    """Write the page to a file; ValueError if it cannot be written."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ValueError(f"--html {path} cannot be written ({error}): name another file") from None
