"""Floating-point operations of a training step, and the time that they take.

The counts are exact. The time on a CPU follows from what this machine reaches: a few passes of the
product's own code over small shapes, about half a second in total, measured once per process. The
time on a GPU is a roofline of its peak, good to an order of magnitude.

Letters: T tokens of a document, H query heads, K head dimension.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from data.progress import duration
from footprint.cards.device import DEFAULT, target_card
from longhaul import kernels
from longhaul.config import TrainConfig
from longhaul.kinds import attention_kind
from model import ModelConfig, Standard

# What a dense bf16 step reaches on an H100, about 40% of its peak, and so on other cards; fp32
# reaches half of it.
GPU_FLOPS = 400e12

# Keys are counted one by one up to this position of a document; further on, a sample in the middle
# counts for the rest.
COUNTED = 131_072
SAMPLE = 1024

# What is measured on a CPU: tokens, and the widest model
ROWS = 16
ROW_TOKENS = 32  # so few that attention hardly counts
WIDEST = 512
LONG_ENOUGH = 0.3  # seconds of timed calls, after which no other is made
LONGEST = 2048  # tokens of a document from which the speed of attention is taken


class Operations(NamedTuple):
    """Floating-point operations, by what computes them."""

    products: float  # of activations with matrices of parameters
    attention: float  # of queries with keys and of weights with values


# ---- counts


def keys_read(config: ModelConfig, positions: Tensor) -> Tensor:
    """Keys that a query reads, by its position in its document.

    Standard attention reads all up to its own; NSA reads those of its three branches.
    """
    return attention_kind(config).keys_read(config, positions)


def pairs(config: ModelConfig, tokens: int) -> float:
    """(query, key) pairs of a document: the sum of `keys_read` over its tokens.

    Nothing of length `tokens` is allocated. The sum is exact for an attention whose keys, from
    position 131,072 on, grow linearly apart from a pattern that repeats every 2^n <= 1,024 tokens.
    """
    total = _counted(config, 0, min(tokens, COUNTED))
    if tokens <= COUNTED:
        return total
    end = tokens // SAMPLE * SAMPLE
    middle = (COUNTED + end - SAMPLE) // 2
    mean = _counted(config, middle, middle + SAMPLE) / SAMPLE
    return total + (end - COUNTED) * mean + _counted(config, end, tokens)


def _counted(config: ModelConfig, start: int, end: int) -> float:
    return float(keys_read(config, torch.arange(start, end)).sum())


def train_operations(config: ModelConfig, tokens: int, pairs: float) -> Operations:
    """Operations of one forward and backward pass, without recomputation.

    6 per matrix parameter and token, and 12*H*K per layer and (query, key) pair: two products of 2K
    operations in each of three passes. `pairs` is the sum of `keys_read`, which is T(T+1)/2 for a
    document of T tokens in standard attention. Source: Narayanan et al. 2021, with the causal half
    counted exactly.
    """
    mlp = 3 * config.hidden_size * config.ffn_size
    layer = attention_kind(config).products(config) + mlp
    head = config.vocab_size * config.hidden_size  # looking up an embedding multiplies nothing
    matrices = config.num_layers * layer + head

    products = 6.0 * matrices * tokens
    attention = 12.0 * config.num_layers * config.num_heads * config.head_dim * pairs
    return Operations(products, attention)


def train_flops(config: ModelConfig, tokens: int, pairs: float) -> float:
    """The sum of `train_operations`, as MFU counts it."""
    return sum(train_operations(config, tokens, pairs))


def step_operations(cfg: TrainConfig, config: ModelConfig, ranks: int) -> Operations:
    """Operations of one optimizer step over all ranks, recomputation included; of post-training
    those of the update, as if a row were documents of `context_length` tokens.
    """
    rows = cfg.rows_per_step(ranks)
    documents = rows * cfg.row_tokens / cfg.context_length
    products, attention = train_operations(
        config, rows * cfg.row_tokens, documents * pairs(config, cfg.context_length)
    )

    if cfg.gradient_checkpointing != "none":
        products += products / 3
    return Operations(products, attention + attention_again(cfg) * attention / 3)


def attention_again(cfg: TrainConfig) -> int:
    """Forwards of attention beyond the first."""
    return int(cfg.gradient_checkpointing == "full") + int(cfg.attention_head_groups > 1)


# ---- time


def step_seconds(cfg: TrainConfig, config: ModelConfig, ranks: int, device: str) -> float:
    """Time of an optimizer step, all ranks working in parallel.

    device "cpu": on CPUs like this one, if every rank has as many threads as this process, within a
    factor of two. Otherwise "cuda", an H100, or the name of a GPU: an order of magnitude.
    """
    operations = step_operations(cfg, config, ranks)
    return _seconds_for(operations, cfg, config, device) / ranks


def warm_up_seconds(cfg: TrainConfig, config: ModelConfig, ranks: int, device: str) -> float:
    """The same of a step of an indexer's dense warm-up; 0 for a run without one.

    Attention reads all keys. Of the 12*H*K operations for a pair, the 4 of the forward are done and
    none of the backward, in which the model does not learn.
    """
    if not cfg.dense_steps:
        return 0.0
    whole_row = dataclasses.replace(config.attention, dense_below=cfg.context_length)
    dense = dataclasses.replace(config, attention=whole_row)
    standard = dataclasses.replace(config, attention=Standard())
    all_keys = step_operations(cfg, standard, ranks).attention / (1 + attention_again(cfg) / 3)

    products, attention = step_operations(cfg, dense, ranks)
    done = Operations(products, attention - all_keys * 2 / 3)
    return _seconds_for(done, cfg, dense, device) / ranks


def _seconds_for(
    operations: Operations, cfg: TrainConfig, config: ModelConfig, device: str
) -> float:
    """Time of one rank for so many operations."""
    products, attention = operations
    gpu = target_card(device)
    if gpu is None:
        in_attention = attention / attention_speed(config, cfg.context_length)
        return products / products_speed(config) + in_attention

    speed = GPU_FLOPS * gpu.peak_flops / target_card(DEFAULT).peak_flops
    return (products + attention) / (speed if cfg.dtype == "bf16" else speed * 0.5)


def run_words(cfg: TrainConfig, seconds: float, warm_up: float, device: str) -> str:
    """What a run takes, from the seconds of a step and of one of an indexer's dense warm-up."""
    if not cfg.dense_steps:
        return time_words(seconds, cfg.max_steps, device, cfg.UNTIMED)
    behind = cfg.max_steps - cfg.dense_steps
    dense = time_words(warm_up, cfg.dense_steps, device)
    return f"{dense}; then {time_words(seconds, behind, device)}"


