"""The log-likelihood of chosen tokens, and whether each of them is the most likely one.

A scorer is anything with the method `score` of ModelScorer. Measures take a scorer, so that they
can be tested on one whose answers are known. Letters: B rows, T tokens, N = B*T.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from base.machine import rounds
from longhaul import dist
from longhaul.kinds import attention_kind
from longhaul.parallel import apply
from longhaul.vocab import vocab_stats
from longhaul.vocab.loss import linear_cross_entropy
from model import IGNORE, Decoder, OnHost

MustStop = Callable[[], bool]  # whether the run was asked to stop, the same on all ranks


class Item(NamedTuple):
    """Rows of tokens on the host. labels_BT[b, t] is the target of position t, which is the token
    after it; -100 asks nothing. `positions` and `doc_ids` are those of Decoder.forward.
    """

    tokens_BT: Tensor
    labels_BT: Tensor
    positions: Tensor | None = None
    doc_ids: Tensor | None = None


class Scores(NamedTuple):
    """What a model says of the labels of an item, on the host: -log p in nats (float64, 0 where
    nothing is asked), and whether the label is the most likely of all tokens (None unless hits were
    asked for).
    """

    nll_BT: Tensor
    hit_BT: Tensor | None


class Scorer(Protocol):
    """What measures need of a model."""

    def score(self, item: Item, *, hits: bool = False) -> Scores:
        """The scores of an item's labels."""


class ModelScorer:
    """Scores by a decoder, sharded or whole: a forward without gradients through its levers.

    With `chunk`, rows, and the documents of packed rows, pass one after another in parts of so many
    tokens over the KV cache: then activations are those of a part, and what grows with the row is
    the cache. Ranks of a sharded model then need items of the same shape and documents.
    """

    def __init__(
        self,
        model: Decoder,
        device: torch.device | str,
        chunk: int = 0,
    ):
        self.model = model
        self.device = torch.device(device)
        self.chunk = chunk
        if chunk and not attention_kind(model.config).prompt_in_parts:
            raise ValueError(
                f"{model.config.attention.name} attention reads a row at once: score it with "
                "chunk 0"
            )

    def score(self, item: Item, *, hits: bool = False) -> Scores:
        """The scores of an item's labels. All ranks must call it as often, and those that share
        rows with the same item.
        """
        head = self._answers if hits else self._losses
        figures_SN = self.figures(item, head)
        figures_SBT = figures_SN.double().cpu().unflatten(1, item.labels_BT.shape)
        return Scores(figures_SBT[0], figures_SBT[1].bool() if hits else None)

    @torch.no_grad()
    def figures(self, item: Item, head: Callable) -> Tensor:
        """What `head` of Decoder.forward makes of an item's tokens, for callers that ask something
        else than the scores of its labels.
        """
        with apply.eager(self.model):
            found = self._forward(item, head)
        apply.reshard(self.model)
        return found

    def _forward(self, item: Item, head: Callable) -> Tensor:
        tokens_BT = item.tokens_BT.to(self.device)
        labels_BT = item.labels_BT.to(self.device)
        if self.chunk:
            sizes = text_sizes(item)
            return self._in_parts(tokens_BT, labels_BT, sizes, head)

        doc_ids = None if item.doc_ids is None else OnHost(item.doc_ids)
        return self.model(
            tokens_BT, labels_BT, positions=item.positions, doc_ids=doc_ids, head=head
        )

    def _in_parts(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor,
        sizes: list[list[int]],
        head: Callable,
    ) -> Tensor:
        """Figures [S, N] of rows whose texts pass one after another, each over a cache of its own.

        sizes: tokens of each text of each row.
        """
        figures = []
        for tokens_T, labels_T, of_row in zip(tokens_BT, labels_BT, sizes, strict=True):
            texts = zip(tokens_T.split(of_row), labels_T.split(of_row), strict=True)
            figures += [self._over_cache(tokens_t, labels_t, head) for tokens_t, labels_t in texts]
        return torch.cat(figures, dim=1)

    def _over_cache(
        self,
        tokens_T: Tensor,
        labels_T: Tensor,
        head: Callable,
    ) -> Tensor:
        """Figures [S, T] of a text that passes in parts."""
        T = len(tokens_T)
        cache = self.model.new_cache(1, T)
        self.model.rotary(T, tokens_T.device)  # at once: doubled on the way, two would exist

        figures_ST = None
        for start in rounds(range(0, T, self.chunk)):
            for layer in cache.layers:
                layer.length = start  # as it is, unless a planner has left out parts
            part = slice(start, start + self.chunk)
            tokens_1t, labels_1t = tokens_T[None, part], labels_T[None, part]
            figures_St = self.model(tokens_1t, labels_1t, cache=cache, head=head)
            if figures_ST is None:
                figures_ST = figures_St.new_empty(len(figures_St), T)
            figures_ST[:, part] = figures_St
        return figures_ST

    # ---- what the output weight is used for

    def _losses(
        self,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
    ) -> Tensor:
        """-log p [1, N] of the labels, 0 without one."""
        kernels = self.model.config.kernels
        nll_N = linear_cross_entropy(
            hidden_ND, weight_VD, labels_N, reduction="none", kernels=kernels
        )
        return nll_N[None]

    def _answers(
        self,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
    ) -> Tensor:
        """`answers` [2, N] of the labels, 0 without one."""
        asked_n = (labels_N != IGNORE).nonzero()[:, 0]
        figures_2n = answers(hidden_ND[asked_n], weight_VD, labels_N[asked_n])
        figures_2N = figures_2n.new_zeros(2, len(labels_N))
        figures_2N[:, asked_n] = figures_2n
        return figures_2N


