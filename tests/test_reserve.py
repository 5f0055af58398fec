"""What a GPU's allocator reserves decides whether a step fits, not what is live."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from footprint.cards.allocator import replay
from footprint.cards.device import beyond_the_allocator, multiplying_threads, with_cublas
from footprint.record.trace import Trace
from longhaul.config import TrainConfig
from longhaul.dist import World
from longhaul.planner import plan as planner
from longhaul.planner import reserve
from longhaul.planner.needs import needs
from longhaul.planner.simulate import profile
from model import GIB

NAMES = reserve.ALLOCATOR_SETTINGS
CFG = TrainConfig(model_size="tiny", model_overrides=("num_layers=2",), context_length=16384)


@pytest.fixture(scope="module")
def trace():
    return with_workspaces(profile(dataclasses.replace(CFG, device="cuda")).trace)


def with_workspaces(trace: Trace) -> Trace:
    """The trace with cuBLAS's workspaces, which come from the allocator."""
    return with_cublas(trace, multiplying_threads(trace))


def planned(available: float) -> planner.Plan:
    return planner.plan(CFG, CFG.model(), World(), torch.device("cuda"), available)


def settings_after_import(**environment) -> list[str]:
    """What a command has set when it has imported `installed`."""
    clean = {name: value for name, value in os.environ.items() if name not in NAMES}
    code = f"import base.installed, os; print([os.environ.get(name) for name in {NAMES!r}])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env=clean | environment, capture_output=True, text=True, check=True
    )
    return eval(done.stdout)


def test_a_command_asks_for_segments_that_grow_in_both_spellings():
    assert settings_after_import() == ["expandable_segments:True"] * 2


@pytest.mark.parametrize("name", NAMES)
def test_what_the_user_has_set_counts_more(name):
    found = dict(zip(NAMES, settings_after_import(**{name: "max_split_size_mb:512"})))
    assert found == dict.fromkeys(NAMES) | {name: "max_split_size_mb:512"}
    assert not reserve.expandable_segments({name: "max_split_size_mb:512"})
    assert reserve.expandable_segments({name: "expandable_segments:True"})


def test_every_command_that_trains_imports_it_before_torch():
    of_the_lab = [f"lab/{name}.py" for name in ("grade", "intuitor", "reward", "run_full_analysis")]
    for file in ("train.py", "scripts/__init__.py", "benchmarks/__init__.py", *of_the_lab):
        lines = [
            line
            for line in Path(file).read_text().splitlines()
            if line.startswith(("import ", "from "))
        ]
        assert lines[0].startswith("import base.with_torch"), file


def test_a_step_whose_live_bytes_fit_may_reserve_too_much(monkeypatch, trace):
    monkeypatch.setenv(NAMES[0], "expandable_segments:True")
    reserves = replay(trace, expandable=True).peak_reserved / GIB
    hidden = planned(80.0).hidden_gib
    assert planned(reserves + hidden + 0.001).fits

    short = planned(reserves + hidden - 0.001)
    assert short.peak / GIB + hidden < short.available_gib
    assert not short.fits
    assert "because the allocator reserves" in short.shortage()
    row = next(line for line in short.table().splitlines() if "reserved for it" in line)
    assert row.split()[3] == f"{reserves:.2f}" and "expandable" in row


def test_classic_segments_give_back_what_is_free_before_they_fail(monkeypatch, trace):
    for name in NAMES:
        monkeypatch.setenv(name, "expandable_segments:False")
    cfg = dataclasses.replace(CFG, device="cuda")
    found = needs(cfg)
    beyond = sum(beyond_the_allocator().values())

    def reserved(room: int) -> int:
        return reserve.reserved(found, cfg, 1, room + beyond)

    assert found.classic == replay(trace).peak_reserved
    assert reserved(80 * GIB) == found.classic
    assert reserved(found.peak // 2) > found.peak // 2
    assert reserved(found.classic - 1) < found.classic


@pytest.mark.slow
def test_a_rank_of_a_process_group_simulates_in_a_process_of_its_own(tmp_path, monkeypatch):
    """The simulation of several ranks needs a default group, which this process has already."""
    monkeypatch.setenv(NAMES[0], "expandable_segments:True")
    cfg = dataclasses.replace(CFG, context_length=256, device="cuda")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        inside = needs(cfg, 2).expandable
    finally:
        torch.distributed.destroy_process_group()
    monkeypatch.undo()
    trace = with_workspaces(profile(cfg, 2).trace)
    assert inside == replay(trace, expandable=True).peak_reserved
