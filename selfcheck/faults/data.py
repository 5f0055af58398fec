"""Group D of the fault matrix: data."""

import contextlib
import hashlib
import io
import json
import random
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import torch

from data import prepare, tokenizer
from data.dataset import open_dataset
from data.writer import write_dataset
from selfcheck.faults import numerics, runs
from selfcheck.faults.rows import Failed, Row, require

ONE_STEP = ("--max_steps", "1")


def refused(
    data: Path, out: Path, code: int, *words: str, flags: tuple[str, ...] = ONE_STEP
) -> str:
    """The last line of a training run that must end with `code` and say all of `words`."""
    child = runs.finish(runs.arguments(data, out, *flags), out.with_suffix(".log"), code)
    for word in words:
        require(word in child.last_line(), f"{word!r} is not said: {child.last_line()}")
    return child.last_line()


def trains(data: Path, out: Path, *flags: str):
    """The remedy worked: the same run now ends with 0."""
    runs.finish(runs.arguments(data, out, *ONE_STEP, *flags), out.with_suffix(".again.log"))


def prepared(folder: Path, *flags) -> tuple[int, str]:
    """(exit code, what it says) of data.prepare with these flags, in this process."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = prepare.main([str(flag) for flag in flags])
    return code, said.getvalue()


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def reseal(folder: Path, change) -> None:
    """Change a dataset's manifest in place, and give it the checksum that fits."""
    content = json.loads((folder / "manifest.json").read_text())
    change(content)
    del content["checksum"]
    content["checksum"] = hashlib.sha256(
        json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(content))


def text_of(seed: int, words: int = 200) -> str:
    """Words of a small language."""
    draw = random.Random(seed)
    return "".join(
        draw.choice(("alpha", "beta", "gamma", "delta", "\n", "x = 1", "  ", "return")) + " "
        for _ in range(words)
    )


def shared_tokenizer(folder: Path) -> Path:
    """A tokenizer of 300 pieces."""
    tokenizer.train([text_of(seed) for seed in range(20)], 300, folder / "shared.model")
    return folder / "shared.model"


# --------------------------------------------------------------------------------------------- rows


def truncated(trials: int, folder: Path) -> str:
    """Row 30."""
    data = runs.dataset(folder / "data")
    shard = data / "shard-00000.bin"
    whole, draw = shard.read_bytes(), random.Random(0)
    for trial in range(trials):
        size = draw.randrange(len(whole)) if trial else 0
        shard.write_bytes(whole[:size])
        refused(
            data,
            folder / f"run-{trial}",
            3,
            f"shard-00000.bin is damaged: expected {len(whole)} bytes, found {size}: restore it",
        )
        shard.write_bytes(whole)
        trains(data, folder / f"run-{trial}")
    return "exit code 3 with both sizes, before anything was written; restored, it trains"


def wrong_dtype(trials: int, folder: Path) -> str:
    """Row 31: ids stored as uint32, and as big-endian uint16."""
    data = runs.dataset(folder / "data")
    shard = data / "shard-00000.bin"
    whole = np.fromfile(shard, dtype="<u2")
    for trial, (dtype, words) in enumerate(
        (
            ("<u4", f"expected {whole.nbytes} bytes, found {2 * whole.nbytes}"),
            (">u2", "shard-00000.bin is damaged"),
        )
    ):
        whole.astype(dtype).tofile(shard)
        refused(data, folder / f"shard-{trial}", 3, words)
    whole.tofile(shard)
    trains(data, folder / "restored")
    return "3 for uint32 and for swapped bytes; restored, it trains"


def large_ids(trials: int, folder: Path) -> str:
    """Row 32."""
    try:
        write_dataset(
            [np.array([1, 2]), np.array([3, 64])], folder / "bad", vocab_size=64, eod_id=0
        )
        require(False, "an id of 64 was written for a vocabulary of 64")
    except ValueError as error:
        require("document 1 has the id 64 at token 1 (shard 0)" in str(error), str(error))
    require(not (folder / "bad").exists(), "a refused dataset was left behind")
    return "refused at write; document, token and shard are named"


