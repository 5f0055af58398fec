"""A Hugging Face tokenizer: `tokenizer.json`, through the `tokenizers` library (an optional extra).

Only JSON is read: no code of the folder runs, and a folder that asks for its own code is refused.
Special tokens that occur in a text are encoded like any other text, so no text can end a document
or imitate a chat. A token that the folder adds *without* calling it special is matched in text, as
`transformers` does.

Two files make a tokenizer here: tokenizer.json, unchanged, and a tokenizer_config.json with the
token that ends a document. `transformers` opens a folder that has both.
"""

import functools
import hashlib
import importlib.util
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from base.untrusted import read_json, refuse_pickle
from data.tokenizer import StreamDecoder, known_ids, require_encodable

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
PADDED = "padded_vocab_size"  # in our own SETTINGS: the ids of the model, unused ones included
INSTALL = "pip install -e '.[tokenizers]', or pip install tokenizers"

BYTE = re.compile("<0x[0-9A-F]{2}>")
# A text may be cut here: the expressions below never match across it, nor look behind it.
SAFE_CUT = re.compile(r"\S\n(?=\S)")
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KNOWN_SPLITS = {
    QWEN.replace("DIGITS", r"\p{N}"),  # Qwen2, Qwen2.5, Qwen3
    QWEN.replace("DIGITS", r"\p{N}{1,3}"),  # Llama 3, cl100k
}


class HuggingFaceTokenizer:
    """A fast tokenizer: `encode`, `decode`, `vocab_size`, `eod_id`, and `sha256`, the hash of its
    map from tokens to ids, which is all that a model knows of it.

    eod: the token that ends a document, instead of the folder's eos_token.

    Raises ValueError if the file is no fast tokenizer, names no end of document, or `tokenizers` is
    not installed.
    """

    def __init__(self, path: Path | str, eod: str | None = None):
        self.path = Path(path)
        content, ids = read_tokenizer(self.path)
        self._ids = ids
        self.vocab_size: int = max(ids.values()) + 1
        self._library = _open(self.path, content)

        self.eod_token = _end_token(self.path, eod, content, ids)
        self.eod_id: int = ids[self.eod_token]
        self._require_end_is_no_text(content)
        self._is_cuttable = is_cuttable(content)

    @functools.cached_property
    def sha256(self) -> str:
        """The hash of the map from tokens to ids."""
        return hash_of(self._ids)

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without an end-of-document id. ValueError for a lone surrogate."""
        require_encodable(text)
        # `encode_batch_fast` leaves out the offsets, which take a third of the time of `encode`
        [encoding] = self._library.encode_batch_fast([text], add_special_tokens=False)
        return encoding.ids

    def parts(self, text: str, size: int) -> Iterator[str]:
        """`text` in parts of about `size` characters whose ids, joined, are those of the whole.

        A text of another kind of tokenizer than Qwen's, Llama 3's and GPT-2's is one part.
        """
        start = 0
        while self._is_cuttable and len(text) - start > size:
            cut = SAFE_CUT.search(text, start + size)
            if cut is None:
                break
            yield text[start : cut.end()]
            start = cut.end()
        yield text[start:]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; special tokens have none. ValueError for an unknown id."""
        return self._library.decode(known_ids(ids, self.vocab_size))

    def spell(self, ids: Iterable[int]) -> str:
        """The text of `ids` with special tokens as they are written, such as <|endoftext|>."""
        return self._library.decode(known_ids(ids, self.vocab_size), skip_special_tokens=False)

    def stream(self) -> StreamDecoder:
        """A decoder to be fed one id at a time. Ids of single bytes, such as <0x31>, wait, because
        they become U+FFFD if the bytes that follow them are no UTF-8.
        """
        return StreamDecoder(self.decode, self._is_byte_or_special)

    def begin_and_pad(self) -> dict[str, int]:
        """{"bos_token_id": id, "pad_token_id": id} of those tokens that the folder names."""
        found = {}
        for role in ("bos_token", "pad_token"):
            token = named_token(self.path.parent, role)
            if token in self._ids:
                found[f"{role}_id"] = self._ids[token]
        return found

    def files(self) -> dict[str, bytes]:
        """The files of a copy: {name: content}."""
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self.eod_token,
            PADDED: self.padded_vocab_size(),
        }
        text = json.dumps(settings, indent=1) + "\n"
        return {TOKENIZER: self.path.read_bytes(), SETTINGS: text.encode()}

    def padded_vocab_size(self) -> int:
        """The ids of the folder's model, of which a tokenizer may leave the last ones unused."""
        sizes = [self.vocab_size]
        for name, key in (("config.json", "vocab_size"), (SETTINGS, PADDED)):
            size = read_settings(self.path.parent / name).get(key)
            if isinstance(size, int) and size <= 1 << 32:
                sizes.append(size)
        return max(sizes)

    def _is_byte_or_special(self, index: int) -> bool:
        """Whether an id is one byte of a character that has no id of its own, or has no text."""
        token = self._library.id_to_token(index) or ""
        return BYTE.fullmatch(token) is not None or not self.decode([index])

    def _require_end_is_no_text(self, content: dict) -> None:
        if self.eod_id in self.encode(f"a{self.eod_token}b {self.eod_token}"):
            raise ValueError(
                f"--eod {self.eod_token} is no special token of {self.path}, so a text that holds "
                f"it would end there: give --eod TOKEN, such as {_some_special(content)}"
            )


# ---- the file


