"""The closed form of a training step's memory: an answer in a tenth of a millisecond.

Each stage that can be the peak is a function that returns named terms, and the peak is the largest
sum of terms. Two shallow simulations agree with it within 0.005% over the grid of the tests, but
take 1.5 to 5 seconds of CPU time, and refusing one request asks for 16 to 46 estimates. Figures are
computed, in bytes unless a name says otherwise.

Letters: N tokens of a micro-batch on one rank (ranks that share a row hold a part of it each), L
layers, P parameters, D width, V vocabulary; x, q, k, f are the bytes of an activation of N tokens
by the width of the model, of all query heads, of all KV heads, and of the MLP.
"""

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property

import torch

from footprint.workspace import processors
from longhaul.config import TrainConfig
from longhaul.kinds import StandardKind, attention_kind, attention_params
from longhaul.memory.inside import attention_workspace
from longhaul.optimizers import OPTIMIZERS
from longhaul.staging import PINNED
from longhaul.vocab.loss import block_tokens, default_tiles, forward_columns
from model import ModelConfig

FP32 = 4
INT64 = 8
# Resident memory of a process with torch loaded, on a CPU, measured with torch 2.13: the CUDA build
# has more libraries.
PROCESS_GIB = 0.45 if torch.version.cuda is None else 0.66
CUDA_CONTEXT_GIB = 1.0  # context, cuBLAS workspaces and the allocator's rounding on a GPU
CUDA = torch.device("cuda")

Terms = dict[str, int]  # what takes memory -> bytes


@dataclass(frozen=True)
class Estimate:
    """Peak live bytes of one rank, by stage of the step."""

    static: int  # weights, optimizer states, inputs: what every stage holds
    terms: dict[str, Terms]  # stage -> what its memory is made of
    host: int = 0  # bytes that levers keep in host memory

    @cached_property
    def stages(self) -> dict[str, int]:
        """Stage -> bytes."""
        return {stage: sum(terms.values()) for stage, terms in self.terms.items()}

    @property
    def peak(self) -> int:
        return max(self.stages.values())

    @property
    def peak_stage(self) -> str:
        return max(self.stages, key=self.stages.get)


def estimate(
    cfg: TrainConfig, config: ModelConfig, ranks: int = 1, inside: bool = True
) -> Estimate:
    """The live bytes of one rank's training step on CUDA, by stage.

    Without what attention's own kernels hold (`inside`), a tenth of a second faster for each new
    shape of sparse attention, it is a lower bound.
    """
    rank = Rank(cfg, config, ranks, inside)
    terms = {
        rank.loss_stage: loss(rank),
        "mlp backward": mlp_backward(rank),
        "attention backward": attention_backward(rank),
        "embedding backward": embedding_backward(rank),
        "gradient norm": gradient_norm(rank),
    }
    always = sum(static(rank).values())
    return Estimate(always, terms, host(rank))


# ---- one layer


def saved_per_layer(config: ModelConfig, tokens: int, element: int) -> int:
    """Bytes that one layer keeps for its backward without checkpointing.

    4x + 3f, the fp32 statistics of the two norms, and what its attention saves.
    """
    x = element * tokens * config.hidden_size
    f = element * tokens * config.ffn_size
    attention = attention_kind(config).saved_bytes(config, tokens, element)
    return 4 * x + 3 * f + 2 * FP32 * tokens + attention


# ---- what the stages are made of


