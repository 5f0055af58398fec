"""Opens a tokenizer of either kind, a sentencepiece model or a tokenizer.json of Hugging Face, and
says whether two have the same ids.
"""

from pathlib import Path
from typing import NamedTuple

from data import convert_sentencepiece, hugging_face
from data.hugging_face import HuggingFaceTokenizer
from data.manifest import sha256_file
from data.tokenizer import SENTENCEPIECE, Tokenizer, hash_of

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


def require_usable(path: Path) -> None:
    """Raise ValueError if the library that this file needs is not installed."""
    if hugging_face.is_json(path):
        hugging_face.require_installed()


# ---- which ids


class Ids(NamedTuple):
    """What is known of the ids of data or of a model: the hash of their tokenizer that was
    recorded, and its file. A tokenizer knows both of itself.
    """

    sha256: str | None = None
    path: Path | None = None


def have_same_ids(one: Ids | AnyTokenizer, other: Ids | AnyTokenizer) -> bool:
    """Whether an id means the same token in both; nobody can say it if neither has a hash."""
    return one.sha256 == other.sha256 or not _hashes(one).isdisjoint(_hashes(other))


def _hashes(ids: Ids | AnyTokenizer) -> set[str]:
    """All hashes by which a tokenizer is recorded: that of a sentencepiece model's file, and that
    of the map from tokens to ids, which it shares with its export as a tokenizer.json.
    """
    found = set()
    if ids.path is not None:
        found = {sha256_file(ids.path), hash_of_ids(ids.path)}
    if ids.sha256 is None or ids.sha256 in found:
        return found
    return {ids.sha256}  # the file is another one by now


def hash_of_ids(path: Path) -> str:
    """The hash of a tokenizer's map from tokens to ids. It needs no library of Hugging Face."""
    if hugging_face.is_json(path):
        _, ids = hugging_face.read_tokenizer(path)
    else:
        ids = convert_sentencepiece.vocabulary(convert_sentencepiece.read_pieces(path))
    return hash_of(ids)
