"""What HTML pages share: their style, and the elements of pictures (SVG).

A page needs no network and no other file.
"""

import math
from html import escape

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
STYLE = (
    PALETTE
    + """
body {
  margin: 0 auto; padding: 1.2rem 1.5rem 3rem; max-width: 1240px;
  background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
}
h1 { font-size: 1.45rem; margin: 0 0 .2rem; }
h2 { font-size: 1.12rem; margin: 2rem 0 .5rem; }
p { margin: .3rem 0; max-width: 75ch; }
.faint, caption { color: var(--faint); }
caption { text-align: left; padding-bottom: .3rem; }
svg { width: 100%; height: auto; display: block; font: 13px system-ui, sans-serif; }
svg text { fill: var(--ink); }
svg .faint { fill: var(--faint); }
svg:focus-visible { outline: 3px solid #56b4e9; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td {
  padding: .25rem .6rem; border-bottom: 1px solid var(--line);
  text-align: left;
}
thead th { border-bottom: 2px solid var(--line); }
.n { text-align: right; white-space: nowrap; }
code { font: 13px/1.45 ui-monospace, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.sum th, .sum td { font-weight: 650; }
.peak th, .peak td { color: var(--mark); font-weight: 650; }
"""
)


def element(
    tag: str,
    content: str = "",
    **attributes: object,
) -> str:
    """An SVG element; in the names of attributes `_` stands for `-`, and `class_` for class."""
    words = [tag]
    for name, value in attributes.items():
        name = name.rstrip("_").replace("_", "-")
        words.append(f'{name}="{value:g}"' if isinstance(value, float) else f'{name}="{value}"')
    opening = " ".join(words)
    return f"<{opening}>{content}</{tag}>" if content else f"<{opening}/>"


def title(words: str) -> str:
    """The tooltip of the element that it lies in."""
    return element("title", escape(words))


def nice(raw: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is at least `raw`."""
    unit = 10.0 ** math.floor(math.log10(raw))
    return next(step * unit for step in (1, 2, 5, 10) if step * unit >= raw)
