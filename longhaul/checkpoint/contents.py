"""Whether a checkpoint's manifest and files say what they must, whoever wrote them: hashes prove
only that nothing changed since.

Imports model.py, files.durable and files.tensors of ours. What is wrong is a ValueError of a
few words; checkpoint.py names the folder.
"""

import dataclasses
import re
from pathlib import Path

from files import durable, tensors
from model import ModelConfig, NSAConfig

LARGEST, LARGEST_SIZE = 2**53, 2**24
NUMBERS = ("step", "tokens", "world_size")
TABLES = ("data", "config", "model_config", "files")


def check_manifest(manifest: dict):
    """ValueError unless every value that is read later has the type, and every range of rows the
    bounds, that it must have.
    """
    for name in NUMBERS:
        if not _is_count(manifest[name]):
            raise ValueError(f"{name} is {_short(manifest[name])}")
    for name in TABLES:
        if not isinstance(manifest[name], dict):
            raise ValueError(f"{name} is {_short(manifest[name])}")
    _check_skips(manifest["data"].get("skip", []))
    for name, entry in manifest["files"].items():
        _check_file(name, entry)


def _check_skips(skips):
    pairs = isinstance(skips, list) and all(
        isinstance(one, list) and len(one) == 2 and all(map(_is_count, one)) for one in skips
    )
    if not pairs or any(begin >= end for begin, end in skips):
        raise ValueError(f"the rows left out are {_short(skips)}")


def _check_file(name: str, entry):
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise ValueError(f"it names {_short(name)}, which is not a plain file of this folder")
    kinds = dict(bytes=int, blocks=list, rows=dict, shapes=dict)
    if (
        not isinstance(entry, dict)
        or any(not isinstance(entry.get(key), kind) for key, kind in kinds.items())
        or not _is_count(entry["bytes"])
    ):
        raise ValueError(f"{name} is not described by bytes, blocks, rows and shapes")
    if (
        len(entry["blocks"]) != -(-entry["bytes"] // durable.BLOCK)
        or entry["rows"].keys() != entry["shapes"].keys()
    ):
        raise ValueError(
            f"{name} has {len(entry['blocks'])} digests for {entry['bytes']} bytes, or rows and shapes of other tensors"
        )
    for tensor, rows in entry["rows"].items():
        shape = entry["shapes"][tensor]
        fine = (
            all(isinstance(one, list) and all(map(_is_count, one)) for one in (rows, shape))
            and len(rows) == 2
            and shape
        )
        if not fine or not rows[0] <= rows[1] <= shape[0]:
            raise ValueError(
                f"{name} holds rows {_short(rows)} of a tensor of shape {_short(shape)}"
            )


def check_tensors(path: Path, entry: dict):
    """ValueError unless the file holds the rows that its entry of the manifest says. Reads the
    header alone.
    """
    with tensors.opened(path) as source:
        for name in entry["rows"].keys() - set(source.keys()):
            raise ValueError(f"{path.name} lacks {_short(name)}")
        for name, (begin, end) in entry["rows"].items():
            if source.get_slice(name).get_shape() != [end - begin, *entry["shapes"][name][1:]]:
                raise ValueError(
                    f"{path.name} holds {_short(name)} in another shape than the manifest says"
                )


def check_model(manifest: dict, shapes: dict[str, tuple[int, ...]]):
    """ValueError unless the files hold all rows of these tensors: before memory is taken for them."""
    held = dict.fromkeys(shapes, 0)
    for entry in manifest["files"].values():
        for name in entry["rows"].keys() & shapes.keys():
            if tuple(entry["shapes"][name]) != shapes[name]:
                raise ValueError(
                    f"{name} has shape {entry['shapes'][name]}, its configuration says {list(shapes[name])}"
                )
            held[name] += entry["rows"][name][1] - entry["rows"][name][0]
    lacking = [name for name, shape in shapes.items() if held[name] < shape[0]]
    if lacking:
        raise ValueError(f"it lacks rows of {lacking[0]} and {len(lacking) - 1} more")


def model_config(manifest: dict, **overrides) -> ModelConfig:
    """The model that the checkpoint is of; ValueError for what is no configuration, or one of more
    tensors than the files hold.
    """
    fields = _fields(ModelConfig, manifest["model_config"] | dict(nsa=NSAConfig()))
    layers = sum(len(entry["rows"]) for entry in manifest["files"].values())
    for name, size in fields.items():
        if type(size) is int and size > (layers if name == "num_layers" else LARGEST_SIZE):
            raise ValueError(f"model_config.{name} is {size}, which the files do not hold")
    return ModelConfig(
        **fields
        | dict(nsa=NSAConfig(**_fields(NSAConfig, manifest["model_config"].get("nsa", {}))))
        | overrides
    )


def _fields(cls, values) -> dict:
    """`values` as arguments of the dataclass `cls`; ValueError for an unknown name or another type."""
    kinds = {spec.name: spec.type for spec in dataclasses.fields(cls)}
    for name, value in values.items() if isinstance(values, dict) else [(cls.__name__, values)]:
        kind = kinds.get(name)
        if (
            kind is None
            or not isinstance(value, (int, float) if kind is float else kind)
            or kind is not bool
            and isinstance(value, bool)
        ):
            raise ValueError(f"model_config.{name[:40]} is {_short(value)}")
        if kind in (int, float) and not abs(value) < LARGEST:
            raise ValueError(f"model_config.{name} is {_short(value)}")
    return dict(values)


def _is_count(value) -> bool:
    return type(value) is int and 0 <= value < LARGEST


def _short(value) -> str:
    return repr(value)[:80]
