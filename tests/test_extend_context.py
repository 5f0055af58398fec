"""scripts/extend_context.sh, as a user runs it. tests/test_round_trip.py has what transformers does
with an exported folder.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.warm_python import warm_python

ROOT = Path(__file__).parent.parent
SCRIPT = "scripts/extend_context.sh"
LONG = 256  # tokens, the last length of the rehearsal
FLAGS = ("--device", "cpu", "--dtype", "fp32")


# in which `python` is the one that runs the tests
OURS = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def extend(
    *words: str,
    environment: Mapping[str, str] = OURS,
) -> subprocess.CompletedProcess:
    """Run the script with the `python` of an environment."""
    settings = {"OMP_NUM_THREADS": "1", "BATCHES": "4", "SCHEDULE": f"64:25,128:3,{LONG}:2"}
    return subprocess.run(
        ["bash", SCRIPT, *words],
        cwd=ROOT,
        env={**environment, **settings},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def warm(tmp_path_factory) -> Iterator[dict[str, str]]:
    with warm_python(tmp_path_factory.mktemp("warm")) as environment:
        yield environment


@pytest.fixture(scope="module")
def rehearsed(warm, tmp_path_factory) -> Path:
    """The output folder of a rehearsal."""
    out = tmp_path_factory.mktemp("extend") / "out"
    done = extend("--rehearse", str(out), *FLAGS, environment=warm)
    assert done.returncode == 0, done.stdout + done.stderr
    (out / "said.txt").write_text(done.stdout)
    return out


@pytest.mark.slow
def test_the_loss_is_measured_at_both_lengths_before_and_after(rehearsed):
    said = (rehearsed / "said.txt").read_text().splitlines()
    for length in (64, LONG):
        line = next(line for line in said if line.split()[:3] == ["at", str(length), "tokens"])
        before, after = map(float, line.split()[3:])
        assert 0 < after < before < 8


@pytest.mark.slow
def test_the_exported_folder_has_the_new_length_and_base(rehearsed):
    config = json.loads((rehearsed / "hf" / "config.json").read_text())
    before = json.loads((rehearsed / "qwen3" / "config.json").read_text())
    assert (before["max_position_embeddings"], config["max_position_embeddings"]) == (64, LONG)
    assert config["rope_theta"] == 4 * before["rope_theta"]


@pytest.mark.slow
def test_the_same_command_again_does_nothing_twice(rehearsed, warm):
    files = [path for path in rehearsed.rglob("*") if path.is_file()]
    before = {path: path.stat().st_mtime_ns for path in files}
    assert extend("--rehearse", str(rehearsed), *FLAGS, environment=warm).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in files} == before


def test_bad_input_is_refused_before_anything_is_written(tmp_path):
    no_model = ["longhaul", "data", str(tmp_path / "new")]
    for words, named in (([], "HF_DIR"), (no_model, "longhaul")):
        done = extend(*words)
        assert done.returncode == 2 and named in done.stderr
        assert not list(tmp_path.iterdir())


# An interpreter that is killed in a conversion, with a part of the output written.
DIES = """#!/usr/bin/env bash
case "$*" in *convert_qwen3*)
    while [ "$1" != --output ]; do shift; done
    mkdir -p "$2"
    echo torn > "$2/config.json"
    exit 137
esac
PATH=${PATH#*:} exec python "$@"
"""


@pytest.mark.slow
def test_a_kill_in_a_conversion_is_continued(rehearsed, warm, tmp_path):
    """Also with a model whose folder asks to run code: only its tokenizer.json is opened."""
    folder = "hf"
    file = rehearsed / "qwen3" / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    settings["auto_map"] = {"AutoTokenizer": ["code.py", None]}
    file.write_text(json.dumps(settings))

    python = tmp_path / "python"
    python.write_text(DIES)
    python.chmod(0o755)
    before = {path.name for path in (rehearsed / folder).iterdir()}
    shutil.rmtree(rehearsed / folder)
    for path in rehearsed.glob(f"evaluation-{folder}-*"):
        path.unlink()

    dying = warm | {"PATH": f"{tmp_path}{os.pathsep}{warm['PATH']}"}
    assert extend("--rehearse", str(rehearsed), *FLAGS, environment=dying).returncode == 137
    assert not (rehearsed / folder).exists()
    done = extend("--rehearse", str(rehearsed), *FLAGS, environment=warm)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (rehearsed / folder).iterdir()} == before
    assert not list(rehearsed.glob("*.part"))
