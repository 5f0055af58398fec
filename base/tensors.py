"""Tensors on disk: safetensors files, checked before they are opened and hashed while written.

    8 bytes    N, the length of the header, little-endian
    N bytes    the header: {name: {"dtype", "shape", "data_offsets": [begin, end]}, ...}
    the rest   the bytes of the tensors, back to back

The safetensors library refuses overlapping and missing bytes, but it takes the last of two equal
keys and parses headers of up to 100 MB. Here a repeated key and a header of more than 2 MiB are
refused before the library sees the file.
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
from base.untrusted import parse_json, refuse_pickle

HEADER_BYTES = 2 * 2**20  # 15,000 tensors; the 4B with its optimizer states has 160 KB
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
        _check_header(path)
        reader = safe_open(path, framework="pt")
    except (OSError, ValueError, SafetensorError) as error:
        raise _unreadable(path, error) from None
    try:
        with reader as source:
            yield source
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> ValueError:
    words = " ".join(str(error).split())[:200]  # the library repeats names of any length
    return ValueError(f"{path} cannot be read ({words}): download or copy it again")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file; ValueError as `opened` raises it."""
    with opened(path) as source:
        names = source.keys()
        return {name: source.get_tensor(name) for name in names}


def _check_header(path: Path) -> None:
    """ValueError for what the library would accept: a long header, and a key that it has twice."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"a header of {length:,} bytes in a file of {size:,}")
        if length > HEADER_BYTES:
            raise ValueError(f"a header of {length:,} bytes, at most {HEADER_BYTES:,} are read")
        parse_json(file.read(length))


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
