"""A Python file of the user's, run as `python FILE` runs it, apart from its main part.

Its folder comes first on sys.path. If footprint runs from longhaul's clone, nothing of the clone
stands in front of the user's modules: its top-level modules have names such as `model`, `train` and
`data`, and so do those of many projects. What goes wrong in the file is told in one line.
"""

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType, TracebackType

from footprint.python.refusal import LIBRARY, PACKAGES, Refused, place_of

ROOT = Path(__file__).parents[2]
IS_CLONE = (ROOT / "profile_memory.py").is_file()  # footprint may be installed instead
PARTS = ("longhaul", "footprint", "profile_memory.py", "verify_chunked_loss.py")
OURS = tuple(str(ROOT / name) for name in PARTS)
# what multiprocessing names a script whose main part it does not run
MODULE = "__mp_main__"
MOST_CALLERS = 4  # lines that an error names beyond its own
MOST_LETTERS = 400  # of an error's message


class UsersFile:
    """The file at `path`. ValueError if it is no Python file."""

    def __init__(self, path: str):
        if not _is_python(Path(path)):
            raise ValueError(f"{path} is no Python file: give the path of one")
        self.path = path
        self.search = _search_path(Path(path).resolve().parent)
        self.hidden = {MODULE, *(name for name in _our_names() if not self._finds_ours(name))}
        self.modules: dict[str, ModuleType] = {}  # the user's, of names that are hidden

    def load(self) -> ModuleType:
        """The file as a module."""
        spec = importlib.util.spec_from_file_location(MODULE, self.path)
        module = importlib.util.module_from_spec(spec)
        with self.running():
            sys.modules[MODULE] = module
            spec.loader.exec_module(module)
        return module

    def function(self, function: Callable) -> Callable:
        """A function of the file: it may import, too."""

        @functools.wraps(function)
        def called(*args, **kwargs):
            with self.running():
                return function(*args, **kwargs)

        return called

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Imports inside the `with` block are those of the file.

        Modules of longhaul are out of sys.modules for as long, and come back. The user's modules of
        the same names, and what the file has done to sys.path, are kept for the next time.
        """
        modules = _taken(self.hidden)
        search, arguments = list(sys.path), sys.argv
        sys.modules.update(self.modules)
        sys.path[:] = self.search
        sys.argv = [self.path]
        try:
            yield
        finally:
            self.modules, self.search = _taken(self.hidden), list(sys.path)
            sys.modules.update(modules)
            sys.path[:] = search
            sys.argv = arguments

    def _finds_ours(self, name: str) -> bool:
        """Whether `import name` in the file means longhaul's module: the file lies in the clone, or
        longhaul is installed. It may always import footprint, unless it has a neighbour of that
        name.
        """
        found = PathFinder.find_spec(name, self.search)
        if found is None:
            return name == "footprint"
        return found.origin in (str(ROOT / f"{name}.py"), str(ROOT / name / "__init__.py"))


def named_function(flag: str, words: str) -> Callable:
    """The function that FILE.py:FUNCTION names. ValueError if it cannot be had."""
    path, _, name = words.rpartition(":")
    file = UsersFile(path)
    with told_in_one_line():
        module = file.load()
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{flag} {words}: {path} has no function {name}: give one that it has")
    return file.function(function)


def _is_python(file: Path) -> bool:
    # a null byte is a ValueError or a SyntaxError by the version of Python, without the file's name
    return file.is_file() and file.suffix == ".py" and b"\0" not in file.read_bytes()


def _search_path(folder: Path) -> list[str]:
    """sys.path with the file's folder in front, in place of that of the running script."""
    search = list(sys.path)
    if IS_CLONE and str(ROOT) in search:
        search.remove(str(ROOT))
    return [str(folder), *search]


def _our_names() -> set[str]:
    """The top-level modules of the clone."""
    if not IS_CLONE:
        return set()
    packages = {path.parent.name for path in ROOT.glob("*/*.py")}
    return packages | {path.stem for path in ROOT.glob("*.py")}


def _taken(names: set[str]) -> dict[str, ModuleType]:
    """The modules of these top-level names, which leave sys.modules."""
    found = [name for name in sys.modules if name.partition(".")[0] in names]
    return {name: sys.modules.pop(name) for name in found}


# ---- errors


class Failed(ValueError):
    """An error of the user's code, in one line."""


@contextlib.contextmanager
def told_in_one_line() -> Iterator[None]:
    """Inside the `with` block, an error of the user's code becomes a `Failed` with the lines of the
    user's files that led to it. Refusals, and errors in which no file of the user's has a part,
    stay what they are.
    """
    try:
        yield
    except Refused:
        raise
    except SyntaxError as error:  # is raised where the file is read
        file = Path(error.filename or "the file").name
        raise Failed(f"{file}:{error.lineno or 1}: {described(error)}") from error
    except (Exception, SystemExit) as error:
        lines = lines_of(error.__traceback__, _is_users)
        callers = lines[1 : MOST_CALLERS + 1]
        called = f" (called at {', '.join(callers)})" if callers else ""
        if lines:
            where = place_of(error.__traceback__)
            raise Failed(f"{where}: {described(error)}{called}") from error
        raise


def described(error: BaseException) -> str:
    """The type of an error and its message, in one line."""
    words = " ".join(str(error).split())
    if len(words) > MOST_LETTERS:
        words = f"{words[:MOST_LETTERS]} ..."
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def lines_of(raised: TracebackType | None, is_wanted: Callable[[str], bool]) -> list[str]:
    """The lines of such files that were running, each once, innermost first."""
    found = []
    while raised:
        file = raised.tb_frame.f_code.co_filename
        if is_wanted(file):
            found.append(f"{Path(file).name}:{raised.tb_lineno}")
        raised = raised.tb_next
    return list(dict.fromkeys(reversed(found)))


def _is_users(file: str) -> bool:
    return not file.startswith((PACKAGES, LIBRARY, *OURS, "<"))
