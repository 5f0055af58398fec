"""The closed form of a training step's memory and time: instant answers before anything is
allocated.

All figures are computed, in bytes unless named otherwise. Imports model.py and longhaul.config of
ours.
Letters: N tokens of a micro-batch on one rank (of rows that C ranks share, each holds T/C), L
layers, D width, V vocabulary, P parameters;
x, q, k, f below are the bytes of an [N, D], [N, H*K], [N, G*K] and [N, F] activation in the compute
dtype.
"""

from dataclasses import dataclass

import torch

from longhaul.flops import keys_met, train_flops
from model import ModelConfig, attention_kind, default_tiles

FP32 = 4
PROCESS_GIB = 0.45  # resident memory of a process with torch loaded, on CPU
CUDA_CONTEXT_GIB = 1.0  # context, cuBLAS workspaces and the allocator's rounding on a GPU
CPU_FLOPS_PER_CORE = {
    "bfloat16": 60e9,
    "float32": 30e9,
}  # what small matrices reach on a server core: orders of magnitude only


@dataclass(frozen=True)
class Estimate:
    """Peak live bytes of one rank, by stage of the step."""

    static: int  # parameters, gradients that outlive a stage, optimizer states
    stages: dict[str, int]
    host: int = 0  # bytes that levers keep in host memory

    @property
    def peak(self) -> int:
        return max(self.stages.values())

    @property
    def peak_stage(self) -> str:
        return max(self.stages, key=self.stages.get)


def saved_per_layer(config: ModelConfig, tokens: int, element: int) -> int:
    """Bytes that one layer keeps for its backward without checkpointing.

    S = 4x + 3f, the fp32 statistics of the two norms, and what its attention saves.
    """
    x, _, _, f = _activations(config, tokens, element)
    attention = attention_kind(config).saved_bytes(config, tokens, element)
    return 4 * x + 3 * f + 2 * FP32 * tokens + attention


def _activations(config: ModelConfig, tokens: int, element: int) -> tuple[int, int, int, int]:
    widths = (
        config.hidden_size,
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
        config.ffn_size,
    )
    return tuple(element * tokens * width for width in widths)