def mismatch(trials: int, folder: Path) -> str:
    """Row 33: another tokenizer next to the ids, and a run continued on ids of another."""
    model = shared_tokenizer(folder)
    (folder / "text").mkdir()
    for seed in range(30):
        (folder / "text" / f"{seed}.txt").write_text(text_of(seed))
    for name in ("one", "two"):
        require(
            prepared(
                folder, "--input", folder / "text", "--output", folder / name, "--tokenizer", model
            )[0]
            == 0,
            "preparation failed",
        )
        tokenizer.train([text_of(seed) for seed in range(50, 90)], 300, model)
    flags = ("--vocab_size", "300", *ONE_STEP)
    trains(folder / "one", folder / "run", "--vocab_size", "300")
    refused(
        folder / "two",
        folder / "run",
        2,
        "tokenizer: ",
        flags=("--vocab_size", "300", "--max_steps", "2"),
    )
    kept = (folder / "one" / "tokenizer.model").read_bytes()
    shutil.copy(folder / "two" / "tokenizer.model", folder / "one" / "tokenizer.model")
    refused(
        folder / "one", folder / "other", 2, "the ids were made with another tokenizer", flags=flags
    )
    (folder / "one" / "tokenizer.model").write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    refused(
        folder / "one",
        folder / "third",
        2,
        "the ids were made with another tokenizer",
        "restore it",
        flags=flags,
    )
    (folder / "one" / "tokenizer.model").write_bytes(kept)
    trains(folder / "one", folder / "third", "--vocab_size", "300")
    return (
        "2 for a run on ids of another tokenizer, and for another model next to the ids; "
        "restored, it trains"
    )


def narrow(trials: int, folder: Path) -> str:
    """Row 34."""
    wide = write_dataset(
        [np.array([1, 70_000, 5] * 40)],
        folder / "wide",
        vocab_size=70_001,
        eod_id=0,
        val_fraction=0,
    )
    require(
        wide.dtype == np.uint32 and wide.split("train").read(0, 1, 1)[0] == 70_000,
        "the writer did not take uint32",
    )
    data = runs.dataset(folder / "data")
    reseal(data, lambda content: content.update(vocab_size=70_001))
    refused(
        data,
        folder / "run",
        3,
        "shard-00000.bin is damaged: expected",
        flags=("--vocab_size", "70001", *ONE_STEP),
    )
    trains(folder / "wide", folder / "run", "--vocab_size", "70001")
    return "the writer takes uint32; a dataset that did not: 3; prepared again, it trains"


def empty(trials: int, folder: Path) -> str:
    """Row 35: no file, empty files, and an empty JSONL field."""
    (folder / "none").mkdir()
    (folder / "files").mkdir()
    (folder / "files" / "a.txt").write_bytes(b"")
    (folder / "files" / "b.jsonl").write_text('{"text": ""}\n\n')
    for name, words in (("none", "no files in"), ("files", "there is no text in the input")):
        code, said = prepared(folder, "--input", folder / name, "--output", folder / "out")
        require(
            code == 2 and words in said and len(said.splitlines()) == 1, f"{name}: {code}, {said}"
        )
        require(not (folder / "out").exists(), f"{name}: an output was left behind")
    return "2 in one line for no files and for no text; nothing was left behind"


def too_few_rows(trials: int, folder: Path) -> str:
    """Row 36."""
    data = runs.dataset(folder / "data", 12)
    line = refused(
        data,
        folder / "run",
        2,
        "fewer than one global batch of 64: use a global batch of at most",
        flags=(*ONE_STEP, "--global_batch_size", "64"),
    )
    most = line.split("at most ")[1].split()[0]
    trains(data, folder / "batch", "--global_batch_size", most)
    refused(
        data,
        folder / "more",
        2,
        "fewer than",
        flags=(*ONE_STEP, "--global_batch_size", str(int(most) + 1)),
    )
    shorter = line.split("--context_length ")[1].split()[0]
    trains(data, folder / "context", "--context_length", shorter, "--global_batch_size", "64")
    return (
        f"2; the global batch of {most} that it names trains and one of {int(most) + 1} does "
        f"not; so does the context of {shorter} tokens"
    )


