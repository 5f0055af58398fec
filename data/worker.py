"""Encoding processes that know nothing of their parent: batches of text in by pipe, ids out by
pipe.

Imports data.tokenizer. Plain child processes rather than multiprocessing's: they never import the
caller's main module (and torch with it), work from any script or prompt, and end when their parent
does, however that ends: their input closes. A message is a count, that many lengths (uint64,
little-endian), and the parts one after the other.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import numpy as np

from data.tokenizer import Tokenizer


class Worker:
    """One child process that encodes batches with one tokenizer."""

    def __init__(self, tokenizer: Path):
        root = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "data.worker", str(tokenizer)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )

    def encode(self, texts: list[bytes]) -> list[np.ndarray]:
        """The ids of each UTF-8 text, uint32. Raises ChildProcessError when the process is gone."""
        try:
            _send(self._process.stdin, texts)
            parts = _receive(self._process.stdout)
        except BrokenPipeError:
            parts = None
        if parts is None:
            raise ChildProcessError(
                "an encoding process ended early, most likely for want of memory: use --workers 1"
            )
        return [np.frombuffer(part, dtype="<u4") for part in parts]

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def _send(pipe: BinaryIO, parts: list[bytes]) -> None:
    pipe.write(np.array([len(parts), *map(len, parts)], dtype="<u8").tobytes())
    for part in parts:
        pipe.write(part)
    pipe.flush()


def _receive(pipe: BinaryIO) -> list[bytes] | None:
    """One message; None at the end of the pipe."""
    head = pipe.read(8)
    if len(head) < 8:
        return None
    lengths = np.frombuffer(pipe.read(8 * int.from_bytes(head, "little")), dtype="<u8").tolist()
    parts = [pipe.read(length) for length in lengths]
    return parts if [len(part) for part in parts] == lengths else None


def _serve(tokenizer: str) -> None:
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; the parent decides
    model = Tokenizer(tokenizer)
    while (texts := _receive(sys.stdin.buffer)) is not None:
        _send(
            sys.stdout.buffer,
            [np.array(model.encode(text.decode()), dtype="<u4").tobytes() for text in texts],
        )


if __name__ == "__main__":
    _serve(sys.argv[1])
