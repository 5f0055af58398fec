"""Everything that reads files from elsewhere: a good file of each, how it is damaged, and the
reader.
"""

import bz2
import copy
import functools
import gzip
import json
import lzma
import os
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Target:
    """A reader of foreign bytes: `make` writes a good folder, `damage` one input into it, `read` is
    what the product does with it.
    """

    name: str
    make: Callable[[Path], object]  # what it returns goes to `damage`
    damage: Callable[[random.Random, object, Path], None]
    read: Callable[[Path], object]


# ------------------------------------------------------------------------------------------- damage

NUMBERS = (0, 1, 2, 0x7F, 0x80, 0xFF)
LENGTHS = (1, 1, 2, 8, 64, 1 << 20)
VALUES = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2**31,
    2**63,
    2**64,
    10**400,
    -0.5,
    1e308,
    float("inf"),
    float("nan"),
    "",
    "x",
    "../x",
    "/etc/passwd",
    "\0",
    "\ud800",
    "a" * 70_000,
    [],
    {},
    [[]],
    [0],
    [1, 0],
    ["x"],
    {"x": 1},
    {"": None},
)


def damaged(rng: random.Random, content: bytes) -> bytes:
    """1 to 16 flips, overwritten, lost, inserted or repeated bytes."""
    made = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        made = made or bytearray(b"\0")
        at, size = rng.randrange(len(made)), rng.choice(LENGTHS)
        kind = rng.randrange(5)
        if kind == 0:
            made[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            made[at] = rng.choice((*NUMBERS, rng.randrange(256)))
        elif kind == 2:
            del made[at : at + size]
        elif kind == 3:
            made[at:at] = rng.randbytes(min(size, 64))
        else:
            made[at:at] = made[:size][-512:]
    return bytes(made)


def damaged_json(rng: random.Random, value):
    """A copy of a JSON value with 1 to 3 values replaced, lost, renamed, or nested deeply."""
    made = json.loads(json.dumps(value))
    for _ in range(rng.choice((1, 1, 2, 3))):
        place, key = _some_place(rng, made)
        if place is None:
            return copy.deepcopy(rng.choice(VALUES))
        kind = rng.randrange(8)
        if kind == 0:
            del place[key]
        elif kind == 1 and isinstance(place, dict):
            place[rng.choice(("", "x", "a.b", "\u0000", key + "x"))] = place.pop(key)
        elif kind == 2:
            place[key] = functools.reduce(lambda inner, _: [inner], range(rng.choice((2, 50))), 0)
        elif kind == 3 and isinstance(place[key], int):
            place[key] += rng.choice((-1, 1, 2**32))
        else:
            place[key] = copy.deepcopy(rng.choice(VALUES))
    return made


def _some_place(rng: random.Random, value):
    """A container in `value` and one of its keys."""
    while True:
        keys: list | range = []
        if isinstance(value, dict):
            keys = list(value)
        elif isinstance(value, list):
            keys = range(len(value))
        if not keys:
            return None, None
        key = rng.choice(keys)
        if not isinstance(value[key], (dict, list)) or not value[key] or rng.random() < 0.2:
            return value, key
        value = value[key]


def _json_bytes(rng: random.Random, value) -> bytes:
    """A damaged value as JSON; sometimes its bytes are damaged too, or a key is given twice."""
    if rng.random() < 0.02:
        return b"[" * rng.choice((10, 100_000))
    text = json.dumps(damaged_json(rng, value)).encode("utf-8", "replace")
    if rng.random() < 0.1 and b"," in text:
        text = text.replace(b"{", b'{"x": 0, "x": 1, ', 1)
    return damaged(rng, text) if rng.random() < 0.2 else text


# ------------------------------------------------------------------------------------------ targets


def make_safetensors(folder: Path) -> bytes:
    import torch
    from safetensors.torch import save

    tensors = {
        "a.weight": torch.arange(12.0).view(3, 4),
        "b": torch.arange(6, dtype=torch.bfloat16),
        "c": torch.zeros(()),
    }
    (folder / "model.safetensors").write_bytes(save(tensors, {"format": "pt"}))
    return (folder / "model.safetensors").read_bytes()


def damage_safetensors(rng: random.Random, good: bytes, folder: Path):
    length = struct.unpack("<Q", good[:8])[0]
    kind = rng.randrange(4)
    if kind == 0:
        content = damaged(rng, good)
    elif kind == 1:
        content = (
            struct.pack(
                "<Q", rng.choice((0, 1, length - 1, length + 1, 2**21, 2**27, 2**63, 2**64 - 1))
            )
            + good[8:]
        )
    else:
        header = _json_bytes(rng, json.loads(good[8 : 8 + length]))
        content = struct.pack("<Q", len(header)) + header + good[8 + length :]
    if rng.random() < 0.01:  # a file that is as long as the header that it claims
        filler = rng.choice((b"[", b"{},", b'"a",', b" ", b'{"a":', b"[[],", b"0,"))
        body = filler * (rng.choice((1, 3, 30)) * 2**20 // len(filler))
        content = struct.pack("<Q", len(body)) + body
    (folder / "model.safetensors").write_bytes(content)


def read_safetensors(folder: Path):
    from base import tensors

    with tensors.opened(folder / "model.safetensors") as source:
        for name in source.keys():  # noqa: SIM118  a safetensors file is not a dict
            source.get_slice(name).get_shape()
            source.get_tensor(name)


SMALL = dict(
    vocab_size=32,
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    ffn_size=16,
)


def _decoder():
    from longhaul import kernels
    from model import ModelConfig

    decoder = kernels.decoder(ModelConfig.preset("tiny", **SMALL))
    decoder.init_weights(0)
    return decoder


def make_qwen3(folder: Path) -> dict[str, bytes]:
    from longhaul import qwen3

    qwen3.to_hf(_decoder(), folder / "good", shard_bytes=2000)
    names = ("config.json", "model.safetensors.index.json")
    return {name: (folder / "good" / name).read_bytes() for name in names}


def damage_qwen3(rng: random.Random, good: dict, folder: Path):
    for name, content in good.items():
        (folder / "good" / name).write_bytes(content)
    name = rng.choice(list(good))
    content = (
        damaged(rng, good[name]) if rng.random() < 0.3 else _json_bytes(rng, json.loads(good[name]))
    )
    (folder / "good" / name).write_bytes(content)


def read_qwen3(folder: Path):
    from longhaul import qwen3

    qwen3.from_hf(folder / "good")


def make_checkpoint(folder: Path) -> tuple[dict, bytes, str]:
    import torch

    from longhaul import dist
    from longhaul.checkpoint import save
    from longhaul.config import TrainConfig
    from longhaul.step import TrainState

    cfg = TrainConfig(
        model_size="tiny",
        model_overrides=tuple(
            f"{name}={value}" for name, value in SMALL.items() if name != "vocab_size"
        ),
    )
    state = TrainState(cfg, _decoder(), None, torch.device("cpu"), dist.World())
    path = save.save(state, folder, dict(identity={}, rows_per_step=1))
    shard = next(path.glob("*.safetensors"))
    return json.loads((path / "manifest.json").read_bytes()), shard.read_bytes(), shard.name


def damage_checkpoint(rng: random.Random, good: tuple, folder: Path):
    manifest, content, name = good
    step = folder / f"step-{0:08d}"
    text = json.dumps(manifest).encode()
    if rng.random() < 0.4:
        damage_safetensors(rng, content, step)
        (step / "model.safetensors").replace(step / name)
    else:
        (step / name).write_bytes(content)
        text = damaged(rng, text)
    (step / "manifest.json").write_bytes(text)


def evil_pickle(mark: Path) -> bytes:
    """A pickle that makes the file `mark` when it is opened: os.open(mark, O_CREAT | O_WRONLY)."""
    name = str(mark).encode()
    argument = b"X" + struct.pack("<I", len(name)) + name
    flags = b"J" + struct.pack("<i", os.O_CREAT | os.O_WRONLY)
    return b"\x80\x02cposix\nopen\n(" + argument + flags + b"tR."


def read_checkpoint(folder: Path):
    from longhaul.checkpoint import load

    load.load_model(load.verified(folder / f"step-{0:08d}"))


def make_dataset(folder: Path) -> dict[str, bytes]:
    import numpy as np

    from data.writer import write_dataset

    rng = np.random.default_rng(0)
    model = folder / "any.model"
    model.write_bytes(b"stored as it is")
    documents = [rng.integers(1, 100, rng.integers(1, 60)) for _ in range(30)]
    path = write_dataset(
        documents,
        folder / "set",
        vocab_size=100,
        eod_id=0,
        shard_tokens=300,
        tokenizer=model,
        val_fraction=0.1,
    ).path
    return {file.name: file.read_bytes() for file in path.iterdir()}


def damage_manifest(rng: random.Random, good: dict, folder: Path):
    content = damaged_json(rng, json.loads(good["manifest.json"]))
    text = json.dumps(content).encode("utf-8", "replace")
    (folder / "set" / "manifest.json").write_bytes(
        damaged(rng, text) if rng.random() < 0.2 else text
    )


def damage_shards(rng: random.Random, good: dict, folder: Path):
    """In place half of the time: sizes are then right, and only hashes and values tell."""
    for name, content in good.items():
        if (folder / "set" / name).read_bytes() != content:
            (folder / "set" / name).write_bytes(content)
    name = rng.choice([name for name in good if name != "manifest.json"])
    made = damaged(rng, good[name])
    if rng.random() < 0.5:
        made = (made + good[name])[: len(good[name])]
    (folder / "set" / name).write_bytes(made)


def read_dataset(folder: Path):
    """Open and read every row without the hashes, then with them."""
    from data.dataset import open_dataset
    from data.loader import Loader

    dataset = open_dataset(folder / "set")
    for split in dataset.splits:
        loader = Loader(dataset, 16, 1, split=split)
        loader.rows(range(min(loader.rows_per_epoch, 8)))
    dataset.verify()


def make_tokenizer(folder: Path) -> bytes:
    from data.tokenizer import train

    text = "".join(
        f"def f{n}(x):\n    return x ** {n * n}  # {chr(945 + n % 25)}\n" for n in range(400)
    )
    train([text], 340, folder / "tokenizer.model")
    return (folder / "tokenizer.model").read_bytes()


def damage_tokenizer(rng: random.Random, good: bytes, folder: Path):
    made = damaged(rng, good)
    # the same length: most of the protocol buffer stays readable, and the values are strange
    if rng.random() < 0.7:
        made = bytearray(good)
        for _ in range(rng.choice((1, 2, 8))):
            made[rng.randrange(len(made))] = rng.choice((*NUMBERS, rng.randrange(256)))
    (folder / "tokenizer.model").write_bytes(made)


def read_tokenizer(folder: Path):
    from data.tokenizer import Tokenizer

    tokenizer = Tokenizer(folder / "tokenizer.model")
    tokenizer.decode(tokenizer.encode("def f(x):\n\treturn \0 \u2581 \U0001f600 12345 " * 3))


def make_fast_tokenizer(folder: Path) -> dict:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["def f(x):\n    return x\n" * 20], trainer)
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    settings = {"eos_token": "<end>", "tokenizer_class": "PreTrainedTokenizerFast"}
    good = {"tokenizer.json": json.loads(tokenizer.to_str()), "tokenizer_config.json": settings}
    for name, content in good.items():
        (folder / name).write_text(json.dumps(content))
    return good


def damage_fast_tokenizer(rng: random.Random, good: dict, folder: Path):
    name = rng.choice(["tokenizer.json", "tokenizer.json", "tokenizer_config.json"])
    made = copy.deepcopy(good)
    if rng.random() < 0.3:
        made[name] = damaged_json(rng, made[name])
    else:  # most values are in the vocabulary, so that one of the others is chosen first
        key = rng.choice(list(made[name]))
        made[name][key] = damaged_json(rng, made[name][key])
    for path, content in made.items():
        (folder / path).write_bytes(_json_bytes(rng, content))


def read_fast_tokenizer(folder: Path):
    from data.load_tokenizer import load_tokenizer

    tokenizer = load_tokenizer(folder)
    text = "def f(x):\n\treturn \0 \u2581 \U0001f600 12345 " * 3
    for part in tokenizer.parts(text, 20):
        tokenizer.decode(tokenizer.encode(part))
    tokenizer.files()


def make_toml(folder: Path) -> bytes:
    (folder / "run.toml").write_bytes(
        b'# a run\n[model]\nmodel_size = "tiny"\ncontext_length = 64\nmodel-overrides = '
        b'["num_layers=2", "ffn_size=96"]\n[data]\nbatch_size = 2\n'
        b'[run]\nlr = 1e-3\ngrad_clip = 0.9\ncompile = false\ndtype = "fp32"\nmax_steps = '
        b'1_000\nskip_rows = ["8:16"]\n'
    )
    return (folder / "run.toml").read_bytes()


def damage_toml(rng: random.Random, good: bytes, folder: Path):
    lines = good.splitlines()
    kind = rng.randrange(4)
    if kind == 0:
        at = rng.randrange(len(lines))
        value = rng.choice(
            (
                "-1",
                "0",
                "inf",
                "nan",
                "1e400",
                "9" * 400,
                "true",
                '""',
                "[]",
                "{}",
                '["x=1"]',
                "1979-05-27",
                '"num_layers=1e9"',
                "'''x'''",
                "[" * 2000,
                "0xff",
                "{a.b = 1}",
            )
        )
        lines[at] = lines[at].split(b"=")[0] + b"= " + value.encode()
        content = b"\n".join(lines)
    elif kind == 1:
        rng.shuffle(lines)
        content = b"\n".join(lines)
    else:
        content = damaged(rng, good)
    (folder / "run.toml").write_bytes(content)


def read_toml(folder: Path):
    from longhaul import cli
    from longhaul.config import TrainConfig

    cli.parse(TrainConfig, ["--config", str(folder / "run.toml")])


def make_corpus(folder: Path) -> dict[str, bytes]:
    import zstandard

    lines = b"".join(
        json.dumps({"text": f"line {n} \u00e9\n", "n": n}).encode() + b"\n" for n in range(8)
    )
    good = {
        "a.jsonl": lines,
        "a.jsonl.gz": gzip.compress(lines, mtime=0),
        "a.txt": "Caf\u00e9 \u2581 \U0001f600\r\n".encode() * 9,
        "a.jsonl.xz": lzma.compress(lines),
        "a.jsonl.bz2": bz2.compress(lines),
        "a.jsonl.zst": zstandard.ZstdCompressor(write_checksum=True).compress(lines),
    }
    for name, content in good.items():
        (folder / name).write_bytes(content)
    return good


def damage_corpus(rng: random.Random, good: dict, folder: Path):
    for path in folder.iterdir():
        path.unlink()
    name = rng.choice(list(good))
    (folder / name).write_bytes(damaged(rng, good[name]))


def read_corpus(folder: Path):
    from data.sources import TextFiles

    for document in TextFiles([folder]).documents():
        document.text.encode("utf-8")


TARGETS = [
    Target("safetensors", make_safetensors, damage_safetensors, read_safetensors),
    Target("qwen3", make_qwen3, damage_qwen3, read_qwen3),
    Target("checkpoint", make_checkpoint, damage_checkpoint, read_checkpoint),
    Target("manifest", make_dataset, damage_manifest, read_dataset),
    Target("shards", make_dataset, damage_shards, read_dataset),
    Target("tokenizer", make_tokenizer, damage_tokenizer, read_tokenizer),
    Target("tokenizer.json", make_fast_tokenizer, damage_fast_tokenizer, read_fast_tokenizer),
    Target("toml", make_toml, damage_toml, read_toml),
    Target("corpus", make_corpus, damage_corpus, read_corpus),
]
