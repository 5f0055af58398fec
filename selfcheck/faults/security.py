"""Group F of the fault matrix: security.

Pickles are made by hand here, byte by byte: if one were opened, it would make a file, and the row
would fail.
"""

import json
import os
import struct
import zipfile
from pathlib import Path

from base import durable
from base.tensors import read_tensors
from data.dataset import open_dataset
from longhaul import qwen3
from longhaul.checkpoint.format import checksum
from longhaul.checkpoint.load import load_model, verified
from scripts import convert_qwen3, evaluate, generate
from selfcheck.faults import data as data_rows
from selfcheck.faults.data import contents, prepared, shared_tokenizer, text_of
from selfcheck.faults.rows import Row, require
from tests import readers, runs

UNOPENED = "is a pickle, which can run code, and was not opened"


def evil(mark: Path, protocol: bytes = b"\x80\x02") -> bytes:
    """A pickle that makes the file `mark` when it is opened: os.open(mark, O_CREAT | O_WRONLY)."""
    name = str(mark).encode()
    return (
        protocol
        + b"cposix\nopen\n(X"
        + struct.pack("<I", len(name))
        + name
        + b"J"
        + struct.pack("<i", os.O_CREAT | os.O_WRONLY)
        + b"tR."
    )


def _say(main, args: list, log: Path, code: int = 2) -> str:
    """What a command of ours says before it ends with `code`."""
    child = runs.Child(log, main, [str(arg) for arg in args])
    found = child.wait()
    require(found == code, f"exit code {found}, not {code}: {child.words()[-500:]}")
    return child.words()


# --------------------------------------------------------------------------------------------- rows


def pickles(trials: int, folder: Path) -> str:
    """Row 45: as weights, checkpoint, dataset and tokenizer, under pickles' names and under good
    ones.
    """
    mark, data = folder / "mark", runs.dataset(folder / "data")
    bare = folder / "model.pt"
    archive = folder / "archive.bin"
    dcp = folder / "distributed"
    dcp.mkdir()
    (dcp / ".metadata").write_bytes(evil(mark))
    bare.write_bytes(evil(mark))
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", evil(mark))
    doors = [["--data", bare], ["--resume", archive]]
    doors += [["--init_from", pickle] for pickle in (bare, archive, dcp)]
    for number, words in enumerate(doors):
        flags = runs.arguments(data, folder / f"run-{number}", *data_rows.ONE_STEP)
        said = _say(_train, [*flags, *words], folder / f"train-{number}")
        require(
            UNOPENED in said.splitlines()[-1]
            and (words[0] == "--data" or "convert to safetensors" in said),
            f"{words}: {said[-300:]}",
        )
    for main, words in (
        (generate.main, ["--checkpoint", archive, "--prompt", "x"]),
        (evaluate.main, ["--checkpoint", dcp]),
        (convert_qwen3.main, ["--input", bare, "--output", folder / "converted"]),
    ):
        said = _say(main, words, folder / "log-other")
        require(
            UNOPENED in said and "convert to safetensors" in said,
            f"{main.__module__}: {said[-300:]}",
        )
    text = folder / "text.txt"
    text.write_text("some words\n")
    for pickle in (bare, archive):
        code, said = prepared(
            folder, "--input", text, "--output", folder / "out", "--tokenizer", pickle
        )
        require(code == 2 and UNOPENED in said, f"tokenizer: {code} {said}")
    _under_good_names(folder, mark)
    require(not mark.exists(), "a pickle was opened")
    return "not opened anywhere, bare or zipped, by name or by content; the remedy is named"


def _train(args: list[str]):
    import train

    train.main(runs.last_given(args))


def _under_good_names(folder: Path, mark: Path):
    """model.safetensors, a shard of a checkpoint and pytorch_model.bin that are pickles."""
    readers.make_qwen3(folder)
    hf = folder / "good"
    for shard in sorted(hf.glob("*.safetensors")):
        shard.write_bytes(evil(mark))
    _raises(lambda: qwen3.from_hf(hf), UNOPENED, "convert to safetensors")
    for path in (*hf.glob("*.safetensors"), hf / "model.safetensors.index.json"):
        path.unlink()
    (hf / "pytorch_model.bin").write_bytes(evil(mark))
    _raises(lambda: qwen3.from_hf(hf), UNOPENED, "convert to safetensors")
    manifest, _, name = readers.make_checkpoint(folder)
    step = folder / "step-00000000"
    (step / name).write_bytes(evil(mark))
    manifest["files"][name] |= durable.describe(step / name)
    (step / "manifest.json").write_text(json.dumps(manifest | {"checksum": checksum(manifest)}))
    _raises(lambda: load_model(verified(step)), UNOPENED)


