"""From documents to a dataset folder. The stages, each a function of what it is given:

    documents       files -> documents                       data/sources.py, data/corpus.py
    scan            documents -> a sample of their text, and the number of characters
    train           the sample -> a tokenizer, unless one is given       data/tokenizer.py
    encode          documents -> token ids, on several processes, in order
    write_dataset   token ids -> shards and a manifest                   data/writer.py

Training then reads the folder (data/dataset.py), packs pieces of documents into rows
(data/packing.py), and takes the rows in an order that is computed from the seed (data/order.py,
data/loader.py).

The documents are read twice. The first reading checks every document before anything is written,
and takes the sample that the tokenizer is trained on; the second encodes them. Keeping the text
between the two would take as much memory as the input has bytes.

Encoding runs in plain child processes (`python -m data.pipeline TOKENIZER`) rather than in those of
multiprocessing: they never import the caller's main module (and torch with it), work from any
script or prompt, and end when their parent does, because their input closes.
"""

import heapq
import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO, NamedTuple

import numpy as np

from data.dataset import Dataset
from data.load_tokenizer import AnyTokenizer, load_tokenizer
from data.order import mix
from data.progress import shown
from data.sources import Document
from data.tokenizer import train
from data.writer import TokenizedDocument, require_fraction, require_new, write_dataset

SAMPLE_CHARS = 8_000_000  # 8,192 ids trained on 8 MB: 3.43 bytes/token in 2 s; on 32 MB: 3.44, 7 s
SAMPLE_CHUNK = 16_384
BATCH_BYTES = 1 << 20
TINY_CHARS = 64  # a document with fewer has no context to speak of


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
    report: Callable[[str], object] = print,
) -> Dataset:
    """Encode what `documents()` yields into a new dataset folder.

    tokenizer: a sentencepiece model, a tokenizer.json, or a folder of Hugging Face; eod: the token
    that ends a document, if not the one that such a folder names.

    `documents` is called twice and must yield the same both times; `sources`, which says for the
    manifest where they are from, is called in between. With `tokenizer` that model is used,
    otherwise one of `vocab_size` is trained. An only document is cut in two, so that its end can be
    the validation split, which `report` is told. Raises ValueError before anything is written if
    the output is taken or a document is bad.
    """
    if workers < 1:
        raise ValueError(f"workers is {workers}: give 1 or more")
    require_fraction(val_fraction)
    require_new(Path(output))

    with tempfile.TemporaryDirectory() as folder:
        found = scan(documents())
        for line in found.notes():
            report(line)
        if tokenizer is None:
            path = Path(folder, "tokenizer.model")
            model = train(found.sample, vocab_size, path, character_coverage)
        else:
            model = load_tokenizer(tokenizer, eod)
            path = copy_tokenizer(model, Path(folder))

        if found.num_chars <= BATCH_BYTES:
            workers = 1
        texts = documents()
        if found.num_documents == 1 and val_fraction:
            texts = _end_apart(texts, val_fraction, report)
        return write_dataset(
            encode(texts, path, workers, found.num_chars),
            output,
            vocab_size=model.padded_vocab_size(),
            eod_id=model.eod_id,
            tokenizer=path,
            sources=sources(),
            val_fraction=val_fraction,
        )


def copy_tokenizer(tokenizer: AnyTokenizer, folder: Path) -> Path:
    """Copy a tokenizer into a folder; its file there."""
    files = tokenizer.files(tokenizer.padded_vocab_size())
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder / next(iter(files))


# ---- scanning


class Scan(NamedTuple):
    """What the first reading finds."""

    sample: list[str]  # of the text, in chunks
    num_chars: int
    num_documents: int  # that have text
    num_empty: int
    num_tiny: int  # of those that have text

    def notes(self) -> list[str]:
        """What a user may want to know, in lines."""
        lines = []
        if self.num_empty:
            lines.append(f"left out: {self.num_empty:,} documents without text")
        if self.num_tiny:
            lines.append(
                f"{self.num_tiny:,} of {self.num_documents:,} documents have fewer than "
                f"{TINY_CHARS} characters"
            )
        return lines


def scan(documents: Iterable[Document]) -> Scan:
    """Read everything once. Raises ValueError if there is no text at all."""
    sample = _Sample()
    num_chars = 0
    num_documents = 0
    num_empty = 0
    num_tiny = 0
    for document in shown(documents, "reading"):
        num_chars += len(document.text)
        num_documents += bool(document.text)
        num_empty += not document.text
        num_tiny += 0 < len(document.text) < TINY_CHARS
        sample.add(document.text)

    if not num_chars:
        raise ValueError(
            "there is no text in the input (every document is empty): give --input with text in it"
        )
    return Scan(sample.chunks(), num_chars, num_documents, num_empty, num_tiny)


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

    text: str
    is_last: bool  # of its document


class EncodedPart(NamedTuple):
    """The ids of a part, and what is known of it."""

    ids: np.ndarray
    num_bytes: int
    is_last: bool


