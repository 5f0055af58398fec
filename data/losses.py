"""What of a text its ids do not give back, in characters.

Byte-level tokenizers, and those that are trained here, lose nothing by their structure. The texts
of all others are decoded again, every one of them, and compared with what comes back. Texts are
compared as their normal form C, because Unicode calls two spellings of that form the same text:
what only became it is counted apart.

Characters are counted by their kind: "Aa" that comes back as "aa" has lost an A and gained an a. A
lost space and one that decoding inserts elsewhere in the same text are not told from each other.
"""

import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from data.hugging_face import BYTE_LEVEL

MOST_LOST = 0.01  # of the characters of a corpus: no newline of a text in lines may be lost
REMEDY = f"{BYTE_LEVEL}, or leave it out to train one that loses nothing"


class Loss(NamedTuple):
    """The characters of a text that do not come back, those that come back though they were not in
    it, and those that come back in another normal form; and the first one that is lost.
    """

    lost: int = 0
    added: int = 0
    normalised: int = 0
    first: str = ""


NONE = Loss()


def loss_of(text: str, back: str) -> Loss:
    """What is lost of a text that comes back as `back`."""
    if text == back:
        return NONE
    canonical = unicodedata.normalize("NFC", text)
    before = Counter(canonical)
    after = Counter(unicodedata.normalize("NFC", back))
    gone = before - after
    new = after - before
    lost = gone.total()
    changed = Counter(text) - Counter(back)
    return Loss(
        lost,
        added=new.total(),
        normalised=max(0, changed.total() - lost),
        first=next((one for one in canonical if one in gone), ""),
    )


def joined(losses: Iterable[Loss]) -> Loss:
    """The loss of a document in parts."""
    whole = NONE
    for loss in losses:
        whole = Loss(
            whole.lost + loss.lost,
            added=whole.added + loss.added,
            normalised=whole.normalised + loss.normalised,
            first=whole.first or loss.first,
        )
    return whole


@dataclass
class Losses:
    """The losses of the documents so far. `emptied` of them had text and have no ids."""

    characters: int = 0
    lost: int = 0
    added: int = 0
    normalised: int = 0
    emptied: int = 0
    first: str = ""  # where the first one is lost, or else changed

    def add(self, name: str, num_chars: int, loss: Loss, is_empty: bool) -> None:
        """Count a document."""
        is_first_lost = loss.lost and not self.lost
        if is_first_lost or (loss != NONE and not self.first):
            self.first = f"{name} ({_spelled(loss.first)})" if loss.first else name
        self.characters += num_chars
        self.lost += loss.lost
        self.added += loss.added
        self.normalised += loss.normalised
        self.emptied += is_empty

    def require_few(self, num_chars: int) -> None:
        """Raise ValueError if more than MOST_LOST of the `num_chars` of all documents are lost."""
        if self.lost > MOST_LOST * num_chars:
            raise ValueError(
                f"the tokenizer does not give back {self.lost:,} of the first "
                f"{self.characters:,} characters, and at most {MOST_LOST:.0%} of all may be lost; "
                f"the first is at {self.first}: {REMEDY}"
            )

    def lines(self) -> list[str]:
        """What is to be said, in lines."""
        found = {
            "do not come back from their ids": self.lost,
            "come back from the ids and were not in the text": self.added,
            "come back in another normal form of Unicode": self.normalised,
        }
        lines = []
        for words, count in found.items():
            if count:
                lines.append(f"{count:,} characters {words}")
        if lines:
            lines[0] += f", of {self.characters:,}; the first change is at {self.first}"
        if self.emptied:
            lines.append(f"left out: {self.emptied:,} documents whose text has no ids")
        return [f"  tokenizer: {line}" for line in lines]


def _spelled(character: str) -> str:
    return f"U+{ord(character):04X} {character!r}"


class Outspoken:
    """A tokenizer that says on standard error, once, that it has lost a part of a text."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self._has_said = False

    def __getattr__(self, name: str):
        return getattr(self._tokenizer, name)

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        ids = self._tokenizer.encode(text)
        back = self._tokenizer.back(text, ids)
        loss = loss_of(text, back)
        if loss.lost and not self._has_said:
            self._has_said = True
            print(
                f"warning: the tokenizer loses {loss.lost:,} of the {len(text):,} characters of a "
                f"text that the model is given, the first {_spelled(loss.first)}",
                file=sys.stderr,
            )
        return ids
