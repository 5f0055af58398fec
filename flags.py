"""Command-line flags as every command of longhaul reads them.

Hyphens and underscores in a flag are interchangeable, flags are never abbreviated, and the error
for an unknown flag suggests the nearest known one. longhaul/cli.py makes flags from a dataclass.
"""

import argparse
import difflib
import sys
from collections.abc import Sequence


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line, which end the program with exit code 2."""

    def __init__(self, **settings):
        settings.setdefault("formatter_class", argparse.ArgumentDefaultsHelpFormatter)
        super().__init__(allow_abbrev=False, **settings)

    def add_argument(self, *names: str, **settings) -> argparse.Action:
        """As in argparse; a flag is known by its name with underscores."""
        names = [underscored(name) for name in names]
        return super().add_argument(*names, **settings)

    def parse_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """As in argparse; `error` is called for a flag that is not known."""
        given = sys.argv[1:] if args is None else args
        words = [underscored(word) for word in given]
        options, unknown = self.parse_known_args(words, namespace)
        if unknown:
            self.error(self._explain_unknown(unknown[0]))
        return options

    def error(self, message: str) -> None:
        """End the program with this message."""
        self.exit(2, f"{self.prog}: error: {message}\n")

    def _explain_unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return (
                f"{word!r} is not a flag and follows none: "
                "every value follows its --flag (see --help)"
            )

        flag = word.split("=")[0]
        known = [name for name in self._option_string_actions if name.startswith("--")]
        nearest = difflib.get_close_matches(flag, known, n=1, cutoff=0.0)[0]
        return f"unknown flag {flag}: did you mean {nearest}? (--help lists all)"


class RaisingParser(Parser):
    """A parser for callers that report errors themselves: they are raised as ValueError."""

    def error(self, message: str) -> None:
        """Raise ValueError with this message."""
        raise ValueError(message)


def underscored(word: str) -> str:
    """`--a-b=c-d` as `--a_b=c-d`; a word that is not a flag stays as it is."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.removeprefix("--").partition("=")
    return "--" + name.replace("-", "_") + equals + value
