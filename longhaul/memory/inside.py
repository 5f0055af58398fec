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
from longhaul.sparse.indexed.operators import indexed_forward
from model import ModelConfig, RotaryCache


def attention_workspace(config: ModelConfig, rows: int, queries: int, keys: int) -> int:
    """Bytes inside the backward of one layer's attention of so many rows; 0 for kernels that are
    not ours, as on a CPU. `queries`: the last ones of the `keys` tokens of a row.
    """
    if config.attention.name == "indexed":
        return _of_indexed_attention(config, rows, queries, keys)
    if config.attention.name == "nsa" and takes_triton(config):
        return _of_the_triton_kernels(config, rows, queries)
    return 0


@functools.lru_cache(maxsize=1024)
def _of_indexed_attention(config: ModelConfig, rows: int, queries: int, keys: int) -> int:
    tracker = Tracker(Workspaces("cuda"), fake=True)
    with FakeTensorMode(allow_non_fake_inputs=True), predicting("cuda", tracker), tracker:
        indexer = config.attention
        query_heads = [(config.num_heads, config.head_dim), (indexer.heads, indexer.head_dim)]
        make = functools.partial(torch.empty, dtype=config.dtype, requires_grad=True)
        q, q_idx = (make(rows, queries, *heads) for heads in query_heads)
        k, v = (make(rows, keys, config.num_kv_heads, config.head_dim) for _ in "kv")
        k_idx = make(rows, keys // indexer.r, indexer.head_dim)

        tracker.begin({})
        numbers = indexer.r, indexer.most_blocks, True, config.kernels
        o, kl, *_ = indexed_forward(q, k, v, q_idx, k_idx, *numbers)
        torch.autograd.backward([o, kl], [torch.empty_like(o), torch.empty_like(kl)])
    return max(size for _, size, _ in tracker.trace.workspaces)


@functools.lru_cache(maxsize=1024)
def _of_the_triton_kernels(config: ModelConfig, rows: int, tokens: int) -> int:
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
