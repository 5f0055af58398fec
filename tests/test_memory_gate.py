"""A change of more than 1% in the predicted peak of eight configurations fails, naming the tensor
that grew.

After a change that is meant: `python -m tests.test_memory_gate` writes the table anew; commit it
with the reason.
"""

import json
from pathlib import Path

import pytest

from longhaul.config import TrainConfig
from longhaul.planner.report import top_tensors
from longhaul.planner.simulate import profile
from tests.tiers import few_fast

TABLE = Path(__file__).with_name(
    "memory_peaks.json"
)  # name -> peak bytes and the tensors alive there
LONG = dict(context_length=131072, gradient_checkpointing="full")
CONFIGURATIONS = {
    "4B 131k": (LONG, 1),
    "4B 131k nsa": (LONG | dict(attention_type="nsa"), 1),
    "4B 131k 2 ranks": (LONG, 2),
    "4B 131k standard loss": (LONG | dict(loss="standard"), 1),
    "4B 8k no checkpointing": (dict(context_length=8192), 1),
    "8B 32k 8 ranks nsa": (
        dict(
            model_size="8B",
            context_length=32768,
            gradient_checkpointing="full",
            attention_type="nsa",
        ),
        8,
    ),
    "0.6B 4k fp32 batch 4": (dict(model_size="0.6B", dtype="fp32", batch_size=4), 1),
    "tiny 2k accumulation": (
        dict(model_size="tiny", context_length=2048, gradient_accumulation_steps=2),
        1,
    ),
}


def predicted(name: str) -> dict:
    changes, ranks = CONFIGURATIONS[name]
    found = profile(TrainConfig(**changes), ranks)
    tensors = {
        name_of(tensor): tensor["bytes"] * tensor["count"] for tensor in top_tensors(found, 60)
    }
    return dict(
        peak_live_bytes=found.peak,
        peak_stage=found.peak_stage,
        categories=found.stages[found.peak_stage],
        tensors=tensors,
    )


def name_of(tensor: dict) -> str:
    shape = "x".join(map(str, tensor["shape"]))
    origin = f"from {tensor['op']} in {tensor['stage']}"
    return f"{tensor['module']} {tensor['category']} {shape} {tensor['dtype']} {origin}"


def complaint(name: str, old: dict, new: dict) -> str:
    """What changed, with the tensor and the category that grew most; an empty text if the peak
    is within 1%.
    """
    change = new["peak_live_bytes"] / old["peak_live_bytes"] - 1
    if abs(change) <= 0.01:
        return ""

    def grown(key: str) -> str:
        growth = {
            tensor: new[key].get(tensor, 0) - old[key].get(tensor, 0)
            for tensor in new[key].keys() | old[key].keys()
        }
        largest = max(growth, key=lambda tensor: growth[tensor] * (1 if change > 0 else -1))
        return f"{largest} by {growth[largest]:+,} bytes"

    return (
        f"{name}: the peak changed by {100 * change:+.2f}%, in {new['peak_stage']}; "
        f"tensor: {grown('tensors')}; category: {grown('categories')}"
    )


@pytest.mark.parametrize("name", few_fast(CONFIGURATIONS, 4))
def test_the_predicted_peak_is_the_committed_one(name):
    assert not complaint(name, json.loads(TABLE.read_text())[name], predicted(name))


if __name__ == "__main__":
    TABLE.write_text(
        json.dumps({name: predicted(name) for name in CONFIGURATIONS}, indent=1) + "\n"
    )
