"""Far copies: the tokens of a document that can be copied, but only from far away.

A token is a copy if the n tokens before it, and it after them, stood in the document before. It is
a far copy if the nearest such place is outside the short context. A model that reads far back can
predict far copies; one that does not has to guess them. No model chooses them: the set follows from
the document, n and the short context, so it is the same for every model, run and rank.
Letters: T tokens.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

NGRAM = 8  # shorter n-grams of code, such as indents and brackets, recur by chance


def far_copies(ids: ArrayLike, short: int, ngram: int = NGRAM) -> NDArray[np.bool_]:
    """Whether each token of a document is a far copy, bool [T].

    Token p is one if q < p exists with ids[q - ngram : q + 1] == ids[p - ngram : p + 1], and the
    largest such q is more than `short` before p: then no context of `short` tokens holds it.
    ValueError unless ids is one-dimensional, and short and ngram at least 1.
    """
    if short < 1 or ngram < 1:
        raise ValueError(
            f"a short context of {short} tokens with n-grams of {ngram}: give at least 1 for both"
        )
    return distance_to_copy(ids, ngram + 1) > short


def distance_to_copy(ids: ArrayLike, length: int) -> NDArray[np.int64]:
    """How far before each token the `length` tokens that it ends occurred last, int64 [T]; 0 where
    they are new. In O(T log T log length), and without hashes, which could take different tokens
    for equal ones.
    """
    ids = np.asarray(ids)
    if ids.ndim != 1:
        raise ValueError(f"ids have the shape {ids.shape}: give the tokens of one document")

    distance = np.zeros(len(ids), np.int64)
    if len(ids) <= length:
        return distance

    names = _names(ids, length)
    order = np.argsort(names, kind="stable")  # equal names next to each other, in their order
    same = names[order[1:]] == names[order[:-1]]
    later = order[1:][same]
    earlier = order[:-1][same]
    distance[later + length - 1] = later - earlier
    return distance


def _names(ids: NDArray, length: int) -> NDArray[np.int64]:
    """A number for the `length` tokens from each place, equal for equal tokens only:
    int64 [T - length + 1].

    Names of twice the length are names of pairs, as in the suffix arrays of Manber and Myers (SIAM
    Journal on Computing 22, 1993). The two of a pair may overlap, so that every length is reached.
    """
    names = np.unique(ids, return_inverse=True)[1].astype(np.int64)
    size = 1
    while size < length:
        shift = min(size, length - size)
        pairs = names[:-shift] * (names.max() + 1) + names[shift:]  # below T^2
        names = np.unique(pairs, return_inverse=True)[1]
        size += shift
    return names
