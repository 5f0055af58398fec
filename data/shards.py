"""A dataset folder: the one writer for ids from any tokenizer, and its memory-mapped reader.

    manifest.json     sizes, hashes, vocabulary, splits (manifest.py)
    shard-00000.bin   token ids, uint16 or uint32; a document ends with the end-of-document id
    shard-00000.idx   uint64: where each document of the shard ends, in tokens from the shard's start
    val.idx           uint64: the indices of the validation documents; all others are for training
    tokenizer.model   the sentencepiece model, where there is one

Imports data.manifest, files.folders and data.order. The folder is built beside its final place and
renamed, so it is there whole or not at all; a killed preparation leaves a `.tmp-NAME` folder, which
the next one clears and refills with the same bytes.
"""

import hashlib
import math
import os
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.manifest import (
    MANIFEST,
    PREPARE,
    IntegrityError,
    TokenizerMismatch,
    check_file,
    inside,
    read_manifest,
    sha256_file,
    token_dtype,
    write_manifest,
)
from data.order import mix
from files import durable

__all__ = [
    "Dataset",
    "IntegrityError",
    "Split",
    "TokenizedDocument",
    "check_vocab",
    "open_dataset",
    "write_dataset",
]
SHARD_TOKENS = 1 << 27  # 256 MiB of uint16
COUNT_TOKENS = 1 << 20  # unigram counts are taken over this many tokens at a time
TOKENIZER_FILE = "tokenizer.model"
VALIDATION_FILE = "val.idx"


class TokenizedDocument(NamedTuple):
    """One document's ids (any integer array) and the UTF-8 bytes of text that they stand for (0:
    unknown).
    """

    tokens: np.ndarray
    source_bytes: int = 0


def write_dataset(
    documents: Iterable[TokenizedDocument | np.ndarray],
    output: Path | str,
    *,
    vocab_size: int,
    eod_id: int,
    tokenizer: Path | str | None = None,
    sources: Iterable[dict] = (),
    val_fraction: float = 0.01,
    shard_tokens: int = SHARD_TOKENS,
) -> "Dataset":
    """Write documents of token ids, from any tokenizer, as a new dataset folder `output`, and open
    it.

    Each document gets a closing `eod_id` unless it has one; empty documents are left out. `sources`
    is provenance for the manifest. Raises ValueError when `output` holds something, an id is not
    below `vocab_size`, or there is no text.
    """
    if not 0 <= eod_id < vocab_size:
        raise ValueError(
            f"eod_id is {eod_id}, outside the vocabulary of {vocab_size}: allowed are 0 to {vocab_size - 1}"
        )
    require_fraction(val_fraction)
    output = Path(output)
    require_new(output)
    with durable.building(output) as folder:
        writer = _Writer(folder, vocab_size, eod_id, shard_tokens)
        for document in documents:
            writer.add(
                document if isinstance(document, TokenizedDocument) else TokenizedDocument(document)
            )
        content = writer.finish(val_fraction)
        content["tokenizer"] = _store_tokenizer(tokenizer, folder)
        content["sources"] = list(sources)
        write_manifest(folder, content)
        require_new(output)  # still: the folder is renamed now
    return Dataset(output)


