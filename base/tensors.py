"""Tensors on disk: safetensors files, which the library checks, hashed while they are written.

    8 bytes    N, the length of the header, little-endian
    N bytes    the header: {name: {"dtype", "shape", "data_offsets": [begin, end]}, ...}
    the rest   the bytes of the tensors, back to back

The safetensors library refuses overlapping and missing bytes, and headers of more than 100 MB. Of a
name that is given twice it takes the last.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from base import durable
from base.untrusted import refuse_pickle

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
WEIGHTS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


# ---- reading


@contextmanager
def opened(path: Path) -> Iterator[safe_open]:
    """The library's reader of `path`.

    Raises ValueError, with a remedy, if the file is missing, malformed or a pickle.
    """
    refuse_pickle(path)
    try:
        with safe_open(path, framework="pt") as source:
            yield source
    except (OSError, SafetensorError) as error:
        words = " ".join(str(error).split())[:200]  # the library repeats names of any length
        raise ValueError(f"{path} cannot be read ({words}): download or copy it again") from None


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file; ValueError as `opened` raises it."""
    with opened(path) as source:
        names = source.keys()
        return {name: source.get_tensor(name) for name in names}


# ---- writing


class Later(NamedTuple):
    """A tensor that is read, or copied to the host, when it is written."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Its size in a file."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor | Later], metadata: dict[str, str] | None = None
) -> dict:
    """Write tensors of any device, force the file to the disk, return its size and digests.

    One tensor at a time is copied to the host. Threads hash the bytes while they are written, so
    that they need not be read again. A `Later` is hashed and let go before the next one is read.
    """
    # each tensor begins at a multiple of its element size
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    tensors = {name: tensors[name] for name in order}
    digests = durable.Digests()
    with digests.pool, open(path, "wb", buffering=0) as file:
        _append(file, digests, _header(tensors, metadata))
        for tensor in tensors.values():
            _append(file, digests, _host_bytes(tensor))
            if isinstance(tensor, Later):
                digests.catch_up()
        durable.fsync(path)
        return digests.result()


def _append(file: BinaryIO, digests: durable.Digests, content: durable.Bytes) -> None:
    """Write and hash `content` in chunks."""
    for start in range(0, len(content), durable.CHUNK):
        chunk = content[start : start + durable.CHUNK]
        digests.feed(chunk)
        durable.write(file, chunk)


def _host_bytes(tensor: Tensor | Later) -> memoryview:
    """The bytes of a tensor, which are copied if it is on a device or not contiguous."""
    if isinstance(tensor, Later):
        tensor = tensor.read()
    host = tensor.detach().contiguous().cpu()
    return memoryview(host.flatten().view(torch.uint8).numpy())


def _header(tensors: Mapping[str, Tensor | Later], metadata: dict[str, str] | None) -> bytes:
    """The length and the JSON text, padded with spaces to a multiple of eight bytes."""
    table: dict[str, dict] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        begin = end
        end = begin + tensor.nbytes
        table[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }

    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
