"""A lossless sentencepiece tokenizer: decode(encode(text)) == text for every valid Unicode string.

Imports files.untrusted. Three things make it lossless: no normalisation and no dummy prefix, byte
pieces for whatever the vocabulary lacks, and U+2581 (sentencepiece's own sign for a space) always
spelled as its three byte pieces. The end-of-document piece is a *control* piece: no text,
`<|endoftext|>` included, ever encodes to it.
"""

import codecs
import hashlib
import io
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import sentencepiece

from files.untrusted import refuse_pickle

EOD_PIECE = "<|endoftext|>"
# sentencepiece writes a space as this character, so the character itself needs byte pieces
SPACE_MARK = "\u2581"
# encoding cost grows with the text's length (agenda leaves the cache): 2.5x faster than 1 MiB
# chunks
CHUNK_CHARS = 8192
# the trainer drops any "sentence" over 4 MiB, or that holds U+2585: keep what it drops small
TRAIN_CHUNK_CHARS = 65536
TRAIN_FLAGS = dict(
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
    eos_piece=EOD_PIECE,
    minloglevel=2,
    # recorded in the model file: pinned, so that its SHA-256 does not depend on the machine
    num_threads=2,
)
MIN_VOCAB_SIZE = 2 + 256 + 1  # end of document, unknown, the bytes, and at least one character
LOSSLESS_PROBE = "  a\tb\r\n\n \x00 <|endoftext|> \u2581\u00e9 \ufeff\U0001f600 "


