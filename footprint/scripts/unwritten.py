"""A script leaves no file behind: what it saves has no values, and its logs are of no training.

What the script's own files open for writing is kept in memory, and they read it there; the folders
that it makes are removed at the end. Of libraries the usual writers write nothing.
"""

import builtins
import contextlib
import functools
import io
import os
import sys
import types
from collections.abc import Callable, Iterator

from footprint.python.patches import Patches, patched
from footprint.python.refusal import LIBRARY, PACKAGES, is_users

MOST_KEPT = 2**24  # bytes
WRITES = set("wax+")  # in the mode of a file
LIBRARIES = {  # module -> what writes: an attribute, or a class and its method
    "numpy": ("save", "savez", "savez_compressed", "savetxt"),
    "safetensors": ("serialize_file",),
    "safetensors.torch": ("save_file", "save_model"),
    "PIL.Image": ("Image.save",),
    "matplotlib.figure": ("Figure.savefig",),
    "torch.utils.tensorboard.writer": ("FileWriter.add_event",),
    "tensorboardX.writer": ("FileWriter.add_event",),
    "tensorboard.summary.writer.event_file_writer": ("EventFileWriter.add_event",),
    "transformers.modeling_utils": ("PreTrainedModel.save_pretrained",),
    "transformers.tokenization_utils_base": ("PreTrainedTokenizerBase.save_pretrained",),
    "peft.peft_model": ("PeftModel.save_pretrained",),
    "torch.distributed.checkpoint": ("save", "async_save"),
    "torch.onnx": ("export",),
}


class Kept:
    """The contents of one file that a script has written."""

    def __init__(self):
        self.content: str | bytes | None = None

    def opened(self, mode: str, before: str | bytes) -> "io.StringIO | io.BytesIO":
        """The file in memory; what it holds when it is closed is kept."""
        kind = InMemoryBytes if "b" in mode else InMemoryText
        content = before if self.content is None else self.content
        if "w" in mode or "x" in mode:
            content = content[:0]
        file = kind(content)
        file.kept = self
        if "a" in mode:
            file.seek(0, io.SEEK_END)
        return file


class InMemoryText(io.StringIO):
    """A file of text."""

    def close(self) -> None:
        if not self.closed:
            self.kept.content = self.getvalue()
        super().close()


class InMemoryBytes(io.BytesIO):
    """A file of bytes; what is longer than `MOST_KEPT` is of a model, and is dropped."""

    def write(self, data) -> int:
        if self.tell() < MOST_KEPT:
            return super().write(data)
        return memoryview(data).nbytes

    def close(self) -> None:
        if not self.closed:
            self.kept.content = self.getvalue()
        super().close()


class Unwritten:
    """The files and folders of a script."""

    def __init__(self):
        self.files: dict[str, Kept] = {}
        self.folders: list[str] = []
        self.is_over = False

    def silenced(self, name: str, module: types.ModuleType) -> Patches:
        """The writers of a module write nothing."""
        found: Patches = {}
        for words in LIBRARIES[name]:
            *owners, attribute = words.split(".")
            owner = getattr(module, owners[0], None) if owners else module
            if hasattr(owner, attribute):
                found[owner, attribute] = self._silent(getattr(owner, attribute))
        return found

    def _silent(self, write: Callable) -> Callable:
        """What writes, silent until the end: others may have imported it by name."""

        @functools.wraps(write)
        def silent(*args, **kwargs):
            return write(*args, **kwargs) if self.is_over else None

        return silent

    @contextlib.contextmanager
    def kept_in_memory(self) -> Iterator[None]:
        """The script's own files write nothing inside the `with` block."""
        make = os.mkdir

        def made(path, *args, **kwargs) -> None:
            make(path, *args, **kwargs)
            self.folders.append(os.path.abspath(path))

        opened = self._opening(builtins.open)
        patches: Patches = {(builtins, "open"): opened, (io, "open"): opened}
        try:
            with patched(patches | {(os, "mkdir"): made}):
                yield
        finally:
            self.is_over = True
            self._remove_folders()

    def _opening(self, real):
        def opened(file, mode="r", *args, **kwargs):
            if not isinstance(file, str | os.PathLike) or not _is_scripts(sys._getframe(1)):
                return real(file, mode, *args, **kwargs)
            path = os.path.abspath(file)
            if not WRITES & set(mode) and path not in self.files:
                return real(file, mode, *args, **kwargs)
            return self._in_memory(real, path, mode)

        return opened

    def _in_memory(self, real, path: str, mode: str):
        form = "b" if "b" in mode else ""
        before = b"" if form else ""
        keeps = path not in self.files and ("a" in mode or "r" in mode)
        if keeps and os.path.exists(path):
            with real(path, f"r{form}") as file:
                before = file.read()
        return self.files.setdefault(path, Kept()).opened(mode, before)

    def _remove_folders(self) -> None:
        for folder in reversed(self.folders):
            with contextlib.suppress(OSError):  # a library has put something into it
                os.rmdir(folder)


def _is_scripts(frame: types.FrameType | None) -> bool:
    """Whether a file of the script opens this, by itself or by Python's library (pathlib, logging),
    not an installed package.
    """
    while frame is not None and _is_pythons(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and is_users(frame.f_code.co_filename)


def _is_pythons(file: str) -> bool:
    return file.startswith((LIBRARY, "<")) and not file.startswith(PACKAGES)
