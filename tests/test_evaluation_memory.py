"""The simulated evaluation against real ones, whole and in parts, and against training."""

import dataclasses
import functools
import gc
from pathlib import Path

import pytest
import torch

from footprint.kernels.measure import peak_bytes
from longhaul import step
from longhaul.config import TrainConfig
from longhaul.evals.score import Item, ModelScorer
from longhaul.planner import evaluation
from longhaul.planner import simulate as training
from model import GIB
from tests.tiers import few_fast, slow

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
TINY = TrainConfig(model_size="tiny", context_length=2048, dtype="fp32", device="cpu")
TOKENS = 1500
SETTINGS = {
    "standard": {},
    "nsa": dict(attention_type="nsa"),
    "tiles": dict(mlp_tiles=4, attention_head_groups=2),
    "bf16": dict(dtype="bf16"),
}


def with_settings(name: str, **changes) -> TrainConfig:
    return dataclasses.replace(TINY, **SETTINGS[name] | changes)


def random_row(tokens: int) -> Item:
    make = torch.Generator().manual_seed(0)
    row = torch.randint(0, 1000, (2, 1, tokens), generator=make)
    return Item(row[0], row[1])


def allocated(cfg: TrainConfig, tokens: int, chunk: int = 0) -> int:
    """Weights, inputs, and what the allocator itself recorded on top while a row was scored."""
    model = step.build(cfg, cfg.model(), "cpu").model
    item = random_row(tokens)
    inputs = item.tokens_BT.nbytes + item.labels_BT.nbytes
    weights = sum(p.nbytes for p in model.parameters())
    scorer = ModelScorer(model, CPU, chunk)
    return weights + inputs + peak_bytes(lambda: scorer.score(item), CPU)


# --------------------------------------------------------------------------- predicted and real


@pytest.mark.parametrize(
    "name, chunk",
    [("nsa", 0), slow("bf16", 0), ("tiles", 400)],
)
def test_every_stage_is_predicted_to_the_byte(name, chunk):
    cfg = with_settings(name)
    predicted = evaluation.simulate(cfg, TOKENS, chunk=chunk, target="cpu")
    real = training.trace_really(evaluation.Scoring(cfg, TOKENS, chunk, trained=False))
    assert predicted.peak_by_stage() == real.peak_by_stage()


@pytest.mark.parametrize(
    "name, tokens, chunk",
    [
        ("standard", TOKENS, 400),
        ("tiles", TOKENS, 0),
        slow("nsa", 777, 0),  # one chunk of queries, whose last step is shorter than the others
        slow("nsa", 3000, 0),
    ],
)
def test_the_predicted_peak_is_what_the_allocator_records(name, tokens, chunk):
    cfg = with_settings(name, model_overrides=("num_layers=2",))
    found = evaluation.peak(cfg, tokens, chunk=chunk, target="cpu")
    assert found == pytest.approx(allocated(cfg, tokens, chunk), rel=1e-4)


@pytest.mark.parametrize(
    "trained, ranks, target",
    [slow(False, 1, "cpu"), (True, 2, "cuda")],
)
def test_shallow_models_extrapolate_to_exactly_what_all_layers_give(ranks, target, trained):
    cfg = with_settings("standard", model_overrides=("num_layers=9",))
    asked = dict(ranks=ranks, target=target, trained=trained)
    full = evaluation.simulate(cfg, TOKENS, **asked)
    assert evaluation.peak(cfg, TOKENS, **asked) == full.peak()[0]


@pytest.mark.slow
def test_the_parts_that_a_simulation_leaves_out_change_nothing():
    asked = dict(chunk=300, target="cpu")
    few = evaluation.simulate(TINY, 3000, **asked)
    all_parts = evaluation.simulate(TINY, 3000, **asked, every_tile=True)
    assert few.peak()[0] == all_parts.peak()[0]
    assert len(few.events) < len(all_parts.events) / 2


# --------------------------------------------------------------------------- next to training


@pytest.mark.slow
def test_evaluating_131072_tokens_with_nsa_takes_no_more_than_training_on_them():
    T = 131_072
    cfg = with_settings("nsa", context_length=T, gradient_checkpointing="full")
    trained, _ = training.simulate(cfg, target="cpu").peak()
    assert evaluation.peak(cfg, T, target="cpu", trained=True) <= trained


