"""The disk: durable writes that are hashed on the way, reads that are tried again, free space.
Imports longhaul.exits of ours.

What changes the disk in a save goes through `write`, `fsync`, `rename`, `make_folder` and `remove`,
so that a test can count, record or break each of them.
"""

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor


class StorageError(Exception):
    """The disk is full or fails; a program that meets it ends with this exit code."""

    exit_code = 6


# bytes hashed at a time, each with a digest of its own: damage is located to 64 MiB
BLOCK = 64 * 2**20
PIECE = 8 * 2**20  # bytes written or read at a time
HASHING = 4  # threads that hash, a block each
RETRIES = 3
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


# ---------------------------------------------------------------------------- what touches the disk


def write(file, piece):
    """Append bytes to an open unbuffered file, all of them."""
    view = memoryview(piece)
    while len(view):
        view = view[file.write(view) :]


def fsync(path: Path):
    """Force a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(old: Path, new: Path):
    os.replace(old, new)


def make_folder(path: Path):
    path.mkdir(parents=True, exist_ok=True)


def remove(path: Path):
    """A file, or a folder with all that is in it."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def read(file, size: int) -> bytes:
    return file.read(size)


# -------------------------------------------------------------------------------------------- files


def write_bytes(path: Path, content: bytes):
    """A whole file, forced to the disk."""
    with open(path, "wb", buffering=0) as file:
        write(file, content)
    fsync(path)


def write_json(path: Path, content: dict):
    """Write durably and by a rename: a reader finds the old file or the new one, whole."""
    temporary = path.with_name(f".tmp-{path.name}")
    write_bytes(temporary, (json.dumps(content, indent=1) + "\n").encode())
    rename(temporary, path)
    fsync(path.parent)


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> dict:
    """A safetensors file of host or device tensors, one copied to the host at a time, forced to the
    disk; its size and digests.

    Bytes are hashed by a thread while they are written, so that they need not be read again.
    """
    tensors = dict(
        sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    )  # large elements first: all aligned
    digests = Digests()
    with digests.pool, open(path, "wb", buffering=0) as file:
        for content in (_header(tensors), *map(_bytes_of, tensors.values())):
            for start in range(0, len(content), PIECE):
                digests.feed(content[start : start + PIECE])
                write(file, content[start : start + PIECE])
        fsync(path)
        return digests.result()


def _header(tensors: dict[str, Tensor]) -> bytes:
    """Eight bytes of length, then JSON: {name: {dtype, shape, data_offsets}}, filled up to a
    multiple of eight bytes.
    """
    table, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        table[name] = dict(
            dtype=DTYPES[tensor.dtype], shape=list(tensor.shape), data_offsets=[begin, end]
        )
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class _bytes_of:
    """The bytes of a tensor, brought to the host only while pieces of it are taken."""

    def __init__(self, tensor: Tensor):
        self.tensor, self.view = tensor, None

    def __len__(self):
        return self.tensor.nbytes

    def __getitem__(self, part: slice) -> memoryview:
        if self.view is None:
            self.view = memoryview(
                self.tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy()
            )
        return self.view[part]


class Digests:
    """Size and SHA-256 of each 64 MiB block of what is fed. Blocks are hashed side by side by
    threads, while others are read or written.
    """

    def __init__(self):
        self.pool, self.digests, self.size, self.pieces = ThreadPoolExecutor(HASHING), [], 0, []

    def feed(self, piece):
        while len(piece):
            part = piece[: BLOCK - self.size % BLOCK]
            self.pieces.append(part)
            self.size, piece = self.size + len(part), piece[len(part) :]
            if self.size % BLOCK == 0:
                self._submit()

    def _submit(self):
        self.digests.append(self.pool.submit(self._digest, self.pieces))
        self.pieces = []
        if len(self.digests) > HASHING:
            self.digests[-1 - HASHING].result()  # no more blocks than that wait in memory

    def _digest(self, pieces: list) -> str:
        block = hashlib.sha256()
        while pieces:
            block.update(pieces.pop(0))
        return block.hexdigest()

    def result(self) -> dict:
        if self.pieces:
            self._submit()
        return {"bytes": self.size, "blocks": [digest.result() for digest in self.digests]}


def describe(path: Path) -> dict:
    """Size in bytes and SHA-256 of each 64 MiB block of a file."""
    digests = Digests()
    with digests.pool, open(path, "rb", buffering=0) as file:
        while piece := retried(lambda: read(file, PIECE), path):
            digests.feed(piece)
        return digests.result()


def read_text(path: Path) -> str:
    """A small file as UTF-8; OSError where it is not there."""
    with open(path, "rb", buffering=0) as file:
        pieces = []
        while piece := retried(lambda: read(file, PIECE), path):
            pieces.append(piece)
    return b"".join(pieces).decode("utf-8")


def retried(function: Callable, path: Path):
    """`function()`, tried again three times where the disk reports an error; then StorageError."""
    for attempt in range(RETRIES + 1):
        try:
            return function()
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            failure = error
        time.sleep(0.05 * 2**attempt)
    raise StorageError(
        f"{path} cannot be read ({failure}; tried {RETRIES + 1} times): check the disk, then give the same command again"
    )


# -------------------------------------------------------------------------------------------- space


def free_bytes(folder: Path) -> int:
    """Free space where `folder` is or will be."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    return shutil.disk_usage(there).free


def require_space(folder: Path, checkpoint: int, keep: int):
    """ValueError where a run that keeps `keep` checkpoints of `checkpoint` bytes will not fit: a
    new one stands beside them before the oldest may go. Those that the folder has already count.
    """
    free, more = free_bytes(folder), max(1, keep + 1 - len(list(folder.glob("step-????????"))))
    if free < more * checkpoint:
        raise ValueError(
            f"--output_dir {folder} has {free:,} bytes free, and {more} checkpoint(s) of this model beside what is there need "
            f"{more * checkpoint:,}: free space, or choose another --output_dir"
        )
