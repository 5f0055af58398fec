"""A dataset folder opened for reading: memory-mapped shards, and the documents of each split.

    manifest.json     sizes, hashes, vocabulary, splits (data/manifest.py)
    shard-00000.bin   token ids, uint16 or uint32; a document ends with the end-of-document id
    shard-00000.idx   uint64: where each document ends, in tokens from the start of the shard
    val.idx           uint64: the indices of the validation documents; all others are for training
    tokenizer.model   the sentencepiece model, if there is one, or
    tokenizer.json    of Hugging Face, and tokenizer_config.json with its end of a document

Opening checks sizes and hashes the .idx files; `verify` hashes all. data/writer.py writes such
folders.
"""

import copy
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data.manifest import Manifest, Shard
from data.storage import Storage

ENDLESS = 2**62  # tokens of a document: more than any has
COUNT_TOKENS = 1 << 24  # marks are read so many at a time


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


class Split:
    """Documents in memory-mapped shards: at first all of them, in the order of the files.

    Attributes: name, masked, lengths (int64 [documents]); of a part that a manifest describes also
    source_bytes and unigram_entropy, as the writer counted them.
    """

    def __init__(self, shards: Sequence[Shard], storage: Storage):
        self.name = "all"
        self.masked = storage.masked
        self._storage = storage
        self._maps = [_memory_mapped(shard, storage.dtype) for shard in shards]

        # the shard of each document, and where it begins there
        ends = [np.fromfile(shard.ends.path, dtype="<i8") for shard in shards]
        self._documents = np.arange(sum(map(len, ends)))
        self._shards = np.repeat(np.arange(len(shards)), [len(one) for one in ends])
        self.lengths = np.concatenate([np.diff(one, prepend=0) for one in ends])
        self._begins = np.concatenate(ends) - self.lengths

    def part(
        self, chosen: np.ndarray, name: str, source_bytes: int = 0, entropy: float = math.nan
    ) -> "Split":
        """Only the documents of these indices, or of this mask."""
        part = copy.copy(self)
        part.name = name
        part.source_bytes = source_bytes
        part.unigram_entropy = entropy
        part._documents = self._documents[chosen]
        part._shards = self._shards[chosen]
        part._begins = self._begins[chosen]
        part.lengths = self.lengths[chosen]
        return part

    def with_lengths(self, lengths: range) -> "Split":
        """Only the documents that have so many tokens; the bytes of their text are unknown, and the
        unigram entropy is that of the whole split.
        """
        return self.part(self._having(lengths), self.name, entropy=self.unigram_entropy)

    def has(self, lengths: range | None) -> bool:
        """Whether there are documents of so many tokens; None: of any number."""
        return lengths is None or bool(self._having(lengths).any())

    def _having(self, lengths: range) -> np.ndarray:
        return (self.lengths >= lengths.start) & (self.lengths < lengths.stop)

    @property
    def num_documents(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def read(self, document: int, start: int, length: int) -> np.ndarray:
        """Ids [start, start + length) of a document, fewer at its end; a read-only view into the
        file, or a copy if the dataset is masked.
        """
        return self._storage.ids(self._stored(document, start, length))

    def learned(self, document: int, start: int, length: int) -> np.ndarray:
        """Which of these tokens are targets of the loss, bool; all if the dataset is not masked."""
        return self._storage.learned(self._stored(document, start, length))

    def targets(self, document: int) -> np.ndarray:
        """The ids of a document that are targets of the loss."""
        return self._storage.targets(self._stored(document, 0, self.lengths[document]))

    def count_targets(
        self, document: np.ndarray, start: np.ndarray, length: np.ndarray
    ) -> np.ndarray:
        """The targets of pieces of documents, int64 [pieces]: of each piece, the learned tokens
        that one of its tokens precedes in the document.
        """
        begin = self._begins[document] + start + 1
        end = np.minimum(begin + length, self._begins[document] + self.lengths[document])
        if not self.masked:
            return end - begin

        counts = np.zeros(len(begin), np.int64)
        for shard, stored in enumerate(self._maps):
            inside = np.flatnonzero(self._shards[document] == shard)
            for first in range(0, len(stored), COUNT_TOKENS):
                learned = self._storage.learned(stored[first : first + COUNT_TOKENS])
                places = first + np.flatnonzero(learned)
                counts[inside] += places.searchsorted(end[inside])
                counts[inside] -= places.searchsorted(begin[inside])
        return counts

    def document_targets(self) -> np.ndarray:
        """The targets of each document, int64 [documents]: its first token is none."""
        documents = np.arange(self.num_documents)
        return self.count_targets(documents, np.zeros_like(documents), self.lengths)

    def begins_learned(self) -> np.ndarray:
        """Whether the first token of each document is a target of the loss, bool [documents]."""
        first = np.empty(self.num_documents, self._storage.dtype)
        for shard, stored in enumerate(self._maps):
            inside = self._shards == shard
            first[inside] = stored[self._begins[inside]]
        return self._storage.learned(first)

    def _stored(self, document: int, start: int, length: int) -> np.ndarray:
        length = min(length, self.lengths[document] - start)
        begin = self._begins[document] + start
        return self._maps[self._shards[document]][begin : begin + length]

    def bits_per_byte(self, nats_per_token: float) -> float:
        """A loss in nats per token as bits per byte of source text; nan if the bytes are unknown,
        or if some tokens have no loss.

        bits/byte = loss * tokens / (bytes * ln 2)
        """
        if not self.source_bytes or self.masked:
            return math.nan
        return nats_per_token * self.num_tokens / (self.source_bytes * math.log(2))


def _memory_mapped(shard: Shard, dtype: np.dtype) -> np.ndarray:
    """The ids as a plain array, because slicing a np.memmap object takes ten times as long."""
    return np.memmap(shard.ids.path, dtype=dtype, mode="r").view(np.ndarray)


class Dataset:
    """A dataset folder opened for reading; the hashes of the shards are checked by `verify`.

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

        tokenizer = self.tokenizer_files()
        self.tokenizer_path = tokenizer[0] if tokenizer else None
        self.tokenizer_sha256 = self.manifest.tokenizer_sha256

        self.splits = self._open_splits()

    def split(self, name: str) -> Split:
        """The documents of "train" or "val". Raises ValueError if there are none."""
        if name not in self.splits:
            raise ValueError(
                f"the data in {self.path} has no split {name!r} (it has {', '.join(self.splits)}): "
                "prepare it with a larger --val_fraction and at least two documents"
            )
        return self.splits[name]

    def tokenizer_files(self) -> list[Path]:
        """The files of the tokenizer, one or two; none if the ids were made elsewhere."""
        return [file.path for file in self.manifest.tokenizer]

    def verify(self, known: dict[str, list[int]] | None = None) -> dict[str, list[int]]:
        """Hash the files. Raises IntegrityError naming a damaged one.

        Returns a stamp of each file, which a later call takes as `known`: files whose stamp is
        still the same are not read again. The stamp has the time of the last change to the file's
        inode, which no program can set.
        """
        known = known or {}
        files = self.manifest.files()
        stamps = {file.name: _stamp(file.path) for file in files}

        for file in files:
            if stamps[file.name] != known.get(file.name):
                file.check_hash()
        return stamps

    def _open_splits(self) -> dict[str, Split]:
        everything = Split(self.manifest.shards, self.manifest.storage)
        validation = np.zeros(everything.num_documents, dtype=bool)
        validation[np.fromfile(self.manifest.validation.path, dtype="<i8")] = True
        found = {}
        for name, chosen in (("train", ~validation), ("val", validation)):
            if chosen.any():
                counted = self.manifest.splits[name]
                found[name] = everything.part(
                    chosen, name, counted.source_bytes, counted.unigram_entropy
                )
        return found


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
