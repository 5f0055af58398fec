"""train.py and its plan: the peak at step 2, --fit auto, and the report when memory runs out."""

import re
import shlex
from types import SimpleNamespace

import pytest
import torch

import train
from footprint.kernels.operators import is_fake
from longhaul import dist, optim
from longhaul.config import TrainConfig
from longhaul.planner import fit
from longhaul.planner import plan as planner
from longhaul.planner.needs import PROCESS_GIB, WARM_UP
from longhaul.planner.watch import (
    Watch,
    compared_at,
    comparison,
    failed_bytes,
    out_of_memory,
    warning,
)
from longhaul.run import planning
from model import GIB
from tests import test_train

data = test_train.data  # a fixture
CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 39826489344 bytes. Error code 12"
)
CUDA = (
    "CUDA out of memory. Tried to allocate 37.09 GiB. GPU 0 has a total capacity of 94.97 GiB of "
    "which 12.75 MiB is free."
)


def failing(error: RuntimeError):
    """Clipping without memory; a step that is only predicted has enough."""
    clip = optim.clip_gradients

    def fails(model, *args):
        if is_fake(next(model.parameters())):
            return clip(model, *args)
        raise error

    return fails


def planned(cfg: TrainConfig) -> planner.Plan:
    return planner.plan(cfg, cfg.model(), dist.World(), torch.device("cpu"))


def arguments(data: str, out, *more: str) -> list[str]:
    return [*test_train.SMALL, "--data", data, "--output_dir", str(out), "--max_steps", "2", *more]


def test_the_measured_peak_stands_beside_the_planned_one_at_step_2(data, tmp_path, capsys):
    train.main(arguments(data, tmp_path / "run"))
    captured = capsys.readouterr()
    line = next(
        line
        for line in (captured.out + captured.err).splitlines()
        if "step 2: peak of a step" in line
    )
    planned = float(re.search(r"planned (\S+) GiB, measured \S+ GiB of resident", line).group(1))
    assert PROCESS_GIB <= planned < PROCESS_GIB + 0.05


@pytest.mark.parametrize(
    "dense, expected",
    [(0, {2: "1.50"}), (1, {3: "1.50"}), (2, {2: "1.25", 4: "1.50"}), (9, {2: "1.25", 11: "1.50"})],
)
def test_in_an_indexers_warm_up_its_own_peak_is_compared(dense, expected):
    """Each kind of step at its second one."""
    cfg = SimpleNamespace(dense_steps=dense)
    needs = SimpleNamespace(stages={WARM_UP: GIB // 4} if dense else {})
    cpu = torch.device("cpu")
    plan = SimpleNamespace(cfg=cfg, needs=needs, peak=GIB // 2, device=cpu, hidden_gib=1.0)
    assert compared_at(cfg) == expected.keys()
    for step, gib in expected.items():
        assert f"planned {gib} GiB" in comparison(plan, step)


def test_a_plan_that_is_wrong_is_a_warning_with_the_stage_of_the_peak(monkeypatch):
    gpu = torch.device("cuda")
    read = iter([1.0, 4.08, 4.08])
    monkeypatch.setattr("longhaul.planner.watch.peak_memory_gib", lambda device: next(read, 4.08))
    seen = Watch(gpu)
    for stage in ("attention backward", "optimizer"):
        seen.enter(stage)
    seen.note()
    planned = SimpleNamespace(
        cfg=SimpleNamespace(dense_steps=0),
        peak=int(0.82 * GIB),
        needs=SimpleNamespace(stages={"attention backward": GIB // 2}),
        device=gpu,
    )
    words = warning(planned, 2, seen)
    assert "attention backward, for which 0.50 GiB were planned" in words and "+397" in words
    planned.peak = int(4.05 * GIB)
    assert warning(planned, 2, seen) is None


def test_when_memory_runs_out_the_stages_and_the_allocation_are_told(
    data, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(optim, "clip_gradients", failing(torch.OutOfMemoryError(CUDA)))
    with pytest.raises(SystemExit) as stop:
        train.main(arguments(data, tmp_path / "run", "--batch_size", "2"))
    lines = capsys.readouterr().err.strip().splitlines()
    words = "\n".join(lines)
    assert (
        stop.value.code == 1 and "out of memory in gradient norm: an allocation of 37.09" in words
    )
    row = next(line for line in lines if line.split()[:2] == ["gradient", "norm"])
    assert len(row.split()) == 4 and all(float(value) > 0.1 for value in row.split()[2:])
    assert lines[-1] == "nothing of longhaul fits here"


def test_the_smallest_change_is_a_lever_before_it_is_a_smaller_model(
    data, tmp_path, capsys, monkeypatch
):
    error = RuntimeError(
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."
    )
    monkeypatch.setattr(optim, "clip_gradients", failing(error))
    with pytest.raises(SystemExit):
        train.main(arguments(data, tmp_path / "run", "--batch_size", "2"))
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert (
        last.startswith("python train.py --model_size tiny")
        and "--gradient_checkpointing" in last
        or "--loss chunked" in last
    )
    assert "num_layers=2" in last and "--context_length 64" in last


def test_another_error_is_not_taken_for_missing_memory():
    assert not out_of_memory(RuntimeError("size mismatch")) and not out_of_memory(
        ValueError("can't allocate memory")
    )
    assert (
        failed_bytes(RuntimeError("no number")) == 0
        and failed_bytes(RuntimeError(CPU)) == 39826489344
    )


def test_fit_auto_pulls_levers_and_leaves_model_context_and_batch(capsys):
    cfg = TrainConfig(
        model_size="tiny",
        model_overrides=("num_layers=2",),
        context_length=8192,
        batch_size=4,
        device="cpu",
        fit="auto",
    )
    asked = planned(cfg)
    room = (asked.needed_gib + planned(fit.checkpointing(cfg)).needed_gib) / 2
    found = planning.fitting(planner.dataclasses.replace(asked, available_gib=room))
    assert (
        found.cfg.gradient_checkpointing == "full"
        and found.fits
        and "--fit auto" in capsys.readouterr().out
    )
    assert (found.cfg.model_size, found.cfg.context_length, found.cfg.rows_per_step(1)) == (
        "tiny",
        8192,
        4,
    )
    least = fit.checkpointing(planner.dataclasses.replace(cfg, batch_size=1, context_length=8))
    with pytest.raises(ValueError, match="profile_memory.py"):
        planning.fitting(planner.dataclasses.replace(planned(least), available_gib=0.1))


def test_without_fit_auto_a_lever_is_never_pulled():
    cfg = TrainConfig(model_size="tiny", context_length=8192, device="cpu")
    asked = planned(cfg)
    with pytest.raises(ValueError, match="each rank needs .* GiB and .* GiB are available"):
        planning.fitting(planner.dataclasses.replace(asked, available_gib=asked.needed_gib - 0.01))
    assert shlex.split(planner.command(cfg, dist.World()))[-1] == "cpu"