class Rank:
    """The sizes of one rank's step that several stages share."""

    def __init__(self, cfg: TrainConfig, config: ModelConfig, ranks: int, inside: bool = True):
        self.inside = inside
        self.cfg = cfg
        self.config = config
        self.ranks = ranks
        self.shards = ranks // cfg.dp_replicate
        self.sharded = ranks > 1  # by FSDP2

        # activations
        self.element = 2 if cfg.dtype == "bf16" else FP32
        self.row_tokens = cfg.context_length // cfg.context_ranks
        self.N = cfg.batch_size * self.row_tokens
        self.x = self.element * self.N * config.hidden_size
        self.q = self.element * self.N * config.num_heads * config.head_dim
        self.k = self.element * self.N * config.num_kv_heads * config.head_dim
        self.f = self.element * self.N * config.ffn_size

        # parameters
        self.L = config.num_layers
        self.P = config.num_params()
        self.layer = config.layer_params()
        self.root = self.P - self.L * self.layer  # those outside the layers
        self.table = config.vocab_size * config.hidden_size
        self.down = config.hidden_size * config.ffn_size

        self._bytes_per_parameter()

    @cached_property
    def loss_path(self) -> str:
        return self.cfg.loss_path(self.config, self.ranks)

    @property
    def loss_stage(self) -> str:
        """Where the loss takes most: in one pass the gradients are computed in the forward."""
        return "loss forward" if self.loss_path == "one_pass" else "loss backward"

    def _bytes_per_parameter(self):
        """Of weights, of their copies, and of gradients."""
        self.weight = self.element if self.cfg.weights_in_compute_dtype else FP32

        # A copy in the compute precision for one use; FSDP2 gathers such a copy instead.
        copied = not self.sharded and self.element != self.weight
        self.cast = self.element if copied else 0

        # A gradient before it is reduced or added, and one that waits for the optimizer.
        self.fresh = self.element if self.sharded else self.weight
        self.waiting = 0 if self.cfg.optimizer_in_backward else self.weight

    @property
    def copy_to_save(self) -> int:
        """What a background save holds of this rank's weights and optimizer states."""
        if not self.cfg.async_save:
            return 0
        states = 12.0 if self.cfg.offload_optimizer else OPTIMIZERS[self.cfg.optimizer].state_bytes
        return int((self.weight + states) * self.P) // self.shards

    @cached_property
    def earlier_gradients(self) -> int:
        """Gradients of earlier micro-batches, to which those of later ones are added."""
        accumulates = self.cfg.accumulation(self.ranks) > 1
        return self.waiting * self.P // self.shards if accumulates else 0

    @property
    def added_at_once(self) -> bool:
        """Whether a weight's gradient is added to an earlier one as soon as it is computed."""
        return self.earlier_gradients > 0 and not self.sharded

    @property
    def gathered_root(self) -> int:
        """The parameters outside the layers, which FSDP2 gathers for the whole step."""
        return self.element * self.root if self.sharded else 0

    @property
    def rotary_tables(self) -> int:
        return FP32 * self.N * self.config.head_dim

    @cached_property
    def saved_by_attention(self) -> int:
        """With Ulysses the output is kept twice: by heads and by tokens."""
        saved = saved_per_layer(self.config, self.N, self.element)
        saved -= 4 * self.x + 3 * self.f
        if self.by_heads:
            saved += self.q
        return saved

    @property
    def by_heads(self) -> bool:
        """Whether ranks that share a row exchange heads (Ulysses)."""
        if self.cfg.context_ranks == 1:
            return False
        choice = self.cfg.context_choice(self.config)
        return choice.mode == "ulysses"

    @property
    def saved_before_mlp(self) -> int:
        """What the MLP's backward finds saved by its layer; head groups save only their inputs."""
        inputs = 4 * self.x
        return inputs + self.saved_by_attention if self.cfg.attention_head_groups == 1 else inputs

    @cached_property
    def kept_by_layer(self) -> int:
        """What a layer keeps on the device until its backward."""
        if self.cfg.gradient_checkpointing != "none":
            return self._checkpoint()
        mlp = 3 * self.f if self.cfg.tiles == 1 else 0
        return self.saved_before_mlp + mlp + self.cast * self.layer

    def _checkpoint(self) -> int:
        """The input of a checkpointed layer, and the output of attention if it is kept."""
        saved = 0 if self.offloads_inputs else self.x
        if self.cfg.gradient_checkpointing == "selective":
            kind = attention_kind(self.config)
            saved += kind.output_bytes(self.config, self.N, self.element)
        return saved

    @property
    def offloads_inputs(self) -> bool:
        """Whether layer inputs wait in host memory."""
        return self.cfg.offload_activations and self.cfg.device != "cpu"

    @property
    def layer_copy(self) -> int:
        """The layer's weights in the compute precision: gathered, or copied without the last."""
        if self.sharded:
            return self.element * self.layer
        return self.cast * (self.layer - self.down)


