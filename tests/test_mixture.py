"""Corpora keep their shares to within a row at every position, whoever reads them."""

import random
from fractions import Fraction

import numpy as np
import pytest

import train
from data.loader import Loader
from data.mixture import (
    Corpus,
    Mixture,
    Split,
    Turns,
    left_out,
    open_corpora,
    order,
    parse,
    parts,
)
from data.writer import write_dataset
from scripts import evaluate
from tests import kit
from tests.events import calls

VOCAB = kit.VOCAB
EOD = 0


def make(folder, lengths, seed=0, **settings):
    """A dataset of documents of the given lengths."""
    rng = np.random.default_rng(seed)
    documents = [rng.integers(1, VOCAB, length - 1) for length in lengths]
    given = {"vocab_size": VOCAB, "eod_id": EOD, "val_fraction": 0} | settings
    return write_dataset(documents, folder, **given)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """web of short documents, books of long ones, code of both."""
    folder = tmp_path_factory.mktemp("corpora")
    lengths = dict(web=[20] * 300, books=[500] * 12, code=[10, 300] * 15)
    shares = dict(web=Fraction(1, 2), books=Fraction(3, 10), code=Fraction(1, 5))
    return tuple(
        Corpus(name, make(folder / name, lengths[name], seed=seed), shares[name])
        for seed, name in enumerate(lengths)
    )


def mixture(corpora, rows=6, **settings) -> Mixture:
    return order(corpora, 64, rows, **settings)


def names(rows: Mixture, positions) -> list[str]:
    return [rows.row_index(position)[0] for position in positions]


# ---- whose turn it is


def random_shares(rng: random.Random) -> list[Fraction]:
    """Shares of 1 to 12 corpora, which sum to 1."""
    period = rng.choice([20, 100, 1000])
    count = rng.randint(1, 12)
    cuts = sorted(rng.sample(range(1, period), count - 1))
    ends = zip([0, *cuts], [*cuts, period], strict=True)
    return [Fraction(end - begin, period) for begin, end in ends]


def test_each_corpus_is_within_one_row_of_its_share_at_every_position():
    """With the last shares, taking turns by the largest deficit would be 1.5 rows off."""
    rng = random.Random(0)
    drawn = [random_shares(rng) for _ in range(100)]
    for shares in [*drawn, [Fraction(4, 24)] * 5 + [Fraction(1, 240)] * 40]:
        turns = Turns(shares)
        places = np.arange(turns.period + 1)
        for corpus, share in enumerate(shares):
            had = np.concatenate([[0], np.cumsum(turns.corpus == corpus)])
            assert np.abs(had - places * float(share)).max() < 1


def test_counts_and_turns_are_those_of_reading_from_the_start():
    turns = Turns([Fraction(1, 2), Fraction(3, 10), Fraction(1, 5)])
    had = [0, 0, 0]
    for position in range(35):
        assert turns.counts(position).tolist() == had
        corpus, before = turns.at(position)
        assert before == had[corpus]
        had[corpus] += 1


def test_row_one_billion_is_found_as_fast_as_an_early_one(corpora):
    rows = mixture(corpora)

    def found_from(first: int) -> int:
        return calls(lambda: [rows.row_index(first + row) for row in range(100)])

    assert found_from(10**9) < 2 * found_from(1000)


# ---- the rows


def test_the_first_rows_have_the_shares_and_each_corpus_its_own_order(corpora):
    rows = mixture(corpora)
    found = names(rows, range(1000))
    assert [found.count(name) for name in ("web", "books", "code")] == [500, 300, 200]
    # the n-th row of a corpus in the mixture is the n-th of the corpus read by itself
    alone = Loader(corpora[1].dataset, 64, 1)
    books = [p for p in range(1000) if found[p] == "books"]
    for turn, position in enumerate(books[:200:20]):
        tokens = rows.rows([position]).tokens
        np.testing.assert_array_equal(tokens, alone.rows([20 * turn]).tokens)


