"""A lossless sentencepiece tokenizer: decode(encode(text)) == text for every valid Unicode string.

Three things make it lossless: no normalisation and no dummy prefix; a byte token for each byte of
whatever the vocabulary lacks; and U+2581, which sentencepiece itself uses for a space, always
spelled as its three byte tokens. The end of a document is a *control* token: no text encodes to it,
`<|endoftext|>` included.
"""

import functools
import hashlib
import io
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import sentencepiece

from base.untrusted import refuse_pickle

SENTENCEPIECE = "tokenizer.model"  # the name of the file in a folder
EOD_TOKEN = "<|endoftext|>"
# sentencepiece writes a space as this character, so the character itself needs byte tokens
SPACE_MARK = "\u2581"
MIN_VOCAB_SIZE = 2 + 256 + 1  # end of document, unknown, the bytes, and at least one character
LOSSLESS_PROBE = "  a\tb\r\n\n \x00 <|endoftext|> \u2581\u00e9 \ufeff\U0001f600 "
TRAIN_HINT = "train one with --vocab_size N"

# long texts leave the cache while they are encoded: 2.5 times as fast as chunks of 1 MiB
CHUNK_CHARS = 8192
# a chunk without a place to cut grows up to here, which bounds the memory: about 100 MiB
LONGEST_CHUNK = 1 << 20
# the trainer drops a "sentence" of more than 4 MiB, or one with U+2585: keep what it drops small
TRAIN_CHUNK_CHARS = 65536
TRAIN_SETTINGS = dict(
    model_type="bpe",
    normalization_rule_name="identity",
    remove_extra_whitespaces=False,
    add_dummy_prefix=False,
    byte_fallback=True,
    allow_whitespace_only_pieces=True,
    split_digits=True,
    max_sentence_length=4194304,
    unk_id=1,
    eos_id=0,
    bos_id=-1,
    pad_id=-1,
    eos_piece=EOD_TOKEN,
    minloglevel=2,
    # recorded in the model file: pinned, so that its SHA-256 does not depend on the machine
    num_threads=2,
)


# ---- training


def train(
    documents: Iterable[str], vocab_size: int, path: Path | str, character_coverage: float = 1.0
) -> "Tokenizer":
    """Train a BPE tokenizer on whole documents and write it to `path`.

    The same documents give the same bytes. Raises ValueError if `vocab_size` is impossible for this
    text, naming a size that works.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(
            f"vocab_size is {vocab_size}, but 256 byte tokens and 2 control tokens are always in "
            f"the vocabulary: use at least {MIN_VOCAB_SIZE}, preferably 1024 or more"
        )
    if not 0.9 <= character_coverage <= 1:
        raise ValueError(f"character_coverage is {character_coverage}: allowed are 0.9 to 1.0")

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_training_chunks(documents),
            model_writer=model,
            vocab_size=vocab_size,
            character_coverage=character_coverage,
            **TRAIN_SETTINGS,
        )
    except RuntimeError as error:
        raise ValueError(_explain_training_failure(str(error), vocab_size)) from None
    Path(path).write_bytes(model.getvalue())
    return Tokenizer(path)


def _training_chunks(documents: Iterable[str]) -> Iterator[str]:
    for text in documents:
        yield from chunks(text, TRAIN_CHUNK_CHARS)


def chunks(text: str, size: int) -> Iterator[str]:
    """Cut `text` into parts of at most `size` characters, after a newline if there is one."""
    start = 0
    while start < len(text):
        end = start + size
        if end < len(text):
            after_newline = text.rfind("\n", start, end) + 1
            end = after_newline or end
        yield text[start:end]
        start = end


def _explain_training_failure(message: str, vocab_size: int) -> str:
    """What sentencepiece's message means for the user."""
    too_small = re.search(r"smaller than required_chars. \d+ vs (\d+)", message)
    if too_small:
        return (
            f"vocab_size is {vocab_size}, but this text has so many different characters that it "
            f"needs more than {too_small[1]}: use a larger --vocab_size, or --character_coverage "
            "0.9995 (rare characters become byte tokens)"
        )

    too_large = re.search(r"set it to a value <= (\d+)", message)
    if too_large:
        return (
            f"vocab_size is {vocab_size}, but this text is too small to fill it: "
            f"use --vocab_size {too_large[1]} or less, or more text"
        )

    last_line = message.strip().splitlines()[-1]
    return (
        f"a tokenizer of vocab_size {vocab_size} cannot be trained on this text: use more text, "
        f"a smaller --vocab_size (at least {MIN_VOCAB_SIZE}), or --tokenizer PATH ({last_line})"
    )


