"""The one writer of dataset folders, for ids from any tokenizer. data/dataset.py shows the files.

The folder is built next to its final place and renamed, so it appears whole or not at all. Until
then it is called `.tmp-NAME` and has a folder more, `working`, with what a writer needs in order to
continue after kill -9 with the shards that are full (data/pipeline.py records which ones):

    shard-00003.bytes   int64 [documents]: the bytes of text of each document of that shard
"""

import hashlib
import tempfile
from array import array
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from base import durable
from data import hugging_face
from data.dataset import Dataset, Split
from data.load_tokenizer import hash_of_ids
from data.losses import NONE, Loss
from data.manifest import (
    MANIFEST,
    Shard,
    SplitSummary,
    StoredFile,
    parse_shard,
    sha256_file,
    write_manifest,
)
from data.order import mix
from data.storage import Storage
from data.tokenizer import SENTENCEPIECE

SHARD_TOKENS = 1 << 27  # 256 MiB of uint16
COUNT_TOKENS = 1 << 20  # ids are counted this many at a time
VALIDATION_FILE = "val.idx"
WORKING = "working"
NO_TEXT = "there is no text in the input (every document is empty): give --input with text in it"


class TokenizedDocument(NamedTuple):
    """The ids of a document (any integer array), the bytes of its UTF-8 text (0: unknown), for a
    masked dataset which tokens are targets of the loss (bool; None: all), and of a text what its
    name is, how many characters it has, and which of them its ids do not give back.
    """

    tokens: np.ndarray
    source_bytes: int = 0
    learned: np.ndarray | None = None
    name: str = ""
    num_chars: int = 0
    loss: Loss = NONE


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
    masked: bool = False,
    task: dict | None = None,
    answer_id: int | None = None,
) -> Dataset:
    """Write documents of token ids as a new dataset folder `output`, and open it.

    Each document gets a closing `eod_id` unless it has one, and empty documents are left out.
    `sources`, `task` and `answer_id` go into the manifest, to say where the text is from, what the
    ids of a synthetic task mean, and which token stands before an answer. `masked`: the documents
    say which of their tokens are learned, and the unigram entropy is that of these.

    Raises ValueError if `output` holds something, an id is not below `vocab_size`, or there is no
    text.
    """
    if not 0 <= eod_id < vocab_size:
        raise ValueError(
            f"eod_id is {eod_id}, outside the vocabulary of {vocab_size}: "
            f"allowed are 0 to {vocab_size - 1}"
        )
    require_fraction(val_fraction)
    output = Path(output)
    require_new(output)

    with durable.building(output) as folder:
        writer = Writer(folder, vocab_size, eod_id, shard_tokens, masked)
        for document in documents:
            if not isinstance(document, TokenizedDocument):
                document = TokenizedDocument(document)
            writer.add(document)
        writer.finish(tokenizer, sources, val_fraction, task, answer_id)
        durable.remove(writer.working)
        require_new(output)  # again: somebody may have put a folder there meanwhile
    return Dataset(output)


# ---- checks of the arguments


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
    try:
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        raise ValueError(
            f"output {output} cannot be made in {parent} ({error.strerror}): choose another "
            "--output"
        ) from None


def require_fraction(val_fraction: float) -> None:
    """Raise ValueError unless 0 <= val_fraction < 1."""
    if not 0 <= val_fraction < 1:
        raise ValueError(
            f"val_fraction is {val_fraction}: allowed are 0 (no validation split) up to below 1"
        )


# ---- the split, and the entropy


def choose_validation(lengths: np.ndarray, fraction: float) -> np.ndarray:
    """The indices, ascending, of whole documents that hold about `fraction` of all tokens.

    They are picked by a hash of the index. Half of their tokens come from the longer documents,
    those that hold half of all tokens, so that long context is validated too. No chosen document
    has more than half of the budget. At least one is chosen if there are two documents or more and
    the fraction is positive.
    """
    if fraction == 0 or len(lengths) < 2:
        return np.zeros(0, dtype=np.int64)

    half = fraction * float(lengths.sum()) / 2
    shuffled = np.argsort(mix(np.arange(1, len(lengths) + 1, dtype=np.uint64)), kind="stable")
    shuffled = shuffled[lengths[shuffled] <= half]
    if len(shuffled) == 0:
        shortest = int(lengths.argmin())
        return np.array([shortest], dtype=np.int64)

    sizes = np.sort(lengths[shuffled])
    median = sizes[np.cumsum(sizes).searchsorted(sizes.sum() / 2)]
    is_long = lengths[shuffled] >= median
    long_ones = _take(shuffled[is_long], lengths, half)
    short_ones = _take(shuffled[~is_long], lengths, half)
    return np.array(sorted(long_ones + short_ones), dtype=np.int64)