def state_bytes(cfg: TrainConfig) -> float:
    """Bytes of optimizer state per parameter on the device; for Muon those of its matrices."""
    if cfg.offload_optimizer:
        return 12.0 if cfg.device == "cpu" else 0.0
    return OPTIMIZERS[cfg.optimizer].state_bytes


def static(rank: Rank) -> Terms:
    """What every stage holds."""
    weights = rank.weight * rank.P // rank.shards
    per_parameter = rank.weight + state_bytes(rank.cfg)
    both = int(per_parameter * rank.P) // rank.shards
    micro_batches = rank.cfg.accumulation(rank.ranks)
    return {
        "weights": weights,
        "optimizer states": both - weights,
        "tokens, labels and positions": micro_batches * 3 * INT64 * rank.N,
        "gathered weights outside the layers": rank.gathered_root,
        "copy for --async_save": rank.copy_to_save if rank.cfg.device == "cpu" else 0,
    }


def _in_backward(rank: Rank) -> Terms:
    """What the stages from the loss to the first layer hold in addition."""
    return static(rank) | {
        "rotary tables": rank.rotary_tables,
        "gradients of earlier micro-batches": rank.earlier_gradients,
    }


def _below_the_head(rank: Rank) -> Terms:
    """What the backward of any layer holds in addition: the gradient of the head's weight.

    It stays until it is reduced. Added to that of an earlier micro-batch it goes at once, but that
    of a tied table waits for the gradient of the embedding.
    """
    stays = rank.config.tie_embeddings or not rank.added_at_once
    return _in_backward(rank) | {
        "gradient of the head": rank.fresh * rank.table if stays else 0,
    }


def _other_layers(rank: Rank) -> Terms:
    """What the other layers hold while one runs backward, for the worst layer.

    Layers before it keep their activations, layers after it have gradients. FSDP2 gathers the layer
    before it and reduces the fp32 gradients of the layer after it.
    """
    last = rank.L - 1
    indices = {0, 1, last - 1, last}
    indices &= set(range(rank.L))
    candidates = [_around(rank, index) for index in sorted(indices)]
    return max(candidates, key=lambda terms: sum(terms.values()))


def _around(rank: Rank, index: int) -> Terms:
    """The terms of `_other_layers` while layer `index` runs backward."""
    later = rank.L - 1 - index
    gradients = rank.waiting * rank.layer // rank.shards
    if rank.earlier_gradients:
        gradients = 0  # they are added to the earlier ones
    gathers = rank.sharded and index > 0
    fetches = rank.offloads_inputs and index > 0
    reduces = rank.sharded and later > 0
    return {
        "activations kept by earlier layers": index * rank.kept_by_layer,
        "gradients of later layers": later * gradients,
        "gathered weights of the next layer": rank.element * rank.layer if gathers else 0,
        "input of the next layer, back from the host": rank.x if fetches else 0,
        "gradients of the last layer, being reduced": FP32 * rank.layer if reduces else 0,
    }


# ---- the stages


def loss(rank: Rank) -> Terms:
    """All layers' activations, and the vocabulary loss."""
    heads = {"standard": _whole_logits, "chunked": _tiled_logits, "one_pass": _one_pass}
    head = heads[rank.loss_path](rank)
    return (
        _in_backward(rank)
        | {
            "activations kept by all layers": rank.L * rank.kept_by_layer,
            "input and output of the last norm": 2 * rank.x,
            "statistics of the tokens": 4 * FP32 * rank.N,
        }
        | head
    )


