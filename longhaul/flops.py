"""Floating-point operations of a training step, as the plan and the MFU count them."""

from torch import Tensor

from model import ModelConfig, attention_kind


def keys_read(config: ModelConfig, positions: Tensor) -> Tensor:
    """Keys that a query reads, by its position in its document.

    Standard attention reads all up to its own; NSA reads those of its three branches.
    """
    return attention_kind(config).keys_read(config, positions)


def train_flops(config: ModelConfig, tokens: int, pairs: float) -> float:
    """Operations of one forward and backward pass, without recomputation.

    6 per matrix parameter and token, and 12*H*K per layer and (query, key) pair: two products of 2K
    operations in each of three passes. `pairs` is the sum of `keys_read`, which is L(L+1)/2 for a
    document of L tokens in standard attention. Source: Narayanan et al. 2021, with the causal half
    counted exactly.
    """
    mlp = 3 * config.hidden_size * config.ffn_size
    layer = attention_kind(config).products(config) + mlp
    head = config.vocab_size * config.hidden_size  # looking up an embedding multiplies nothing
    matrices = config.num_layers * layer + head

    products = 6.0 * matrices * tokens
    attention = 12.0 * config.num_layers * config.num_heads * config.head_dim * pairs
    return products + attention
