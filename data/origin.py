"""What the Hugging Face folder of a model says besides its weights.

A run or an import keeps these files next to its checkpoints, unchanged. So an export gives back
what training has not changed, even if the folder is gone by then.
"""

import json
import shutil
from pathlib import Path

from base import durable
from data.hugging_face import TOKENIZER, read_settings

CONFIG = "config.json"
GENERATION = "generation_config.json"
KEPT = "origin"  # the folder of these files in that of a run
# The form of a chat, and what transformers reads of a tokenizer besides its two files.
EXTRAS = (
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
FILES = (CONFIG, GENERATION, TOKENIZER, "tokenizer_config.json", *EXTRAS, "LICENSE*", "NOTICE*")


def found(folder: Path, names: tuple[str, ...]) -> list[Path]:
    """The files of a folder that have these names, which may be patterns."""
    paths = [path for name in names for path in sorted(folder.glob(name))]
    return [path for path in paths if path.is_file()]


def contents(folder: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    """{name: content} of these files."""
    paths = found(folder, names)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def keep(folder: Path, run: Path) -> None:
    """Copy the files of a Hugging Face folder, or of an earlier run, into that of a run."""
    paths = found(folder, FILES)
    if not paths or (run / KEPT).exists():
        return
    with durable.building(run / KEPT) as copy:
        for path in paths:
            target = copy / path.relative_to(folder)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)


def kept(run: Path) -> Path:
    """The folder with the files that a run keeps, if it has come from a folder."""
    return run / KEPT


def rewritten(path: Path, content: dict) -> bytes:
    """The bytes of a JSON file, unless its content has changed to this."""
    if content == read_settings(path):
        return path.read_bytes()
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def stop_ids(folder: Path) -> tuple[int, ...]:
    """The ids of the tokens at which the folder's model stops, as transformers reads them."""
    for name in (GENERATION, CONFIG):
        named = read_settings(folder / name).get("eos_token_id")
        ids = named if isinstance(named, list) else [named]
        known = tuple(index for index in ids if type(index) is int)
        if known:
            return known
    return ()
