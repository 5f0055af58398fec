"""data.prepare --answer_field: records become prompts with answers, and only the answers are
learned.
"""

import functools
import json
import re
import shutil
from pathlib import Path

import pytest

from data import pipeline
from data.dataset import Dataset, open_dataset
from data.load_tokenizer import load_tokenizer
from data.pipeline import build_dataset
from data.prepare import main
from data.sources import Document
from data.tokenizer import Tokenizer
from data.tokenizer import train as train_tokenizer
from tests.kit import contents
from tests.test_data_resume import Killed, stopping

SEEN = [
    {
        "question": f"Q: What is {n} and {n % 7}?\nA:",
        "meta": {"answer": f" {n + n % 7}"},
        "id": str(n),
    }
    for n in range(60)
]
RECORDS = SEEN[:16]  # the tokenizer has seen more
FIELDS = ["--text_field", "question", "--answer_field", "meta.answer"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """qa.jsonl, and a tokenizer that has seen its text."""
    folder = tmp_path_factory.mktemp("answers")
    lines = [json.dumps(record) + "\n" for record in RECORDS]
    (folder / "qa.jsonl").write_text("".join(lines))
    texts = [record["question"] + record["meta"]["answer"] for record in SEEN]
    train_tokenizer(texts, 290, folder / "tokenizer.model")
    return folder


def arguments(
    inputs: Path, output: Path, *more: str, fields=FIELDS, file: Path | None = None
) -> list[str]:
    given = ["--input", file or inputs / "qa.jsonl", "--tokenizer", inputs / "tokenizer.model"]
    settings = ["--output", output, "--val_fraction", "0.2"]
    return [*map(str, [*given, *settings]), *fields, *more]


@pytest.fixture(scope="module")
def dataset(inputs) -> Dataset:
    assert main(arguments(inputs, inputs / "asked")) == 0
    return open_dataset(inputs / "asked", verify=True)


def documents_of(dataset: Dataset) -> list[tuple[list[int], list[bool]]]:
    """The ids and marks of all documents, in the order of the input."""
    found = {}
    for split in dataset.splits.values():
        for number, document in enumerate(split._documents):
            ids = split.read(number, 0, 10**9).tolist()
            found[document] = (ids, split.learned(number, 0, 10**9).tolist())
    return [found[document] for document in sorted(found)]


# ---- what is written


def test_only_the_answer_and_the_end_are_learned_and_the_prompt_has_its_own_ids(inputs, dataset):
    tokenizer = Tokenizer(inputs / "tokenizer.model")
    expected = []
    for record in RECORDS:
        prompt = tokenizer.encode(record["question"])
        answer = [*tokenizer.encode(record["meta"]["answer"]), tokenizer.eod_id]
        expected.append((prompt + answer, [False] * len(prompt) + [True] * len(answer)))
    assert documents_of(dataset) == expected
    assert dataset.masked and len(dataset.splits) == 2


def test_a_long_prompt_and_answer_in_many_parts_keep_their_marks(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "BATCH_CHARS", 10_000)
    tokenizer = Tokenizer(inputs / "tokenizer.model")
    prompt, answer = "What is 1?\n" * 5000, "8 and 2\n" * 3000
    made = build_dataset(
        lambda: [Document("a", prompt, answer)],
        tmp_path / "d",
        tokenizer=inputs / "tokenizer.model",
        workers=2,
        answers=True,
    )
    [(ids, learned)] = documents_of(made)  # one record is not cut for a validation split
    first = tokenizer.encode(prompt)
    assert ids == [*first, *tokenizer.encode(answer), tokenizer.eod_id]
    assert learned == [False] * len(first) + [True] * (len(ids) - len(first))


def test_a_row_of_parquet_is_what_a_line_of_jsonl_is(inputs, dataset, tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: no parquet")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(RECORDS), tmp_path / "qa.parquet")
    assert main(arguments(inputs, tmp_path / "d", file=tmp_path / "qa.parquet")) == 0
    assert documents_of(open_dataset(tmp_path / "d")) == documents_of(dataset)


def test_a_tokenizer_is_trained_on_prompts_and_answers(tmp_path):
    records = [{"text": f"{n} a b c", "answer": "\u03b1\u03b2"} for n in range(30)]
    (tmp_path / "qa.jsonl").write_text("\n".join(map(json.dumps, records)))
    given = ["--input", str(tmp_path / "qa.jsonl"), "--output", str(tmp_path / "d")]
    assert main([*given, "--answer_field", "answer", "--vocab_size", "278"]) == 0
    tokenizer = load_tokenizer(tmp_path / "d")
    for text in "ab\u03b1\u03b2":
        assert len(tokenizer.encode(text)) == 1


# ---- kills


@pytest.mark.parametrize("change", [FIELDS, [*FIELDS[:3], "id"]])
def test_a_killed_preparation_continues_unless_another_field_is_asked(
    inputs, tmp_path, monkeypatch, capsys, change
):
    writer = functools.partial(pipeline.Writer, shard_tokens=1)
    monkeypatch.setattr(pipeline, "Writer", writer)
    with monkeypatch.context() as killed:
        killed.setattr(pipeline, "_joined", stopping(9))
        with pytest.raises(Killed):
            main(arguments(inputs, tmp_path / "d"))
    assert not (tmp_path / "d").exists()
    assert main(arguments(inputs, tmp_path / "d", fields=change)) == 0
    assert ("continuing after 8 documents" in capsys.readouterr().out) == (change == FIELDS)
    assert main(arguments(inputs, tmp_path / "whole", fields=change)) == 0
    assert contents(tmp_path / "d") == contents(tmp_path / "whole")


# ---- bad input


GOOD = '{"text": "one", "answer": "1"}\n'
BAD_RECORDS = {
    '{"text": "two"}': "--answer_field",
    '{"answer": "2"}': "--text_field",
    '{"text": "", "answer": "2"}': "--text_field",
    '{"text": "two", "answer": ""}': "--answer_field",
    '{"text": "two", "answer": "a\\ud800"}': "character 1 of 'answer'",
}


@pytest.mark.parametrize("record", BAD_RECORDS)
def test_a_bad_record_is_refused_by_its_line_or_left_out_on_request(
    inputs, tmp_path, capsys, record
):
    (tmp_path / "qa.jsonl").write_text(f"{GOOD}{record}\n{GOOD}")
    shutil.copy(inputs / "tokenizer.model", tmp_path)
    fields = ["--answer_field", "answer"]
    assert main(arguments(tmp_path, tmp_path / "d", fields=fields)) == 2
    [error] = capsys.readouterr().err.splitlines()
    named = f"qa.jsonl:2: .*{BAD_RECORDS[record]}"
    assert re.search(named, error) and error.endswith("--on_error skip")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["qa.jsonl", "tokenizer.model"]

    assert main(arguments(tmp_path, tmp_path / "d", "--on_error", "skip", fields=fields)) == 0
    [error] = capsys.readouterr().err.splitlines()
    assert re.search(f"left out: .*{named}", error)
    assert len(documents_of(open_dataset(tmp_path / "d"))) == 2


def test_a_bad_row_of_parquet_is_refused_by_its_number(inputs, tmp_path, capsys):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: no parquet")
    from pyarrow import parquet

    table = pyarrow.table({"text": ["one", "two"], "answer": ["1", None]})
    parquet.write_table(table, tmp_path / "qa.parquet")
    for field, named in {"answer": "qa.parquet:2: ", "label": "found: text, answer"}.items():
        fields = ["--answer_field", field]
        given = arguments(inputs, tmp_path / "d", fields=fields, file=tmp_path / "qa.parquet")
        assert main(given) == 2
        assert named in capsys.readouterr().err
        assert not (tmp_path / "d").exists()
