"""Writes docs/SETTINGS.md from the fields of TrainConfig: `python -m scripts.settings`.

A test checks that the document is up to date.
"""

import dataclasses
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from base.flags import Parser
from longhaul.config import TrainConfig

DOCUMENT = Path(__file__).parent.parent / "docs" / "SETTINGS.md"
OPENING = """# Which settings does train.py have?

Each is a flag of `train.py` and a key of the TOML file of `--config`; flags win. Defaults stand in
parentheses, and `python train.py --help` prints this list. A file may group keys:

```toml
model_size = "tiny"

[memory]
gradient_checkpointing = true    # as the flag without a value
```
"""


def document() -> str:
    """The whole document."""
    fields = dataclasses.fields(TrainConfig)
    sections = [section(group, list(members)) for group, members in groupby(fields, group_of)]
    return "\n".join([OPENING, *sections])


def group_of(field: dataclasses.Field) -> str:
    return field.metadata["group"]


def section(group: str, fields: list[dataclasses.Field]) -> str:
    """A heading and a list of the group's flags."""
    rows = [f"## {group}", "", *map(row, fields)]
    return "\n".join(rows) + "\n"


def row(field: dataclasses.Field) -> str:
    """One flag with its default, meaning and choices."""
    meaning = field.metadata["help"]
    if field.metadata["choices"]:
        meaning += f" {{{','.join(map(str, field.metadata['choices']))}}}"
    return f"- `--{field.name}`{default_of(field)}: {meaning}"


def default_of(field: dataclasses.Field) -> str:
    """The default in parentheses; empty for none and for a switch that is off."""
    if field.default in (dataclasses.MISSING, "") or field.default is False:
        return ""
    return f" (`{field.default}`)"


def main(args: Sequence[str] | None = None) -> int:
    """Write the document."""
    Parser(prog="python -m scripts.settings", description=__doc__).parse_args(args)
    DOCUMENT.write_text(document(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