def _whole_logits(rank: Rank) -> Terms:
    """Logits, log-probabilities and gradient in fp32; or only logits while FSDP2 gathers."""
    logits = FP32 * rank.N * rank.config.vocab_size
    return {
        "fp32 logits": logits,
        "their log-probabilities and gradient": max(
            rank.gathered_root, 2 * logits + rank.cast * rank.table
        ),
    }


def _tiled_logits(rank: Rank) -> Terms:
    """Gradients of hidden states and head, and one tile of logits."""
    vocabulary = rank.config.vocab_size
    width = rank.config.hidden_size
    _, tile = default_tiles(rank.N, vocabulary, CUDA, "compiled")

    # Low precision needs the gradient of the hidden states in its own dtype at the end, and copies
    # of two tiles of the weight in the loop over tiles.
    low = rank.element if rank.element < FP32 else 0
    last_tile = vocabulary % tile or tile
    at_the_end = low * rank.N * width + rank.cast * last_tile * width
    in_the_loop = rank.cast * min(2 * tile, vocabulary) * width

    tiled = {
        "gradient of the head": rank.fresh * rank.table,
        "gradient of the hidden states, fp32": FP32 * rank.N * width,
        "one tile of logits": rank.element * rank.N * tile,
        "statistics of the logits": 7 * FP32 * rank.N,
        "copies in low precision": max(at_the_end, in_the_loop),
    }
    if rank.gathered_root > sum(tiled.values()):
        return {"weights outside the layers, before they are copied": rank.gathered_root}
    return tiled


def _one_pass(rank: Rank) -> Terms:
    """Gradients of hidden states and head, and the logits of a block of tokens."""
    vocabulary = rank.config.vocab_size
    width = rank.config.hidden_size
    block = block_tokens(rank.N, vocabulary, width, rank.element)
    rows, _ = default_tiles(rank.N, vocabulary, CUDA, "compiled")
    tile = forward_columns(rank.N, vocabulary, CUDA, "compiled")
    rows = min(rank.config.loss_chunk_size or rows, block)

    # The label's logits: its weights, their copy, the hidden states and the products in fp32. Then
    # the gradient of the block's hidden states and copies of two tiles of the weight.
    hidden = FP32 if rank.element < FP32 else 0
    labels = (rank.fresh + rank.cast + hidden + FP32) * rows * width
    products = FP32 * block * width + rank.cast * min(2 * tile, vocabulary) * width
    result = rank.x
    if block >= rank.N and not rank.sharded:  # then the result is made only at the end
        products = max(products, FP32 * block * width + result)
        result = 0

    terms = {
        "gradient of the head": rank.fresh * rank.table,
        "gradient of the hidden states": result,
        "logits of a block of tokens": rank.element * block * vocabulary,
        "gradients of a block of tokens": max(labels, products),
        "statistics of the logits": 2 * FP32 * rank.N,
    }
    if rank.gathered_root > sum(terms.values()):
        return {"weights outside the layers, before they are copied": rank.gathered_root}
    return terms


def mlp_backward(rank: Rank) -> Terms:
    """One layer's MLP, with what its attention saved."""
    return _layer_without_mlp(rank) | {
        "activations of the MLP and their gradients": 5 * rank.f // rank.cfg.tiles
    }


def _layer_without_mlp(rank: Rank) -> Terms:
    if rank.cfg.tiles == 1:
        down = 0 if rank.added_at_once else rank.fresh * rank.down
        gradients = {"gradient of the down projection": down}
    else:
        gradients = {
            "gradient of the MLP's input, summed over tiles": rank.x,
            "gradients of the MLP, summed over tiles": (3 * FP32 + rank.weight) * rank.down,
        }
    return (
        _below_the_head(rank)
        | {
            "gradient of the layer's output": rank.x,
            "saved by the layer before its MLP": rank.saved_before_mlp,
            "weights of the layer in the compute precision": rank.layer_copy,
        }
        | gradients
        | _other_layers(rank)
    )


