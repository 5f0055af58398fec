"""benchmarks.on_gpu: what a hang, a crash and a kill cost, and that every row's programs run."""

import dataclasses
import importlib
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import kernels, on_gpu
from benchmarks.on_gpu import ROWS, Row
from footprint.cards.device import Demand
from longhaul.config import TrainConfig
from longhaul.planner import reconcile
from longhaul.planner.simulate import profile
from tests.tiers import slow

NAMES = [row.name for row in ROWS]


def row(name: str, code: str, seconds: float = 60, **more) -> Row:
    """A row that runs this code."""
    return Row(name, "-c pass", seconds, shlex.join(["-c", code]), **more)


def rehearsed(folder: Path, *rows: Row) -> tuple[int, dict[str, dict]]:
    """The exit code, and the results of all rows."""
    code = on_gpu.main(["--rehearse", "--output", str(folder)], rows)
    return code, json.loads((folder / "results.json").read_text())["rows"]


def is_gone(pid: int) -> bool:
    """Whether a process ends within a minute: the system needs a moment after a kill."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.02)
    return False


# ---- what a row can cost


def test_a_hang_or_a_crash_costs_one_row_and_its_result_is_there_before_the_next(tmp_path):
    hang = (
        "import subprocess, sys, time\n"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)']).pid)\n"
        "time.sleep(99)"
    )
    seen = (
        "import json\nfor i in range(999): print(i)\n"
        "print(*json.load(open(r'{output}/results.json'))['rows'])"
    )
    code, found = rehearsed(
        tmp_path,
        row("hang", hang, seconds=2),
        row("fault", "import os; os.kill(os.getpid(), 11)"),
        row("bug", "raise ValueError('no')"),
        row("well", seen),
    )
    assert code == 1
    ended = ["ended at its limit of 2 s", "ended by SIGSEGV", "exit code 1", "well"]
    assert [one["ended"] for one in found.values()] == ended
    assert 2 <= found["hang"]["seconds"] < 30
    assert is_gone(int(found["hang"]["output"][0]))
    assert found["bug"]["output"][-1] == "ValueError: no"
    assert found["well"]["output"][-2:] == ["998", "hang fault bug"]
    assert len(found["well"]["output"]) == on_gpu.LAST_LINES
    assert (tmp_path / "well.txt").read_text().startswith("0\n1\n")


def test_light_rows_run_next_to_each_other_and_others_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)

    def meeting(own: str, other: str, **more) -> Row:
        code = (
            f"import os, time\nopen(r'{tmp_path}/{own}', 'w')\n"
            f"while not os.path.exists(r'{tmp_path}/{other}'): time.sleep(0.05)"
        )
        return row(own, code, **more)

    rows = (
        meeting("a", "b", light=True),
        meeting("b", "a", light=True),
        meeting("c", "d", seconds=2),
    )
    _, found = rehearsed(tmp_path / "out", *rows, meeting("d", "c", light=True))
    assert [one["ended"] == "well" for one in found.values()] == [True, True, False, True]


# ---- once more


def test_a_second_start_after_a_kill_runs_only_what_has_no_result(tmp_path):
    count = f"open(r'{tmp_path}/count', 'a').write('x')"
    hang = f"import os, time; open(r'{tmp_path}/pid', 'w').write(str(os.getpid())); time.sleep(99)"
    first, second = row("first", count), row("second", hang)
    program = (
        "from benchmarks.on_gpu import Row, main\n"
        f"main(['--rehearse', '--output', r'{tmp_path}/out'], [{first!r}, {second!r}])"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.Popen([sys.executable, "-c", program], env=environment)
    pid = tmp_path / "pid"
    deadline = time.monotonic() + 60
    while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    killed.kill()
    killed.wait()
    if sys.platform == "linux":
        assert is_gone(int(pid.read_text()))

    code, found = rehearsed(tmp_path / "out", first, dataclasses.replace(second, toy="-c pass"))
    assert code == 0
    assert list(found) == ["first", "second"]
    assert (tmp_path / "count").read_text() == "x"


@pytest.mark.parametrize("key, value", [("commit", "0000000"), ("sizes", "whole")])
def test_results_of_another_commit_or_of_a_gpu_are_not_added_to(key, value, tmp_path, capsys):
    rehearsed(tmp_path, row("first", "pass"))
    path = tmp_path / "results.json"
    content = json.loads(path.read_text())
    content["machine"][key] = value
    path.write_text(json.dumps(content))
    with pytest.raises(SystemExit) as end:
        rehearsed(tmp_path, row("second", "pass"))
    assert end.value.code == 2
    assert "--output" in capsys.readouterr().err
    assert json.loads(path.read_text()) == content


def test_a_row_whose_module_is_missing_is_left_out_by_its_name(tmp_path, capsys):
    code, found = rehearsed(tmp_path, row("here", "pass"), row("peer", "pass", needs="no_such"))
    assert code == 0
    assert list(found) == ["here"]
    assert "peer" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_nothing_begins(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        on_gpu.main(["--output", str(tmp_path / "out")])
    assert end.value.code == 2
    assert "--rehearse" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# ---- the rows


def test_every_triton_kernel_has_a_row_and_comes_first():
    pytest.importorskip("triton", reason="triton is not installed: there are no kernels")
    names = list(kernels.found())
    assert NAMES[: len(names)] == names
    assert len(set(NAMES)) == len(NAMES)


def test_the_tests_of_a_gpu_are_there():
    for name in on_gpu.TESTS.split():
        assert "pytest.mark.gpu" in (on_gpu.ROOT / name).read_text()


def code_of(command: str) -> int:
    """The exit code of a row's command in this process."""
    module, *words = shlex.split(command.removeprefix("-m "))
    program = importlib.import_module(module.removesuffix(".py"))
    try:
        return program.main(words) or 0
    except SystemExit as end:
        return end.code