def _raises(function, *words: str):
    """Failed unless `function()` raises one line of ValueError with all of `words`."""
    try:
        function()
    except ValueError as error:
        said = str(error)
        require(all(word in said for word in words) and "\n" not in said, f"{words} not in {said}")
        return
    require(False, f"nothing was refused where {words[0]!r} should be")


def foreign_tensors(trials: int, folder: Path) -> str:
    """Row 46: each named fault by a file made for it. tests/test_untrusted_bytes.py has damaged
    files by the hundred, with the memory watched.
    """
    path = folder / "model.safetensors"
    one = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    faults = {
        "huge header": (b" " * 8, 2**63, "a header of"),
        "long header": (b" " * (200 * 2**20), None, "a header of"),
        "overlap": (
            json.dumps({"a": one, "b": one}).encode(),
            None,
            "invalid offset",
        ),
        "hole": (
            json.dumps({"a": dict(one, data_offsets=[8, 16])}).encode(),
            None,
            "invalid offset",
        ),
        "out of bounds": (
            json.dumps({"a": dict(one, shape=[40], data_offsets=[0, 160])}).encode(),
            None,
            "not fully covered",
        ),
        "duplicate key": (
            b'{"a": '
            + json.dumps(one).encode()
            + b', "a": '
            + json.dumps(dict(one, data_offsets=[8, 16])).encode()
            + b"}",
            None,
            "'a' is given twice",
        ),
        "overflow": (
            json.dumps({"a": dict(one, shape=[2**62, 4, 2])}).encode(),
            None,
            "overflow",
        ),
    }
    for header, length, words in faults.values():
        path.write_bytes(struct.pack("<Q", length or len(header)) + header + bytes(16))
        _raises(lambda: read_tensors(path), str(path), words, "cannot be read")
    return f"{len(faults)} named faults refused"


def tricks(trials: int, folder: Path) -> str:
    """Row 48: inputs and outputs that are links, pipes or lead elsewhere."""
    model, place = shared_tokenizer(folder), folder / "place"
    (place / "text").mkdir(parents=True)
    (place / "text" / "a.txt").write_text(text_of(1))
    victim = folder / "victim"
    victim.mkdir()
    (victim / "thesis.txt").write_text("mine")
    before = contents(victim)
    os.mkfifo(place / "pipe")
    (place / "link").symlink_to(victim)
    (place / ".tmp-out").symlink_to(victim)
    (place / "file").write_text("mine")
    cases = {
        "a pipe": ("pipe", "new"),
        "nothing": ("nothing", "new"),
        "a device": ("/dev/zero", "new"),
        "a linked output": ("text", "link"),
        "a linked temporary folder": ("text", "out"),
        "a file as output": ("text", "file"),
        "below a file": ("text", "file/below"),
        "a folder that is not empty": ("text", "text"),
    }
    for name, (source, output) in cases.items():
        code, said = prepared(
            folder, "--input", place / source, "--output", place / output, "--tokenizer", model
        )
        require(code == 2 and len(said.splitlines()) == 1, f"{name}: exit code {code}, {said}")
    _strange_names(place, model)
    require(
        contents(victim) == before
        and {path.name for path in folder.iterdir()} == {"place", "victim", "shared.model"},
        f"something was written outside: {sorted(folder.iterdir())}",
    )
    return (
        f"{len(cases)} paths refused with 2; strange file names are names; nothing outside of "
        "the output changed"
    )


def _strange_names(place: Path, model: Path):
    """File names that look like paths, flags, several lines or broken text."""
    source = place / "names"
    source.mkdir()
    for name in (
        b"-rf",
        b"new\nline.txt",
        b"caf\xe9.txt",
        "\u2581.txt".encode(),
        b"$(touch x)",
        b"%00",
        b"..txt",
    ):
        (source / os.fsdecode(name)).write_text(text_of(len(name)))
    for documents in ("file", "directory"):
        code, said = prepared(
            place,
            "--input",
            source,
            "--output",
            place / f"strange-{documents}",
            "--tokenizer",
            model,
            "--documents",
            documents,
        )
        require(code == 0, f"strange names by {documents}: exit code {code}, {said}")
        open_dataset(place / f"strange-{documents}", verify=True)


ROWS: list[Row] = [
    Row(
        45,
        "a pickle named as weights, checkpoint, dataset or tokenizer",
        "refused unopened: convert to safetensors",
        pickles,
    ),
    Row(46, "malformed safetensors", "a clean error", foreign_tensors),
    Row(48, "path tricks", "2, no write outside the output folder", tricks),
]
