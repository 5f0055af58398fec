"""Tensors on disk: safetensors files, checked before they are opened and hashed while written.

    8 bytes    N, the length of the header, little-endian
    N bytes    the header: {name: {"dtype", "shape", "data_offsets": [begin, end]}, ...}
    the rest   the bytes of the tensors, back to back

The safetensors library takes the last of two equal keys and parses headers of up to 100 MB. Here a
repeated key, overlapping or missing bytes and a header of more than 2 MiB are refused before the
library sees the file, in at most 60 MB of memory.
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
MAX_DIMENSIONS = 8
BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}
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


class Span(NamedTuple):
    """The bytes [begin, end) of the data that a tensor takes."""

    begin: int
    end: int
    name: str


# ---- reading


@contextmanager
def opened(path: Path) -> Iterator[safe_open]:
    """The library's reader of `path`.

    Raises ValueError, with a remedy, if the file is missing, malformed or a pickle.
    """
    try:
        check_header(path)
        with safe_open(path, framework="pt") as source:
            yield source
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read ({error}): download or copy it again") from None


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file; ValueError as `opened` raises it."""
    with opened(path) as source:
        names = source.keys()
        return {name: source.get_tensor(name) for name in names}


def check_header(path: Path) -> None:
    """ValueError unless each byte of the data belongs to one tensor of matching shape and dtype."""
    path = Path(path)
    refuse_pickle(path)
    try:
        if not path.is_file():
            raise ValueError("No such file")
        header, data_bytes = _read_header(path)
        _check_spans(header, data_bytes)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({error}): download or copy it again") from None


def _read_header(path: Path) -> tuple[dict, int]:
    """The header, and the number of bytes that follow it."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"a header of {length:,} bytes in a file of {size:,}")
        if length > HEADER_BYTES:
            raise ValueError(f"a header of {length:,} bytes, at most {HEADER_BYTES:,} are read")
        header = parse_json(file.read(length))

    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    return header, size - 8 - length


def _check_spans(header: dict, data_bytes: int) -> None:
    """ValueError unless the tensors follow each other without a gap up to the end of the file."""
    spans = [_span(name, entry) for name, entry in header.items() if name != "__metadata__"]
    end = 0
    for span in sorted(spans):
        if span.begin != end:
            raise ValueError(
                f"the bytes of {span.name[:80]!r} begin at {span.begin}, "
                f"those before them end at {end}"
            )
        end = span.end
    if end != data_bytes:
        raise ValueError(f"the tensors take {end:,} bytes, the file holds {data_bytes:,}")


def _span(name: str, entry: object) -> Span:
    """The bytes of a tensor. ValueError unless their number follows from its shape and dtype."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name[:80]!r} is not described by dtype, shape and data_offsets")

    bits = BITS.get(str(entry["dtype"]))
    shape = entry["shape"]
    offsets = entry["data_offsets"]
    if bits is None or not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{name[:80]!r} has an impossible dtype, shape or data_offsets")

    begin, end = offsets
    if end - begin != math.prod(shape) * bits // 8:
        raise ValueError(f"{name[:80]!r} of shape {shape} and {bits} bits has {end - begin} bytes")
    return Span(begin, end, name)


def _are_sizes(value: object) -> bool:
    """Whether a JSON value is a short list of sizes; True and False are not sizes."""
    if not isinstance(value, list) or len(value) > MAX_DIMENSIONS:
        return False
    return all(type(size) is int and 0 <= size < 2**63 for size in value)


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


def write_tensors(path: Path, tensors: Mapping[str, Tensor | Later]) -> dict:
    """Write tensors of any device, force the file to the disk, return its size and digests.

    One tensor at a time is copied to the host. Threads hash the bytes while they are written, so
    that they need not be read again. A `Later` is hashed and let go before the next one is read.
    """
    tensors = _large_elements_first(tensors)
    digests = durable.Digests()
    with digests.pool, open(path, "wb", buffering=0) as file:
        _append(file, digests, _header(tensors))
        for tensor in tensors.values():
            _append(file, digests, _host_bytes(tensor))
            if isinstance(tensor, Later):
                digests.catch_up()
        durable.fsync(path)
        return digests.result()


def write_one_by_one(path: Path, tensors: Mapping[str, Later], metadata: dict[str, str]) -> None:
    """Write tensors of which one at a time is in memory."""
    tensors = _large_elements_first(tensors)
    with open(path, "wb", buffering=0) as file:
        durable.write(file, _header(tensors, metadata))
        for later in tensors.values():
            durable.write(file, _host_bytes(later))


def _large_elements_first(tensors: Mapping[str, Tensor | Later]) -> dict[str, Tensor | Later]:
    """In an order in which each tensor begins at a multiple of its element size."""
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    return {name: tensors[name] for name in order}


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


def _header(tensors: Mapping[str, Tensor | Later], metadata: dict[str, str] | None = None) -> bytes:
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
