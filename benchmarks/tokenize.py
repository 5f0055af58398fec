"""Preparing data against calling the tokenizer's library directly, in bytes per second of CPU time:
`python -m benchmarks.tokenize --tokenizer DIR [--megabytes 12] [--workers 2]`.

The text is a part of the embedded corpus. "library" opens the tokenizer and encodes each
document in one thread, with one call (sentencepiece: with one for each 8,192 characters, which is
the fastest); "encode" is what `data.prepare` runs for it (data/pipeline.py), all its threads
counted, without reading files and writing shards. The ids are compared first. Two busy threads of
one core each take more CPU time: compare several threads on an idle machine only.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import sentencepiece
import tokenizers

from base.flags import Parser
from data import pipeline
from data.corpus import embedded_files, read_corpus
from data.hugging_face import HuggingFaceTokenizer
from data.load_tokenizer import AnyTokenizer, load_tokenizer
from data.sources import Document, by_directory
from data.tokenizer import CHUNK_CHARS, chunks

ROUNDS = 3


def cpu_seconds(call: Callable[[], object]) -> float:
    """CPU time of all threads of this process during the call."""
    before = time.process_time()
    call()
    return time.process_time() - before


def library_call(tokenizer: AnyTokenizer) -> Callable[[str], list[int]]:
    """The library's own function from a text to ids."""
    path = str(tokenizer.path)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        library = tokenizers.Tokenizer.from_file(path)
        library.encode_special_tokens = True
        return lambda text: library.encode_batch_fast([text], add_special_tokens=False)[0].ids

    processor = sentencepiece.SentencePieceProcessor(model_file=path)

    def encode(text: str) -> list[int]:
        ids = []
        for chunk in chunks(text, CHUNK_CHARS):
            ids += processor.encode(chunk)
        return ids

    return encode


def directly(tokenizer: AnyTokenizer, documents: list[Document]) -> Iterator[np.ndarray]:
    """The ids of each document from the library."""
    call = library_call(tokenizer)
    for document in documents:
        yield np.array(call(document.text), dtype=np.uint32)


def through_longhaul(path: Path, workers: int, documents: list[Document]) -> Iterator[np.ndarray]:
    """The ids of each document as `data.prepare` makes them."""
    for encoded in pipeline.encode(documents, path, workers):
        yield encoded.tokens


def check(tokenizer: AnyTokenizer, documents: list[Document]):
    """Refuse to time other ids than the library's; sentencepiece spells U+2581 differently."""
    call = library_call(tokenizer)
    for document in documents:
        if "\u2581" not in document.text:
            same = call(document.text) == tokenizer.encode(document.text)
            assert same, f"{document.name}: other ids than the library's"


def main(args: Sequence[str] | None = None):
    """The command line."""
    parser = Parser(prog="python -m benchmarks.tokenize", description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--megabytes", type=int, default=12)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args(args)

    try:
        tokenizer = load_tokenizer(given.tokenizer)
    except ValueError as error:
        parser.refuse(error)

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    files, _ = read_corpus(embedded_files(given.megabytes * 1_000_000), report=lambda line: None)
    documents = list(by_directory(files))
    num_bytes = sum(len(document.text.encode()) for document in documents)

    check(tokenizer, documents)
    candidates = {
        "library": lambda: list(directly(tokenizer, documents)),
        "encode, 1 thread": lambda: list(through_longhaul(tokenizer.path, 1, documents)),
        f"encode, {given.workers} threads": lambda: list(
            through_longhaul(tokenizer.path, given.workers, documents)
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(ROUNDS):
        for name, candidate in candidates.items():
            seconds[name].append(cpu_seconds(candidate))

    print(f"{given.tokenizer}: {num_bytes / 1e6:.1f} MB, median of {ROUNDS}, CPU time")
    library = statistics.median(seconds["library"])
    for name, times in seconds.items():
        median = statistics.median(times)
        rate = num_bytes / median / 1e6
        print(f"  {name:20}  {rate:6.2f} MB/s per core  {library / median:5.2f}x of the library")


if __name__ == "__main__":
    main()
