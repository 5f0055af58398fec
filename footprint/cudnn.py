"""Recurrent layers as CUDA runs them: all steps of all layers in one kernel of cuDNN
(aten/native/RNN.cpp and aten/native/cudnn/RNN.cpp), instead of the operators of each step.

The weights lie in one buffer (flatten_parameters), and so do their gradients. What cuDNN reserves
for the backward, and its workspaces, only cuDNN knows: they are left out, and reported as such.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

aten = torch.ops.aten
MODES = {torch.rnn_relu: 0, torch.rnn_tanh: 1, torch.lstm: 2, torch.gru: 3}


def recurrent(function: Callable) -> Callable:
    """The rule for one of MODES, by the arguments of that function."""

    def run(x: Tensor, states: Tensor | Sequence[Tensor], *args):
        if isinstance(args[0], Tensor):  # packed rows: the arguments are others
            return function(x, states, *args)
        hx, cx = (states, None) if isinstance(states, Tensor) else states
        weights, biased, layers, dropout, training, both_ways, batch_first = args
        hidden = (hx if cx is None else cx).shape[-1]
        projected = hx.shape[-1] if hx.shape[-1] != hidden else 0
        stride = len(weights) // (layers * (2 if both_ways else 1))
        found = aten._cudnn_rnn(
            x,
            weights,
            stride,
            None,
            hx,
            cx,
            MODES[function],
            hidden,
            projected,
            layers,
            batch_first,
            dropout,
            training,
            both_ways,
            [],
            None,
        )
        return found[:2] if cx is None else found[:3]

    return run


def forward(x: Tensor, weights, stride: int, buffer, hx: Tensor, cx: Tensor | None, *args):
    """Results, last states, and nothing reserved; the buffer of the weights is theirs."""
    batch_first, both_ways = args[4], args[7]
    width = hx.shape[-1] * (2 if both_ways else 1)
    results = x.new_empty(*_steps_first(x, batch_first).shape[:2], width)
    if batch_first:
        results = results.transpose(0, 1)
    cy = x.new_empty(0) if cx is None else torch.empty_like(cx)
    reserve = x.new_empty(0, dtype=torch.uint8)
    return results, torch.empty_like(hx), cy, reserve, x.new_empty(0)


def backward(x: Tensor, weights, stride: int, buffer, hx: Tensor, cx: Tensor | None, *args):
    """Gradients of the input, of the states, and of the weights, which are parts of one buffer."""
    batch_first = args[8]
    dx = torch.empty_like(_steps_first(x, batch_first), memory_format=torch.contiguous_format)
    if batch_first:
        dx = dx.transpose(0, 1)
    wanted = args[-1]
    dweights = []
    if wanted[3]:
        sizes = [weight.numel() for weight in weights]
        parts = x.new_zeros(sum(sizes)).split(sizes)
        dweights = [part.view(like.shape) for part, like in zip(parts, weights, strict=True)]
    return (
        dx,
        torch.empty_like(hx),
        x.new_empty(0) if cx is None else torch.empty_like(cx),
        dweights,
    )


def forward_copies(threads: int, x: Tensor, weights, stride, buffer, hx, cx, *args) -> int:
    """Bytes held inside the forward: the input with its steps first."""
    return _copied(x, args[4])


def backward_copies(threads: int, x: Tensor, weights, stride, buffer, hx, cx, *args) -> int:
    """Bytes held inside the backward: first copies of the input and of the result's gradient (zeros
    if there is none), then, next to the gradients of the weights, that of the input.
    """
    output, do = args[:2]
    first = _copied(x, args[8]) + (output.nbytes if do is None else _copied(do, args[8]))
    gradients = sum(weight.nbytes for weight in weights)
    return max(first - gradients, _copied(x, args[8]))


def _steps_first(x: Tensor, batch_first: bool) -> Tensor:
    return x.transpose(0, 1) if batch_first else x


def _copied(x: Tensor, batch_first: bool) -> int:
    return 0 if _steps_first(x, batch_first).is_contiguous() else x.nbytes