def attention_backward(rank: Rank) -> Terms:
    """One layer's attention.

    If ranks share rows, the exchange is larger than the gradients, and the MLP's inputs are saved.
    """
    if rank.cfg.context_ranks > 1:
        exchange = {"exchange with the ranks of the row": _exchanged(rank)}
        return _layer_without_mlp(rank) | exchange

    moments = [_after_the_projections(rank)]
    around = _around_kernels if rank.config.attention.name == "nsa" else _around_operators
    inside = _inside(rank) if rank.inside else 0
    if inside:
        moments.append(around(rank) | {"inside the kernels of attention": inside})
    return max(moments, key=lambda terms: sum(terms.values()))


def _around_kernels(rank: Rank) -> Terms:
    """While the kernels of Native Sparse Attention run."""
    config = rank.config
    gates = 3 * rank.element * rank.N * config.num_heads
    terms = {
        "gradient of the layer's output": rank.x,
        "gradients of gates and compressed blocks": gates
        + 2 * rank.k // config.attention.cmp_stride,
    }
    return _around_attention(rank, terms | _weights_so_far(rank))


def _around_operators(rank: Rank) -> Terms:
    """While the operators of indexed attention run."""
    terms = {
        "gradient of the layer's output, and its inputs": 3 * rank.x,
    }
    return _around_attention(rank, terms | _weights_so_far(rank))


def _weights_so_far(rank: Rank) -> Terms:
    """While attention itself runs backward, of its weights only the output's has a gradient yet."""
    config = rank.config
    projection = config.num_heads * config.head_dim * config.hidden_size
    attention = attention_params(config)
    mlp = 3 * config.hidden_size * config.ffn_size
    copies = rank.layer_copy if rank.sharded else rank.cast * (attention - projection)
    return {
        "weights in the compute precision": copies,
        "gradients of the layer's weights": _per_gradient(rank) * (mlp + projection),
    }


def _after_the_projections(rank: Rank) -> Terms:
    return _around_attention(
        rank,
        {
            "gradients of the layer's output and inputs": 3 * rank.x,
            "weights of the layer in the compute precision": rank.layer_copy,
            "gradients of the layer's weights": _per_gradient(rank) * (rank.layer - rank.down),
        },
    )


def _around_attention(rank: Rank, layer: Terms) -> Terms:
    """A moment of attention's backward: what is alive outside of the layer, and in it."""
    return _below_the_head(rank) | layer | _attention(rank) | _other_layers(rank)


def _per_gradient(rank: Rank) -> int:
    """Bytes of a weight's gradient in the layer under way."""
    return rank.fresh if rank.sharded else rank.waiting


def _attention(rank: Rank) -> Terms:
    """What attention saved, and gradients of o, q, k and v; of one group of heads at a time."""
    groups = rank.cfg.attention_head_groups
    kind = attention_kind(rank.config)
    gradients = 2 * rank.q + kind.backward_bytes(rank.config, rank.N, rank.element)
    terms = {
        "saved by attention": (rank.saved_by_attention + gradients) // groups - gradients // groups,
        "gradients inside attention": gradients // groups,
    }
    if groups > 1:
        terms["output of attention, summed over groups"] = rank.x
    if rank.cfg.deterministic and rank.cfg.device != "cpu":
        terms["deterministic sums of attention's gradients"] = _copies_of_dq(rank)
    return terms


def _inside(rank: Rank) -> int:
    """What the operators of sparse attention hold, of one group of heads at a time."""
    groups = rank.cfg.attention_head_groups
    heads = dict(
        num_heads=rank.config.num_heads // groups,
        num_kv_heads=rank.config.num_kv_heads // groups,
    )
    config = dataclasses.replace(rank.config, **heads)
    tokens = rank.row_tokens
    keys = tokens
    if rank.cfg.context_ranks > 1:  # gather_kv: the last half of a rank's tokens sees all keys
        tokens, keys = tokens // 2, rank.cfg.context_length
    return attention_workspace(config, rank.cfg.batch_size, tokens, keys)


