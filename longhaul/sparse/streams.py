"""How the streams of sparse attention share the threads.

A stream is one document of one row of the batch under one KV head. Streams write to disjoint
memory, so results do not depend on how many run at the same time.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from base.machine import platform

_ONE_CALL = threading.Lock()


class Stream(NamedTuple):
    """Where a stream is in tensors of the batch: indices (row of the batch, sequence, heads)."""

    heads: tuple  # of [B,T,H,...]
    tokens: tuple  # of [B,T,G,...]
    blocks: tuple  # of [B,N,G,...], compressed ones

    @property
    def length(self) -> int:
        """Tokens of the document."""
        _, tokens, _ = self.tokens
        return tokens.stop - tokens.start


def each_stream(
    work: Callable[[Stream], None], streams: list[Stream], device: torch.device
) -> None:
    """work(stream) for every stream.

    On a CPU, streams share the threads, one each: two threads inside each of these small operators
    would cost more than they give. Calls from several threads take turns, because the number of
    threads is the process's.
    """
    streams = platform().parts(streams, size=lambda stream: stream.length)
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
    if torch.amp.is_autocast_available(device.type):
        with torch.autocast(device.type, enabled=False):
            yield
    else:  # meta, on which the memory planner runs
        yield
