"""The rows that an analysis reads: the documents of a split in a seeded order, one after another,
cut into rows without padding. Letters: B rows, T tokens of a row.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.dataset import Split


class Rows(NamedTuple):
    """Rows of tokens on the host; doc_ids change where a document begins."""

    tokens_BT: Tensor
    doc_ids_BT: Tensor


class Samples:
    """`count` rows of `context_length` tokens, read when they are asked for.

    ValueError if the split has fewer.
    """

    def __init__(self, split: Split, context_length: int, count: int, seed: int = 0):
        self.split = split
        self.context_length = context_length
        self.count = count
        self._order = np.random.default_rng(seed).permutation(split.num_documents)
        self._ends = np.cumsum(split.lengths[self._order])
        self._check(int(self._ends[-1]) // context_length)

    def _check(self, available: int) -> None:
        if not available:
            raise ValueError(
                f"the {self.split.name} split has {self.split.num_tokens:,} tokens, fewer than a "
                f"row of --context_length {self.context_length}: give a shorter one, or another "
                "--split"
            )
        if self.count > available:
            raise ValueError(
                f"--num_samples {self.count} is out of range: the {self.split.name} split has "
                f"{available} rows of {self.context_length} tokens: give 1 to {available}"
            )

    def __len__(self) -> int:
        return self.count

    @property
    def longest(self) -> int:
        """Tokens of the longest document of a row, or part of one."""
        tokens = self.count * self.context_length
        of_rows = np.arange(0, tokens + 1, self.context_length)
        of_documents = self._ends[self._ends < tokens]
        return int(np.diff(np.union1d(of_rows, of_documents)).max())

    def rows(self, first: int, last: int) -> Rows:
        """Rows first .. last - 1."""
        pairs = [self._row(index) for index in range(first, last)]
        tokens_BT = np.stack([tokens_T for tokens_T, _ in pairs])
        doc_ids_BT = np.stack([doc_ids_T for _, doc_ids_T in pairs])
        return Rows(torch.from_numpy(tokens_BT), torch.from_numpy(doc_ids_BT))

    def texts(self, longer_than: int, most: int) -> list[np.ndarray]:
        """Documents of more than so many tokens, in the same order, until there are `most` tokens
        of them; the last one may be cut.
        """
        found = []
        left = most
        for document in self._order[self.split.lengths[self._order] > longer_than]:
            if left <= longer_than:
                break
            found.append(self.split.read(document, 0, left))
            left -= len(found[-1])
        return found

    def _row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and documents of a row, int64 [T] both."""
        begin = index * self.context_length
        end = begin + self.context_length
        tokens = []
        places = []
        while begin < end:
            place = int(np.searchsorted(self._ends, begin, side="right"))
            document = int(self._order[place])
            start = begin - int(self._ends[place] - self.split.lengths[document])
            ids = self.split.read(document, start, end - begin)
            tokens.append(ids.astype(np.int64))
            places.append(np.full(len(ids), place))
            begin += len(ids)
        return np.concatenate(tokens), np.concatenate(places)
