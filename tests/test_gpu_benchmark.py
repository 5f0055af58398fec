"""benchmarks.gpu: the whole command at toy sizes, and what only a GPU would run, with the GPU's own
functions imitated.
"""

import importlib.machinery
import json
import os
import re
import subprocess
import sys
import tarfile
import time
import types
from pathlib import Path

import pytest
import torch

from benchmarks import attention as checks
from benchmarks import clock, record, report, vocab_loss
from benchmarks.gpu import (
    attention,
    children,
    command,
    decoding,
    exact,
    kernels,
    loss,
    machine,
    memory,
    profiles,
    smoke,
    step,
)
from benchmarks.gpu.children import End
from benchmarks.gpu.jobs import AGAIN, Job, Place, named, processes
from benchmarks.gpu.schedule import Schedule, replay
from footprint.allocator import LARGE_SEGMENT, SMALL_SEGMENT
from longhaul.memory import history, reconcile
from tests import nsa_oracle as oracle

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TOY, FULL = Place(CPU, True), Place(CUDA, False)
MIB = 2**20
NO_TRITON = "triton is not installed: nothing of its kernels is tested"
ROOT = Path(__file__).parent.parent


@pytest.fixture
def run(tmp_path):
    return record.Run(tmp_path, "a test", "pytest", {}, True, echo=lambda line: None)


@pytest.fixture
def install(monkeypatch):
    """Puts an imitation of a package where `import` and `find_spec` find it."""

    def add(name, **content):
        for depth in range(1, name.count(".") + 2):
            part = ".".join(name.split(".")[:depth])
            module = types.ModuleType(part)
            module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(part, None), []
            monkeypatch.setitem(sys.modules, part, module)
        vars(module).update(content)

    return add


# ---- the whole command


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: `python -m benchmarks.gpu --toy` is the rehearsal")
    code = command.main(["--out", str(folder), "--deadline", "30"], began=time.monotonic())
    return (
        code,
        json.loads((folder / "results.json").read_text()),
        (folder / "results.md").read_text(),
    )


@pytest.mark.slow
def test_without_a_gpu_every_part_runs_at_toy_sizes_and_says_so(toy):
    code, data, page = toy
    assert code == 0 and not data["failures"] and not data["skipped"]
    assert data["toy"] and data["label"].startswith("Toy sizes on CPU") and "claims nothing" in page
    assert set(data["tables"]) == {
        "smoke",
        "checks",
        "attention",
        "step",
        "loss",
        "decode",
        "profile",
        "memory",
        "stages",
        "workspaces",
        "transformers memory",
    }
    assert {job["ended"] for job in data["jobs"]} == {"well", "see its children"}
    assert all(job["seconds"] > 0 for job in data["jobs"])
    assert {"device", "torch", "triton", "python", "commit", "date"} <= set(data["where"])
    assert len(data["tables"]["memory"]["rows"]) == 4
    assert all(abs(row["difference"]) < 0.2 for row in data["tables"]["memory"]["rows"])
    rows = data["tables"]["transformers memory"]["rows"]
    assert len(rows) == 2 and all(abs(row["difference"]) < 0.1 for row in rows)


@pytest.mark.slow
def test_what_is_missing_on_a_cpu_is_said_by_name(toy):
    _, data, _ = toy
    said = " ".join(data["notes"]) + json.dumps(data["tables"])
    for name in (
        "Liger-Kernel",
        "cut-cross-entropy",
        "flash-attn",
        "SDPA, cuDNN",
        "NSA triton",
        "indexed triton",
        "tests marked gpu",
        "Triton tile bodies",
        "allocator's curve",
    ):
        assert name in said, name
    rows = data["tables"]["attention"]["rows"]
    assert {row["time, ms"] for row in rows if row["attention"] == "flash-attn"} == {
        "needs a CUDA device"
    }


@pytest.mark.slow
def test_steps_stand_beside_transformers_which_starts_from_the_same_weights(toy):
    rows = {(row["system"], row["attention"]): row for row in toy[1]["tables"]["step"]["rows"]}
    assert (
        rows["longhaul", "standard"]["speed / transformers"] > 0
        and rows["transformers", "standard"]["step, ms"] > 0
    )
    assert ("transformers", "nsa") not in rows


@pytest.mark.slow
def test_the_smoke_test_runs_kernels_alone_and_a_step_of_each_kind(toy):
    pytest.importorskip("triton", reason=NO_TRITON)
    results = {row["what"]: row["result"] for row in toy[1]["tables"]["smoke"]["rows"]}
    alone = [name for name in results if name.endswith("_kernel")]
    assert tuple(alone) == smoke.TOY_KERNELS
    assert all(results[name].startswith("ran, ") for name in alone)
    assert sum("losses" in result for result in results.values()) == 3
    assert sum("gradients against" in name for name in results) == 3


def test_decoding_with_a_whole_model_times_the_prompt_and_each_token(run, monkeypatch):
    monkeypatch.setattr(decoding, "WARM", 2)
    monkeypatch.setattr(decoding, "TIMED", 3)
    for job in decoding.jobs(TOY):
        job.run(run)
    rows = run.data["tables"]["decode"]["rows"]
    assert [row["attention"] for row in rows] == ["nsa", "standard"]
    assert all(row["prompt, s"] > 0 and row["steps"] == "one by one" for row in rows)
    assert all(row["token, ms"] * row["tokens/s"] == pytest.approx(1e3) for row in rows)


@pytest.mark.slow
def test_a_profile_has_the_kernels_of_a_step_and_of_attention(toy):
    rows = toy[1]["tables"]["profile"]["rows"]
    totals = {row["call"]: row["time, ms"] for row in rows if row["kernel"] == "all"}
    assert len(totals) == 2
    for call, total in totals.items():
        parts = [row for row in rows if row["call"] == call and row["kernel"] != "all"]
        shares = sum(row["of the call"] for row in parts)
        assert 0.5 < shares <= 1.001 and len(parts) <= profiles.ROWS
        assert sum(row["time, ms"] for row in parts) == pytest.approx(shares * total)


def test_the_profile_of_attention_has_all_query_heads(run, monkeypatch):
    calls = []
    monkeypatch.setattr(profiles, "rows", lambda run, place, name, call: calls.append(call))
    profiles.of_attention(run, TOY, 64)
    H, G = attention.heads(TOY)
    _, q, k, *_ = calls[0].args
    assert (q.shape[2], k.shape[2]) == (H, G)
    calls[0]()


