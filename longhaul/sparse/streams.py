"""The streams of sparse attention, and how they share the threads.

A stream is one document of one row of the batch under one KV head. Streams write to disjoint
memory, so results do not depend on how many run at the same time.

Letters: B rows of the batch, T queries, S keys, H query heads, G KV heads, M = H/G, K head dim.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from base.machine import rounds

_ONE_CALL = threading.Lock()


class Stream(NamedTuple):
    """Where a stream is in tensors of the batch: indices (row of the batch, sequence, heads)."""

    heads: tuple  # of [B,T,H,...]
    tokens: tuple  # of [B,T,G,...]
    keys: tuple  # of [B,S,G,...]

    @property
    def length(self) -> int:
        """Tokens of the document."""
        _, tokens, _ = self.tokens
        return tokens.stop - tokens.start


def _cut_streams(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    documents: list[tuple[slice, slice]],
) -> list[Stream]:
    """All streams of a call."""
    B, _, H, _ = q_BTHK.shape
    G = k_BSGK.shape[2]
    M = H // G
    streams = []
    for b in range(B):
        for queries, keys in documents:
            for g in range(G):
                heads = slice(g * M, g * M + M)
                streams.append(Stream((b, queries, heads), (b, queries, g), (b, keys, g)))
    return streams


def starts(first: int, stop: int, size: int) -> list[int]:
    """Where parts of `size` of the queries first..stop-1 begin.

    The last of the whole parts has the most keys, and its buffers replace those of the one before;
    what is left behind it may have fewer logits.
    """
    found = range(first, stop, size)
    whole = max(0, stop - first) // size
    return [*rounds(found[:whole], grow=True), *found[whole:]]


def each_stream(
    work: Callable[[Stream], None],
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    documents: list[tuple[slice, slice]],
) -> None:
    """work(stream) for every stream of a call, in whose rows each document has (queries, keys).

    On a CPU, streams share the threads, one each: two threads inside each of these small operators
    would cost more than they give. Calls from several threads take turns, because the number of
    threads is the process's.
    """
    device = q_BTHK.device
    streams = _cut_streams(q_BTHK, k_BSGK, documents)
    streams = rounds(streams)
    inference = torch.is_inference_mode_enabled()

    def without_gradients(stream: Stream) -> None:
        # a new thread does not know what is switched off here
        with torch.inference_mode(inference), torch.no_grad(), _without_autocast(device):
            work(stream)

    with _ONE_CALL:
        threads = torch.get_num_threads()
        if device.type != "cpu" or threads == 1 or not streams:
            for stream in streams:
                without_gradients(stream)
            return

        torch.set_num_threads(1)  # threads that start now take it over
        try:
            with ThreadPoolExecutor(min(threads, len(streams))) as pool:
                list(pool.map(without_gradients, streams))
        finally:
            torch.set_num_threads(threads)


@contextlib.contextmanager
def _without_autocast(device: torch.device) -> Iterator[None]:
    with torch.autocast(device.type, enabled=False):
        yield
