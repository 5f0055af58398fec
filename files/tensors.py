"""A safetensors file, opened only after its header was found sound. Imports files.untrusted of ours.

    8 bytes  N, the header's length        N bytes  {name: {"dtype", "shape", "data_offsets": [begin, end]}}        then the data

safetensors itself takes the last of two equal keys and parses headers of up to 100 MB: here a key
given twice, overlapping or missing bytes and a header beyond 2 MiB are refused before the library
sees the file, in at most 60 MB of memory.
"""

import math
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open

from files.untrusted import parse_json, refuse_pickle

HEADER_BYTES = 2 * 2**20  # 15,000 tensors; the 4B with its optimizer states has 160 KB
DIMENSIONS = 8
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


@contextmanager
def opened(path: Path):
    """safetensors' reader of `path`. ValueError, with a remedy, where the file is missing,
    malformed or a pickle.
    """
    try:
        check_header(path)
        with safe_open(path, framework="pt") as source:
            yield source
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read ({error}): download or copy it again") from None


def check_header(path: Path):
    """ValueError unless the header is sound: every byte of the data belongs to exactly one tensor
    of fitting shape and dtype.
    """
    refuse_pickle(path)
    try:
        if not Path(path).is_file():
            raise ValueError("No such file")
        _check_spans(*_read_header(path))
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({error}): download or copy it again") from None


def _read_header(path: Path) -> tuple[dict, int]:
    """The header and the number of bytes behind it."""
    size = Path(path).stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"a header of {length:,} bytes in a file of {size:,}")
        if length > HEADER_BYTES:
            raise ValueError(f"a header of {length:,} bytes, at most {HEADER_BYTES:,} are read")
        header = parse_json(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    return header, size - 8 - length


def _check_spans(header: dict, size: int):
    end = 0
    spans = sorted(_span(name, entry) for name, entry in header.items() if name != "__metadata__")
    for begin, after, name in spans:
        if begin != end:
            raise ValueError(
                f"the bytes of {name[:80]!r} begin at {begin}, those before end at {end}"
            )
        end = after
    if end != size:
        raise ValueError(f"the tensors take {end:,} bytes, {size:,} are there")


def _span(name: str, entry) -> tuple[int, int, str]:
    """Where the bytes of a tensor are; ValueError unless they are as many as its shape and dtype
    need.
    """
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name[:80]!r} is not described by dtype, shape and data_offsets")
    shape, offsets, bits = (
        _sizes(entry["shape"]),
        _sizes(entry["data_offsets"]),
        BITS.get(str(entry["dtype"])),
    )
    if bits is None or shape is None or offsets is None or len(offsets) != 2:
        raise ValueError(f"{name[:80]!r} has a dtype, shape or data_offsets that cannot be")
    if offsets[1] - offsets[0] != math.prod(shape) * bits // 8:
        raise ValueError(
            f"{name[:80]!r} of shape {shape} and {bits} bits has {offsets[1] - offsets[0]} bytes"
        )
    return offsets[0], offsets[1], name


def _sizes(given) -> list[int] | None:
    fine = (
        isinstance(given, list)
        and len(given) <= DIMENSIONS
        and all(type(n) is int and 0 <= n < 2**63 for n in given)
    )
    return given if fine else None
