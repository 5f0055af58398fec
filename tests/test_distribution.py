"""The distribution: footprint alone. `longhaul` on the package index is somebody else's package."""

import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.test_rooms import copy_room

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


def test_the_distribution_holds_footprint_alone_and_needs_torch_alone():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert PROJECT["name"] not in ("footprint", "longhaul")
    assert [line.partition(">")[0] for line in PROJECT["dependencies"]] == ["torch"]
    assert PROJECT["dependencies"][0] in (ROOT / "requirements.txt").read_text().split()
    assert settings["packages"] == {"find": {"include": ["footprint", "footprint.*"]}}
    rooms = [path for path in (ROOT / "footprint").iterdir() if path.is_dir() and has_code(path)]
    assert all((room / "__init__.py").exists() for room in rooms)
    (name,) = settings["package-data"]["footprint"]
    assert (ROOT / "footprint" / name).exists()


def has_code(folder: Path) -> bool:
    """Whether the setting `packages` would have to name it."""
    return any(folder.glob("*.py"))


def test_the_console_command_is_a_function_of_the_package():
    module, _, function = PROJECT["scripts"]["footprint"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_no_remedy_names_an_extra():
    named = re.compile(r"pip install (-e )?'?\.\[")
    assert not [name for name, text in tracked_texts().items() if named.search(text)]


@pytest.mark.slow
def test_the_wheel_works_where_there_is_nothing_but_torch(tmp_path):
    source = tmp_path / "clone"
    copy_room(source, "footprint", "docs/FOOTPRINT.md", "pyproject.toml", "LICENSE")
    wheel = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    made = subprocess.run(
        [*wheel, "-w", tmp_path, source], cwd=tmp_path, capture_output=True, text=True
    )
    if "No module named 'setuptools'" in made.stderr or "Cannot import" in made.stderr:
        pytest.skip("this Python has no setuptools to build a wheel with")
    assert made.returncode == 0, made.stderr
    (built,) = tmp_path.glob("longhaul_footprint-*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(built) as archive:
        archive.extractall(site)
    assert {path.name.partition("-")[0] for path in site.iterdir()} == {
        "footprint",
        "longhaul_footprint",
    }
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "mine.py").write_text(STEP)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    done = footprint_alone(site, "--gpu", "cpu", "train.py")
    assert done.returncode == 0, done.stderr
    assert str(site) in done.stderr and "live peak" in done.stdout

    done = footprint_alone(site, "--step", "mine.py", "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["peak_live_bytes"] >= 2 * 4 * 8
    assert str(site) in done.stderr

    pytest.importorskip("transformers", reason="transformers is not installed")
    done = footprint_alone(site, "--hf", str(tmp_path), "--seq", "8")
    assert done.returncode == 0, done.stderr
    assert "cards:" in done.stdout


def footprint_alone(site: Path, *words: str) -> subprocess.CompletedProcess:
    """The command, beside the folder of what is installed."""
    return subprocess.run(
        [sys.executable, "-m", "footprint", *words],
        cwd=site.parent,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )


CONFIG = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    vocab_size=64,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
)
STEP = """
import footprint, torch
print(footprint.__file__)

def build():
    weight = torch.nn.Parameter(torch.zeros(8))
    return weight, torch.optim.SGD([weight])

def step(state):
    weight, optimizer = state
    weight.sum().backward()
    optimizer.step()
"""
SCRIPT = """
import footprint, sys, torch
print(footprint.__file__)
weight = torch.nn.Parameter(torch.zeros(8))
optimizer = torch.optim.SGD([weight])
while True:
    weight.sum().backward()
    optimizer.step()
"""
