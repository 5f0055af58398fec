"""What the demos of both commands share: a first model is made once, by the first process."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from base import durable
from lab.posttrain.config import PolicyConfig
from longhaul import cli, dist

MARKER = "demo.json"  # what a folder was made for, and whether that was ended

# What a launcher such as torchrun tells its processes, and a command of one process must not read.
OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")

Make = Callable[[Path, int], None]  # into a folder, by a seed


def prepared(
    config: type[PolicyConfig],
    words: Sequence[str],
    defaults: Mapping[str, object],
    parts: Mapping[str, str],
    make: Make,
    check: Callable[[PolicyConfig], None] = lambda cfg: None,
) -> dict:
    """The settings that --demo adds to a command line, once what they name is made; {} without it.

    parts: the settings that name what `make` made, and where it is in the folder. It is made next
    to --output_dir, whose name it has with "-made". Nothing is made for a command line that is
    wrong, or of which `check` raises ValueError: that ends the program with one line.

    Only the first process looks into the folder. The others would find it half made.
    """
    try:
        typed = cli.given(config, list(words))
        if not typed.get("demo"):
            return {}
        made = Path(f"{typed.get('output_dir', defaults['output_dir'])}-made")
        added = dict(defaults) | {name: str(made / part) for name, part in parts.items()}
        cfg = config(**(added | typed))
        check(cfg)
        done = {"program": config.PROGRAM, "seed": cfg.seed, "done": True}
        first = dist.World.from_environment().rank == 0
        if first:
            require_own(made, done)
    except ValueError as error:
        dist.refuse(f"{config.PROGRAM.removeprefix('-m ')}: error: {error}")

    # models so small gain nothing from a second thread, which only waits for the first one
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    if first:
        _make(made, done, make)
    while marker(made) != done:  # if the first process fails, the launcher ends this one
        time.sleep(0.2)
    return added


def require_own(folder: Path, done: Mapping[str, object]):
    """ValueError if a folder holds anything that this demo did not make."""
    found = marker(folder)
    if found is None:
        if folder.is_file() or (folder.exists() and any(folder.iterdir())):
            raise ValueError(f"{folder} was not made by a demo: choose another --output_dir")
    elif (found["program"], found["seed"]) != (done["program"], done["seed"]):
        raise ValueError(
            f"{folder} was made by {found['program'].removeprefix('-m ')} with --seed "
            f"{found['seed']}: choose another --output_dir"
        )


def marker(folder: Path) -> dict | None:
    """What a folder says of itself; None if no demo made it."""
    path = folder / MARKER
    return json.loads(path.read_text()) if path.exists() else None


def _make(folder: Path, done: Mapping[str, object], make: Make):
    """`make` anew, unless it was ended before."""
    if marker(folder) == done:
        return
    if folder.exists():  # half made by a process that was killed
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    durable.write_json(folder / MARKER, {**done, "done": False})
    make(folder, done["seed"])
    durable.write_json(folder / MARKER, dict(done))


def alone(module: str, words: Sequence[str]):
    """Run a module of longhaul in a process of its own, whatever launched this one; SystemExit with
    its exit code if it fails.
    """
    command = [sys.executable, "-m", module, *words]
    done = subprocess.run(command, env=without_launcher(os.environ))
    if done.returncode:
        raise SystemExit(done.returncode)


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that no launcher started."""
    return {
        name: value for name, value in environment.items() if not name.startswith(OF_A_LAUNCHER)
    }