# ---- encoding and decoding


class Tokenizer:
    """A sentencepiece model file: `encode`, `decode`, `vocab_size`, `eod_id`, `sha256`.

    Raises ValueError if the file is missing, is not a sentencepiece model, or would not give every
    text back exactly.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        if not self.path.is_file():
            raise ValueError(
                f"tokenizer {self.path} is not a file: give a sentencepiece .model file, "
                f"or {TRAIN_HINT}"
            )
        refuse_pickle(self.path, f"give a sentencepiece .model file, or {TRAIN_HINT}")

        model = self.path.read_bytes()
        self.sha256 = hashlib.sha256(model).hexdigest()
        self._processor = _load(model, self.path)
        self.vocab_size: int = self._processor.get_piece_size()
        self.eod_id: int = self._processor.eos_id()

        self._mark_ids = [
            self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()
        ]
        self._require_lossless()

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without an end-of-document id. ValueError for a lone surrogate.

        A long text is encoded in chunks. They are cut where no token could join the characters on
        both sides, so with a BPE model the ids are those of the whole text.
        """
        require_encodable(text)
        ids: list[int] = []
        for chunk in self._chunks(text):
            first, *others = chunk.split(SPACE_MARK)
            ids += self._processor.encode(first)
            for part in others:
                ids += self._mark_ids
                ids += self._processor.encode(part)
        return ids

    @functools.cached_property
    def is_lossless(self) -> bool:
        """Whether the model changes no text before it is encoded, so that every text comes back."""
        return not read_model(self.path).normalizer_spec.precompiled_charsmap

    def back(self, text: str, ids: list[int]) -> str:
        """What the ids of a text give back."""
        return text if self.is_lossless else self.decode(ids)

    def parts(self, text: str, size: int) -> Iterator[str]:
        """`text` in parts of `size` characters or a little more, cut where `encode` cuts, so that
        their ids, joined, are those of the whole.
        """
        part: list[str] = []
        length = 0
        for chunk in self._chunks(text):
            part.append(chunk)
            length += len(chunk)
            if length >= size:
                yield "".join(part)
                part = []
                length = 0
        yield "".join(part)

    def files(self) -> dict[str, bytes]:
        """The files of a copy: {name: content}."""
        return {SENTENCEPIECE: self.path.read_bytes()}

    def padded_vocab_size(self) -> int:
        """The size of the vocabulary, of which every id is used."""
        return self.vocab_size

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; control tokens have no text. ValueError for an unknown id.

        Broken UTF-8, to which no text encodes, becomes U+FFFD.
        """
        unknown = self._processor.unk_id()
        known = known_ids(ids, self.vocab_size)
        return self._processor.decode([index for index in known if index != unknown])

    def spell(self, ids: Iterable[int]) -> str:
        """The text of `ids` with control tokens as they are written, such as <|endoftext|>."""
        spelled = []
        runs = itertools.groupby(known_ids(ids, self.vocab_size), self._processor.is_control)
        for is_control, run in runs:
            if is_control:
                spelled += map(self._processor.id_to_piece, run)
            else:
                spelled.append(self.decode(run))
        return "".join(spelled)

    def stream(self) -> "StreamDecoder":
        """A decoder to be fed one id at a time."""
        return StreamDecoder(self.decode)

    def _chunks(self, text: str) -> Iterator[str]:
        start = 0
        while len(text) - start > CHUNK_CHARS:
            cut = self._cut(text, start)
            yield text[start:cut]
            start = cut
        yield text[start:]

    def _cut(self, text: str, start: int) -> int:
        """Where the chunk from `start` ends: after its last newline that allows it, or else as near
        to CHUNK_CHARS as possible.
        """
        end = start + CHUNK_CHARS
        after_newline = text.rfind("\n", start, end) + 1
        while after_newline > start:
            if not self._may_join(text, after_newline):
                return after_newline
            after_newline = text.rfind("\n", start, after_newline - 1) + 1

        last = min(len(text), start + LONGEST_CHUNK)
        for place in itertools.chain(range(end, start, -1), range(end + 1, last)):
            if not self._may_join(text, place):
                return place
        return last

    def _may_join(self, text: str, place: int) -> bool:
        """Whether some token holds the characters before and after this place side by side."""
        return text[place - 1 : place + 1] in self._neighbours

    @functools.cached_property
    def _neighbours(self) -> set[str]:
        """Every two characters that are side by side in a token."""
        pairs = set()
        for index in range(self.vocab_size):
            text = self._processor.id_to_piece(index).replace(SPACE_MARK, " ")
            pairs.update(map("".join, itertools.pairwise(text)))
        return pairs

    def _require_lossless(self) -> None:
        if self.eod_id < 0 or not self._processor.is_control(self.eod_id):
            raise ValueError(
                f"tokenizer {self.path} has no end-of-document control token (eos_id): {TRAIN_HINT}"
            )
        has_bytes = all(self._processor.is_byte(index) for index in self._mark_ids)
        if not has_bytes or self.decode(self.encode(LOSSLESS_PROBE)) != LOSSLESS_PROBE:
            raise ValueError(
                f"tokenizer {self.path} is not lossless (normalisation, a dummy prefix or no byte "
                f"tokens): {TRAIN_HINT}"
            )


class StreamDecoder:
    """Turns ids into text as they arrive. What further ids may still change waits for them: a
    character whose bytes are incomplete, and ids of which `must_wait` is true.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        must_wait: Callable[[int], bool] = lambda index: False,
    ):
        self._decode = decode
        self._must_wait = must_wait
        self._before: list[int] = []  # the last ids with text; their neighbour may need a space
        self._waiting: list[int] = []

    def push(self, index: int) -> str:
        """The characters that this id completes, "" if there are none yet."""
        self._waiting.append(int(index))
        text = self.finish()
        if self._must_wait(index) or not text or text.endswith("\ufffd"):
            return ""
        self._before, self._waiting = self._waiting, []
        return text

    def finish(self) -> str:
        """What is left; U+FFFD for an unfinished character."""
        written = self._decode(self._before)
        return self._decode([*self._before, *self._waiting])[len(written) :]