PROGRAMS = [row for row in ROWS if row.name != "tests"]
# some rows are the same at toy size; tests/test_benchmarks.py runs that of attention
TOYS = {row.toy: row for row in PROGRAMS if "attention" not in row.name}.values()


@pytest.mark.parametrize(
    "row",
    [
        slow(row) if row.name.startswith("pair") or "transformers" in row.name else row
        for row in TOYS
    ],
    ids=lambda row: row.name,
)
def test_every_row_runs_at_toy_size(row, tmp_path):
    pytest.importorskip(row.needs, reason=f"{row.needs} is not installed")
    assert code_of(row.toy.replace("{output}", str(tmp_path))) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here, and would be used")
@pytest.mark.parametrize("row", PROGRAMS, ids=lambda row: row.name)
def test_all_that_a_rows_command_lacks_here_is_a_gpu(row, capsys):
    assert code_of(row.command) == 2
    assert "cuda" in capsys.readouterr().err.lower()


# ---- a step that is measured on a GPU


def test_a_measured_step_names_its_stages_its_seconds_and_the_allocators_segments(monkeypatch):
    imitated = dict(
        max_memory_allocated=lambda device=None: 3,
        max_memory_reserved=lambda device=None: 3,
        reset_peak_memory_stats=lambda device=None: None,
        synchronize=lambda device=None: time.sleep(0.01),
        mem_get_info=lambda device=None: (60, 100),
    )
    for name, function in imitated.items():
        monkeypatch.setattr(torch.cuda, name, function)
    cfg = TrainConfig(
        model_size="tiny",
        model_overrides=("num_layers=1",),
        context_length=64,
        device="cpu",
        warmup_steps=0,
    )
    found = reconcile.measure_cuda(cfg, device=torch.device("cpu"))
    stages = {"embed forward", "layers.* forward", "lm_head backward", "optimizer"}
    assert stages <= set(found["stages"])
    assert found["allocator_peak_bytes"] == 3 and found["device_bytes"] == 40
    assert found["seconds"] >= 0.01

    predicted = profile(cfg, 1, "cuda")
    demand = Demand.of(predicted.trace)
    assert demand.expandable.peak_reserved != demand.classic.peak_reserved
    for grows, reserved in ((True, demand.expandable), (False, demand.classic)):
        monkeypatch.setattr(reconcile, "expandable_segments", lambda grows=grows: grows)
        found["reserved_peak_bytes"] = reserved.peak_reserved
        lines = reconcile.table(predicted, found, demand).splitlines()
        (line,) = [line for line in lines if line.startswith("reserved")]
        assert line.endswith("+0.000%")
        assert f"{found['seconds']:.2f} s" in lines[-1]