def _copies_of_dq(rank: Rank) -> int:
    """FlashAttention's further copies of dq in fp32, so that each is summed in a fixed order.

    Sparse attention has some too, which only the simulation counts.
    """
    if attention_kind(rank.config) is not StandardKind:
        return 0
    heads = rank.config.num_heads // rank.cfg.attention_head_groups
    copies = math.ceil(processors() / (rank.cfg.batch_size * heads))
    return (copies - 1) * FP32 * rank.N * heads * rank.config.head_dim


def _exchanged(rank: Rank) -> int:
    """Buffers of the exchange between ranks that share a row.

    Ulysses: one to send and one to receive. gather_kv: all keys and values, and the fp32 sums of
    their gradients.
    """
    if rank.by_heads:
        return 2 * rank.q
    per_element = rank.element + FP32
    keys_and_values = 2 * rank.k * rank.cfg.context_ranks
    return keys_and_values * per_element // rank.element


def embedding_backward(rank: Rank) -> Terms:
    """The gradients of all layers, and of the tables of embedding and head."""
    if not rank.sharded:
        return _plain_embedding(rank)
    return _tied_shards(rank) if rank.config.tie_embeddings else _untied_shards(rank)


def _plain_embedding(rank: Rank) -> Terms:
    """Two gradients of a table, and a third if earlier micro-batches have one."""
    tables = 1 if rank.config.tie_embeddings else 2
    gradients = 3 if rank.earlier_gradients else 2
    return static(rank) | {
        "gradients of the layers": rank.waiting * (rank.P - tables * rank.table),
        "gradients of embedding and head": rank.weight * gradients * rank.table,
        "gradient of the embedded tokens": rank.weight * rank.N * rank.config.hidden_size,
    }


def _sharded_gradients(rank: Rank, tables: int) -> Terms:
    """This rank's part of the gradients of the layers, and of earlier ones of the tables."""
    layers = rank.waiting * rank.L * rank.layer
    earlier = FP32 * tables * rank.table if rank.earlier_gradients else 0
    return static(rank) | {"gradients of the layers": (layers + earlier) // rank.shards}


def _tied_shards(rank: Rank) -> Terms:
    """The table's two gradients are added while one layer's are still in fp32."""
    return _sharded_gradients(rank, tables=1) | {
        "gradients of the last layer, being reduced": FP32 * rank.layer,
        "gradients of embedding and head": 2 * rank.element * rank.table,
        "gradient of the embedded tokens": rank.x,
    }


def _untied_shards(rank: Rank) -> Terms:
    """Both gradients in fp32 for the reduction; then one of them and the result.

    The gathered tables themselves are free by then.
    """
    terms = _sharded_gradients(rank, tables=2)
    terms["gathered weights outside the layers"] -= 2 * rank.element * rank.table
    reduced = max(rank.element, 2 * FP32 // rank.shards)
    return terms | {
        "gradients of embedding and head": rank.element * rank.table,
        "their fp32 copies, being reduced": 2 * FP32 * rank.table,
        "their reduced parts": reduced * rank.table,
    }


def gradient_norm(rank: Rank) -> Terms:
    """All gradients; FSDP2 has freed what it gathered."""
    terms = static(rank)
    del terms["gathered weights outside the layers"]
    return terms | {"gradients": rank.waiting * rank.P // rank.shards}


def host(rank: Rank) -> int:
    """Bytes that levers keep in host memory: layer inputs, fp32 weights and two moments, the copy
    that a background save writes, and the pinned slabs through which these pass.

    CUDA rounds blocks of pinned memory up to powers of two.
    """
    if rank.cfg.device == "cpu":
        return 0
    total = 0
    if rank.cfg.offload_activations:
        total += rank.L * (1 << (rank.x - 1).bit_length())
    if rank.cfg.offload_optimizer:
        total += 12 * (rank.P // rank.shards)
    if rank.cfg.offload_optimizer or rank.cfg.async_save:
        total += PINNED
    return total + rank.copy_to_save