def hash_of(ids: dict[str, int]) -> str:
    """The SHA-256 of a map from tokens to ids, whatever its order."""
    pairs = sorted((index, token) for token, index in ids.items())
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def known_ids(ids: Iterable[int], vocab_size: int) -> list[int]:
    """The ids as a list. ValueError for one outside the vocabulary."""
    known = [int(index) for index in ids]
    for index in known:
        if not 0 <= index < vocab_size:
            raise ValueError(
                f"token id {index} is outside the tokenizer's vocabulary of {vocab_size}: "
                "these ids come from another tokenizer"
            )
    return known


def require_encodable(text: str) -> None:
    """Raise ValueError naming the place of the first lone surrogate, which has no UTF-8 form."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"character {error.start} is the lone surrogate U+{ord(text[error.start]):04X}, which "
            "is not Unicode text: repair the source, or skip it with --on_error skip"
        ) from None


def read_model(path: Path):
    """The ModelProto of a model. Raises ValueError if it is malformed."""
    # here, because they take half a second to import, and only a few readers need them
    from google.protobuf.message import DecodeError
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    try:
        return ModelProto.FromString(path.read_bytes())
    except DecodeError as error:
        raise ValueError(f"tokenizer {path} is damaged ({error}): copy it again") from None


def _load(model: bytes, path: Path) -> sentencepiece.SentencePieceProcessor:
    processor = sentencepiece.SentencePieceProcessor()
    try:
        loaded = bool(model) and processor.load_from_serialized_proto(model) is not False
    except (RuntimeError, ValueError):
        loaded = False
    if not loaded or processor.get_piece_size() == 0:
        raise ValueError(
            f"tokenizer {path} is not a sentencepiece model (damaged, or another format): "
            f"give a .model file, or {TRAIN_HINT}"
        )
    return processor
