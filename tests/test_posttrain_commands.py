"""The commands of docs/POSTTRAIN.md: each parses as its program parses it. Plans are made in
tests/test_memory_posttrain.py.
"""

import re
import shlex
from pathlib import Path

import pytest

import profile_memory
from benchmarks.posttrain import PosttrainConfig
from data import prepare
from longhaul import cli
from longhaul.memory import posttrain
from longhaul.posttrain.config import GradeConfig, IntuitorConfig, with_sources
from longhaul.run import start
from scripts import reward

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs/POSTTRAIN.md").read_text(encoding="utf-8")


def commands() -> list[str]:
    """The command lines of the document's blocks, then those within its sentences."""
    blocks = re.findall(r"^```bash\n(.*?)^```", TEXT, re.M | re.S)
    lines = "\n".join(blocks).replace("\\\n", "").splitlines()
    within = re.findall(r"`(python [^`\n]+)`", re.sub(r"^```.*?^```", "", TEXT, flags=re.M | re.S))
    return [line.split("  #")[0].strip() for line in [*lines, *within] if line]


COMMANDS = commands()
PLANS = [command for command in COMMANDS if "profile_memory.py" in command]
PLANS = [command for command in PLANS if "--measure" not in command]  # a real step, of minutes


def trains(config: type, words: list[str]):
    """What scripts.grade and scripts.intuitor do with a command line before they begin."""
    typed = cli.given(config, words)
    made = dict(init_from="made", data="made") if typed.get("demo") else {}
    return config(**with_sources(made | typed))


def parse(program: str, words: list[str]):
    """Read a command line as its program does; ValueError for what it would refuse."""
    if not words and program in ("scripts.grade", "scripts.intuitor"):
        return  # a sentence that names the program
    if posttrain.FLAG in words:
        assert program in ("scripts.grade", "scripts.intuitor")
        return  # tests/test_memory_posttrain.py makes these tables
    if program == "scripts.grade":
        trains(GradeConfig, words)
    elif program == "scripts.intuitor":
        trains(IntuitorConfig, words)
    elif program == "data.prepare":
        prepare.parse(words)
    elif program == "benchmarks.posttrain":
        cli.parse(PosttrainConfig, words)
    elif program == "scripts.reward":
        cli.parse(reward.RewardConfig, words)
    elif program == "profile_memory.py":
        cli.parse(profile_memory.flags_of(words), words, "", start.completed)
    else:
        raise ValueError(f"{program} is no program of docs/POSTTRAIN.md")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_parses_and_its_program_is_there(command):
    python, *words = shlex.split(command)
    assert python == "python"
    if words[0] == "-m":
        del words[0]
        assert (ROOT / f"{words[0].replace('.', '/')}.py").is_file()
    else:
        assert (ROOT / words[0]).is_file()
    parse(words[0], words[1:])


def test_a_flag_that_is_not_there_is_found():
    for command in COMMANDS:
        words = [word for word in shlex.split(command)[1:] if word != "-m"]
        if posttrain.FLAG not in words:
            with pytest.raises((ValueError, AssertionError, SystemExit)):
                parse(words[0], [*words[1:], "--no_such_flag"])


def test_every_program_has_a_command():
    assert len(COMMANDS) >= 15 and len(PLANS) == 5
    for program in ("scripts.intuitor --demo", "scripts.grade --demo", "benchmarks.posttrain"):
        assert any(f"python -m {program}" in command for command in COMMANDS), program
