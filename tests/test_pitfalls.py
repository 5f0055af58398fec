"""Traps of torch's distributed parts that each cost somebody a day, those that no other test stands
in front of.

Elsewhere: targets across shards, one divisor for all, documents under sharing (test_context);
weights of a seed for every world size, NaN on one rank, gradients of all world sizes and the order
of sums (test_parallel); a tied weight stored once (test_checkpoint); attention's forward once
(test_activations); learning rate after a resume, words under torchrun (test_train, test_supervise).
"""

import torch

from longhaul import dist, step
from longhaul.config import TrainConfig
from longhaul.parallel import checkpointing
from tests.ranks import run_ranks

SHAPE = (
    "num_layers=2",
    "hidden_size=64",
    "num_heads=4",
    "num_kv_heads=2",
    "head_dim=16",
    "ffn_size=96",
)
BASE = dict(
    model_size="tiny",
    vocab_size=211,
    context_length=64,
    dtype="fp32",
    model_overrides=SHAPE,
    max_steps=8,
)


def built(world: dist.World, **changes) -> step.TrainState:
    cfg, cpu = TrainConfig(**BASE | changes), torch.device("cpu")
    return step.build(cfg, cfg.model(), cpu, world, dist.data_mesh(world, cpu, cfg.dp_replicate))


def batch(micro_batches: int) -> list[dict]:
    ids = torch.randint(211, (micro_batches, 1, 65), generator=torch.Generator().manual_seed(0))
    return [dict(tokens_BT=row[:, :-1], labels_BT=row[:, 1:]) for row in ids]


def bf16_share(world: dist.World) -> float:
    """The share of a rank's summed gradients that bf16 represents exactly."""
    state = built(world, dtype="bf16")
    row = batch(world.size)[world.rank]
    step.gradients(state, [row])
    shards = [p.grad.to_local().flatten() for p in state.model.parameters()]
    values = torch.cat(shards)
    values = values[values != 0]
    return float((values == values.bfloat16()).float().mean())


def test_gradients_are_summed_over_ranks_in_fp32():
    """A sum of two bf16 gradients is no bf16 number, unless it was rounded to one."""
    for share in run_ranks(bf16_share, 2):
        assert share < 0.9


def tied_and_flat(world: dist.World) -> tuple[bool, bool, list[int]]:
    """FSDP2 takes no tied weight in two groups; two dimensions of a mesh mean replicas, where all
    ranks shall shard.
    """
    state = built(world, context_parallel_size=2)
    tied = state.model.lm_head.weight is state.model.embed.weight
    step.train_step(state, batch(1))
    table = state.model.embed.weight
    ids = [id(p) for _, p in state.model.named_parameters(remove_duplicate=False)]
    return (
        tied and state.model.lm_head.weight is table,
        len(ids) - len(set(ids)) == 1,
        [table.device_mesh.ndim, table.device_mesh.size(), table.to_local().shape[0]],
    )


def test_a_tied_weight_stays_one_and_all_ranks_shard_it():
    for rank, (tied, once, (dimensions, ranks, rows)) in enumerate(run_ranks(tied_and_flat, 4)):
        assert tied and once and (dimensions, ranks) == (1, 4) and rows == min(53, 211 - 53 * rank)


def gradients_between_micro_batches(world: dist.World) -> list[float]:
    """Share of each gradient that a rank holds when the second micro-batch begins."""
    state, shares = built(world, gradient_accumulation_steps=2), []
    state.model.register_forward_pre_hook(
        lambda *_: shares.extend(
            p.grad.to_local().numel() / p.numel()
            for p in state.model.parameters()
            if p.grad is not None and p.shape[0] % 2 == 0
        )
    )
    step.train_step(state, batch(2))
    return shares


def test_no_rank_holds_whole_gradients_between_micro_batches():
    for shares in run_ranks(gradients_between_micro_batches, 2):
        assert shares and set(shares) == {0.5}


def test_what_selective_checkpointing_keeps_is_not_seen_by_offload(monkeypatch):
    """Saved-tensor hooks do not see attention's outputs: that lever's help says that inputs alone
    move, and so they do.
    """
    moved, to_host = [], checkpointing.to_host
    monkeypatch.setattr(
        checkpointing, "to_host", lambda x: moved.append(tuple(x.shape)) or to_host(x)
    )
    state = built(dist.World(), gradient_checkpointing="selective", offload_activations=True)
    step.train_step(state, batch(1))
    assert moved == [(1, 64, 64)] * state.model.config.num_layers
