"""A disk in memory, on which the calls of a save are replayed up to any of them."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from base import durable

# all that changes the disk in a save
CALLS = ("write", "fsync", "rename", "make_folder", "remove")


def watch(put: Callable, before: Callable):
    """From here on `before(name, *args)` precedes each call that changes the disk; `put(name,
    function)` puts a function in the place of one of base.durable.
    """

    def watched(name: str, original: Callable) -> Callable:
        def call(*args):
            before(name, *args)
            return original(*args)

        return call

    for name in CALLS:
        put(name, watched(name, getattr(durable, name)))


def forced(put: Callable) -> Callable[[Path], bool]:
    """From here on the answer says whether all that a file or folder holds is on the disk."""
    kept = {}

    def content(path: Path) -> bytes | list[str]:
        return sorted(os.listdir(path)) if path.is_dir() else path.read_bytes()

    def note(name: str, path: Path, *rest):
        if name == "fsync":
            kept[path.stat().st_ino] = content(path)

    watch(put, note)
    return lambda path: kept.get(path.stat().st_ino) == content(path)


@dataclass
class Node:
    """A file or folder with what a program sees of it now, and what is on the disk for certain."""

    content: bytes | None = None  # None for a folder
    entries: dict[str, "Node"] = field(default_factory=dict)
    synced: bytes = b""
    synced_entries: dict[str, "Node"] = field(default_factory=dict)

    def sync(self):
        self.synced = self.content or b""
        self.synced_entries = dict(self.entries)


class Disk:
    """A file system in memory."""

    def __init__(self, root: Path):
        self.root = root
        self.top = Node()

    def find(self, path: Path) -> Node:
        node = self.top
        for part in path.relative_to(self.root).parts:
            node = node.entries[part]
        return node

    def apply(self, name: str, path: Path, value):
        parent = None if path == self.root else self.find(path.parent)
        if name == "write":
            node = parent.entries.setdefault(path.name, Node(b""))
            node.content += value
        elif name == "make_folder" and parent is not None:
            parent.entries.setdefault(path.name, Node())
        elif name == "fsync":
            self.find(path).sync()
        elif name == "rename":
            self.find(value.parent).entries[value.name] = parent.entries.pop(path.name)
        elif name == "remove":
            parent.entries.pop(path.name, None)

    def files(self, synced_names: bool, synced_bytes: bool) -> dict[Path, bytes | None]:
        """What a machine that loses power now finds: `synced_names`: entries of folders as they
        were last forced to the disk, else all that were made; `synced_bytes`: the same of what
        files hold. Folders are None.
        """
        found: dict[Path, bytes | None] = {}

        def visit(node: Node, path: Path):
            for name, child in (node.synced_entries if synced_names else node.entries).items():
                content = child.content
                if content is not None and synced_bytes:
                    content = child.synced
                found[path / name] = content
                visit(child, path / name)

        visit(self.top, Path())
        return found
