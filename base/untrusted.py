"""Files from strangers: JSON within bounds, and pickles, which are recognised but never opened.

A pickle runs whatever code its writer put into it when it is loaded, so it is recognised by its
name or first bytes and refused.
"""

import json
from pathlib import Path

JSON_BYTES = 64 * 2**20  # a manifest of 100,000 shards has 40 MB
PICKLE_SUFFIXES = {".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".dill", ".distcp"}
PICKLE_PROTOCOLS = range(2, 6)
ZIP_MAGIC = b"PK\3\4"  # torch.save writes a zip file with a pickle in it


def is_pickle(path: Path) -> bool:
    """Whether a file is a pickle, or a zip file with one, by its suffix or first bytes.

    A folder counts as one if it has the .metadata that torch.distributed.checkpoint writes.
    """
    path = Path(path)
    if not path.is_file():
        return (path / ".metadata").is_file()

    with open(path, "rb") as file:
        head = file.read(9)
    if path.suffix.lower() in PICKLE_SUFFIXES or head.startswith(ZIP_MAGIC):
        return True

    # the header of a safetensors file may be 640 bytes long, which reads as a pickle of protocol 2
    is_safetensors = head[5:9] == b"\0\0\0{"
    has_magic = len(head) > 2 and head[0] == 0x80 and head[1] in PICKLE_PROTOCOLS
    return has_magic and not is_safetensors


def refuse_pickle(path: Path, remedy: str = "convert to safetensors") -> None:
    """Raise ValueError if the file is a pickle."""
    if is_pickle(path):
        raise ValueError(f"{path} is a pickle, which can run code, and was not opened: {remedy}")


def read_json(path: Path, limit: int = JSON_BYTES) -> object:
    """The JSON value in a file of at most `limit` bytes.

    Raises ValueError for a larger file and for whatever `parse_json` refuses, OSError if the file
    cannot be read.
    """
    with open(path, "rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it is larger than {limit:,} bytes")
    return parse_json(content)


def parse_json(content: bytes) -> object:
    """The JSON value in UTF-8 bytes.

    Raises ValueError for anything else, for a key that is given twice in one object, and for
    brackets that are nested too deeply.
    """
    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None


def _unique(pairs: list[tuple[str, object]]) -> dict:
    """The object of these pairs. Raises ValueError if two of them have the same key."""
    found = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key[:80]!r} is given twice")
        found[key] = value
    return found
