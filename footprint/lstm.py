"""What a layer of nn.LSTM takes on a CPU, where oneDNN runs it.

PyTorch's imitation leaves out what the layer keeps for its backward, and oneDNN chooses that and
its scratch memory for the processor. So a layer is run here once, on zeros. All of it is a straight
line in the number of steps T but for the rounding of each buffer to pages of 4096 bytes: long rows
are extended from shorter ones.

B rows, I inputs, H units.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from footprint.measure import peak_bytes

aten = torch.ops.aten
LSTM = 2  # of the modes of recurrent layers
MOST_PRODUCTS = 2**31  # multiplications of a layer that is run


class Taken(NamedTuple):
    """Bytes: kept for the backward, and held inside each of the two beyond what they return."""

    kept: int
    forward: int
    backward: int


def taken(x_TBI: Tensor, hidden: int) -> Taken:
    """What a layer of H = `hidden` units takes for this input. Nothing is kept without autograd."""
    T, B, inputs = x_TBI.shape
    shortened = min(T, max(2, MOST_PRODUCTS // (4 * hidden * B * (inputs + hidden))))
    layer = B, inputs, hidden, x_TBI.dtype, torch.is_grad_enabled(), torch.get_num_threads()
    found = _run(shortened, *layer)
    if shortened == T:
        return found

    half = shortened // 2
    steps = (T - shortened) / (shortened - half)
    pairs = zip(found, _run(half, *layer), strict=True)
    return Taken(*(round(long + steps * (long - short)) for long, short in pairs))


@functools.cache
def _run(
    T: int, B: int, inputs: int, hidden: int, dtype: torch.dtype, keeps: bool, threads: int
) -> Taken:
    with unset_fake_temporarily(), torch._C.DisableTorchFunction(), torch.set_grad_enabled(keeps):
        zeros = functools.partial(torch.zeros, dtype=dtype, device="cpu")
        x = zeros(T, B, inputs)
        states = zeros(B, hidden), zeros(B, hidden)
        weights = zeros(4 * hidden, inputs), zeros(4 * hidden, hidden)
        biases = zeros(4 * hidden), zeros(4 * hidden)
        given = x, *weights, *biases, *states
        forward = functools.partial(
            aten.mkldnn_rnn_layer, *given, False, [], LSTM, hidden, 1, True, False, False, True
        )
        results, inside = _measured(forward)
        if not keeps:
            return Taken(0, inside, 0)

        output, hy, cy, kept = results
        backward = functools.partial(
            aten.mkldnn_rnn_layer_backward, *given, output, hy, cy, torch.zeros_like(output)
        )
        backward = functools.partial(
            backward, None, None, False, LSTM, hidden, 1, True, True, False, [], False, kept
        )
        return Taken(kept.nbytes, inside, _measured(backward)[1])


def _measured(function) -> tuple[list[Tensor], int]:
    """What a function returns, and the bytes that it holds beyond that."""
    function()  # oneDNN prepares itself on the first call
    peak = peak_bytes(function, torch.device("cpu"))
    results = function()
    distinct = {result.data_ptr(): result.nbytes for result in results if result is not None}
    return results, peak - sum(distinct.values())
