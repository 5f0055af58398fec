"""How the operators' bodies run: on which device, over which tiles, over which streams.

A real run uses `Platform` as it is. The memory planner runs the bodies on tensors without values,
so it passes a platform of its own to `running_on`. model.py has the same seam for the rest of the
model.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

_ONE_CALL = threading.Lock()


class Platform:
    """What the machine decides."""

    def device(self, x: Tensor) -> torch.device:
        """The device on which x is computed."""
        return x.device

    def tiles(self, tiles: Sequence) -> Sequence:
        """The tiles that a loop visits, of those that do the same work: all of them."""
        return tiles

    def each_stream(self, work: Callable, streams: list, device: torch.device) -> None:
        """work(stream) for every stream.

        On a CPU, streams share the threads, one each: they write to disjoint places, so results do
        not depend on it, while two threads inside each of these small operators cost more than they
        give. Calls from several threads take turns: the number of threads is the process's.
        """
        inference = torch.is_inference_mode_enabled()

        def without_gradients(stream):  # a new thread does not know what is switched off here
            with (
                torch.inference_mode(inference),
                torch.no_grad(),
                torch.autocast(device.type, enabled=False),
            ):
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


_platforms = [Platform()]


def platform() -> Platform:
    """The platform that the bodies run on now."""
    return _platforms[-1]


@contextlib.contextmanager
def running_on(other: Platform) -> Iterator[None]:
    """Bodies that are called inside the `with` block run on the `other` platform."""
    _platforms.append(other)
    try:
        yield
    finally:
        _platforms.pop()