def encode(
    documents: Iterable[Document], tokenizer: Path, workers: int, num_chars: int | None = None
) -> Iterator[TokenizedDocument]:
    """The ids of each document, in order; the number of workers does not change the result.

    `num_chars`: of all documents, from which the remaining time is computed.
    """
    model = load_tokenizer(tokenizer)
    parts = shown(_parts(documents, model), "encoding", num_chars)
    if workers == 1:
        return _joined(_encode_here(parts, model))
    return _joined(_encode_in_processes(parts, tokenizer, workers))


def _parts(documents: Iterable[Document], tokenizer: AnyTokenizer) -> Iterator[Part]:
    """The documents, long ones in parts of BATCH_BYTES characters or a little more.

    They are cut where the tokenizer may be cut, so that the ids of the parts are those of the
    whole: all processes can work on one long document, and nobody holds it as a list of numbers.
    """
    for document in documents:
        *others, last = tokenizer.parts(document.text, BATCH_BYTES)
        for text in others:
            yield Part(text, is_last=False)
        yield Part(last, is_last=True)


def _joined(parts: Iterable[EncodedPart]) -> Iterator[TokenizedDocument]:
    """The documents that the parts are of."""
    ids: list[np.ndarray] = []
    num_bytes = 0
    for part in parts:
        ids.append(part.ids)
        num_bytes += part.num_bytes
        if part.is_last:
            yield TokenizedDocument(np.concatenate(ids), num_bytes)
            ids = []
            num_bytes = 0


def _encode_here(parts: Iterable[Part], tokenizer: AnyTokenizer) -> Iterator[EncodedPart]:
    for part in parts:
        num_bytes = len(part.text.encode())
        yield EncodedPart(tokenizer.encode_array(part.text), num_bytes, part.is_last)


def _encode_in_processes(
    parts: Iterable[Part], tokenizer: Path, workers: int
) -> Iterator[EncodedPart]:
    """A thread per process feeds it batches; the results are taken in the order of the batches."""
    processes = [Worker(tokenizer) for _ in range(workers)]
    idle: SimpleQueue[Worker] = SimpleQueue()
    for process in processes:
        idle.put(process)

    try:
        with ThreadPoolExecutor(workers) as pool:
            waiting: deque[Future[list[EncodedPart]]] = deque()
            for batch in _batches(parts):
                waiting.append(pool.submit(_encode_batch, batch, idle))
                if len(waiting) > 2 * workers:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
    finally:
        for process in processes:
            process.close()


def _encode_batch(batch: list[Part], idle: "SimpleQueue[Worker]") -> list[EncodedPart]:
    texts = [part.text.encode() for part in batch]
    process = idle.get()
    try:
        encoded = process.encode(texts)
    finally:
        idle.put(process)
    return [
        EncodedPart(ids, len(text), part.is_last)
        for ids, text, part in zip(encoded, texts, batch, strict=True)
    ]


def _batches(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Lists of at least BATCH_BYTES characters."""
    batch: list[Part] = []
    size = 0
    for part in parts:
        batch.append(part)
        size += len(part.text)
        if size >= BATCH_BYTES:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


# ---- encoding processes


class Worker:
    """A child process that encodes batches of text with one tokenizer."""

    def __init__(self, tokenizer: Path):
        root = str(Path(__file__).resolve().parent.parent)
        inherited = os.environ.get("PYTHONPATH")
        path = os.pathsep.join([root, inherited] if inherited else [root])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "data.pipeline", str(tokenizer)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # `tokenizers` would start a thread for each core in every process
            env={**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},
        )

    def encode(self, texts: list[bytes]) -> list[np.ndarray]:
        """The ids of each UTF-8 text, uint32. Raises ChildProcessError if the process has ended."""
        try:
            _send(self._process.stdin, texts)
            parts = _receive(self._process.stdout)
        except BrokenPipeError:
            parts = None
        if parts is None:
            raise ChildProcessError(
                "an encoding process ended early, most likely for lack of memory: use --workers 1"
            )
        return [np.frombuffer(part, dtype="<u4") for part in parts]

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def _send(pipe: BinaryIO, parts: list[bytes]) -> None:
    """A message: the number of parts and the length of each (uint64), then the parts."""
    head = [len(parts), *(len(part) for part in parts)]
    pipe.write(np.array(head, dtype="<u8").tobytes())
    for part in parts:
        pipe.write(part)
    pipe.flush()


def _receive(pipe: BinaryIO) -> list[bytes] | None:
    """The parts of one message; None at the end of the pipe."""
    head = pipe.read(8)
    if len(head) < 8:
        return None
    num_parts = int.from_bytes(head, "little")
    lengths = np.frombuffer(pipe.read(8 * num_parts), dtype="<u8").tolist()
    parts = [pipe.read(length) for length in lengths]
    is_whole = [len(part) for part in parts] == lengths
    return parts if is_whole else None


def _serve(tokenizer: str) -> None:
    """What a worker process does until its input closes."""
    # Ctrl-C reaches the whole process group, and the parent decides what to do
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    model = load_tokenizer(tokenizer)
    while (texts := _receive(sys.stdin.buffer)) is not None:
        encoded = [model.encode(text.decode()) for text in texts]
        _send(sys.stdout.buffer, [np.array(ids, dtype="<u4").tobytes() for ids in encoded])


if __name__ == "__main__":
    _serve(sys.argv[1])
