"""Flags of the command `footprint`: what is wrong with them is told in one line, with a remedy."""

import argparse
import ast
import dataclasses
import difflib
import re
from collections.abc import Callable, Sequence
from typing import Any

from footprint.python.refusal import Refused

STEPS = ("--step", "--hf")
FLAG = re.compile(r"--[A-Za-z][\w-]*")
CHOICE = re.compile(r"invalid choice: (.+) \(choose from (.+)\)")
# how a refusal says that a value may be given
GIVE_ANSWER = re.compile(r"answers=\{'([^']+)': \.\.\.\}")


class Parser(argparse.ArgumentParser):
    """argparse whose errors are raised, as Refused."""

    def __init__(self, **settings: Any):
        settings["formatter_class"] = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> None:
        words = message.removeprefix("argument ")
        words = CHOICE.sub(r"\1 is unknown: choose from \2", words)
        name = words.partition(":")[0]
        if "ignored explicit argument" in words:
            words = f"{name} takes no value: drop it"
        elif ": expected " in words:
            words = f"{name} has no value: give one"
        raise Refused(words)


def flag(default: Any, help: str, *other_names: str, **settings: Any) -> Any:
    """A field of a dataclass that is a flag; `settings` as argparse takes them."""
    metadata = dict(help=help, other_names=other_names, settings=settings)
    return dataclasses.field(default=default, metadata=metadata)


def step_parser(table: type, **settings: Any) -> Parser:
    """One flag for each field of a dataclass; only flags that are given are in the result."""
    parser = Parser(**settings)
    for spec in dataclasses.fields(table):
        name = f"--{spec.name}"
        names = [name, *spec.metadata["other_names"]]
        more = spec.metadata["settings"]
        if spec.type is bool:
            names.append(f"--no_{spec.name}")
            more = more | dict(nargs=0)
        elif "choices" not in more:
            more = dict(metavar=spec.name.upper().split("_")[-1]) | more
        default = f" (default: {spec.default})" if spec.default else ""
        parser.add_argument(
            *names,
            action=Once,
            default=argparse.SUPPRESS,
            help=f"{spec.metadata['help']}{default}",
            **more,
        )
    return parser


class Once(argparse.Action):
    """A flag that is given at most once; --no_ in front of a switch turns it off."""

    def __call__(
        self,
        parser,
        namespace,
        values,
        option=None,
    ):
        if hasattr(namespace, self.dest):
            parser.error(f"{option} is given twice: keep one")
        if self.nargs == 0:
            values = not option.startswith("--no_")
        elif isinstance(values, list):
            values = tuple(values)
        setattr(namespace, self.dest, values)


def given(parser: Parser, words: Sequence[str]) -> dict[str, Any]:
    """The flags that are given; dashes and underscores in their names are alike."""
    words = [underscored(word) for word in words]
    if {"-h", "--help"} & set(words):
        words = ["--help"]
    found, unknown = parser.parse_known_args(words)
    if not unknown:
        return vars(found)
    name = unknown[0].partition("=")[0]
    if not name.startswith("-"):
        raise Refused(f"{name!r} follows no flag: give every value behind its flag")
    near = difflib.get_close_matches(name, parser._option_string_actions, n=1)
    remedy = f"did you mean {near[0]}?" if near else "see --help"
    raise Refused(f"unknown flag {name}: {remedy}")


def underscored(word: str) -> str:
    """`--a-b=c-d` as `--a_b=c-d`; a word that is not a flag stays as it is."""
    name, equals, value = word.partition("=")
    if not FLAG.fullmatch(name):
        return word
    return "--" + name.removeprefix("--").replace("-", "_") + equals + value


def is_about_step(words: Sequence[str]) -> bool:
    """Whether the flags of a command line are about a step, not about a script."""
    names = {word.split("=")[0] for word in words}
    return not names.isdisjoint(STEPS)


# ---- values


def between(least: int, most: int) -> Callable[[str], int]:
    """Reads a whole number from `least` to `most`."""

    def read(text: str) -> int:
        remedy = f"give {least} to {most}"
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number: {remedy}") from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is out of range: {remedy}")
        return value

    return read


def number(text: str) -> float:
    """Reads a number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number: give one") from None


def is_answer(word: str) -> bool:
    """Whether a word is a value of --answer."""
    line, _, _ = word.rpartition("=")
    return bool(re.fullmatch(r".+:\d+", line))


def answers(given: Sequence[str]) -> dict[str, object]:
    """The values of --answer by their lines, as footprint.predict takes them."""
    found = {}
    for words in given:
        if not is_answer(words):
            raise Refused(f"--answer {words}: give FILE.py:LINE=VALUE")
        line, _, text = words.rpartition("=")
        found[line] = _value(text)
    return found


def _value(text: str) -> object:
    """What a Python literal says, or a number such as nan; Refused for anything else."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        pass
    try:
        return float(text)
    except ValueError:
        raise Refused(
            f"--answer ...={text} has no value of Python's: give one such as False, 3 or nan"
        ) from None


def shell_words(refusal: Refused) -> str:
    """A refusal in one line; one that asks for an answer names the flag."""
    words = GIVE_ANSWER.sub(r"--answer \1=VALUE", str(refusal))
    return " ".join(words.split())
