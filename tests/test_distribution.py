"""The distribution's name: `longhaul` on the package index is somebody else's package."""

import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def tracked_texts() -> dict[str, str]:
    """The text of every file of the repository, by its path."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8", errors="ignore")
        for path in paths
        if path.is_file()
    }


def test_no_file_says_to_install_it_by_name():
    by_name = re.compile(r"longhaul(-\w+)?\[|pip3? install [^\n]*(?<![\w./-])longhaul(?![\w./-])")
    allowed = {"pyproject.toml", "tests/test_distribution.py"}
    told = [name for name, text in tracked_texts().items() if by_name.search(text)]
    assert set(told) <= allowed


def test_the_extras_refer_to_the_name_of_the_distribution():
    assert PROJECT["name"] != "longhaul"
    needed = [line for lines in PROJECT["optional-dependencies"].values() for line in lines]
    own = [line.partition("[")[0] for line in needed if "[" in line]
    assert own and set(own) == {PROJECT["name"]}


def test_every_extra_that_a_remedy_names_exists():
    extras = PROJECT["optional-dependencies"].keys()
    named = {
        found
        for text in tracked_texts().values()
        for found in re.findall(r"pip install -e '\.\[(\w+)\]'", text)
    }
    assert named and named <= extras
