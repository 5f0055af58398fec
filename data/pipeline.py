"""From documents to a dataset folder. The stages, each a function of what it is given:

    documents       files -> documents                       data/sources.py, data/corpus.py
    scan            documents -> a sample of their text, and the number of characters
    train           the sample -> a tokenizer, unless one is given       data/tokenizer.py
    encode          documents -> token ids, on several threads, in order
    Writer          token ids -> shards and a manifest                   data/writer.py

With each shard that is full, the number of documents that are done is recorded (`State`). The same
command after kill -9 keeps these shards: it reads their documents again, without encoding them, and
goes on with the next one.

Training then reads the folder (data/dataset.py), packs pieces of documents into rows
(data/packing.py), and takes the rows in an order that is computed from the seed (data/order.py,
data/loader.py).

The documents are read twice. The first reading checks every document before anything is written,
and takes the sample that the tokenizer is trained on; the second encodes them. Keeping the text
between the two would take as much memory as the input has bytes.

Encoding runs in threads: both libraries let go of Python's lock while they encode.
"""

import errno
import hashlib
import heapq
import itertools
import json
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import sentencepiece

from base import durable
from data.dataset import Dataset
from data.load_tokenizer import AnyTokenizer, load_tokenizer
from data.losses import Loss, Losses, joined, loss_of
from data.manifest import MANIFEST
from data.order import mix
from data.progress import shown
from data.sources import Document
from data.storage import Storage
from data.tokenizer import SENTENCEPIECE, train
from data.writer import (
    NO_TEXT,
    WORKING,
    TokenizedDocument,
    Writer,
    require_fraction,
    require_new,
)

SAMPLE_CHARS = 8_000_000  # 8,192 ids trained on 8 MB: 3.43 bytes/token in 2 s; on 32 MB: 3.44, 7 s
SAMPLE_CHUNK = 16_384
BATCH_CHARS = 1 << 20
SPACE_CHARS = 200_000  # of the sample are encoded to see how much space the ids take
SPACE_MARGIN = 1.05
STATE = "state.json"
STATE_VERSION = 5  # of what a preparation leaves when it is killed


def build_dataset(
    documents: Callable[[], Iterable[Document]],
    output: Path | str,
    *,
    tokenizer: Path | str | None = None,
    eod: str | None = None,
    vocab_size: int = 8192,
    character_coverage: float = 1.0,
    workers: int = 2,
    val_fraction: float = 0.01,
    sources: Callable[[], Iterable[dict]] = list,
    key: object = None,
    report: Callable[[str], object] = print,
    answers: bool = False,
) -> Dataset:
    """Encode what `documents()` yields into a new dataset folder.

    tokenizer: a sentencepiece model, a tokenizer.json, or a folder of Hugging Face; eod: the token
    that ends a document, if not the one that such a folder names.

    `documents` is called twice and must yield the same both times; `sources`, which says for the
    manifest where they are from, is called in between. With `tokenizer` that model is used,
    otherwise one of `vocab_size` is trained. An only document is cut in two, so that its end can be
    the validation split, which `report` is told.

    answers: the documents have answers, and only these and the ends of the documents are learned.
    Text and answer are encoded each by itself.

    key: what identifies the documents, for JSON. A preparation that was killed continues when it is
    called with the same key and settings, and ends with the same bytes; without a key it begins
    anew.

    Raises ValueError before anything is written if the output is taken, a document is bad or the
    disk is too small.
    """
    if workers < 1:
        raise ValueError(f"workers is {workers}: give 1 or more")
    require_fraction(val_fraction)
    require_new(Path(output))

    given = load_tokenizer(tokenizer, eod) if tokenizer else None
    settings = [_identity(given), vocab_size, character_coverage, val_fraction, answers]

    output = Path(output)
    with durable.building(output, keep=key is not None) as folder:
        state = State(folder, [key, settings])
        if not state.scan:
            found = scan(documents())
            if found.num_empty:
                report(f"left out: {found.num_empty:,} documents without text")
            if given is None:
                path = folder / WORKING / SENTENCEPIECE
                train(found.sample, vocab_size, path, character_coverage)
            else:
                path = copy_tokenizer(given, folder / WORKING)
            state.scan = {
                "characters": found.num_chars,
                "documents": found.num_documents,
                "bytes": _bytes_needed(found, load_tokenizer(path), answers),
                "tokenizer": path.name,
            }
            state.save()
        if not (folder / MANIFEST).exists():
            texts = iter(documents())
            if state.scan["documents"] == 1 and val_fraction and not answers:
                texts = _end_apart(texts, val_fraction, report)
            writer = _fill(state, texts, workers, answers, report)
            writer.finish(
                state.tokenizer,
                sources(),
                val_fraction,
                losses=asdict(state.losses) if state.losses.lines() else None,
            )
        durable.remove(folder / WORKING)
        require_new(output)  # again: somebody may have put a folder there meanwhile
    return Dataset(output)


def _identity(tokenizer: AnyTokenizer | None) -> list[str]:
    """What changes if the tokenizer does, given or to be trained."""
    if tokenizer is None:
        return [sentencepiece.__version__]
    return [hashlib.sha256(content).hexdigest() for content in tokenizer.files().values()]


