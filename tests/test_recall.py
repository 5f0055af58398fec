"""Documents of the synthetic task: every answer can be found, once, behind its key."""

import json

import numpy as np
import pytest

from data import recall
from data.dataset import open_dataset
from data.manifest import MANIFEST
from data.recall import END, KEYS, NOISE, VALUES, VOCABULARY, Form
from longhaul.evals.tasks import Sizes, TaskItems, Vocabulary

FORM = Form(64, 9)


def random(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def made(form: Form = FORM, seed: int = 0, make=recall.recall):
    document = make(form, random(seed))
    return document.tokens, document.learned


def write(folder, *more: str) -> int:
    flags = ["--lengths", "16:4", "64:9", "--tokens", "2000", "--output", str(folder)]
    return recall.main([*flags, *more])


@pytest.mark.parametrize("form", [Form(7, 2), Form(16, 4), FORM, Form(100, 20), Form(1024, 64)])
@pytest.mark.parametrize("make", [recall.recall, recall.periodic])
def test_every_answer_is_the_value_behind_the_one_earlier_pair_of_its_key(form, make):
    for seed in range(20):
        tokens, learned = made(form, seed, make)
        assert len(tokens) == len(learned) == form.length and tokens[-1] == END
        pairs = {}
        for position in range(form.length - 1):
            if tokens[position] not in KEYS:
                continue
            key, value = tokens[position], tokens[position + 1]
            assert learned[position + 1] == (key in pairs and value != END)
            if value != END:  # a period may end within a pair
                assert value in VALUES
                assert pairs.setdefault(key, value) == value
        assert set(tokens[learned]) <= set(VALUES) and not learned[0]


def test_pairs_stand_in_noise_and_are_asked_at_the_end():
    tokens, learned = made()
    asked = FORM.asked
    assert asked == 9 and learned.sum() == asked
    assert np.flatnonzero(learned).tolist() == list(range(FORM.length - 2 * asked, 63, 2))
    body = tokens[: FORM.length - 1 - 2 * asked]
    assert sum(token in NOISE for token in body) == len(body) - 2 * FORM.pairs

    # in the order of the places, answers would be at a fixed distance
    keys = tokens[np.isin(tokens, KEYS)]
    assert set(keys[:9]) == set(keys[9:]) and keys[:9].tolist() != keys[9:].tolist()


def test_short_documents_ask_keys_again_and_only_they_are_periodic():
    forms = [Form(32, 8, again=True), Form(64, 9)]
    kinds = {32: set(), 64: set()}
    for tokens, _, learned, *_ in recall.documents(forms, 6400, 0.5, 1):
        asked = tokens[np.flatnonzero(learned) - 1].tolist()
        again = len(set(asked)) < len(asked)
        period = int(np.flatnonzero(learned)[0]) - 1
        repeated = (tokens[period:-1] == tokens[: -1 - period]).all()
        kinds[len(tokens)].add((bool(repeated), again))
    assert kinds[64] == {(False, False)}
    assert kinds[32] == {(False, True), (False, False), (True, True)}


# ---- the noise


IDS = {"own": set(NOISE), "values": set(VALUES), "keys": set(KEYS), "all": set(range(END))}


def parted(tokens, learned) -> tuple[set[int], list[int]]:
    """The keys that a document asks for, and its noise: what is not in their pairs."""
    asked = set(tokens[np.flatnonzero(learned) - 1].tolist())
    body = tokens[: int(np.flatnonzero(learned)[0]) - 1].tolist()
    noise = []
    before = None
    for token in body:
        if token not in asked and before not in asked:
            noise.append(token)
        before = token
    return asked, noise


@pytest.mark.parametrize("kind", recall.NOISES)
def test_noise_has_all_ids_of_its_kind_and_never_a_key_that_is_asked(kind):
    form = Form(8192, 16)
    for seed in range(4):
        document = recall.recall(form, random(seed), kind)
        asked, noise = parted(document.tokens, document.learned)
        assert len(asked) == 16 and len(noise) == form.length - 1 - 4 * 16
        assert set(noise) == IDS[kind] - asked


def test_noise_of_its_own_ids_shares_none_with_pairs_and_each_kind_comes_as_often():
    assert not IDS["own"] & IDS["values"] and not IDS["own"] & IDS["keys"]
    assert IDS["all"] == IDS["own"] | IDS["values"] | IDS["keys"]
    times = dict.fromkeys(recall.NOISES, 0)
    for tokens, _, learned, *_ in recall.documents([Form(2048, 64)], 2048 * 500, 0.5, 3):
        noise = set(parted(tokens, learned)[1])
        kinds = [kind for kind in IDS if noise <= IDS[kind]]
        times[kinds[0]] += 1
    assert sum(times.values()) == 500 and min(times.values()) > 90


def test_long_documents_have_8_pairs_or_more_and_small_numbers_as_often_as_large():
    numbers = []
    for _, _, learned, *_ in recall.documents([Form(256, 64)], 256 * 2000, 0.5, 4):
        numbers.append(int(learned.sum()))
    assert min(numbers) == 8 and max(numbers) > 60
    halves = [sum(number < 16 for number in numbers), sum(number >= 32 for number in numbers)]
    assert all(0.28 < half / 2000 < 0.38 for half in halves)


def test_pairs_stand_at_every_depth_as_often_in_every_noise():
    for kind in recall.NOISES:
        eighths = np.zeros(8)
        for seed in range(60):
            document = recall.recall(Form(1024, 32), random(seed), kind)
            asked, _ = parted(document.tokens, document.learned)
            body = document.tokens[: 1023 - 64]
            places = np.flatnonzero(np.isin(body, list(asked)))
            eighths += np.histogram(places, 8, (0, len(body)))[0]
        assert eighths.sum() == 60 * 32
        assert (abs(eighths / eighths.mean() - 1) < 0.25).all()


def test_periods_differ_from_document_to_document():
    periods = set()
    for seed in range(200):
        tokens, learned = made(seed=seed, make=recall.periodic)
        period = int(np.flatnonzero(learned)[0]) - 1
        assert (tokens[period:-1] == tokens[: -1 - period]).all()
        periods.add(period // 2)
    assert periods == set(range(1, FORM.pairs + 1))


def test_the_folder_is_a_masked_dataset_that_says_what_its_ids_mean(tmp_path, capsys):
    assert write(tmp_path / "d", "--val_fraction", "0.1") == 0
    assert f"train with --data {tmp_path / 'd'} --vocab_size 385" in capsys.readouterr().out
    dataset = open_dataset(tmp_path / "d", verify=True)
    assert dataset.masked and dataset.vocab_size == VOCABULARY == 385 and dataset.eod_id == END
    assert dataset.manifest.task == {
        "keys": [0, 128],
        "values": [128, 256],
        "noise": [256, 384],
        "query": None,
    }
    lengths = np.concatenate([split.lengths for split in dataset.splits.values()])
    assert (lengths == 16).sum() == 125 and (lengths == 64).sum() == 32 and len(lengths) == 157
    assert dataset.split("val").num_documents > 0


def test_retrieval_asks_in_the_ids_of_the_task(tmp_path):
    assert write(tmp_path / "d") == 0
    vocabulary = Vocabulary.of_dataset(open_dataset(tmp_path / "d"), VOCABULARY)
    item = TaskItems("multikey", 128, 1, vocabulary, Sizes())[0].item
    labels = item.labels_BT[item.labels_BT >= 0].tolist()
    assert len(labels) == 4 and set(labels) <= set(VALUES)
    assert set(item.tokens_BT.flatten().tolist()) <= set(range(END))


def test_a_seed_is_a_dataset(tmp_path):
    found = []
    for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        assert write(tmp_path / name, "--seed", seed) == 0
        found.append(json.loads((tmp_path / name / MANIFEST).read_text())["checksum"])
    assert found[0] == found[1] != found[2]
