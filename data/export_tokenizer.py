"""The files with which `AutoTokenizer` of transformers has the tokenizer of a run.

A sentencepiece model becomes a tokenizer.json (data/convert_sentencepiece.py), and its folder asks
transformers to read special tokens in a text as text, which is what longhaul does. The folder of a
Hugging Face tokenizer keeps its settings and its chat template.
"""

import json
from pathlib import Path

from data import hugging_face
from data.convert_sentencepiece import read_pieces, tokenizer_json
from data.hugging_face import PADDED, SETTINGS, TOKENIZER, HuggingFaceTokenizer
from data.load_tokenizer import AnyTokenizer
from data.tokenizer import Tokenizer

# What a folder may hold besides: the form of a chat, and the vocabulary for slow tokenizers.
EXTRAS = ("chat_template.jinja", "vocab.json", "merges.txt")


def exported(tokenizer: AnyTokenizer, vocab_size: int, context: int) -> dict[str, bytes]:
    """{name: content} of the files for a model of this vocabulary and context, in tokens.

    Raises ValueError for more tokens than the model has, and for a sentencepiece model that no
    tokenizer.json equals.
    """
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"tokenizer {tokenizer.path} has {tokenizer.vocab_size:,} tokens, and the model "
            f"{vocab_size:,}: give --tokenizer PATH with the model's own"
        )
    if isinstance(tokenizer, HuggingFaceTokenizer):
        files, settings = _of_hugging_face(tokenizer)
    else:
        files, settings = _of_sentencepiece(tokenizer)

    settings["model_max_length"] = context
    settings[PADDED] = vocab_size
    return files | {SETTINGS: _json(settings)}


def _of_sentencepiece(tokenizer: Tokenizer) -> tuple[dict[str, bytes], dict]:
    content = tokenizer_json(tokenizer.path)
    end = read_pieces(tokenizer.path)[tokenizer.eod_id].text
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "pad_token": end,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
    }
    return {TOKENIZER: _json(content)}, settings


def _of_hugging_face(tokenizer: HuggingFaceTokenizer) -> tuple[dict[str, bytes], dict]:
    defaults = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": tokenizer.eod_token,
        "clean_up_tokenization_spaces": False,
    }
    folder = tokenizer.path.parent
    settings = defaults | hugging_face.read_settings(folder / SETTINGS)
    settings["eos_token"] = tokenizer.eod_token
    settings.pop("auto_map", None)  # code of the folder, which is not copied

    return {TOKENIZER: tokenizer.path.read_bytes()} | _extras(folder), settings


def complete_tokenizer(files: dict[str, bytes], source: Path) -> dict[str, bytes]:
    """The files of a dataset's tokenizer, with what a folder that has the same ids in a
    tokenizer.json says besides: its settings, but for those of the data, and EXTRAS.
    """
    if TOKENIZER not in files or not (source / TOKENIZER).is_file():
        return files
    ours = json.loads(files[SETTINGS])
    settings = ours | hugging_face.read_settings(source / SETTINGS)
    settings |= {name: ours[name] for name in ("eos_token", PADDED) if name in ours}
    settings.pop("auto_map", None)  # code of the folder, which is not copied
    return files | _extras(source) | {SETTINGS: _json(settings)}


def _extras(folder: Path) -> dict[str, bytes]:
    """The files of EXTRAS that a folder holds."""
    paths = [folder / name for name in EXTRAS]
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


def _json(content: dict) -> bytes:
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()
