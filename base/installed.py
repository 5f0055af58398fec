"""What every command does before it imports torch.

A shell in which .venv is not active gets a remedy in one line instead of a traceback. CUDA's
caching allocator, which reads its settings once, gets segments that grow: cut into segments of
fixed size, the 4B's 87 GiB at 131,072 tokens reserve 102 GiB instead of 90 (computed). OpenMP's
threads, whose library reads its settings once too, sleep while they wait. Threads that spin keep
the core from the one that they wait for, if another process is busy: ten steps of a tiny model then
took 26 s of CPU time instead of 5. From here on Ctrl-C ends a command with one line and exit code
130.
"""

import importlib.util
import os
import sys

LOWEST_PYTHON = (3, 11)
NEEDED = ("torch", "numpy", "sentencepiece", "safetensors", "tqdm")
# torch reads both names, the older one first
ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
# each says how OpenMP's threads wait: of the standard, of GNU's library, of Intel's
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
INTERRUPTED = "interrupted: give the same command again\n"
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def problem():
    """What this Python lacks; None if nothing is missing."""
    if sys.version_info < LOWEST_PYTHON:
        major, minor = sys.version_info[:2]
        return f"{sys.executable} is Python {major}.{minor}, and longhaul needs 3.11 or newer"
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return f"{sys.executable} has no {', '.join(missing)}"
    return None


def remedy():
    """The two ways to run a command with everything that it needs."""
    venv = os.path.join(ROOT, ".venv")
    if os.path.exists(os.path.join(venv, "bin", "python")) and sys.prefix != venv:
        return (
            "give `source .venv/bin/activate` and the same command again, or run it with "
            ".venv/bin/python"
        )
    return (
        "bash scripts/quickstart.sh installs everything into .venv, and "
        "pip install -r requirements.txt into a Python of your own"
    )


def require():
    """End the program with one line and exit code 2 if something is missing."""
    found = problem()
    if found:
        sys.stderr.write(f"error: {found}: {remedy()}\n")
        sys.exit(2)


def let_segments_grow():
    """Ask for expandable segments, unless the user has set the allocator in either way."""
    if not sys.platform.startswith("linux"):
        return
    if not any(name in os.environ for name in ALLOCATOR_SETTINGS):
        for name in ALLOCATOR_SETTINGS:
            os.environ[name] = "expandable_segments:True"


def let_threads_sleep():
    """Ask OpenMP's threads not to spin, unless the user has said how they wait."""
    if not any(name in os.environ for name in WAITING):
        os.environ["OMP_WAIT_POLICY"] = "passive"


def answer_interrupts():
    """End the program with one line and exit code 130 if nothing else catches Ctrl-C."""
    tell_error = sys.excepthook
    tell_ignored = sys.unraisablehook

    def tell(kind, error, traceback):
        if not issubclass(kind, KeyboardInterrupt):
            return tell_error(kind, error, traceback)
        sys.stderr.write(INTERRUPTED)
        sys.exit(130)

    def tell_unraisable(ignored):
        # a clean-up that Ctrl-C cut short may fail in its turn: logging's at the end does
        behind = getattr(ignored.exc_value, "__context__", None)
        interrupted = isinstance(behind, KeyboardInterrupt)
        if not interrupted and not issubclass(ignored.exc_type, KeyboardInterrupt):
            return tell_ignored(ignored)
        # it came in a destructor or a callback, and Python would go on as if nothing had come
        sys.stderr.write(INTERRUPTED)
        sys.stderr.flush()
        os._exit(130)

    sys.excepthook = tell
    sys.unraisablehook = tell_unraisable


require()
let_segments_grow()
let_threads_sleep()
answer_interrupts()
