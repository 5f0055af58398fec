"""The tokenizer gives every text back exactly, and no text encodes to a control piece."""

import sysconfig
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from data.tokenizer import EOD_TOKEN, Tokenizer, train

STDLIB = Path(sysconfig.get_paths()["stdlib"])
TRAINING = [
    (STDLIB / name).read_text(encoding="utf-8") for name in ("argparse.py", "typing.py", "os.py")
]
DIFFICULT = [
    "",
    " ",
    "  a  b ",
    "\t\t\n",
    "\r\n",
    "a\r\nb\rc\n",
    "\ufeffbom",
    "\x00nul\x00",
    "\u2581",
    "a\u2581 \u2581\u2581b",
    "\u2585",
    EOD_TOKEN,
    f"a{EOD_TOKEN}b",
    "<0x41>",
    "<unk>",
    "<s>",
    "\u00e9 e\u0301 \ufb01 \uff21 \u2460",
    "\U0001f600\U0001f468\u200d\U0001f469",
    "\ufffd\ufffe\uffff\U0010ffff",
    "1234567890",
    "x" * 5000,
    "\n" * 9000,
    "\u65e5\u672c\u8a9e" * 4000,
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return train(TRAINING, 600, tmp_path_factory.mktemp("tokenizer") / "t.model")


def test_difficult_strings_come_back_exactly(tokenizer):
    for text in DIFFICULT:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(alphabet=st.characters(blacklist_categories=("Cs",))))
def test_any_unicode_text_comes_back_exactly(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_control_tokens_are_spelled_only_on_request(tokenizer):
    ids = [*tokenizer.encode("a "), tokenizer.eod_id, *tokenizer.encode("\u00e9")]
    assert tokenizer.spell(ids) == f"a {EOD_TOKEN}\u00e9"
    assert tokenizer.decode(ids) == "a \u00e9"


def test_no_text_encodes_to_the_end_of_document_or_unknown_id(tokenizer):
    for text in (EOD_TOKEN, f" {EOD_TOKEN} ", f"{EOD_TOKEN}{EOD_TOKEN}", "<unk>", *DIFFICULT):
        assert not {tokenizer.eod_id, 1} & set(tokenizer.encode(text))


def test_training_text_that_holds_the_end_of_document_string_does_not_make_it_a_text_piece(
    tmp_path,
):
    tokenizer = train(
        [f"{EOD_TOKEN} some words {EOD_TOKEN}\n" * 500, *TRAINING], 600, tmp_path / "t.model"
    )
    assert tokenizer.eod_id not in tokenizer.encode(EOD_TOKEN)
    assert tokenizer.decode(tokenizer.encode(EOD_TOKEN)) == EOD_TOKEN


def test_training_twice_gives_the_same_bytes(tokenizer, tmp_path):
    assert train(iter(TRAINING), 600, tmp_path / "again.model").sha256 == tokenizer.sha256


def test_decoding_one_id_at_a_time_equals_decoding_all(tokenizer):
    text = "a\u00e9\u65e5\U0001f600\u2581 b\n" * 3
    stream = tokenizer.stream()
    parts = [stream.push(i) for i in tokenizer.encode(text)]
    assert "".join(parts) + stream.finish() == text
    assert "\ufffd" not in "".join(parts)


def test_an_unfinished_character_shows_as_the_replacement_character(tokenizer):
    stream = tokenizer.stream()
    first_byte = tokenizer.encode("\U0001f600")[0]
    assert stream.push(first_byte) == ""
    assert stream.finish() == "\ufffd"


def test_the_ids_of_a_long_text_do_not_depend_on_where_it_is_cut(tokenizer):
    """Among the places at which 8,192 characters end are some that a token reaches across."""
    whole = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer.path))
    joined = "".join(TRAINING)
    joins = next(
        spelling
        for spelling in map(tokenizer.decode, ([i] for i in range(258, 600)))
        if len(spelling) == 3
    )
    texts = [
        joined,
        joins * 9000,
        "x" + "\n" * 20_000,
        "x" * 8191 + joins * 2,
        "#\n" * 5000 + "\n#" * 9000,
    ]
    assert len(whole.encode("\n\n")) == 1  # which a cut after 8,191 newlines would part
    for text in texts:
        for start in range(3):
            assert tokenizer.encode(text[start:]) == whole.encode(text[start:])
            parts = tokenizer.parts(text[start:], 10_000)
            ids = [index for part in parts for index in tokenizer.encode(part)]
            assert ids == whole.encode(text[start:])


def test_a_lone_surrogate_is_refused_with_its_place(tokenizer):
    with pytest.raises(ValueError, match=r"character 2 .* U\+D800"):
        tokenizer.encode("ab\ud800")


def test_an_id_outside_the_vocabulary_is_refused(tokenizer):
    for index in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match="600"):
            tokenizer.decode([index])


def test_a_vocabulary_too_large_for_the_text_names_one_that_works(tmp_path):
    with pytest.raises(ValueError, match=r"use --vocab_size (\d+) or less") as error:
        train(["some small text\n" * 20], 8192, tmp_path / "t.model")
    size = int(str(error.value).split("use --vocab_size ")[1].split()[0])
    assert train(["some small text\n" * 20], size, tmp_path / "t.model").vocab_size == size


def test_a_vocabulary_too_small_for_the_characters_names_the_remedy(tmp_path):
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 2000))) * 3
    with pytest.raises(ValueError, match="--character_coverage"):
        train([text], 1000, tmp_path / "t.model")
    with pytest.raises(ValueError, match="259"):
        train([text], 100, tmp_path / "t.model")
    with pytest.raises(ValueError, match="--tokenizer"):
        train([], 600, tmp_path / "t.model")


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x00" * 100, b"\x80\x04pickle", None])
def test_a_file_that_is_no_model_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "bad.model").write_bytes(content)
    with pytest.raises(ValueError, match="bad.model") as error:
        Tokenizer(tmp_path / "bad.model")
    assert "\n" not in str(error.value)


def test_a_model_that_does_not_give_text_back_is_refused(tmp_path):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TRAINING[0].splitlines()),
        minloglevel=2,
        model_prefix=str(tmp_path / "lossy"),
        vocab_size=600,
        model_type="bpe",
    )
    with pytest.raises(ValueError, match="lossy.model"):
        Tokenizer(tmp_path / "lossy.model")
