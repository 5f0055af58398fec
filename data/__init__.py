"""From text files to rows of tokens: numpy, sentencepiece and the standard library, nothing else.

    sources.py    files, folders, JSONL, gzip            -> Document(name, text)
    corpus.py     the embedded corpus: no download       -> Document(name, text)
    tokenizer.py  lossless sentencepiece                 -> ids
    shards.py     writer and memory-mapped reader of a dataset folder (manifest.py: its one JSON file)
    packing.py    best-fit decreasing, never crops       -> row -> pieces of documents
    order.py      position -> row, a keyed permutation without an array
    loader.py     position -> tokens, labels, positions, doc_ids
    pipeline.py   documents -> ids on several cores (worker.py) -> dataset folder, durably (folders.py)
    prepare.py    `python -m data.prepare`: the door to all of it

Every stage is a pure function of its inputs and a seed, so that a run resumes exactly from {seed,
epoch, position}.
"""
