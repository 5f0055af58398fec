"""The manifest of a dataset folder: one JSON file that names, sizes and hashes everything else.

Imports files.untrusted. It is written last, so a folder without one is not a dataset. Its
`checksum` is the SHA-256 of the rest of it in canonical JSON, so that a flipped bit in the manifest
itself is found as well.
"""

import hashlib
import json
import re
from pathlib import Path

from files.durable import write_bytes
from files.untrusted import is_pickle, read_json

MANIFEST = "manifest.json"  # the file that makes a folder a dataset
MAGIC = "longhaul-dataset"
VERSION = 1
HASH_BLOCK = 1 << 22
PREPARE = "python -m data.prepare --input FILES --output DIR"
SHARD_FIELDS = {
    "bin": str,
    "idx": str,
    "bytes": int,
    "tokens": int,
    "documents": int,
    "max_id": int,
    "bin_sha256": str,
    "idx_sha256": str,
}
FILE_FIELDS = {"file": str, "bytes": int, "sha256": str}
SPLIT_FIELDS = {"documents": int, "tokens": int, "source_bytes": int, "unigram_entropy": float}
FIELDS = {
    "dtype": str,
    "vocab_size": int,
    "eod_id": int,
    "tokenizer": (dict, type(None)),
    "sources": list,
    "splits": dict,
    "validation": dict,
    "shards": list,
}


class IntegrityError(ValueError):
    """The data on disk is damaged: not what its manifest says. `exit_code`: as longhaul/exits.py
    has it.
    """

    exit_code = 3


class TokenizerMismatch(IntegrityError):
    """The tokenizer beside the ids is not the one that made them: a mistake of whoever put it
    there, not of the disk.
    """

    exit_code = 2


def token_dtype(vocab_size: int) -> str:
    """The storage type: "uint16" when every id fits, else "uint32" (151,936 ids in uint16 would
    corrupt silently).
    """
    if not 0 < vocab_size <= 1 << 32:
        raise ValueError(f"vocab_size is {vocab_size}: allowed are 1 to 2^32")
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's contents, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(HASH_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def write_manifest(folder: Path, content: dict) -> None:
    """Write `content` with magic, version and checksum; durable when it returns."""
    content = {"magic": MAGIC, "version": VERSION, **content}
    content["checksum"] = _checksum(content)
    text = json.dumps(content, indent=1, sort_keys=True)
    write_bytes(folder / MANIFEST, text.encode())


def read_manifest(folder: Path) -> dict:
    """Read and check the manifest of `folder`.

    Raises ValueError when it is missing, garbled, of another version or contradicts itself,
    IntegrityError when it was changed after it was written.
    """
    path = folder / MANIFEST
    content = _parse(path)
    if content.get("magic") != MAGIC:
        raise ValueError(f"{path} is not a dataset manifest: prepare the data with `{PREPARE}`")
    if content.get("version") != VERSION:
        raise ValueError(
            f"{path} has format version {content.get('version')!r}, this code reads {VERSION}: "
            f"update the code, or prepare the data again with `{PREPARE}`"
        )
    if content.get("checksum") != _checksum(content):
        raise IntegrityError(
            f"{path} was changed after it was written (its checksum differs): "
            f"restore it, or prepare the data again with `{PREPARE}`"
        )
    _check_fields(path, content, FIELDS)
    _check_values(path, content)
    return content


def inside(folder: Path, name: str) -> Path:
    """The path of the file `name` in `folder`. Raises ValueError for a path out of it, or a
    symbolic link.
    """
    path = folder / name
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name) or path.is_symlink():
        raise ValueError(
            f"{folder / MANIFEST} names {name!r}, which is not a plain file inside the dataset: "
            f"do not use it, prepare the data again with `{PREPARE}`"
        )
    return path


