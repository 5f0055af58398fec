"""What a layer of nn.LSTM takes on a CPU, where oneDNN runs all steps of one direction at once.

oneDNN chooses for the processor what it keeps for the backward, and its scratch memory, and
PyTorch's imitation has neither. So the operators are run here, on zeros. What they take is a
straight line in the number of steps T, but for the rounding of each buffer to whole pages. So long
rows are extended from two shorter ones, from which they differ by whole pages.

B rows, I inputs, H units.
"""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from footprint.kernels.probe import inside_bytes

aten = torch.ops.aten
FORWARD = aten.mkldnn_rnn_layer.default
BACKWARD = aten.mkldnn_rnn_layer_backward.default
LSTM = 2  # of the modes of recurrent layers
MOST_PRODUCTS = 2**31  # multiplications of a layer that is run
PAGE = 2048  # numbers in half precision, to which buffers are rounded
WIDTHS = 16  # rows of a buffer are as they are, or padded to a multiple of it
# operator -> which of its arguments have a row for each step
OF_STEPS = {FORWARD: (0,), BACKWARD: (0, 7, 10)}


def layer(x_TBI: Tensor, *args) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the layer keeps for its backward comes last; in the imitation it has no bytes."""
    output, hy, cy, nothing = FORWARD(x_TBI, *args)
    if not torch.is_grad_enabled():
        return output, hy, cy, nothing
    size = extended(x_TBI, hy.shape[-1], functools.partial(_kept_bytes, x_TBI, hy.shape[-1]))
    return output, hy, cy, nothing.new_empty(size)


def layer_backward(*args) -> tuple[Tensor, ...]:
    """The gradients of the two biases [4H] are two tensors; in the imitation they are one, which
    without biases has another shape on torch 2.12.
    """
    gradients = list(BACKWARD(*args))
    numbers = 4 * args[2].shape[1]
    gradients[3:5] = (gradients[3].new_empty(numbers) for _ in range(2))
    return tuple(gradients)


def layer_bytes(func, args) -> int:
    """Most bytes that the forward or the backward of a layer holds beyond what it returns."""
    x_TBI, _, weight_4HH = args[:3]
    H = weight_4HH.shape[1]

    def inside(T: int) -> int:
        given = list(args)
        for position in OF_STEPS[func]:
            if given[position] is not None:
                given[position] = given[position][:T]
        if func is BACKWARD:
            kept = _kept_bytes(x_TBI, H, T)
            given[-1] = torch.empty(kept, dtype=torch.uint8, device="meta")
        return inside_bytes(func, given)

    return extended(x_TBI, H, inside)


def extended(x_TBI: Tensor, H: int, measured: Callable[[int], int]) -> int:
    """measured(T) of all steps, or the straight line through that of fewer of them."""
    T, B, I = x_TBI.shape
    period = PAGE // math.gcd(PAGE, B * H, B * I, B * WIDTHS)  # steps that fill whole pages
    most = max(2 * period, MOST_PRODUCTS // (4 * H * B * (I + H)))
    if T <= most:
        return measured(T)
    long = most - (most - T) % period
    at_long = measured(long)
    periods = (T - long) // period
    return at_long + periods * (at_long - measured(long - period))


def _kept_bytes(x_TBI: Tensor, H: int, T: int) -> int:
    _, B, I = x_TBI.shape
    return _kept(T, B, I, H, x_TBI.dtype, torch.get_num_threads())


@functools.cache
def _kept(T: int, B: int, I: int, H: int, dtype: torch.dtype, threads: int) -> int:
    """What one direction of a layer keeps."""
    with unset_fake_temporarily(), torch._C.DisableTorchFunction(), torch.enable_grad():
        zeros = functools.partial(torch.zeros, dtype=dtype, device="cpu")
        weights = zeros(4 * H, I), zeros(4 * H, H), zeros(4 * H), zeros(4 * H)
        states = zeros(B, H), zeros(B, H)
        options = False, [], LSTM, H, 1, True, False, False, True
        *_, kept = FORWARD(zeros(T, B, I), *weights, *states, *options)
        return kept.nbytes
