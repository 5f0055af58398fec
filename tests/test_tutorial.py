"""The commands of docs/TUTORIAL.md and of the README, in the order in which a reader meets them."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import longhaul
from data import prepare
from longhaul import cli
from longhaul.config import TrainConfig
from profile_memory import ProfileConfig
from scripts import evaluate, generate

ROOT = Path(__file__).parent.parent
NEIGHBOURS = [name if (ROOT / name).is_dir() else f"{name}.py" for name in longhaul.NEIGHBOURS]
CODE = ("longhaul", "scripts", "README.md")
DOORS = ("train.py", "profile_memory.py", "verify_chunked_loss.py")
# what else these commands are given here, for their time
SMALLER = {
    "python -m scripts.evaluate ": "--batches 4 --items 2",
    "python verify_chunked_loss.py": "--seq_len 96 --hidden_size 32 --vocab_size 20000",
}
FITS_AFTER_CHANGES = {"--advise": 2, "--solve": 2}


def commands_of(name: str) -> list[str]:
    """The lines of the document's bash blocks, without what follows two spaces and a `#`."""
    text = (ROOT / name).read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S)
    return [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]


def run_by_ci(command: str) -> bool:
    """Whether .ci/run gives this command itself; a test of its own runs the proof in a shorter
    form.
    """
    scripts = r"(quickstart|test|long_context_proof)\.sh"
    return bool(re.match(rf"(bash scripts/{scripts}|source )", command))


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A copy of the product, so that runs/ and mydata/ of the user stay as they are."""
    folder = tmp_path_factory.mktemp("tutorial")
    for name in (*NEIGHBOURS, *CODE, *DOORS):
        source = ROOT / name
        ignored = shutil.ignore_patterns("__pycache__")
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignored)
        else:
            shutil.copy(source, folder / name)
    return folder


def run(command: str, folder: Path):
    """The command in a shell, with this test's Python first in the path; it must end well."""
    for start, flags in SMALLER.items():
        if command.startswith(start):
            command += f" {flags}"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = dict(os.environ, PATH=path, OMP_NUM_THREADS="1")
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=570,
    )
    allowed = {0} | {code for flag, code in FITS_AFTER_CHANGES.items() if flag in command}
    assert done.returncode in allowed, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done


@pytest.mark.slow
def test_the_tutorial_runs_from_top_to_bottom(clone):
    resumed = []
    for command in commands_of("docs/TUTORIAL.md"):
        if not run_by_ci(command):
            resumed.append("resumed" in run(command, clone).stdout)
    assert sum(resumed) == 1, "one command continues a run from its checkpoint"


README_COMMANDS = [command for command in commands_of("README.md") if not run_by_ci(command)]
DEMOS = [command for command in README_COMMANDS if "--demo" in command]  # tests/test_demos.py
FOR_GPUS = [command for command in README_COMMANDS if "--context_length 131072" in command]
FOR_A_CPU = [command for command in README_COMMANDS if command not in FOR_GPUS + DEMOS]


@pytest.mark.slow
def test_the_recipes_for_a_cpu_run_one_after_the_other(clone):
    assert len(FOR_A_CPU) == 6 and len(DEMOS) == 2
    for command in FOR_A_CPU:
        run(command, clone)


@pytest.mark.slow
@pytest.mark.parametrize("command", FOR_GPUS)
def test_the_recipes_for_gpus_are_planned(command, clone):
    """profile_memory.py runs as it is. train.py prints the plan, and then refuses it on a machine
    that has too little memory, with a command that does fit.
    """
    if "profile_memory" in command:
        run(command, clone)
        return
    words = re.sub(r"^\S+=\S+ ", "", command).split()
    arguments = words[words.index("train.py") + 1 :]
    done = subprocess.run(
        [sys.executable, "train.py", *arguments, "--plan"],
        cwd=clone,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "plan (computed): 4B" in done.stdout, done.stderr
    refused = done.returncode == 2 and "closest command that runs here" in done.stderr
    assert done.returncode == 0 or refused, done.stderr


# ---- what the quickstart prints at its end


def printed_commands() -> list[str]:
    """The commands of its last lines, with a folder in place of $out."""
    text = (ROOT / "scripts/quickstart.sh").read_text(encoding="utf-8")
    found = re.findall(r'^ *echo "  .{12}((?:python|torchrun|source|tensorboard) .*)"$', text, re.M)
    return [command.split("     (")[0].replace("$out", "runs/quickstart") for command in found]


def test_the_quickstart_ends_with_commands_whose_flags_exist():
    first, *commands = printed_commands()
    assert first == "source .venv/bin/activate"
    programs = {
        "train.py": lambda words: cli.parse(TrainConfig, words),
        "profile_memory.py": lambda words: cli.parse(ProfileConfig, words),
        "data.prepare": prepare.parse,
        "scripts.evaluate": evaluate.build_parser().parse_args,
        "scripts.generate": generate.build_parser().parse_args,
        "tensorboard": lambda words: words.remove("--logdir"),
    }
    used = set()
    for command in commands:
        words = shlex.split(command)
        name = next(word for word in words if word in programs)
        programs[name](words[words.index(name) + 1 :])
        used.add(name)
    assert used == programs.keys()


def test_the_files_that_the_quickstart_proposes_to_prepare_are_text():
    command = next(line for line in printed_commands() if "data.prepare" in line)
    paths = prepare.parse(shlex.split(command)[3:]).input
    files = [file for path in paths for file in [ROOT / path, *(ROOT / path).rglob("*")]]
    names = [file for file in files if file.is_file() and file.suffix not in (".pyc",)]
    assert names
    for file in names:
        file.read_text(encoding="utf-8")
