"""Parallelism and memory levers, applied from outside to a model that knows of none: each is a
function taking the model.

The order is fixed: compile -> context parallelism -> parts -> checkpointing -> FSDP2, from the
inside out. Imports model.py, longhaul.parallel.apply.checkpointing, longhaul.parallel.context and
longhaul.parallel.share_rows of ours.
"""

import torch

from longhaul.parallel import checkpointing, context, tiling
from longhaul.parallel.share_rows import RowSharing
from model import Decoder


def apply(model: Decoder, cfg, mesh, context_mesh=None) -> Decoder:
    """Every lever that `cfg` (TrainConfig) asks for, in the one order that composes; the model may
    be on meta.
    """
    if cfg.compile:
        compile_layers(model)
    if context_mesh is not None:
        share_rows(model, context_mesh, cfg.context_choice(model.config).mode, cfg.compile)
    if cfg.attention_head_groups > 1:
        tiling.group_heads(model, cfg.attention_head_groups)
    if cfg.tiles > 1:
        tiling.tile_mlp(model, cfg.tiles)
    if cfg.gradient_checkpointing != "none":
        checkpointing.checkpoint_layers(
            model, cfg.gradient_checkpointing == "selective", cfg.offload_activations
        )
    if mesh is not None:
        shard(model, mesh, model.config.dtype)
    return model


def compile_layers(model: Decoder):
    """torch.compile each layer's forward; parameter names stay as they are.

    Before checkpointing: dynamo does not enter `checkpoint`, and traced inside it could not leave
    the graph for eager attention. Attention over packed documents stays eager, standard or sparse:
    every batch has other lengths, and each would be compiled anew.
    """
    for layer in model.layers:
        layer.attention.packed = torch.compiler.disable(layer.attention.packed)
        layer.forward = torch.compile(layer.forward)


def share_rows(model: Decoder, mesh, mode: str, compiled: bool):
    """The ranks of the mesh's dimension "cp" are given the same rows and work on a part of their
    tokens each.
    """
    group = mesh["cp"]
    RowSharing(context.Shard(mode, group.get_local_rank(), group.size(), group.get_group())).around(
        model, compiled
    )


def reshard(model: Decoder):
    """Give back the root group's whole parameters, which FSDP2 keeps after a forward without a
    backward (validation, sampling).
    """
    if hasattr(model, "reshard"):
        model.reshard()


def shard(model: Decoder, mesh, compute_dtype: torch.dtype):
    """FSDP2: shards of fp32 parameters, gathered layer by layer in the compute dtype, gradients
    reduced in fp32.

    Embedding, final norm and head stay together in the root group: a tied weight in two groups is
    an error on torch 2.13 and silently untied on 2.11. Inputs are not cast: rotary angles are fp32
    whatever the compute dtype. A two-dimensional mesh ("replicate", "shard") is HSDP.
    """
    from torch.distributed.fsdp import (
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    if compute_dtype == torch.float32:
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    register_fsdp_forward_method(model, "hidden")  # a prompt's hidden states need no logits
