"""Every command of the repository as a stranger tries it: bare, with --help, with a misspelt flag,
ended by Ctrl-C. The commands are found in the tree, so that a new one is tried too.
"""

import contextlib
import functools
import io
import json
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import profile_memory
from longhaul import exits
from tests.tiers import few_fast

ROOT = Path(__file__).parent.parent
# Their arguments are those of pytest or train.py, or they are sourced.
PASS_ON = {"setup.sh", "slurm.sh", "test.sh"}
WRITTEN = {".md", ".py", ".sh", ".toml", ".json", ".svg", ".png", ".html"}
INTERRUPTED = 130
# a shell without job control lets what it starts in the background ignore Ctrl-C
HEARD = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)


def command_modules() -> list[str]:
    """Names of the modules that are run with python -m, or from the root by their file."""
    folders = [path.parent for path in ROOT.glob("*/__init__.py") if path.parent.name != "tests"]
    files = [*ROOT.glob("*.py"), *(file for folder in folders for file in folder.rglob("*.py"))]
    found = set()
    for file in files:
        is_package = file.name == "__main__.py"
        if is_package or re.search(r'^if __name__ == "__main__":', file.read_text(), re.M):
            path = file.parent if is_package else file.with_suffix("")
            found.add(".".join(path.relative_to(ROOT).parts))
    return sorted(found)


def source_files() -> dict[Path, int]:
    """When each file of the repository that a command might write was written."""
    folders = [path for path in ROOT.iterdir() if path.name[0] != "." and path.name != "runs"]
    files = [file for folder in folders for file in [folder, *folder.rglob("*")]]
    return {file: file.stat().st_mtime_ns for file in files if file.suffix in WRITTEN}


# footprint is a program of its own, with exit codes of its own: tests/test_footprint_script.py
COMMANDS = [module for module in command_modules() if module != "footprint"]
SCRIPTS = sorted(path for path in ROOT.glob("scripts/*.sh") if path.name not in PASS_ON)


@pytest.fixture(autouse=True)
def pipes():
    """As before: a program that ends with its reader would end the tests that write to a pipe."""
    before = signal.getsignal(signal.SIGPIPE)
    yield
    signal.signal(signal.SIGPIPE, before)


@pytest.fixture
def run_here(tmp_path, monkeypatch, capsys):
    """Runs a command in this process and an empty folder; (exit code, stdout, stderr)."""

    def run(module: str, *words: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", [module, *words])
        with pytest.raises(SystemExit) as end:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        return end.value.code, *capsys.readouterr()

    monkeypatch.chdir(tmp_path)
    before = source_files()
    yield run
    assert source_files() == before
    assert not list(tmp_path.iterdir())


def test_the_doors_that_everybody_knows_are_among_the_commands():
    known = {"train", "profile_memory", "verify_chunked_loss", "data.prepare", "benchmarks.on_gpu"}
    assert known <= set(COMMANDS)


def misspelt_flag(text: str) -> str:
    """A flag that a text names without the letter before its last, such as --outpt."""
    flags = re.findall(r"^ +(--\w{3,})", text, re.M)
    flag = next((flag for flag in flags if flag != "--help"), "--help")
    return flag[:-2] + flag[-1]


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("module", few_fast(COMMANDS, every=12))
def test_help_explains_the_command_and_a_misspelt_flag_is_named_in_one_line(module, run_here):
    code, text, err = run_here(module, "--help")
    assert (code, err) == (0, "")
    assert text.startswith("usage: ")
    assert "--help" in text
    assert len(text.splitlines()) > 3

    wrong = misspelt_flag(text)
    code, out, err = run_here(module, wrong)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert wrong in err
    assert re.search(r"did you mean --\w+\?|choose from --\w+", err)


# ---- bare


@pytest.fixture
def hears_ctrl_c():
    """As in a terminal: a process of several that run tests ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.slow
@pytest.mark.parametrize("module", COMMANDS)
def test_a_bare_command_begins_or_says_what_it_needs_and_hears_ctrl_c(
    module, tmp_path, monkeypatch, hears_ctrl_c
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [module])
    before = source_files()
    screen, errors = Interrupts(), io.StringIO()
    code: object = INTERRUPTED
    with contextlib.redirect_stdout(screen), contextlib.redirect_stderr(errors):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code or exits.DONE
        except KeyboardInterrupt:  # which base.installed answers in one line
            pass

    err = errors.getvalue()
    if code == exits.BAD_INPUT:
        assert screen.getvalue() == ""
        assert len(err.splitlines()) == 1
        assert "--" in err or "OUTPUT_DIR" in err or "GPU" in err
    else:
        # a run that trains says by its code that the same command begins again
        assert code in (INTERRUPTED, exits.PREEMPTED), err
        assert screen.getvalue()
    assert source_files().keys() == before.keys()


class Interrupts(io.StringIO):
    """A screen whose user gives Ctrl-C after the first line."""

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.getvalue().count("\n") == text.count("\n") > 0:
            signal.raise_signal(signal.SIGINT)
        return written


@pytest.mark.parametrize(
    "statement",
    [
        "signal.raise_signal(signal.SIGINT)",
        "Raises()",  # where Python itself would only say that it ignores the error
        "Fails()",  # the same, and the error that it would name is another one
    ],
)
def test_ctrl_c_is_one_line_and_ends_the_command_wherever_it_comes(statement):
    code = (
        "import base.installed, signal, threading\n"
        "class Raises:\n"
        "    def __del__(self): signal.raise_signal(signal.SIGINT)\n"
        "class Fails:\n"
        "    def __del__(self):\n"
        "        try: signal.raise_signal(signal.SIGINT)\n"
        "        finally: threading.Lock().release()\n"
        f"{statement}\nprint('went on')"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, preexec_fn=HEARD)
    assert (done.returncode, done.stdout) == (INTERRUPTED, "")
    assert len(done.stderr.splitlines()) == 1


def test_garbage_is_looked_for_again_when_torch_is_there_but_not_in_torch():
    code = "import base.with_torch, gc; print(gc.isenabled(), gc.get_freeze_count())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    is_on, left_out = done.stdout.split()
    assert is_on == "True"
    assert int(left_out) > 100_000


# ---- the profiler


def test_json_without_a_name_is_all_that_standard_output_has(capfd):
    assert profile_memory.main(["--model_size", "tiny", "--json"]) == 0
    captured = capfd.readouterr()
    assert json.loads(captured.out)["config"]["model_size"] == "tiny"
    assert "live GiB" in captured.err


# ---- shell scripts


def scripted(script: Path, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run(["bash", str(script), *words], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_explains_itself_and_refuses_a_misspelt_option(script):
    before = source_files()
    helped = scripted(script, "--help")
    assert (helped.returncode, helped.stderr) == (0, "")
    assert f"bash scripts/{script.name} " in helped.stdout

    wrong = scripted(script, "--rehaerse")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert len(wrong.stderr.splitlines()) == 1
    assert "--rehaerse" in wrong.stderr
    assert source_files() == before
