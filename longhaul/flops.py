"""Floating-point operations of a training step, as the plan and MFU count them. Imports model.py of
ours.
"""

from torch import Tensor

from model import ModelConfig


def keys_met(config: ModelConfig, positions: Tensor) -> Tensor:
    """Keys that a query meets, by its position in its document: all up to its own, or the sum over
    the branches of NSA.
    """
    past, nsa = positions + 1, config.nsa
    if config.attention_type == "standard":
        return past
    selected = (nsa.sel_count - 1) * nsa.sel_block + positions % nsa.sel_block + 1
    return nsa.compressed_blocks(past) + past.minimum(selected) + past.clamp(max=nsa.window)


def train_flops(config: ModelConfig, tokens: int, pairs: float) -> float:
    """Operations of one forward and backward pass, recomputation excluded.

    6 per matrix parameter and token, 12*H*K per layer and (query, key) pair (2 products of 2K,
    three passes), the pairs being the sum of `keys_met`: L(L+1)/2 for a document of L tokens in
    standard attention. Source: Narayanan et al. 2021, with the causal half counted exactly. A
    compression matrix of NSA works once per stride and KV head.
    """
    norms = config.num_layers * (2 * config.hidden_size + 2 * config.head_dim) + config.hidden_size
    # an untied embedding is no product
    lookup = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    matrices = config.num_params() - norms - lookup
    if config.attention_type == "nsa":
        _, compression, vectors = config.sparse_params()
        matrices += config.num_layers * (
            compression * (config.num_kv_heads / config.nsa.cmp_stride - 1) - vectors
        )
    return (
        6.0 * matrices * tokens
        + 12.0 * config.num_layers * config.num_heads * config.head_dim * pairs
    )
