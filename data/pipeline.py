"""Documents -> tokenizer -> ids on several cores -> dataset folder.

Imports data.sources, data.tokenizer, data.worker, data.shards, files.folders, data.order. The
documents are read twice: once to check every one of them and to sample the tokenizer's training
text, once to encode. Batches of documents go to worker processes and come back in order, so the
result does not depend on the number of workers.
"""

import heapq
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tqdm import tqdm

from data.dataset import Dataset
from data.order import mix
from data.sources import Document
from data.tokenizer import Tokenizer, train
from data.worker import Worker
from data.writer import TokenizedDocument, require_fraction, require_new, write_dataset

SAMPLE_BYTES = (
    8_000_000  # 8,192 pieces trained on 8 MB: 3.43 bytes/token in 2 s; on 32 MB: 3.44 in 7 s
)
SAMPLE_CHUNK = 16_384
BATCH_BYTES = 1 << 20
Documents = Callable[[], Iterable[Document]]


def build_dataset(
    documents: Documents,
    output: Path | str,
    *,
    tokenizer: Path | str | None = None,
    vocab_size: int = 8192,
    character_coverage: float = 1.0,
    workers: int = 2,
    val_fraction: float = 0.01,
    sources: Iterable[dict] = (),
) -> Dataset:
    """Encode what `documents()` yields (called twice, the same both times) into a new dataset
    folder.

    With `tokenizer` the given model is used, else one of `vocab_size` is trained. Raises ValueError
    before anything is written when the output is taken or a document is bad.
    """
    if workers < 1:
        raise ValueError(f"workers is {workers}: give 1 or more")
    require_fraction(val_fraction)
    require_new(Path(output))
    with tempfile.TemporaryDirectory() as folder:
        sample, num_chars = scan(documents())
        path = Path(tokenizer) if tokenizer is not None else Path(folder, "tokenizer.model")
        model = (
            Tokenizer(path)
            if tokenizer is not None
            else train(sample, vocab_size, path, character_coverage)
        )
        encoded = encode(
            _with_progress(documents(), num_chars), path, workers if num_chars > BATCH_BYTES else 1
        )
        return write_dataset(
            encoded,
            output,
            vocab_size=model.vocab_size,
            eod_id=model.eod_id,
            tokenizer=path,
            sources=sources,
            val_fraction=val_fraction,
        )


def scan(documents: Iterable[Document]) -> tuple[list[str], int]:
    """Read everything once: (a sample of SAMPLE_BYTES of text in chunks, picked by a hash of the
    index; all characters).

    Raises ValueError when there is no text at all.
    """
    heap: list[tuple[int, int, str]] = []
    index = size = num_chars = 0
    for document in _progress(documents, "reading", unit=" documents"):
        num_chars += len(document.text)
        for start in range(0, len(document.text), SAMPLE_CHUNK):
            index += 1
            priority = -mix(index)
            if size >= SAMPLE_BYTES and priority <= heap[0][0]:
                continue
            chunk = document.text[start : start + SAMPLE_CHUNK]
            heapq.heappush(heap, (priority, index, chunk))
            size += len(chunk)
            while size - len(heap[0][2]) >= SAMPLE_BYTES:
                size -= len(heapq.heappop(heap)[2])
    if not num_chars:
        raise ValueError(
            "there is no text in the input (every document is empty): give --input with text in it"
        )
    return [chunk for _, _, chunk in sorted(heap, key=lambda entry: entry[1])], num_chars


def encode(
    documents: Iterable[Document], tokenizer: Path, workers: int
) -> Iterator[TokenizedDocument]:
    """The ids of each document, in order; with one worker in this process."""
    if workers == 1:
        model = Tokenizer(tokenizer)
        for document in documents:
            yield TokenizedDocument(model.encode_array(document.text), len(document.text.encode()))
        return
    idle = SimpleQueue()
    processes = [Worker(tokenizer) for _ in range(workers)]
    try:
        for process in processes:
            idle.put(process)
        with ThreadPoolExecutor(workers) as pool:
            waiting = deque()
            for batch in _batches(documents):
                waiting.append(pool.submit(_encode_batch, batch, idle))
                if len(waiting) > 2 * workers:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
    finally:
        for process in processes:
            process.close()


def _encode_batch(texts: list[bytes], idle: SimpleQueue) -> list[TokenizedDocument]:
    process = idle.get()
    try:
        encoded = process.encode(texts)
    finally:
        idle.put(process)
    return [TokenizedDocument(ids, len(text)) for ids, text in zip(encoded, texts)]


def _batches(documents: Iterable[Document]) -> Iterator[list[bytes]]:
    batch, size = [], 0
    for document in documents:
        batch.append(document.text.encode())
        size += len(batch[-1])
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _progress(items: Iterable, label: str, **settings) -> tqdm:
    return tqdm(
        items, desc=label, disable=None, leave=False, **settings
    )  # None: silent unless on a terminal


def _with_progress(documents: Iterable[Document], num_chars: int) -> Iterator[Document]:
    with tqdm(
        total=num_chars, desc="encoding", unit="B", unit_scale=True, disable=None, leave=False
    ) as bar:
        for document in documents:
            yield document
            bar.update(len(document.text))
