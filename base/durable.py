"""The disk: durable and atomic writes, hashes, locks, reads that are tried again, free space.

Whatever a save changes on the disk goes through `write`, `fsync`, `rename`, `make_folder` and
`remove`, and whatever is read back goes through `read`. Callers use them as `durable.write(...)`,
so that a test can count, record or break each of these calls in one place.
"""

import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

Answer = TypeVar("Answer")
Bytes = bytes | memoryview

BLOCK = 64 * 2**20  # bytes with one digest: damage is located to 64 MiB
CHUNK = 8 * 2**20  # bytes written or read at a time
HASHING_THREADS = 4
RETRIES = 3


class StorageError(Exception):
    """The disk is full or fails. A program that this error reaches ends with this exit code."""

    exit_code = 6


# ---- the only functions that touch the disk in a save


def write(file: BinaryIO, content: Bytes) -> None:
    """Append all of `content` to an open, unbuffered file."""
    rest = memoryview(content)
    while len(rest):
        written = file.write(rest)
        rest = rest[written:]


def fsync(path: Path) -> None:
    """Force a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(old: Path, new: Path) -> None:
    """Rename a file or folder, atomically; an existing file or empty folder `new` is replaced."""
    os.replace(old, new)


def make_folder(path: Path) -> None:
    """Make a folder and its parents, unless it exists."""
    path.mkdir(parents=True, exist_ok=True)


def remove(path: Path) -> None:
    """Delete a file, or a folder with everything in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def read(file: BinaryIO, size: int) -> bytes:
    """The next bytes of an open file, at most `size`."""
    return file.read(size)


# ---- whole files


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file and force it to the disk."""
    with open(path, "wb", buffering=0) as file:
        write(file, content)
    fsync(path)


def write_json(path: Path, content: dict) -> None:
    """Replace a file durably and atomically: a reader finds either the old or the new one.

    NaN and infinities are written as null.
    """
    text = json.dumps(without_nan(content), indent=1, allow_nan=False) + "\n"
    with replacing(path) as temporary:
        write_bytes(temporary, text.encode())


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write durably, which then takes the place of `path`, atomically.

    ValueError for what is no plain file, such as /dev/stdout, which must stay.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no plain file: give the name of a file")
    path = path.resolve()  # the file that a link names, not the link
    temporary = path.with_name(f".tmp-{path.name}")
    yield temporary
    rename(temporary, path)
    fsync(path.parent)


def without_nan(value: Any) -> Any:
    """A value for JSON, which has neither NaN nor infinity: they become None, also inside."""
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read_text(path: Path) -> str:
    """A small UTF-8 file. Raises OSError if it does not exist."""
    with open(path, "rb", buffering=0) as file:
        chunks = list(_chunks(file, path))
    return b"".join(chunks).decode("utf-8")


def _chunks(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """The rest of an open file in chunks; a read that fails is tried again."""
    while chunk := retried(lambda: read(file, CHUNK), path):
        yield chunk


def retried(function: Callable[[], Answer], path: Path) -> Answer:
    """`function()`, tried again three times if the disk reports an error; then StorageError."""
    for attempt in range(RETRIES + 1):
        try:
            return function()
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            failure = error
        time.sleep(0.05 * 2**attempt)

    raise StorageError(
        f"{path} cannot be read ({failure}; tried {RETRIES + 1} times): "
        "check the disk, then run the same command again"
    )


# ---- hashes


class Digests:
    """The size of what is fed, and the SHA-256 of each of its 64 MiB blocks.

    Threads hash several blocks at a time while the caller reads or writes further ones.
    """

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(HASHING_THREADS)
        self.size = 0
        self._digests: list[Future[str]] = []
        self._block = hashlib.sha256()  # the one that is not full yet
        self._chunks: list[Bytes] = []  # what of it is not hashed yet

    def feed(self, content: Bytes) -> None:
        """Add these bytes, which must not change before `catch_up` or `result` returns."""
        while len(content):
            room = BLOCK - self.size % BLOCK
            chunk = content[:room]
            content = content[room:]
            self._chunks.append(chunk)
            self.size += len(chunk)
            if self.size % BLOCK == 0:
                self._submit()

    def catch_up(self) -> None:
        """Return once all that was fed is hashed; nothing of it is held any longer."""
        for digest in self._digests:
            digest.result()
        self._digest(self._block, self._chunks)

    def result(self) -> dict:
        """{"bytes": size, "blocks": [digest of each block]}."""
        if self.size % BLOCK:
            self._submit()
        return {"bytes": self.size, "blocks": [digest.result() for digest in self._digests]}

    def _submit(self) -> None:
        self._digests.append(self.pool.submit(self._digest, self._block, self._chunks))
        self._block = hashlib.sha256()
        self._chunks = []

        # wait, so that no more blocks than there are threads are kept in memory
        if len(self._digests) > HASHING_THREADS:
            self._digests[-1 - HASHING_THREADS].result()

    def _digest(self, block: "hashlib._Hash", chunks: list[Bytes]) -> str:
        while chunks:
            block.update(chunks.pop(0))
        return block.hexdigest()


def describe(path: Path) -> dict:
    """The size of a file in bytes, and the SHA-256 of each of its 64 MiB blocks."""
    digests = Digests()
    with digests.pool, open(path, "rb", buffering=0) as file:
        for chunk in _chunks(file, path):
            digests.feed(chunk)
        return digests.result()


# ---- locks, and folders that appear whole or not at all


def lock(descriptor: int, wait: bool = False) -> bool:
    """Lock an open file or folder against other processes; False if another one holds the lock.

    With `wait` the call returns only when this process has the lock. The system releases the lock
    when the descriptor is closed or the process ends, so a killed process leaves nothing behind.
    """
    operation = fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB
    try:
        fcntl.flock(descriptor, operation)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked(folder: Path, wait: bool = True) -> Iterator[None]:
    """Hold the lock on an existing folder. Without `wait`, ValueError if another process has it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if not lock(descriptor, wait):
            raise ValueError(
                f"another process is writing {folder}: wait for it, or choose another --output"
            )
        yield
    finally:
        os.close(descriptor)


