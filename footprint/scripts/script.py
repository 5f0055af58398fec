"""The memory of a training script that nobody has changed: it runs on fake tensors until one of its
steps is recorded, and is then ended.
"""

import contextlib
import functools
import os
import runpy
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from footprint.cards.device import Card, Demand, target_card
from footprint.pretend.owners import label
from footprint.pretend.places import DEPTH
from footprint.pretend.ranks import as_rank
from footprint.python.late import patched_when_imported
from footprint.python.patches import Patches
from footprint.python.refusal import HERE, ON_THE_CPU, PACKAGES, Refused, Stopped, is_users, place
from footprint.python.users_file import IS_CLONE, ROOT
from footprint.scripts.answer import (
    EVALUATION,
    FIRST,
    HOST,
    STEADY,
    Phases,
    ScriptReport,
    demand_before,
)
from footprint.scripts.datasets import real_datasets
from footprint.scripts.decisions import Deciding, arrays_of_ones
from footprint.scripts.downloads import OFFLINE, missing_download, no_downloads, offline
from footprint.scripts.evaluations import Forwards
from footprint.scripts.flexible import flexible_attention
from footprint.scripts.launch import environment, no_launches, sharded, surroundings
from footprint.scripts.longest import Longest
from footprint.scripts.rounds import Rounds
from footprint.scripts.unwritten import LIBRARIES, Unwritten
from footprint.steps.prediction import (
    NEEDS_RANKS,
    NO_ANSWERS,
    on_fake_tensors,
    start_fake_group,
    step_tracker,
)

LIMIT = 300  # seconds
AGAIN = 5  # seconds after which a limit is told again, where Python could not raise it
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
ALLOCATORS = (ALLOCATOR, "PYTORCH_ALLOC_CONF")  # since torch 2.9 also by the second name
EXPANDABLE = "expandable_segments:True"
NO_DEVICE = "this asks the CUDA driver for what no prediction answers: do without it"
ENOUGH = "give it more steps, such as three, and as many rows of data"


class Enough(BaseException):
    """Ends a script whose step has been recorded."""


class Failed(Exception):
    """The script's own error, which is the cause of this one."""


@dataclass(frozen=True)
class Script:
    """What would be run, and where."""

    name: str  # of a file, or of a module
    args: tuple[str, ...] = ()
    is_module: bool = False
    target: str | Card = "cuda"
    nproc: int = 0  # processes that torchrun starts; 0: it is not started by torchrun
    answers: Mapping[str, object] = field(default_factory=lambda: NO_ANSWERS)
    limit: float = LIMIT
    lengths: tuple[int, ...] = ()  # of the rows of its data; (): as they are

    @property
    def folder(self) -> str:
        """The first entry of sys.path, as Python has it."""
        return os.getcwd() if self.is_module else str(Path(self.name).resolve().parent)

    def run(self) -> None:
        if self.is_module:
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(self.name, run_name="__main__")


def predict_script(script: Script, say: Callable[[str], None]) -> ScriptReport:
    """The memory of the script's steady step and of what comes before it; `say` is told what runs.

    Refused if it cannot be predicted; Failed for an error of its own.
    """
    recorder = Recorder(script, say)
    with contextlib.ExitStack() as stack:
        stack.push(recorder.ended)
        stack.enter_context(in_its_place(script))
        stack.enter_context(recorder.recording())
        script.run()
    return recorder.finished()


def _for_scripts(refusal: Refused) -> Refused:
    """A refusal in words that are about a command, not about `predict`."""
    words = str(refusal).replace(ON_THE_CPU, NO_DEVICE).replace(NEEDS_RANKS, "give --nproc")
    return Refused(words)


