"""The simulated step against the allocator's own record of the real one, and against itself:
layers, ranks, stages.
"""

import dataclasses
import itertools

import pytest
import torch

from footprint.cards.allocator import replay
from longhaul import dist
from longhaul.config import TrainConfig
from longhaul.planner.reconcile import allocator_peak
from longhaul.planner.report import top_tensors
from longhaul.planner.simulate import profile, simulate, trace_real_run
from tests.events import calls
from tests.ranks import run_ranks
from tests.tiers import few_fast
from tests.traces import by_category

TINY = dict(
    model_size="tiny",
    vocab_size=20_000,
    context_length=512,
    model_overrides=("num_layers=2",),
)
SETTINGS = [
    {},
    dict(loss="standard", gradient_checkpointing="full"),
    dict(context_length=700, batch_size=2, gradient_accumulation_steps=3, loss="chunked"),
    dict(attention_type="nsa", gradient_checkpointing="full", context_length=750),
    dict(attention_type="nsa", blocks=("kv=separate", "cmp_kind=mean"), loss="standard"),
    dict(
        vocab_size=1000,
        context_length=2048,
        gradient_checkpointing="full",
        model_overrides=("num_layers=2", "tie_embeddings=False", "ffn_size=256"),
    ),
]
TOLERANCE = {
    "fp32": 1e-4,
    "bf16": 2e-3,
}  # of the peak; a bf16 product on a CPU keeps scratch memory of its own


@pytest.mark.parametrize(
    "changes, dtype", few_fast(zip(SETTINGS, itertools.cycle(["fp32", "bf16"])), 99), ids=str
)
def test_the_predicted_peak_is_what_the_allocator_records(changes, dtype):
    cfg = TrainConfig(**TINY | dict(dtype=dtype) | changes)
    assert simulate(cfg, target="cpu").peak()[0] == pytest.approx(
        allocator_peak(cfg), rel=TOLERANCE[dtype]
    )


SMALLER = TINY | dict(vocab_size=4000)  # of several ranks
SHARDED = [
    dict(dtype="bf16", gradient_checkpointing="full"),
    dict(dtype="fp32", attention_type="nsa", context_length=700),
    dict(dtype="fp32", attention_type="indexed", blocks=("count=4", "head_dim=32")),
]


def observed_each(world: dist.World, settings: list[dict]) -> list[dict]:
    torch.set_num_threads(1)
    peaks = []
    for changes in settings:
        cfg = TrainConfig(**SMALLER | changes)
        # gloo's threads hold a buffer a little longer, at times until a stage that matters
        first, second = (trace_real_run(cfg, world).peak_by_stage() for _ in range(2))
        peaks.append({stage: min(size, second[stage]) for stage, size in first.items()})
    return peaks


@pytest.mark.slow
def test_the_predicted_rank_is_byte_for_byte_the_tracker_on_two_real_ranks():
    predicted = [
        simulate(TrainConfig(**SMALLER | changes), ranks=2, target="cpu").peak_by_stage()
        for changes in SHARDED
    ]
    for stages in run_ranks(observed_each, 2, SHARDED):
        for real, fake in zip(stages, predicted, strict=True):
            assert max(real.values()) == max(fake.values())
            late = {name for name in real if real[name] != fake[name]}
            after = {"gradients", "gradient norm", "optimizer"}
            assert all(name in after or name.endswith("backward") for name in late)
            assert all(fake[name] < real[name] < max(real.values()) for name in late)


@pytest.mark.parametrize(
    "changes",
    few_fast(
        [{}, dict(attention_type="nsa", gradient_checkpointing="full", dtype="fp32")], every=2
    ),
    ids=str,
)
def test_the_tracker_sees_in_a_real_run_what_it_predicts(changes):
    cfg = TrainConfig(**TINY | changes)
    predicted, real = simulate(cfg, target="cpu"), trace_real_run(cfg)
    assert predicted.peak_by_stage() == real.peak_by_stage()
    assert by_category(predicted, predicted.peak()[1]) == by_category(real, real.peak()[1])


@pytest.mark.parametrize(
    "changes, ranks, target",
    few_fast(
        [
            ({}, 1, "cpu"),
            (dict(gradient_checkpointing="full", attention_type="nsa"), 1, "cuda"),
            (dict(gradient_checkpointing="full", loss="standard", dtype="fp32"), 4, "cuda"),
        ],
        every=4,
    ),
    ids=str,
)
def test_shallow_models_extrapolate_to_exactly_what_all_layers_give(changes, ranks, target):
    cfg = TrainConfig(
        model_size="tiny", context_length=600, model_overrides=("num_layers=7",), **changes
    )
    shallow, full = profile(cfg, ranks, target), profile(cfg, ranks, target, full=True)
    assert shallow.stages == full.stages and shallow.peak == full.trace.peak()[0]
    norm = next(time for time, stage in full.trace.stages if stage == "gradient norm")
    for whole, unrolled in zip(full.trace.events, shallow.trace.events):
        assert whole[:2] == unrolled[:2] or whole.time >= norm
    for segments in (False, True):
        assert replay(shallow.trace, segments) == replay(full.trace, segments)
    assert top_tensors(shallow) == top_tensors(full)


@pytest.mark.slow
def test_the_4b_at_131072_tokens_is_predicted_with_the_work_of_4096():
    cfg = TrainConfig(context_length=131072, gradient_checkpointing="full")
    short = dataclasses.replace(cfg, context_length=4096)
    for one in (cfg, short):  # what PyTorch remembers of each shape is made once
        profile(one)
    assert calls(lambda: profile(cfg)) < 1.1 * calls(lambda: profile(short))