def copy_tokenizer(tokenizer: AnyTokenizer, folder: Path) -> Path:
    """Copy a tokenizer into a folder; its file there."""
    files = tokenizer.files()
    for name, content in files.items():
        durable.write_bytes(folder / name, content)
    return folder / next(iter(files))


def _fill(
    state: "State",
    texts: Iterator[Document],
    workers: int,
    answers: bool,
    report: Callable[[str], object],
) -> Writer:
    """Write the shards into the folder, or what is missing of them."""
    model = load_tokenizer(state.tokenizer)
    writer = Writer(state.folder, model.padded_vocab_size(), model.eod_id, masked=answers)
    writer.restore(state.shards)
    _require_space(state)

    position = state.position
    num_chars = state.scan["characters"]
    if position:
        report(f"continuing after {position:,} documents, {sum(writer.lengths):,} tokens")
        done = shown(itertools.islice(texts, position), "reading what is done", num_chars)
        num_chars -= sum(document.num_chars for document in done)

    for document in encode(texts, state.tokenizer, workers, num_chars):
        full = len(writer.shards)
        writer.add(document)
        if len(writer.shards) > full:  # this document begins the next one
            state.position = position
            state.shards = [shard.record() for shard in writer.shards]
            state.save()
        state.losses.add(
            document.name,
            document.num_chars,
            document.loss,
            is_empty=not len(document.tokens),
        )
        state.losses.require_few(state.scan["characters"])
        position += 1
    return writer


# ---- what is done, on disk


class State:
    """How far a preparation is: a JSON file in the `working` folder of the unfinished dataset.

    scan: what the first reading found, {} before; position: the documents whose ids are in the full
    shards, which `shards` describes; losses: what the tokenizer lost of them. A state of another
    command is cleared with all that it describes.
    """

    def __init__(self, folder: Path, key: object):
        self.folder = folder
        self._file = folder / WORKING / STATE
        self._key = hashlib.sha256(json.dumps([STATE_VERSION, key]).encode()).hexdigest()
        found = json.loads(self._file.read_text()) if self._file.is_file() else {}
        if found.get("key") != self._key:
            found = {"scan": {}, "position": 0, "shards": [], "losses": {}}
            durable.clear(folder)
            durable.make_folder(folder / WORKING)
        self.scan: dict = found["scan"]
        self.position: int = found["position"]
        self.shards: list[dict] = found["shards"]
        self.losses = Losses(**found["losses"])

    @property
    def tokenizer(self) -> Path:
        """The file of the tokenizer."""
        return self.folder / WORKING / self.scan["tokenizer"]

    def save(self) -> None:
        """Write the file."""
        content = {"key": self._key, "scan": self.scan}
        content |= {"position": self.position, "shards": self.shards}
        content["losses"] = asdict(self.losses)
        durable.write_json(self._file, content)


# ---- space on the disk


def _bytes_needed(found: "Scan", model: AnyTokenizer, masked: bool) -> int:
    """About how large the shards will be, from the ids of a part of the sample."""
    text = "".join(found.sample)[:SPACE_CHARS]
    tokens = len(model.encode(text)) / len(text) * found.num_chars
    width = Storage.of(model.padded_vocab_size(), masked).dtype.itemsize
    return round(SPACE_MARGIN * tokens * width) + 32 * found.num_documents


def _require_space(state: "State") -> None:
    """OSError if the disk is too small for what is missing; what is done stays."""
    done = sum(path.stat().st_size for path in state.folder.glob("shard-*"))
    needed = state.scan["bytes"] - done
    free = durable.free_bytes(state.folder)
    if free < needed:
        words = f"{state.folder} needs about {needed:,} more bytes, and {free:,} are free"
        raise OSError(errno.ENOSPC, words)


# ---- scanning


class Scan(NamedTuple):
    """What the first reading finds."""

    sample: list[str]  # of the text, in chunks
    num_chars: int
    num_documents: int  # that have text
    num_empty: int


def scan(documents: Iterable[Document]) -> Scan:
    """Read everything once. Raises ValueError if there is no text at all."""
    sample = _Sample()
    lengths = array("q")
    for document in shown(documents, "reading"):
        lengths.append(document.num_chars)
        sample.add(document.text)
        sample.add(document.answer or "")

    if not any(lengths):
        raise ValueError(NO_TEXT)
    num_documents = int(np.count_nonzero(lengths))
    return Scan(sample.chunks(), sum(lengths), num_documents, len(lengths) - num_documents)


