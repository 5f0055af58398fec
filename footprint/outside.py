"""Memory that a step takes without any operator, so that a tracker of operators cannot see it."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from footprint.tracker import Tracker


@contextlib.contextmanager
def random_states(tracker: Tracker) -> Iterator[None]:
    """The tracker sees the states of random numbers that are saved inside the `with` block.

    Every checkpoint saves one and holds it until it is recomputed (torch/utils/checkpoint.py). It
    is a real tensor even among fake ones: 5,056 bytes of a CPU's memory. Those of a GPU's generator
    are in host memory, too, so a prediction for CUDA does without this.
    """
    get_state = torch.get_rng_state

    def seen() -> Tensor:
        state = get_state()
        tracker.locate()
        tracker.register(state, "torch.get_rng_state")
        return state

    torch.get_rng_state = torch.random.get_rng_state = seen
    try:
        yield
    finally:
        torch.get_rng_state = torch.random.get_rng_state = get_state