def time_words(seconds: float, steps: int, device: str, untimed: str = "") -> str:
    """What a step and a run take: about 170 s a step, 47 h for 1,000 steps; and what that leaves
    out.
    """
    count = "1 step" if steps == 1 else f"{steps:,} steps"
    words = f"about {duration(seconds)} a step, {duration(seconds * steps)} for {count}"
    gpu = target_card(device)
    if gpu is not None:
        article = "an" if gpu.name[0] in "AHLR" else "a"
        words += f" (roofline of {article} {gpu.name}: an order of magnitude)"
    return f"{words}, {untimed}" if untimed else words


# ---- what this machine's CPU reaches


def products_speed(config: ModelConfig) -> float:
    """FLOP/s of this process in everything but attention, for a model like `config`.

    Measured with a decoder whose share of products, norms, activations and loss is that of the
    presets, and rows of so few tokens that attention hardly counts.
    """
    width = WIDEST if config.hidden_size >= WIDEST else 256
    narrow = ModelConfig(
        vocab_size=8 * width,
        hidden_size=width,
        num_layers=1,
        num_heads=width // 32,
        num_kv_heads=width // 128,
        head_dim=32,
        ffn_size=3 * width,
        compute_dtype=config.compute_dtype,
    )
    return _speeds(narrow, ROWS, ROW_TOKENS).products


def attention_speed(config: ModelConfig, tokens: int) -> float:
    """FLOP/s of this process in attention to documents of `tokens` tokens.

    Measured for one KV head and its queries, over the model's own kind of attention in as many
    tokens, but no more than LONGEST.
    """
    one_group = dataclasses.replace(
        config,
        vocab_size=8,
        hidden_size=64,
        ffn_size=64,
        num_layers=1,
        num_heads=config.num_heads // config.num_kv_heads,
        num_kv_heads=1,
        kernels="auto",
    )
    power_of_two = 1 << (tokens - 1).bit_length()
    return _speeds(one_group, 1, min(power_of_two, LONGEST)).attention


@functools.cache
def _speeds(config: ModelConfig, rows: int, tokens: int) -> Operations:
    """The operations of a forward and backward, each kind of them over the time of both."""
    decoder = kernels.decoder(config)
    decoder.init_weights(seed=0)
    tokens_BT = torch.zeros(rows, tokens, dtype=torch.long, device="cpu")

    seconds = _seconds(lambda: decoder(tokens_BT, tokens_BT).backward())
    operations = train_operations(config, rows * tokens, rows * pairs(config, tokens))
    return Operations(*(count / seconds for count in operations))


def _seconds(step: Callable[[], object]) -> float:
    """The fastest of three calls, after one that is not timed; of fewer if they take long."""
    step()
    taken = []
    while len(taken) < 3 and sum(taken) < LONG_ENOUGH:
        start = time.perf_counter()
        step()
        taken.append(time.perf_counter() - start)
    return min(taken)