def check_file(path: Path, size: int, sha256: str | None = None) -> None:
    """Raise IntegrityError unless `path` is a file of `size` bytes (and, where given, of this
    hash).
    """
    if not path.is_file():
        raise IntegrityError(
            f"{path} is missing: restore it, or prepare the data again with `{PREPARE}`"
        )
    if (actual := path.stat().st_size) != size:
        raise IntegrityError(
            f"{path} is damaged: expected {size} bytes, found {actual}: "
            f"restore it, or prepare the data again with `{PREPARE}`"
        )
    if sha256 is not None and sha256_file(path) != sha256:
        raise IntegrityError(
            f"{path} is damaged: its SHA-256 is not the manifest's: "
            f"restore it, or prepare the data again with `{PREPARE}`"
        )


def _checksum(content: dict) -> str:
    rest = {key: value for key, value in content.items() if key != "checksum"}
    return hashlib.sha256(
        json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def _parse(path: Path) -> dict:
    if is_pickle(path.parent):
        raise ValueError(
            f"{path.parent} is a pickle, which can run code, and was not opened: give a dataset folder; "
            f"prepare one with `{PREPARE}`, from ids with data.shards.write_dataset"
        )
    if not path.is_file():
        raise ValueError(
            f"{path.parent} holds no dataset ({MANIFEST} is missing): prepare one with `{PREPARE}`"
        )
    try:
        content = read_json(path)
    except ValueError as error:
        raise ValueError(
            f"{path} is not JSON ({error}): restore it, or prepare the data again with `{PREPARE}`"
        ) from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a dataset manifest: prepare the data with `{PREPARE}`")
    return content


def _check_fields(path: Path, content: object, fields: dict) -> None:
    if not isinstance(content, dict):
        raise ValueError(f"{path} is malformed: prepare the data again with `{PREPARE}`")
    for name, kind in fields.items():
        value = content.get(name)
        if (
            name not in content
            or not isinstance(value, kind)
            or isinstance(value, bool)
            or (kind is int and value < 0)
        ):
            raise ValueError(
                f"{path}: field {name!r} is missing or wrong ({value!r}): "
                f"prepare the data again with `{PREPARE}`"
            )


def _check_values(path: Path, content: dict) -> None:
    for shard in content["shards"]:
        _check_fields(path, shard, SHARD_FIELDS)
    for split in content["splits"].values():
        _check_fields(path, split, SPLIT_FIELDS)
    _check_fields(path, content["validation"], FILE_FIELDS)
    if content["tokenizer"] is not None:
        _check_fields(path, content["tokenizer"], FILE_FIELDS)
    if "train" not in content["splits"] or not content["shards"]:
        raise ValueError(
            f"{path} describes an empty dataset: prepare the data again with `{PREPARE}`"
        )
    _check_split_sizes(path, content)
    if not all(shard["tokens"] and shard["documents"] for shard in content["shards"]):
        raise ValueError(
            f"{path} describes an empty shard: prepare the data again with `{PREPARE}`"
        )
    if content["dtype"] != (dtype := token_dtype(content["vocab_size"])):
        # ids that never fitted, or a file that was changed
        kind = ValueError if dtype == "uint32" else IntegrityError
        raise kind(
            f"{path}: a vocabulary of {content['vocab_size']} is stored as {dtype}, not as "
            f"{content['dtype']!r}: prepare the data again with `{PREPARE}`"
        )
    if content["eod_id"] >= content["vocab_size"]:
        raise ValueError(
            f"{path}: eod_id {content['eod_id']} is outside the vocabulary of {content['vocab_size']}: "
            f"prepare the data again with `{PREPARE}`"
        )


def _check_split_sizes(path: Path, content: dict) -> None:
    documents = {name: split["documents"] for name, split in content["splits"].items()}
    held = {"val": content["validation"]["bytes"] // 8}
    expected = {
        "train": sum(shard["documents"] for shard in content["shards"]) - held["val"],
        **held,
    }
    if not expected["train"] > 0 or documents != {name: n for name, n in expected.items() if n}:
        raise ValueError(
            f"{path}: the splits {documents} are not the documents of the shards ({expected}): "
            f"prepare the data again with `{PREPARE}`"
        )
