"""Which parts of a model make it copy: activation patching by symmetric token replacement (Zhang
and Nanda 2024, arXiv 2309.16042).

A clean prompt reads A B ... A, and the model is asked for the next token. In the corrupt prompt
another token C of the prompt takes B's place. Both have the same length, so that activations can be
exchanged position by position. With d = logit of B - logit of C at the last position,

    effect = (d of the patched corrupt prompt - d_corrupt) / (d_clean - d_corrupt)

where patched means: what a layer's attention or MLP adds at some positions is that of the clean
prompt. 1: these positions alone bring the copy back; 0: they do nothing for it. Each d is the mean
over the prompts, and the ratio is that of means.

Letters: B pairs of prompts, T tokens of a prompt, R rows of a forward, C columns of the table, D
model width, V vocabulary.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data.progress import bar
from lab.analysis.activations import (
    NotMeasurable,
    behind,
    hooked,
    replaced,
    require_finite,
    stream,
)
from longhaul.evals.copies import distance_to_copy
from model import Decoder, KVCache

PATCHED = ("attention", "mlp")
LEAST_DIFFERENCE = 0.1  # |d_clean - d_corrupt| in logits; below it a ratio to it is noise
MOST_SPANS = 32  # columns, by default; each costs a forward of each prompt, layer and site
TOP = 8  # largest effects, of which precisions are compared
ENTERING = "entering"  # what the layer before has made
REPLACED = "replaced"  # the column of the tokens that differ

Site = tuple[int, str, str]  # layer, attention or mlp, column


class CannotCopy(NotMeasurable):
    """The model does not tell clean from corrupt prompts, so that there is nothing to patch."""


# ---- pairs of prompts


class Pairs(NamedTuple):
    """Clean and corrupt prompts [B, T] on the host, the answers B and the foils C [B]."""

    clean_BT: Tensor
    corrupt_BT: Tensor
    answer_B: Tensor
    foil_B: Tensor


def copy_pairs(
    texts: Sequence[NDArray],
    length: int,
    count: int,
    seed: int = 0,
) -> Pairs:
    """Pairs of prompts of `length` tokens from the copies in the texts, at most `count`.

    A token B can be asked for if it stands after A, as another B does in the `length` tokens before
    it. Every such B of the prompt is replaced by C, a token of the prompt that never follows A in
    it. ValueError if there is no such place.
    """
    places = [(text, int(place)) for text in texts for place in _places(np.asarray(text), length)]
    draw = np.random.default_rng(seed)
    pairs = []
    for index in draw.permutation(len(places)):
        text, place = places[index]
        pair = _pair(np.asarray(text)[place - length : place + 1], draw)
        if pair is not None:
            pairs.append(pair)
        if len(pairs) == count:
            break

    if not pairs:
        tokens = sum(len(text) for text in texts)
        raise ValueError(
            f"no token of {tokens} can be copied from the {length} before it: give more data, or "
            "longer prompts"
        )
    columns = zip(*pairs, strict=True)
    return Pairs(*(torch.from_numpy(np.stack(column)) for column in columns))


def _places(ids: NDArray, length: int) -> NDArray:
    """Where the token after a prompt can be copied from it."""
    distance = distance_to_copy(ids, 2)
    place = np.arange(len(ids))
    inside = (distance > 0) & (distance + 1 <= length) & (place >= length)
    differs = np.r_[False, ids[1:] != ids[:-1]]  # A A ... A: replacing it would change the question
    return place[inside & differs]


def _pair(ids: NDArray, draw: np.random.Generator) -> tuple[NDArray, ...] | None:
    """Clean prompt, corrupt prompt, answer and foil of a prompt and its next token; None if no
    token of the prompt can be the foil.
    """
    ids = ids.astype(np.int64)
    clean = ids[:-1]
    question, answer = ids[-2:]
    after_question = np.r_[False, clean[:-1] == question]
    taken = [question, *clean[after_question]]  # the answer is among them
    foils = np.setdiff1d(clean, taken)
    if not len(foils):
        return None

    foil = draw.choice(foils)
    corrupt = np.where(after_question & (clean == answer), foil, clean)
    return clean, corrupt, answer, foil


# ---- where the prompts are patched


def spans(length: int, most: int) -> list[slice]:
    """The positions of a prompt, in at most `most` spans: the last position, which is asked, and
    equal parts of those before it.
    """
    before = min(most, length) - 1
    edges = [round(part * (length - 1) / before) for part in range(before + 1)]
    return [*map(slice, edges[:-1], edges[1:]), slice(length - 1, length)]


def span_name(span: slice) -> str:
    """Such as 0-127, or 128 for one position."""
    last = span.stop - 1
    return f"{span.start}-{last}" if last > span.start else f"{last}"


# ---- running


@torch.no_grad()
def logit_differences(
    model: Decoder,
    tokens_RT: Tensor,
    answer_R: Tensor,
    foil_R: Tensor,
    chunk: int = 0,
    cache: KVCache | None = None,
) -> Tensor:
    """Logit of the answer - logit of the foil at the last position, fp32 [R] on the device.

    No other logit is computed. The tokens continue what the cache holds; with `chunk` they pass in
    parts over it. Tokens may also be embeddings [R, T, D].
    """
    device = model.embed.weight.device
    tokens_RT = tokens_RT.to(device)
    for part_Rt in tokens_RT.split(chunk or tokens_RT.shape[1], 1):
        last_RD = model.hidden(part_Rt, cache=cache)[:, -1]

    def difference(hidden_RD: Tensor, weight_VD: Tensor) -> Tensor:
        answers_RD = weight_VD[answer_R.to(device)].float()
        foils_RD = weight_VD[foil_R.to(device)].float()
        return (hidden_RD.float() * (answers_RD - foils_RD)).sum(1)

    return model.lm_head(last_RD, difference)


class Patching:
    """Patches the pairs of prompts, one layer after another.

    rows        prompts of a forward; with `chunk` one
    most_spans  columns of positions; there is one more, for the tokens that differ
    chunk       prompts pass in parts of so many tokens over the KV cache

    ValueError if an activation is not finite, which names its layer; CannotCopy if the model tells
    clean from corrupt prompts by less than LEAST_DIFFERENCE.
    """

    def __init__(
        self,
        model: Decoder,
        pairs: Pairs,
        *,
        rows: int = 8,
        most_spans: int = MOST_SPANS,
        chunk: int = 0,
    ):
        self.model = model
        self.pairs = pairs
        self.rows = 1 if chunk else rows
        self.chunk = chunk
        self.spans = spans(pairs.clean_BT.shape[1], most_spans)
        self.columns = (*map(span_name, self.spans), REPLACED)
        self.clean = self._mean_difference(pairs.clean_BT)
        self.corrupt = self._mean_difference(pairs.corrupt_BT)
        if not math.isfinite(self.clean - self.corrupt):
            self._require_finite()
        check_difference(self.clean, self.corrupt)

    def effects(self, layers: Sequence[int]) -> "Effects":
        """The table of these layers, which rise: what enters a layer is read from where the last
        one began, so that no layer reads the prompts twice.
        """
        B, T = self.pairs.clean_BT.shape
        gains_L2C = torch.zeros(len(layers), len(PATCHED), len(self.columns), dtype=torch.float64)
        what = f"patching in {self.model.config.compute_dtype}"
        with bar(what, B * len(layers)) as progress:
            for part in zip(*(x.split(self.rows) for x in self.pairs), strict=True):
                pairs = Pairs(*part)
                entering = pairs.clean_BT, pairs.corrupt_BT
                for number, (last, layer) in enumerate(itertools.pairwise((0, *layers))):
                    before = behind(self.model, last)
                    clean, corrupt = (self._read(before, x, layer - last) for x in entering)
                    gains_L2C[number] += self._gains(pairs, layer, clean, corrupt)
                    entering = clean[ENTERING], corrupt[ENTERING]
                    progress.update(len(pairs.answer_B))
        values = (gains_L2C / B / (self.clean - self.corrupt)).flatten().tolist()
        return Effects(tuple(layers), self.columns, tuple(values), self.clean, self.corrupt, B, T)

    def _require_finite(self):
        for tokens_BT in (self.pairs.clean_BT, self.pairs.corrupt_BT):
            for tokens_RT in tokens_BT.split(self.rows):
                require_finite(self.model, (tokens_RT, None), self.chunk)

    def _mean_difference(self, tokens_BT: Tensor) -> float:
        prompts = tokens_BT, *self.pairs[2:]
        found = []
        for tokens_RT, *asked in zip(*(x.split(self.rows) for x in prompts), strict=True):
            cache = self._new_cache(self.model, len(tokens_RT))
            found.append(logit_differences(self.model, tokens_RT, *asked, self.chunk, cache))
        return torch.cat(found).double().mean().item()

    def _gains(
        self,
        pairs: Pairs,
        layer: int,
        clean: dict[str, Tensor],
        corrupt: dict[str, Tensor],
    ) -> Tensor:
        """What patching adds to the difference of the corrupt prompts, summed over them: [2, C].

        The layers before this one run once: a patched run begins with what they give, and with the
        first position that is patched. Rows are triples of a site, a column and a prompt.
        """
        rest = behind(self.model, layer)
        whole = self._new_cache(rest, len(pairs.clean_BT))
        entering_BTD = corrupt[ENTERING]
        unpatched_B = logit_differences(rest, entering_BTD, *pairs[2:], self.chunk, whole)

        gains_2C = torch.zeros(len(PATCHED), len(self.columns), dtype=torch.float64)
        differs_2BT = torch.stack([(clean[site] != corrupt[site]).any(2) for site in PATCHED])
        for rows_R3, where_RT, first in self._patched_rows(pairs, differs_2BT.cpu()):
            site_R, column_R, prompt_R = rows_R3.T
            cache = self._before(rest, whole, prompt_R, first)
            asked = pairs.answer_B[prompt_R], pairs.foil_B[prompt_R]
            entering_RtD = entering_BTD[prompt_R, first:]
            with contextlib.ExitStack() as hooks:
                for number, site in enumerate(PATCHED):
                    here_RT = where_RT & (site_R == number)[:, None]
                    function = patch(clean[site][prompt_R, first:], here_RT[:, first:])
                    hooks.enter_context(replaced(self.model, layer, site, function))
                patched_R = logit_differences(rest, entering_RtD, *asked, self.chunk, cache)

            gain_R = (patched_R - unpatched_B[prompt_R]).double().cpu()
            gains_2C.index_put_((site_R, column_R), gain_R, accumulate=True)
        return gains_2C

    def _new_cache(self, model: Decoder, rows: int) -> KVCache | None:
        """A cache for prompts; None for an attention that is read without one."""
        if self.chunk or model.config.attention.name == "standard":
            return model.new_cache(rows, self.pairs.clean_BT.shape[1])
        return None

    def _before(
        self, rest: Decoder, whole: KVCache | None, prompt_R: Tensor, first: int
    ) -> KVCache | None:
        """A cache with what is before the first position that runs."""
        cache = self._new_cache(rest, len(prompt_R))
        if first:
            for layer, corrupt in zip(cache.layers, whole.layers, strict=True):
                layer.append(corrupt.k_BSGK[prompt_R, :first], corrupt.v_BSGK[prompt_R, :first])
        return cache

    def _read(self, model: Decoder, tokens_BT: Tensor, layer: int) -> dict[str, Tensor]:
        """What enters the layer, and what its attention and MLP add to it, [B, T, D] each."""
        parts: dict[str, list[Tensor]] = {name: [] for name in (ENTERING, *PATCHED)}

        def keep(
            _,
            site: str,
            x_BtD: Tensor,
        ) -> None:
            parts[site].append(x_BtD)

        def enter(inputs: tuple, _) -> None:
            parts[ENTERING].append(inputs[0])

        with hooked(model.layers[layer], enter):
            stream(model, tokens_BT, [layer], PATCHED, keep, chunk=self.chunk)
        return {name: torch.cat(parts.pop(name), 1) for name in (ENTERING, *PATCHED)}

    def _patched_rows(
        self, pairs: Pairs, differs_2BT: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Site, column and prompt [R, 3] of the rows of each forward, the positions [R, T] at which
        they are patched, and the first that has to run: rows that are patched early first. Only
        standard attention keeps nothing but keys and values of those before it.

        differs_2BT: where a site's activations differ. What is the same in both prompts is not
        patched, and gains exactly nothing.
        """
        is_replaced_BT = pairs.clean_BT != pairs.corrupt_BT
        where_CBT = is_replaced_BT.repeat(len(self.columns), 1, 1)
        for column, span in enumerate(self.spans):
            where_CBT[column] = False
            where_CBT[column, :, span] = True
        where_2CBT = where_CBT & differs_2BT[:, None]

        rows_N3 = where_2CBT.any(3).nonzero()
        if not len(rows_N3):
            return
        first_N = where_2CBT[*rows_N3.T].int().argmax(1)
        order_N = first_N.argsort(stable=True)
        is_standard = self.model.config.attention.name == "standard"
        for number_R in order_N.split(self.rows):
            rows_R3 = rows_N3[number_R]
            first = int(first_N[number_R[0]]) if is_standard else 0
            yield rows_R3, where_2CBT[*rows_R3.T], first


