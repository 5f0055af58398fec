"""A compiled layer is one graph on the oldest torch that longhaul supports: where a graph breaks,
most of the layer runs in PyTorch's own operators.
"""

import pytest
import torch

from longhaul.kernels import choose
from longhaul.kinds import KINDS
from model import Block, ModelConfig, RotaryCache, document_boundaries

pytestmark = pytest.mark.slow

T = 256


@pytest.mark.parametrize("kind, documents", [("standard", 1), ("standard", 2), ("nsa", 2)])
def test_a_layer_compiles_to_one_graph(kind, documents):
    config = ModelConfig.preset("tiny", attention=KINDS[kind].config(), compute_dtype="bfloat16")
    block = Block(config, choose(config)).bfloat16()
    x = torch.randn(1, T, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    rope = RotaryCache(config)(T, x.device)
    doc_ids = torch.arange(T)[None] * documents // T
    bounds = document_boundaries(doc_ids) if documents > 1 else None
    layout = block.attention.rows(bounds, (1, T), "cpu")

    explained = torch._dynamo.explain(block)(x, rope, layout)
    assert explained.graph_count == 1, explained.break_reasons
