"""What the trainer asks about each kind of attention, beyond what its layer computes.

A kind is its settings, a frozen dataclass with a `name` and a `layer` (model.Standard is the
smallest), and a row of KINDS here: its FLOPs, the levers it refuses, what the planner proposes in
its place. A row is a class of which no object is made; a new one inherits all but `keys_read`.
"""

import dataclasses
from collections.abc import Collection
from dataclasses import asdict

import torch
from torch import Tensor

from longhaul.cli import read_pairs
from longhaul.kernels import choose, why_no_triton
from longhaul.sparse import indexer
from longhaul.sparse.layer import BlockConfig
from longhaul.sparse.selectors import SELECTED
from model import Device, ModelConfig, NSAConfig, Standard


class Kind:
    """Facts about a kind of attention; a subclass overrides what differs."""

    # The class of its settings.
    config: type
    # The name under which configurations record them, if --blocks changes any.
    settings: str = ""
    # The kind that the planner proposes if this one does not fit.
    cheaper: str = ""
    # Whether a cache can take a prompt in several forwards.
    prompt_in_parts: bool = True
    # Whether a Hugging Face Qwen3 folder can hold it.
    is_qwen3: bool = False
    # Submodules that Qwen3's weights do not have.
    starts_fresh: tuple[str, ...] = ()
    # Modes of context parallelism that cannot serve it, with the reason.
    refused_exchanges: dict[str, str] = {"gather_kv": "which is not full causal attention"}
    # Settings of a run that cannot serve it, with the reason.
    refused_levers: dict[str, str] = {}
    # Why responses cannot share a prompt, if they cannot.
    refused_prompts: str = "which is not full causal attention"
    # The submodule that learns from a loss of its own, which the rest of the model does not see.
    learner: str = ""

    @classmethod
    def check(cls, config: ModelConfig, device: Device | None = None) -> None:
        """ValueError if the kernels that are asked for cannot run with these sizes, or not on the
        device.
        """

    @classmethod
    def warning(cls, config: ModelConfig, device: Device) -> str | None:
        """What a user should know about this kind on the device, in one line."""

    @classmethod
    def notice(cls, config: ModelConfig) -> str | None:
        """What is known of this kind, in one line at the start of a run."""

    @classmethod
    def is_learner(cls, name: str) -> bool:
        """Whether the parameter of this name learns from a loss of its own."""
        return cls.learner in name.split(".")

    @classmethod
    def objective(cls, inner, state):
        """The objective of a step of `state`: `inner`, or one around it if layers have losses of
        their own.
        """
        return inner

    @classmethod
    def identity(cls, config: ModelConfig) -> dict:
        """Its settings by name, as they belong to the identity of a run."""
        prefix = cls.settings or config.attention.name
        return {f"{prefix}.{name}": value for name, value in asdict(config.attention).items()}

    # ---- operations

    @classmethod
    def products(cls, config: ModelConfig) -> float:
        """Parameters of one layer's attention that multiply each token, for FLOPs."""
        heads = config.num_heads + config.num_kv_heads
        return 2 * config.hidden_size * heads * config.head_dim

    @classmethod
    def keys_read(cls, config: ModelConfig, positions: Tensor) -> Tensor:
        """Number of keys that a query reads, by its position in its document."""
        raise NotImplementedError(f"{cls.__name__} defines no keys_read")


class StandardKind(Kind):
    """Full causal attention."""

    config = Standard
    cheaper = "nsa"
    is_qwen3 = True
    refused_exchanges: dict[str, str] = {}
    refused_prompts = ""

    @classmethod
    def keys_read(cls, config: ModelConfig, positions: Tensor) -> Tensor:
        return positions + 1


