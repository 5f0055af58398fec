"""benchmarks.gpu: its rehearsal at toy sizes, a job that dies, what is not timed, and the figures
of the documents.
"""

import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import attention as checks
from benchmarks import record
from benchmarks.gpu import (
    attention,
    children,
    command,
    decoding,
    loss,
    machine,
    memory,
    smoke,
    step,
)
from benchmarks.gpu.jobs import Place
from longhaul.memory import reconcile

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TOY = Place(CPU, True)
ONE_LAYER = dict(model_overrides=("num_layers=1",))
FEW = 300  # tokens of a check against float64; test_benchmarks.py has one of the usual length


def without_processes(orders, at_once, until, look, ready):
    """Run the jobs here, which saves loading torch for each; a kernel has its process."""
    for order in orders:
        if order.name.startswith("smoke, kernel"):
            yield from children.run_all([order], at_once, until, look, ready)
            continue
        words = [word for word in order.command[3:] if word != "--wait"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(record.ERRORS, "handlers", [])
            for name, value in order.environment.items():
                patch.setenv(name, value)
            code = command.main(words)
        yield children.End(order.name, 1.0, children.words_of(code))


@pytest.mark.slow
def test_the_rehearsal_runs_every_part_at_toy_sizes_and_claims_nothing(tmp_path, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: `python -m benchmarks.gpu --toy` is the rehearsal")
    monkeypatch.setattr(command, "run_all", without_processes)
    monkeypatch.setattr(command.Session, "start_ahead", lambda session: None)
    once = (
        (attention, "ROUNDS"),
        (attention, "WARM_TURNS"),
        (decoding, "WARM"),
        (decoding, "TIMED"),
        (step, "ROUNDS"),
        (loss, "TOY_ROUNDS"),
    )
    for module, name in once:
        monkeypatch.setattr(module, name, 1)
    monkeypatch.setattr(attention, "CHECK_TOKENS", FEW)
    asked = step.settings
    monkeypatch.setattr(step, "settings", lambda *words: replace(asked(*words), **ONE_LAYER))
    small = [
        (*of_job, changes | ONE_LAYER, seconds)
        for *of_job, changes, seconds in memory.TOY_CONFIGURATIONS
    ]
    monkeypatch.setattr(memory, "TOY_CONFIGURATIONS", small)
    args = ["--toy", "--out", str(tmp_path), "--deadline", "30"]
    assert command.main(args, began=time.monotonic()) == 0
    data = json.loads((tmp_path / "results.json").read_text())
    assert data["toy"] and "claims nothing" in (tmp_path / "results.md").read_text()
    assert not data["failures"] and not data["skipped"]
    assert {job["ended"] for job in data["jobs"]} == {"well", "see its children"}

    rows = {name: table["rows"] for name, table in data["tables"].items()}
    parts = {"smoke", "checks", "attention", "step", "loss", "decode", "profile", "memory"}
    assert parts | {"stages", "workspaces", "transformers memory"} == set(rows)
    assert [abs(row["difference"]) < 0.2 for row in rows["memory"]] == [True] * 4
    assert [abs(row["difference"]) < 0.1 for row in rows["transformers memory"]] == [True] * 2
    steps = {(row["system"], row["attention"]): row for row in rows["step"]}
    assert steps["longhaul", "standard"]["speed / transformers"] > 0
    flash = {row["time, ms"] for row in rows["attention"] if row["attention"] == "flash-attn"}
    assert flash == {"needs a CUDA device"}


@pytest.mark.parametrize(
    "args, words",
    [
        (["--only", "lss"], "choose from machine, smoke"),
        (["--deadline", "0"], "above 0"),
        (["--outt", "x"], "--out"),
        (["--job", "nothing"], "choose one of machine; smoke"),
        (["--rehearse", "/nowhere/results.json"], "give the results.json of a run"),
        (["--precompile", "x", "--capability", "75"], "choose one of 80, 86"),
    ],
)
def test_bad_input_names_the_remedy(args, words, capsys):
    assert command.main(args) == 2
    assert words in capsys.readouterr().err


def test_a_gpu_that_torch_cannot_use_is_refused_before_anything_begins(monkeypatch):
    monkeypatch.setattr(machine, "hidden_gpu", lambda: "GPU 0: NVIDIA X")
    assert machine.refusal(CPU, toy_asked=False)
    assert not machine.refusal(CPU, toy_asked=True)
    assert not machine.refusal(CUDA, toy_asked=False)


def test_the_first_five_jobs_fit_nine_minutes_also_at_half_the_speed(capsys):
    assert command.main(["--rehearse"]) == 0
    assert capsys.readouterr().out.count("the first 5 jobs fit") == 2


# ---- a process per job


def test_a_job_that_dies_costs_itself_and_what_it_started(tmp_path):
    pids = tmp_path / "pids"
    hang = (
        "import os, signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)']); "
        f"open({str(pids)!r}, 'w').write(str(p.pid)); time.sleep(99)"
    )
    codes = {
        "endless": hang,
        "fault": "import os; os.kill(os.getpid(), 11)",
        "by hand": "import os; os.kill(os.getpid(), 9)",
        "lost": f"raise SystemExit({children.DEVICE_LOST})",
        "bug": "raise ValueError('no')",
        "well": "import os; print(os.environ['WORD'])",
    }
    orders = []
    for name, code in codes.items():
        log = tmp_path / name / "log.txt"
        limit = 2.0 if name == "endless" else 30.0
        one = children.Order(name, [sys.executable, "-c", code], log, limit, {"WORD": name})
        orders.append(one)
    ends = children.run_all(orders, 2, time.monotonic() + 60, lambda: None)

    words = {end.name: (end.words, end.crashed) for end in ends}
    assert words["well"] == ("", False)
    assert words["fault"] == ("ended by SIGSEGV", True)
    assert words["by hand"][0].startswith("ended by SIGKILL") and not words["by hand"][1]
    assert words["lost"] == ("lost its device", True)
    assert words["bug"] == ("ended with exit code 1", False)
    assert re.fullmatch(r"killed after [1-9]\d* s", words["endless"][0])
    assert (tmp_path / "well/log.txt").read_text() == "well\n"
    assert "ValueError: no" in (tmp_path / "bug/log.txt").read_text()
    assert is_gone(int(pids.read_text()))


def is_gone(pid: int) -> bool:
    """Whether a process ends within a minute: the system needs a moment after a kill."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.02)
    return False


# ---- what is measured


@pytest.mark.parametrize("kind", ["nsa", "indexed"])
def test_sparse_attention_takes_its_kernels_wherever_a_gpu_is(kind, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H100 80GB HBM3")
    full = Place(CUDA, False)
    assert step.settings("4B", kind, 131_072, full).kernels == "triton"
    assert smoke.settings(full, kind).kernels == "triton"
    assert memory.settings(full, "0.6B", 32_768, dict(attention_type=kind)).kernels == "triton"


def test_wrong_attention_of_ours_is_not_timed_and_fails_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(attention, "CHECK_TOKENS", FEW)
    run = record.Run(tmp_path, "a test", "pytest", {}, True, echo=lambda line: None)
    ways = {
        "SDPA, flash": attention.dense_by(attention.SDPBackend.FLASH_ATTENTION),
        "longhaul, wrong": attention.dense(
            lambda q, k, v, *_: 1.05 * attention.kernels.attention(q, k, v)
        ),
    }
    contest = attention.check(attention.Contest((4, 1), checks.CFG, ways), TOY, run)
    attention.whole(run, TOY, "forward", 300, 1.0, contest)
    times = {row["attention"]: row["time, ms"] for row in run.data["tables"]["attention"]["rows"]}
    assert times["longhaul, wrong"] == "not timed: fails its check" and times["SDPA, flash"] > 0
    assert len(run.data["failures"]) == 1


def test_a_measured_step_on_a_gpu_names_the_stages_that_are_predicted(monkeypatch):
    imitated = dict(
        max_memory_allocated=lambda device=None: 3,
        max_memory_reserved=lambda device=None: 3,
        reset_peak_memory_stats=lambda device=None: None,
        synchronize=lambda device=None: None,
        mem_get_info=lambda device=None: (60, 100),
    )
    for name, function in imitated.items():
        monkeypatch.setattr(torch.cuda, name, function)
    cfg = memory.settings(TOY, "tiny", 64, {})
    found = reconcile.measure_cuda(cfg, device=CPU)
    stages = {"embedding", "layer forward", "loss backward", "attention backward", "optimizer"}
    assert stages <= set(found["stages"])
    assert found["allocator_peak_bytes"] == 3 and found["device_bytes"] == 40