def require_new(output: Path) -> None:
    """Raise ValueError unless `output` does not exist yet or is an empty folder."""
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise ValueError(f"output {output} is not a folder: choose another --output")
    if (output / MANIFEST).exists():
        raise ValueError(
            f"output {output} already holds a dataset: choose another --output, or delete it first"
        )
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"output {output} is not empty: choose another --output")

    parent = next(parent for parent in output.absolute().parents if parent.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(
            f"output {output} cannot be made: {parent} is not a folder that you may write to: "
            "choose another --output"
        )


def require_fraction(val_fraction: float) -> None:
    """Raise ValueError unless 0 <= val_fraction < 1."""
    if not 0 <= val_fraction < 1:
        raise ValueError(
            f"val_fraction is {val_fraction}: allowed are 0 (no validation split) up to below 1"
        )


def choose_validation(lengths: np.ndarray, fraction: float) -> np.ndarray:
    """The indices, ascending, of whole documents that hold about `fraction` of all tokens, picked
    by a hash of the index.

    Half of them come from the longer documents (those that hold half of the tokens), so that long
    context is validated too; none takes more than half. With two documents or more and a positive
    fraction at least one is chosen.
    """
    if fraction == 0 or len(lengths) < 2:
        return np.zeros(0, dtype=np.int64)
    share = fraction * float(lengths.sum()) / 2
    shuffled = np.argsort(mix(np.arange(1, len(lengths) + 1, dtype=np.uint64)), kind="stable")
    shuffled = shuffled[lengths[shuffled] <= share]
    if len(shuffled) == 0:
        return np.array([int(lengths.argmin())], dtype=np.int64)
    sizes = np.sort(lengths[shuffled])
    median = sizes[np.cumsum(sizes).searchsorted(sizes.sum() / 2)]
    is_long = lengths[shuffled] >= median
    chosen = _take(shuffled[is_long], lengths, share) + _take(shuffled[~is_long], lengths, share)
    return np.array(sorted(chosen), dtype=np.int64)


def _take(documents: np.ndarray, lengths: np.ndarray, budget: float) -> list[int]:
    """The documents that fit into what is left of `budget` tokens, in order."""
    chosen, shortest = [], lengths[documents].min(initial=0)
    for document in documents.tolist():
        if budget < shortest:
            break
        if lengths[document] <= budget:
            chosen.append(document)
            budget -= lengths[document]
    return chosen


def unigram_entropy(counts: np.ndarray) -> float:
    """H = -sum_v p_v ln p_v of token counts [V], in nats per token: the loss of the best model
    without context.
    """
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def check_vocab(dataset: "Dataset", model_vocab: int) -> None:
    """Raise ValueError when the data's ids do not fit a model of `model_vocab` ids."""
    if dataset.vocab_size > model_vocab:
        raise ValueError(
            f"the data in {dataset.path} has a vocabulary of {dataset.vocab_size}, more than the model's "
            f"{model_vocab}: use --vocab_size {dataset.vocab_size} or more for the model, "
            f"or prepare the data with a smaller vocabulary"
        )


def open_dataset(path: Path | str, verify: bool = False) -> "Dataset":
    """Open a dataset folder; with `verify` every file is hashed again first."""
    dataset = Dataset(path)
    if verify:
        dataset.verify()
    return dataset


class _Writer:
    """Fills shards in document order, hashing and counting on the way."""

    def __init__(self, folder: Path, vocab_size: int, eod_id: int, shard_tokens: int):
        self.folder, self.vocab_size, self.eod_id, self.shard_tokens = (
            folder,
            vocab_size,
            eod_id,
            shard_tokens,
        )
        self.dtype = np.dtype(token_dtype(vocab_size))
        self.lengths, self.source_bytes = array("q"), array("q")
        self.counts = np.zeros(vocab_size, dtype=np.int64)
        self._uncounted, self._num_uncounted = [], 0
        self.shards: list[dict] = []
        self._file = None

    def add(self, document: TokenizedDocument) -> None:
        """Append one document. Raises ValueError for an id that is not an integer in [0,
        vocab_size).
        """
        tokens = self._checked(np.asarray(document.tokens))
        if len(tokens) == 0:
            return
        if tokens[-1] != self.eod_id:
            tokens = np.append(tokens, self.dtype.type(self.eod_id))
        if self._file is not None and self._ends[-1] + len(tokens) > self.shard_tokens:
            self._close_shard()
        if self._file is None:
            self._open_shard()
        self._append(tokens)
        self.lengths.append(len(tokens))
        self.source_bytes.append(document.source_bytes)

    def finish(self, val_fraction: float) -> dict:
        """Close the last shard and choose the validation documents; returns most of the manifest."""
        if self._file is None:
            raise ValueError(
                "there is no text in the input (every document is empty): give --input with text in it"
            )
        self._close_shard()
        self._count()
        chosen = choose_validation(np.array(self.lengths), val_fraction)
        durable.write_bytes(self.folder / VALIDATION_FILE, chosen.astype("<u8").tobytes())
        validation = {
            "file": VALIDATION_FILE,
            "bytes": chosen.nbytes,
            "sha256": sha256_file(self.folder / VALIDATION_FILE),
        }
        return {
            "dtype": self.dtype.name,
            "vocab_size": self.vocab_size,
            "eod_id": self.eod_id,
            "shards": self.shards,
            "splits": self._describe_splits(chosen),
            "validation": validation,
        }

    def _checked(self, tokens: np.ndarray) -> np.ndarray:
        if tokens.ndim != 1 or (len(tokens) and tokens.dtype.kind not in "iu"):
            raise ValueError(
                f"document {len(self.lengths)} is a {tokens.dtype} array of shape {tokens.shape}: "
                "give a one-dimensional array of integer ids"
            )
        bad = np.flatnonzero((tokens < 0) | (tokens >= self.vocab_size))
        if len(bad):
            raise ValueError(
                f"document {len(self.lengths)} has the id {tokens[bad[0]]} at token {bad[0]} (shard "
                f"{len(self.shards)}): ids must be 0 to {self.vocab_size - 1}; give the true vocab_size"
            )
        return tokens.astype(self.dtype)

    def _append(self, tokens: np.ndarray) -> None:
        self._file.write(tokens)
        self._hash.update(tokens)
        self._ends.append((self._ends[-1] if self._ends else 0) + len(tokens))
        self._max_id = max(self._max_id, int(tokens.max()))
        self._uncounted.append(tokens)
        self._num_uncounted += len(tokens)
        if self._num_uncounted >= COUNT_TOKENS:
            self._count()

    def _count(self) -> None:
        if self._uncounted:
            self.counts += np.bincount(np.concatenate(self._uncounted), minlength=self.vocab_size)
            self._uncounted, self._num_uncounted = [], 0

    def _open_shard(self) -> None:
        self._file = open(self.folder / f"shard-{len(self.shards):05d}.bin", "wb")
        self._ends, self._max_id, self._hash = array("Q"), 0, hashlib.sha256()

    def _close_shard(self) -> None:
        self._file.close()
        ends, path = np.array(self._ends, dtype="<u8"), Path(self._file.name)
        durable.fsync(path)
        durable.write_bytes(path.with_suffix(".idx"), ends.tobytes())
        self.shards.append(
            {
                "bin": path.name,
                "idx": path.with_suffix(".idx").name,
                "bytes": path.stat().st_size,
                "tokens": int(ends[-1]),
                "documents": len(ends),
                "max_id": self._max_id,
                "bin_sha256": self._hash.hexdigest(),
                "idx_sha256": hashlib.sha256(ends.tobytes()).hexdigest(),
            }
        )
        self._file = None

    def _describe_splits(self, chosen: np.ndarray) -> dict:
        everything = np.arange(len(self.lengths))
        if len(chosen) == 0:
            return {"train": self._describe(everything, self.counts)}
        counts = self._count_documents(chosen)
        return {
            "train": self._describe(np.delete(everything, chosen), self.counts - counts),
            "val": self._describe(chosen, counts),
        }

    def _describe(self, documents: np.ndarray, counts: np.ndarray) -> dict:
        return {
            "documents": len(documents),
            "tokens": int(counts.sum()),
            "unigram_entropy": unigram_entropy(counts),
            "source_bytes": int(np.array(self.source_bytes)[documents].sum()),
        }

    def _count_documents(self, documents: np.ndarray) -> np.ndarray:
        store = _Store(self.folder, self.shards, self.dtype)
        counts = np.zeros(self.vocab_size, dtype=np.int64)
        for document in documents:
            np.add.at(counts, store.read(document, 0, self.lengths[document]), 1)
        return counts


class _Store:
    """The shards as one sequence of documents, memory-mapped; indices as in the files, before any
    split.
    """

    def __init__(self, folder: Path, shards: list[dict], dtype: np.dtype):
        self.shards, self.paths = shards, [inside(folder, shard["bin"]) for shard in shards]
        # viewed as a plain array: slicing a memmap object costs 10x more
        self._maps = [
            np.memmap(path, dtype=dtype, mode="r").view(np.ndarray) for path in self.paths
        ]
        ends = [_read_ends(inside(folder, shard["idx"]), shard) for shard in shards]
        self._first = np.cumsum([0] + [len(e) for e in ends])
        self._begins = np.concatenate([np.concatenate([[0], e[:-1]]) for e in ends]).astype(
            np.int64
        )
        self.lengths = np.concatenate(ends).astype(np.int64) - self._begins

    def read(self, document: int, start: int, length: int) -> np.ndarray:
        shard = self._first.searchsorted(document, side="right") - 1
        length = min(length, self.lengths[document] - start)
        begin = self._begins[document] + start
        return self._maps[shard][begin : begin + length]

    def first_bad_id(self, vocab_size: int) -> str | None:
        """Where the first id >= vocab_size is, in words; None when there is none."""
        for path, ids in zip(self.paths, self._maps):
            bad = np.flatnonzero(ids >= vocab_size)
            if len(bad):
                return f"{path} has the id {ids[bad[0]]} at token {bad[0]}, outside the vocabulary of {vocab_size}"
        return None


def _read_ends(path: Path, shard: dict) -> np.ndarray:
    ends = np.fromfile(path, dtype="<u8")
    if (
        len(ends) == 0
        or ends[-1] != shard["tokens"]
        or ends[0] == 0
        or (ends[1:] <= ends[:-1]).any()
    ):
        raise IntegrityError(
            f"{path} is damaged: document ends must rise to {shard['tokens']}: "
            f"restore it, or prepare the data again with `{PREPARE}`"
        )
    return ends


class Dataset:
    """A dataset folder opened for reading; sizes are checked now, hashes by `verify`.

    Attributes: path, manifest, vocab_size, eod_id, tokenizer_path (None for ids tokenized
    elsewhere), tokenizer_sha256,
    fingerprint (SHA-256 over all of it), splits ("train" and, where there is one, "val").
    Raises ValueError for a folder that is no dataset, IntegrityError for a damaged one.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self.manifest = read_manifest(self.path)
        self.vocab_size: int = self.manifest["vocab_size"]
        self.eod_id: int = self.manifest["eod_id"]
        self.fingerprint: str = self.manifest["checksum"]
        self.dtype = np.dtype(self.manifest["dtype"])
        for name, size, _ in self._files():
            check_file(inside(self.path, name), size)
        tokenizer = self.manifest["tokenizer"]
        if tokenizer:
            self._check_tokenizer(tokenizer)
        self.tokenizer_path = inside(self.path, tokenizer["file"]) if tokenizer else None
        self.tokenizer_sha256: str | None = tokenizer["sha256"] if tokenizer else None
        self._store = _Store(self.path, self.manifest["shards"], self.dtype)
        self._check_ids()
        self.splits = self._open_splits()

    def split(self, name: str) -> "Split":
        """The documents of "train" or "val". Raises ValueError when there are none."""
        if name not in self.splits:
            raise ValueError(
                f"the data in {self.path} has no split {name!r} (it has {', '.join(self.splits)}): "
                "prepare it with a larger --val_fraction and at least two documents"
            )
        return self.splits[name]

    def verify(self, known: dict[str, list[int]] | None = None) -> dict[str, list[int]]:
        """Hash every file again and look at every id; raises IntegrityError naming the first
        damaged file.

        Returns a stamp per file, for a later call as `known`: files whose stamp is still the same
        are not read again. The stamp has the time of the last change to the file's inode, which no
        program can set.
        """
        stamps = {name: _stamp(inside(self.path, name)) for name, _, _ in self._files()}
        changed = [file for file in self._files() if stamps[file[0]] != (known or {}).get(file[0])]
        for name, size, sha256 in changed:
            check_file(inside(self.path, name), size, sha256)
        if changed:
            self.require_ids_in_vocab()
        return stamps

    def _check_tokenizer(self, tokenizer: dict) -> None:
        path = inside(self.path, tokenizer["file"])
        try:
            check_file(path, tokenizer["bytes"], tokenizer["sha256"])
        except IntegrityError as error:
            raise TokenizerMismatch(
                f"the ids were made with another tokenizer than the one beside them: {error}"
            ) from None

    def require_ids_in_vocab(self) -> None:
        """Raise IntegrityError naming shard and offset of the first id outside the vocabulary."""
        if (place := self._store.first_bad_id(self.vocab_size)) is not None:
            raise IntegrityError(f"{place}: restore it, or prepare the data again with `{PREPARE}`")

    def _files(self) -> list[tuple[str, int, str]]:
        content, width = self.manifest, self.dtype.itemsize
        files = [
            (
                content["validation"]["file"],
                content["validation"]["bytes"],
                content["validation"]["sha256"],
            )
        ]
        for shard in content["shards"]:
            files.append((shard["bin"], shard["tokens"] * width, shard["bin_sha256"]))
            files.append((shard["idx"], shard["documents"] * 8, shard["idx_sha256"]))
        return files

    def _check_ids(self) -> None:
        for shard in self.manifest["shards"]:
            if shard["max_id"] >= self.vocab_size:
                self.require_ids_in_vocab()
                raise IntegrityError(
                    f"{self.path / MANIFEST}: {shard['bin']} has max_id {shard['max_id']}, outside the "
                    f"vocabulary of {self.vocab_size}: prepare the data again with `{PREPARE}`"
                )

    def _open_splits(self) -> dict[str, "Split"]:
        chosen = np.fromfile(
            inside(self.path, self.manifest["validation"]["file"]), dtype="<u8"
        )  # unsigned: a flipped top bit is large, not negative
        everything = np.arange(len(self._store.lengths))
        if len(chosen) and (chosen[-1] >= len(everything) or (chosen[1:] <= chosen[:-1]).any()):
            raise IntegrityError(
                f"{self.path}: the list of validation documents is damaged: "
                f"prepare the data again with `{PREPARE}`"
            )
        chosen = chosen.astype(np.int64)
        indices = {"train": np.delete(everything, chosen), "val": chosen}
        return {
            name: Split(self, name, indices[name], self._store)
            for name in ("train", "val")
            if len(indices[name])
        }


def _stamp(path: Path) -> list[int]:
    about = path.stat()
    return [about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino]


class Split:
    """The documents of one split: `lengths` int64 [documents], `read`, and what the manifest says
    of them.
    """

    def __init__(self, dataset: Dataset, name: str, documents: np.ndarray, store: _Store):
        self.dataset, self.name = dataset, name
        self._documents, self._store = documents, store
        self.lengths: np.ndarray = store.lengths[documents]
        self.num_documents = len(documents)
        about = dataset.manifest["splits"][name]
        self.num_tokens: int = about["tokens"]
        self.source_bytes: int = about["source_bytes"]
        self.unigram_entropy: float = about["unigram_entropy"]

    def read(self, document: int, start: int, length: int) -> np.ndarray:
        """Ids [start, start + length) of a document, fewer at its end: a read-only view into the
        file.
        """
        return self._store.read(self._documents[document], start, length)

    def bits_per_byte(self, nats_per_token: float) -> float:
        """A loss in nats per token as bits per byte of source text: loss * tokens / (bytes * ln 2);
        nan without bytes.
        """
        return (
            nats_per_token * self.num_tokens / (self.source_bytes * math.log(2))
            if self.source_bytes
            else math.nan
        )


def _store_tokenizer(tokenizer: Path | str | None, folder: Path) -> dict | None:
    if tokenizer is None:
        return None
    model = Path(tokenizer).read_bytes()
    durable.write_bytes(folder / TOKENIZER_FILE, model)
    return {
        "file": TOKENIZER_FILE,
        "bytes": len(model),
        "sha256": hashlib.sha256(model).hexdigest(),
    }
