"""What the operators of an attention hold on CUDA while its backward runs, besides their inputs and
results: found by running one layer's attention without values.

Kernels that are not our own have no such term here: only the simulation counts them.
"""

import functools

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from footprint.tracker import Tracker
from longhaul.memory.platforms import predicting
from longhaul.memory.workspace import Workspaces
from model import ModelConfig, RotaryCache, attention_kind, takes_triton


def attention_workspace(config: ModelConfig, rows: int, tokens: int) -> int:
    """Bytes inside the backward of one layer's attention of so many rows; 0 for kernels that are
    not ours, as on a CPU.
    """
    by_triton = config.attention_type == "nsa" and takes_triton(config)
    if not by_triton and config.attention_type != "indexed":
        return 0
    return _of_our_operators(config, rows, tokens)


@functools.lru_cache(maxsize=1024)
def _of_our_operators(config: ModelConfig, rows: int, tokens: int) -> int:
    kind = attention_kind(config)
    tracker = Tracker(Workspaces("cuda"), fake=True)
    with FakeTensorMode(allow_non_fake_inputs=True), predicting("cuda", tracker), tracker:
        attention = kind(config)
        for parameter in attention.parameters():
            parameter.data = torch.empty(parameter.shape, dtype=config.dtype)
        x = torch.empty(rows, tokens, config.hidden_size, dtype=config.dtype, requires_grad=True)
        rope = RotaryCache(config)(tokens, x.device)
        documents = kind.documents(config, None, (rows, tokens), "cpu")

        tracker.begin({})
        with attention.losses.collected() as own_losses:
            y = attention(x, rope, documents)
        (y.sum() + sum(own_losses)).backward()
    # the backward's is the largest
    return max(size for _, size, _ in tracker.trace.workspaces)