class SparseKind(Kind):
    """Attention over some of the keys, which has Triton kernels of its own on CUDA."""

    @classmethod
    def check(cls, config: ModelConfig, device: Device | None = None) -> None:
        if config.kernels == "triton" and (why := why_no_triton(config, device)):
            raise ValueError(why)

    @classmethod
    def warning(cls, config: ModelConfig, device: Device) -> str | None:
        if config.kernels != "auto" or torch.device(device).type != "cuda":
            return None
        why = why_no_triton(config, device)
        if why is None:
            return None
        return (
            f"sparse attention runs in PyTorch operators, slowly, because the kernels cannot: {why}"
        )


class NSAKind(SparseKind):
    """Native Sparse Attention."""

    config = NSAConfig
    settings = "nsa"
    prompt_in_parts = False
    starts_fresh = ("sparse",)
    refused_exchanges = {"gather_kv": "whose queries choose blocks over the whole row"}
    refused_prompts = "whose queries choose blocks over the whole row"

    @classmethod
    def check(cls, config: ModelConfig, device: Device | None = None) -> None:
        choose(config)
        super().check(config, device)

    @classmethod
    def products(cls, config: ModelConfig) -> float:
        nsa = config.attention
        K = config.head_dim
        products = super().products(config) + config.hidden_size * 3 * config.num_heads
        if nsa.kv == "separate":
            products += config.hidden_size * 4 * config.num_kv_heads * K
        if nsa.cmp_kind == "mlp":  # its matrices work once per stride and KV head
            products += 2 * (nsa.cmp_block + 1) * K * K * config.num_kv_heads / nsa.cmp_stride
        return products

    @classmethod
    def keys_read(cls, config: ModelConfig, positions: Tensor) -> Tensor:
        """The sum over the branches."""
        nsa = config.attention
        past = positions + 1
        most_selected = (nsa.sel_count - 1) * nsa.sel_block + positions % nsa.sel_block + 1

        compressed = nsa.compressed_blocks(past)
        selected = past.minimum(most_selected)
        window = past.clamp(max=nsa.window)
        return compressed + selected + window


class SelectedKind(SparseKind):
    """Attention over the blocks that a selector chooses; it has no weights of its own."""

    config = BlockConfig
    settings = "blocks"
    is_qwen3 = True

    @classmethod
    def notice(cls, config: ModelConfig) -> str | None:
        sizes = config.attention
        return (
            f"{sizes.name} attention reads {sizes.count} blocks of {sizes.block} tokens; "
            "docs/SPARSE.md says what such a choice finds"
        )

    @classmethod
    def keys_read(cls, config: ModelConfig, positions: Tensor) -> Tensor:
        """The keys of attention, and the scores in units of a key's operations: over forward and
        backward a key takes 12 H K of them, and a score 2 H K.
        """
        sizes = config.attention
        past = positions + 1
        chosen = (sizes.count - 1) * sizes.block + positions % sizes.block + 1
        sparse = chosen + sizes.vectors_scored(past) / 6
        return past.to(sparse.dtype).where(positions < sizes.dense_tokens, sparse)


def selected_kind(config: type[BlockConfig]) -> type[Kind]:
    """The row of a selector, whose settings these are."""
    return type(f"{config.__name__}Kind", (SelectedKind,), {"config": config})


