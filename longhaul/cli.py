"""Command lines of a dataclass: one flag per field, and the same names in a TOML file.

A flag wins over the file of --config, and the file wins over the default of the field.
"""

import argparse
import difflib
import math
import operator
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields
from pathlib import Path
from typing import Any, TypeVar

from base.durable import StorageError
from base.flags import Parser as Parser
from base.flags import RaisingParser, line_and_code
from longhaul.other_names import our_name

Config = TypeVar("Config")


def flag(
    default: Any,
    help: str,
    aliases: tuple[str, ...] = (),
    choices: tuple | None = None,
    bare: Any = None,
    many: bool = False,
    group: str = "",
    at_least: float | None = None,
    at_most: float | None = None,
    decimals: int | None = None,
    without: tuple[str, ...] = (),
) -> Any:
    """A dataclass field that is also a command-line flag.

    bare: the value of the flag if it is given without one. many: the flag takes several values.
    without: a value, and the flags that stand for it, each without a value of its own. at_least,
    at_most, decimals: the range of a number, which `check_ranges` checks.
    """
    metadata = dict(
        help=help,
        aliases=aliases,
        choices=choices,
        bare=bare,
        many=many,
        group=group,
        at_least=at_least,
        at_most=at_most,
        decimals=decimals,
        without=without,
    )
    if many:
        return field(default_factory=lambda: tuple(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def changed_flag(cls: type, name: str, **changes: Any) -> Any:
    """The flag of that name in another dataclass, with these arguments of `flag` changed."""
    spec = next(spec for spec in fields(cls) if spec.name == name)
    return flag(**{"default": spec.default, **spec.metadata, **changes})


def parse(
    cls: type[Config],
    args: list[str] | None = None,
    description: str = "",
    complete: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> Config:
    """An instance of the dataclass `cls`; ValueError for bad input.

    `complete` may add settings to those that flags and file give, before the defaults count.
    """
    return cls(**complete(given(cls, args, description)))


def given(cls: type, args: list[str] | None = None, description: str = "") -> dict[str, Any]:
    """The settings that flags and the file of --config give, without the defaults."""
    parser = build_parser(cls, description)
    settings = vars(parser.parse_args(args))
    path = settings.get("config")
    if path:
        try:
            settings = vars(parser.parse_args(words_of_toml(path, parser))) | settings
        except ValueError as error:
            words = " ".join(str(error).split())  # a key may be of several lines
            raise ValueError(f"--config {path}: {words}") from None

    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()
    }


def run(
    cls: type[Config],
    act: Callable[[Config], None],
    args: list[str] | None,
    program: str,
    description: str,
) -> None:
    """The command line of a script: `act` on its settings. What a user can mend ends the program
    with one line and an exit code.
    """
    try:
        act(parse(cls, args, description))
    except (ValueError, OSError, StorageError) as error:
        line, code = line_and_code(error)
        print(f"python -m {program}: error: {line}", file=sys.stderr)
        raise SystemExit(code) from None


# ---- flags


def build_parser(cls: type, description: str = "") -> RaisingParser:
    """One flag per field of `cls`. Only flags that were given are in the result of parsing.

    For --help, `cls.GROUPS` may have a sentence for each group of flags, and `cls.EXAMPLES`
    commands to print below them. Examples are those of one program, and so are not inherited.
    """
    parser = RaisingParser(
        usage="%(prog)s [--flag value ...]",
        description=description,
        epilog=vars(cls).get("EXAMPLES"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        our_name=our_name,
    )
    sentences = getattr(cls, "GROUPS", {})
    left_out = getattr(cls, "LEFT_OUT", ())  # which keep their defaults
    groups = {}
    for spec in fields(cls):
        if spec.name in left_out:
            continue
        title = spec.metadata["group"] or "flags"
        if title not in groups:
            groups[title] = parser.add_argument_group(title, sentences.get(title))
        _add_flag(groups[title], spec)
    return parser


def _add_flag(group: argparse._ArgumentGroup, spec: Field) -> None:
    names = [f"--{name}" for name in (spec.name, *spec.metadata["aliases"])]
    if spec.type is bool:
        names.append(f"--no_{spec.name}")
    group.add_argument(
        *names,
        dest=spec.name,
        default=argparse.SUPPRESS,
        help=f"{spec.metadata['help']} (default: {_default_of(spec)})",
        **_values_of(spec),
    )
    for name in spec.metadata["without"][1:]:
        group.add_argument(
            f"--{name}",
            dest=spec.name,
            action="store_const",
            const=spec.metadata["without"][0],
            default=argparse.SUPPRESS,
            help=f"the same as --{spec.name} {spec.metadata['without'][0]}",
        )


def _values_of(spec: Field) -> dict[str, Any]:
    """How many values a flag takes, of what kind, as argparse wants it."""
    if spec.type is bool:
        return dict(action=_Switch, nargs=0)

    choices = spec.metadata["choices"]
    values = dict(type=spec.type if spec.type in (int, float) else str, choices=choices)
    if not choices:
        values["metavar"] = spec.name.upper().split("_")[-1]
    if spec.metadata["bare"] is not None:
        values.update(nargs="?", const=spec.metadata["bare"])
    elif spec.metadata["many"]:
        values["nargs"] = "+"
    return values


class _Switch(argparse.Action):
    """--name sets True, --no_name sets False."""

    def __call__(
        self,
        parser,
        namespace,
        values,
        option_string=None,
    ):
        setattr(namespace, self.dest, not option_string.startswith("--no_"))


def _default_of(spec: Field) -> str:
    """The default as --help prints it."""
    if spec.default is MISSING:
        return " ".join(spec.default_factory()) or "none"
    return "empty" if spec.default == "" else str(spec.default)


# ---- TOML


def words_of_toml(path: str, parser: RaisingParser) -> list[str]:
    """The flags that a TOML file stands for; its tables only group keys."""
    words = []
    for key, value in _flat(_table(path)):
        flag = "--" + key.replace("-", "_")
        if flag not in parser.known_flags():
            parser.error(parser.explain_unknown(flag))
        if isinstance(value, list):
            words += [flag, *map(str, value)] if value else []
        elif isinstance(value, bool):
            words += _switched(flag, value, parser)
        else:
            words.append(f"{flag}={value}")
    return words


def _switched(flag: str, on: bool, parser: RaisingParser) -> list[str]:
    """true is the flag without a value; false is --no_name, or no flag if it may have a value."""
    if on:
        return [flag]
    action = parser.known_flags()[flag]
    if isinstance(action, _Switch):
        return ["--no_" + flag.removeprefix("--")]
    return [] if action.nargs == "?" else [f"{flag}=false"]


def _table(path: str) -> dict:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    # A TOMLDecodeError is a ValueError, and so is a number of too many digits.
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{error}: give a TOML file with lines such as max_steps = 10") from None


def _flat(table: dict) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value)
        else:
            yield key, value


# ---- ranges


def check_ranges(cfg: Any) -> None:
    """ValueError if a field of a dataclass of flags is outside its range, or not finite."""
    for spec in fields(cfg):
        bounds = {name: spec.metadata[name] for name in BOUNDS if spec.metadata[name] is not None}
        value = getattr(cfg, spec.name)
        for name, bound in bounds.items():
            words, holds = BOUNDS[name]
            if not (math.isfinite(value) and holds(value, bound)):
                raise ValueError(
                    f"--{spec.name} {value} is out of range: give a number {words} {bound}"
                )


def require(cfg: Any, *names: str) -> None:
    """ValueError for a flag of these that was not given."""
    for name in names:
        if not getattr(cfg, name):
            raise ValueError(f"--{name} is missing: give it")


BOUNDS = {
    "at_least": ("of at least", operator.ge),
    "at_most": ("of at most", operator.le),
    "decimals": ("whose decimals are at most", lambda value, most: round(value, most) == value),
}


# ---- lists of words


def words_of(text: str) -> tuple[str, ...]:
    """The words between commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def known_words(flag: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """The words between commas; ValueError if there is none, or one that is not known."""
    found = words_of(text)
    if not found:
        raise ValueError(f"{flag} names nothing: give some of {','.join(known)}")
    for word in found:
        if word not in known:
            near = difflib.get_close_matches(word, known, n=1, cutoff=0)[0]
            raise ValueError(
                f"{flag} {word[:40]} is unknown: did you mean {near}? (all are {','.join(known)})"
            )
    return found


# ---- name=value pairs


def read_pairs(
    pairs: Sequence[str], cls: type, given_by: str, flags: Mapping[str, str] = {}
) -> dict[str, Any]:
    """Values of name=value pairs, typed as the fields of the dataclass `cls`.

    `flags`: fields that have a flag, by its name. ValueError for another name, another type, or one
    of these.
    """
    types = {spec.name: spec.type for spec in fields(cls)}

    values = {}
    for pair in pairs:
        given = f"--{given_by} {pair!r}"
        name, equals, text = pair.partition("=")
        if not equals or name not in types:
            raise ValueError(f"{given}: give name=value with a name of {', '.join(types)}")
        if name in flags:
            raise ValueError(f"{given}: use the flag --{flags[name]}")
        if name in values:
            raise ValueError(f"{given}: {name} is given twice: keep one")
        values[name] = _converted(types[name], text, given)
    return values


def _converted(kind: type, text: str, given: str):
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{given}: give true or false")
        return text.lower() == "true"

    try:
        return kind(text)
    except ValueError:
        wanted = "an integer" if kind is int else "a number"
        raise ValueError(f"{given}: give {wanted}") from None
