"""The fuzzer finds what it is made for, and finds nothing in the product."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from data import hugging_face
from selfcheck import fuzz
from selfcheck.faults.readers import TARGETS, Target


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_every_reader_refuses_damaged_files_in_one_line(target):
    result = fuzz.fuzz(target, 300)
    assert result.fine and result.accepted + result.refused == 300, (
        result.failures,
        result.peak_mb,
    )
    assert result.refused > 30, "the damage does nothing"


@pytest.mark.slow
@pytest.mark.parametrize(
    "target",
    [target for target in TARGETS if target.name != "safetensors"],
    ids=lambda target: target.name,
)
def test_every_reader_refuses_many_damaged_files(target):
    """`python -m selfcheck.fuzz` gives each ten thousand. Row 46 of the fault matrix does so with
    those of safetensors.
    """
    result = fuzz.fuzz(target, 1_500)
    assert result.fine, (result.failures, result.peak_mb)


def test_a_tokenizer_whose_library_panics_is_refused():
    """As tokenizers 0.23.3 does on seeds 2414 and 7924 of tokenizer.json."""

    class PanicException(BaseException):
        pass

    panics = hugging_face._Panics(Path("t.json"))
    message = "t.json is one that tokenizers fails on .at 3.: save"
    with pytest.raises(ValueError, match=message), panics:
        raise PanicException("at\n3")
    with pytest.raises(KeyboardInterrupt), panics:
        raise KeyboardInterrupt


def broken(read):
    """A target whose reader does `read(content)` on one byte that differs from input to input."""

    def make(folder):
        (folder / "a").write_bytes(b"\0")

    return Target(
        "broken",
        make,
        lambda rng, good, folder: (folder / "a").write_bytes(bytes([1 + rng.randrange(3)])),
        lambda folder: read((folder / "a").read_bytes()[0]),
    )


def two_lines(byte):
    if byte == 2:
        raise ValueError("one\ntwo")


def bare(byte):
    if byte == 2:
        b"\xff".decode()


def dies(byte):
    if byte == 2:
        os.kill(os.getpid(), signal.SIGKILL)


def greedy(byte):
    if byte == 2:
        bytearray(os.urandom(1)) * 150_000_000


@pytest.mark.parametrize(
    "read, kind",
    [
        (lambda byte: {0: 1, 1: 1, 3: 1}[byte], "wrong"),
        (two_lines, "wrong"),
        (bare, "wrong"),
        (dies, "crashed"),
    ],
)
def test_a_broken_reader_is_found_with_its_seed_and_the_other_inputs_go_on(read, kind):
    result = fuzz.fuzz(broken(read), 20)
    bad = [seed for seed in range(20) if 1 + random.Random(seed).randrange(3) == 2]
    assert (
        not result.fine
        and getattr(result, kind) == len(bad) > 0
        and result.accepted == 20 - len(bad)
    )
    assert [int(failure.split("seed ")[1].split(":")[0]) for failure in result.failures] == bad


def test_a_greedy_reader_is_found():
    """In a process of its own: one that ran other tests has freed memory in hand, which taken again
    is no growth.
    """
    words = (
        "from tests import test_fuzz as t; result = t.fuzz.fuzz(t.broken(t.greedy), 20); "
        "assert not result.fine and result.peak_mb > 140, result"
    )
    subprocess.run([sys.executable, "-c", words], check=True, cwd=Path(__file__).parent.parent)


def test_the_table_has_a_line_for_each_reader(capsys):
    assert fuzz.main(["--inputs", "5", "--only", "corpus", "toml"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "reader",
        "toml",
        "corpus",
    ]


@pytest.mark.parametrize("inputs", ["0", "-1", "many"])
def test_a_number_of_inputs_that_tests_nothing_is_refused(inputs, capsys):
    with pytest.raises(SystemExit) as stop:
        fuzz.main(["--inputs", inputs])
    assert stop.value.code == 2
    assert "--inputs" in capsys.readouterr().err
