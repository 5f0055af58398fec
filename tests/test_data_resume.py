"""A preparation that is killed anywhere keeps its full shards, and ends with the bytes of an
undisturbed one.
"""

import functools
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from base import durable
from data import pipeline
from data.dataset import open_dataset
from data.manifest import IntegrityError
from data.pipeline import build_dataset
from data.prepare import main
from data.sources import Document
from data.tokenizer import train
from data.writer import Writer, write_dataset
from tests.faults.disk import forced
from tests.kit import contents

ROOT = Path(__file__).parent.parent
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "seven", "sing"]


def text_of(seed: int, words: int = 300) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, words)) + "\n"


DOCUMENTS = [Document(str(n), text_of(n) if n % 5 else "") for n in range(30)]


class Killed(BaseException):
    """What the process would not have lived to see."""


# ---- the writer


def test_a_writer_continues_after_its_full_shards_and_writes_the_same_bytes(tmp_path):
    """Shards of 200 tokens; the writer is lost after any document, in any shard."""
    draw = random.Random(0)
    documents = [np.full(draw.randrange(1, 60), draw.randrange(1, 90)) for _ in range(60)]
    settings = dict(vocab_size=90, eod_id=0, shard_tokens=200)
    write_dataset(documents, tmp_path / "whole", val_fraction=0.2, **settings)

    (tmp_path / "d").mkdir()
    writer = Writer(tmp_path / "d", 90, 0, 200)
    for _ in range(12):
        position = len(writer.lengths)
        for document in documents[position : position + draw.randrange(1, 20)]:
            writer.add(pipeline.TokenizedDocument(document))
        records = [shard.record() for shard in writer.shards]
        writer = Writer(tmp_path / "d", 90, 0, 200)
        writer.restore(records)
    for document in documents[len(writer.lengths) :]:
        writer.add(pipeline.TokenizedDocument(document))
    writer.finish(None, [], 0.2)
    durable.remove(writer.working)
    assert contents(tmp_path / "d") == contents(tmp_path / "whole")
    assert len(list((tmp_path / "d").glob("*.bin"))) > 3
    open_dataset(tmp_path / "d", verify=True)


def test_a_full_shard_that_became_shorter_is_refused(tmp_path):
    writer = Writer(tmp_path, 9, 0, 6)
    for _ in range(3):
        writer.add(pipeline.TokenizedDocument(np.array([1, 2])))
    records = [shard.record() for shard in writer.shards]
    assert [record["documents"] for record in records] == [2]  # which fill it
    (tmp_path / "shard-00000.bin").write_bytes(b"")
    with pytest.raises(IntegrityError, match="shard-00000.bin"):
        Writer(tmp_path, 9, 0, 6).restore(records)


# ---- a preparation


@pytest.fixture(scope="module", autouse=True)
def model(tmp_path_factory):
    """The tokenizer of most preparations."""
    path = tmp_path_factory.mktemp("model") / "tokenizer.model"
    train([text_of(n) for n in range(9)], 300, path)
    SETTINGS["tokenizer"] = path


SETTINGS = dict(val_fraction=0.2, key="documents", workers=1)


def prepare(output: Path, documents=DOCUMENTS, stop: int | None = None, **settings):
    """Prepare in this process; `stop` documents are read, of both readings together."""
    left = [10**9 if stop is None else stop]

    def read():
        for document in documents:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            yield document

    settings = SETTINGS | settings
    said = []
    try:
        build_dataset(read, output, report=said.append, **settings)
    except Killed:
        assert not output.exists()
    return said


