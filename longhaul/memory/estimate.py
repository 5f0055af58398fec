"""The closed form of a training step's memory and time: instant answers before anything is allocated.

All figures are computed, in bytes unless named otherwise. Imports model.py and longhaul.config of ours.
Letters: N tokens of a micro-batch on one rank (of a row that C ranks share, each holds T/C), P parameters, W ranks that share them; x, q,
k, f below are the bytes of an [N, D], [N, H*K], [N, G*K] and [N, F] activation in the compute dtype.
"""

from dataclasses import dataclass

import torch

from longhaul.flops import keys_met, train_flops
from model import ModelConfig

FP32 = 4
PROCESS_GIB = 0.45  # resident memory of a process with torch loaded, on CPU
CUDA_CONTEXT_GIB = 1.0  # context, cuBLAS workspaces and the allocator's rounding on a GPU
CPU_FLOPS_PER_CORE = {"bfloat16": 60e9, "float32": 30e9}  # what small matrices reach on a server core: orders of magnitude only


@dataclass(frozen=True)
class Estimate:
    """Peak live bytes of one rank, by stage of the step."""

    static: int  # parameters, gradients that outlive a stage, optimizer states
    stages: dict[str, int]

    @property
    def peak(self) -> int:
        return max(self.stages.values())

    @property
    def peak_stage(self) -> str:
        return max(self.stages, key=self.stages.get)


def saved_per_layer(config: ModelConfig, tokens: int, element: int) -> int:
    """Bytes that one layer keeps for its backward without checkpointing.

    S = 4x + 3q + 3k + 3f and the fp32 statistics: the two norms' rstd, those of the q/k norms, attention's log-sum-exp. NSA adds
    the selected branch's output, keys and values cut into units, gates, chosen blocks (int16), and for kv="separate" 5k and 2 norms.
    """
    x, q, k, f = _activations(config, tokens, element)
    saved = 4 * x + 3 * q + 3 * k + 3 * f + FP32 * tokens * (2 * config.num_heads + config.num_kv_heads + 2)
    if config.attention_type == "standard":
        return saved
    nsa = config.nsa
    branches = q + tokens * (3 * config.num_heads * element + 2 * config.num_kv_heads * nsa.sel_count)
    blocks = (2 * FP32 + 6 * element) * config.num_kv_heads * config.head_dim * (tokens // nsa.cmp_stride)
    own = 5 * k + 2 * FP32 * config.num_kv_heads * tokens if nsa.kv == "separate" else 0
    branches += q + FP32 * config.num_heads * tokens if config.kernels == "triton" else 0  # the twin keeps o_cmp and its statistics
    return saved + branches + blocks + own + (2 * k if nsa.cmp_kind == "mlp" else 0)


def _activations(config: ModelConfig, tokens: int, element: int) -> tuple[int, int, int, int]:
    widths = (config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.ffn_size)
    return tuple(element * tokens * width for width in widths)


def estimate(cfg, config: ModelConfig, ranks: int = 1) -> Estimate:
    """The live peak of one rank's training step: fp32 weights, gradients and AdamW moments, `cfg.dtype` activations."""
    held, element = cfg.context_length // cfg.context_ranks, 2 if cfg.dtype == "bf16" else 4
    tokens = cfg.batch_size * held
    shards = ranks // cfg.dp_replicate
    P, layers = config.num_params(), config.num_layers
    layer, vocabulary = config.layer_params(), config.vocab_size * config.hidden_size
    x, q, k, f = _activations(config, tokens, element)
    ulysses = cfg.context_ranks > 1 and cfg.context_choice(config).mode == "ulysses"
    saved = saved_per_layer(config, tokens, element) + (q if ulysses else 0)  # attention keeps its output by heads, the projection by tokens
    unsharded = element * (P - layers * layer + 2 * layer) if ranks > 1 else 0
    static = 3 * FP32 * P // shards + unsharded + tokens * (24 + 2 * FP32 * config.head_dim)
    gradients = FP32 * P // shards
    kept = layers * (x if cfg.gradient_checkpointing == "full" else saved)
    cast = 0 if cfg.dtype == "fp32" else element * layer
    working = saved if cfg.gradient_checkpointing == "full" else 0
    temporaries = max(2 * f + x, 2 * FP32 // element * q + 2 * k) + _exchanged(cfg, config, q, k, element)
    chunked = config.loss_path(cfg.batch_size, held) == "chunked"
    logits = _chunked_loss(config, tokens, element) if chunked else tokens * config.vocab_size * (element + 3 * FP32)
    stages = {
        "loss": static + gradients // 8 + kept + 2 * x + logits + (element + FP32) * vocabulary // (1 if ranks == 1 else shards),
        "layer backward": static + gradients + kept + working + temporaries + cast + (FP32 * layer if ranks > 1 else 0),
        "optimizer": static + gradients,
    }
    return Estimate(static, stages)


def _exchanged(cfg, config: ModelConfig, q: int, k: int, element: int) -> int:
    """What context parallelism adds while a layer's attention runs backward: a buffer to send from and one to receive into, or all
    keys and values and the fp32 sums of their gradients."""
    if cfg.context_ranks == 1:
        return 0
    if cfg.context_choice(config).mode == "ulysses":
        return 2 * q
    return 2 * k * cfg.context_ranks * (element + FP32) // element


def _chunked_loss(config: ModelConfig, tokens: int, element: int) -> int:
    tile = min(config.vocab_size, 2048)
    return tokens * (FP32 * config.hidden_size + 5 * FP32) + tokens * tile * element + (config.loss_chunk_size or 2048) * tile * 2 * FP32


def step_flops(cfg, config: ModelConfig, ranks: int) -> float:
    """FLOP of one optimizer step over all ranks, recomputation included."""
    tokens = cfg.rows_per_step(ranks) * cfg.context_length
    pairs = keys_met(config, torch.arange(cfg.context_length)).sum().item() * cfg.rows_per_step(ranks)
    useful = train_flops(config, tokens, pairs)
    return useful * (4 / 3 if cfg.gradient_checkpointing == "full" else 1)


def cpu_step_seconds(cfg, config: ModelConfig, ranks: int, cores: int) -> float:
    """Order of magnitude of a step's time on `cores` CPU cores."""
    return step_flops(cfg, config, ranks) / (cores * CPU_FLOPS_PER_CORE[config.compute_dtype])
