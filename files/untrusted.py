"""Files from elsewhere: JSON within bounds, and pickles, which are known by their name or first
bytes and never opened.

Imports nothing of ours.
"""

import json
from pathlib import Path

JSON_BYTES = 64 * 2**20  # a manifest of 100,000 shards has 40 MB
PICKLE_SUFFIXES = {".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".dill", ".distcp"}
PROTOCOLS = range(2, 6)


def is_pickle(path: Path) -> bool:
    """Whether a file is a pickle by its suffix or magic, or a zip, as torch.save writes them.
    Nothing of it is interpreted.

    A folder is one where its .metadata is, as torch.distributed.checkpoint writes it.
    """
    path = Path(path)
    if not path.is_file():
        return (path / ".metadata").is_file()
    with open(path, "rb") as file:
        head = file.read(9)
    # a safetensors header of 640 bytes begins as a pickle of protocol 2 does
    tensors = head[5:9] == b"\0\0\0{"
    magic = len(head) > 2 and head[0] == 0x80 and head[1] in PROTOCOLS and not tensors
    return path.suffix in PICKLE_SUFFIXES or magic or head.startswith(b"PK\3\4")


def refuse_pickle(path: Path, remedy: str = "convert to safetensors") -> None:
    """Raise ValueError for a pickle; it is not opened, for opening one runs whatever code its
    writer put there.
    """
    if is_pickle(path):
        raise ValueError(f"{path} is a pickle, which can run code, and was not opened: {remedy}")


def read_json(path: Path, limit: int = JSON_BYTES) -> object:
    """The JSON value in a file. Raises ValueError for what `parse_json` refuses and for more than
    `limit` bytes, OSError.
    """
    with open(path, "rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it is larger than {limit:,} bytes")
    return parse_json(content)


def parse_json(content: bytes) -> object:
    """JSON in UTF-8. Raises ValueError for anything else, a key given twice in one object, or
    brackets nested too deeply.
    """
    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None


def _unique(pairs: list[tuple[str, object]]) -> dict:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(
            f"the key {next(name for name in names if names.count(name) > 1)[:80]!r} is given twice"
        )
    return found
