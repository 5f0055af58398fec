"""Autograd's engine in Python: the one in C++ asks the driver for streams, and there is none.

It runs the same nodes in the same order, later ones first, on this thread.
"""

import heapq
import itertools
from collections import defaultdict

import torch
from torch.autograd.graph import get_gradient_edge

running = []  # the backwards under way, of which one may run inside another
task_ids = itertools.count()
ACCUMULATE = "torch::autograd::AccumulateGrad"


def run_backward(
    outputs,
    gradients,
    retain_graph,
    create_graph,
    inputs=(),
    allow_unreachable=False,
    accumulate_grad=True,
):
    """Takes the place of torch.autograd's `_engine_run_backward`."""
    running.append(next(task_ids))
    try:
        return _run(outputs, gradients, inputs, accumulate_grad)
    finally:
        running.pop()


def current_graph_task_id() -> int:
    """Takes the place of torch._C._current_graph_task_id, by which a checkpoint knows that its
    tensors are computed already.
    """
    return running[-1] if running else -1


def _run(outputs, gradients, inputs, accumulate_grad):
    buffers = defaultdict(dict)  # node -> number of its input -> gradient
    for output, gradient in zip(outputs, gradients):
        node, number = get_gradient_edge(output)[:2]
        _add(buffers[node], number, gradient)

    captured = {}
    wanted = [tuple(get_gradient_edge(x)[:2]) for x in inputs]
    with torch.no_grad():
        for node in _in_order(list(buffers)):
            received = buffers.pop(node, {})
            for edge in wanted:
                if edge[0] is node and edge[1] in received:
                    captured[edge] = received[edge[1]]
            if node.name() == ACCUMULATE:
                if accumulate_grad and not inputs and 0 in received:
                    _accumulate(node.variable, received.pop(0))
                continue
            if not received:
                continue
            _pass_on(node, received, buffers)
    return tuple(captured.get(edge) for edge in wanted)


def set_materialize_grads(ctx, value: bool) -> None:
    """Takes the place of FunctionCtx.set_materialize_grads, whose answer only C++ can read."""
    ctx.materialize_grads = value
    ctx.zeros_for_none = value


def _in_order(roots: list) -> list:
    """Every node that can be reached, each after all that lead to it."""
    waiting_for = defaultdict(int)
    seen = set(roots)
    stack = list(roots)
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is None:
                continue
            waiting_for[node] += 1
            if node not in seen:
                seen.add(node)
                stack.append(node)

    counter = itertools.count()
    ready = []

    def push(node):
        is_leaf = node.name() == ACCUMULATE
        priority = -(2**63) if is_leaf else -node._sequence_nr()
        heapq.heappush(ready, (priority, next(counter), node))

    for node in roots:
        if not waiting_for[node]:
            push(node)
    order = []
    while ready:
        node = heapq.heappop(ready)[2]
        order.append(node)
        for child, _ in node.next_functions:
            if child is not None:
                waiting_for[child] -= 1
                if not waiting_for[child]:
                    push(child)
    return order


def _pass_on(node, received: dict, buffers: dict) -> None:
    """Run a node and add its results to what the next ones receive."""
    is_python = hasattr(node, "apply")
    arguments = []
    for number, meta in enumerate(node._input_metadata):
        gradient = received.pop(number, None)
        if gradient is None and is_python and getattr(node, "zeros_for_none", True):
            gradient = torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device)
        arguments.append(gradient)

    results = node.apply(*arguments) if is_python else node(*arguments)
    arguments.clear()
    results = list(results) if isinstance(results, tuple) else [results]
    for (child, number), result in zip(node.next_functions, results):
        if child is not None and result is not None:
            # what was broadcast is summed, as the engine does for every node
            result = result.sum_to_size(child._input_metadata[number].shape)
            _add(buffers[child], number, result)


def _add(buffer: dict, number: int, gradient) -> None:
    buffer[number] = gradient if number not in buffer else buffer[number] + gradient


def _accumulate(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient.detach()
    else:
        parameter.grad += gradient
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        hook(parameter)
