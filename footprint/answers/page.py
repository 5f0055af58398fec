"""One self-contained HTML page of a simulated step: its timeline, and the tables as printed.

The page needs no network and no other file. Without JavaScript the picture, its tooltips and the
tables are there; the script only shows the text of a tooltip below the picture, and moves it with
the arrow keys.
"""

from html import escape
from pathlib import Path

from footprint.answers.picture import picture
from footprint.cards.allocator import Replay, of_step, replays_of
from footprint.record.trace import Trace

STYLE = """
body {
  margin: 0 auto; padding: 1.2rem 1.5rem 3rem; max-width: 1240px;
  background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
}
h1 { font-size: 1.45rem; margin: 0 0 .2rem; }
svg { width: 100%; height: auto; display: block; }
svg:focus-visible { outline: 3px solid #56b4e9; }
.hover:hover, .hover.on { fill: var(--ink); fill-opacity: .16; }
#details, pre { overflow-x: auto; font: 13px/1.45 ui-monospace, Menlo, Consolas, monospace; }
#details {
  display: block; white-space: pre-wrap; min-height: 11.5em;
  background: var(--band); border-radius: 6px; padding: .6rem .8rem;
}
"""
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


def page(
    trace: Trace, title: str, tables: str, replays: tuple[Replay, Replay] | None = None
) -> str:
    """The page as text; ValueError for a trace without events.

    tables: lines of text, which stand below the picture. replays: classic and expandable, if they
    were computed before.
    """
    trace = of_step(trace)
    drawn = picture(trace, replays or replays_of(trace))
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>
<h1>{escape(title)}</h1>
{drawn}
<output id="details" for="timeline" aria-live="polite">Point at the picture: its tooltip names the
largest tensors of that moment.</output>
<pre>{escape(tables)}</pre>
</main><script>{SCRIPT}</script></body></html>
"""


def write(path: str, content: str | bytes) -> None:
    """Write a page, a picture or a snapshot; ValueError if the file cannot be written."""
    try:
        Path(path).write_bytes(content if isinstance(content, bytes) else content.encode())
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({error}): name another file") from None
