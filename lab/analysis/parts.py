"""What an analysis keeps on the disk, so that a killed run continues with what is done.

    settings.json        what was asked: another command with the same folder is refused
    parts/NAME.json      a finished part: its result, its seconds, its peak of memory
    parts/NAME.partial   an unfinished part, which keeps it up itself; gone when it is finished
    sae-NN.safetensors   the autoencoder of a layer; sae-DTYPE-NN and sae-floor-NN: of --compare
    analysis.json        all results
    report.txt           the same for a reader

Nothing is written before the first part has something to keep. Every file appears whole or not at
all.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from base import durable
from base.tensors import read_tensors, write_tensors
from base.untrusted import read_json

SETTINGS = "settings.json"
FORMAT = 2  # of the parts' files
RESULT = "analysis.json"
REPORT = "report.txt"
NUMBER = "#"  # behind the name of what was a whole number and no tensor
EVERY = 30.0  # seconds between two saves of an unfinished part


class Parts:
    """The parts of an analysis in `folder`.

    settings: names and values of everything that decides a result. ValueError if the folder holds
    something else, or an analysis with other settings.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]):
        self.folder = folder
        self.settings = {"format": FORMAT} | settings
        self._lock = contextlib.ExitStack()
        self._is_held = False
        self._check()

    def _check(self) -> None:
        folder = self.folder
        for path in (folder, *folder.parents):
            if path.exists() and not path.is_dir():
                raise ValueError(f"--out {folder}: {path} is a file: name another folder")
        if not self._holds_something():
            return
        if not (folder / SETTINGS).is_file():
            raise ValueError(
                f"--out {folder} holds files that are no analysis: name a new or empty folder"
            )

        recorded = read_json(folder / SETTINGS)
        if recorded.get("format") != FORMAT:
            raise ValueError(
                f"--out {folder} holds an analysis by another version of longhaul: name another "
                "folder"
            )
        for name, value in self.settings.items():
            if recorded.get(name) != value:
                raise ValueError(
                    f"--out {folder} holds an analysis with {_words(name, recorded.get(name))}, "
                    f"and this one has {_words(name, value)}: give the same settings, or another "
                    "--out"
                )

    def _holds_something(self) -> bool:
        """Whether there is more than what a run leaves that was killed while it wrote settings."""
        if not self.folder.is_dir():
            return False
        return any(not path.name.startswith(".tmp-") for path in self.folder.iterdir())

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder against other processes, from its first file on; ValueError if another
        one has it. A ValueError inside removes a folder that has no finished part.
        """
        with contextlib.ExitStack() as lock:
            self._lock = lock
            if self.folder.is_dir():
                self._take()
            try:
                yield
            except ValueError:
                self._remove_unfinished()
                raise

    def _remove_unfinished(self) -> None:
        """What a part that was refused has kept up helps nobody."""
        begun = self._is_held and (self.folder / SETTINGS).exists()
        if begun and not any(self.folder.glob("parts/*.json")):
            durable.remove(self.folder)

    def _take(self) -> None:
        """Take the lock on the folder."""
        self._lock.enter_context(durable.locked(self.folder, wait=False))
        self._is_held = True

    def keep_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep the tensors of a part in a file for the user."""
        self.begin()
        with durable.replacing(self.folder / f"{name}.safetensors") as temporary:
            write_tensors(temporary, tensors)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """What was kept."""
        return read_tensors(self.folder / f"{name}.safetensors")

    def partial(self, name: str) -> "Partial":
        """What an unfinished part has done."""
        return Partial(self, name)

    def known(self, name: str) -> dict | None:
        """A finished part; None if there is none."""
        path = self.file(name)
        return read_json(path) if path.is_file() else None

    def record(self, name: str) -> dict:
        """A part that is finished."""
        found = self.known(name)
        assert found is not None, f"{name} is not finished"
        return found

    def keep(self, name: str, record: dict) -> None:
        """A part is finished."""
        self.begin()
        durable.write_json(self.file(name), record)
        durable.remove(self.file(name, "partial"))

    def finish(self, result: dict, report: str) -> None:
        """Write all results, and the report."""
        with durable.replacing(self.folder / REPORT) as temporary:
            durable.write_bytes(temporary, report.encode())
        durable.write_json(self.folder / RESULT, result)

    def finished(self) -> dict | None:
        """All results, if the analysis is finished."""
        path = self.folder / RESULT
        return read_json(path) if path.is_file() else None

    def file(self, name: str, kind: str = "json") -> Path:
        """Where a part is kept."""
        return self.folder / "parts" / f"{name}.{kind}"

    def begin(self) -> None:
        """Make the folder, unless it is there."""
        durable.make_folder(self.folder)
        if not self._is_held:
            self._take()
        if not (self.folder / SETTINGS).exists():
            durable.write_json(self.folder / SETTINGS, self.settings)
        durable.make_folder(self.folder / "parts")


class Partial:
    """What an unfinished part has done, kept up every EVERY seconds."""

    def __init__(self, parts: Parts, name: str):
        self._parts = parts
        self._path = parts.file(name, "partial")
        self._saved = time.monotonic()

    def load(self) -> dict[str, Tensor]:
        """What was saved; empty if nothing was."""
        return read_tensors(self._path) if self._path.is_file() else {}

    def is_due(self) -> bool:
        """Whether it is time to save."""
        return time.monotonic() - self._saved >= EVERY

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace what was saved, durably and atomically."""
        self._parts.begin()
        with durable.replacing(self._path) as temporary:
            write_tensors(temporary, tensors)
        self._saved = time.monotonic()


def flattened(state: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """A state of tensors, whole numbers and such states as tensors by their paths."""
    found = {}
    for name, value in state.items():
        if isinstance(value, Mapping):
            found |= flattened(value, f"{prefix}{name}/")
        else:
            kind = "" if isinstance(value, Tensor) else NUMBER
            found[f"{prefix}{name}{kind}"] = torch.as_tensor(value)
    return found


def nested(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The state that was flattened."""
    found: dict[str, Any] = {}
    for path, value in tensors.items():
        *parents, name = path.split("/")
        inner = found
        for parent in parents:
            inner = inner.setdefault(parent, {})
        if name.endswith(NUMBER):
            inner[name.removesuffix(NUMBER)] = int(value)
        else:
            inner[name] = value
    return found


def _words(name: str, value: Any) -> str:
    """A setting as a user gave it."""
    if value in ("", None):
        return f"no --{name}"
    return f"--{name} {str(value)[:80]}"