class IndexedKind(SelectedKind):
    """Attention over the blocks that a trained indexer chooses."""

    config = indexer.Indexed
    is_qwen3 = False
    starts_fresh = ("indexer",)
    learner = indexer.LEARNER
    refused_exchanges = {
        "ulysses": "whose groups share one index key",
        "gather_kv": "whose queries choose blocks over the whole row",
    }
    refused_levers = {
        "compile": "whose indexer's loss leaves the layer",
        "attention_head_groups": "whose groups share one index key",
    }

    @classmethod
    def objective(cls, inner, state):
        return indexer.IndexerObjective(inner, state)

    @classmethod
    def check(cls, config: ModelConfig, device: Device | None = None) -> None:
        indexer.check(config)
        super().check(config, device)

    @classmethod
    def products(cls, config: ModelConfig) -> float:
        """The indexer's projections count 2/3: their input, detached, needs no gradient."""
        added = config.hidden_size * (config.num_kv_heads + 1) * config.attention.head_dim
        return super().products(config) + added * 2 / 3

    @classmethod
    def keys_read(cls, config: ModelConfig, positions: Tensor) -> Tensor:
        """The keys of attention, and in units of a key's operations the teacher and the scores.

        Over forward and backward a key takes 12 H K of them. The teacher computes the logits again,
        which takes 2 H K. A score takes 2 G E; those of the chosen blocks are computed twice, and
        the gradients of a block take 4 G E.
        """
        sizes = config.attention
        past = positions + 1
        is_dense = positions < sizes.dense_tokens
        chosen = (sizes.count - 1) * sizes.block + positions % sizes.block + 1
        read = past.where(is_dense, chosen)
        scored = read + past.where(~is_dense, 0) + 2 * read / sizes.block
        index = config.num_kv_heads * sizes.head_dim / (config.num_heads * config.head_dim)
        return read + (read + index * scored) / 6


KINDS: dict[str, type[Kind]] = {
    "standard": StandardKind,
    "nsa": NSAKind,
    "indexed": IndexedKind,
}
KINDS |= {config.name: selected_kind(config) for config in SELECTED}


# The kinds that `longhaul.planner.verify_kind.verify_kind` is known to pass; a run with another one
# warns.
VERIFIED = ("standard", "nsa", "indexed", *(config.name for config in SELECTED))


def attention_kind(config) -> type[Kind]:
    """The row of a configuration's kind; config is a ModelConfig or a TrainConfig."""
    name = config.attention.name if isinstance(config, ModelConfig) else config.attention_type
    if name not in KINDS:
        raise ValueError(
            f"attention {name!r} has no row in KINDS of longhaul/kinds.py: add one, or choose from "
            f"{', '.join(KINDS)}"
        )
    return KINDS[name]


def unfit_exchanges(attention: str) -> dict[str, str]:
    """Mode of context parallelism -> why it cannot serve this kind of attention."""
    refused = KINDS[attention].refused_exchanges
    return {
        mode: f"{mode} cannot serve {attention} attention, {reason}"
        for mode, reason in refused.items()
    }


# ---- how configurations are recorded: with the settings of their kind


def recorded(config: ModelConfig) -> dict:
    """The configuration as checkpoints and runs record it, in plain values."""
    fields = asdict(config)
    del fields["attention"]
    fields["attention_type"] = config.attention.name
    kind = attention_kind(config)
    if dataclasses.fields(kind.config):
        fields[kind.settings or config.attention.name] = asdict(config.attention)
    return fields


def settings_names() -> set[str]:
    """The names in `recorded` under which the kinds' settings are."""
    return {kind.settings or name for name, kind in KINDS.items()}


# ---- a model of standard attention that is read sparsely


# kinds that any model of standard attention can be read with
WEIGHTLESS = tuple(
    name for name, kind in KINDS.items() if kind.settings == "blocks" and not kind.starts_fresh
)


def read_with(config: ModelConfig, attention: str | None, blocks: Collection[str]) -> ModelConfig:
    """The same model read with another attention, of the sizes that the pairs `blocks` change.

    ValueError for a model that has no standard attention, and for sizes without an attention.
    """
    if attention is None:
        if blocks:
            raise ValueError(
                f"--blocks {' '.join(blocks)} needs --attention_type: add that, or drop --blocks"
            )
        return config
    if config.attention.name != "standard":
        raise ValueError(
            f"--attention_type {attention} reads models of standard attention, and this one has "
            f"{config.attention.name}: drop --attention_type"
        )
    sizes = KINDS[attention].config
    return dataclasses.replace(
        config, attention=sizes(**read_pairs(tuple(blocks), sizes, "blocks"))
    )
