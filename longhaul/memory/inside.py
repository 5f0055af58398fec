"""What the operators of an attention hold on CUDA while its backward runs, besides their inputs and
results: found by running one layer's attention without values.

Kernels that are not our own have no such term here: only the simulation counts them.
"""

import functools

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from footprint.tracker import Tracker
from longhaul.kernels import choose, takes_triton
from longhaul.memory.platforms import predicting
from longhaul.memory.workspace import Workspaces
from model import ModelConfig, RotaryCache


def attention_workspace(config: ModelConfig, rows: int, queries: int, keys: int) -> int:
    """Bytes inside the backward of one layer's attention of so many rows; 0 for kernels that are
    not ours, as on a CPU. `queries`: the last ones of the `keys` tokens of a row.
    """
    is_ours = config.attention.name == "indexed"
    if is_ours or config.attention.name == "nsa" and takes_triton(config):
        return _of_operators(config, rows, queries)
    return 0


@functools.lru_cache(maxsize=1024)
def _of_operators(config: ModelConfig, rows: int, tokens: int) -> int:
    tracker = Tracker(Workspaces("cuda"), fake=True)
    with FakeTensorMode(allow_non_fake_inputs=True), predicting("cuda", tracker), tracker:
        attention = config.attention.layer(config, choose(config))
        for parameter in attention.parameters():
            parameter.data = torch.empty(parameter.shape, dtype=config.dtype)
        x = torch.empty(rows, tokens, config.hidden_size, dtype=config.dtype, requires_grad=True)
        rope = RotaryCache(config)(tokens, x.device)
        layout = attention.rows(None, (rows, tokens), "cpu")

        tracker.begin({})
        attention(x, rope, layout).sum().backward()
    # the backward's is the largest
    return max(size for _, size, _ in tracker.trace.workspaces)
