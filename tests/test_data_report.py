"""`data.report`: every figure is that of a count token by token, and a context that is not real is
named.
"""

import numpy as np
import pytest

from data import report
from data.packing import pack
from data.writer import write_dataset

LENGTHS = np.array([5, 64, 64, 100, 3, 257, 1, 30, 31, 32, 1000])


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Documents of LENGTHS tokens."""
    draw = np.random.default_rng(0)
    documents = [draw.integers(1, 90, length - 1) for length in LENGTHS]
    documents[6] = np.array([0])
    output = tmp_path_factory.mktemp("report") / "d"
    return write_dataset(documents, output, vocab_size=90, eod_id=0, val_fraction=0)


@pytest.mark.parametrize("context", [1, 2, 31, 64, 999, 1000, 5000])
def test_the_share_of_tokens_with_context_is_that_of_a_count(context):
    counted = sum(place >= context for length in LENGTHS for place in range(length))
    assert report.share_with_context(LENGTHS, context) == counted / LENGTHS.sum()


def test_packing_figures_are_those_of_a_count():
    plan = pack(LENGTHS, 1024)
    tokens = pairs = 0
    for row in range(plan.num_rows):
        for _, _, length in plan.row(row):
            tokens += length
            pairs += length**2
    padding = 1 - tokens / (plan.num_rows * 1024)
    real = pairs / (plan.num_rows * 1024**2)
    cells = report.contexts(LENGTHS)[1].split()
    assert cells[:5] == ["1,024", "0", "0.0%", f"{plan.num_rows}", f"{padding:.2%}"]
    assert cells[5] == f"{real:.1%}"


def test_documents_of_validation_that_training_sees_too_are_counted(tmp_path):
    ids = [*range(1, 41), *range(1, 21), *range(41, 61)]  # 20 of the documents are there twice
    documents = [np.full(9, one) for one in ids]
    made = write_dataset(documents, tmp_path / "d", vocab_size=90, eod_id=0, val_fraction=0.3)
    train, val = (
        [bytes(split.read(number, 0, 9)) for number in range(split.num_documents)]
        for split in (made.split("train"), made.split("val"))
    )
    both = sum(document in train for document in val)
    assert 0 < both < len(val)
    assert f"  of val, {both} documents are also in train" in report.report(made)


def test_the_report_has_all_figures_and_warns_of_contexts_that_are_not_real(dataset, capsys):
    assert report.main([str(dataset.path)]) == 0
    text = capsys.readouterr().out
    assert "11 documents, 1,587 tokens, " in text
    for context in report.CONTEXTS:
        assert f"{context:,} " in text
    warnings = [line for line in text.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 7  # from 2,048 to 131,072: the longest document has 1,000 tokens
    assert "this is not training at 131072" in warnings[-1]
