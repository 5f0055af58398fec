"""The manifest of a dataset folder: one JSON file that names, sizes and hashes all the others.

`Manifest.open(folder)` is the only way to open a dataset on disk. What it returns has been checked:
the fields have their types and do not contradict each other, every file is a plain file inside the
folder and has the size that was written, and the tokenizer has its hash. The other files are hashed
by `Dataset.verify`.

The manifest is written last, so a folder without one is not a dataset. Its `checksum` is the
SHA-256 of everything else in it, so a flipped bit in the manifest itself is found too.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from base.durable import replacing, write_bytes
from base.untrusted import is_pickle, read_json
from data.storage import Storage, token_dtype

MANIFEST = "manifest.json"
MAGIC = "longhaul-dataset"
VERSION = 1
HASH_CHUNK = 1 << 22

PREPARE = "python -m data.prepare --input FILES --output DIR"
PREPARE_AGAIN = f"prepare the data again with `{PREPARE}`"
RESTORE = f"restore it, or {PREPARE_AGAIN}"

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
# what only some datasets have
OPTIONAL_FIELDS = {"masked": bool, "task": dict, "answer_id": int}
FILE_FIELDS = {"file": str, "bytes": int, "sha256": str}
HUGGING_FACE_FIELDS = {"ids_sha256": str, "settings": dict}
SPLIT_FIELDS = {"documents": int, "tokens": int, "source_bytes": int, "unigram_entropy": float}
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


class IntegrityError(ValueError):
    """The data on disk is damaged: it is not what its manifest says.

    The exit code is that of longhaul/exits.py.
    """

    exit_code = 3


class TokenizerMismatch(IntegrityError):
    """The tokenizer in the folder is not the one that made the ids: a mistake of the user."""

    exit_code = 2


# ---- what a manifest describes


@dataclass(frozen=True)
class StoredFile:
    """A file of the folder as it was written."""

    path: Path
    size: int
    sha256: str

    @property
    def name(self) -> str:
        return self.path.name

    def check_size(self) -> None:
        """Raise IntegrityError unless the file exists and has its size."""
        if not self.path.is_file():
            raise IntegrityError(f"{self.path} is missing: {RESTORE}")
        actual = self.path.stat().st_size
        if actual != self.size:
            raise IntegrityError(
                f"{self.path} is damaged: expected {self.size} bytes, found {actual}: {RESTORE}"
            )

    def check_hash(self) -> None:
        """Raise IntegrityError unless the file has its size and its SHA-256."""
        self.check_size()
        if sha256_file(self.path) != self.sha256:
            raise IntegrityError(
                f"{self.path} is damaged: its SHA-256 is not the manifest's: {RESTORE}"
            )

    def record(self) -> dict:
        """The JSON form."""
        return {"file": self.name, "bytes": self.size, "sha256": self.sha256}


@dataclass(frozen=True)
class Shard:
    """Token ids and where their documents end; `max_id` is the largest id."""

    ids: StoredFile
    ends: StoredFile
    tokens: int
    documents: int
    max_id: int

    def record(self) -> dict:
        """The JSON form."""
        return {
            "bin": self.ids.name,
            "idx": self.ends.name,
            "bytes": self.ids.size,
            "tokens": self.tokens,
            "documents": self.documents,
            "max_id": self.max_id,
            "bin_sha256": self.ids.sha256,
            "idx_sha256": self.ends.sha256,
        }


@dataclass(frozen=True)
class SplitSummary:
    """What the writer counted in a split; source_bytes is 0 if the text is unknown."""

    documents: int
    tokens: int
    source_bytes: int
    unigram_entropy: float


@dataclass(frozen=True)
class Manifest:
    """A dataset on disk; `fingerprint` is a SHA-256 over all of it.

    masked: whether some tokens are read but not learned (data/storage.py); task: what the ids mean,
    if they are those of a synthetic task (data/recall.py); answer_id: the token that stands before
    the answer at the end of a document, for rewards that compare answers.
    """

    folder: Path
    vocab_size: int
    eod_id: int
    shards: tuple[Shard, ...]
    splits: dict[str, SplitSummary]
    validation: StoredFile
    tokenizer: StoredFile | None
    tokenizer_settings: StoredFile | None  # next to a tokenizer.json: what ends a document
    tokenizer_sha256: str | None  # of a tokenizer.json: its map from tokens to ids
    sources: list[dict]
    fingerprint: str
    masked: bool = False
    task: dict | None = None
    answer_id: int | None = None

    @classmethod
    def open(cls, folder: Path | str) -> "Manifest":
        """Read and check the manifest of `folder`, and the sizes of all its files.

        Raises ValueError if there is no dataset, or one that was never sound or has another format,
        and IntegrityError if the manifest or a file was changed after it was written.
        """
        folder = Path(folder)
        content = _read(folder / MANIFEST)
        _check(folder / MANIFEST, content)
        manifest = _parse(folder, content)

        for file in manifest.files():
            file.check_size()
        manifest._check_tokenizer()
        return manifest

    @property
    def storage(self) -> Storage:
        """How the ids are stored."""
        return Storage.of(self.vocab_size, self.masked)

    def files(self) -> list[StoredFile]:
        """All files of the folder but the manifest and the tokenizer."""
        files = [self.validation]
        for shard in self.shards:
            files += [shard.ids, shard.ends]
        return files

    def _check_tokenizer(self) -> None:
        files = [self.tokenizer, self.tokenizer_settings]
        try:
            for file in files:
                if file is not None:
                    file.check_hash()
        except IntegrityError as error:
            raise TokenizerMismatch(
                f"the ids were made with another tokenizer than the one in their folder: {error}"
            ) from None


# ---- writing


def write_manifest(
    folder: Path,
    *,
    vocab_size: int,
    eod_id: int,
    shards: Iterable[Shard],
    splits: dict[str, SplitSummary],
    validation: StoredFile,
    tokenizer: dict | None,
    sources: Iterable[dict],
    masked: bool = False,
    task: dict | None = None,
    answer_id: int | None = None,
) -> None:
    """Write the manifest of the files in `folder` and force it to the disk, all of it or none."""
    content = {
        "magic": MAGIC,
        "version": VERSION,
        "dtype": token_dtype(vocab_size, masked),
        "vocab_size": vocab_size,
        "eod_id": eod_id,
        "shards": [shard.record() for shard in shards],
        "splits": {name: asdict(split) for name, split in splits.items()},
        "validation": validation.record(),
        "tokenizer": tokenizer,
        "sources": list(sources),
    }
    if masked:
        content["masked"] = True
    if task is not None:
        content["task"] = task
    if answer_id is not None:
        content["answer_id"] = answer_id
    content["checksum"] = _checksum(content)
    text = json.dumps(content, indent=1, sort_keys=True)
    with replacing(folder / MANIFEST) as temporary:
        write_bytes(temporary, text.encode())


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file's contents, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(HASH_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _checksum(content: dict) -> str:
    rest = {key: value for key, value in content.items() if key != "checksum"}
    canonical = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


# ---- reading


def _read(path: Path) -> dict:
    """The JSON of a manifest of this version whose checksum is right."""
    content = _read_object(path)
    if content.get("magic") != MAGIC:
        raise ValueError(f"{path} is not a dataset manifest: prepare the data with `{PREPARE}`")
    if content.get("version") != VERSION:
        raise ValueError(
            f"{path} has format version {content.get('version')!r}, but this code reads {VERSION}: "
            f"update the code, or {PREPARE_AGAIN}"
        )
    if content.get("checksum") != _checksum(content):
        raise IntegrityError(
            f"{path} was changed after it was written (its checksum differs): {RESTORE}"
        )
    return content


def _read_object(path: Path) -> dict:
    folder = path.parent
    if is_pickle(folder):
        raise ValueError(
            f"{folder} is a pickle, which can run code, and was not opened: give a dataset folder; "
            f"prepare one with `{PREPARE}`, or from ids with data.writer.write_dataset"
        )
    if not path.is_file():
        raise ValueError(
            f"{folder} holds no dataset ({MANIFEST} is missing): prepare one with `{PREPARE}`"
        )
    try:
        content = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): {RESTORE}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a dataset manifest: prepare the data with `{PREPARE}`")
    return content


def _parse(folder: Path, content: dict) -> Manifest:
    """The typed form of a manifest that was checked. ValueError for a file outside the folder."""
    dtype = np.dtype(content["dtype"])
    tokenizer = content["tokenizer"] or {}
    settings = tokenizer.get("settings")
    return Manifest(
        folder=folder,
        vocab_size=content["vocab_size"],
        eod_id=content["eod_id"],
        shards=tuple(parse_shard(folder, record, dtype) for record in content["shards"]),
        splits={name: _parse_split(record) for name, record in content["splits"].items()},
        validation=_parse_file(folder, content["validation"]),
        tokenizer=_parse_file(folder, tokenizer) if tokenizer else None,
        tokenizer_settings=_parse_file(folder, settings) if settings else None,
        tokenizer_sha256=tokenizer.get("ids_sha256", tokenizer.get("sha256")),
        sources=content["sources"],
        fingerprint=content["checksum"],
        masked=content.get("masked", False),
        task=content.get("task"),
        answer_id=content.get("answer_id"),
    )


def parse_shard(folder: Path, record: dict, dtype: np.dtype) -> Shard:
    """A shard of `folder` as `Shard.record` describes it."""
    tokens = record["tokens"]
    documents = record["documents"]
    ids = StoredFile(_inside(folder, record["bin"]), tokens * dtype.itemsize, record["bin_sha256"])
    ends = StoredFile(_inside(folder, record["idx"]), documents * 8, record["idx_sha256"])
    return Shard(ids, ends, tokens, documents, record["max_id"])


def _parse_split(record: dict) -> SplitSummary:
    return SplitSummary(**{name: record[name] for name in SPLIT_FIELDS})


def _parse_file(folder: Path, record: dict) -> StoredFile:
    return StoredFile(_inside(folder, record["file"]), record["bytes"], record["sha256"])


def _inside(folder: Path, name: str) -> Path:
    """The file `name` in `folder`. ValueError for a path out of it, or a symbolic link."""
    path = folder / name
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name) or path.is_symlink():
        raise ValueError(
            f"{folder / MANIFEST} names {name!r}, which is not a plain file inside the dataset: "
            f"do not use it, {PREPARE_AGAIN}"
        )
    return path


# ---- checking


def _check(path: Path, content: dict) -> None:
    """ValueError unless the fields have their types and agree with each other."""
    _check_fields(path, content, FIELDS)
    _check_fields(
        path, content, {name: OPTIONAL_FIELDS[name] for name in OPTIONAL_FIELDS & content.keys()}
    )
    for shard in content["shards"]:
        _check_fields(path, shard, SHARD_FIELDS)
    for split in content["splits"].values():
        _check_fields(path, split, SPLIT_FIELDS)
    _check_fields(path, content["validation"], FILE_FIELDS)
    if content["tokenizer"] is not None:
        _check_fields(path, content["tokenizer"], FILE_FIELDS)
        if "ids_sha256" in content["tokenizer"]:
            _check_fields(path, content["tokenizer"], HUGGING_FACE_FIELDS)
            _check_fields(path, content["tokenizer"]["settings"], FILE_FIELDS)

    _check_splits(path, content)
    _check_vocabulary(path, content)
    if "task" in content:
        _check_task(path, content["task"], content["vocab_size"])
    if not 0 <= content.get("answer_id", 0) < content["vocab_size"]:
        raise ValueError(
            f"{path}: field 'answer_id' is wrong ({content['answer_id']}): {PREPARE_AGAIN}"
        )


def _check_task(path: Path, task: dict, vocab_size: int) -> None:
    """ValueError unless the task has ranges of ids, and an id or none before a question."""
    ranges = [task.get(name) for name in ("keys", "values", "noise")]
    query = task.get("query")
    sound = (
        task.keys() == {"keys", "values", "noise", "query"}
        and all(_is_range(one, vocab_size) for one in ranges)
        and (query is None or _is_range([query, vocab_size], vocab_size))
    )
    if not sound:
        raise ValueError(f"{path}: field 'task' is wrong ({str(task)[:80]}): {PREPARE_AGAIN}")


def _is_range(value: object, vocab_size: int) -> bool:
    """Whether it is [first, stop] of ids."""
    if not isinstance(value, list) or len(value) != 2:
        return False
    return all(type(one) is int for one in value) and 0 <= value[0] < value[1] <= vocab_size


def _check_fields(path: Path, content: object, fields: dict) -> None:
    if not isinstance(content, dict):
        raise ValueError(f"{path} is malformed: {PREPARE_AGAIN}")
    for name, kind in fields.items():
        if name not in content or not _is_kind(content[name], kind):
            raise ValueError(
                f"{path}: field {name!r} is missing or wrong ({content.get(name)!r}): "
                f"{PREPARE_AGAIN}"
            )


def _is_kind(value: object, kind: type | tuple) -> bool:
    """Whether a JSON value has this type; true and false are not numbers, and no number is < 0."""
    if isinstance(value, bool):
        return kind is bool
    if not isinstance(value, kind):
        return False
    return kind is not int or value >= 0


def _check_splits(path: Path, content: dict) -> None:
    """ValueError unless the splits hold the documents of the shards, and there are some."""
    shards = content["shards"]
    if "train" not in content["splits"] or not shards:
        raise ValueError(f"{path} describes an empty dataset: {PREPARE_AGAIN}")

    documents = sum(shard["documents"] for shard in shards)
    validation = content["validation"]["bytes"] // 8
    expected = {"train": documents - validation}
    if validation:
        expected["val"] = validation
    found = {name: split["documents"] for name, split in content["splits"].items()}
    if expected["train"] <= 0 or found != expected:
        raise ValueError(
            f"{path}: documents per split are {found}, but the shards hold {expected}: "
            f"{PREPARE_AGAIN}"
        )

    if not all(shard["tokens"] and shard["documents"] for shard in shards):
        raise ValueError(f"{path} describes an empty shard: {PREPARE_AGAIN}")


def _check_vocabulary(path: Path, content: dict) -> None:
    vocab_size = content["vocab_size"]
    masked = content.get("masked", False)
    dtype = token_dtype(vocab_size, masked)
    if content["dtype"] != dtype:
        # ids that did not fit when they were written, or a file that was changed later
        kind = ValueError if dtype == "uint32" else IntegrityError
        raise kind(
            f"{path}: a vocabulary of {vocab_size} needs {dtype} ids, but the manifest says "
            f"{content['dtype']!r}: {PREPARE_AGAIN}"
        )
    if content["eod_id"] >= vocab_size:
        raise ValueError(
            f"{path}: eod_id {content['eod_id']} is outside the vocabulary of {vocab_size}: "
            f"{PREPARE_AGAIN}"
        )