TEXTS = {
    "nul": b"a\0b\0",
    "crlf": b"one\r\ntwo\rthree\n\r",
    "bom": b"\xef\xbb\xbfafter the mark",
    "mark": "a\u2581b \u2581\u2581 \u2581".encode(),
    "control": b"<|endoftext|> and <s> </s> <unk> <0x00> <0xE2>",
    "emoji": "\U0001f600\u200d\U0001f525 \ufffd\U0010ffff".encode(),
    "spaces": b"  \t \n   x  ",
    "separators": "a\u2028b\u2029c\x0bd\x0ce\x85f".encode(),
}
REFUSED = {
    "latin.txt": (b"caf\xe9 noir", ":3: byte 0xe9 is not UTF-8"),
    "cut.txt": (b"abc\xf0\x9f\x98", ":3: byte 0xf0"),
    "overlong.txt": (b"ab\xc0\x80", ":2: byte 0xc0"),
    "surrogate.txt": (b"abcd\xed\xa0\x80", ":4: byte 0xed"),
    "lone.jsonl": (
        b'{"text": "fine"}\n{"text": "ab\\ud800"}\n',
        ":2: character 2 of 'text' is a lone surrogate",
    ),
}


def strange_text(trials: int, folder: Path) -> str:
    """Row 37."""
    model = shared_tokenizer(folder)
    for name, content in TEXTS.items():
        (folder / f"{name}.txt").write_bytes(content)
        code, said = prepared(
            folder,
            "--input",
            folder / f"{name}.txt",
            "--output",
            folder / name,
            "--tokenizer",
            model,
        )
        require(code == 0, f"{name}: {said}")
        dataset = open_dataset(folder / name)
        ids = dataset.split("train").read(0, 0, 10**9)
        require(
            tokenizer.Tokenizer(dataset.tokenizer_path).decode(ids).encode() == content,
            f"{name} does not come back",
        )
        require(
            (ids == dataset.eod_id).sum() == 1 and ids[-1] == dataset.eod_id,
            f"{name}: a control token in {ids}",
        )
    for name, (content, words) in REFUSED.items():
        (folder / name).write_bytes(content)
        code, said = prepared(
            folder, "--input", folder / name, "--output", folder / "out", "--tokenizer", model
        )
        require(
            code == 2 and f"{folder / name}{words}" in said and not (folder / "out").exists(),
            f"{name}: {code}, {said}",
        )
        code, said = prepared(
            folder,
            "--input",
            folder / name,
            folder / "crlf.txt",
            "--output",
            folder / f"{name}.set",
            "--tokenizer",
            model,
            "--on_error",
            "skip",
        )
        require(
            code == 0 and f"left out: {folder / name}{words}" in said,
            f"{name}: the remedy gives {code}, {said}",
        )
    return (
        f"{len(TEXTS)} kinds come back byte for byte with one end-of-document id each; "
        f"{len(REFUSED)} are refused by file and offset, or left out"
    )


