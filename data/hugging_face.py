"""A Hugging Face tokenizer: `tokenizer.json`, through the `tokenizers` library (an optional extra).

Only JSON is read: no code of the folder runs, and a folder that asks for its own code is refused.
Special tokens that occur in a text are encoded like any other text, so no text can end a document
or imitate a chat. Models that would find them in a text (Unigram, WordLevel) encode with a copy of
themselves that does not know how they are written. A token that the folder adds *without* calling
it special is matched in text, as `transformers` does.

Two files make a tokenizer here: tokenizer.json, unchanged, and a tokenizer_config.json with the
token that ends a document. `transformers` opens a folder that has both.
"""

import functools
import importlib.util
import json
import re
import secrets
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path

from base.untrusted import read_json, refuse_pickle
from data.tokenizer import StreamDecoder, hash_of, known_ids, require_encodable

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
PADDED = "padded_vocab_size"  # in our own SETTINGS: the ids of the model, unused ones included
BYTE_LEVEL = "give --tokenizer a byte-level one, such as Qwen's, Llama 3's or GPT-2's"
INSTALL = "pip install tokenizers"

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
        spelled = self.path.read_text("utf-8")
        self._library = _open(self.path, content, spelled)
        self._encoder = self._library
        self._unknown = _unknown_id(content["model"], ids)
        if self._unknown is None and "merges" not in content["model"]:
            raise ValueError(
                f"tokenizer {self.path} has no token for what it lacks (unk_token), so not every "
                f"text has ids: {BYTE_LEVEL}"
            )

        self.eod_token = _end_token(self.path, eod, content, ids)
        self.eod_id: int = ids[self.eod_token]
        self._keep_special_out(content)
        self._require_end_is_no_text(content)
        self._is_cuttable = is_cuttable(content)
        self.is_lossless = is_byte_level(content)
        self._is_composed = "NFC" in _normal_forms(content)

    @functools.cached_property
    def sha256(self) -> str:
        """The hash of the map from tokens to ids."""
        return hash_of(self._ids)

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without an end-of-document id. ValueError for a lone surrogate."""
        require_encodable(text)
        # `encode_batch_fast` leaves out the offsets, which take a third of the time of `encode`
        [encoding] = self._encoder.encode_batch_fast([text], add_special_tokens=False)
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
        """The text of `ids`; special tokens and unknown ones have none. ValueError for an id that
        the tokenizer lacks.
        """
        known = known_ids(ids, self.vocab_size)
        text = [index for index in known if index != self._unknown]
        return self._library.decode(text)

    def back(self, text: str, ids: list[int]) -> str:
        """What the ids of a text give back."""
        if not self.is_lossless:
            return self.decode(ids)
        return unicodedata.normalize("NFC", text) if self._is_composed else text

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

    def _keep_special_out(self, content: dict) -> None:
        """Encode with a copy of the model that finds no special token in a text."""
        found = _found_in_text(content)
        if found:
            copy = json.dumps(_without(content, found))
            self._encoder = _open(self.path, content, copy)

    def _is_text(self, token: str) -> bool:
        """Whether a text that holds a token gets its id."""
        return self._ids[token] in self.encode(f"a{token}b {token}")

    def _require_end_is_no_text(self, content: dict) -> None:
        given = f"--eod {self.eod_token}"
        remedy = _some_special(self.path, self.eod_token, content, self._unknown)
        if self.eod_id == self._unknown:
            raise ValueError(
                f"{given} is what characters become that {self.path} lacks, so a text that holds "
                f"one would end there: {remedy}"
            )
        if self._is_text(self.eod_token):
            raise ValueError(
                f"{given} is no special token of {self.path}, so a text that holds it would end "
                f"there: {remedy}"
            )


# ---- the file


def read_tokenizer(path: Path) -> tuple[dict, dict[str, int]]:
    """The JSON of a fast tokenizer, and {token: id}. Raises ValueError if it is none."""
    refuse_pickle(path, "give a tokenizer.json")
    try:
        content = read_json(path)
        vocab = _vocabulary(content["model"])
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


def _vocabulary(model: dict) -> dict[str, int]:
    """{token: id} of a model, without those that are added to it."""
    vocab = model["vocab"]
    if isinstance(vocab, list):  # Unigram: [token, score]
        return {token: index for index, (token, _) in enumerate(vocab)}
    return vocab


def is_json(path: Path) -> bool:
    """Whether a file is a tokenizer.json by its suffix, in whatever case."""
    return path.suffix.lower() == ".json"


def is_cuttable(content: dict) -> bool:
    """Whether a text may be cut at SAFE_CUT: byte-level BPE behind an expression that we know."""
    normalizer = content.get("normalizer") or {"type": "NFC"}
    for token in _matched(content):
        if token.get("lstrip") or token.get("single_word") or "\n" in token["content"]:
            return False
    return normalizer == {"type": "NFC"} and _is_known_split(content.get("pre_tokenizer"))


# In which byte-level tokens spell the 256 bytes: those that can be seen, and as many others.
ALPHABET = {
    *map(chr, range(33, 127)),
    *map(chr, range(161, 173)),
    *map(chr, range(174, 256)),
    *map(chr, range(256, 324)),
}
SPLITS = ("Split", "Digits", "Punctuation", "ByteLevel")


def is_byte_level(content: dict) -> bool:
    """Whether every text comes back by the structure of a tokenizer: it encodes bytes, has a token
    for each of them, and changes a text by at most its normal form C.
    """
    model = content["model"]
    if isinstance(model["vocab"], list) or not ALPHABET <= model["vocab"].keys():
        return False
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return False
    for token in _matched(content):
        if token.get("lstrip") or token.get("rstrip"):
            return False

    steps = list(_steps(content.get("pre_tokenizer"), "pretokenizers"))
    for step in steps:
        drops = step.get("behavior") == "Removed"
        if step["type"] not in SPLITS or drops or step.get("add_prefix_space"):
            return False
    is_bytes = any(step["type"] == "ByteLevel" for step in steps)
    return is_bytes and "merges" in model and _normal_forms(content) <= {"NFC"}


def _normal_forms(content: dict) -> set[str]:
    """How a tokenizer changes a text before it encodes it."""
    return {step["type"] for step in _steps(content.get("normalizer"), "normalizers")}


def _steps(step: dict | None, key: str) -> Iterator[dict]:
    """The steps of a sequence, or the only one."""
    if step is None:
        return
    if step.get("type") != "Sequence":
        yield step
        return
    for inner in step[key]:
        yield from _steps(inner, key)


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


# ---- special tokens


def _matched(content: dict) -> list[dict]:
    """The added tokens that are found in a text."""
    return [token for token in content["added_tokens"] if not token.get("special")]


def _unknown_id(model: dict, ids: dict[str, int]) -> int | None:
    """The id of what the model lacks, if it has one."""
    by_name = ids.get(model.get("unk_token"))
    return model.get("unk_id", by_name)


def _found_in_text(content: dict) -> set[str]:
    """The special tokens that the model itself has, and makes of a text that holds them."""
    model = content["model"]
    own = set()
    for token in content["added_tokens"]:
        if token.get("special"):
            own.add(token["content"])
    own &= _vocabulary(model).keys()
    if not own or model.get("ignore_merges") or "merges" not in model:
        return own

    made = {token for token in own if len(token) == 1}
    for pair in model["merges"]:
        made.add(_joined(pair, model)[-1])
    return own & made


def _without(content: dict, tokens: set[str]) -> dict:
    """The same tokenizer with names for these tokens that no text can guess, so that the model
    does not find them.
    """
    names = {token: secrets.token_hex(16) for token in tokens}

    def renamed(token: str | None) -> str | None:
        return names.get(token, token)

    model = dict(content["model"])
    vocab = model["vocab"]
    if isinstance(vocab, list):
        model["vocab"] = []
        for token, score in vocab:
            model["vocab"].append([renamed(token), score])
    else:
        model["vocab"] = {renamed(token): index for token, index in vocab.items()}
        model["unk_token"] = renamed(model.get("unk_token"))
    if "merges" in model:
        pairs = model["merges"]
        model["merges"] = [pair for pair in pairs if tokens.isdisjoint(_joined(pair, model))]

    added = []
    for token in content["added_tokens"]:
        added.append(token | {"content": renamed(token["content"])})
    return content | {"model": model, "added_tokens": added}


def _joined(pair: list[str] | str, model: dict) -> tuple[str, str, str]:
    """The two parts of a merge, and what they make."""
    left, right = pair.split(" ") if isinstance(pair, str) else pair
    prefix = model.get("continuing_subword_prefix") or ""
    return left, right, left + right.removeprefix(prefix)


# ---- the library


def require_installed() -> None:
    """Raise ValueError if the `tokenizers` library is not installed."""
    if importlib.util.find_spec("tokenizers") is None:
        raise ValueError(f"a tokenizer.json needs the package tokenizers: run {INSTALL}")


def _open(path: Path, content: dict, spelled: str):
    """The library's tokenizer of a JSON, which cuts off, pads and drops nothing."""
    require_installed()
    import tokenizers

    if content["model"].get("dropout"):
        raise ValueError(
            f"tokenizer {path} drops merges at random (dropout), so a text has no fixed ids: set "
            '"dropout" to null in it'
        )
    try:
        library = tokenizers.Tokenizer.from_str(spelled)
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
    remedy = _some_special(path, "TOKEN", content, _unknown_id(content["model"], ids))
    raise ValueError(f"tokenizer {path}: {reason}: {remedy}")


def named_token(folder: Path, key: str, file: str = SETTINGS) -> str | None:
    """The token that the settings of a folder give this role, if they say it."""
    named = read_settings(folder / file).get(key)
    if isinstance(named, dict):
        named = named.get("content")
    return named if isinstance(named, str) else None


def _some_special(path: Path, token: str, content: dict, unknown: int | None) -> str:
    """The remedy: special tokens that may end a document, or how to make one of a token."""
    names = []
    for one in content["added_tokens"]:
        if one.get("special") and one["id"] != unknown:
            names.append(repr(one["content"]))
    if names:
        return f"give --eod TOKEN, such as {', '.join(names[:4])}"
    return f'put {token} and its id into the added_tokens of {path}, with "special": true'


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
