"""Elements of pictures (SVG), and the colours of paper and ink."""

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
