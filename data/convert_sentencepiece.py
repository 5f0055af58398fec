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
is no space but three byte tokens, as in data/tokenizer.py. What a tokenizer.json cannot say, or
says only nearly, is refused.

The model file is read as protobuf, by the field numbers of sentencepiece_model.proto.
"""

import struct
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from data.hugging_face import hash_of
from data.tokenizer import SPACE_MARK

# SentencePiece.Type
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
BYTE = 6

MODEL_TYPES = {1: "unigram", 2: "BPE", 3: "word", 4: "character"}  # TrainerSpec.ModelType
REMEDY = "train one with data.prepare --vocab_size N, or export with --tokenizer none"

# Wire types of protobuf
VARINT = 0
BYTES = 2
FLOAT = 5


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
    model = _message(path, path.read_bytes())
    pieces = read_pieces(path)
    _refuse_other_models(path, model)
    _refuse_other_pieces(path, pieces)

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
            "vocab": _vocabulary(pieces),
            "merges": merges(path, pieces),
        },
    }


def read_pieces(path: Path) -> list[Piece]:
    """The tokens of a sentencepiece model, by their ids. Raises ValueError if it is malformed."""
    pieces = []
    for number, content in _fields(path, path.read_bytes()):
        if number == (1, BYTES):
            pieces.append(_piece(path, content))
    return pieces


def _piece(path: Path, content: bytes) -> Piece:
    """A token. One without a spelling has an empty one, as in sentencepiece."""
    fields = _message(path, content)
    [score] = struct.unpack("<f", fields.get((2, FLOAT), bytes(4)))
    kind = fields.get((3, VARINT), NORMAL)
    try:
        return Piece(fields.get((1, BYTES), b"").decode(), score, kind)
    except UnicodeDecodeError:
        raise ValueError(f"tokenizer {path} has a token that is not UTF-8: {REMEDY}") from None


def hash_as_json(path: Path) -> str:
    """The hash of the map from tokens to ids that `tokenizer_json` of this model has."""
    return hash_of(_vocabulary(read_pieces(path)))


def merges(path: Path, pieces: list[Piece]) -> list[list[str]]:
    """The pair that each token is joined from, the best score first."""
    ordered = sorted(_joined(pieces), key=lambda piece: -piece.score)
    ranks = {piece.text: rank for rank, piece in enumerate(ordered)}
    single = {piece.text for piece in pieces if piece.kind == NORMAL and len(piece.text) == 1}

    pairs = []
    for piece in ordered:
        parts = last_parts(piece.text, ranks)
        if len(parts) == 2:
            _refuse_missing(path, parts, ranks.keys() | single)
            pairs.append(parts)
    return pairs


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


def _vocabulary(pieces: list[Piece]) -> dict[str, int]:
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


def _refuse_other_models(path: Path, model: dict) -> None:
    """ValueError for an algorithm or a normalisation that would not be exactly the same."""
    trainer = _message(path, model.get((2, BYTES), b""))
    kind = trainer.get((3, VARINT), 1)
    if kind != 2:
        # sentencepiece adds the scores of a unigram model in float32, tokenizers in float64, and
        # the best of two nearly equal sums decides about ids
        raise ValueError(
            f"tokenizer {path} is a sentencepiece {MODEL_TYPES.get(kind, kind)} model, and only "
            f"BPE models have an equal tokenizer.json: {REMEDY}"
        )

    normalizer = _message(path, model.get((3, BYTES), b""))
    adds, removes, escapes = (normalizer.get((number, VARINT), 1) for number in (3, 4, 5))
    if normalizer.get((2, BYTES)) or adds or removes or not escapes:
        raise ValueError(
            f"tokenizer {path} normalises texts or their spaces, so it has no equal "
            f"tokenizer.json: {REMEDY}"
        )


def _refuse_other_pieces(path: Path, pieces: list[Piece]) -> None:
    """ValueError for tokens that would be found elsewhere, or in another order."""
    texts = Counter(piece.text for piece in pieces)
    scores = Counter(piece.score for piece in _joined(pieces))
    unused = [piece.text for piece in pieces if piece.kind == UNUSED]
    if unused:
        raise ValueError(
            f"tokenizer {path} marks {unused[0]!r} as unused, which no tokenizer.json can: {REMEDY}"
        )
    spaced = [piece.spelling for piece in pieces if " " in piece.spelling]
    if spaced:
        raise ValueError(
            f"tokenizer {path} spells {spaced[0]!r} with a space, so sentencepiece never finds it, "
            f"and tokenizers would: {REMEDY}"
        )
    _refuse_specials_in_text(path, pieces)
    num_bytes = sum(piece.kind == BYTE for piece in pieces)
    if num_bytes != 256:
        raise ValueError(
            f"tokenizer {path} has {num_bytes} of the 256 byte tokens, so some texts have no "
            f"tokens in a tokenizer.json: {REMEDY}"
        )

    for counts, what in ((texts, "spelling"), (scores, "score")):
        value, count = counts.most_common(1)[0] if counts else (None, 0)
        if count > 1:
            raise ValueError(
                f"tokenizer {path} has {count} tokens of the {what} {value!r}, which a "
                f"tokenizer.json cannot tell apart: {REMEDY}"
            )


def _refuse_specials_in_text(path: Path, pieces: list[Piece]) -> None:
    """ValueError for a special token of one character: tokenizers begins with the characters that
    are tokens, and sentencepiece does not find special ones.
    """
    for piece in pieces:
        if piece.kind in (UNKNOWN, CONTROL) and len(piece.text) == 1:
            raise ValueError(
                f"tokenizer {path} has the special token {piece.text!r} of one character, which "
                f"tokenizers would find in a text: {REMEDY}"
            )


def _refuse_missing(path: Path, parts: list[str], known: set[str]) -> None:
    for part in parts:
        if part not in known:
            raise ValueError(
                f"tokenizer {path} has the token {''.join(parts)!r} without {part!r}, from which a "
                f"tokenizer.json would join it: {REMEDY}"
            )


# ---- protobuf


def _message(path: Path, content: bytes) -> dict[tuple[int, int], int | bytes]:
    """{(number, wire type): value} of the fields of a message, the last one of those that repeat.

    A known number with another wire type is an unknown field, which sentencepiece skips, too.
    """
    return dict(_fields(path, content))


def _fields(path: Path, content: bytes) -> Iterator[tuple[tuple[int, int], int | bytes]]:
    """((number, wire type), value) of each field: an integer, or bytes."""
    place = 0
    while place < len(content):
        key, place = _varint(path, content, place)
        kind = key & 7
        if kind == VARINT:
            value, place = _varint(path, content, place)
            yield (key >> 3, kind), value
            continue

        size = {1: 8, FLOAT: 4}.get(kind)
        if kind == BYTES:
            size, place = _varint(path, content, place)
        if size is None or place + size > len(content):
            raise ValueError(
                f"tokenizer {path} is damaged: its field of type {kind} at byte {place} is no "
                "protobuf: copy it again"
            )
        yield (key >> 3, kind), content[place : place + size]
        place += size


def _varint(path: Path, content: bytes, place: int) -> tuple[int, int]:
    """The integer at `place` in base 128, its lowest digit first, and the place behind it."""
    value = 0
    shift = 0
    while place < len(content):
        byte = content[place]
        place += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, place
    raise ValueError(f"tokenizer {path} is damaged: an integer is cut off: copy it again")
