"""data/prompts.py: what is a prompt, what is an answer, and the order of a run."""

import numpy as np
import pytest

from data.dataset import open_dataset
from data.loader import IGNORE, Batch
from data.prompts import Prompts, read_prompt, require_one_length
from data.writer import TokenizedDocument, write_dataset

END = 9


def document(prompt: list[int], answer: list[int], after: list[int] = ()) -> TokenizedDocument:
    tokens = np.array([*prompt, *answer, *after, END])
    learned = np.zeros(len(tokens), dtype=bool)
    learned[len(prompt) : len(prompt) + len(answer)] = True
    return TokenizedDocument(tokens, learned=learned)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prompts") / "data"
    made = [document([n % 7 + 1] * (n % 5 + 1), [8, n % 3]) for n in range(40)]
    made.append(document([1, 2, 3], [4, 5], after=[6, 7]))
    write_dataset(made, folder, vocab_size=10, eod_id=END, val_fraction=0.2, masked=True)
    return open_dataset(folder)


def all_prompts(dataset, name: str) -> list:
    split = dataset.split(name)
    return [read_prompt(dataset, split, n, n) for n in range(split.num_documents)]


def test_the_learned_tokens_are_the_answer_and_those_before_them_the_prompt(dataset):
    found = all_prompts(dataset, "train") + all_prompts(dataset, "val")
    assert len(found) == 41
    for prompt in found:
        answer = prompt.answer.tolist()
        if answer == [4, 5]:
            assert prompt.tokens.tolist() == [1, 2, 3]
        else:
            assert answer[0] == 8 and len(answer) == 2
            assert len(set(prompt.tokens.tolist())) == 1 and 1 <= len(prompt.tokens) <= 5


def test_without_a_mask_a_document_is_a_prompt_without_its_end(tmp_path):
    made = [TokenizedDocument(np.array([n % 7, 3, END])) for n in range(9)]
    write_dataset(made, tmp_path / "data", vocab_size=10, eod_id=END, val_fraction=0.2)
    plain = open_dataset(tmp_path / "data")
    for prompt in all_prompts(plain, "train"):
        assert len(prompt.tokens) == 2 and not len(prompt.answer)


def test_every_epoch_has_every_prompt_once_in_another_order(dataset):
    rows = 4
    order = Prompts(dataset, longest=8, global_batch_rows=rows, seed=1)
    number = order.split.num_documents
    epochs = [[order.row_index(e * number + p) for p in range(number)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(number))
    assert epochs[0] != epochs[1]

    halves = [order.prompts(3, rank, 2) for rank in range(2)]
    whole = order.prompts(3)
    assert [p.position for half in halves for p in half] == [p.position for p in whole]
    assert [p.position for p in whole] == list(range(3 * rows, 4 * rows))


def test_skipped_positions_are_left_out(dataset):
    order = Prompts(dataset, longest=8, global_batch_rows=4, seed=1)
    without = order.without(((1, 3),))
    assert [p.position for p in without.prompts(0)] == [0, 3, 4, 5]
    assert without.state(1)["position"] == 6 and without.state(1)["skip"] == [[1, 3]]


def test_a_row_for_the_log_has_the_prompt_and_labels_its_answer(dataset):
    order = Prompts(dataset, longest=8, global_batch_rows=4)
    batch: Batch = order.rows([0])
    prompt = order.prompt(0)
    length = len(prompt.tokens)
    assert batch.tokens[0, :length].tolist() == prompt.tokens.tolist()
    labels = batch.labels[0]
    assert labels[length - 1 : length + 1].tolist() == prompt.answer.tolist()
    assert (np.delete(labels, [length - 1, length]) == IGNORE).all()


@pytest.mark.parametrize(
    "longest, rows, words",
    [(2, 4, "--context_length"), (8, 50, "fewer than the 50 ")],
)
def test_what_does_not_fit_is_refused(dataset, longest, rows, words):
    with pytest.raises(ValueError, match=words):
        Prompts(dataset, longest=longest, global_batch_rows=rows)


@pytest.mark.parametrize(
    "bad, place", [(document([], [1, 2]), 0), (document([], []), 17), (document([], [1, 2]), 39)]
)
def test_a_run_does_not_start_with_a_document_without_a_prompt(tmp_path, bad, place):
    made = [document([1, 2, 3], [4]) for _ in range(40)]
    made[place] = bad
    # several shards
    sizes = dict(vocab_size=10, eod_id=END, val_fraction=0, shard_tokens=20)
    write_dataset(made, tmp_path / "data", **sizes, masked=True)
    found = open_dataset(tmp_path / "data")
    with pytest.raises(ValueError, match=f"document {place} of train "):
        Prompts(found, longest=8, global_batch_rows=4)


def test_the_answer_is_the_first_run_of_learned_tokens(tmp_path):
    learned = np.array([False, True, False, True, False])
    made = [TokenizedDocument(np.array([1, 2, 3, 4, END]), learned=learned) for _ in range(4)]
    write_dataset(made, tmp_path / "data", vocab_size=10, eod_id=END, val_fraction=0, masked=True)
    found = open_dataset(tmp_path / "data")
    for prompt in all_prompts(found, "train"):
        assert prompt.tokens.tolist() == [1] and prompt.answer.tolist() == [2]


def test_prompts_of_several_lengths_are_named(tmp_path):
    made = [document([1, 2, 3], [4] * (n % 3 + 1)) for n in range(20)]
    sizes = dict(vocab_size=10, eod_id=END, val_fraction=0, masked=True)
    write_dataset(made, tmp_path / "alike", **sizes)
    alike = open_dataset(tmp_path / "alike")
    require_one_length(alike, alike.split("train"))

    made[13] = document([1, 2], [4])
    write_dataset(made, tmp_path / "data", **sizes)
    found = open_dataset(tmp_path / "data")
    with pytest.raises(ValueError, match="document 13 of train .*--batch_size 1"):
        require_one_length(found, found.split("train"))
