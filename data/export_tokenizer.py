"""The files with which `AutoTokenizer` of transformers has the tokenizer of a run.

A sentencepiece model becomes a tokenizer.json (data/convert_sentencepiece.py), and its folder asks
transformers to read special tokens in a text as text, which is what longhaul does. The folder of a
Hugging Face tokenizer keeps its settings and its chat template (data/origin.py).
"""

import json
from pathlib import Path

from data import origin
from data.convert_sentencepiece import read_pieces, tokenizer_json
from data.hugging_face import (
    PADDED,
    SETTINGS,
    TOKENIZER,
    HuggingFaceTokenizer,
    named_token,
    read_settings,
)
from data.load_tokenizer import AnyTokenizer


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
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    fixed = {"model_max_length": context, PADDED: vocab_size}
    if isinstance(tokenizer, HuggingFaceTokenizer):
        folder = tokenizer.path.parent
        files = {TOKENIZER: tokenizer.path.read_bytes()} | origin.contents(folder, origin.EXTRAS)
        if (folder / origin.CONFIG).is_file() and (folder / SETTINGS).is_file():
            return files | _changed_settings(tokenizer, context)
        settings |= {"pad_token": tokenizer.eod_token} | read_settings(folder / SETTINGS)
        settings |= fixed | {"eos_token": tokenizer.eod_token}
        settings.pop("auto_map", None)  # code of the folder, which is not copied
        return files | {SETTINGS: _json(settings)}

    end = read_pieces(tokenizer.path)[tokenizer.eod_id].text
    settings |= {"eos_token": end, "pad_token": end, "split_special_tokens": True}
    return {TOKENIZER: _json(tokenizer_json(tokenizer.path)), SETTINGS: _json(settings | fixed)}


def _changed_settings(tokenizer: HuggingFaceTokenizer, context: int) -> dict[str, bytes]:
    """The settings of a tokenizer in the folder of its model, as they are but for another end of a
    document and another context.
    """
    folder = tokenizer.path.parent
    files = {}
    for path in origin.found(folder, (SETTINGS, "special_tokens_map.json")):
        settings = read_settings(path)
        settings.pop("auto_map", None)  # code of the folder, which is not copied
        if named_token(folder, "eos_token", path.name) != tokenizer.eod_token:
            settings["eos_token"] = tokenizer.eod_token
        if path.name == SETTINGS and context != _context(folder, context):
            settings["model_max_length"] = context
        files[path.name] = origin.rewritten(path, settings)
    return files


def _context(folder: Path, otherwise: int) -> int:
    return read_settings(folder / origin.CONFIG).get("max_position_embeddings", otherwise)


def _json(content: dict) -> bytes:
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()