@pytest.mark.slow
def test_no_time_skips_every_line_and_names_it(tmp_path):
    args = ["--out", str(tmp_path), "--only", "loss,step", "--deadline", "0.14"]
    assert command.main(args, began=time.monotonic()) == 0
    data = json.loads((tmp_path / "results.json").read_text())
    assert len(data["skipped"]) == len(loss.jobs(TOY) + step.jobs(TOY)) and not data["tables"]
    assert "may take 60 s" in data["skipped"][0]


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
    assert "install a CUDA build" in machine.refusal(CPU, toy_asked=False)
    assert not machine.refusal(CPU, toy_asked=True)
    assert not machine.refusal(CUDA, toy_asked=False)


def test_what_is_missing_is_named_with_one_command(monkeypatch):
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(machine, "version", lambda name: "not installed")
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    lines = machine.absent(FULL)
    assert "pip install -r requirements.txt" in lines[0] and "torch, numpy" in lines[0]
    assert any("no C compiler" in line for line in lines)
    assert lines[-1] == (
        "peers that are not installed: pip install liger-kernel cut-cross-entropy "
        "flash-linear-attention flash-attn transformers"
    )


# ---- a process per job


def order(tmp_path, name, code, limit=30.0):
    log = tmp_path / name / "log.txt"
    return children.Order(name, [sys.executable, "-c", code], log, limit, {"WORD": name})


def run_orders(orders, at_once=1, seconds=60.0, tick=lambda: None):
    ends = children.run_all(orders, at_once, time.monotonic() + seconds, tick)
    return {end.name: end for end in ends}


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def all_gone(pids):
    """Whether the processes end within a minute: the system needs a moment after a kill."""
    deadline = time.monotonic() + 60
    while any(is_running(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_each_process_ends_in_its_own_way_and_the_others_go_on(tmp_path):
    hang = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(99)"
    codes = {
        "well": "import os; print(os.environ['WORD'])",
        "fault": "import os; os.kill(os.getpid(), 11)",
        "by hand": "import os; os.kill(os.getpid(), 9)",
        "lost": f"raise SystemExit({children.DEVICE_LOST})",
        "bug": "raise ValueError('no')",
        "endless": hang,
    }
    limits = {"endless": 0.6}
    orders = [order(tmp_path, name, code, limits.get(name, 30)) for name, code in codes.items()]
    ends = run_orders(orders, at_once=2)
    words = {name: (end.words, end.crashed) for name, end in ends.items()}
    assert words["well"] == ("", False)
    assert words["fault"] == ("ended by SIGSEGV", True)
    assert words["by hand"][0].startswith("ended by SIGKILL") and not words["by hand"][1]
    assert words["lost"] == ("lost its device", True)
    assert words["bug"] == ("ended with exit code 1", False)
    assert re.fullmatch(r"killed after [1-9]\d* s", words["endless"][0]) and not words["endless"][1]
    assert [name for name, end in ends.items() if end.timed_out] == ["endless"]
    assert (tmp_path / "well/log.txt").read_text() == "well\n"
    assert "ValueError: no" in (tmp_path / "bug/log.txt").read_text()


def test_a_killed_process_takes_along_what_it_started(tmp_path, monkeypatch):
    """Its time is over as soon as it has started the other."""
    pids = tmp_path / "pids"
    clock = time.monotonic

    def hurried():
        return clock() + (1000 if pids.exists() and pids.read_text() else 0)

    code = (
        "import os, subprocess, sys, time; "
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)']); "
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{p.pid}}'); time.sleep(99)"
    )
    monkeypatch.setattr(time, "monotonic", hurried)
    ends = run_orders([order(tmp_path, "family", code)])
    assert ends["family"].timed_out and all_gone(pids.read_text().split())


def test_a_process_that_is_started_ahead_begins_when_it_is_told(tmp_path):
    loaded, begun = tmp_path / "loaded", tmp_path / "begun"
    code = (
        f"import sys; open({str(loaded)!r}, 'w'); line = sys.stdin.readline(); "
        f"open({str(begun)!r}, 'w').write(line)"
    )
    one = order(tmp_path, "ahead", code, limit=5.0)
    ready = children.Child(one)
    while not loaded.exists():
        time.sleep(0.02)
    time.sleep(0.3)
    assert not begun.exists()
    (end,) = children.run_all([one], 1, time.monotonic() + 30, lambda: None, ready)
    assert not end.words and end.seconds < 5 and begun.read_text() == "go\n"


def test_a_process_that_is_started_ahead_and_not_needed_leaves_nothing(tmp_path):
    config = command.GpuConfig(out=str(tmp_path / "out"))
    session = command.Session(config, TOY, jobs_of(a=1, b=1), "no.such.program", time.monotonic())
    session.start_ahead()
    first = session.ahead
    other = session.order(Job("b", 2, 1))
    assert session.take_ahead(other) is None and all_gone([first.process.pid])
    session.start_ahead()
    assert session.take_ahead(session.order(Job("a", 0, 1))).order.name == "a"


def test_nothing_runs_after_the_deadline_and_an_interrupt_leaves_no_process(tmp_path):
    sleep = "import time; time.sleep(99)"
    orders = [order(tmp_path, name, sleep) for name in ("a", "b")]
    ends = run_orders(orders, seconds=0.5)
    assert ends["a"].words.startswith("killed after") and ends["b"].words == "no time was left"

    mine = tmp_path / "mine"
    code = f"import os, time; open({str(mine)!r}, 'w').write(str(os.getpid())); time.sleep(99)"

    def tick():
        if mine.exists() and mine.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_orders([order(tmp_path, "c", code)], tick=tick)
    assert all_gone([mine.read_text()])


