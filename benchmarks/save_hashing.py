"""What hashing adds to a save's wall time: `python -m benchmarks.save_hashing [--mib 512]
[--disk_mib_s 270]`.
"""

import hashlib
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

from base import durable
from base.flags import Parser
from base.tensors import write_tensors


class Counted(durable.Digests):
    """Digests that only count bytes: the same threads and the same queue, without SHA-256."""

    def _digest(self, block, chunks: list) -> str:
        return ""


def check(folder: Path):
    """Refuse to time a hash that is not the file's."""
    written = write_tensors(folder / "checked", {"x": torch.arange(1000)})
    assert written["blocks"] == [hashlib.sha256((folder / "checked").read_bytes()).hexdigest()]


def seconds(tensors: dict, folder: Path, digests) -> float:
    """One save: written, forced to the disk, removed outside the clock."""
    kept, durable.Digests = durable.Digests, digests
    try:
        start = time.perf_counter()
        write_tensors(folder / "shard", tensors)
        return time.perf_counter() - start
    finally:
        durable.Digests = kept
        (folder / "shard").unlink(missing_ok=True)


def slow_down(mib_s: float):
    """Let each write take as long as on a disk of `mib_s`."""
    original = durable.write

    def write(file, piece):
        original(file, piece)
        time.sleep(len(piece) / 2**20 / mib_s)

    durable.write = write


def main(args: list[str] | None = None):
    """The command line."""
    parser = Parser(prog="python -m benchmarks.save_hashing", description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--folder", default=".", help="on the disk to measure")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--disk_mib_s",
        type=float,
        default=0,
        help="as on a disk no faster than this: each write also sleeps; 0: this disk",
    )
    given = parser.parse_args(args)
    if given.disk_mib_s:
        slow_down(given.disk_mib_s)
    folder = Path(tempfile.mkdtemp(dir=given.folder))
    try:
        check(folder)
        tensors = {f"layer{index}": torch.randn(2**20) for index in range(given.mib // 4)}
        times = {digests: [] for digests in (Counted, durable.Digests)}
        for _ in range(given.rounds):  # in turns, so that a busy disk meets both
            for digests, found in times.items():
                found.append(seconds(tensors, folder, digests))
        for name, middle in dict(median=statistics.median, best=min).items():
            plain, hashed = (middle(found) for found in times.values())
            print(
                f"{given.mib} MiB, {name} of {given.rounds}: {plain:.3f} s without SHA-256 "
                f"({given.mib / plain:,.0f} MiB/s), {hashed:.3f} s with: "
                f"{100 * (hashed / plain - 1):+.1f}%"
            )
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
