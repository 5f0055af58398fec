"""The closed form is within 0.1% of the simulated peak over a grid of settings."""

import itertools

import pytest

from longhaul.config import TrainConfig
from longhaul.memory.estimate import estimate
from longhaul.memory.simulate import simulate
from tests.tiers import few_fast

SHAPES = [
    ({}, 1),
    (dict(batch_size=3, context_length=2000), 1),
    (dict(dtype="fp32", context_length=4096), 1),
    (dict(context_length=16384), 2),
    (dict(batch_size=2, context_length=4096), 8),
]
DEFAULTS = dict(model_size="0.6B", context_length=8192, model_overrides=("num_layers=4",))
UNTIED = dict(
    model_overrides=("num_layers=4", "tie_embeddings=False"), gradient_checkpointing="full"
)
GRID = []
KINDS = itertools.product(("standard", "nsa"), ("none", "full"), ("chunked", "standard"))
# each kind with two of the five shapes, so that each shape meets each value of each setting
for index, (attention, checkpointing, loss) in enumerate(KINDS):
    for shape, ranks in (SHAPES[index % 5], SHAPES[(index + 2) % 5]):
        changes = dict(attention_type=attention, gradient_checkpointing=checkpointing, loss=loss)
        GRID.append((changes | shape, ranks))

GRID += [
    (dict(attention_type=attention, gradient_checkpointing="selective") | changes, ranks)
    for attention in ("standard", "nsa")
    for changes, ranks in [(dict(context_length=16384), 1), (dict(batch_size=2), 2)]
]
GRID += [
    (dict(gradient_checkpointing="full", context_length=512), 2),
    (dict(gradient_checkpointing="full", dp_replicate=2), 4),
    (dict(gradient_checkpointing="full", gradient_accumulation_steps=2), 1),
    (dict(context_length=16384, gradient_accumulation_steps=2), 2),
    (UNTIED, 4),
    (UNTIED | dict(gradient_accumulation_steps=2), 1),
    (UNTIED | dict(gradient_accumulation_steps=2), 2),
    (
        dict(
            model_overrides=("num_layers=5", "tie_embeddings=False"),
            dtype="fp32",
            loss="standard",
            batch_size=2,
            context_length=777,
        ),
        4,
    ),
    (dict(model_size="tiny", model_overrides=("num_layers=3",), context_length=777), 2),
    (dict(attention_type="nsa", nsa=("kv=separate",), context_length=16384), 1),
    (dict(context_length=300, dtype="fp32"), 1),
    (dict(loss="one_pass"), 1),
    (dict(loss="one_pass", context_length=1500), 2),
    (dict(loss="one_pass", context_length=2000, dtype="fp32"), 2),
    (dict(loss="one_pass", gradient_checkpointing="full", gradient_accumulation_steps=2), 1),
]


@pytest.mark.parametrize("changes, ranks", few_fast(GRID, 16), ids=str)
def test_the_closed_form_is_within_a_thousandth_of_the_simulation(changes, ranks):
    cfg = TrainConfig(**DEFAULTS | changes)
    simulated, _ = simulate(cfg, ranks).peak()
    assert estimate(cfg, cfg.model(), ranks).peak == pytest.approx(simulated, rel=1e-3)
