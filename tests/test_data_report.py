"""`data.report`: every figure is that of a count token by token, and a context that is not real is
named.
"""

import numpy as np
import pytest

from data import report
from data.corpus import prepare_embedded
from data.packing import Plan, pack
from data.writer import write_dataset

LENGTHS = np.array([5, 64, 64, 100, 3, 257, 1, 30, 31, 32, 1000])


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Documents of LENGTHS tokens; two of 64 tokens are the same."""
    draw = np.random.default_rng(0)
    documents = [draw.integers(1, 90, length - 1) for length in LENGTHS]
    documents[2] = documents[1]
    documents[6] = np.array([0])
    output = tmp_path_factory.mktemp("report") / "d"
    return write_dataset(documents, output, vocab_size=90, eod_id=0, val_fraction=0)


def test_the_histogram_counts_every_document_and_token_once():
    buckets = report.histogram(LENGTHS)
    assert sum(bucket.documents for bucket in buckets) == len(LENGTHS)
    assert sum(bucket.tokens for bucket in buckets) == LENGTHS.sum()
    for bucket in buckets:
        inside = [length for length in LENGTHS if bucket.low <= length < 2 * bucket.low]
        assert (bucket.documents, bucket.tokens) == (len(inside), sum(inside))
    assert (buckets[0].low, buckets[-1].low) == (1, 512)


@pytest.mark.parametrize("context", [1, 2, 31, 64, 999, 1000, 5000])
def test_the_share_of_tokens_with_context_is_that_of_a_count(context):
    counted = sum(place >= context for length in LENGTHS for place in range(length))
    assert report.share_with_context(LENGTHS, context) == counted / LENGTHS.sum()


@pytest.mark.parametrize("context", [16, 64, 100, 1024])
def test_packing_figures_are_those_of_a_count(context):
    found = report.packing(LENGTHS, context)
    plan = pack(LENGTHS, context)
    tokens = pairs = 0
    for row in range(plan.num_rows):
        for _, _, length in plan.row(row):
            tokens += length
            pairs += length**2
    assert found.rows == plan.num_rows
    assert found.padding == pytest.approx(1 - tokens / (plan.num_rows * context))
    assert found.real_pairs == pytest.approx(pairs / (plan.num_rows * context**2))
    assert found.needless_cuts == 0


def test_a_needless_cut_is_counted():
    def plan_of(*pieces: tuple[int, int]) -> Plan:
        document, length = np.array(pieces).T
        return Plan(10, document, np.zeros_like(length), length, np.arange(len(length) + 1))

    lengths = np.array([10, 25])
    assert report.needless_cuts(plan_of((0, 10), (1, 10), (1, 10), (1, 5)), lengths) == 0
    assert report.needless_cuts(plan_of((0, 4), (0, 6), (1, 10), (1, 10), (1, 5)), lengths) == 1
    assert report.needless_cuts(plan_of((0, 10), (1, 5), (1, 5), (1, 10), (1, 5)), lengths) == 1


def test_copies_are_found_by_their_ids(dataset):
    split = dataset.split("train")
    assert report.duplicates(report.digests(split), split.lengths) == (1, 64)


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
    assert "11 documents, 1,587 tokens, 1 documents are copies of others (4.0% of the" in text
    for context in (*report.CONTEXTS, *report.PACKED):
        assert f" {context:,} " in text
    warnings = [line for line in text.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == len(report.PACKED)  # no document has 1,024 tokens
    assert "this is not training at 131072" in warnings[-1]


@pytest.mark.slow
def test_the_embedded_corpus_packs_without_needless_cuts_and_with_little_padding():
    lengths = prepare_embedded().split("train").lengths
    for context in report.PACKED:
        found = report.packing(lengths, context)
        assert found.needless_cuts == 0
        assert found.padding <= 0.01
        assert found.warning is None
