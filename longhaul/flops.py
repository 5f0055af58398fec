"""Floating-point operations of a training step, as the plan and MFU count them. Imports model.py of
ours.
"""

from torch import Tensor

from model import ModelConfig, attention_kind


def keys_met(config: ModelConfig, positions: Tensor) -> Tensor:
    """Keys that a query reads, by its position in its document: all up to its own, or the sum over
    the branches of NSA.
    """
    return attention_kind(config).keys_met(config, positions)


def train_flops(config: ModelConfig, tokens: int, pairs: float) -> float:
    """Operations of one forward and backward pass, recomputation excluded.

    6 per matrix parameter and token, 12*H*K per layer and (query, key) pair (2 products of 2K,
    three passes), the pairs being the sum of `keys_met`: L(L+1)/2 for a document of L tokens in
    standard attention. Source: Narayanan et al. 2021, with the causal half counted exactly.
    """
    layer = attention_kind(config).products(config) + 3 * config.hidden_size * config.ffn_size
    head = config.vocab_size * config.hidden_size  # looking up an embedding is no product
    matrices = config.num_layers * layer + head
    return (
        6.0 * matrices * tokens
        + 12.0 * config.num_layers * config.num_heads * config.head_dim * pairs
    )
