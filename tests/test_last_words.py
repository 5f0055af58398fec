"""The last words on screen: the remedy, which torchrun repeats, and without torch as well."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from base import installed
from longhaul import exits
from tests import kit

ROOT = Path(__file__).parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
DOORS = (
    "train.py",
    "profile_memory.py",
    "verify_chunked_loss.py",
    "-m scripts.generate --checkpoint x --prompt y",
    "-m scripts.evaluate --checkpoint x",
    "-m scripts.convert_qwen3 --input x --output y",
    "-m data.prepare",
    "-m benchmarks.vocab_loss",
)


# ---- torchrun


@pytest.mark.slow
def test_the_report_of_torchrun_repeats_the_remedy_of_a_typo():
    done = subprocess.run(
        [*TORCHRUN, "train.py", "--learning_rate", "1"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    before, report = done.stderr.split("Root Cause", 1)
    words = "train.py: error: unknown flag --learning_rate: did you mean --lr?"
    assert done.returncode != 0
    assert words in before and words in report


def test_a_disk_that_refuses_the_report_changes_neither_words_nor_code(monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/dev/full")
    exits.last_words("the disk is full: free space")
    assert capsys.readouterr().err == "the disk is full: free space\n"


# ---- an output that nobody reads


def test_a_screen_whose_reader_has_gone_drops_what_is_written(monkeypatch):
    read_end, write_end = os.pipe()
    with open(write_end, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        screens = exits.Screens()
        screens.guard()
        print("read", flush=True)
        assert os.read(read_end, 100) == b"read\n"
        os.close(read_end)
        for _ in range(3):
            print("not read", flush=True)
        screens.restore()
        assert sys.stdout is pipe


@pytest.mark.slow
def test_after_ctrl_c_a_run_whose_output_nobody_reads_is_saved_and_a_line_says_so(tmp_path):
    source, out = kit.dataset(tmp_path / "data"), tmp_path / "run"
    flags = kit.arguments(source, out, "--max_steps", "1000000", "--schedule", "constant")
    process = subprocess.Popen(
        [*TORCHRUN, "train.py", *flags],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    kit.wait_for(lambda: kit.steps_logged(out) > 3)
    process.stdout.close()
    os.killpg(process.pid, signal.SIGINT)
    printed = process.stderr.read()
    assert process.wait(300) != 0
    assert re.search(r"stopped by .* and saved at step \d+: run the same command", printed), printed

    ended = kit.exit_record(out)
    assert ended["code"] == exits.PREEMPTED
    assert ended["last_step"] == kit.steps_logged(out)
    assert (out / f"step-{ended['last_step']:08d}").exists()
    assert not (out / ".lock").exists()


# ---- a Python without torch


@pytest.mark.parametrize("door", DOORS)
def test_a_missing_torch_is_answered_with_the_two_ways_to_run(door, tmp_path):
    done = subprocess.run(
        [sys.executable, "-S", *door.split()], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert "has no torch, numpy" in line
    ways = ("source .venv/bin/activate", ".venv/bin/python")
    installs = ("bash scripts/quickstart.sh", "pip install -r requirements.txt")
    assert all(way in line for way in ways) or all(way in line for way in installs)


def test_a_venv_that_lacks_a_package_is_not_proposed_to_itself(monkeypatch, tmp_path):
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").touch()
    monkeypatch.setattr(installed, "ROOT", str(tmp_path))
    assert "source .venv/bin/activate" in installed.remedy()
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    assert "bash scripts/quickstart.sh installs everything" in installed.remedy()


def test_an_old_python_is_named_with_the_one_that_is_needed(monkeypatch):
    assert installed.problem() is None
    monkeypatch.setattr(installed, "LOWEST_PYTHON", (99, 0))
    assert f"is Python {sys.version_info[0]}." in installed.problem()
    monkeypatch.undo()
    monkeypatch.setattr(installed, "NEEDED", ("torch", "a_package_that_is_not_there"))
    assert installed.problem() == f"{sys.executable} has no a_package_that_is_not_there"


# ---- code that imports longhaul


def own_code(folder: Path, words: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", words], cwd=folder, env=environment, capture_output=True, text=True
    )


def test_own_code_next_to_a_folder_called_data_imports_longhaul(tmp_path):
    (tmp_path / "data").mkdir()
    done = own_code(tmp_path, "import longhaul, data; print(data.__file__)")
    assert done.stdout.strip() == str(ROOT / "data" / "__init__.py"), done.stderr


def test_a_module_of_ones_own_that_hides_ours_is_named(tmp_path):
    (tmp_path / "model.py").write_text("")
    last = own_code(tmp_path, "import longhaul").stderr.splitlines()[-1]
    assert f"import finds {tmp_path / 'model.py'}: rename yours, or copy model.py" in last