class _Sample:
    """At least SAMPLE_CHARS of text, if there is as much: the chunks whose numbers hash lowest."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, str]] = []  # (-hash, number, chunk)
        self._num_chunks = 0
        self._size = 0

    def add(self, text: str) -> None:
        """Consider each chunk of `text`."""
        for start in range(0, len(text), SAMPLE_CHUNK):
            self._num_chunks += 1
            priority = -mix(self._num_chunks)
            is_full = self._size >= SAMPLE_CHARS
            if is_full and priority <= self._heap[0][0]:
                continue

            chunk = text[start : start + SAMPLE_CHUNK]
            heapq.heappush(self._heap, (priority, self._num_chunks, chunk))
            self._size += len(chunk)
            while self._size - len(self._heap[0][2]) >= SAMPLE_CHARS:
                _, _, dropped = heapq.heappop(self._heap)
                self._size -= len(dropped)

    def chunks(self) -> list[str]:
        """The chunks in the order of the text."""
        in_order = sorted(self._heap, key=lambda entry: entry[1])
        return [chunk for _, _, chunk in in_order]


# ---- an only document


def _end_apart(
    documents: Iterable[Document], fraction: float, report: Callable[[str], object]
) -> Iterator[Document]:
    """The only document that has text as two: all but its end, and its end."""
    for document in documents:
        if not document.text:
            continue
        cut = _cut(document.text, fraction)
        head = document.text[:cut]
        tail = document.text[cut:]
        report(
            f"{document.name} is the only document, so its last {len(tail):,} characters are the "
            "validation split"
        )
        yield Document(document.name, head)
        yield Document(document.name, tail)


def _cut(text: str, fraction: float) -> int:
    """Where the last `fraction` of the text begins: at the start of a line, if one is near."""
    cut = max(1, round(len(text) * (1 - fraction)))
    margin = (len(text) - cut) // 2
    line = text.rfind("\n", cut - margin, cut) + 1
    return line or cut


# ---- encoding


class Part(NamedTuple):
    """A document, or a part of a long one."""

    name: str  # of its document
    text: str
    is_last: bool  # of its document
    learned: bool | None  # None if documents have no answers

    @property
    def num_chars(self) -> int:
        """The characters of the text."""
        return len(self.text)


class Encoded(NamedTuple):
    """A part with its ids, uint32, and what these do not give back."""

    part: Part
    ids: np.ndarray
    loss: Loss


def encode(
    documents: Iterable[Document], tokenizer: Path, workers: int, num_chars: int | None = None
) -> Iterator[TokenizedDocument]:
    """The ids of each document, in order; the number of workers does not change the result.

    `num_chars`: of all documents, from which the remaining time is computed.
    """
    model = load_tokenizer(tokenizer)
    parts = shown(_parts(documents, model), "encoding", num_chars)
    return _joined(_encoded(parts, model, workers))


def _parts(documents: Iterable[Document], tokenizer: AnyTokenizer) -> Iterator[Part]:
    """The documents, long ones in parts of BATCH_CHARS characters or a little more.

    They are cut where the tokenizer may be cut, so that the ids of the parts are those of the
    whole: all threads can work on one long document, and nobody holds it as a list of numbers.
    """
    for document in documents:
        texts = [(document.text, None)]
        if document.answer is not None:
            texts = [(document.text, False), (document.answer, True)]
        *others, last = [
            Part(document.name, part, False, learned)
            for text, learned in texts
            for part in tokenizer.parts(text, BATCH_CHARS)
        ]
        yield from others
        yield last._replace(is_last=True)


def _encoded(parts: Iterable[Part], tokenizer: AnyTokenizer, workers: int) -> Iterator[Encoded]:
    """The parts with their ids, in order; a few batches are encoded ahead."""

    def encode_part(part: Part) -> Encoded:
        ids = tokenizer.encode(part.text)
        back = tokenizer.back(part.text, ids)
        return Encoded(part, np.array(ids, np.uint32), loss_of(part.text, back))

    def encode_batch(batch: list[Part]) -> list[Encoded]:
        return list(map(encode_part, batch))

    with ThreadPoolExecutor(workers) as pool:
        waiting = deque()
        for batch in _batches(parts):
            waiting.append(pool.submit(encode_batch, batch))
            if len(waiting) > 2 * workers:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()


def _batches(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Lists of at least BATCH_CHARS characters."""
    batch: list[Part] = []
    size = 0
    for part in parts:
        batch.append(part)
        size += len(part.text)
        if size >= BATCH_CHARS:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def _joined(parts: Iterable[Encoded]) -> Iterator[TokenizedDocument]:
    """The documents that the parts are of."""
    found: list[Encoded] = []
    for one in parts:
        found.append(one)
        if one.part.is_last:
            yield _document(found)
            found = []


def _document(found: list[Encoded]) -> TokenizedDocument:
    """The document of some parts. It has no ids if its answer, or what is before it, has none."""
    tokens = []
    marks = []
    num_bytes = 0
    num_chars = 0
    for part, ids, _ in found:
        tokens.append(ids)
        marks.append(np.full(len(ids), part.learned))
        num_bytes += len(part.text.encode())
        num_chars += part.num_chars

    last = found[-1].part
    document = TokenizedDocument(
        np.concatenate(tokens),
        num_bytes,
        name=last.name,
        num_chars=num_chars,
        loss=joined(one.loss for one in found),
    )
    if last.learned is None:
        return document
    learned = np.concatenate(marks)
    if learned.all() or not learned.any():
        nothing = slice(0)
        return document._replace(tokens=document.tokens[nothing], learned=learned[nothing])
    return document._replace(learned=learned)
