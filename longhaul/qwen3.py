"""Hugging Face Qwen3 folders (config.json + safetensors) to a Decoder and back. Imports model.py,
files.tensors and files.untrusted of ours.

    decoder = from_hf("Qwen3-4B", rope_scaling="yarn", rope_factor=4.0)     # overrides are fields of ModelConfig
    to_hf(decoder, "exported")                                              # read by transformers 4.51 and later, and 5

Weights move tensor by tensor, in their own dtype; at most one tensor (reading) or one shard
(writing) exists twice. Everything wrong with a folder is a ValueError of one line, found in the
headers before a weight is read.
"""

import functools
import json
import math
import os
import re
import shutil
import warnings
from pathlib import Path

import torch
from safetensors.torch import save_file

from files.tensors import opened
from files.untrusted import read_json, refuse_pickle
from model import Decoder, ModelConfig, attention_kind

LARGEST = 2**40  # what a number of config.json stays below
SHARD_BYTES = 5 * 10**9  # what Hugging Face tools cut at
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
PARTS = dict(
    embed="embed_tokens",
    attention_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    attention="self_attn",
)
GEOMETRY = dict(
    vocab_size="vocab_size",
    hidden_size="hidden_size",
    num_layers="num_hidden_layers",
    num_heads="num_attention_heads",
    num_kv_heads="num_key_value_heads",
    head_dim="head_dim",
    ffn_size="intermediate_size",
)
FIXED = dict(
    hidden_act="silu",
    attention_bias=False,
    use_sliding_window=False,
    attention_dropout=0,
    quantization_config=None,
    partial_rotary_factor=1,
)  # all that this decoder computes; an absent key is the same
ROPE_KEYS = {"rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"}


def hf_name(name: str) -> str:
    """Hugging Face's name of our parameter: layers.0.attention.q_proj.weight ->
    model.layers.0.self_attn.q_proj.weight.
    """
    theirs = ".".join(PARTS.get(part, part) for part in name.split("."))
    return theirs if theirs == "lm_head.weight" else f"model.{theirs}"


# ------------------------------------------------------------------------------------------ reading


def from_hf(folder, **overrides) -> Decoder:
    """A Decoder on the CPU with the folder's weights in the folder's dtype, computing in that dtype
    unless overridden.

    `overrides` replace fields of ModelConfig. Train from it with fp32 master weights by `.float()`.
    ValueError: not a Qwen3 model,
    settings that this decoder does not compute, missing, unknown, misshapen or unreadable tensors,
    pickled weights.
    """
    folder = Path(folder)
    fields = read_config(folder)
    stored = _stored(folder)
    _check_size(fields, stored, folder)
    fields["compute_dtype"] = _widest(dtype for _, _, dtype in stored.values())
    with torch.device("meta"):
        decoder = Decoder(ModelConfig(**fields | overrides))
    _check(decoder, stored, folder)
    for name, parameter in _carried(decoder).items():
        parameter.data = parameter.data.to(stored[hf_name(name)][2])
    decoder.to_empty(device="cpu")
    decoder.tie_weights()
    for part in attention_kind(decoder.config).starts_fresh:
        decoder.init_weights(part=f".{part}.")
    _fill(decoder, stored, folder)
    return decoder


def load_into(decoder: Decoder, folder):
    """Overwrite the parameters of a built decoder, sharded (DTensor) or whole, keeping their dtype.

    ValueError where the geometry differs; other rotary settings than the folder's are kept, with a
    warning.
    """
    folder = Path(folder)
    fields, stored = check_geometry(decoder.config, folder), _stored(folder)
    for name in (
        "rope_theta",
        "rope_scaling",
        "rope_factor",
    ):  # to differ is how a context is extended, or a mistake
        if fields[name] != getattr(decoder.config, name):
            warnings.warn(
                f"{folder} was trained with {name}={fields[name]}; this model uses {getattr(decoder.config, name)}",
                stacklevel=2,
            )
    _check(decoder, stored, folder)
    _fill(decoder, stored, folder)


def check_geometry(config: ModelConfig, folder: Path) -> dict:
    """The folder's fields of ModelConfig; ValueError where its weights do not fit `config`."""
    fields = read_config(folder)
    for name in (*GEOMETRY, "tie_embeddings", "norm_eps"):
        if fields[name] != getattr(config, name):
            raise ValueError(
                f"{folder} has {name}={fields[name]} and this model {getattr(config, name)}: "
                "choose the model size and overrides of the folder"
            )
    return fields


