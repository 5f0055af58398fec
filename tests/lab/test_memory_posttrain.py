"""docs/LAB.md holds what the table of Intuitor computes, and the doors print the tables."""

from pathlib import Path

import pytest

from lab import grade
from lab.posttrain import memory
from lab.posttrain.config import GradeConfig
from longhaul.planner.needs import needs

QWEN = "Qwen2.5-1.5B"
TEXT = (Path(__file__).parent.parent.parent / "docs" / "LAB.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("tokens", [2048, 8192, 18_432, 131_072])
def test_the_document_holds_what_whole_logits_take(tokens):
    config = memory.of_shape(QWEN).model()
    logits = 4 * 64 * tokens * config.vocab_size
    whole = memory.with_whole_logits(config, 64, tokens)
    assert f"\n| {tokens:,} | {logits / 1e9:,.1f} | {whole / 1e9:,.1f} | " in TEXT


@pytest.mark.slow
def test_the_document_holds_the_last_figure_of_131072_tokens():
    """Not the other simulated figures, which the same function computes, for their time."""
    profile = memory.of_longhaul(QWEN, 131_072, memory.GROUP)
    row = next(line for line in TEXT.splitlines() if line.startswith("| 131,072 |"))
    assert row.endswith(f"| {profile.peak / 1e9:,.1f} |")


def above_the_weights(**settings) -> int:
    """Bytes of 24 tokens of a policy."""
    cfg = GradeConfig(
        model_size="tiny",
        vocab_size=32_000,
        context_length=56,
        max_new_tokens=24,
        dtype="fp32",
        **settings,
    )
    found = needs(cfg)
    return found.peak - found.static


@pytest.mark.slow
def test_mixtures_over_a_cache_take_half_of_the_published_form_and_a_tenth_if_frozen():
    published = above_the_weights(method="gumbel_legacy", gradient_checkpointing="none")
    assert published >= 2 * above_the_weights()
    assert published >= 10 * above_the_weights(freeze_embeddings=True)


def test_ppo_needs_the_logits_and_their_gradient():
    config = memory.of_shape(QWEN).model()
    logits = 4 * 64 * 4096 * 151_936
    ppo = memory.with_whole_logits(config, 64, 4096)
    assert memory.reward(64, 4096) < 1e-4 * ppo
    assert 2 * logits < ppo < 2.3 * logits


def test_the_shapes_are_those_of_qwen():
    config = memory.of_shape(QWEN).model()
    assert config.num_params() == pytest.approx(1_543_714_304, rel=1e-4)  # with its biases


def test_the_doors_print_the_tables(capsys):
    grade.main(["--memory_table"])
    assert memory.soft_tokens() in capsys.readouterr().out