def killed(trials: int, folder: Path) -> str:
    """Row 38: kill -9 at random moments of the preparation, then once more to the end. A kill that
    came too late does not count.
    """
    (folder / "text").mkdir()
    for seed in range(60):
        (folder / "text" / f"{seed}.txt").write_text(text_of(seed, 1500))
    flags = ["--input", folder / "text", "--vocab_size", 300, "--workers", 1, "--output"]
    begin = time.monotonic()
    require(
        _prepare_in_child(folder, [*flags, folder / "whole"]).wait() == 0,
        "the preparation itself fails",
    )
    duration = time.monotonic() - begin
    whole = contents(folder / "whole")
    draw = random.Random(0)
    landed = 0
    for attempt in range(5 * trials):
        if landed == trials:
            return (
                f"{landed} kills before the end, {attempt - landed} too late; a rerun gave the "
                "bytes of the uninterrupted preparation each time"
            )
        delay = duration * draw.random()
        early = _kill_and_rerun(folder, [*flags, folder / "out"], delay, whole)
        # as long as it takes on this machine now
        duration, landed = (duration * 1.03, landed + 1) if early else (delay, landed)
    raise Failed(f"only {landed} of {5 * trials} kills came before the end")


def _kill_and_rerun(folder: Path, flags: list, delay: float, whole: dict[str, bytes]) -> bool:
    """Whether the kill came before there was a dataset."""
    out = folder / "out"
    child = _prepare_in_child(folder, flags)
    time.sleep(delay)
    child.kill()
    early = not out.exists()
    if early:
        again = _prepare_in_child(folder, flags)
        require(again.wait() == 0, f"killed after {delay:.3f} s, the rerun fails: {again.words()}")
    require(contents(out) == whole, f"killed after {delay:.3f} s: other bytes")
    require(not list(folder.glob(".tmp-*")), f"killed after {delay:.3f} s: leftovers")
    shutil.rmtree(out)
    return early


def _prepare_in_child(folder: Path, flags: list) -> runs.Child:
    return runs.Child(
        folder / "prepare.log", lambda: sys.exit(prepare.main([str(flag) for flag in flags]))
    )


def leak(trials: int, folder: Path) -> str:
    """Row 39: change every token of one packed document; the others' logits keep every bit, and its
    own do not.
    """
    for attention in ("standard", "nsa"):
        model = numerics.small_model(attention).eval()
        for trial in range(trials):
            draw = torch.Generator().manual_seed(trial)
            ends = torch.randperm(95, generator=draw)[:3].sort().values + 1
            doc_ids = torch.bucketize(torch.arange(96), ends, right=True)[None].int()
            positions = torch.cat(
                [torch.arange(n) for n in doc_ids.unique_consecutive(return_counts=True)[1]]
            )[None]
            tokens = torch.randint(1, 64, (1, 96), generator=draw)
            other, victim = tokens.clone(), trial % 4
            other[doc_ids == victim] = (other[doc_ids == victim] + 7) % 64
            with torch.no_grad():
                before, after = (
                    model(x, positions=positions, doc_ids=doc_ids) for x in (tokens, other)
                )
            same = (before == after).all(-1)
            require(
                bool(same[doc_ids != victim].all()),
                f"{attention}: document {victim} of {ends.tolist()} leaks",
            )
            require(not same[doc_ids == victim].all(), f"{attention}: the perturbation did nothing")
    return "logits of the other documents bit-identical, in both attentions"


ROWS: list[Row] = [
    Row(30, "truncated shard", "3, expected and actual sizes", truncated, 3, 50),
    Row(31, "wrong dtype", "3", wrong_dtype),
    Row(
        32,
        "an id outside the vocabulary",
        "refused at write, shard and offset named",
        large_ids,
    ),
    Row(33, "tokenizer or data hash mismatch", "2", mismatch),
    Row(34, "vocabulary above 65,536 in uint16", "3", narrow),
    Row(35, "empty corpus", "2", empty),
    Row(
        36,
        "fewer rows than a global batch",
        "2, the smallest setting that works named",
        too_few_rows,
    ),
    Row(
        37,
        "invalid UTF-8, surrogates, NUL, CRLF, BOM, U+2581, <|endoftext|>",
        "lossless, or rejected by file:offset",
        strange_text,
    ),
    Row(
        38,
        "preparation killed",
        "a rerun gives the same bytes",
        killed,
        3,
        500,
    ),
    Row(39, "a document changed in a packed row", "the others' logits bit-identical", leak, 6, 100),
]