def _take(documents: np.ndarray, lengths: np.ndarray, budget: float) -> list[int]:
    """Go through the documents in order and take each that fits into what is left of `budget`."""
    chosen = []
    shortest = lengths[documents].min(initial=0)
    for document in documents.tolist():
        if budget < shortest:
            break
        if lengths[document] <= budget:
            chosen.append(document)
            budget -= lengths[document]
    return chosen


def unigram_entropy(counts: np.ndarray) -> float:
    """H = -sum_v p_v ln p_v of token counts [V], in nats per token.

    It is the loss of the best model that ignores the context.
    """
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


# ---- shards


class Writer:
    """Fills shards in the order of the documents. What is written depends on the documents only.

    `restore` continues in another process, with the shards that were full.
    """

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        eod_id: int,
        shard_tokens: int = SHARD_TOKENS,
        masked: bool = False,
    ):
        self.folder = folder
        self.vocab_size = vocab_size
        self.eod_id = eod_id
        self.shard_tokens = shard_tokens
        self.storage = Storage.of(vocab_size, masked)

        self.lengths = array("q")
        self.source_bytes = array("q")
        self.shards: list[Shard] = []  # those that are full
        self._file: BinaryIO | None = None  # of the shard that is being filled,
        self._ends = array("Q")  # its documents,
        self._max_id = 0  # and its largest id

        self.working = folder / WORKING
        durable.make_folder(self.working)

    def restore(self, records: list[dict]) -> None:
        """Begin after the full shards of these records. IntegrityError if one is damaged."""
        self.shards = [parse_shard(self.folder, record, self.storage.dtype) for record in records]
        for shard in self.shards:
            shard.ids.check_size()
            self.source_bytes.frombytes(self._bytes_file(shard.ids.path).read_bytes())
        if self.shards:
            self.lengths.extend(Split(self.shards, self.storage).lengths.tolist())

    def add(self, document: TokenizedDocument) -> None:
        """Append a document. A closing end of a document that it lacks is learned if its last token
        is.

        Raises ValueError for an id that is not an integer in [0, vocab_size), and for marks that do
        not fit the tokens or the dataset.
        """
        tokens = np.asarray(document.tokens)
        learned = document.learned
        self._check(tokens, learned)
        if len(tokens) == 0:
            return
        if tokens[-1] != self.eod_id:
            tokens = np.append(tokens, self.eod_id)
            learned = None if learned is None else np.append(learned, learned[-1])

        before = self._ends[-1] if self._ends else 0
        if before and before + len(tokens) > self.shard_tokens:
            self._close_shard()
            before = 0
        if self._file is None:
            self._file = open(self._next_shard(), "wb")  # noqa: SIM115 (closed by _close_shard)
        self._file.write(self.storage.stored(tokens, learned))
        self._ends.append(before + len(tokens))
        self._max_id = max(self._max_id, int(tokens.max()))
        self.lengths.append(len(tokens))
        self.source_bytes.append(document.source_bytes)

    def finish(
        self,
        tokenizer: Path | str | None,
        sources: Iterable[dict],
        val_fraction: float,
        task: dict | None = None,
        answer_id: int | None = None,
        losses: dict | None = None,
    ) -> None:
        """Write what is missing, the manifest last; `working` is not needed any more.

        Raises ValueError if there is no text, or no token of it is learned.
        """
        if self._file is None:
            raise ValueError(NO_TEXT)
        self._close_shard()
        chosen = choose_validation(np.array(self.lengths), val_fraction)
        validation = _store(self.folder / VALIDATION_FILE, chosen.astype("<u8").tobytes())
        content = {
            "vocab_size": self.vocab_size,
            "eod_id": self.eod_id,
            "shards": [shard.record() for shard in self.shards],
            "splits": {name: asdict(split) for name, split in self._summaries(chosen).items()},
            "validation": validation.record(),
            "tokenizer": _store_tokenizer(self.folder, tokenizer),
            "sources": list(sources),
        }
        optional = {"masked": self.storage.masked or None, "task": task, "answer_id": answer_id}
        optional["losses"] = losses
        content |= {name: value for name, value in optional.items() if value is not None}
        write_manifest(self.folder, content)

    def _check(self, tokens: np.ndarray, learned: np.ndarray | None) -> None:
        number = len(self.lengths)
        if tokens.ndim != 1 or (len(tokens) and tokens.dtype.kind not in "iu"):
            raise ValueError(
                f"document {number} is a {tokens.dtype} array of shape {tokens.shape}: "
                "give a one-dimensional array of integer ids"
            )
        bad = np.flatnonzero((tokens < 0) | (tokens >= self.vocab_size))
        if len(bad):
            raise ValueError(
                f"document {number} has the id {tokens[bad[0]]} at token {bad[0]} (shard "
                f"{len(self.shards)}): ids must be 0 to {self.vocab_size - 1}; "
                "give the true vocab_size"
            )
        if learned is None:
            return
        if not self.storage.masked:
            raise ValueError(
                f"document {number} says which of its tokens are learned, but the dataset is not "
                "masked: write it with masked=True"
            )
        if learned.dtype != bool or learned.shape != tokens.shape:
            raise ValueError(
                f"document {number} has marks {learned.dtype} of shape {learned.shape} for "
                f"{len(tokens)} tokens: give one bool for each token"
            )

    # ---- shards

    def _close_shard(self) -> None:
        """Force the files of the shard that is open to the disk."""
        self._file.close()
        path = self._next_shard()
        durable.fsync(path)
        ids = StoredFile(path, path.stat().st_size, sha256_file(path))
        ends = _store(path.with_suffix(".idx"), np.array(self._ends, dtype="<u8").tobytes())
        documents = len(self._ends)
        source_bytes = self.source_bytes[-documents:]
        durable.write_bytes(self._bytes_file(path), source_bytes.tobytes())

        self.shards.append(Shard(ids, ends, self._ends[-1], documents, self._max_id))
        self._file = None
        self._ends = array("Q")
        self._max_id = 0

    def _next_shard(self) -> Path:
        return self.folder / f"shard-{len(self.shards):05d}.bin"

    def _bytes_file(self, shard: Path) -> Path:
        return self.working / f"{shard.stem}.bytes"

    # ---- what the splits hold

    def _summaries(self, validation: np.ndarray) -> dict[str, SplitSummary]:
        """What each split holds, given the indices of the validation documents. ValueError if no
        token is learned.
        """
        counts = sum(map(self._count_targets, self.shards))
        if not counts.any():
            raise ValueError("no token of the documents is learned: mark some as targets")
        everything = np.arange(len(self.lengths))
        if len(validation) == 0:
            return {"train": self._summary(everything, counts)}

        documents = Split(self.shards, self.storage)
        held_out = np.zeros_like(counts)
        for document in validation:
            np.add.at(held_out, documents.targets(document), 1)
        return {
            "train": self._summary(np.delete(everything, validation), counts - held_out),
            "val": self._summary(validation, held_out),
        }

    def _count_targets(self, shard: Shard) -> np.ndarray:
        """How often each id is a target in a shard, int64 [V]."""
        counts = np.zeros(self.vocab_size, dtype=np.int64)
        with open(shard.ids.path, "rb") as file:
            for _ in range(0, shard.tokens, COUNT_TOKENS):
                stored = np.fromfile(file, self.storage.dtype, COUNT_TOKENS)
                targets = self.storage.targets(stored)
                counts += np.bincount(targets, minlength=self.vocab_size)
        return counts

    def _summary(self, documents: np.ndarray, counts: np.ndarray) -> SplitSummary:
        return SplitSummary(
            documents=len(documents),
            tokens=int(np.array(self.lengths)[documents].sum()),
            source_bytes=int(np.array(self.source_bytes)[documents].sum()),
            unigram_entropy=unigram_entropy(counts),
        )


# ---- the other files


def _store(path: Path, content: bytes) -> StoredFile:
    durable.write_bytes(path, content)
    return StoredFile(path, len(content), hashlib.sha256(content).hexdigest())


def _store_tokenizer(folder: Path, tokenizer: Path | str | None) -> dict | None:
    """Copy the tokenizer into the folder; its record for the manifest."""
    if tokenizer is None:
        return None
    tokenizer = Path(tokenizer)
    if not hugging_face.is_json(tokenizer):
        return _store(folder / SENTENCEPIECE, tokenizer.read_bytes()).record()

    settings = tokenizer.parent / hugging_face.SETTINGS
    stored = _store(folder / hugging_face.TOKENIZER, tokenizer.read_bytes())
    stored_settings = _store(folder / hugging_face.SETTINGS, settings.read_bytes())
    return stored.record() | {
        "ids_sha256": hash_of_ids(stored.path),
        "settings": stored_settings.record(),
    }