def test_tokens_seen_count_every_row_that_was_read_and_none_that_was_skipped(corpora):
    rows = mixture(corpora).without(((3, 9), (20, 400)))
    read = [position for step in range(20) for position in rows.positions(step)]
    found = names(rows, read)
    expected = {name: 64 * found.count(name) for name in ("web", "books", "code")}
    assert rows.tokens_seen(20) == expected
    assert sum(expected.values()) == 20 * 6 * 64


def test_one_corpus_is_read_as_without_a_mixture(corpora):
    alone = (Corpus("web", corpora[0].dataset, Fraction(1)),)
    assert isinstance(order(alone, 64, 4), Loader)
    assert order(alone, 64, 4).tokens_seen(3) == {}


def test_short_documents_are_warned_of_by_their_share_of_the_mixture(corpora):
    """At 256 tokens books are long, which are 30% of the rows; at 2,048 no document is."""
    assert order(corpora, 256, 1).warnings() == []
    (warning,) = order(corpora, 2048, 1).warnings()
    assert warning.startswith("only 0% of the tokens") and "not training at 2048" in warning


# ---- documents by their length


def test_long_documents_get_the_share_that_is_asked_for(corpora):
    code = (Corpus("code", corpora[2].dataset, Fraction(1)),)
    rows = order(code, 64, 5, split=Split(63, Fraction(1, 4), "--long_fraction"))
    found = names(rows, range(1000))
    assert found.count("code long") == 750 and found.count("code short") == 250

    for position in range(40):
        batch = rows.rows([position])
        pieces = batch.doc_ids[0].max() + 1
        assert (pieces > 3) == (found[position] == "code short")


def test_every_document_is_in_one_part(corpora):
    dataset = corpora[2].dataset
    halves = parts(
        (Corpus("code", dataset, Fraction(1)),), Split(63, Fraction(1, 4), "--long_fraction")
    )
    loaders = [Loader(dataset, 64, 1, lengths=part.lengths) for part in halves]
    found = [loader.split.num_tokens for loader in loaders]
    assert sum(found) == dataset.split("train").num_tokens and min(found) > 0
    assert loaders[0].split.lengths.max() <= 63 < loaders[1].split.lengths.min()


# ---- whole documents


def pieces_of(rows, positions) -> list[tuple[int, ...]]:
    """The length of each piece of each row, without the padding."""
    found = []
    for position in positions:
        batch = rows.rows([position])
        lengths = np.bincount(batch.doc_ids[0])
        found.append(tuple(length for length in lengths.tolist() if length in (10, 20, 300, 500)))
    return found


def test_whole_documents_leave_out_what_is_longer_than_a_row(corpora):
    code = (Corpus("code", corpora[2].dataset, Fraction(1)),)
    rows = order(code, 64, 2, whole=True)
    assert isinstance(rows, Loader) and rows.split.num_tokens == 150
    assert {length for row in pieces_of(rows, range(12)) for length in row} == {10}
    assert order(code, 300, 2, whole=True).split.num_tokens == 15 * 310
    (line,) = left_out(code, 64)
    assert line.startswith("data: 4,500 of 4,650 tokens of code are left out")
    assert left_out(code, 300) == []


def test_whole_documents_of_a_mixture_and_of_long_ones(corpora):
    """With --long_fraction, long documents are those that fill a row, and no longer ones."""
    halves = (corpora[0], corpora[2])
    shares = tuple(Corpus(one.name, one.dataset, Fraction(1, 2)) for one in halves)
    rows = order(shares, 64, 2, whole=True)
    assert {length for row in pieces_of(rows, range(40)) for length in row} == {10, 20}

    code = (Corpus("code", corpora[2].dataset, Fraction(1)),)
    split = Split(299, Fraction(1, 4), "--long_fraction")
    rows = order(code, 300, 4, split=split, whole=True)
    found = pieces_of(rows, range(40))
    assert [row == (300,) for row in found].count(True) == 30
    with pytest.raises(ValueError, match="--long_fraction"):
        order(code, 200, 4, split=Split(199, Fraction(1, 4), "--long_fraction"), whole=True)