def train(
    documents: Iterable[str], vocab_size: int, path: Path | str, character_coverage: float = 1.0
) -> "Tokenizer":
    """Train a BPE tokenizer on whole documents and write it to `path`; the same documents give the
    same bytes.

    Raises ValueError when `vocab_size` is impossible for this text, naming a size that works.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(
            f"vocab_size is {vocab_size}, but 256 byte pieces and 2 control pieces are always there: "
            f"use at least {MIN_VOCAB_SIZE}, better 1024 or more"
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
            **TRAIN_FLAGS,
        )
    except RuntimeError as error:
        raise ValueError(_explain_training_failure(str(error), vocab_size)) from None
    Path(path).write_bytes(model.getvalue())
    return Tokenizer(path)


def _training_chunks(documents: Iterable[str]) -> Iterator[str]:
    for text in documents:
        yield from _chunks(text, TRAIN_CHUNK_CHARS)


def _explain_training_failure(message: str, vocab_size: int) -> str:
    if found := re.search(r"smaller than required_chars. \d+ vs (\d+)", message):
        return (
            f"vocab_size is {vocab_size}, but this text has so many different characters that it needs more than "
            f"{found[1]}: use a larger --vocab_size, or --character_coverage 0.9995 (rare ones become byte pieces)"
        )
    if found := re.search(r"set it to a value <= (\d+)", message):
        return (
            f"vocab_size is {vocab_size}, but this text is too small to fill it: "
            f"use --vocab_size {found[1]} or less, or more text"
        )
    return (
        f"a tokenizer of vocab_size {vocab_size} cannot be trained on this text: use more text, a smaller "
        f"--vocab_size (at least {MIN_VOCAB_SIZE}), or --tokenizer PATH ({message.strip().splitlines()[-1]})"
    )


def _chunks(text: str, size: int) -> Iterator[str]:
    """Cut `text` into parts of at most `size` characters, after a newline where there is one."""
    start = 0
    while start < len(text):
        end = start + size
        if end < len(text):
            end = (text.rfind("\n", start, end) + 1) or end
        yield text[start:end]
        start = end


class Tokenizer:
    """A sentencepiece model file: `encode`, `decode`, `vocab_size`, `eod_id`, `sha256`.

    Raises ValueError when the file is missing, is no sentencepiece model, or would not give the
    text back exactly.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        if not self.path.is_file():
            raise ValueError(
                f"tokenizer {self.path} is not a file: give a sentencepiece .model file, "
                "or train one with --vocab_size N"
            )
        refuse_pickle(
            self.path, "give a sentencepiece .model file, or train one with --vocab_size N"
        )
        model = self.path.read_bytes()
        self.sha256 = hashlib.sha256(model).hexdigest()
        self._processor = _load(model, self.path)
        self.vocab_size: int = self._processor.get_piece_size()
        self.eod_id: int = self._processor.eos_id()
        self._mark_ids = [
            self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()
        ]
        self._require_lossless()

    def _require_lossless(self) -> None:
        try:
            self._pieces
        except UnicodeDecodeError as error:
            raise ValueError(
                f"tokenizer {self.path} is damaged: a piece is not UTF-8 ({error}): copy the file again, or "
                "train one with --vocab_size N"
            ) from None
        if self.eod_id < 0 or not self._processor.is_control(self.eod_id):
            raise ValueError(
                f"tokenizer {self.path} has no end-of-document control piece (eos_id): "
                "train one with --vocab_size N"
            )
        if (
            not all(self._processor.is_byte(i) for i in self._mark_ids)
            or self.decode(self.encode(LOSSLESS_PROBE)) != LOSSLESS_PROBE
        ):
            raise ValueError(
                f"tokenizer {self.path} is not lossless (normalisation, a dummy prefix or no byte pieces): "
                "train one with --vocab_size N"
            )

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without an end-of-document id. Raises ValueError for a lone surrogate."""
        require_encodable(text)
        ids: list[int] = []
        for chunk in _chunks(text, CHUNK_CHARS):
            for n, part in enumerate(chunk.split(SPACE_MARK)):
                if n:
                    ids += self._mark_ids
                ids += self._processor.encode(part)
        return ids

    def encode_array(self, text: str) -> np.ndarray:
        """`encode` as a uint32 array."""
        return np.array(self.encode(text), dtype=np.uint32)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; control pieces are silent, broken UTF-8 (which no text encodes to)
        becomes U+FFFD.
        """
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of `ids`. Raises ValueError for an id outside the vocabulary."""
        return b"".join(self.piece_bytes(i) for i in ids)

    def piece_bytes(self, index: int) -> bytes:
        """The bytes that one id stands for: b"" for a control piece."""
        if not 0 <= index < self.vocab_size:
            raise ValueError(
                f"token id {index} is outside the tokenizer's vocabulary of {self.vocab_size}: "
                "these ids come from another tokenizer"
            )
        return self._pieces[index]

    def stream(self) -> "StreamDecoder":
        """A decoder to be fed one id at a time."""
        return StreamDecoder(self)

    def bytes_per_token(self, text: str) -> float:
        """UTF-8 bytes of `text` per token of it (0.0 for the empty text)."""
        return len(text.encode()) / max(1, len(self.encode(text)))

    @cached_property
    def _pieces(self) -> list[bytes]:
        return [self._spell(i) for i in range(self.vocab_size)]

    def _spell(self, index: int) -> bytes:
        processor = self._processor
        if processor.is_control(index) or processor.is_unknown(index):
            return b""
        piece = processor.id_to_piece(index)
        if processor.is_byte(index):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(SPACE_MARK, " ").encode()


class StreamDecoder:
    """Turns ids into text as they arrive; a character whose bytes are incomplete waits for the next
    id.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, index: int) -> str:
        """The characters that this id completes, "" when there are none yet."""
        return self._utf8.decode(self._tokenizer.piece_bytes(int(index)))

    def finish(self) -> str:
        """What is left of an unfinished character, as U+FFFD."""
        return self._utf8.decode(b"", final=True)


def require_encodable(text: str) -> None:
    """Raise ValueError naming the offset of the first lone surrogate: it has no UTF-8 form."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"character {error.start} is the lone surrogate U+{ord(text[error.start]):04X}, which is no "
            "Unicode text: repair the source, or skip it with --on_error skip"
        ) from None


def _load(model: bytes, path: Path) -> sentencepiece.SentencePieceProcessor:
    processor = sentencepiece.SentencePieceProcessor()
    try:
        loaded = bool(model) and processor.load_from_serialized_proto(model) is not False
    except (RuntimeError, ValueError):
        loaded = False
    if not loaded or processor.get_piece_size() == 0:
        raise ValueError(
            f"tokenizer {path} is not a sentencepiece model (damaged, or another format): "
            "give a .model file, or train one with --vocab_size N"
        )
    return processor
