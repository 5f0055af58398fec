"""The manifest of a dataset folder: one JSON file that names, sizes and hashes all the others.

`Manifest.open(folder)` is the only way to open a dataset on disk. What it returns has been checked:
every file is a plain file inside the folder and has the size that was written, and the tokenizer
and the lists of documents have their hashes. The shards are hashed by `Dataset.verify`.

The manifest is written last, so a folder without one is not a dataset. Its `checksum` is the
SHA-256 of everything else in it, so a flipped bit in the manifest itself is found too.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from base.durable import replacing, write_bytes
from base.untrusted import read_json, refuse_pickle
from data.storage import Storage, token_dtype

MANIFEST = "manifest.json"
MAGIC = "longhaul-dataset"
VERSION = 1

PREPARE = "python -m data.prepare --input FILES --output DIR"
PREPARE_AGAIN = f"prepare the data again with `{PREPARE}`"
RESTORE = f"restore it, or {PREPARE_AGAIN}"


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
    the answer at the end of a document, for rewards that compare answers; losses: which characters
    the tokenizer did not give back, if there are any (data/losses.py).
    """

    folder: Path
    vocab_size: int
    eod_id: int
    shards: tuple[Shard, ...]
    splits: dict[str, SplitSummary]
    validation: StoredFile
    tokenizer: tuple[StoredFile, ...]  # with a tokenizer.json, also what ends a document
    tokenizer_sha256: str | None  # of a tokenizer.json: its map from tokens to ids
    sources: list[dict]
    fingerprint: str
    masked: bool = False
    task: dict | None = None
    answer_id: int | None = None
    losses: dict | None = None

    @classmethod
    def open(cls, folder: Path | str) -> "Manifest":
        """Read and check the manifest of `folder`, the sizes of its shards and the other hashes.

        Raises ValueError if there is no dataset, or one of another format, and IntegrityError if
        the manifest or a file was changed after it was written.
        """
        path = Path(folder, MANIFEST)
        manifest = _parse(path.parent, _read(path))
        for file in manifest.files():
            if file.path.suffix == ".idx":  # small, and read at once
                file.check_hash()
            else:
                file.check_size()
        for file in manifest.tokenizer:
            try:
                file.check_hash()
            except IntegrityError as error:
                raise TokenizerMismatch(
                    "the ids were made with another tokenizer than the one in their folder: "
                    f"{error}"
                ) from None
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


# ---- writing


def write_manifest(folder: Path, content: dict) -> None:
    """Write what describes the files in `folder` and force it to the disk, all of it or none."""
    dtype = token_dtype(content["vocab_size"], bool(content.get("masked")))
    content = {"magic": MAGIC, "version": VERSION, "dtype": dtype, **content}
    content["checksum"] = _checksum(content)
    text = json.dumps(content, indent=1, sort_keys=True)
    with replacing(folder / MANIFEST) as temporary:
        write_bytes(temporary, text.encode())


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file's contents, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksum(content: dict) -> str:
    rest = {key: value for key, value in content.items() if key != "checksum"}
    canonical = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


# ---- reading


def _read(path: Path) -> dict:
    """The JSON of a manifest of this version whose checksum is right."""
    folder = path.parent
    refuse_pickle(folder, f"give a dataset folder; prepare one with `{PREPARE}`")
    if not path.is_file():
        raise ValueError(
            f"{folder} holds no dataset ({MANIFEST} is missing): prepare one with `{PREPARE}`"
        )
    try:
        content = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): {RESTORE}") from None
    if not isinstance(content, dict) or content.get("magic") != MAGIC:
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


def _parse(folder: Path, content: dict) -> Manifest:
    """The typed form of a manifest. ValueError for a file outside the folder."""
    masked = bool(content.get("masked"))
    dtype = Storage.of(content["vocab_size"], masked).dtype
    tokenizer = content["tokenizer"] or {}
    tokenizer_files = [tokenizer, tokenizer.get("settings")]
    validation = _parse_file(folder, content["validation"])
    splits = ("train", "val") if validation.size else ("train",)
    return Manifest(
        folder=folder,
        vocab_size=content["vocab_size"],
        eod_id=content["eod_id"],
        shards=tuple(parse_shard(folder, record, dtype) for record in content["shards"]),
        splits={name: SplitSummary(**content["splits"][name]) for name in splits},
        validation=validation,
        tokenizer=tuple(_parse_file(folder, record) for record in tokenizer_files if record),
        tokenizer_sha256=tokenizer.get("ids_sha256", tokenizer.get("sha256")),
        sources=content["sources"],
        fingerprint=content["checksum"],
        masked=masked,
        task=content.get("task"),
        answer_id=content.get("answer_id"),
        losses=content.get("losses"),
    )


def parse_shard(folder: Path, record: dict, dtype: np.dtype) -> Shard:
    """A shard of `folder` as `Shard.record` describes it."""
    tokens = record["tokens"]
    documents = record["documents"]
    ids = StoredFile(_inside(folder, record["bin"]), tokens * dtype.itemsize, record["bin_sha256"])
    ends = StoredFile(_inside(folder, record["idx"]), documents * 8, record["idx_sha256"])
    return Shard(ids, ends, tokens, documents, record["max_id"])


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
