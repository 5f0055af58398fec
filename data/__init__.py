"""From text files to rows of tokens, with numpy, sentencepiece, tqdm and the standard library;
tokenizers and pyarrow are optional.

    prepare.py    the command `python -m data.prepare`
    pipeline.py   documents -> a tokenizer -> ids -> a dataset folder; describes the stages
    inputs.py     paths, patterns                  -> files and their bytes
    contents.py   the first bytes of a file        -> what it is, if it is no text
    fields.py     a record                         -> its text
    parquet.py    parquet                          -> records
    sources.py    text, JSONL, parquet             -> documents
    corpus.py     the embedded corpus, no download -> documents
    tokenizer.py  lossless sentencepiece           text <-> ids
    hugging_face.py    tokenizer.json              text <-> ids
    load_tokenizer.py  opens either of them
    losses.py     what of a text its ids do not give back
    storage.py    how an id is stored, and that it is not learned
    writer.py     ids -> shards, in a folder that appears whole or not at all
    manifest.py   the JSON file that describes such a folder; the only way to open one
    dataset.py    an open folder: memory-mapped documents of each split
    packing.py    documents -> rows, by best fit, nothing cropped
    order.py      position -> row, by a keyed permutation without an array
    sampler.py    the same for any dataset of yours, with torch's DataLoader
    loader.py     position -> tokens, labels, positions and document ids of a row
    mixture.py    position -> corpus, for several corpora in fixed shares
    staged.py     step -> context length, for a run with a --length_schedule

    commands.py   how the commands end, and with which exit code
    report.py     the command `python -m data.report`: what a dataset can teach
    recall.py     the command `python -m data.recall`: a synthetic task over long contexts
    sums.py       the command `python -m data.sums`: a synthetic task for training from rewards

Every stage is a pure function of its inputs and a seed, so that a run resumes exactly from {seed,
epoch, position}.
"""
