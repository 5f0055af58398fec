"""A sentencepiece model and its tokenizer.json give every text the same ids, and every id list that
belongs to a text the same text.
"""

import json
import random
import sysconfig
from pathlib import Path

import pytest
import sentencepiece

from data.convert_sentencepiece import last_parts, read_pieces, tokenizer_json
from data.load_tokenizer import hash_of_ids
from data.tokenizer import TRAIN_SETTINGS, Tokenizer, train
from tests.test_data_tokenizer import DIFFICULT, TRAINING

tokenizers = pytest.importorskip(
    "tokenizers", reason="the ids of a tokenizer.json are those of this library"
)

SPACES = "\t\n\r\x0b\x0c\x85\u00a0\u2028\u3000\u200b\ufeff\u2581\u2585\ufffd"
WORDS = ["<|endoftext|>", "<unk>", "<0x0A>", "<|user|>", "<|us", "self.", "def ", '"""', "  return"]


def converted(path: Path, folder: Path):
    """The library's tokenizer of the converted model, by way of a file."""
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(tokenizer_json(path)), encoding="utf-8")
    library = tokenizers.Tokenizer.from_file(str(file))
    library.encode_special_tokens = True
    return library


def trained(folder: Path, **changes) -> Path:
    """A model of `data.tokenizer`'s settings but for the changes."""
    path = folder / "changed.model"
    with open(path, "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TRAINING),
            model_writer=file,
            **TRAIN_SETTINGS | dict(vocab_size=700) | changes,
        )
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Tokenizer:
    return train(TRAINING, 600, tmp_path_factory.mktemp("small") / "t.model")


@pytest.fixture(scope="module")
def larger(tmp_path_factory) -> Tokenizer:
    """4,000 tokens of text in several scripts, and spaces within tokens."""
    texts = [path.read_text(encoding="utf-8") for path in STDLIB[:25]]
    scripts = (
        "caf\u00e9 na\u00efve \u65e5\u672c\u8a9e \u043f\u0440\u0438\u0432\u0435\u0442 \U0001f600 "
    )
    return train([*texts, scripts * 50], 4000, tmp_path_factory.mktemp("larger") / "t.model")


STDLIB = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))


def random_texts(seed: int, count: int, pieces: list[str]):
    """Texts that mix a few kinds of characters each: control characters, runs of spaces and of
    newlines, every plane of Unicode, tokens and halves of them.
    """
    rng = random.Random(seed)

    def code_point(first: int, end: int):
        return lambda: chr(rng.randrange(first, end))

    kinds = [
        code_point(0, 0x20),
        code_point(0x20, 0x7F),
        code_point(0x7F, 0x3000),
        code_point(0x3000, 0xD800),
        code_point(0xE000, 0x10000),
        code_point(0x10000, 0x110000),
        lambda: rng.choice(SPACES),
        lambda: rng.choice("\n\t ") * rng.randrange(1, 30),
        lambda: rng.choice(WORDS),
        lambda: rng.choice(pieces),
        lambda: rng.choice(pieces)[: rng.randrange(1, 4)],
    ]
    for _ in range(count):
        mixed = rng.sample(kinds, rng.randrange(1, 5))
        length = rng.choice([0, 1, 3, 10, 40, 100])
        yield "".join(rng.choice(mixed)() for _ in range(length))


def assert_same(ours: Tokenizer, theirs, text: str):
    ids = ours.encode(text)
    [found] = theirs.encode_batch_fast([text], add_special_tokens=False)
    assert found.ids == ids, repr(text[:200])
    assert theirs.decode(ids) == text, repr(text[:200])


def spelled(tokenizer: Tokenizer) -> list[str]:
    return [piece.text for piece in read_pieces(tokenizer.path)]


# ---- the same ids


@pytest.mark.parametrize("which", ["small", "larger"])
def test_10_000_random_texts_have_the_same_ids_and_come_back(which, tmp_path, request):
    ours = request.getfixturevalue(which)
    theirs = converted(ours.path, tmp_path)
    texts = [*DIFFICULT, *random_texts(0, 10_000, spelled(ours))]
    assert "" in texts and any("\u2581" in text for text in texts)
    for text in texts:
        assert_same(ours, theirs, text)


def test_a_model_with_tokens_that_are_found_before_all_others_has_the_same_ids(tmp_path):
    symbols = ["<|user|>", "<|us", "self.f", "  \n"]
    spellings = [symbol.replace(" ", "\u2581") for symbol in symbols]
    path = trained(tmp_path, user_defined_symbols=spellings)
    ours = Tokenizer(path)
    theirs = converted(path, tmp_path)
    kept = set(ours.encode("".join(symbols)))
    for text in [*DIFFICULT, *random_texts(1, 3000, [*symbols, *spelled(ours)])]:
        assert_same(ours, theirs, text)
    assert len(kept) == 4


def test_a_token_is_joined_from_the_parts_that_it_has_by_itself():
    ranks = {"bc": 0, "ab": 1, "abc": 2, "aa": 3, "aaa": 4}
    assert last_parts("abc", ranks) == ["a", "bc"]  # not ab and c, although ab is a token
    assert last_parts("aaa", ranks) == ["aa", "a"]  # the leftmost first
    assert last_parts("xyz", ranks) == ["x", "y", "z"]


def test_ids_that_are_no_text_decode_to_it_as_far_as_they_are_utf8(small, tmp_path):
    theirs = converted(small.path, tmp_path)
    rng = random.Random(0)
    valid = 0
    for _ in range(3000):
        ids = [rng.randrange(small.vocab_size) for _ in range(rng.randrange(8))]
        text = small.decode(ids)
        if "\ufffd" in text:
            continue
        valid += 1
        assert theirs.decode(ids) == text
    assert valid > 500


def test_the_hash_is_that_of_the_written_file(small, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(tokenizer_json(small.path)))
    assert hash_of_ids(small.path) == hash_of_ids(path)


# ---- refusals


UNEQUAL = [
    (dict(model_type="unigram"), "unigram"),
    (dict(model_type="char", vocab_size=400, hard_vocab_limit=False), "character"),
    (dict(normalization_rule_name="nmt_nfkc"), "normalises"),
    (dict(add_dummy_prefix=True), "normalises"),
    (dict(remove_extra_whitespaces=True), "normalises"),
    (dict(byte_fallback=False), "0 of the 256 byte tokens"),
]


@pytest.mark.parametrize("changes, words", UNEQUAL)
def test_a_model_without_an_equal_tokenizer_json_is_refused(tmp_path, changes, words):
    with pytest.raises(ValueError, match=f"{words}.*: .*--tokenizer none") as caught:
        tokenizer_json(trained(tmp_path, **changes))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_cut_off_is_no_protobuf(small, tmp_path):
    torn = tmp_path / "torn.model"
    torn.write_bytes(small.path.read_bytes()[:1001])
    with pytest.raises(ValueError, match=str(torn)):
        tokenizer_json(torn)
