"""What each lever saves: simulated against the allocator's record on a small model, and the ladder
of the 4B.
"""

import pytest
import torch

from footprint.cards.device import Demand
from footprint.record.unroll import LAYERS, unroll
from longhaul.config import TrainConfig
from longhaul.planner import plan as planner
from longhaul.planner import solve
from longhaul.planner.needs import needs
from longhaul.planner.reconcile import allocator_peak
from longhaul.planner.simulate import simulate
from longhaul.staging import PINNED
from model import GIB
from tests.tiers import few_fast, slow

RUNGS = [
    dict(gradient_checkpointing="selective"),
    dict(gradient_checkpointing="full", mlp_tiles=4, attention_head_groups=2),
    dict(gradient_checkpointing="full", optimizer="adamw_bf16"),
    dict(gradient_checkpointing="full", optimizer="adamw_8bit"),
    dict(gradient_checkpointing="full", optimizer_in_backward=True, grad_clip=0.0),
    dict(attention_type="nsa", gradient_checkpointing="selective", mlp_tiles=4),
    dict(gradient_checkpointing="full", optimizer="muon"),
]


@pytest.mark.parametrize("changes", few_fast(RUNGS, len(RUNGS)), ids=str)
def test_a_levers_predicted_peak_is_what_the_allocator_records(changes):
    torch.set_num_threads(1)
    small = dict(model_size="tiny", model_overrides=("num_layers=2",), context_length=1024)
    cfg = TrainConfig(**small, dtype="fp32", **changes)
    assert simulate(cfg, target="cpu").peak()[0] == pytest.approx(allocator_peak(cfg), rel=1e-2)


@pytest.mark.parametrize(
    "changes",
    [
        slow(dict(mlp_tiles=7, model_overrides=("num_layers=2",))),
        slow(dict(attention_head_groups=8, model_overrides=("num_layers=2", "num_kv_heads=8"))),
    ],
    ids=str,
)
def test_leaving_alike_parts_out_of_the_simulation_changes_no_peak_and_no_reservation(changes):
    cfg = TrainConfig(
        model_size="tiny", context_length=2048, gradient_checkpointing="full", **changes
    )
    few, every = (simulate(cfg, every_tile=whole) for whole in (False, True))
    assert len(few.storages) < len(every.storages) and few.peak_by_stage() == every.peak_by_stage()
    assert Demand.of(few, 1).least_bytes == Demand.of(every, 1).least_bytes


HOST = dict(gradient_checkpointing="full", offload_activations=True)
IN_BACKWARD = dict(optimizer_in_backward=True, grad_clip=0.0)


@pytest.mark.slow
def test_what_stays_on_the_host_is_counted_there():
    layers = 6  # more than are simulated for a plan
    cfg = TrainConfig(
        **dict(
            model_size="0.6B",
            context_length=6144,
            model_overrides=(f"num_layers={layers}",),
            master_weights="host",
        )
        | HOST
    )
    config, trace = cfg.model(), simulate(cfg)
    inputs = layers * 6144 * config.hidden_size * 2
    assert (
        12 * config.num_params() + inputs
        <= trace.host_peak
        <= 12 * config.num_params() + inputs + 2 * config.vocab_size * config.hidden_size
    )
    assert needs(cfg).host == 12 * config.num_params() + layers * 2**24 + PINNED, (
        "a pinned block of 12 MiB is one of 16 MiB"
    )


# of the 4B at 131,072 tokens: live GiB, host GiB (0: none); without levers it is a row of
# test_memory_gate.py
LADDER = [
    (dict(optimizer="adamw_bf16"), 72.38, 0),
    (dict(optimizer="adamw_bf16", master_weights="none"), 63.98, 0),
    (dict(optimizer="adamw_8bit", master_weights="none"), 56.60, 0),
    (dict(master_weights="host") | IN_BACKWARD, 48.94, 45.0),
    (dict(master_weights="host", offload_activations=True) | IN_BACKWARD, 27.69, 67.5),
    (
        dict(master_weights="host", offload_activations=True, mlp_tiles=0) | IN_BACKWARD,
        21.08,
        67.5,
    ),
    (
        dict(master_weights="host", offload_activations=True, mlp_tiles=0, attention_head_groups=8)
        | IN_BACKWARD,
        13.37,
        67.5,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("changes, live, host", LADDER, ids=str)
def test_the_ladder_of_the_4b(changes, live, host):
    cfg = TrainConfig(
        **dict(context_length=131072, gradient_checkpointing="full", loss="chunked") | changes
    )
    layers = cfg.model().num_layers
    shallow = simulate(cfg, layers=LAYERS)
    assert unroll(shallow, layers).peak()[0] / GIB == pytest.approx(live, rel=5e-3)
    if host:
        one = simulate(cfg, layers=1).host_peak
        of_all = one + (layers - 1) * (shallow.host_peak - one) / (LAYERS - 1)
        assert of_all / GIB == pytest.approx(host, rel=1e-2)


@pytest.mark.parametrize("mode, ranks, groups", [("gather_kv", 16, 8), ("ulysses", 4, 2)])
def test_the_ladder_goes_to_its_end_however_ranks_share_rows(mode, ranks, groups):
    cfg = TrainConfig(
        context_length=131_072,
        gradient_checkpointing="full",
        context_parallel_size=ranks,
        context_parallel_mode=mode,
    )
    assert solve.with_every_lever(planner.on_ranks(cfg, ranks)).cfg.attention_head_groups == groups


def test_a_command_for_two_machines_names_both():
    assert planner.command(TrainConfig(), planner.World(size=16, local_size=8)).startswith(
        "torchrun --nnodes=2 --node_rank=N --master_addr=HOST --nproc_per_node=8 train.py"
    )


def test_a_host_that_is_too_small_for_an_offload_is_refused(monkeypatch):
    monkeypatch.setattr(planner, "host_available_bytes", lambda: 8 * GIB)
    monkeypatch.setattr(planner, "available_gib", lambda device, world: 80.0)
    cfg = TrainConfig(
        model_size="4B", context_length=4096, master_weights="host", gradient_checkpointing="full"
    )
    plan = planner.plan(cfg, cfg.model(), planner.World(), torch.device("cuda"))
    assert (
        not plan.fits
        and plan.shortage()
        == "levers need 45.1 GiB of host memory per rank and 8.0 GiB are available"
    )