@contextmanager
def building(output: Path, keep: bool = False) -> Iterator[Path]:
    """Yield a temporary folder next to `output`; on success flush all of it and rename it.

    A killed process leaves the temporary folder, which the next one clears. With `keep` the next
    one finds what is in it, also after any error but ValueError, which removes everything. Raises
    ValueError if another process is building `output`.
    """
    output = output.absolute()
    folder = output.parent / f".tmp-{output.name}"
    if folder.is_symlink():
        raise ValueError(
            f"{folder} is a link, and the folder that it points to would be cleared: "
            "remove the link, or choose another --output"
        )
    new_parents = [parent for parent in output.parents if not parent.exists()]
    make_folder(folder)

    with locked(folder, wait=False):
        if not keep:
            clear(folder)
        try:
            yield folder
            for path in folder.rglob("*"):
                fsync(path)
            fsync(folder)
            rename(folder, output)
        except BaseException as error:
            if not keep or isinstance(error, ValueError):
                shutil.rmtree(folder, ignore_errors=True)
                _remove_empty(new_parents)
            raise
    fsync(output.parent)


def clear(folder: Path) -> None:
    """Delete everything in a folder."""
    for leftover in folder.iterdir():
        remove(leftover)


def _remove_empty(folders: list[Path]) -> None:
    """Delete folders, from the inside out, up to the first that is not empty."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return


# ---- free space


def free_bytes(folder: Path) -> int:
    """Free space on the disk on which `folder` is, or will be made."""
    candidates = [folder, *folder.absolute().parents]
    existing = next(path for path in candidates if path.is_dir())
    return shutil.disk_usage(existing).free


def require_free(folder: Path, needed: int) -> None:
    """ValueError unless the disk of `folder` has `needed` bytes free."""
    free = free_bytes(folder)
    if free < needed:
        raise ValueError(
            f"--output {folder} needs about {needed:,} bytes, and {free:,} are free: free space, "
            "or choose another --output"
        )


def require_space(folder: Path, checkpoint: int, keep: int) -> None:
    """ValueError if a run that keeps `keep` checkpoints of `checkpoint` bytes does not fit.

    A new checkpoint is written before the oldest is deleted, so one more than `keep` must fit.
    Those that the folder holds already count.
    """
    existing = len(list(folder.glob("step-????????")))
    more = max(1, keep + 1 - existing)
    free = free_bytes(folder)
    if free < more * checkpoint:
        raise ValueError(
            f"--output_dir {folder} has {free:,} bytes free, but {more} more checkpoint(s) of this "
            f"model need {more * checkpoint:,}: free space, or choose another --output_dir"
        )
