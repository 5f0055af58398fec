"""Opens a tokenizer of either kind: a sentencepiece model, or a tokenizer.json of Hugging Face."""

from pathlib import Path

from data import hugging_face
from data.convert_sentencepiece import hash_as_json
from data.hugging_face import HuggingFaceTokenizer
from data.tokenizer import SENTENCEPIECE, Tokenizer

AnyTokenizer = Tokenizer | HuggingFaceTokenizer


def load_tokenizer(path: Path | str, eod: str | None = None) -> AnyTokenizer:
    """The tokenizer in a file, or in a folder: of Hugging Face, of a dataset, or of a run.

    eod: the token that ends a document, if not the one that a Hugging Face folder names.

    Raises ValueError if there is none, or none that gives every text its ids.
    """
    path = folder = Path(path)
    if folder.is_dir():
        hugging_face.refuse_code(folder)
        path = find_tokenizer(folder)
    if path is None:
        save = f"from transformers import AutoTokenizer as A; A.from_pretrained({str(folder)!r})"
        raise ValueError(
            f"tokenizer {folder} has no tokenizer.json, so it has no fast tokenizer: make one with "
            f'`python -c "{save}.save_pretrained({str(folder)!r})"`, or give another folder'
        )
    if hugging_face.is_json(path):
        return HuggingFaceTokenizer(path, eod)
    if eod is not None and path.is_file():
        raise ValueError(
            f"--eod {eod} is for a tokenizer of Hugging Face, and {path} is a sentencepiece model, "
            "which says itself what ends a document: drop --eod"
        )
    return Tokenizer(path)


def find_tokenizer(folder: Path) -> Path | None:
    """The file of the tokenizer that a folder of longhaul or of Hugging Face holds, if any."""
    for name in (hugging_face.TOKENIZER, SENTENCEPIECE):
        if (folder / name).is_file():
            return folder / name
    return None


def hash_of_ids(path: Path) -> str:
    """The hash of the map from tokens to ids, which a sentencepiece model shares with the
    tokenizer.json that an export makes of it.
    """
    return hugging_face.hash_of_file(path) if hugging_face.is_json(path) else hash_as_json(path)


def require_usable(path: Path) -> None:
    """Raise ValueError if the library that this file needs is not installed."""
    if hugging_face.is_json(path):
        hugging_face.require_installed()
