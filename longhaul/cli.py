"""Command lines of a dataclass: one flag per field, and the same names in a TOML file."""

import argparse
import difflib
import tomllib
from dataclasses import MISSING, field, fields
from pathlib import Path

from flags import Parser as Parser
from flags import RaisingParser


def flag(
    default,
    help: str,
    aliases: tuple[str, ...] = (),
    choices: tuple | None = None,
    bare=None,
    many: bool = False,
    group: str = "",
):
    """A dataclass field that is also a command-line flag; `bare` is the value of the flag given
    without one.
    """
    metadata = dict(help=help, aliases=aliases, choices=choices, bare=bare, many=many, group=group)
    if many:
        return field(default_factory=lambda: tuple(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def parse(cls, args: list[str] | None = None, description: str = ""):
    """An instance of the dataclass `cls` from flags over a TOML file (--config) over defaults;
    ValueError for what is wrong.
    """
    parser = build_parser(cls, description)
    given = vars(parser.parse_args(args))
    from_file = read_toml(cls, given["config"], parser) if given.get("config") else {}
    given = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in {**from_file, **given}.items()
    }
    return cls(**given)


def build_parser(cls, description: str = "") -> RaisingParser:
    """One flag per field of `cls`; a flag that is not given is absent, so that given and default
    can be told apart.
    """
    parser = RaisingParser(description=description)
    groups = {}
    for spec in fields(cls):
        title = spec.metadata["group"]
        group = groups.setdefault(title, parser.add_argument_group(title))
        _add_flag(group, spec)
    return parser


def _add_flag(group, spec):
    meta = spec.metadata
    default = (
        spec.default if spec.default is not MISSING else " ".join(spec.default_factory()) or "none"
    )
    names = [f"--{name}" for name in (spec.name, *meta["aliases"])]
    kind = dict(
        type=_type_of(spec),
        choices=meta["choices"],
        metavar=None if meta["choices"] else spec.name.upper().split("_")[-1],
    )
    if spec.type is bool:
        names += [f"--no_{spec.name}"]
        kind = dict(action=_Switch, nargs=0)
    elif meta["bare"] is not None:
        kind.update(nargs="?", const=meta["bare"])
    elif meta["many"]:
        kind.update(nargs="+")
    group.add_argument(
        *names,
        dest=spec.name,
        default=argparse.SUPPRESS,
        help=f"{meta['help']} (default: {default})",
        **kind,
    )


class _Switch(argparse.Action):
    """--name sets True, --no_name sets False."""

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, not option_string.startswith("--no_"))


def _type_of(spec):
    base = {"int": int, "float": float, "str": str}
    name = (
        spec.type if isinstance(spec.type, str) else getattr(spec.type, "__name__", str(spec.type))
    )
    return next((kind for key, kind in base.items() if key in name), str)


def read_toml(cls, path: str, parser: Parser) -> dict:
    """Values of a TOML file by field name or alias; tables only group keys. Errors name file and
    key.
    """
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (
        OSError,
        ValueError,
        RecursionError,
    ) as error:  # TOMLDecodeError is a ValueError, as is a number of too many digits
        parser.error(f"--config {path}: {error}")
    names = {
        alias: spec for spec in fields(cls) for alias in (spec.name, *spec.metadata["aliases"])
    }
    values = {}
    for key, value in _flatten(table):
        spec = names.get(key.replace("-", "_"))
        if spec is None:
            nearest = difflib.get_close_matches(key, names, n=1, cutoff=0.0)[0]
            parser.error(f"--config {path}: unknown key {key!r}: did you mean {nearest!r}?")
        values[spec.name] = _checked(spec, value, f"--config {path}: {key}", parser)
    return values


def _flatten(table: dict):
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(value)
        else:
            yield key, value


def _checked(spec, value, where: str, parser: Parser):
    wanted = bool if spec.type is bool else _type_of(spec)
    if spec.metadata["many"]:
        fine = isinstance(value, list) and all(isinstance(item, str) for item in value)
        return tuple(value) if fine else parser.error(f"{where}={value!r}: give a list of strings")
    if type(value) is int and not -(2**63) <= value < 2**63:
        parser.error(f"{where} has {len(str(value))} digits: give a number below 2^63")
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted:
        parser.error(f"{where}={value!r} is a {type(value).__name__}: give a {wanted.__name__}")
    if spec.metadata["choices"] and value not in spec.metadata["choices"]:
        parser.error(f"{where}={value!r}: choose one of {', '.join(spec.metadata['choices'])}")
    return value