def answers(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
) -> Tensor:
    """-log p of the labels, and 1 where the label is the most likely token: [2, N]."""
    stats = vocab_stats(hidden_ND, weight_VD, labels_N)
    hit_N = (stats.argmax == labels_N).to(stats.logprob.dtype)
    return torch.stack([-stats.logprob, hit_N])


def text_sizes(item: Item) -> list[list[int]]:
    """Tokens of each text of each row: of the documents of packed rows, else of whole rows."""
    B, T = item.labels_BT.shape
    if item.doc_ids is None:
        return [[T]] * B
    sizes = []
    for doc_ids_T in np.asarray(item.doc_ids):
        starts = np.flatnonzero(np.diff(doc_ids_T)) + 1
        sizes.append(np.diff(starts, prepend=0, append=T).tolist())
    return sizes


def score_all(
    scorer: Scorer,
    items: Sequence[Item],
    *,
    hits: bool = False,
    world: dist.World | None = None,
    ranks_per_row: int = 1,
    must_stop: MustStop | None = None,
) -> list[Scores] | None:
    """The scores of all items, on all ranks; None if `must_stop()` gave it up.

    Ranks that do not share rows take the items in turn: `items` may make each of them when it is
    asked for. All ranks run as many forwards, because a sharded model needs that. Rows that do not
    divide over the ranks that share them are padded at their end.
    """
    world = world or dist.World()
    readers = world.size // ranks_per_row
    reader = world.rank // ranks_per_row

    own: dict[int, Scores] = {}
    for first in range(0, len(items), readers):
        if must_stop is not None and must_stop():
            return None
        index = min(first + reader, len(items) - 1)
        own[index] = _score_divisible(scorer, items[index], hits, 2 * ranks_per_row)

    found = own
    if readers > 1:
        of_ranks: list[dict[int, Scores]] = [{}] * world.size
        torch.distributed.all_gather_object(of_ranks, own)
        found = {index: scores for of_rank in of_ranks for index, scores in of_rank.items()}
    return [found[index] for index in range(len(items))]


def _score_divisible(
    scorer: Scorer,
    item: Item,
    hits: bool,
    parts: int,
) -> Scores:
    """The scores of an item, whose rows are padded if ranks could not cut them into `parts`."""
    T = item.tokens_BT.shape[1]
    missing = -T % parts if parts > 2 else 0
    if not missing:
        return scorer.score(item, hits=hits)

    # what is read at the end changes no score before it
    padded = Item(*(None if x is None else _longer(x, missing) for x in item))
    padded.labels_BT[:, T:] = IGNORE
    scores = scorer.score(padded, hits=hits)
    return Scores(*(_without_padding(x, T) for x in scores))


def _without_padding(x: Tensor | None, T: int) -> Tensor | None:
    """The first T columns; figures of the labels alone have no padding, because it has no label."""
    return x if x is None or x.ndim == 1 else x[:, :T]


def _longer(x: Tensor, missing: int) -> Tensor:
    """The last column of a tensor repeated, as a copy."""
    last = x[..., -1:].expand(*x.shape[:-1], missing)
    return torch.cat([x, last], dim=-1)
