"""The files with which `AutoTokenizer` of transformers has the tokenizer of a run.

A sentencepiece model becomes a tokenizer.json (data/convert_sentencepiece.py), and its folder asks
transformers to read special tokens in a text as text, which is what longhaul does. The folder of a
Hugging Face tokenizer keeps its settings and its chat template.
"""

import json
from pathlib import Path

from data.convert_sentencepiece import read_pieces, tokenizer_json
from data.hugging_face import PADDED, SETTINGS, TOKENIZER, HuggingFaceTokenizer, read_settings
from data.load_tokenizer import AnyTokenizer

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
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    fixed = {"model_max_length": context, PADDED: vocab_size}
    if isinstance(tokenizer, HuggingFaceTokenizer):
        settings["pad_token"] = tokenizer.eod_token
        fixed["eos_token"] = tokenizer.eod_token
        files = {TOKENIZER: tokenizer.path.read_bytes()}
        return files | _with_settings_of(tokenizer.path.parent, settings, fixed)

    end = read_pieces(tokenizer.path)[tokenizer.eod_id].text
    settings |= {"eos_token": end, "pad_token": end, "split_special_tokens": True}
    return {TOKENIZER: _json(tokenizer_json(tokenizer.path)), SETTINGS: _json(settings | fixed)}


def complete_tokenizer(files: dict[str, bytes], source: Path) -> dict[str, bytes]:
    """The files of a dataset's tokenizer, with what a folder that has the same ids in a
    tokenizer.json says besides: its settings, but for those of the data, and EXTRAS.
    """
    if TOKENIZER not in files or not (source / TOKENIZER).is_file():
        return files
    ours = json.loads(files[SETTINGS])
    fixed = {name: ours[name] for name in ("eos_token", PADDED) if name in ours}
    return files | _with_settings_of(source, ours, fixed)


def _with_settings_of(folder: Path, defaults: dict, fixed: dict) -> dict[str, bytes]:
    """The settings of a folder, completed by `defaults` and changed by `fixed`, and its EXTRAS."""
    settings = defaults | read_settings(folder / SETTINGS) | fixed
    settings.pop("auto_map", None)  # code of the folder, which is not copied
    paths = [folder / name for name in EXTRAS]
    files = {path.name: path.read_bytes() for path in paths if path.is_file()}
    return files | {SETTINGS: _json(settings)}


def _json(content: dict) -> bytes:
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()
