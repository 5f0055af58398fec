"""docs/POSTTRAIN.md holds what the tables compute, and the doors print them."""

import re
import shlex
from pathlib import Path

import pytest

import profile_memory
from longhaul.memory import posttrain
from longhaul.memory.needs import needs
from longhaul.posttrain.config import GradeConfig, IntuitorConfig
from scripts import grade, intuitor

TEXT = (Path(__file__).parent.parent / "docs" / "POSTTRAIN.md").read_text(encoding="utf-8")


def test_the_document_holds_the_tables_of_grade():
    assert posttrain.grade_table([]) in TEXT


@pytest.mark.slow
def test_the_document_holds_the_last_figure_of_131072_tokens():
    """Not the other simulated figures, which the same function computes, for their time."""
    profile = posttrain.of_longhaul(posttrain.SHAPES["Qwen2.5-1.5B"], 131_072, posttrain.GROUP)
    row = next(line for line in TEXT.splitlines() if line.startswith("| 131,072 |"))
    assert row.endswith(f"| {posttrain.in_gb(profile)} |")


@pytest.mark.slow
@pytest.mark.parametrize("changes, times", [({}, 4), (dict(freeze_embeddings=True), 20)], ids=str)
def test_mixtures_over_a_cache_take_so_many_times_less_than_the_published_form(changes, times):
    """Of 64 tokens, above the weights."""

    def above_the_weights(**settings) -> int:
        cfg = GradeConfig(
            model_size="tiny",
            vocab_size=32_000,
            context_length=96,
            max_new_tokens=64,
            dtype="fp32",
            **settings,
        )
        found = needs(cfg)
        return found.peak - found.static

    legacy = above_the_weights(method="gumbel_legacy", gradient_checkpointing="none")
    assert legacy >= times * above_the_weights(**changes)


def planning_commands() -> list[str]:
    """The commands of profile_memory.py in the blocks of the document's first part."""
    first, _ = TEXT.split("## Memory\n")
    blocks = re.findall(r"^```(?:bash)?\n(.*?)^```", first, re.M | re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith("python profile_memory.py")]


@pytest.mark.slow
@pytest.mark.parametrize("command", planning_commands())
def test_the_document_plans_runs(command, capsys):
    _, _, *words = shlex.split(command)
    code = profile_memory.main(words)
    assert code == 0 or (code == 2 and "fits after these changes" in capsys.readouterr().out)


def test_the_document_plans_runs_of_both_programs():
    text = "".join(planning_commands())
    assert "--task intuitor" in text and "--task grade" in text


def test_ppo_needs_the_logits_and_their_gradient():
    shape = posttrain.SHAPES["Qwen2.5-1.5B"]
    logits = 4 * 64 * 4096 * 151_936
    ppo = posttrain.with_whole_logits(shape, 64, 4096)
    assert posttrain.reward(64, 4096) < 1e-4 * ppo
    assert 2 * logits < ppo < 2.3 * logits


def test_the_shapes_are_those_of_qwen():
    shape = posttrain.SHAPES["Qwen2.5-1.5B"]
    parameters = IntuitorConfig(**shape.settings()).model().num_params()
    assert parameters == pytest.approx(1_543_714_304, rel=1e-4)  # with its biases


def test_the_doors_print_the_tables(capsys):
    grade.main(["--memory_table"])
    assert posttrain.soft_tokens() in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [["--batch", "12"], ["--tokens", "4k"], ["--tokens", "4"], ["--model", "Qwen9"], ["--x"]],
)
def test_words_that_make_no_table_are_one_line_and_exit_code_2(words, capsys):
    with pytest.raises(SystemExit) as stop:
        intuitor.main(["--memory_table", *words])
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
