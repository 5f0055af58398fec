"""Folders that are there whole or not at all: build beside, flush to disk, rename.

Imports data.manifest. A lock on the temporary folder keeps two writers apart; the system drops it
with the process, so nothing is left to clean up by hand after a kill.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MANIFEST = "manifest.json"  # the file that makes a folder a dataset


def require_new(output: Path) -> None:
    """Raise ValueError unless `output` does not exist yet or is an empty folder."""
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise ValueError(f"output {output} is not a folder: choose another --output")
    if (output / MANIFEST).exists():
        raise ValueError(
            f"output {output} already holds a dataset: choose another --output, or delete it first"
        )
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"output {output} is not empty: choose another --output")
    parent = next(parent for parent in output.absolute().parents if parent.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(
            f"output {output} cannot be made: {parent} is no folder that may be written: choose another "
            "--output"
        )


@contextmanager
def building(output: Path) -> Iterator[Path]:
    """Yield an empty temporary folder beside `output`; on success make it durable and rename it to
    `output`.

    Raises ValueError when `output` holds something or another process builds it at the moment.
    """
    require_new(output)
    folder = output.absolute().parent / f".tmp-{output.absolute().name}"
    if folder.is_symlink():
        raise ValueError(
            f"{folder} is a link, and what it leads to would be cleared: remove the link, or choose another --output"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
        _clear(folder)
        try:
            yield folder
            _sync_folder(folder)
            require_new(output)
            os.rename(folder, output)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    _sync_folder(output.absolute().parent)


@contextmanager
def locked(folder: Path, operation: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold an advisory lock on an existing folder. Raises ValueError when it may not wait and
    another holds it.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, operation)
        except BlockingIOError:
            raise ValueError(
                f"another process is writing {folder}: wait for it, or choose another --output"
            ) from None
        yield
    finally:
        os.close(handle)


def write_durable(path: Path, content: bytes) -> None:
    """Write a whole file; it is on the disk when this returns."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
