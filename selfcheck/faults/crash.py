"""Crash states of a save: kill at a call, or replay a recorded write log up to any call."""

import os
import signal
from collections.abc import Callable

from base import durable

CALLS = (
    "write",
    "fsync",
    "rename",
    "make_folder",
    "remove",
)  # of base.durable: all that changes the disk in a save


def watch(before: Callable, *, arguments: bool = False):
    """From here on `before(index, name)`, or with `arguments` `before(index, name, *args)`,
    precedes each call that changes the disk.
    """
    count = iter(range(10**9))

    def wrapped(name, original):
        def call(*args):
            before(next(count), name, *(args if arguments else ()))
            return original(*args)

        return call

    for name in CALLS:
        setattr(durable, name, wrapped(name, getattr(durable, name)))


def kill_at(wanted: int, index: int, name: str):
    """End this process as kill -9 does at call number `wanted`."""
    if index == wanted:
        os.kill(os.getpid(), signal.SIGKILL)
