"""Command-line flags as every command of longhaul reads them.

Hyphens and underscores in a flag are interchangeable, flags are never abbreviated, no flag is given
twice, and the error for an unknown flag suggests the nearest known one. longhaul/cli.py makes flags
from a dataclass.
"""

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Sequence

# A command with at most so many flags lists them all if it is given an unknown one.
FEW = 20
FLAG = re.compile(r"--[A-Za-z][\w-]*")

# The precisions that commands know, and their names in torch.
PRECISIONS = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line, which end the program with exit code 2.

    `our_name` takes the name of an unknown flag and returns what it is called here, for the error.
    """

    def __init__(self, our_name: Callable[[str], str] = str, **settings):
        self.our_name = our_name
        settings.setdefault("formatter_class", argparse.ArgumentDefaultsHelpFormatter)
        super().__init__(allow_abbrev=False, **settings)
        self.register("type", int, integer)
        self.register("type", float, number)

    def add_argument(self, *names: str, **settings) -> argparse.Action:
        """As in argparse; a flag is known by its name with underscores."""
        names = [underscored(name) for name in names]
        return super().add_argument(*names, **settings)

    def parse_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """As in argparse; `error` is called for a flag that is not known or is given twice."""
        given = sys.argv[1:] if args is None else args
        words = [underscored(word) for word in given]
        self._refuse_unknown(words)
        options, unknown = self.parse_known_args(words, namespace)
        if unknown:
            self.error(self.explain_unknown(unknown[0]))
        self._refuse_repetition(words)
        return options

    def error(self, message: str) -> None:
        """End the program with this message."""
        self.exit(2, f"{self.prog}: error: {with_remedy(message)}\n")

    def refuse(self, error: Exception) -> None:
        """End the program with what an error says that a user can mend."""
        line, code = line_and_code(error)
        self.exit(code, f"{self.prog}: error: {line}\n")

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        """An error for a flag that is not known, before argparse misses one that is required."""
        for word in words:
            flag = word.split("=")[0]
            if FLAG.fullmatch(flag) and flag not in self._option_string_actions:
                self.error(self.explain_unknown(flag))

    def _refuse_repetition(self, words: Sequence[str]) -> None:
        """An error if two flags set the same: a flag given twice, two aliases, or --x and --no_x.

        A word that starts with -- is a flag here, unless it has a space: argparse takes such a word
        as a value.
        """
        spellings: dict[str, str] = {}
        for word in words:
            flag = word.split("=")[0]
            action = self._option_string_actions.get(flag)
            if action is None:
                continue
            before = spellings.get(action.dest)
            if before == flag and action.nargs in ("+", "*"):
                self.error(f"{flag} is given twice: give all its values after one {flag}")
            if before == flag:
                self.error(f"{flag} is given twice: keep one")
            if before:
                self.error(f"{before} and {flag} are the same setting: keep one")
            spellings[action.dest] = flag

    def known_flags(self) -> dict[str, argparse.Action]:
        """All flags by all their spellings."""
        known = self._option_string_actions.items()
        return {name: action for name, action in known if name.startswith("--")}

    def nearest(self, flag: str) -> str | None:
        """The known flag that an unknown one means: its name here, or else the one most like it."""
        known = self.known_flags()
        ours = "--" + self.our_name(flag.removeprefix("--").replace("-", "_"))
        if ours in known:
            return ours
        return next(iter(difflib.get_close_matches(flag, known, n=1)), None)

    def explain_unknown(self, word: str) -> str:
        """What to give instead of an unknown flag."""
        if not word.startswith("-"):
            return (
                f"{word!r} is not a flag and follows none: "
                "every value follows its --flag (see --help)"
            )

        flag = word.split("=")[0]
        nearest = self.nearest(flag)
        if nearest:
            return f"unknown flag {flag}: did you mean {nearest}? (--help lists all)"
        known = self.known_flags()
        if len(known) <= FEW:
            return f"unknown flag {flag}: choose from {', '.join(known)}"
        return f"unknown flag {flag}: --help lists all flags"


class RaisingParser(Parser):
    """A parser for callers that report errors themselves: they are raised as ValueError."""

    def error(self, message: str) -> None:
        """Raise ValueError with this message."""
        raise ValueError(with_remedy(message))


def line_and_code(error: Exception) -> tuple[str, int]:
    """What an error says, in one line, and the exit code: 2 for bad input, 6 for a disk that is
    full or fails.
    """
    line = " ".join(str(error).split())
    if isinstance(error, ValueError):
        return line, 2
    if isinstance(error, OSError):
        line = (
            f"cannot read or write: {line}: check the free space and the permissions, then run the "
            "same command again"
        )
    return line, 6


def underscored(word: str) -> str:
    """`--a-b=c-d` as `--a_b=c-d`; a word that is not a flag stays as it is, such as a text that
    begins with dashes.
    """
    name, equals, value = word.partition("=")
    if not FLAG.fullmatch(name):
        return word
    return "--" + name.removeprefix("--").replace("-", "_") + equals + value


# What argparse says, and the same with the remedy behind the last ": ".
REMEDIES = {
    r"argument (\S+): invalid choice: (.+) \(choose from (.+)\)": (
        r"\1 \2 is unknown: choose from \3"
    ),
    r"argument (\S+): expected one argument": r"\1 has no value: give one",
    r"argument (\S+): ignored explicit argument (.+)": r"\1 takes no value: drop \2",
    r"argument (\S+): expected at least one argument": r"\1 has no value: give one or more",
    r"argument (\S+): not allowed with argument (\S+)": r"\1 and \2 exclude each other: keep one",
    r"the following arguments are required: (.+)": r"not given: \1: see --help",
    r"one of the arguments (.+) is required": r"one flag is missing: give one of \1",
}


def with_remedy(message: str) -> str:
    """An error of argparse in our form; another message as it is."""
    for pattern, form in REMEDIES.items():
        found = re.fullmatch(pattern, message)
        if found:
            return found.expand(form)
    return message


# ---- values


def spellings(*precisions: str) -> dict[str, str]:
    """{spelling: precision}; each is spelled as here, as in torch, and as torch prints it."""
    in_torch = {PRECISIONS[name]: name for name in precisions}
    printed = {f"torch.{spelling}": name for spelling, name in in_torch.items()}
    return dict(zip(precisions, precisions, strict=True)) | in_torch | printed


def precision(text: str) -> str:
    """The precision of a spelling, for argparse; other text as it is, which `choices` refuses."""
    return spellings(*PRECISIONS).get(text, text)


def integer(text: str) -> int:
    """The integer that `text` is, within 64 bits, as argparse wants it."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer: give one") from None
    if not -(2**63) <= value < 2**63:
        raise argparse.ArgumentTypeError(
            f"a number of {len(text)} digits: give one between -2^63 and 2^63"
        )
    return value


def number(text: str) -> float:
    """The number that `text` is, as argparse wants it."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number: give one") from None
