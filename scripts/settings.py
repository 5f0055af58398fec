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
OPENING = """# Settings of train.py

Every setting is a flag of `train.py` and a key of the TOML file given with `--config`; flags win
over the file. Underscores and hyphens are both accepted. `python train.py --help` prints this list,
which is written by `python -m scripts.settings`. A flag has one name and may be given once; names
that nanochat, transformers, torchtitan and litgpt use are answered with ours. A file may group its
keys in tables:

```toml
[model]
model_size = "tiny"
context_length = 1024

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
    """A heading and a table of the group's flags."""
    rows = [f"## {group}", "", "| flag | default | meaning |", "|---|---|---|"]
    rows += [row(field) for field in fields]
    return "\n".join(rows) + "\n"


def row(field: dataclasses.Field) -> str:
    """One flag with its default, meaning and choices."""
    meaning = field.metadata["help"]
    if field.metadata["choices"]:
        meaning += f" ({', '.join(map(str, field.metadata['choices']))})"
    return f"| `--{field.name}` | {default_of(field)} | {meaning.replace('|', ' or ')} |"


def default_of(field: dataclasses.Field) -> str:
    """The default as a user would write it; empty for none."""
    if field.default is dataclasses.MISSING or field.default == "":
        return ""
    return f"`{field.default}`"


def main(args: Sequence[str] | None = None) -> int:
    """Write the document."""
    Parser(prog="python -m scripts.settings", description=__doc__).parse_args(args)
    DOCUMENT.write_text(document(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