def read_config(folder: Path) -> dict:
    """Fields of ModelConfig from config.json, in the spelling of transformers 4 or of 5."""
    refuse_pickle(folder)
    path = folder / "config.json"
    try:
        config = read_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} is not readable ({error}): name a folder with a Hugging Face Qwen3 model"
        ) from None
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind != "qwen3":
        raise ValueError(
            f"{path}: model_type is {kind!r}: name a folder with a dense Qwen3 model (model_type 'qwen3')"
        )
    _check_settings(config, FIXED, path)
    if set(config.get("layer_types") or ()) - {"full_attention"}:
        raise ValueError(
            f"{path}: layer_types other than 'full_attention' are not supported: use a model with full attention"
        )
    fields = {ours: _number(config, theirs, path, kind=int) for ours, theirs in GEOMETRY.items()}
    fields |= dict(
        tie_embeddings=config.get("tie_word_embeddings") is True,
        norm_eps=_number(config, "rms_norm_eps", path, 1e-6),
        init_std=_number(config, "initializer_range", path, 0.02),
    )
    return fields | _read_rope(config, path)


def _check_settings(settings: dict, allowed: dict, path: Path):
    for key in settings.keys() & allowed.keys():
        value = settings[key]
        near = (
            isinstance(value, float)
            and isinstance(allowed[key], (int, float))
            and math.isclose(value, allowed[key], rel_tol=1e-6)
        )
        if value != allowed[key] and not (value is None or near):
            raise ValueError(
                f"{path}: {key}={value!r} is not supported: this decoder computes {key}={allowed[key]!r} only"
            )


def _number(source: dict, key: str, path: Path, default=None, kind: type = float):
    value = source.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, kind)) or not abs(value) < LARGEST:
        raise ValueError(
            f"{path}: {key}={repr(value)[:80]}: give {'a whole number' if kind is int else 'a number'}"
        )
    return kind(value)


def _read_rope(config: dict, path: Path) -> dict:
    """rope_theta beside rope_scaling (transformers 4), or inside rope_parameters (5); rope_scaling
    wins, as it does there.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
    if kind not in ("default", "linear", "yarn") or kind is rope:
        raise ValueError(
            f"{path}: rotary scaling {kind!r} is not supported: this decoder has default, linear and yarn"
        )
    factor = 1.0 if kind == "default" else _number(rope, "factor", path)
    _check_settings(
        rope,
        dict.fromkeys(rope.keys() - ROPE_KEYS)
        | dict(
            attention_factor=0.1 * math.log(max(factor, 1)) + 1,
            beta_fast=32,
            beta_slow=1,
            truncate=True,
            partial_rotary_factor=1,
        ),
        path,
    )
    longest = _number(config, "max_position_embeddings", path, 32_768, kind=int)
    # The explicit factor counts, as in transformers 5; transformers 4.51 took
    # max_position_embeddings / original instead.
    original = (
        round(longest / factor)
        if kind != "yarn"
        else _number(rope, "original_max_position_embeddings", path, longest, kind=int)
    )
    theta = _number({"rope_theta": config.get("rope_theta", 10_000.0)} | rope, "rope_theta", path)
    return dict(
        rope_theta=theta,
        rope_scaling="none" if factor == 1 else kind,
        rope_factor=factor,
        rope_original_context=original,
    )


def _stored(folder: Path) -> dict[str, tuple[Path, tuple[int, ...], torch.dtype]]:
    """File, shape and dtype of every tensor, from the headers."""
    stored = {}
    for path in _files(folder):
        with opened(path) as source:
            for name in source.keys():
                header = source.get_slice(name)
                if name in stored:
                    raise ValueError(
                        f"{folder}: {_printable(name)} is in {stored[name][0].name} and in {path.name}: remove one of them"
                    )
                if header.get_dtype() not in DTYPES:
                    raise ValueError(
                        f"{path}: {_printable(name)} is stored as {header.get_dtype()}: convert it to one of {', '.join(DTYPES)}"
                    )
                stored[name] = path, tuple(header.get_shape()), DTYPES[header.get_dtype()]
    return stored


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(read_json(index)["weight_map"].values()))
            plain = all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", name) for name in names)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is garbled ({error!r}): download the folder again") from None
        if not plain:
            raise ValueError(
                f"{index} names files outside its folder, among {names}: download the folder again"
            )
        return [folder / name for name in names]
    for pickle in sorted(
        path for kind in ("bin", "pt", "pth") for path in folder.glob(f"*.{kind}")
    ):
        if not (folder / "model.safetensors").is_file():
            raise ValueError(
                f"{pickle} is a pickle, which can run code, and was not opened: convert to safetensors"
            )
    return [folder / "model.safetensors"]


def _carried(decoder: Decoder) -> dict[str, torch.nn.Parameter]:
    """The parameters that a Qwen3 folder holds: all but what the attention kind adds."""
    added = set(attention_kind(decoder.config).starts_fresh)
    return {
        name: parameter
        for name, parameter in decoder.named_parameters()
        if added.isdisjoint(name.split("."))
    }


def _check_size(fields: dict, stored: dict, folder: Path):
    """Before a decoder is made of them: numbers of config.json that no folder can hold, or only one
    with more tensors.
    """
    sizes = {theirs: fields[ours] for ours, theirs in GEOMETRY.items()}
    for name, size in sizes.items():
        if (
            not 0
            < size
            <= (
                len(stored)
                if name == "num_hidden_layers"
                else 2**24
                if name == "vocab_size"
                else 2**20
            )
        ):
            raise ValueError(
                f"{folder} holds {len(stored)} tensors and config.json says {name}={size}: they do not belong together, "
                "download the folder again"
            )


def _check(decoder: Decoder, stored: dict, folder: Path):
    wanted = {
        hf_name(name): tuple(parameter.shape) for name, parameter in _carried(decoder).items()
    }
    again = (
        {"lm_head.weight"} if decoder.config.tie_embeddings else set()
    )  # many tied folders store the head a second time
    for verb, names in (
        ("lacks", wanted.keys() - stored.keys()),
        ("also holds", stored.keys() - wanted.keys() - again),
    ):
        if names:
            raise ValueError(
                f"{folder} {verb} {_printable(min(names))}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: "
                "config.json and weights do not belong together, download the folder again"
            )
    for name, shape in wanted.items():
        if stored[name][1] != shape:
            raise ValueError(
                f"{folder}: {name} has shape {stored[name][1]} and config.json says {shape}: download the folder again"
            )


def _printable(name: str) -> str:
    return name[:200].encode("unicode_escape").decode()


@torch.no_grad()
def _fill(decoder: Decoder, stored: dict, folder: Path):
    for name, parameter in _carried(decoder).items():
        parameter.copy_(_placed(_read(stored, hf_name(name)), parameter))
    if decoder.config.tie_embeddings and "lm_head.weight" in stored:
        if not torch.equal(_read(stored, "lm_head.weight"), _read(stored, hf_name("embed.weight"))):
            raise ValueError(
                f"{folder}: lm_head.weight differs from the embedding: set tie_word_embeddings to false in config.json"
            )


def _read(stored: dict, name: str) -> torch.Tensor:
    with opened(stored[name][0]) as source:
        return source.get_tensor(name)


def _placed(full: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of `full`; every rank reads the file, nothing is sent."""
    if not hasattr(parameter, "device_mesh"):
        return full
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(
        full.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
    )


