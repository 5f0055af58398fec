"""Disks that are too small: a real one where this process may mount it. Imports selfcheck.faults of
ours.
"""

import ctypes
import os
from pathlib import Path

NEW_MOUNTS, PRIVATE = 0x00020000, 0x4000 | 0x40000  # unshare(2); mount(2): MS_REC | MS_PRIVATE


def small_disk(folder: Path, size: int) -> bool:
    """Mount a file system of `size` bytes on `folder`, for this process and its children alone;
    False where that is not allowed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_MOUNTS) or libc.mount(b"none", b"/", None, PRIVATE, None):
        return False
    return libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={size}".encode()) == 0


def fill(folder: Path, leave: int):
    """Take all free space of a small disk but `leave` bytes."""
    about = os.statvfs(folder)
    (folder / "ballast").write_bytes(b"x" * max(0, about.f_bavail * about.f_frsize - leave))