@pytest.fixture(scope="module")
def crashes(tmp_path_factory):
    """A whole run over jobs that crash, hang, and are killed."""
    folder = tmp_path_factory.mktemp("crashes")
    pids = folder / "pids"
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu_jobs", "--out", str(folder / "out")],
        cwd=ROOT,
        env={**os.environ, "PIDS": str(pids), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    data = json.loads((folder / "out/results.json").read_text())
    return types.SimpleNamespace(
        code=done.returncode, data=data, out=folder / "out", pids=pids, said=done.stdout
    )


@pytest.mark.slow
def test_a_crash_a_hang_and_a_kill_cost_one_job_each(crashes):
    ended = {job["job"]: job["ended"] for job in crashes.data["jobs"]}
    assert ended["first"] == ended["last"] == "well" and crashes.code == 1
    assert ended["illegal"] == "lost its device"
    assert ended["fault"] == "ended by SIGSEGV"
    assert re.fullmatch(r"killed after (1[2-9]|[2-9]\d) s", ended["endless"])
    assert ended["by hand"].startswith("ended by SIGKILL")
    assert ended["bug"] == "ended with exit code 1"
    assert all_gone(crashes.pids.read_text().split())


@pytest.mark.slow
def test_what_was_found_before_a_crash_is_kept_and_not_twice(crashes):
    names = [row["name"] for row in crashes.data["tables"]["found"]["rows"]]
    assert names == ["first", "before the illegal access", "before it was killed", "last"]


@pytest.mark.slow
def test_a_crashed_job_runs_again_with_every_launch_waited_for_and_its_line_is_named(crashes):
    ended = {job["job"]: job["ended"] for job in crashes.data["jobs"]}
    again = [name for name in ended if name.endswith(AGAIN)]
    assert again == [f"illegal{AGAIN}", f"fault{AGAIN}"]
    order = list(ended)
    assert order.index(again[0]) > order.index("bug") and order[-1] == "last"

    failures = " ".join(crashes.data["failures"])
    assert "illegal memory access was encountered (at tests/gpu_jobs.py:" in failures
    errors = (crashes.out / "errors.txt").read_text()
    assert "Traceback (most recent call last)" in errors and "a bug of the job's own" in errors
    assert "in segmentation_fault" in errors and "in endless" in errors  # where it was


@pytest.mark.slow
def test_one_archive_has_what_every_job_wrote_and_few_files_are_left(crashes):
    with tarfile.open(crashes.out / command.ARCHIVE) as archive:
        names = archive.getnames()
    for end in ("results.json", "errors.txt", "illegal/log.txt", "last/results.json"):
        assert any(name.endswith(end) for name in names), end
    files = {path.name for path in crashes.out.iterdir()}
    assert files == {"results.json", "results.md", "errors.txt", command.ARCHIVE}


@pytest.mark.slow
def test_a_run_that_is_stopped_keeps_what_it_found(tmp_path):
    pids = tmp_path / "pids"
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.gpu_jobs", "--out", str(tmp_path / "out")],
        cwd=ROOT,
        env={**os.environ, "PIDS": str(pids), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not (pids.exists() and pids.read_text()):
        assert process.poll() is None
        time.sleep(0.1)
    process.terminate()
    assert process.wait(30) != 0
    data = json.loads((tmp_path / "out/results.json").read_text())
    assert data["tables"]["found"]["rows"][0] == {"name": "first"}
    assert (tmp_path / "out" / command.ARCHIVE).exists()
    assert all_gone(pids.read_text().split())


def here(tmp_path, work):
    """Run a job in this process; its exit code and results."""
    job = Job("one", 1, 60, work)
    code = command.run_here(job, tmp_path, TOY)
    record.ERRORS.handlers.clear()
    return code, json.loads((tmp_path / command.JOBS / "one/results.json").read_text())


def test_out_of_memory_is_a_finding_and_any_other_failure_fails(tmp_path):
    def raising(error):
        def work(_):
            raise error

        return work

    code, data = here(tmp_path, raising(torch.OutOfMemoryError("CUDA out of memory")))
    assert code == 0 and data["notes"] == ["one: out of memory"] and not data["failures"]
    code, data = here(tmp_path, raising(ValueError("no such shape")))
    assert code == 0 and data["failures"] == ["one: ValueError: no such shape"]
    errors = (tmp_path / command.JOBS / "one/errors.txt").read_text()
    assert "Traceback" in errors and "no such shape" in errors and "in work" in errors
    code, _ = here(tmp_path, raising(torch.AcceleratorError("an illegal memory access")))
    assert code == children.DEVICE_LOST


def test_a_job_reads_what_earlier_jobs_found(tmp_path):
    found = record.Run(tmp_path, "a test", "pytest", {}, True, echo=lambda line: None)
    found.row(record.Table("t", "T", {"a": "count"}), a=1)
    seen = []
    here(tmp_path, lambda run: seen.append(run.earlier["t"]["rows"]))
    assert seen == [[{"a": 1}]]


def test_results_of_jobs_are_merged_in_their_order_and_those_of_the_run_come_first():
    def piece(**tables):
        names = {
            name: {"title": name, "columns": {}, "rows": rows} for name, rows in tables.items()
        }
        return dict(tables=names, notes=["same"], skipped=[], failures=["f"], jobs=["own"])

    whole = record.merged(piece(), [piece(a=[1], b=[2]), piece(a=[3])])
    assert whole["tables"]["a"]["rows"] == [1, 3] and whole["tables"]["b"]["rows"] == [2]
    assert (
        whole["notes"] == ["same"] and whole["failures"] == ["f"] * 3 and whole["jobs"] == ["own"]
    )


# ---- the schedule


def jobs_of(**seconds):
    return [Job(name, rank, length) for rank, (name, length) in enumerate(seconds.items())]


def names_of(schedule, now=0.0):
    found = []
    while job := schedule.next(now):
        found.append(job.name)
    return found


def test_the_most_important_jobs_come_first_and_what_does_not_end_in_time_is_skipped():
    schedule = Schedule(reversed(jobs_of(a=1, b=1, long=100, c=1)), end=50)
    assert names_of(schedule) == ["a", "b", "c"]
    assert [line.split(":")[0] for line in schedule.skipped] == ["long"]
    assert "may take 100 s, 50 s were left" in schedule.skipped[0]


def test_finished_jobs_correct_the_estimates_of_those_to_come():
    schedule = Schedule(jobs_of(a=10, b=20, c=10), end=100)
    first = schedule.next(0)
    assert schedule.limit(first, 0) == 20
    schedule.done(first, 18)
    assert schedule.pace == 1.8
    assert schedule.next(70).name == "c"  # b would take 36 s
    assert "b: may take 36 s, 30 s were left" in schedule.skipped[0]


@pytest.mark.parametrize(
    "words, timed_out, failures, pace",
    [
        ("", False, [], 0.5),
        ("killed after 20 s", True, [], 0.5),
        ("lost its device", False, [], 1.0),
        ("", False, ["a: wrong"], 1.0),
    ],
)
def test_a_job_that_failed_says_nothing_of_the_pace(
    words, timed_out, failures, pace, tmp_path, monkeypatch
):
    def ends_at_once(orders, *_):
        folder = orders[0].log.parent
        folder.mkdir(parents=True)
        orders[0].log.write_text("")
        found = {"failures": failures, "jobs": [], "tables": {}, "notes": [], "where": {}}
        (folder / "results.json").write_text(json.dumps(found | {"skipped": []}))
        return [End("a", 0.1, words, timed_out=timed_out)]

    monkeypatch.setattr(command, "run_all", ends_at_once)
    [job] = jobs_of(a=10)
    cfg = command.GpuConfig(out=str(tmp_path))
    session = command.Session(cfg, TOY, [], "benchmarks.gpu", time.monotonic())
    session.run(job)
    assert session.schedule.pace == pace


def test_a_job_is_killed_after_twice_its_time_and_never_past_the_deadline():
    schedule = Schedule(jobs_of(a=10), end=100)
    assert schedule.limit(schedule.waiting[0], 0) == 20
    assert schedule.limit(schedule.waiting[0], 85) == 15


def test_a_repetition_comes_behind_the_jobs_that_every_run_must_have():
    jobs = jobs_of(a=1, b=1, c=1, d=1, e=1, f=1, g=1, h=1)
    schedule = Schedule(jobs, end=100)
    again = schedule.next(0).again()
    schedule.add(again)
    names = names_of(schedule)
    assert names.index(again.name) == names.index("g") + 1 and again.environment == {
        "CUDA_LAUNCH_BLOCKING": "1"
    }
    assert named(jobs, again.name) == again and again.is_repetition


def test_after_a_gate_that_failed_nothing_runs():
    schedule = Schedule(jobs_of(a=1, b=1), end=100)
    schedule.close("no device")
    assert schedule.next(0) is None and schedule.skipped == ["a: no device", "b: no device"]


def test_a_replay_takes_the_durations_that_it_is_given():
    jobs = jobs_of(a=10, b=10, c=10)
    turns, skipped = replay(jobs, end=42, begin=5, seconds=dict(a=12, b=99, c=1))
    assert [(turn.job.name, turn.begins, turn.ends, turn.killed) for turn in turns] == [
        ("a", 5, 17, False),
        ("b", 17, 37, True),
    ]
    assert skipped[0].startswith("c: may take 16 s, 5 s were left")


def test_the_first_five_jobs_fit_nine_minutes_also_at_half_the_speed(capsys):
    assert command.main(["--rehearse"]) == 0
    said = capsys.readouterr().out
    assert said.count("the first 5 jobs fit") == 2
    before = said.split("profile")[0]
    for words in (
        "smoke test",
        "attention, forward+backward, 131,072",
        "step, 4B, nsa, 131,072",
        "step, 4B, standard, 131,072",
        "loss, 32,768",
    ):
        assert words in before, words


def test_recorded_durations_replace_estimates_and_a_late_job_is_named(tmp_path, capsys):
    path = tmp_path / "results.json"
    lines = [{"job": "smoke test", "seconds": 70.0}, {"job": "loss, 32,768 tokens", "seconds": 90}]
    path.write_text(json.dumps({"jobs": lines}))
    assert command.main(["--rehearse", str(path)]) == 1
    said = capsys.readouterr().out
    assert "22 to   92 s  smoke test" in said
    assert "the first 5 jobs do not fit: loss, 32,768 tokens" in said


def test_a_kernel_that_cannot_serve_is_a_reason_and_a_bug_elsewhere_is_not_swallowed():
    errors = pytest.importorskip("triton.errors", reason=NO_TRITON)

    def raising(error):
        raise error

    assert record.attempt(raising, errors.TritonError("shared memory")) == (
        None,
        "TritonError: shared memory",
    )
    assert record.attempt(raising, torch.OutOfMemoryError("CUDA out of memory")) == (
        None,
        "out of memory",
    )
    for error in (torch.AcceleratorError("gone"), ZeroDivisionError(), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            record.attempt(raising, error)


# ---- the clock


class Event:
    """torch.cuda.Event as it is used, on a clock of its own, in milliseconds."""

    now, log = 0.0, []

    def __init__(self, enable_timing=False):
        assert enable_timing, "an event without timing has no elapsed_time"

    def record(self):
        self.at = Event.now

    def synchronize(self):
        Event.log.append("waited")

    def elapsed_time(self, end):
        return end.at - self.at


def test_a_gpus_seconds_are_between_two_events_after_waiting(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    Event.log.clear()

    def work():
        Event.now += 250.0

    assert clock.seconds(work, CUDA) == 0.25 and Event.log == ["waited"]


def test_calls_take_turns_on_inputs_that_are_fresh_in_every_round():
    seen = []
    inputs = iter(range(100))
    clock.interleaved(
        {name: lambda x, name=name: seen.append((name, x)) for name in "abc"},
        lambda: [next(inputs)],
        rounds=3,
    )
    assert seen == [
        ("a", 0),
        ("b", 0),
        ("c", 0),
        ("b", 1),
        ("c", 1),
        ("a", 1),
        ("c", 2),
        ("a", 2),
        ("b", 2),
    ]


def test_the_scratch_buffer_is_written_before_each_timed_call_and_larger_than_any_l2(monkeypatch):
    order, writes = [], types.SimpleNamespace(zero_=lambda: order.append("scratch"))
    monkeypatch.setattr(clock, "seconds", lambda call, device: call() or 1.0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (64 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: order.append(size) or writes)
    clock.interleaved(
        {name: lambda name=name: order.append(name) for name in "ab"}, list, CUDA, rounds=1
    )
    assert order == [2 * 2**30, "scratch", "a", "scratch", "b"]


def test_no_round_begins_after_the_limit_and_a_ratio_is_of_rounds():
    assert len(clock.interleaved({"a": lambda: None}, list, rounds=9, limit=-1)["a"]) == 1
    assert (
        clock.ratio({"a": [2.0, 30.0, 4.0], "b": [1.0, 10.0, 4.0]}, "a", "b") == 2.0
        and clock.ratio({"a": [1.0]}, "a", "b") is None
    )


# ---- peers


def test_installed_losses_are_called_as_they_want_it_and_others_named(install, capsys):
    said = []
    vocab_loss.variants(CUDA, said.append)
    assert (
        "Liger-Kernel: not installed (pip install liger-kernel)" in said
        and "cut-cross-entropy: not installed (pip install cut-cross-entropy)" in said
    )

    class Liger:
        def __init__(self, accum_dtype=None):
            pass

        def __call__(self, weight, hidden, labels):
            return vocab_loss.standard_loss(hidden, weight, labels)

    def cce(e, c, targets, accum_e_fp32=False, accum_c_fp32=False, filter_eps="auto"):
        return vocab_loss.standard_loss(e, c, targets)

    install("liger_kernel.transformers", LigerFusedLinearCrossEntropyLoss=Liger)
    install("cut_cross_entropy", linear_cross_entropy=cce)
    table, few = vocab_loss.variants(CUDA, said.append), vocab_loss.inputs(16, 32, 64, False, CPU)
    peers = [name for name in table if name.startswith(("Liger", "cut"))]
    assert peers == [
        "Liger-Kernel",
        "Liger-Kernel, fp32 sums",
        "cut-cross-entropy",
        "cut-cross-entropy, fp32 sums",
    ]
    assert all(table[name](*few) == vocab_loss.standard_loss(*few) for name in peers)


def test_a_wrong_loss_is_not_timed_and_of_ours_it_fails_the_run(run, monkeypatch):
    right = vocab_loss.variants(CPU, run.note)
    wrong = {
        "longhaul": lambda h, w, y: 1.01 * right["longhaul"](h, w, y),
        "standard": right["standard"],
        "other": lambda h, w, y: 1.2 * right["standard"](h, w, y),
    }
    monkeypatch.setattr(vocab_loss, "variants", lambda *_: wrong)
    loss.one_size(run, TOY, 64, 1.0)
    rows = {row["loss"]: row for row in run.data["tables"]["loss"]["rows"]}
    assert (
        rows["longhaul"]["time, ms"] == rows["other"]["time, ms"] == "not timed: fails its check"
        and rows["standard"]["time, ms"] > 0
    )
    assert rows["other"]["dW error"] > 0.1 and run.data["failures"] == [
        "loss, 64 tokens: longhaul: not timed: fails its check"
    ]


def test_memory_that_runs_out_ends_that_line_at_larger_sizes_alone(run, monkeypatch):
    right = vocab_loss.variants(CPU, run.note)

    def large(h, w, y):
        if len(h) > 300:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 37 GiB")
        return right["standard"](h, w, y)

    monkeypatch.setattr(
        vocab_loss, "variants", lambda *_: {"longhaul": right["longhaul"], "standard": large}
    )
    for tokens in (256, 512, 1024):
        loss.one_size(run, TOY, tokens, 1.0)
        run.earlier = run.data["tables"]  # as the next job reads it
    shown = {
        (row["loss"], row["tokens"]): row["time, ms"] for row in run.data["tables"]["loss"]["rows"]
    }
    assert (
        shown["standard", 256] > 0
        and shown["standard", 512] == "out of memory"
        and ("standard", 1024) not in shown
    )
    assert shown["longhaul", 1024] > 0 and not run.data["failures"]
    assert (
        "loss, 1,024 tokens: standard is left out, as its memory ran out at 512"
        in run.data["notes"]
    )


def test_flash_attention_is_called_in_its_own_layout(install, run):
    install(
        "flash_attn",
        flash_attn_func=lambda q, k, v, causal: oracle.causal(q, k, v).to(q.dtype) * causal,
    )
    contest = attention.check(
        attention.Contest((4, 1), checks.CFG, {"flash-attn": attention.flash_attn()}), TOY, run
    )
    (forward, gradient), why = contest.verdicts["flash-attn"]
    assert not why and 0 < forward < 1e-2 and 0 < gradient < 1e-2


def test_decoding_is_checked_before_it_is_timed_also_of_others(install, run):
    def with_kvcache(q, k, v, cache_seqlens, wrong=1.0):
        assert cache_seqlens == k.shape[1] == 300
        heads = [x.transpose(1, 2) for x in (q, k, v)]
        return wrong * torch.nn.functional.scaled_dot_product_attention(
            *heads, enable_gqa=True
        ).transpose(1, 2)

    for wrong, word in ((1.0, ""), (0.9, "not timed: fails its check")):
        install(
            "flash_attn",
            flash_attn_with_kvcache=lambda *x, wrong=wrong, **y: with_kvcache(*x, **y, wrong=wrong),
        )
        error, why = attention.attempt(attention.dense_decode_error, attention.flash_decoder, TOY)
        assert not why and (error > 0.05) == bool(word)
    attention.decode(run, TOY, 100, 1.0)
    rows = {row["attention"]: row for row in run.data["tables"]["attention"]["rows"]}
    assert (
        rows["SDPA, flash"]["forward error"] < 1e-2
        and rows["longhaul, NSA"]["time, ms"] > 0
        and rows["flash-attn"]["time, ms"] == "needs a CUDA device"
    )


def fla_like(q, k, v, g_cmp, g_slc, g_swa, block_counts, block_size, window_size, wrong=1.0):
    """What flash-linear-attention's parallel_nsa computes up to 1,024 tokens, where every block is
    chosen.
    """
    assert (block_counts, block_size, window_size) == (16, 64, 512)
    chosen = torch.ones(1, q.shape[1], k.shape[2], 16, dtype=torch.bool)
    blocks = (x.unflatten(1, (-1, 64)).mean(2) for x in (k, v))
    return oracle.nsa(
        q,
        k,
        v,
        *blocks,
        k,
        v,
        torch.stack((wrong * g_cmp, g_slc, g_swa), -1),
        attention.MEANS,
        chosen,
    )[0].to(q.dtype)


@pytest.mark.slow
def test_flas_attention_is_checked_where_its_choice_need_not_be_known(install, run):
    for wrong, word in ((1.0, ""), (0.8, "not timed: fails its check")):
        install("flash_attn")
        install(
            "fla.ops.nsa.parallel",
            parallel_nsa=lambda *x, wrong=wrong, **y: fla_like(*x, **y, wrong=wrong),
        )
        contest = attention.check(
            attention.Contest((4, 1), attention.MEANS, {"fla": attention.fla_nsa()}), TOY, run
        )
        assert contest.verdicts["fla"][1] == word


def test_missing_attention_is_named_with_its_remedy():
    assert attention.flash_attn() == "not installed (pip install flash-attn)"
    assert attention.fla_nsa() == "not installed (pip install flash-linear-attention flash-attn)"


def test_wrong_attention_of_ours_is_not_timed_and_fails_the_run(run):
    ways = {
        "SDPA, flash": attention.dense_by(attention.SDPBackend.FLASH_ATTENTION),
        "longhaul, wrong": attention.dense(
            lambda q, k, v, *_: 1.05 * attention.standard_attention(q, k, v)
        ),
    }
    attention.whole(
        run,
        TOY,
        "forward",
        300,
        1.0,
        attention.check(attention.Contest((4, 1), checks.CFG, ways), TOY, run),
    )
    rows = {row["attention"]: row["time, ms"] for row in run.data["tables"]["attention"]["rows"]}
    assert (
        rows["longhaul, wrong"] == "not timed: fails its check"
        and rows["SDPA, flash"] > 0
        and len(run.data["failures"]) == 1
    )


def test_transformers_with_other_weights_is_not_timed(run, monkeypatch):
    pytest.importorskip("transformers")
    right = step.copied

    def other(plan, place):
        model = right(plan, place)
        model.model.norm.weight.data.mul_(3)
        return model

    monkeypatch.setattr(step, "copied", other)
    step.one_context(run, TOY, "tiny", "standard", 64, True, 1.0)
    row = run.data["tables"]["step"]["rows"][1]
    assert row["system"] == "transformers" and "not timed: first losses" in row["step, ms"]


def test_transformers_that_do_not_fit_beside_run_alone_afterwards(run, monkeypatch):
    tried, right = [], step.plain_side

    def side(plan, place, checkpointing, first):
        tried.append(checkpointing)
        if len(tried) < 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return right(plan, place, checkpointing, first)

    monkeypatch.setattr(step, "plain_side", side)
    step.one_context(run, TOY, "tiny", "standard", 64, True, 1.0)
    ours, theirs = run.data["tables"]["step"]["rows"]
    assert (
        tried == [False, True, False, True]
        and "gradient checkpointing" in theirs["levers"]
        and theirs["step, ms"] > 0
    )
    assert ours.get("speed / transformers") is None and "not in turns" in run.data["notes"][0]


# ---- the list of a GPU


@pytest.fixture
def h100(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H100 80GB HBM3")


def full_jobs():
    return [job for part in command.PARTS.values() for job in part.jobs(FULL)]


def test_the_jobs_of_a_gpu_cover_every_size_and_each_has_a_name_of_its_own(h100):
    pytest.importorskip("triton", reason=NO_TRITON)
    jobs = processes(full_jobs())
    names = " ".join(job.name for job in jobs)
    for words in (
        "exact",
        "loss, 8,192",
        "loss, 131,072",
        "attention, forward+backward, 262,144",
        "attention, indexed, forward+backward, 131,072",
        "step, 4B, indexed, 32,768",
        "profile, one layer, indexed, 131,072",
        "attention, decode, 262,144",
        "groups of 16",
        "step, 4B, standard, 131,072",
        "step, 0.6B, nsa, the longest",
        "memory, 4B",
        "workspaces",
        "allocator",
        "profile, attention",
        "decode, 4B, nsa, after 131,072 tokens",
        "smoke, kernel, fold_kernel",
        "memory of transformers, the second half",
    ):
        assert words in names, words
    folders = {job.folder for job in jobs}
    assert len(folders) == len({job.name for job in jobs}) == len(jobs)
    assert all(named(full_jobs(), job.name).name == job.name for job in jobs)


def test_every_kernel_has_a_job_in_the_smoke_test(h100):
    pytest.importorskip("triton", reason=NO_TRITON)
    (whole,) = smoke.jobs(FULL)
    names = {job.name.rpartition(", ")[2] for job in whole.children}
    assert names == {*kernels.found(), "nsa", "indexed", "standard"}


@pytest.mark.parametrize("wrong", [torch.tensor([3.0, 5.0]), torch.tensor([3.0, torch.nan])])
def test_the_smoke_test_fails_where_a_gradient_is_not_that_of_pytorchs_operators(
    wrong, run, monkeypatch
):
    right = {"zero": torch.zeros(2), "near": torch.tensor([1.0, 1.0]), "a": torch.tensor([3.0, 4])}
    found = {
        "auto": right | {"near": torch.tensor([1.0, 1.01]), "a": wrong},
        "torch": right,
    }
    monkeypatch.setattr(
        smoke, "packed_gradients", lambda state, _: found[state.model.config.kernels]
    )
    with pytest.raises(ValueError, match="gradient of a differs by"):
        smoke.one_step(run, TOY, "indexed")
    assert smoke.worst_difference(right, right)[1] == 0


def test_a_kernel_runs_in_the_layers_that_launch_it():
    pytest.importorskip("triton", reason=NO_TRITON)
    assert smoke.kinds_of("pair_forward_kernel") == ("nsa",)
    assert smoke.kinds_of("attend_kernel") == ("indexed",)
    assert smoke.kinds_of("swiglu_kernel") == ("nsa", "standard")


def test_every_kernel_in_the_sources_is_found():
    pytest.importorskip("triton", reason=NO_TRITON)
    sources = [*ROOT.glob("fused/*.py"), *ROOT.glob("*/triton/*.py")]
    written = {
        name
        for path in sources
        for name in re.findall(r"^@triton.*\ndef (\w+_kernel)\(", path.read_text(), re.M)
    }
    assert set(kernels.found()) == written and len(written) > 5


@pytest.mark.parametrize("kind", ["nsa", "indexed"])
def test_sparse_attention_takes_its_kernels_wherever_a_gpu_is(kind, h100):
    assert step.settings("4B", kind, 131_072, FULL).kernels == "triton"
    assert step.settings("4B", "standard", 131_072, FULL).kernels == "auto"
    assert smoke.settings(FULL, kind).kernels == "triton"
    changes = dict(attention_type=kind)
    assert memory.settings(FULL, "0.6B", 32_768, changes).kernels == "triton"
    assert memory.settings(TOY, "tiny", 256, changes).kernels == "auto"


def test_the_engine_in_torch_stays_out_of_long_rows(install):
    install("flash_attn", flash_attn_func=None)
    long = attention.plain(Place(CPU, True), 131_072).ways
    assert list(long) == ["SDPA, flash", "SDPA, cuDNN", "longhaul, NSA triton"]
    assert list(attention.beside_indexed(TOY).ways) == [*long, "longhaul, indexed triton"]
    middle = attention.plain(TOY, 32_768).ways
    assert "longhaul, indexed triton" in middle and "longhaul, NSA torch" not in middle
    short = attention.plain(TOY, 8192).ways
    assert {"longhaul, NSA torch", "longhaul, indexed torch"} == set(short) - set(middle)


def test_the_longest_context_is_the_last_that_fits(h100, monkeypatch):
    monkeypatch.setattr(step, "fitted", lambda cfg, place: cfg.context_length <= 300_000)
    assert step.longest("4B", "standard", FULL) == 262_144


def test_dense_attention_in_float64_is_computed_once_for_a_contest_and_once_for_a_run(
    run, monkeypatch
):
    calls = []

    def counted(*tensors):
        calls.append("float64")
        return oracle.causal(*tensors)

    monkeypatch.setattr(attention, "CHECK_TOKENS", 130)
    monkeypatch.setattr(attention, "oracle", types.SimpleNamespace(causal=counted, nsa=oracle.nsa))
    plain = attention.dense(lambda q, k, v, *_: attention.standard_attention(q, k, v))
    ways = {"SDPA, flash": attention.dense_by(attention.SDPBackend.FLASH_ATTENTION), "other": plain}
    contest = attention.Contest((4, 1), checks.CFG, ways)
    first = attention.check(contest, TOY, run)
    assert calls == ["float64"]
    run.earlier = run.data["tables"]  # as the next job reads it
    assert attention.check(contest, TOY, run).verdicts == first.verdicts
    assert calls == ["float64"] and len(run.data["tables"]["checks"]["rows"]) == 2


def test_achieved_operations_are_those_of_the_pairs_that_attention_reads():
    T = 8192
    contest = attention.plain(TOY, T)
    one_ms = attention.achieved(contest, "SDPA, flash", "forward", T, 1.0)
    assert one_ms["TFLOP/s"] == 4 * 4 * 128 * (T * (T + 1) / 2) * 1e3
    both = attention.achieved(contest, "SDPA, flash", "forward+backward", T, 1.0)
    assert both["TFLOP/s"] == 3.5 * one_ms["TFLOP/s"]
    q, k = T * 4 * 128 * 2, T * 2 * 128 * 2
    assert one_ms["GB/s"] == (2 * q + 2 * k) * 1e3
    for sparse in ("longhaul, NSA torch", "longhaul, indexed torch"):
        found = attention.achieved(contest, sparse, "forward", T, 1.0)
        assert 0.2 < found["TFLOP/s"] / one_ms["TFLOP/s"] < 0.6


def test_mfu_counts_the_causal_half_of_attention(h100, monkeypatch):
    cfg = step.settings("0.6B", "standard", 8192, FULL)
    config = cfg.model()
    by_hand = 6 * (
        config.num_params() - config.num_layers * (2 * 1024 + 2 * 128) - 1024
    ) * 8192 + 12 * 28 * 16 * 128 * (8192 * 8193 / 2)
    assert step.flops(cfg) == pytest.approx(by_hand, rel=1e-12)
    figures = step.speed(cfg, {"longhaul": [0.5], "transformers": [1.0]}, "longhaul")
    assert (
        figures["tokens/s"] == 16_384
        and figures["steps timed"] == 1
        and figures["TFLOP/s"] == pytest.approx(by_hand / 0.5)
        and figures["speed / transformers"] == 2
        and figures["MFU"] == pytest.approx(by_hand / 0.5 / 989e12)
    )


# ---- a GPU's memory


class Statistics:
    """The allocator's statistics of torch.cuda, imitated."""

    def __init__(self):
        self.now = self.peak = self.reserved = 0

    def set(self, now):
        self.now = now
        self.peak = max(self.peak, now)
        self.reserved = max(self.reserved, now)

    def install(self, monkeypatch):
        for name, function in dict(
            max_memory_allocated=lambda device=None: self.peak,
            max_memory_reserved=lambda device=None: self.reserved,
            reset_peak_memory_stats=lambda device=None: setattr(self, "peak", self.now),
            synchronize=lambda device=None: None,
            mem_get_info=lambda device=None: (60, 100),
        ).items():
            monkeypatch.setattr(torch.cuda, name, function)
        return self


def test_each_stage_of_a_gpu_has_the_peak_that_the_allocator_saw_in_it(monkeypatch):
    allocator = Statistics().install(monkeypatch)
    peaks = reconcile.CudaPeaks(CUDA)
    for stage, sizes in (
        ("start", [5]),
        ("layer forward", [9, 7]),
        ("loss forward", [30, 8]),
        ("layer forward", [11, 8]),
    ):
        peaks.enter(stage)
        for size in sizes:
            allocator.set(size)
    peaks.note()
    assert (
        peaks.peaks == {"start": 5, "layer forward": 11, "loss forward": 30}
        and peaks.reserved == 30
    )


def test_a_measured_step_on_a_gpu_names_the_stages_that_are_predicted(monkeypatch):
    Statistics().install(monkeypatch).set(3)
    cfg = memory.settings(TOY, "tiny", 64, {})
    found = reconcile.measure_cuda(cfg, device=CPU)
    assert {
        "embedding",
        "layer forward",
        "loss backward",
        "attention backward",
        "optimizer",
    } <= set(found["stages"])
    assert found["allocator_peak_bytes"] == 3 and found["device_bytes"] == 40


def test_the_history_of_an_allocator_replays_to_the_segments_that_it_took():
    def event(action, addr, size, stream=0):
        return dict(action=action, addr=addr, size=size, stream=stream)

    events = [
        event("segment_alloc", 0, SMALL_SEGMENT),
        event("alloc", 0, 1000),
        event("alloc", 1024, MIB // 2),
        event("segment_alloc", 1 << 30, LARGE_SEGMENT),
        event("alloc", 1 << 30, 5 * MIB),
        event("free_requested", 0, 1000),
        event("free_completed", 0, 1000),
        event("alloc", 0, 512),
        event("free_completed", 1 << 30, 5 * MIB),
        event("alloc", 1 << 30, 9 * MIB),
        event("segment_alloc", 1 << 40, SMALL_SEGMENT, 7),
        event("alloc", 1 << 40, 512, 7),
    ]  # a second stream shares no segment
    found = history.curves(events)
    assert found.real == [SMALL_SEGMENT] * 2 + [SMALL_SEGMENT + LARGE_SEGMENT] * 5 + [
        2 * SMALL_SEGMENT + LARGE_SEGMENT
    ]
    assert found.model == found.real and found.largest_difference == 0
    off = history.curves([event("segment_alloc", 0, 4 * MIB), event("alloc", 0, 1000)])
    assert off.largest_difference == 2 * MIB


def test_a_recorded_history_is_of_this_device_and_recording_ends_whatever_happens(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(
        torch.cuda.memory,
        "_record_memory_history",
        lambda enabled="all", context="all": calls.append((enabled, context)),
    )
    monkeypatch.setattr(
        torch.cuda.memory, "_snapshot", lambda device: dict(device_traces=[["events"]])
    )
    cfg = memory.settings(TOY, "tiny", 64, {})
    assert history.record(cfg, CPU, steps=1) == ["events"] and calls == [
        ("all", None),
        (None, "all"),
    ]
    monkeypatch.setattr(history.step, "train_step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        history.record(cfg, CPU, steps=1)
    assert calls[-1] == (None, "all")


def test_a_step_on_a_gpu_reports_its_own_peak_and_not_that_of_others(h100, monkeypatch):
    allocator = Statistics().install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: allocator.now)
    gib = 2**30
    allocator.set(10 * gib)  # of others

    def one_step(tokens, targets):
        for size in (18, 30, 15):  # 5 GiB stay
            allocator.set(size * gib)
        return torch.zeros(())

    cfg = step.settings("tiny", "standard", 64, TOY)
    monkeypatch.setattr(step, "batch", lambda *_, **__: (None, None))
    side = step.Side(one_step, "", cfg, FULL, base=10 * gib)
    assert side.own == 5 * gib and side.peak_gib is None
    side.run(None, None)
    assert side.peak_gib == 20 and side.reserved_gib == 30


# ---- kernels one by one, without a GPU


ALONE = """
import sys
import torch
from benchmarks.gpu import kernels, smoke
from benchmarks.gpu.jobs import Place
from benchmarks.record import Run

run = Run(sys.argv[1], "a test", "", {}, True, echo=lambda line: None)
smoke.one_kernel(run, Place(torch.device("cpu"), True), "combine_kernel")
smoke.one_kernel(run, Place(torch.device("cpu"), True), "no_such_kernel")
print([row["result"] for row in run.data["tables"]["smoke"]["rows"]])
"""


@pytest.mark.slow
def test_a_kernel_is_launched_alone_and_others_are_not(tmp_path):
    pytest.importorskip("triton", reason=NO_TRITON)
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip().endswith(
        "['ran, 1 launches', 'not launched by a step or by decoding']"
    ), done.stderr


def test_only_the_kernel_that_is_asked_for_runs_and_memory_is_zero():
    pytest.importorskip("triton", reason=NO_TRITON)
    kernel = kernels.found()["combine_kernel"]
    with kernels.alone("another_kernel") as launches:
        assert kernel[(1,)](None) is None
        assert torch.empty(3).tolist() == [0, 0, 0]
        assert torch.ones(2).new_empty(2).tolist() == [0, 0]
    assert not launches


PRECOMPILE = """
import os, sys, time
from pathlib import Path
from benchmarks.gpu import precompile

precompile.TOKENS = (65_536,)
folder = Path(sys.argv[1])
precompile.into(folder, 90)
before = {path: path.stat().st_mtime_ns for path in folder.glob("**/*.cubin")}
precompile.into(folder, 90)
assert before == {path: path.stat().st_mtime_ns for path in folder.glob("**/*.cubin")}
print(len(before), "cubins")
"""


@pytest.mark.slow
def test_kernels_are_compiled_for_a_gpu_that_is_not_here_once(tmp_path):
    pytest.importorskip("triton", reason=NO_TRITON)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", PRECOMPILE, str(tmp_path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-2]) >= len(kernels.found())
    assert all(name in done.stdout for name in kernels.found())


# ---- what the driver says, the tests that need a GPU


def test_driver_and_clocks_come_from_nvidia_smi_by_the_devices_identity(monkeypatch):
    asked = []

    def smi(command, **_):
        asked.append(command)
        return types.SimpleNamespace(
            returncode=0, stdout="570.1, 1755 MHz, 1980 MHz, 2619 MHz, 700.00 W, 41\n", stderr=""
        )

    monkeypatch.setattr(record.shutil, "which", lambda name: name)
    monkeypatch.setattr(record.subprocess, "run", smi)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="ab-1")
    )
    found = record.nvidia_smi(CUDA)
    assert (
        found["driver"] == "570.1"
        and found["SM clock now"] == "1755 MHz"
        and found["temperature"] == "41"
    )
    assert "--id=GPU-ab-1" in asked[0]
    monkeypatch.setattr(record.shutil, "which", lambda name: None)
    assert "not on the path" in record.nvidia_smi(CUDA)["driver"]


def test_the_tests_marked_gpu_are_run_and_a_failure_of_theirs_fails_the_run(run, monkeypatch):
    commands = []

    def pytest_run(command, **_):
        commands.append(command)
        return types.SimpleNamespace(
            returncode=1, stdout="F.\n== 1 failed, 5 passed in 9.00s ==\n", stderr=""
        )

    monkeypatch.setattr(exact.subprocess, "run", pytest_run)
    exact.marked_tests(run, FULL)
    assert run.data["failures"] == ["python -m pytest -m gpu: 1 failed, 5 passed in 9.00s"]
    assert {path.rsplit("/", 1)[1] for path in commands[0][6:]} >= {
        "test_fused_nsa.py",
        "test_fused_linear_ce.py",
    }


# ---- the documents' figures


@pytest.mark.parametrize("name", report.ReportConfig().files)
def test_a_document_says_what_the_committed_results_say(name):
    path = report.ROOT / name
    assert "<!-- results:" in path.read_text()
    assert report.up_to_date(path), "run python -m benchmarks.report"


def test_a_section_is_made_from_its_results_and_an_unknown_one_is_refused():
    data = dict(
        toy=False,
        label="NVIDIA X",
        command="python -m benchmarks.gpu --out y",
        where=dict(device="NVIDIA X", torch="2", date="d", commit="c"),
        failures=["f"],
        skipped=["s"],
        tables=dict(
            loss=dict(
                title="Loss",
                columns={"loss": "text", "ms": "ms", "empty": "ms"},
                rows=[{"loss": "ours", "ms": 1234.5}, {"loss": "other", "ms": "out of memory"}],
            )
        ),
    )
    text = (
        "a\n<!-- results:run/loss -->\nold\n<!-- /results -->\n"
        "b\n<!-- results:gpu -->\n<!-- /results -->\n"
    )
    now = report.written(text, dict(run=data))
    assert (
        "| ours | 1,234.500 |" in now
        and "| other | out of memory |" in now
        and "old" not in now
        and "empty" not in now
    )
    assert (
        "Failed: f." in now and "Skipped: s." in now and report.written(now, dict(run=data)) == now
    )
    assert "Nothing has been measured on a GPU yet" in report.written(
        text, dict(run=data | dict(toy=True))
    )
    with pytest.raises(ValueError, match="choose from gpu, run/loss"):
        report.written(text.replace("run/loss", "run/los"), dict(run=data))