class Recorder:
    """Runs a script on fake tensors, and notes its phases and its step."""

    def __init__(self, script: Script, say: Callable[[str], None]):
        self.script = script
        self.say = say
        self.started = time.monotonic()
        self.ranks = max(script.nproc, 1)
        self.card = target_card(script.target)
        self.tracker = step_tracker(self.card, DEPTH)
        self.rounds = Rounds(self._begin, self._end)
        self.tracker.on_gradient = self.rounds.got_gradient
        self.forwards = Forwards(self.tracker)
        self.longest = Longest(script.lengths, self.tracker.known)
        self.phases = Phases(self.card)
        self.before: list[Demand] = []
        self.origins: dict[int, str] = {}
        self.report: ScriptReport | None = None
        self.refusals: list[str] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """What runs inside the `with` block is recorded, and ends by Enough."""
        tracker = self.tracker
        reader = functools.partial(Deciding, tracker, self.refusals)
        files = Unwritten()
        silent = {name: functools.partial(files.silenced, name) for name in LIBRARIES}
        awaited = silent | no_launches(tracker) | sharded(tracker) | offline()
        if self.card:
            awaited |= flexible_attention(tracker)
        answers = self.script.answers
        predicted = on_fake_tensors(
            tracker, self.card, answers, self.ranks, self._patches(), reader
        )
        with (
            as_rank(self.ranks, start_fake_group),
            predicted,
            patched_when_imported(awaited),
            files.kept_in_memory(),
            tracker.watching(),
            self._watching(),
            self.rounds.counting(),
            self._limited(),
        ):
            warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there")
            warnings.filterwarnings("ignore", message=".*pin_memory. argument is set")
            os.environ.update(OFFLINE)
            if self.script.nproc:
                os.environ.update(environment(self.script.nproc))
            yield

    def _patches(self) -> Patches:
        tracker = self.tracker
        found = real_datasets(tracker) | arrays_of_ones(tracker) | self.forwards.patches()
        found[Refused, "__init__"] = self._note_refusal
        found |= self.longest.patches()
        return found | no_downloads() | surroundings(tracker, self.ranks)

    @property
    def _note_refusal(self) -> Callable:
        """A script may catch a refusal and go on without what it wanted."""

        def noted(refusal: Refused, words: str) -> None:
            ValueError.__init__(refusal, words)
            self.refusals.append(words)

        return noted

    # ---- where it is

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Forwards tell the phase."""
        handle = register_module_forward_pre_hook(self._forward_starts)
        try:
            yield
        finally:
            handle.remove()

    def _forward_starts(self, module: nn.Module, args) -> None:
        is_inner = len(self.tracker.running) > 1
        if is_inner or self.phases.current == STEADY:
            return
        trains = torch.is_grad_enabled()
        if trains:
            self.forwards.may_skip = False
        if self.phases.enter(FIRST if trains else EVALUATION, self.tracker.time):
            self._tell()

    def _tell(self) -> None:
        seconds = time.monotonic() - self.started
        self.say(f"footprint: {seconds:.0f} s: {self.phases.current}")

    def _begin(self) -> None:
        """A step begins: what lies before it is over."""
        trace = self.tracker.trace
        first_peak = self.tracker.first_peak
        self.phases.close(trace)
        if self.card:
            self.before.append(demand_before(trace, self.card, self.ranks))
        self.origins = self.tracker.begin_step()
        self.tracker.first_peak = max(first_peak, self.tracker.first_peak)
        self._tell()

    def _end(self) -> None:
        """The step is over: report it, and end the script."""
        tracker = self.tracker
        label(tracker, None, self.origins)
        tracker.known.suppose_numbers()
        for line in self.rounds.missing:
            tracker.known.suppose(f"the optimizer that {line} makes never steps")
        for words in self.refusals:
            tracker.known.suppose(f"the script has gone on without what was refused: {words}")
        report = ScriptReport.of(tracker, self.card, self.ranks)
        host = max(self.phases.host_peak, report.host_peak)
        report.phases = self.phases.peaks | {STEADY: report.peak, HOST: host}
        report.before = self.before
        report.segments_grow = any(EXPANDABLE in os.environ.get(name, "") for name in ALLOCATORS)
        self.report = report
        raise Enough

    def ended(self, kind, error: BaseException | None, raised) -> bool:
        """How the script has ended; whether that is no error."""
        if isinstance(error, Enough) or (self.report and isinstance(error, Exception | SystemExit)):
            return True  # also if the script has failed in what it does at its end
        if isinstance(error, SystemExit):
            if error.code in (None, 0):
                return True
            raise Failed(f"{self.script.name} ended with exit code {error.code}") from error
        if isinstance(error, Refused):
            raise _for_scripts(error) from error
        if isinstance(error, Exception):
            raise missing_download(error) or self._failed(error) from error
        return False

    def _failed(self, error: Exception) -> Failed:
        """What is said of the script's own error, which may come from what was assumed."""
        words = f"{self.script.name} failed"
        if isinstance(error, ModuleNotFoundError):
            words += f": it needs the package {error.name}, which is not installed here"
        assumed = "; ".join(self.tracker.known.assumed)
        return Failed(f"{words}; assumed before: {assumed}" if assumed else words)

    def finished(self) -> ScriptReport:
        """The report; Refused if the script has ended before its step."""
        if self.report is None:
            raise Refused(
                f"{self.script.name} ended, and an optimizer has taken {self.rounds.count} of the "
                f"two steps that a prediction needs: {ENOUGH}"
            )
        if self.script.lengths and not self.longest.is_used:
            raise Refused(
                "--lengths: no DataLoader gave the rows of this script's batches: drop it"
            )
        return self.report

    # ---- the limit

    @contextlib.contextmanager
    def _limited(self) -> Iterator[None]:
        """The script is stopped when its time is over. Python ignores what a destructor raises, so
        it is told again.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGALRM, self._time_is_over)
        signal.setitimer(signal.ITIMER_REAL, self.script.limit, AGAIN)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def _time_is_over(self, *_) -> None:
        raise Stopped(
            f"{place()} runs after {self.script.limit:g} s ({self.phases.current}, "
            f"{self.rounds.count} steps of an optimizer): give a longer --limit, or the script "
            "flags with which a step comes sooner, such as fewer evaluations"
        )


# ---- where a script runs


@contextlib.contextmanager
def in_its_place(script: Script) -> Iterator[None]:
    """The script finds its arguments and its folder as if Python had started it, and prints to
    standard error.
    """
    arguments = sys.argv
    path = list(sys.path)
    folder = os.getcwd()
    sys.argv = [script.name, *script.args]
    sys.path[:] = [script.folder, *(entry for entry in path[1:] if not _is_ours(entry))]
    aside = {name: module for name, module in sys.modules.items() if _hides(name, module)}
    for name in aside:
        del sys.modules[name]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.chdir(folder)
        sys.argv = arguments
        sys.path[:] = path
        _forget(script.folder)
        sys.modules.update(aside)


def _is_ours(entry: str) -> bool:
    """Whether an entry of sys.path is the clone, whose folders would hide the script's."""
    return IS_CLONE and Path(entry or ".").resolve() == ROOT


def _hides(name: str, module: object) -> bool:
    """Whether a module of the clone may have the name of one of the script's."""
    file = getattr(module, "__file__", None) or ""
    if not IS_CLONE or name == "__main__":
        return False
    return file.startswith(f"{ROOT}{os.sep}") and not file.startswith((HERE, PACKAGES))


def _forget(folder: str) -> None:
    """The modules of a script's folder are not those of the next one's."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if file.startswith(f"{folder}{os.sep}") and is_users(file) and name != "__main__":
            del sys.modules[name]
