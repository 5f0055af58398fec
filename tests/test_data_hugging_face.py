"""A Hugging Face folder gives the ids that `transformers` gives, whatever is in the text, in parts
or whole; nothing of the folder but JSON is read.
"""

import json
import random
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

import train
from data import hugging_face
from data.corpus import embedded_files, read_corpus
from data.dataset import open_dataset
from data.hugging_face import HuggingFaceTokenizer
from data.load_tokenizer import load_tokenizer
from data.prepare import main
from data.sources import by_directory
from data.tokenizer import train as train_tokenizer
from tests import qwen_tokenizer
from tests.kit import refused

ROOT = Path(__file__).parent.parent
TRAINING = [(ROOT / "model.py").read_text(), "caf\u00e9 \u65e5\u672c\u8a9e \U0001f600\n" * 50]
DIFFICULT = [
    "",
    " ",
    "  a  b ",
    "\r\na\r\n \r\n",
    "x\n\n\ny\n z\n\tw",
    "it's we'LL 12345 \u00bd",
    "e\u0301 \ufb01 \u2581",
    "a\u0301\n\u0301b",
    "\x1c\n\x1ca\x85\nb\u2028\nc",
    "\U0001f600\U0001f468\u200d\U0001f469\ufeff\x00",
    "}\n/\n}\n}\n\n}\n",
]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A folder like Qwen's, with 151,936 ids in its model."""
    return qwen_tokenizer.make(tmp_path_factory.mktemp("qwen") / "qwen", TRAINING)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The same with 605 ids."""
    folder = tmp_path_factory.mktemp("small") / "small"
    return qwen_tokenizer.make(folder, TRAINING, learned=600, text_ids=600, padded=640)


@pytest.fixture(scope="module")
def tokenizer(qwen):
    return load_tokenizer(qwen)


@pytest.fixture(scope="module")
def reference(qwen):
    return AutoTokenizer.from_pretrained(qwen)


@pytest.fixture(scope="module")
def prepared(small, tmp_path_factory):
    """Some files of this repository, prepared with the small folder."""
    output = tmp_path_factory.mktemp("prepared") / "data"
    assert prepare(ROOT / "data", output, small) == 0
    return output


def prepare(text: Path, output: Path, tokenizer: Path, *flags) -> int:
    arguments = ["--input", text, "--output", output, "--tokenizer", tokenizer, *flags]
    return main([str(argument) for argument in [*arguments, "--workers", 1]])


# ---- ids


# what the folder does not call special is matched in a text
@pytest.mark.parametrize("text", [*DIFFICULT, "<think> so </think> <tool_call>"])
def test_difficult_strings_have_the_ids_of_transformers(tokenizer, reference, text):
    assert tokenizer.encode(text) == reference(text)["input_ids"]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.text(alphabet=st.characters(blacklist_categories=("Cs",))))
def test_any_text_has_the_ids_of_transformers(tokenizer, reference, text):
    assert tokenizer.encode(text) == reference(text)["input_ids"]


@pytest.mark.slow
def test_the_embedded_corpus_has_the_ids_of_transformers(qwen, reference, tmp_path):
    """In a sample of it, because all 88 MB take two minutes; special tokens in it stay text."""
    size = 500_000
    output = ["--output", str(tmp_path / "d"), "--tokenizer", str(qwen)]
    assert main([*output, "--max_bytes", str(size), "--val_fraction", "0"]) == 0
    dataset = open_dataset(tmp_path / "d", verify=True)
    assert dataset.vocab_size == 151_936
    assert dataset.dtype == np.uint32
    assert dataset.eod_id == reference.eos_token_id == 151_643

    texts, _ = read_corpus(embedded_files(size))
    split = dataset.split("train")
    documents = [document.text for document in by_directory(texts)]
    assert split.num_documents == len(documents) > 5
    for number, text in enumerate(documents):
        ids = split.read(number, 0, 10**9)
        assert ids[-1] == dataset.eod_id
        assert ids[:-1].tolist() == reference(text, split_special_tokens=True)["input_ids"]


ALPHABET = "ab1 .}/'<\n\n\n\r\t\u0301\u65e5"


@pytest.mark.parametrize("seed", range(3))
def test_a_text_in_parts_has_the_ids_of_the_whole(tokenizer, seed):
    draw = random.Random(seed)
    text = "".join(draw.choices(ALPHABET, k=3000)) + TRAINING[0][:3000]
    whole = tokenizer.encode(text)
    for size in range(1, 30):
        parts = list(tokenizer.parts(text, size))
        assert len(parts) > 20
        assert "".join(parts) == text
        assert [index for part in parts for index in tokenizer.encode(part)] == whole


def test_a_long_text_is_cut_into_parts_unless_its_kind_is_unknown(tokenizer, qwen, tmp_path):
    text = "one line\n" * 1000
    assert len(list(tokenizer.parts(text, 1000))) > 7
    changes = [
        dict(pre_tokenizer={"type": "Whitespace"}),
        dict(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}),
        dict(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}),
        dict(normalizer={"type": "Lowercase"}),
        dict(added_tokens=[dict(id=0, content="\n\n", special=False)]),
        dict(added_tokens=[dict(id=0, content="x", special=False, lstrip=True)]),
    ]
    content, _ = hugging_face.read_tokenizer(qwen / "tokenizer.json")
    assert hugging_face.is_cuttable(content)
    assert hugging_face.is_cuttable(
        content | dict(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": False})
    )
    for change in changes:
        assert not hugging_face.is_cuttable(content | change), change


def test_a_special_token_in_the_text_stays_text(tokenizer, reference):
    for token in qwen_tokenizer.SPECIAL:
        for text in (token, f"a{token}b {token}\n"):
            ids = tokenizer.encode(text)
            assert max(ids) < qwen_tokenizer.TEXT_IDS
            assert ids == reference(text, split_special_tokens=True)["input_ids"]
            assert tokenizer.decode(ids) == text


# ---- text


def test_decoding_one_id_at_a_time_equals_decoding_all(tokenizer):
    text = "".join(DIFFICULT[5:]) + TRAINING[1]
    ids = tokenizer.encode(text)
    stream = tokenizer.stream()
    parts = [stream.push(index) for index in [*ids, tokenizer.eod_id]]
    assert "".join(parts) + stream.finish() == tokenizer.decode(ids)


def test_special_tokens_are_spelled_only_on_request(tokenizer):
    ids = [*tokenizer.encode("a "), tokenizer.eod_id, *tokenizer.encode("\u00e9")]
    assert tokenizer.spell(ids) == f"a {tokenizer.eod_token}\u00e9"
    assert tokenizer.decode(ids) == "a \u00e9"


# ---- folders and files


def test_a_dataset_holds_a_tokenizer_that_transformers_and_the_next_preparation_take(
    prepared, small, tmp_path
):
    dataset = open_dataset(prepared, verify=True)
    assert dataset.vocab_size == 640
    assert dataset.tokenizer_sha256 == load_tokenizer(small).sha256
    assert AutoTokenizer.from_pretrained(prepared).eos_token_id == dataset.eod_id

    for name, path in (("folder", prepared), ("file", prepared / "tokenizer.json")):
        assert prepare(ROOT / "base", tmp_path / name, path) == 0
        again = open_dataset(tmp_path / name)
        assert again.tokenizer_sha256 == dataset.tokenizer_sha256
        assert (again.vocab_size, again.eod_id) == (640, dataset.eod_id)


def test_the_hash_is_that_of_the_ids_and_not_of_the_file(small, tmp_path):
    content = json.loads((small / "tokenizer.json").read_text())
    shutil.copytree(small, tmp_path / "same")
    (tmp_path / "same" / "tokenizer.json").write_text(json.dumps(content, sort_keys=True))
    assert load_tokenizer(tmp_path / "same").sha256 == load_tokenizer(small).sha256

    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (tmp_path / "same" / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(tmp_path / "same").sha256 != load_tokenizer(small).sha256


def test_the_end_of_a_document_is_the_flag_or_what_the_folder_says(small, tmp_path):
    assert load_tokenizer(small).eod_id == 600
    assert load_tokenizer(small, "<|im_end|>").eod_id == 602
    folder = Path(shutil.copytree(small, tmp_path / "f"))
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(dict(eos_token=dict(content="<|im_start|>"))))
    assert load_tokenizer(folder).eod_id == 601
    settings.unlink()
    (folder / "config.json").write_text(json.dumps(dict(eos_token_id=602)))
    assert load_tokenizer(folder).eod_id == 602


def test_a_damaged_copy_next_to_the_ids_is_noticed(prepared, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        copy = Path(shutil.copytree(prepared, tmp_path / name))
        content = (copy / name).read_bytes()
        (copy / name).write_bytes(content.replace(b"<|endoftext|>", b"<|endoffile|>"))
        with pytest.raises(ValueError, match=name):
            open_dataset(copy)


def changed(small: Path, folder: Path, name: str, content: object) -> Path:
    shutil.copytree(small, folder)
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / name).write_text(text)
    return folder


CODE = dict(auto_map={"AutoTokenizer": ["evil.Tokenizer", None]}, eos_token="<|endoftext|>")
NO_TOKENIZER = "tokenizer.json"
BAD_FOLDERS = [
    ("tokenizer_config.json", CODE, "auto_map .* --eod TOKEN"),
    ("tokenizer_config.json", "{", "tokenizer_config.json is not JSON"),
    ("tokenizer_config.json", {}, "give --eod TOKEN"),
    ("tokenizer_config.json", dict(eos_token="</s>"), "'</s>' .*: give --eod TOKEN"),
    ("tokenizer_config.json", dict(eos_token="<think>"), "--eod <think> .*: give --eod"),
    ("tokenizer_config.json", dict(eos_token="a"), "--eod a .*: give --eod"),
    ("tokenizer.json", "{", NO_TOKENIZER),
    ("tokenizer.json", "\x80\x04pickle", NO_TOKENIZER),
    ("tokenizer.json", dict(model=dict(vocab={"a": -1})), NO_TOKENIZER),
    ("tokenizer.json", dict(model=dict(vocab={"a": 0}, dropout=0.1)), "dropout"),
    ("tokenizer.json", dict(model=dict(vocab={"a": 0}, type="X")), "update tokenizers"),
    ("tokenizer.json", dict(model=dict(vocab={"a": 0}), added_tokens=[1]), NO_TOKENIZER),
]


@pytest.mark.parametrize("name, content, words", BAD_FOLDERS)
def test_a_folder_that_cannot_be_used_is_refused(small, tmp_path, name, content, words):
    folder = changed(small, tmp_path / "bad", name, content)
    with pytest.raises(ValueError, match=words) as error:
        load_tokenizer(folder)
    assert "\n" not in str(error.value)


def test_the_file_of_a_folder_that_asks_for_code_is_taken_by_itself(small, tmp_path):
    folder = changed(small, tmp_path / "code", "tokenizer_config.json", CODE)
    loaded = load_tokenizer(folder / "tokenizer.json", "<|endoftext|>")
    assert isinstance(loaded, HuggingFaceTokenizer)


def test_a_folder_with_a_sentencepiece_model_only_is_read_unless_it_asks_for_code(tmp_path):
    model = train_tokenizer(TRAINING, 600, tmp_path / "tokenizer.model")
    assert load_tokenizer(tmp_path).sha256 == model.sha256
    with pytest.raises(ValueError, match="--eod x"):
        load_tokenizer(tmp_path, "x")

    (tmp_path / "tokenizer_config.json").write_text(json.dumps(CODE))
    with pytest.raises(ValueError, match="auto_map"):
        load_tokenizer(tmp_path)


RUN = "--model_size tiny --vocab_size 640 --context_length 64 --max_steps 2 --device cpu"


@pytest.mark.slow
def test_without_the_library_one_line_says_what_to_install(
    prepared, small, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert prepare(ROOT / "base", tmp_path / "d", small) == 2
    assert "pip install tokenizers" in capsys.readouterr().err
    words = [*RUN.split(), "--data", prepared, "--output_dir", tmp_path / "d"]
    assert "pip install tokenizers" in refused(capsys, train.main, words)
    assert not (tmp_path / "d").exists()