def estimate(cfg, config: ModelConfig, ranks: int = 1) -> Estimate:
    """The live peak of one rank's training step on CUDA: fp32 weights, gradients and AdamW moments,
    `cfg.dtype` activations.

    The largest of the stages that can be it; tests hold it against the simulated step
    (longhaul.memory.simulate).
    """
    held, element = cfg.context_length // cfg.context_ranks, 2 if cfg.dtype == "bf16" else 4
    N = cfg.batch_size * held
    x, q, k, f = _activations(config, N, element)
    shards, sharded, L = ranks // cfg.dp_replicate, ranks > 1, config.num_layers
    P, layer, vocabulary = (
        config.num_params(),
        config.layer_params(),
        config.vocab_size * config.hidden_size,
    )
    down = config.hidden_size * config.ffn_size
    weight = element if cfg.weights_in_compute_dtype else FP32
    # bytes per parameter of a compute-dtype copy; FSDP2 gathers it instead
    cast = 0 if sharded or element == weight else element
    whole = element if sharded else weight  # bytes per parameter of a gradient before it is reduced
    static = (
        int((weight + state_bytes(cfg)) * P) // shards
        + cfg.accumulation(ranks) * 24 * N
        + (element * (P - L * layer) if sharded else 0)
    )
    inner = (
        saved_per_layer(config, N, element) - 4 * x - 3 * f + (q if _ulysses(cfg, config) else 0)
    )  # o by heads and by tokens
    beside = 4 * x + inner * (
        cfg.attention_head_groups == 1
    )  # what a layer's MLP finds saved; a layer in parts saves their inputs alone
    kept = (
        _checkpoint(cfg, config, x, q, N)
        if cfg.gradient_checkpointing != "none"
        else beside + 3 * f * (cfg.tiles == 1) + cast * layer
    )
    tables = FP32 * N * config.head_dim
    # bytes per parameter of gradients that wait for the optimizer
    gradient = 0 if cfg.optimizer_in_backward else weight
    # gradients of the micro-batches before; later ones are added to them
    before = gradient * P // shards if cfg.accumulation(ranks) > 1 else 0
    # a weight's gradient then goes at once, and a tied table's waits for the embedding's
    added = bool(before) and not sharded
    head = static + tables + before + whole * vocabulary * (config.tie_embeddings or not added)
    layer_copy = element * layer if sharded else cast * (layer - down)
    mlp = (
        head
        + x
        + beside
        + 5 * f // cfg.tiles
        + layer_copy
        + (whole * down * (not added) if cfg.tiles == 1 else x + (3 * FP32 + weight) * down)
    )
    attention = (
        head
        + 3 * x
        + _attention_backward(cfg, config, inner, q, x, element)
        + layer_copy
        + (whole if sharded else gradient) * (layer - down)
    )
    # the root's parameters, before they are copied to their places
    gathered = element * (P - L * layer) if sharded else 0
    around = _around(L, kept, 0 if before else gradient * layer // shards, layer, element, sharded)
    stages = {
        "loss backward": static
        + tables
        + before
        + L * kept
        + 2 * x
        + 4 * FP32 * N
        + _loss_backward(cfg, config, N, held, element, whole, cast, gathered),
        "mlp backward": mlp + around,
        "attention backward": attention + around,
        "embedding backward": _embedding_backward(
            config, static, N, (weight, gradient, element), shards, sharded, bool(before)
        ),
        "gradient norm": static + gradient * P // shards - sharded * element * (P - L * layer),
    }
    if cfg.context_ranks > 1:
        stages["attention backward"] = (
            mlp - 5 * f // cfg.tiles + around + _exchanged(cfg, config, q, k, element)
        )
    return Estimate(static, stages, _host(cfg, L * (1 << (x - 1).bit_length()), P // shards))


def _host(cfg, inputs: int, parameters: int) -> int:
    """Layer inputs, in blocks that CUDA's pinned allocator rounds up to powers of two, and an fp32
    copy and two moments of each parameter.
    """
    return (
        0
        if cfg.device == "cpu"
        else cfg.offload_activations * inputs + cfg.offload_optimizer * 12 * parameters
    )


def state_bytes(cfg) -> float:
    """Bytes of optimizer state per parameter on the device; Muon's are those of its matrices."""
    if cfg.offload_optimizer:
        return 12.0 if cfg.device == "cpu" else 0.0
    return dict(adamw=8.0, adamw_bf16=4.0, adamw_8bit=2.03, muon=4.0)[cfg.optimizer]


def _attention_backward(cfg, config: ModelConfig, inner: int, q: int, x: int, element: int) -> int:
    """What attention saved and the gradients of o, q, k and v: all for one group of heads at a
    time.
    """
    tokens = cfg.batch_size * cfg.context_length // cfg.context_ranks
    groups = cfg.attention_head_groups
    keys_and_values = attention_kind(config).backward_bytes(config, tokens, element)
    return (inner + 2 * q + keys_and_values) // groups + x * (groups > 1)


def _checkpoint(cfg, config: ModelConfig, x: int, q: int, N: int) -> int:
    """What a checkpointed layer keeps on the device: its input, and attention's output where that
    is saved.
    """
    attention = (
        (q + FP32 * N * config.num_heads) if cfg.gradient_checkpointing == "selective" else 0
    )
    return attention + (0 if cfg.offload_activations and cfg.device != "cpu" else x)


def _ulysses(cfg, config: ModelConfig) -> bool:
    return cfg.context_ranks > 1 and cfg.context_choice(config).mode == "ulysses"


def _exchanged(cfg, config: ModelConfig, q: int, k: int, element: int) -> int:
    """What context parallelism adds while a layer's attention runs backward: a buffer to send from
    and one to receive into, or all keys and values and the fp32 sums of their gradients.
    """
    if _ulysses(cfg, config):
        return 2 * q
    return 2 * k * cfg.context_ranks * (element + FP32) // element


def _around(L: int, kept: int, done: int, layer: int, element: int, sharded: bool) -> int:
    """Beside the layer that works backward: inputs (or all) kept by those before it, gradients of
    those after; the worst layer.

    FSDP2 gathers the layer before it, and reduces the fp32 gradients of the layer after it.
    """
    early, late = sharded * element * layer, sharded * FP32 * layer
    worst = {0: (L - 1) * done + late * (L > 1)}
    for index in {1, L - 2, L - 1} & set(range(1, L)):
        worst[index] = (
            index * kept + (L - 1 - index) * done + early + (late if index < L - 1 else 0)
        )
    return max(worst.values())


def _embedding_backward(
    config: ModelConfig,
    static: int,
    N: int,
    sizes: tuple[int, int, int],
    shards: int,
    sharded: bool,
    before: bool,
) -> int:
    """Two gradients of a tied table meet, or the tables' two, beside those of all layers; `before`:
    there are some of earlier micro-batches.

    With FSDP2 one layer's are still in fp32; or both tables', in fp32 for the reduction: beside
    both, then beside one and the result.
    """
    P, L, layer, table = (
        config.num_params(),
        config.num_layers,
        config.layer_params(),
        config.vocab_size * config.hidden_size,
    )
    tables, (weight, gradient, element) = 1 if config.tie_embeddings else 2, sizes
    if not sharded:
        return (
            static
            + gradient * (P - tables * table)
            + weight * (2 + before) * table
            + weight * N * config.hidden_size
        )
    done = static + (gradient * L * layer + FP32 * before * tables * table) // shards
    if config.tie_embeddings:
        return done + FP32 * layer + 2 * element * table + element * N * config.hidden_size
    return (
        done
        - element * 2 * table
        + 2 * FP32 * table
        + element * table
        + max(element, 2 * FP32 // shards) * table
    )


def _loss_backward(
    cfg, config: ModelConfig, N: int, held: int, element: int, whole: int, cast: int, gathered: int
) -> int:
    """Logits three times in fp32 (or once beside what FSDP2 gathers), or in tiles: gradients of
    hidden and of the head, one tile's logits.
    """
    V, D = config.vocab_size, config.hidden_size
    if config.loss_path(cfg.batch_size, held) == "standard":
        return FP32 * N * V + max(gathered, 2 * FP32 * N * V + cast * V * D)
    rows, tile = default_tiles(N, V, torch.device("cuda"), "compiled")
    rows, low = min(cfg.loss_chunk_size or rows, N), element < FP32
    # hidden's gradient in its own dtype, beside that in fp32
    ends = low * N * D * element + cast * (V % tile or tile) * D
    loop = cast * tile * D + low * element * D * max(min(rows, N), tile if cast else 0)
    return max(
        gathered, whole * V * D + N * (FP32 * D + tile * element + 7 * FP32) + max(ends, loop)
    )


def step_flops(cfg, config: ModelConfig, ranks: int) -> float:
    """FLOP of one optimizer step over all ranks, recomputation included."""
    tokens = cfg.rows_per_step(ranks) * cfg.context_length
    pairs = keys_met(config, torch.arange(cfg.context_length)).sum().item() * cfg.rows_per_step(
        ranks
    )
    useful, attention = (
        train_flops(config, tokens, pairs),
        4 * config.num_layers * config.num_heads * config.head_dim * pairs,
    )
    again = dict(none=0, full=useful / 3, selective=useful / 3 - attention)[
        cfg.gradient_checkpointing
    ]
    return useful + again + attention * (cfg.attention_head_groups > 1)


def cpu_step_seconds(cfg, config: ModelConfig, ranks: int, cores: int) -> float:
    """Order of magnitude of a step's time on `cores` CPU cores."""
    return step_flops(cfg, config, ranks) / (cores * CPU_FLOPS_PER_CORE[config.compute_dtype])
