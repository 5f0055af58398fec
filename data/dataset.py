"""A dataset folder opened for reading: memory-mapped shards, and the documents of each split.

    manifest.json     sizes, hashes, vocabulary, splits (data/manifest.py)
    shard-00000.bin   token ids, uint16 or uint32; a document ends with the end-of-document id
    shard-00000.idx   uint64: where each document ends, in tokens from the start of the shard
    val.idx           uint64: the indices of the validation documents; all others are for training
    tokenizer.model   the sentencepiece model, if there is one, or
    tokenizer.json    of Hugging Face, and tokenizer_config.json with its end of a document

Opening checks sizes; `verify` hashes the files. data/writer.py writes such folders.
"""

import copy
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data.manifest import (
    MANIFEST,
    PREPARE_AGAIN,
    RESTORE,
    IntegrityError,
    Manifest,
    Shard,
    SplitSummary,
)
from data.storage import Storage

ENDLESS = 2**62  # tokens of a document: more than any has


def open_dataset(path: Path | str, verify: bool = False) -> "Dataset":
    """Open a dataset folder; with `verify`, after hashing every file."""
    dataset = Dataset(path)
    if verify:
        dataset.verify()
    return dataset


def check_vocab(dataset: "Dataset", model_vocab: int) -> None:
    """Raise ValueError if the ids of the data do not fit a model of `model_vocab` ids."""
    if dataset.vocab_size > model_vocab:
        raise ValueError(
            f"the data in {dataset.path} has a vocabulary of {dataset.vocab_size}, more than the "
            f"model's {model_vocab}: use --vocab_size {dataset.vocab_size} or more for the model, "
            "or prepare the data with a smaller vocabulary"
        )


class ShardReader:
    """The shards as one sequence of documents, memory-mapped, in the order of the files."""

    def __init__(self, shards: Sequence[Shard], storage: Storage):
        self._shards = shards
        self._storage = storage
        self.masked = storage.masked
        self._maps = [_memory_mapped(shard, storage.dtype) for shard in shards]

        ends = [_read_ends(shard) for shard in shards]
        counts = [len(shard_ends) for shard_ends in ends]
        self._first_document = np.cumsum([0, *counts])

        # where each document begins and ends in its shard
        begins = [np.concatenate([[0], shard_ends[:-1]]) for shard_ends in ends]
        self._begins = np.concatenate(begins).astype(np.int64)
        self.lengths = np.concatenate(ends).astype(np.int64) - self._begins

    def read(self, document: int, start: int, length: int) -> np.ndarray:
        """Ids [start, start + length) of a document, fewer at its end; a view into the file, or a
        copy if the dataset is masked.
        """
        return self._storage.ids(self._stored(document, start, length))

    def learned(self, document: int, start: int, length: int) -> np.ndarray:
        """Which of these tokens are targets of the loss, bool."""
        return self._storage.learned(self._stored(document, start, length))

    def begins_learned(self, documents: np.ndarray) -> np.ndarray:
        """Whether the first token of each of these documents is a target of the loss, bool."""
        shard_of = self._first_document.searchsorted(documents, side="right") - 1
        learned = np.empty(len(documents), dtype=bool)
        for shard, stored in enumerate(self._maps):
            inside = shard_of == shard
            first_tokens = stored[self._begins[documents[inside]]]
            learned[inside] = self._storage.learned(first_tokens)
        return learned

    def targets(self, document: int) -> np.ndarray:
        """The ids of a document that are targets of the loss."""
        return self._storage.targets(self._stored(document, 0, self.lengths[document]))

    def _stored(self, document: int, start: int, length: int) -> np.ndarray:
        shard = self._first_document.searchsorted(document, side="right") - 1
        length = min(length, self.lengths[document] - start)
        begin = self._begins[document] + start
        return self._maps[shard][begin : begin + length]

    def describe_bad_id(self, vocab_size: int) -> str | None:
        """Where the first id >= vocab_size is, in words; None if there is none."""
        for shard, stored in zip(self._shards, self._maps, strict=True):
            ids = self._storage.ids(stored)
            bad = np.flatnonzero(ids >= vocab_size)
            if len(bad):
                return (
                    f"{shard.ids.path} has the id {ids[bad[0]]} at token {bad[0]}, "
                    f"outside the vocabulary of {vocab_size}"
                )
        return None