# ---- what --data says


def test_shares_are_exact_decimals(tmp_path):
    assert parse("a:0.1,b:0.2,c:.7") == {
        "a": Fraction(1, 10),
        "b": Fraction(1, 5),
        "c": Fraction(7, 10),
    }
    table = tmp_path / "mix.toml"
    table.write_text('[corpora]\n"data/web" = 0.1\n"data/books" = 0.9\n')
    shares = {"data/web": Fraction(1, 10), "data/books": Fraction(9, 10)}
    assert parse(str(table)) == shares


def test_one_corpus_with_the_whole_share_is_that_dataset(tmp_path):
    """And a path that is not there is one of a dataset, not of a mixture."""
    folder = tmp_path / "web"
    make(folder, [20, 30])
    (corpus,) = open_corpora(f"{folder}:1.0")
    assert (corpus.name, corpus.share) == ("web", 1)
    assert corpus.dataset.path == folder
    with pytest.raises(ValueError, match="missing") as refused:
        open_corpora(str(tmp_path / "missing"))
    assert "share" not in str(refused.value)


# ---- a run


@pytest.fixture(scope="module")
def two_corpora(tmp_path_factory):
    """--data of web and books, which have validation splits."""
    folder = tmp_path_factory.mktemp("two")
    for seed, (name, lengths) in enumerate(dict(web=[15] * 200, books=[90] * 40).items()):
        make(folder / name, lengths, seed, val_fraction=0.2)
    return f"{folder}/web:0.75,{folder}/books:0.25"


def run(data, out, *more: str):
    train.main(kit.arguments(data, out, "--global_batch_size 2 --eval_rows 1", *more))


def test_a_run_logs_the_tokens_and_the_validation_loss_of_each_corpus(
    two_corpora, tmp_path, capsys
):
    run(two_corpora, tmp_path / "run", "--max_steps", "4", "--eval_every", "4")
    *steps, validation = kit.records(tmp_path / "run")
    tokens = 2 * 4 * kit.CONTEXT
    assert steps[-1]["tokens/web"] == 0.75 * tokens and steps[-1]["tokens/books"] == 0.25 * tokens
    losses = [validation[f"validation_loss/{name}"] for name in ("web", "books")]
    mean = 0.75 * losses[0] + 0.25 * losses[1]
    assert validation["validation_loss"] == pytest.approx(mean) and losses[0] != losses[1]

    printed = capsys.readouterr().out
    assert "data:  75.00% web: " in printed and "epochs in 4 steps" in printed
    assert f"validation loss: web {losses[0]:.4f}, books {losses[1]:.4f}" in printed
    assert f"tokens seen: web {0.75 * tokens:,.0f}, books {0.25 * tokens:,.0f}" in printed

    words = f"--checkpoint {tmp_path}/run --device cpu --batches 1"
    evaluate.main(words.split())
    printed = capsys.readouterr().out
    for name, loss in zip(("web", "books"), losses, strict=True):
        assert f"validation of {name} over" in printed
        assert f"validation loss    {loss:.4f} " in printed


def test_changed_shares_are_refused_unless_the_checkpoint_is_named(two_corpora, tmp_path):
    out = tmp_path / "run"
    run(two_corpora, out, "--max_steps", "2", "--schedule", "constant")
    other = two_corpora.replace(":0.75", ":0.5").replace(":0.25", ":0.5")
    more = ["--max_steps", "4", "--schedule", "constant"]
    said = kit.run(kit.arguments(other, out, *more), code=2)
    assert "recorded web 3/4, books 1/4, now web 1/2, books 1/2" in said

    run(other, out, *more, "--resume", str(out / "step-00000002"))
    assert kit.records(out)[-1]["tokens/web"] == 0.5 * 4 * 2 * kit.CONTEXT