def patch(clean_BTD: Tensor, where_BT: Tensor) -> Callable[[Tensor], Tensor]:
    """For `replaced`: the clean activation at the given positions of rows that pass whole, or in
    parts one after another.
    """
    where_BT1 = where_BT[..., None].to(clean_BTD.device)
    T = where_BT.shape[1]
    passed = 0

    def function(x_BtD: Tensor) -> Tensor:
        nonlocal passed
        part = slice(passed, passed + x_BtD.shape[1])
        passed = part.stop % T
        return torch.where(where_BT1[:, part], clean_BTD[:, part], x_BtD)

    return function


def check_difference(clean: float, corrupt: float) -> None:
    """CannotCopy if clean and corrupt prompts differ by less than LEAST_DIFFERENCE."""
    if not abs(clean - corrupt) >= LEAST_DIFFERENCE:
        raise CannotCopy(
            f"the logit difference is {clean:.3f} on clean and {corrupt:.3f} on corrupt prompts, "
            f"less than {LEAST_DIFFERENCE} apart, so that circuit scores would be noise: take a "
            "model that has learned to copy, or data with copies that it knows"
        )


# ---- the table


@dataclass(frozen=True)
class Effects:
    """The effects of layer x {attention, mlp} x column."""

    layers: tuple[int, ...]
    columns: tuple[str, ...]
    values: tuple[float, ...]  # [L, 2, C] in that order
    clean: float  # mean logit difference
    corrupt: float
    pairs: int
    length: int  # tokens of a prompt

    @property
    def effect_L2C(self) -> Tensor:
        """The values as a tensor of the host."""
        shape = len(self.layers), len(PATCHED), len(self.columns)
        return torch.tensor(self.values, dtype=torch.float64).view(shape)

    def by_site(self) -> list[tuple[Site, float]]:
        """Each place and its effect."""
        sites = itertools.product(self.layers, PATCHED, self.columns)
        return list(zip(sites, self.values, strict=True))

    def top(self, count: int = TOP) -> list[Site]:
        """The places with the largest absolute effects, the largest first."""
        order = sorted(self.by_site(), key=lambda place: -abs(place[1]))
        return [site for site, _ in order[:count]]

    def record(self) -> dict:
        """The table for JSON."""
        return dataclasses.asdict(self) | {
            "sites": list(PATCHED),
            "top": self.top(),
            "line": self.line(),
        }

    def line(self) -> str:
        """The largest effect in words."""
        layer, site, column = self.top(1)[0]
        value = max(self.values, key=abs)
        where = "the replaced tokens" if column == REPLACED else f"position {column}"
        return (
            f"patching ({self.pairs} pairs of {self.length} tokens): logit difference "
            f"{self.clean:.2f} clean, {self.corrupt:.2f} corrupt; largest effect {value:.2f}: "
            f"{site} of layer {layer} at {where}"
        )
