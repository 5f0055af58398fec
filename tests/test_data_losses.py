"""Text that a tokenizer does not give back is counted by its place, and refused if it is much; a
special token is never found in a text, whatever the kind of the model.
"""

import json
import shutil
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from data import pipeline, report
from data.dataset import Dataset, open_dataset
from data.load_tokenizer import load_tokenizer
from data.losses import Outspoken
from data.prepare import main
from data.sources import Document
from tests.kit import contents

TEXT = "the cat sat on a mat and the dog ran to it "
END = "</s>"
SPECIAL = ["<unk>", END]
FOREIGN = "\u957f\u4e0a\u4e0b\u6587"


def words(model, trainer, **settings) -> Tokenizer:
    """A tokenizer of words between spaces, with its special tokens in the model."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return trained(tokenizer, trainer, **settings)


def pieces(model, trainer, **settings) -> Tokenizer:
    """A tokenizer of pieces that begin with a mark for the space."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return trained(tokenizer, trainer, **settings)


def trained(tokenizer: Tokenizer, trainer, **settings) -> Tokenizer:
    settings = dict(special_tokens=SPECIAL, show_progress=False) | settings
    tokenizer.train_from_iterator([TEXT * 9, "cat\ndog\n"], trainer(**settings))
    return tokenizer


def byte_level(normalizer=None, alphabet=True) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet() if alphabet else []
    trained(tokenizer, trainers.BpeTrainer, initial_alphabet=letters, vocab_size=300)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


def unigram() -> Tokenizer:
    settings = dict(unk_token="<unk>", vocab_size=60)
    return pieces(models.Unigram(), trainers.UnigramTrainer, **settings)


