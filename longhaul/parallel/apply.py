"""Parallelism and memory levers, applied from outside to a model that knows none of them.

Each lever is a function that takes the model. The order is fixed, from the inside out: compile,
context parallelism, head groups and tiles, checkpointing, FSDP2.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from longhaul.parallel import checkpointing, context, tiling
from longhaul.parallel.share_rows import RowSharing
from model import Decoder

if TYPE_CHECKING:  # importing it takes time that a single process can do without
    from torch.distributed.device_mesh import DeviceMesh


def apply(
    model: Decoder,
    cfg,
    mesh: "DeviceMesh | None",
    context_mesh: "DeviceMesh | None" = None,
) -> Decoder:
    """Every lever that `cfg` (TrainConfig) asks for. The model may be on meta."""
    model.compiled = cfg.compile
    if cfg.compile:
        compile_layers(model)
    if context_mesh is not None:
        share_rows(model, context_mesh, cfg.context_choice(model.config).mode, cfg.compile)
    if cfg.attention_head_groups > 1:
        tiling.group_heads(model, cfg.attention_head_groups)
    if cfg.tiles > 1:
        tiling.tile_mlp(model, cfg.tiles)
    if cfg.gradient_checkpointing != "none":
        selective = cfg.gradient_checkpointing == "selective"
        checkpointing.checkpoint_layers(model, selective, cfg.offload_activations)
    if mesh is not None:
        shard(model, mesh, model.config.dtype)
    return model


def compile_layers(model: Decoder) -> None:
    """torch.compile each layer's forward; parameter names stay as they are.

    Before checkpointing, because dynamo does not enter `checkpoint`, and traced inside it could not
    leave the graph for eager attention. Attention over packed documents stays eager: each batch has
    other lengths and would be compiled anew.
    """
    for layer in model.layers:
        layer.attention.packed = torch.compiler.disable(layer.attention.packed)
        layer.forward = torch.compile(layer.forward)


def eager(model: Decoder) -> AbstractContextManager:
    """Inside, compiled layers run eagerly, for what is not training.

    Dynamo keeps at most eight graphs of a layer. Rows of evaluations have many lengths: they would
    take those places, and layers of a later stage would no longer be compiled.
    """
    if not getattr(model, "compiled", False):
        return nullcontext()  # without dynamo, whose import takes seconds
    return torch.compiler.set_stance("force_eager")


def share_rows(model: Decoder, mesh: "DeviceMesh", mode: str, compiled: bool) -> None:
    """Ranks of the mesh's dimension "cp" get the same rows and work on a part of their tokens."""
    ranks = mesh["cp"]
    shard = context.Shard(mode, ranks.get_local_rank(), ranks.size(), ranks.get_group())
    RowSharing(shard).wrap(model, compiled)


def reshard(model: Decoder) -> None:
    """Free the root group's whole parameters.

    FSDP2 keeps them after a forward without a backward (validation, sampling).
    """
    if hasattr(model, "reshard"):
        model.reshard()


def shard(model: Decoder, mesh: "DeviceMesh", compute_dtype: torch.dtype) -> None:
    """FSDP2: fp32 shards of the parameters, gathered layer by layer in the compute dtype.

    Gradients are reduced in fp32. A two-dimensional mesh ("replicate", "shard") is HSDP.
    """
    from torch.distributed.fsdp import (
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    # Inputs are not cast, because rotary angles are fp32 whatever the compute dtype.
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if compute_dtype != torch.float32:
        policy = MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )

    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    # Embedding, final norm and head stay together in the root group: a tied weight in two groups is
    # an error.
    fully_shard(model, mesh=mesh, mp_policy=policy)
    # a prompt's hidden states need no logits, and soft tokens pass through the parts one by one
    for method in ("hidden", "apply_embedding", "apply_head"):
        register_fsdp_forward_method(model, method)