@pytest.fixture(scope="module", autouse=True)
def small_shards():
    """A shard holds one document, and each is encoded by itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "Writer", functools.partial(Writer, shard_tokens=1))
        patch.setattr(pipeline, "BATCH_CHARS", 1)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory, small_shards):
    output = tmp_path_factory.mktemp("whole") / "d"
    prepare(output)
    return contents(output)


@pytest.mark.parametrize("stop", [0, 30, 45, 59])
def test_a_preparation_continues_after_any_document(tmp_path, whole, monkeypatch, stop):
    """Without encoding again what is in its full shards."""
    prepare(tmp_path / "d", stop=stop)
    encoded = []
    encode = pipeline.encode

    def watched(documents, *rest):
        return encode((encoded.append(one) or one for one in documents), *rest)

    monkeypatch.setattr(pipeline, "encode", watched)
    said = prepare(tmp_path / "d")
    assert contents(tmp_path / "d") == whole
    continued = [line for line in said if line.startswith("continuing after ")]
    assert len(continued) == (stop > len(DOCUMENTS) + 5)  # three are encoded ahead, some are empty
    if continued:
        most = 2 * len(DOCUMENTS) - stop + 7
        assert 2 * len(DOCUMENTS) - stop < len(encoded) <= most
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_a_shard_is_on_the_disk_before_it_is_recorded(tmp_path, monkeypatch):
    is_forced = forced(lambda name, function: monkeypatch.setattr(durable, name, function))
    save = pipeline.State.save
    recorded = []

    def checked(state: pipeline.State):
        recorded[:] = [state.folder / row[file] for row in state.shards for file in ("bin", "idx")]
        assert [path.name for path in recorded if not is_forced(path)] == []
        save(state)

    monkeypatch.setattr(pipeline.State, "save", checked)
    prepare(tmp_path / "d")
    assert len(recorded) > 20


DISK = [(durable, "write"), (durable, "fsync"), (os, "rename"), (os, "replace")]


@pytest.mark.slow
def test_a_kill_before_or_after_any_operation_of_the_disk_leaves_the_same_bytes(
    tmp_path, monkeypatch
):
    few = DOCUMENTS[1:5]
    prepare(tmp_path / "whole", few)
    expected = contents(tmp_path / "whole")
    left = [0]

    def killing(operation):
        def run(*args, **options):
            for half in (lambda: operation(*args, **options), lambda: None):
                left[0] -= 1
                if left[0] < 0:
                    raise Killed
                half()

        return run

    for module, name in DISK:
        monkeypatch.setattr(module, name, killing(getattr(module, name)))
    for kills in itertools.count():
        left[0] = kills
        try:
            build_dataset(lambda: few, tmp_path / "d", report=print, **SETTINGS)
            break
        except Killed:
            left[0] = 10**9
        for stop in (4, None):  # killed once more, then restored from there
            if not (tmp_path / "d").exists():
                prepare(tmp_path / "d", few, stop=stop)
        assert contents(tmp_path / "d") == expected, f"kill {kills}"
        shutil.rmtree(tmp_path / "d")
    assert kills > 40


OTHERS = dict(key="others", documents=DOCUMENTS[:9])
TRAINED = dict(tokenizer=None, vocab_size=310)


@pytest.mark.parametrize("change", [OTHERS, TRAINED, dict(val_fraction=0.3)])
def test_other_documents_or_settings_begin_anew(tmp_path, change):
    prepare(tmp_path / "whole", **change)
    prepare(tmp_path / "d", stop=50)
    said = prepare(tmp_path / "d", **change)
    assert not any("continuing" in line for line in said)
    assert contents(tmp_path / "d") == contents(tmp_path / "whole")


def test_a_second_process_on_the_same_output_is_refused(tmp_path, capsys):
    (tmp_path / "a.txt").write_text(text_of(0))
    with durable.building(tmp_path / "d", keep=True) as folder:
        (folder / "mine").write_text("mine")
        arguments = ["--input", str(tmp_path / "a.txt"), "--output", str(tmp_path / "d")]
        assert main([*arguments, "--vocab_size", "300"]) == 2
        assert "--output" in capsys.readouterr().err
        assert (folder / "mine").read_text() == "mine"


def test_a_disk_that_is_too_small_is_refused_before_a_shard_is_written(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "a.txt").write_text(text_of(0, 5000))
    monkeypatch.setattr(durable, "free_bytes", lambda folder: 1000)
    output = tmp_path / "new" / "folder" / "d"
    arguments = ["--input", str(tmp_path / "a.txt"), "--output", str(output)]
    assert main([*arguments, "--vocab_size", "300"]) == 6
    error = capsys.readouterr().err
    needed = int(error.split("needs about ")[1].split()[0].replace(",", ""))
    assert not list(tmp_path.rglob("shard-*"))
    monkeypatch.undo()
    assert main([*arguments, "--vocab_size", "300"]) == 0
    shards = sum(path.stat().st_size for path in output.glob("shard-*.bin"))
    assert 1 <= needed / shards < 1.2


def test_a_disk_that_has_filled_up_meanwhile_costs_nothing_that_is_done(
    tmp_path, whole, monkeypatch
):
    prepare(tmp_path / "d", stop=50)
    before = contents(tmp_path / ".tmp-d" / "working")
    with monkeypatch.context() as full:
        full.setattr(durable, "free_bytes", lambda folder: 10)
        with pytest.raises(OSError, match="10 are free"):
            prepare(tmp_path / "d")
    assert contents(tmp_path / ".tmp-d" / "working") == before
    said = prepare(tmp_path / "d")
    assert said[0].startswith("continuing after 1")
    assert contents(tmp_path / "d") == whole


def test_a_changed_file_begins_anew_and_other_workers_do_not(tmp_path, monkeypatch, capsys):
    for n in range(20):
        (tmp_path / f"{n}.txt").write_text(text_of(n))
    output = tmp_path / "out" / "d"
    arguments = ["--input", str(tmp_path / "*.txt"), "--output", str(output), "--vocab_size", "300"]

    for change in ("nothing", "a file"):
        with monkeypatch.context() as patch:
            patch.setattr(pipeline, "_joined", stopping(7, KeyboardInterrupt))
            assert main(arguments) == 130
        capsys.readouterr()
        if change == "a file":
            (tmp_path / "3.txt").write_text(text_of(0))
        assert main([*arguments, "--workers", "1"]) == 0
        assert ("continuing after 6" in capsys.readouterr().out) == (change == "nothing")
        shutil.rmtree(output)


def stopping(after: int, error: type[BaseException] = Killed):
    """`pipeline._joined` that ends with an error after so many documents."""
    joined = pipeline._joined

    def stopped(parts):
        for number, document in enumerate(joined(parts)):
            if number == after:
                raise error
            yield document

    return stopped


# ---- kill -9


# As `python -m data.prepare`, with a shard for each document, killed before a document is added.
PREPARE = """
import functools, os, signal, sys
from data import pipeline
from data.prepare import main

class Writer(pipeline.Writer):
    def add(self, document):
        if len(self.lengths) == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)
        super().add(document)

pipeline.Writer = functools.partial(Writer, shard_tokens=1)
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.slow
def test_kill_9_twice_leaves_the_same_bytes(tmp_path):
    (tmp_path / "in").mkdir()
    for n in range(20):
        (tmp_path / "in" / f"{n}.txt").write_text(text_of(n, 3000))
    flags = ["--input", str(tmp_path / "in"), "--workers", "4", "--vocab_size", "300", "--output"]
    assert main([*flags, str(tmp_path / "whole")]) == 0

    for documents in ("7", "14"):
        command = [sys.executable, "-u", "-c", PREPARE, documents, *flags, str(tmp_path / "d")]
        process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert process.returncode == -signal.SIGKILL
    assert "continuing after 6 " in process.stdout
    assert main([*flags, str(tmp_path / "d")]) == 0
    assert contents(tmp_path / "d") == contents(tmp_path / "whole")
    assert not list(tmp_path.glob(".tmp-*"))