def _memory_mapped(shard: Shard, dtype: np.dtype) -> np.ndarray:
    """The ids as a plain array, because slicing a np.memmap object takes ten times as long."""
    return np.memmap(shard.ids.path, dtype=dtype, mode="r").view(np.ndarray)


def _read_ends(shard: Shard) -> np.ndarray:
    """Where the documents of a shard end, uint64 [documents], rising to its number of tokens."""
    ends = np.fromfile(shard.ends.path, dtype="<u8")
    if len(ends) == 0 or ends[0] == 0 or ends[-1] != shard.tokens or not _is_rising(ends):
        raise IntegrityError(
            f"{shard.ends.path} is damaged: document ends must rise to {shard.tokens}: {RESTORE}"
        )
    return ends


def _is_rising(values: np.ndarray) -> bool:
    """Whether each value is larger than the one before it."""
    return bool((values[1:] > values[:-1]).all())


class Dataset:
    """A dataset folder opened for reading; sizes are checked now, hashes by `verify`.

    Attributes: path, manifest, vocab_size, eod_id, dtype, masked (whether some tokens are read but
    not learned), tokenizer_path and tokenizer_sha256 (None if the ids were made elsewhere),
    fingerprint (SHA-256 over all of it), splits ("train" and perhaps "val"). Raises ValueError if
    the folder is not a dataset, IntegrityError if it is damaged.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self.manifest = Manifest.open(self.path)
        self.vocab_size = self.manifest.vocab_size
        self.eod_id = self.manifest.eod_id
        self.dtype = self.manifest.storage.dtype
        self.masked = self.manifest.masked
        self.fingerprint = self.manifest.fingerprint

        tokenizer = self.manifest.tokenizer
        self.tokenizer_path = None if tokenizer is None else tokenizer.path
        self.tokenizer_sha256 = self.manifest.tokenizer_sha256

        self._reader = ShardReader(self.manifest.shards, self.manifest.storage)
        self._check_largest_ids()
        self.splits = self._open_splits()

    def split(self, name: str) -> "Split":
        """The documents of "train" or "val". Raises ValueError if there are none."""
        if name not in self.splits:
            raise ValueError(
                f"the data in {self.path} has no split {name!r} (it has {', '.join(self.splits)}): "
                "prepare it with a larger --val_fraction and at least two documents"
            )
        return self.splits[name]

    def tokenizer_files(self) -> list[Path]:
        """The files of the tokenizer, one or two; none if the ids were made elsewhere."""
        files = [self.manifest.tokenizer, self.manifest.tokenizer_settings]
        return [file.path for file in files if file is not None]

    def verify(self, known: dict[str, list[int]] | None = None) -> dict[str, list[int]]:
        """Hash the files and look at every id. Raises IntegrityError naming a damaged file.

        Returns a stamp of each file, which a later call takes as `known`: files whose stamp is
        still the same are not read again. The stamp has the time of the last change to the file's
        inode, which no program can set.
        """
        known = known or {}
        files = self.manifest.files()
        stamps = {file.name: _stamp(file.path) for file in files}

        changed = [file for file in files if stamps[file.name] != known.get(file.name)]
        for file in changed:
            file.check_hash()
        if changed:
            self.require_ids_in_vocab()
        return stamps

    def require_ids_in_vocab(self) -> None:
        """Raise IntegrityError naming file and offset of the first id outside the vocabulary."""
        words = self._reader.describe_bad_id(self.vocab_size)
        if words is not None:
            raise IntegrityError(f"{words}: {RESTORE}")

    def _check_largest_ids(self) -> None:
        for shard in self.manifest.shards:
            if shard.max_id >= self.vocab_size:
                self.require_ids_in_vocab()
                raise IntegrityError(
                    f"{self.path / MANIFEST}: {shard.ids.name} has max_id {shard.max_id}, outside "
                    f"the vocabulary of {self.vocab_size}: {PREPARE_AGAIN}"
                )

    def _open_splits(self) -> dict[str, "Split"]:
        # unsigned, so that a flipped top bit makes an index large rather than negative
        chosen = np.fromfile(self.manifest.validation.path, dtype="<u8")
        everything = np.arange(len(self._reader.lengths))
        if len(chosen) and (chosen[-1] >= len(everything) or not _is_rising(chosen)):
            raise IntegrityError(
                f"{self.path}: the list of validation documents is damaged: {PREPARE_AGAIN}"
            )

        chosen = chosen.astype(np.int64)
        documents = {"train": np.delete(everything, chosen), "val": chosen}
        return {
            name: Split(name, indices, self._reader, self.manifest.splits[name])
            for name, indices in documents.items()
            if len(indices)
        }


def in_words(lengths: range) -> str:
    """So many tokens."""
    if lengths.stop >= ENDLESS:
        return f"{lengths.start:,} tokens or more"
    if lengths.start == 1:
        return f"fewer than {lengths.stop:,} tokens"
    return f"{lengths.start:,} to {lengths.stop - 1:,} tokens"


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


class Split:
    """The documents of one split: `lengths` int64 [documents], `read`, and the writer's counts."""

    def __init__(
        self, name: str, documents: np.ndarray, reader: ShardReader, summary: SplitSummary
    ):
        self.name = name
        self._documents = documents
        self._reader = reader

        self.lengths: np.ndarray = reader.lengths[documents]
        self.num_documents = len(documents)
        self.num_tokens = summary.tokens
        self.source_bytes = summary.source_bytes
        self.unigram_entropy = summary.unigram_entropy

    def has(self, lengths: range | None) -> bool:
        """Whether there are documents of so many tokens; None: of any number."""
        return lengths is None or bool(self._chosen(lengths).any())

    def with_lengths(self, lengths: range) -> "Split":
        """Only the documents that have so many tokens; the bytes of their text are unknown, and the
        unigram entropy is that of the whole split. ValueError if there are none.
        """
        chosen = self._chosen(lengths)
        if not chosen.any():
            raise ValueError(
                f"the {self.name} split has no document of {in_words(lengths)} (they have "
                f"{self.lengths.min():,} to {self.lengths.max():,}): give another --context_length"
            )
        part = copy.copy(self)
        part._documents = self._documents[chosen]
        part.lengths = self.lengths[chosen]
        part.num_documents = len(part.lengths)
        part.num_tokens = int(part.lengths.sum())
        part.source_bytes = 0
        return part

    def _chosen(self, lengths: range) -> np.ndarray:
        return (self.lengths >= lengths.start) & (self.lengths < lengths.stop)

    def read(self, document: int, start: int, length: int) -> np.ndarray:
        """Ids [start, start + length) of a document, fewer at its end; a read-only view."""
        return self._reader.read(self._documents[document], start, length)

    def learned(self, document: int, start: int, length: int) -> np.ndarray:
        """Which of these tokens are targets of the loss, bool; all if the dataset is not masked."""
        return self._reader.learned(self._documents[document], start, length)

    def begins_learned(self) -> np.ndarray:
        """Whether the first token of each document is a target of the loss, bool [documents]."""
        return self._reader.begins_learned(self._documents)

    def bits_per_byte(self, nats_per_token: float) -> float:
        """A loss in nats per token as bits per byte of source text; nan if the bytes are unknown,
        or if some tokens have no loss.

        bits/byte = loss * tokens / (bytes * ln 2)
        """
        if not self.source_bytes or self._reader.masked:
            return math.nan
        return nats_per_token * self.num_tokens / (self.source_bytes * math.log(2))