def _widest(dtypes) -> str:
    return str(functools.reduce(torch.promote_types, dtypes)).removeprefix("torch.")


# ------------------------------------------------------------------------------------------ writing


def to_hf(decoder: Decoder, folder, shard_bytes: int = SHARD_BYTES):
    """Write `decoder` (whole, unsharded) as a Hugging Face folder that appears by a rename;
    ValueError if it holds anything.
    """
    folder = Path(folder).resolve()
    config = hf_config(decoder)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder: choose another output")
    temporary = folder.with_name(f".tmp-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    _write_weights(
        {hf_name(name): parameter.detach() for name, parameter in decoder.named_parameters()},
        temporary,
        shard_bytes,
    )
    (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, folder)


def hf_config(decoder: Decoder) -> dict:
    """config.json in the spelling of transformers 4, which 5 reads too."""
    config = decoder.config
    if not attention_kind(config).is_qwen3:
        raise ValueError(
            f"attention_type={config.attention_type!r} has no Qwen3 counterpart: export a model of standard attention"
        )
    context = round(config.rope_original_context * config.rope_factor)
    scaling = None
    if config.rope_scaling != "none":
        scaling = dict(rope_type=config.rope_scaling, factor=config.rope_factor)
    if config.rope_scaling == "yarn":
        scaling["original_max_position_embeddings"] = config.rope_original_context
    return dict(
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        **{theirs: getattr(config, ours) for ours, theirs in GEOMETRY.items()},
        tie_word_embeddings=config.tie_embeddings,
        rms_norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,
        rope_scaling=scaling,
        max_position_embeddings=context,
        hidden_act="silu",
        attention_bias=False,
        attention_dropout=0.0,
        use_sliding_window=False,
        sliding_window=None,
        initializer_range=config.init_std,
        torch_dtype=_widest(p.dtype for p in decoder.parameters()),
    )


def _write_weights(tensors: dict[str, torch.Tensor], folder: Path, shard_bytes: int):
    shards = [[]]
    for name, tensor in tensors.items():
        if (
            shards[-1]
            and sum(tensors[other].nbytes for other in shards[-1]) + tensor.nbytes > shard_bytes
        ):
            shards.append([])
        shards[-1].append(name)
    single = len(shards) == 1
    files = [
        "model.safetensors" if single else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        for i in range(len(shards))
    ]
    for file, names in zip(files, shards):
        save_file(
            {name: tensors[name].cpu().contiguous() for name in names},
            folder / file,
            metadata={"format": "pt"},
        )
    if not single:
        index = dict(
            metadata=dict(total_size=sum(tensor.nbytes for tensor in tensors.values())),
            weight_map={name: file for file, names in zip(files, shards) for name in names},
        )
        (folder / "model.safetensors.index.json").write_text(
            json.dumps(index, indent=2) + "\n", encoding="utf-8"
        )
