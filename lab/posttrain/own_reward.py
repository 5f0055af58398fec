"""A reward of one's own: `--reward FILE.py:FUNCTION` names a function of texts.

    def reward(texts): ...             # texts: the responses to one prompt, without their end
    def reward(texts, prompts): ...    # prompts: the text that each of them answers

It returns a finite number for each text. What goes wrong in it ends the run in one line.
"""

import functools
import inspect
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from footprint.python.users_file import Failed, named_function, told_in_one_line
from longhaul.exits import BAD_INPUT, Halt

Decode = Callable[[Sequence[int]], str]
MOST_LETTERS = 40  # of a text, in an error


def names_function(reward: str) -> bool:
    """Whether a reward is FILE.py:FUNCTION."""
    return ".py:" in reward


@functools.cache  # the file runs once, before memory is allocated
def load(words: str) -> Callable:
    """The function that is named; ValueError if there is none, or not one of texts."""
    function = named_function("--reward", words)
    try:
        inspect.signature(function).bind([], **asked_prompts(function, []))
    except TypeError as error:
        raise ValueError(
            f"--reward {words}: {place(function)} cannot be called with texts ({error}): define "
            "reward(texts) or reward(texts, prompts), with defaults for other parameters"
        ) from None
    return function


def asked_prompts(function: Callable, prompts: list[str]) -> dict[str, list[str]]:
    """The prompts as an argument, if the function has a parameter of this name."""
    named = inspect.signature(function).parameters
    return {"prompts": prompts} if "prompts" in named else {}


def place(function: Callable) -> str:
    """The file and line of a definition."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return "it"
    return f"{code.co_filename}:{code.co_firstlineno}"


class OwnReward:
    """The numbers that the function gives to the responses of a group."""

    def __init__(self, words: str, decode: Decode):
        self.words = words
        self.function = load(words)
        self.decode = decode

    def of_group(self, prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> Tensor:
        """Rewards [G] in float64. Halt for an error of the function, and for what are not as many
        finite numbers.
        """
        texts = [self.decode(response) for response in responses]
        prompts = [self.decode(prompt)] * len(texts)
        try:
            with told_in_one_line():
                found = self.function(texts, **asked_prompts(self.function, prompts))
        except Failed as error:
            raise self._halt(f"{error}: mend the function, and --resume") from None

        numbers = self._numbers(found)
        if len(numbers) != len(texts):
            raise self._wrong(
                f"{len(numbers)} numbers for {len(texts)} texts: return one for each text"
            )
        for text, number in zip(texts, numbers, strict=True):
            if not math.isfinite(number):
                short = text[:MOST_LETTERS]
                raise self._wrong(f"{number} for {short!r}: return a finite number for every text")
        return torch.tensor(numbers, dtype=torch.float64)

    def _numbers(self, found: object) -> list[float]:
        try:
            return [float(number) for number in found]
        except (TypeError, ValueError):
            kind = type(found).__name__
            raise self._wrong(f"a {kind}, which holds no numbers: return a list of them") from None

    def _wrong(self, returned: str) -> Halt:
        return self._halt(f"{place(self.function)} returned {returned}")

    def _halt(self, words: str) -> Halt:
        return Halt(f"--reward {self.words}: {words}", BAD_INPUT)
