"""A run whose weights break, as a user meets it: every later step is skipped, and still the newest
good checkpoint stays, the printed command goes on from it, and nothing ends as if all was well.

With this learning rate the weights grow a hundredfold in every step, until a forward overflows.
"""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import train
from tests import kit
from tests.ranks import run_program

ROOT = Path(__file__).parent.parent
TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node=2"]
BREAKING = "--lr 1000 --warmup_steps 1 --schedule constant --max_steps 30 --save_every 2"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return kit.dataset(tmp_path_factory.mktemp("data") / "set", 200)


@pytest.fixture(scope="module")
def broken(data, tmp_path_factory) -> Path:
    """The folder of a run that ended in skipped steps."""
    out = tmp_path_factory.mktemp("broken") / "run"
    kit.run(kit.arguments(data, out, *BREAKING.split()), code=5)
    return out


def rescue(out: Path) -> list[str]:
    """The flags of the command that the run's end names."""
    words = shlex.split(json.loads((out / "exit.json").read_text())["remedy"])
    return words[words.index("train.py") + 1 :]


def value_of(flag: str, words: list[str]) -> str:
    return words[words.index(flag) + 1]


def skipped_since(out: Path) -> int:
    """The first step of the streak in which the run ended."""
    losses = kit.losses(out)
    finite = [number for number, loss in enumerate(losses, 1) if loss is not None]
    assert 2 < max(finite) < len(losses) - 4
    return max(finite) + 1


def newest_good(out: Path) -> Path:
    """The newest checkpoint that a step with a finite loss followed, among all that were saved."""
    taken = skipped_since(out) - 1
    return out / f"step-{(taken - 1) // 2 * 2:08d}"


def test_rotation_keeps_the_newest_good_checkpoint_next_to_the_newest(broken):
    last = kit.exit_record(broken)["last_step"]
    newest = [broken / f"step-{step:08d}" for step in (last // 2 * 2 - 2, last // 2 * 2)]
    assert newest_good(broken) not in newest
    assert sorted(broken.glob("step-*")) == [newest_good(broken), *newest]


def test_the_printed_command_trains_from_it_to_its_end(broken):
    words = rescue(broken)
    assert value_of("--resume", words) == str(newest_good(broken))
    kit.run(words)
    around = Path(value_of("--output_dir", words))
    assert kit.exit_record(around)["code"] == 0
    assert (around / "step-00000030").is_dir()
    losses = kit.losses(around)
    assert len(losses) == 30 - int(newest_good(broken).name[5:])
    assert None not in losses


@pytest.mark.slow
def test_a_resume_in_the_middle_of_skipped_steps_keeps_it(broken, data):
    """The halted run has saved no more than one that was killed there."""
    words = rescue(broken)
    more = ["--max_skipped_steps", "15"]
    said = kit.run(kit.arguments(data, broken, *BREAKING.split(), *more), code=5)
    assert "resumed" in said
    assert said.count("saved ") >= 2
    assert newest_good(broken).is_dir()
    again = rescue(broken)
    assert value_of("--resume", again) == value_of("--resume", words)


@pytest.mark.slow
def test_a_run_that_ends_in_skipped_steps_has_not_saved_its_last_one(broken, data, tmp_path):
    end = str(skipped_since(broken) + 1)
    for _ in range(2):  # the same command again does not find a completed run
        kit.run(
            kit.arguments(data, tmp_path / "run", *BREAKING.split(), "--max_steps", end), code=5
        )
        assert not (tmp_path / "run" / f"step-{int(end):08d}").exists()
    assert kit.exit_record(tmp_path / "run")["code"] == 5
    assert value_of("--resume", rescue(tmp_path / "run")).endswith(newest_good(broken).name)


@pytest.mark.slow
def test_two_ranks_agree_on_the_newest_good_checkpoint_and_go_on_from_it(data, tmp_path):
    out = tmp_path / "run"
    launched = [sys.executable, *TORCHRUN, "train.py"]
    command = [*launched, *kit.arguments(data, out, *BREAKING.split())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr
    assert kit.exit_record(out)["code"] == 5
    assert newest_good(out).is_dir()
    words = rescue(out)
    assert value_of("--resume", words) == str(newest_good(out))
    run_program(train.main, 2, words)
    assert None not in kit.losses(Path(value_of("--output_dir", words)))
