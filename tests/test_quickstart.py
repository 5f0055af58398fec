"""What scripts/quickstart.sh proposes at its end: commands whose flags exist, and files of text."""

import re
import shlex
from pathlib import Path

from data import prepare
from longhaul import cli
from longhaul.config import TrainConfig
from profile_memory import ProfileConfig
from scripts import evaluate, generate

ROOT = Path(__file__).parent.parent


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
        "scripts.evaluate": lambda words: cli.parse(evaluate.EvaluateConfig, words),
        "scripts.generate": lambda words: cli.parse(generate.GenerateConfig, words),
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
