"""How token ids are stored, and the tokens of a masked dataset that are read but not learned.

Ids are uint16 or uint32. In a masked dataset the highest bit of each says that the token is no
target of the loss: 0 if it is learned, 1 if it is not. Only this file knows of that bit, so an id
that has left it is an id.
"""

from dataclasses import dataclass

import numpy as np


def token_dtype(vocab_size: int, masked: bool = False) -> str:
    """How ids are stored: as "uint16" if every id fits, else as "uint32"; one bit is not for ids if
    the dataset is `masked`.

    151,936 ids in uint16 would be corrupted without an error.
    """
    spare = 1 if masked else 0
    most = 1 << (32 - spare)
    if not 0 < vocab_size <= most:
        raise ValueError(f"vocab_size is {vocab_size}: allowed are 1 to 2^{32 - spare}")
    return "uint16" if vocab_size <= 1 << (16 - spare) else "uint32"


@dataclass(frozen=True)
class Storage:
    """The type of the stored values, and whether their highest bit is a mark."""

    dtype: np.dtype
    masked: bool = False

    @classmethod
    def of(cls, vocab_size: int, masked: bool = False) -> "Storage":
        """That of a vocabulary."""
        return cls(np.dtype(token_dtype(vocab_size, masked)), masked)

    @property
    def _mark(self) -> np.integer:
        """The highest bit."""
        return self.dtype.type(1 << (8 * self.dtype.itemsize - 1))

    def stored(self, ids: np.ndarray, learned: np.ndarray | None = None) -> np.ndarray:
        """Ids as they are stored; `learned`, bool like `ids`, is all of them by default."""
        values = ids.astype(self.dtype)
        if learned is not None:
            values[~learned] |= self._mark
        return values

    def ids(self, values: np.ndarray) -> np.ndarray:
        """The ids of stored values: a view of them, or a copy if the dataset is masked."""
        return values & ~self._mark if self.masked else values

    def learned(self, values: np.ndarray) -> np.ndarray:
        """Which of the stored values are targets of the loss, bool."""
        if self.masked:
            return values < self._mark
        return np.ones(len(values), dtype=bool)

    def targets(self, values: np.ndarray) -> np.ndarray:
        """The ids of those that are learned."""
        return values[values < self._mark] if self.masked else values
