"""A tokenizer folder as Qwen publishes it, made here: byte-level BPE behind Qwen's regular
expression and NFC, special tokens from id 151,643 on, a model vocabulary padded to 151,936.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXT_IDS = 151_643
PADDED = 151_936
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NOT_SPECIAL = ("<tool_call>", "<think>")


def make(
    folder: Path,
    texts: Iterable[str],
    learned: int = 1000,
    text_ids: int = TEXT_IDS,
    padded: int = PADDED,
) -> Path:
    """Train `learned` ids on the texts and write the folder; the ids from there to `text_ids` stand
    for nothing that occurs.
    """
    tokenizer = _qwen_like(models.BPE())
    trainer = BpeTrainer(
        vocab_size=learned,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)

    model = json.loads(tokenizer.to_str())["model"]
    vocab = model["vocab"]
    for index in range(len(vocab), text_ids):
        vocab[f"unused {index}"] = index
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = _qwen_like(models.BPE(vocab=vocab, merges=merges))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in NOT_SPECIAL])

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = dict(tokenizer_class="Qwen2Tokenizer", eos_token=SPECIAL[0])
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(dict(model_type="qwen3", vocab_size=padded)))
    return folder


def _qwen_like(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, by_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