LEAN = dict(gradient_checkpointing="full", mlp_tiles=16, attention_head_groups=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "levers, changes",
    [
        ("standard", {}),
        ("standard, the same, `--mlp_tiles 16 --attention_head_groups 2`", LEAN),
    ],
)
def test_the_document_has_the_peaks_that_are_computed(levers, changes):
    T = 131_072
    cfg = with_settings("standard", context_length=T, **changes)
    peaks = [
        training.simulate(cfg, target="cpu").peak()[0],
        evaluation.peak(cfg, T, target="cpu", trained=True),
        evaluation.peak(cfg, T, chunk=4096, target="cpu", trained=True),
    ]
    assert peaks == sorted(peaks, reverse=True)
    row = " | ".join([levers, *(f"{peak / GIB:.2f} GiB" for peak in peaks)])
    assert f"| {row} |" in (ROOT / "docs" / "EVALUATION.md").read_text()


SHARED = dict(context_parallel_size=2)


@pytest.mark.parametrize(
    "name, lean, ranks, target",
    few_fast(
        [
            ("bf16", dict(master_weights="host"), 1, "cuda"),
            ("standard", dict(model_overrides=("num_layers=2", "tie_embeddings=False")), 2, "cuda"),
            ("nsa", dict(optimizer="adamw_8bit"), 1, "cpu"),
            ("standard", SHARED | dict(context_parallel_mode="gather_kv"), 2, "cpu"),
            ("tiles", SHARED | dict(attention_head_groups=1), 2, "cuda"),
        ],
        5,
    ),
)
def test_an_evaluation_in_the_loop_takes_less_than_the_leanest_step(name, lean, ranks, target):
    T = 64
    step_by_step = dict(optimizer_in_backward=True, grad_clip=0.0, gradient_checkpointing="full")
    small = dict(context_length=T, vocab_size=64, model_overrides=("num_layers=2",))
    cfg = with_settings(name, **small | step_by_step | lean)
    trained, _ = training.simulate(cfg, ranks, target).peak()
    asked = dict(ranks=ranks, target=target, trained=True)
    assert trained / 2 < evaluation.peak(cfg, T, **asked) < trained


# --------------------------------------------------------------------------- whole rows or parts


@pytest.mark.slow
def test_rows_pass_whole_if_they_fit_else_in_the_largest_parts_that_do(monkeypatch):
    monkeypatch.setattr(evaluation, "peak", functools.cache(evaluation.peak))
    T = 32_768
    whole = evaluation.planned(TINY, T, CPU)
    parts = [evaluation.planned(TINY, T, CPU, chunk) for chunk in evaluation.CHUNKS]
    assert whole.gib > parts[0].gib > parts[1].gib

    for expected in (whole, *parts):
        assert evaluation.plan_that_fits(TINY, T, CPU, expected.gib) == expected
    assert whole.words().endswith(" GiB planned for whole rows of 32,768 tokens")
    assert parts[0].words().endswith("rows of 32,768 tokens in parts of 4,096 over the KV cache")
    with pytest.raises(ValueError, match="scoring 32,768 tokens needs .* GiB.*: evaluate shorter"):
        evaluation.plan_that_fits(TINY, T, CPU, 0.4)


def test_attention_that_reads_rows_at_once_is_planned_whole_only():
    cfg = with_settings("nsa", model_overrides=("num_layers=1",))
    whole = evaluation.planned(cfg, 8192, CPU)
    with pytest.raises(ValueError, match=f"needs {whole.gib:.1f} GiB"):
        evaluation.plan_that_fits(cfg, 8192, CPU, whole.gib - 10 / GIB)


def test_what_an_earlier_record_left_behind_is_not_freed_in_the_next_one():
    class Cycle:
        def __init__(self):
            self.itself = self
            self.values = torch.zeros(4_000_000)

    def step():
        gc.collect()
        return torch.zeros(1_000_000)

    peak_bytes(lambda: [Cycle(), None][1], CPU)
    assert peak_bytes(step, CPU) == 4_000_000