def read_tokenizer(path: Path) -> tuple[dict, dict[str, int]]:
    """The JSON of a fast tokenizer, and {token: id}. Raises ValueError if it is none."""
    refuse_pickle(path, "give a tokenizer.json")
    try:
        content = read_json(path)
        vocab = content["model"]["vocab"]
        if isinstance(vocab, list):  # Unigram: [token, score]
            vocab = {token: index for index, (token, _) in enumerate(vocab)}
        content["added_tokens"] = content.get("added_tokens") or []
        ids = vocab | {token["content"]: token["id"] for token in content["added_tokens"]}
        if not ids or not all(type(one) is int and 0 <= one < 1 << 32 for one in ids.values()):
            raise ValueError("its ids are no ids")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"tokenizer {path} is no tokenizer.json of Hugging Face ({error}): give a folder that "
            "has one, or a sentencepiece .model file"
        ) from None
    return content, ids


def hash_of(ids: dict[str, int]) -> str:
    """The SHA-256 of a map from tokens to ids, whatever its order."""
    pairs = sorted((index, token) for token, index in ids.items())
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def hash_of_file(path: Path) -> str:
    """The hash of the map from tokens to ids in a tokenizer.json.

    Needs no library, so that training can compare tokenizers without `tokenizers`.
    """
    return hash_of(read_tokenizer(path)[1])


def hash_of_folder(folder: Path) -> str | None:
    """The hash of the tokenizer in a Hugging Face folder, None if there is no tokenizer.json."""
    path = folder / TOKENIZER
    return hash_of_file(path) if path.is_file() else None


def is_cuttable(content: dict) -> bool:
    """Whether a text may be cut at SAFE_CUT: byte-level BPE behind an expression that we know."""
    normalizer = content.get("normalizer") or {"type": "NFC"}
    for token in content["added_tokens"]:
        is_matched = not token.get("special")
        if is_matched and (token.get("lstrip") or token.get("single_word")):
            return False
        if is_matched and "\n" in token["content"]:
            return False
    return normalizer == {"type": "NFC"} and _is_known_split(content.get("pre_tokenizer"))


def _is_known_split(splitter: dict | None) -> bool:
    """Whether a text is cut into words by GPT-2's expression, or by one of KNOWN_SPLITS."""
    steps = [splitter or {}]
    if steps[0].get("type") == "Sequence":
        steps = steps[0]["pretokenizers"] or [{}]

    last = steps[-1]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return False
    if len(steps) == 1:
        return last.get("use_regex", True)
    if len(steps) > 2 or last.get("use_regex", True) or steps[0].get("type") != "Split":
        return False
    first = steps[0]
    is_plain = first.get("behavior") == "Isolated" and not first.get("invert")
    return is_plain and first.get("pattern", {}).get("Regex") in KNOWN_SPLITS


# ---- the library


def require_installed() -> None:
    """Raise ValueError if the `tokenizers` library is not installed."""
    if importlib.util.find_spec("tokenizers") is None:
        raise ValueError(f"a tokenizer.json needs the package tokenizers: run {INSTALL}")


def _open(path: Path, content: dict):
    """The library's tokenizer, which cuts off, pads and drops nothing."""
    require_installed()
    import tokenizers

    if content["model"].get("dropout"):
        raise ValueError(
            f"tokenizer {path} drops merges at random (dropout), so a text has no fixed ids: set "
            '"dropout" to null in it'
        )
    try:
        library = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        if type(error) is Exception:  # what the library raises, and nothing narrower
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"tokenizer {path} is not one that tokenizers {tokenizers.__version__} reads "
                f"({reason}): save it again with transformers, or update tokenizers"
            ) from None
        raise
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True
    return library


# ---- the end of a document


def _end_token(path: Path, eod: str | None, content: dict, ids: dict[str, int]) -> str:
    """The token `eod`, or the one that the folder says ends a text; ValueError if it says nothing
    or the file lacks the token.
    """
    token = eod or named_token(path.parent, "eos_token")
    if token is None:
        named = read_settings(path.parent / "config.json").get("eos_token_id")
        end_id = named[0] if isinstance(named, list) and named else named
        token = next((name for name, index in ids.items() if index == end_id), None)
    if token in ids:
        return token
    reason = "nothing next to it says which token ends a document"
    if token is not None:
        reason = f"it has no token {token!r} to end documents with"
    raise ValueError(
        f"tokenizer {path}: {reason}: give --eod TOKEN, such as {_some_special(content)}"
    )


def named_token(folder: Path, key: str, file: str = SETTINGS) -> str | None:
    """The token that the settings of a folder give this role, if they say it."""
    named = read_settings(folder / file).get(key)
    if isinstance(named, dict):
        named = named.get("content")
    return named if isinstance(named, str) else None


def _some_special(content: dict) -> str:
    names = [repr(one["content"]) for one in content["added_tokens"] if one.get("special")]
    return ", ".join(names[:4]) or "a special token (this tokenizer has none)"


def read_settings(path: Path) -> dict:
    """The JSON object in a file; {} if there is no file. ValueError if it is no object."""
    if not path.is_file():
        return {}
    try:
        content = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): repair or remove it") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is no JSON object: repair or remove it")
    return content


# ---- folders


def refuse_code(folder: Path) -> None:
    """Raise ValueError if a Hugging Face folder wants its own code to run."""
    if read_settings(folder / SETTINGS).get("auto_map"):
        raise ValueError(
            f"tokenizer {folder} asks to run code of its own (auto_map in {SETTINGS}), which is "
            f"never done: give --tokenizer {folder / TOKENIZER} --eod TOKEN if that file is all "
            "of it"
        )