def word_piece() -> Tokenizer:
    tokenizer = words(models.WordPiece(unk_token="<unk>"), trainers.WordPieceTrainer)
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def merged_end() -> Tokenizer:
    """BPE whose merges make the end of a document."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    trainer = trainers.BpeTrainer(special_tokens=["<unk>"], vocab_size=90, show_progress=False)
    tokenizer.train_from_iterator([f"{END}{TEXT}" * 9], trainer)
    tokenizer.add_special_tokens([END])
    return tokenizer


KINDS = {
    "bpe": lambda: pieces(models.BPE(), trainers.BpeTrainer),
    "bpe with unk": lambda: pieces(models.BPE(unk_token="<unk>"), trainers.BpeTrainer),
    "word pieces": word_piece,
    "unigram": unigram,
    "words": lambda: words(models.WordLevel(unk_token="<unk>"), trainers.WordLevelTrainer),
    "some bytes": lambda: byte_level(alphabet=False),
    "lower case": lambda: byte_level(normalizers.Lowercase()),
    "without accents": lambda: byte_level(
        normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
    ),
    "compatible": lambda: byte_level(normalizers.NFKC()),
}
LOST = {"lower case": "ABCD", "without accents": "\u00e9\u00e8", "compatible": "\ufb01\u2460"}


def folder_of(tokenizer: Tokenizer, folder: Path, end: str = END) -> Path:
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(eos_token=end)))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("kinds")
    makers = KINDS | {
        "merged end": merged_end,
        "bytes": byte_level,
        "composed": lambda: byte_level(normalizers.NFC()),
        "decomposed": lambda: byte_level(normalizers.NFD()),
    }
    return {kind: folder_of(make(), base / kind) for kind, make in makers.items()}


def prepare(tokenizer: Path, tmp_path: Path, texts: list[str], *flags: str) -> int:
    lines = [json.dumps(dict(text=text, answer="dog")) + "\n" for text in texts]
    (tmp_path / "in.jsonl").write_text("".join(lines))
    output = tmp_path / "d"
    shutil.rmtree(output, ignore_errors=True)
    arguments = ["--input", tmp_path / "in.jsonl", "--output", output, "--tokenizer", tokenizer]
    return main([*map(str, arguments), "--val_fraction", "0", *flags])


def prepared(*arguments) -> Dataset:
    assert prepare(*arguments) == 0
    return open_dataset(arguments[1] / "d", verify=True)


# ---- what is lost


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_that_loses_much_is_refused_and_names_the_first_place(
    folders, tmp_path, capsys, kind
):
    lost = LOST.get(kind, FOREIGN)
    assert prepare(folders[kind], tmp_path, [TEXT.strip(), f"a {lost}"] * 9) == 2
    error = capsys.readouterr().err
    assert f"in.jsonl:2 (U+{ord(lost[0]):04X}" in error or "in.jsonl:2 (U+0020" in error
    assert error.split(": ")[-1].startswith("give --tokenizer a byte-level one")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_rare_loss_is_counted_in_the_manifest_and_by_the_report(folders, tmp_path, kind):
    lost = LOST.get(kind, FOREIGN)[0]
    text = TEXT.strip()
    dataset = prepared(folders[kind], tmp_path, [text] * 20 + [f"{text} {lost}"] + [text] * 9)
    losses = dataset.manifest.losses
    assert losses["characters"] == 30 * len(text) + 2
    assert losses["lost"] in (1, 2)  # words lose the space next to an unknown one, too
    assert "in.jsonl:21 (" in losses["first"]
    assert any(losses["first"] in line for line in report.report(dataset))


def test_newlines_and_case_that_do_not_come_back_are_lost(folders, tmp_path, capsys):
    for text in ("the cat\nsat", "The cat", "the  cat"):
        assert prepare(folders["word pieces"], tmp_path, [text] * 3) == 2
        assert "byte-level" in capsys.readouterr().err


def test_documents_that_the_tokenizer_leaves_without_ids_are_counted(folders, tmp_path, capsys):
    dataset = prepared(folders["words"], tmp_path, [TEXT.strip()] * 50 + ["\n", " \n"])
    assert dataset.split("train").num_documents == 50
    assert dataset.manifest.losses["emptied"] == 2
    assert "left out: 2 documents" in capsys.readouterr().out


def test_a_record_whose_prompt_has_no_ids_is_left_out(folders, tmp_path):
    texts = [TEXT.strip()] * 50 + ["\n"]
    dataset = prepared(folders["words"], tmp_path, texts, "--answer_field", "answer")
    assert dataset.split("train").num_documents == 50
    assert dataset.manifest.losses["emptied"] == 1


@pytest.mark.parametrize("kind", ["composed", "decomposed"])
def test_normal_forms_of_the_same_text_are_counted_and_never_refused(folders, tmp_path, kind):
    text = "e\u0301" if kind == "composed" else "\u00e9"
    losses = prepared(folders[kind], tmp_path, [text] * 9).manifest.losses
    assert (losses["lost"], losses["normalised"]) == (0, 9 * len(text))


@pytest.mark.parametrize("kind", ["bytes", "composed"])
def test_byte_level_tokenizers_lose_nothing_and_decode_nothing(
    folders, tmp_path, capsys, monkeypatch, kind
):
    path = folders[kind] / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"].pop("type", None)  # as in the first files of GPT-2
    path.write_text(json.dumps(content))
    loaded = load_tokenizer(folders[kind])
    assert loaded.is_lossless
    monkeypatch.setattr(type(loaded), "decode", lambda *given: pytest.fail("it was decoded"))
    texts = [FOREIGN, "A\ufb01\u2460\u00e9\n \t", "\U0001f600\x00"]
    assert prepared(folders[kind], tmp_path, texts).manifest.losses is None
    assert "tokenizer:" not in capsys.readouterr().out


def test_threads_and_a_killed_preparation_count_alike(folders, tmp_path, monkeypatch):
    foreign = [FOREIGN[n % 4] if n % 7 == 3 else "" for n in range(60)]
    documents = [Document(str(n), TEXT + end) for n, end in enumerate(foreign)]
    documents += [Document("empty", "\n")]
    writer = pipeline.Writer
    monkeypatch.setattr(pipeline, "Writer", lambda *given, **more: writer(*given, 50, **more))
    monkeypatch.setattr(pipeline, "BATCH_CHARS", 1)

    def read(stop=10**9):
        yield from documents[:stop]
        if stop < len(documents):
            raise KeyboardInterrupt

    def build(name, readings):
        settings = dict(tokenizer=folders["unigram"], key=1, workers=2, val_fraction=0)
        left = iter(readings)
        pipeline.build_dataset(lambda: read(next(left)), tmp_path / name, **settings)

    build("whole", [10**9, 10**9])
    for stop in (40, 55):
        with pytest.raises(KeyboardInterrupt):
            build("d", [10**9, stop] if stop == 40 else [stop])
    build("d", [10**9])
    assert contents(tmp_path / "d") == contents(tmp_path / "whole")
    assert open_dataset(tmp_path / "d").manifest.losses["lost"] > 8


def test_a_text_of_a_door_is_not_lost_without_a_word(folders, capsys):
    tokenizer = Outspoken(load_tokenizer(folders["unigram"]))
    ids = tokenizer.encode("the cat")
    assert tokenizer.decode(ids) == "the cat"
    assert not capsys.readouterr().err
    for _ in range(2):
        tokenizer.encode(f"the cat {FOREIGN}")
    assert capsys.readouterr().err.count("loses 4 of the 12 characters") == 1


# ---- sentencepiece


def sentencepiece_model(path: Path, **settings) -> Path:
    given = dict(
        model_type="bpe",
        vocab_size=300,
        byte_fallback=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        allow_whitespace_only_pieces=True,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    with open(path, "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([TEXT * 5]), model_writer=file, **given | settings
        )
    return path


def test_a_sentencepiece_model_that_folds_case_is_counted(tmp_path, capsys):
    model = sentencepiece_model(tmp_path / "m.model", normalization_rule_name="nfkc_cf")
    assert prepare(model, tmp_path, [TEXT.upper()] * 3) == 2
    assert "in.jsonl:1 (U+0054" in capsys.readouterr().err
    losses = prepared(model, tmp_path, [TEXT] * 9 + ["The cat"]).manifest.losses
    assert losses["lost"] == 1
    assert load_tokenizer(sentencepiece_model(tmp_path / "same.model")).is_lossless


@pytest.mark.parametrize(
    "settings",
    [
        dict(byte_fallback=False, character_coverage=0.98, vocab_size=40),
        dict(normalization_rule_name="nmt_nfkc"),
    ],
)
def test_a_sentencepiece_model_without_bytes_or_spaces_is_refused(tmp_path, capsys, settings):
    model = sentencepiece_model(tmp_path / "m.model", **settings)
    assert prepare(model, tmp_path, [TEXT]) == 2
    assert "--vocab_size" in capsys.readouterr().err


# ---- special tokens


@pytest.mark.parametrize("kind", ["unigram", "words", "word pieces", "merged end", "bpe with unk"])
def test_no_text_has_the_id_of_a_special_token(folders, kind):
    loaded = load_tokenizer(folders[kind])
    special = [loaded._ids[token] for token in SPECIAL]
    for text in (f"a{END}t {END}", END, f"<unk> {END} cat"):
        ids = loaded.encode(text)
        assert loaded.eod_id not in ids
        if loaded.decode(ids) == text:
            assert not set(special) & set(ids)
    assert END in loaded.spell([loaded.eod_id])
    assert loaded.decode([loaded.eod_id]) == ""


def test_a_text_that_becomes_a_special_token_when_it_is_normalised_stays_text(tmp_path):
    tokenizer = unigram()
    tokenizer.normalizer = normalizers.NFKC()
    loaded = load_tokenizer(folder_of(tokenizer, tmp_path / "t"))
    assert loaded.eod_id not in loaded.encode("a \uff1c/s\uff1e b")


def test_other_ids_do_not_change_if_special_tokens_are_kept_out(folders):
    for kind in ("unigram", "words", "merged end"):
        plain = Tokenizer.from_file(str(folders[kind] / "tokenizer.json"))
        expected = plain.encode(TEXT.strip(), add_special_tokens=False).ids
        assert load_tokenizer(folders[kind]).encode(TEXT.strip()) == expected


def test_the_unknown_token_ends_no_document_and_is_not_proposed(folders):
    with pytest.raises(ValueError, match="<unk>") as error:
        load_tokenizer(folders["unigram"], "<unk>")
    remedy = str(error.value).split(": ")[-1]
    assert END in remedy and "<unk>" not in remedy


def test_an_ordinary_token_ends_documents_once_it_is_called_special(tmp_path):
    trainer = trainers.WordLevelTrainer
    tokenizer = words(models.WordLevel(unk_token="<unk>"), trainer, special_tokens=["<unk>"])
    folder = folder_of(tokenizer, tmp_path / "t", "cat")
    with pytest.raises(ValueError, match='"special": true'):
        load_tokenizer(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    entry = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    entry |= dict(content="cat", id=content["model"]["vocab"]["cat"])
    path.write_text(json.dumps(content | dict(added_tokens=[entry])))
    loaded = load_tokenizer(folder)
    assert loaded.eod_id == entry["id"]
    assert loaded.eod_id not in loaded.encode("the cat")


@pytest.mark.parametrize("kind", ["words", "word pieces", "unigram"])
def test_a_model_without_a_token_for_what_it_lacks_is_refused(folders, tmp_path, kind):
    folder = Path(shutil.copytree(folders[kind], tmp_path / "t"))
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"] |= dict(unk_id=None) if kind == "unigram" else dict(unk_token="[X]")
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="byte-level"):
        load_tokenizer(folder)
