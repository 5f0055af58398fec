"""A sentencepiece model as a tokenizer.json of Hugging Face, with the same ids for every text.

Both libraries begin with the characters of a text and join neighbours. sentencepiece joins whatever
makes the token with the best score, the leftmost first; tokenizers has a list of pairs, and joins
the pair that comes first in it, the leftmost first. The list that is the same thing holds one pair
for each token:

    Let a token become whole somewhere in a text. Until then nothing was joined across its ends, so
    its inside was joined in the order of its scores, as if it were the whole text. Hence the last
    two parts are always those that the token has when it is encoded by itself (`last_parts`).

With one pair for each token, in the order of the scores, both take the same steps. A token that is
not reached by itself is never reached, and has no pair.

A tokenizer.json has a space in its tokens, where sentencepiece has U+2581, so that U+2581 in a text
is no space but three byte tokens, as in data/tokenizer.py. Models without an equal are refused.

The model file is read with sentencepiece's own protobuf, which tensorboard installs.
"""

from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from data.tokenizer import SPACE_MARK, read_model

# SentencePiece.Type
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
BYTE = 6

MODEL_TYPES = {1: "unigram", 2: "BPE", 3: "word", 4: "character"}  # TrainerSpec.ModelType
REMEDY = "train one with data.prepare --vocab_size N, or export with --tokenizer none"


class Piece(NamedTuple):
    """A token of a sentencepiece model."""

    spelling: str  # as in the file
    score: float
    kind: int

    @property
    def text(self) -> str:
        """What it stands for: a space is spelled as U+2581."""
        return self.spelling.replace(SPACE_MARK, " ")


def tokenizer_json(path: Path) -> dict:
    """The content of a tokenizer.json with the ids of the sentencepiece model in `path`.

    Raises ValueError for a model that no tokenizer.json equals.
    """
    pieces = read_pieces(path)
    reason = _reason_against(read_model(path), pieces)
    if reason:
        raise ValueError(f"tokenizer {path} {reason}: {REMEDY}")

    added = [_added(index, piece) for index, piece in enumerate(pieces) if _is_added(piece)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary(pieces),
            "merges": merges(pieces),
        },
    }


def read_pieces(path: Path) -> list[Piece]:
    """The tokens of a sentencepiece model, by their ids. Raises ValueError if it is malformed."""
    return [Piece(one.piece, one.score, one.type) for one in read_model(path).pieces]


def merges(pieces: list[Piece]) -> list[list[str]]:
    """The pair that each token is joined from, the best score first."""
    ordered = sorted(_joined(pieces), key=lambda piece: -piece.score)
    ranks = {piece.text: rank for rank, piece in enumerate(ordered)}
    parts = [last_parts(piece.text, ranks) for piece in ordered]
    return [pair for pair in parts if len(pair) == 2]


def last_parts(token: str, ranks: dict[str, int]) -> list[str]:
    """What is left of a token if everything but the token itself is joined."""
    parts = list(token)
    while True:
        found = []
        for place, (left, right) in enumerate(pairwise(parts)):
            if left + right in ranks and left + right != token:
                found.append((ranks[left + right], place))
        if not found:
            return parts

        _, place = min(found)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


def _joined(pieces: list[Piece]) -> list[Piece]:
    return [piece for piece in pieces if piece.kind == NORMAL and len(piece.text) > 1]


def vocabulary(pieces: list[Piece]) -> dict[str, int]:
    """{token: id} as `tokenizer_json` has it."""
    return {piece.text: index for index, piece in enumerate(pieces)}


def _is_added(piece: Piece) -> bool:
    """Whether a token is found as a whole, before a text is cut into characters, or never."""
    return piece.kind in (UNKNOWN, CONTROL, USER_DEFINED)


def _added(index: int, piece: Piece) -> dict:
    """The entry of such a token. Special ones have no text, in our decoder too."""
    return {
        "id": index,
        "content": piece.text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": piece.kind != USER_DEFINED,
    }


# ---- what a tokenizer.json cannot say


def _reason_against(model, pieces: list[Piece]) -> str | None:
    """Why no tokenizer.json gives every text the ids of a model; None if one does."""
    kind = model.trainer_spec.model_type
    if kind != 2:
        # sentencepiece adds the scores of a unigram model in float32, tokenizers in float64, and
        # the best of two nearly equal sums decides about ids
        name = MODEL_TYPES.get(kind, kind)
        return f"is a sentencepiece {name} model, and only BPE models have an equal tokenizer.json"
    rules = model.normalizer_spec
    adds_or_removes = rules.add_dummy_prefix or rules.remove_extra_whitespaces
    if rules.precompiled_charsmap or adds_or_removes or not rules.escape_whitespaces:
        return "normalises texts or their spaces, so it has no equal tokenizer.json"
    num_bytes = sum(piece.kind == BYTE for piece in pieces)
    if num_bytes != 256:
        return f"has {num_bytes} of the 256 byte tokens, so some texts have no tokens"

    return None
