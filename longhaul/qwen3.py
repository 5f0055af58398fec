"""Hugging Face folders of Qwen3, Qwen2.5 and Llama 3 (config.json + safetensors) to a Decoder and
back.

    decoder = from_hf("Qwen3-4B", rope_scaling="yarn", rope_factor=4.0)   # fields of ModelConfig
    to_hf(decoder, "exported")      # read by transformers 4.51 and later, and by 5

Weights move one tensor at a time, in their own dtype: no more than one exists twice. Whatever is
wrong with a folder is a ValueError of one line, and is found before a weight is copied.
"""

import functools
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from base import durable
from base.tensors import WEIGHTS, Later, opened, write_tensors
from base.untrusted import read_json, refuse_pickle
from longhaul import dist, kernels, mismatch
from longhaul.kinds import attention_kind
from model import Decoder, ModelConfig

SHARD_BYTES = 5 * 10**9  # the size of a file at which Hugging Face's tools start another one

# No number of a sane config.json is as large; larger ones would cost memory before the headers of
# the weights could show that they are wrong.
LARGEST = 2**40
LARGEST_SIZE = 2**20
LARGEST_VOCABULARY = 2**24


class Family(NamedTuple):
    """What the models of one `model_type` have besides what all decoders here have."""

    architecture: str  # in transformers
    settings: Mapping[str, Any]  # what config.json says of it
    qk_norm: bool = False
    qkv_bias: bool = False


FULL = dict(use_sliding_window=False, sliding_window=None)
UNBIASED = dict(attention_bias=False)
FAMILIES = dict(
    qwen3=Family("Qwen3ForCausalLM", FULL | UNBIASED, qk_norm=True),
    qwen2=Family("Qwen2ForCausalLM", FULL, qkv_bias=True),  # 2.5 too
    llama=Family("LlamaForCausalLM", UNBIASED | dict(mlp_bias=False)),
)

# Our names of the model's parts and fields, and Hugging Face's.
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
# What decides the shapes of the weights, or what they compute.
SHAPE = (*GEOMETRY, "tie_embeddings", "norm_eps", "qk_norm", "qkv_bias")

# The one value of these settings that this decoder computes; an absent key means the same.
FIXED = dict(
    hidden_act="silu",
    attention_bias=False,
    mlp_bias=False,
    use_sliding_window=False,
    attention_dropout=0,
    quantization_config=None,
    partial_rotary_factor=1,
)
ENDS = ("bos_token_id", "eos_token_id")  # what config.json says of a text, too
ROPE_KEYS = {"rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"}


def hf_name(name: str) -> str:
    """Hugging Face's name of our parameter.

    layers.0.attention.q_proj.weight -> model.layers.0.self_attn.q_proj.weight
    """
    theirs = ".".join(PARTS.get(part, part) for part in name.split("."))
    return theirs if theirs == "lm_head.weight" else f"model.{theirs}"


# ---- reading


class Stored(NamedTuple):
    """Where a tensor is, and what the header says of it."""

    path: Path
    name: str  # in the file
    shape: tuple[int, ...]
    dtype: torch.dtype


def from_hf(
    folder: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    **overrides,
) -> Decoder:
    """A Decoder on `device` with the folder's weights, stored in `dtype` or, like those of the
    folder, each in its own, and computing in the folder's.

    `overrides` replace fields of ModelConfig. To train with fp32 master weights, call `.float()`.
    ValueError: another kind of model; settings that this decoder does not compute; missing,
    unknown, misshapen or unreadable tensors; pickled weights.
    """
    decoder, weights = stored_model(Path(folder), **overrides)
    for name, weight in weights.items():
        parameter = decoder.get_parameter(name)
        parameter.data = parameter.data.to(weight.dtype)
    if dtype is not None:
        decoder.to(dtype)
    decoder.to_empty(device=device)
    decoder.tie_weights()
    for part in attention_kind(decoder.config).starts_fresh:
        decoder.init_weights(part=f".{part}.")
    _fill(decoder, weights)
    return decoder


def stored_model(folder: Path, **overrides) -> tuple[Decoder, dict[str, Later]]:
    """The model of `from_hf` on meta, and the folder's weights by their names in it, each of which
    is read when it is asked for.
    """
    fields = read_config(folder)
    stored = _stored(folder)
    _check_size(fields, stored, folder)
    fields["compute_dtype"] = widest(tensor.dtype for tensor in stored.values())

    with torch.device("meta"):
        decoder = kernels.decoder(ModelConfig(**fields | overrides))
    return decoder, _weights(decoder, stored, folder)


def stored_weights(folder: Path, config: ModelConfig) -> dict[str, Later]:
    """The same weights for a model of `config`, which has the geometry of the folder's."""
    stored = _stored(folder)
    _check_size(vars(config), stored, folder)
    with torch.device("meta"):
        decoder = kernels.decoder(config)
    return _weights(decoder, stored, folder)


def load_into(decoder: Decoder, folder: str | Path) -> None:
    """Overwrite the parameters of a built decoder, sharded (DTensor) or whole, keeping their dtype.

    ValueError if the geometry differs; rotary settings may.
    """
    folder = Path(folder)
    check_geometry(decoder.config, ModelConfig(**read_config(folder)), folder)
    _fill(decoder, _weights(decoder, _stored(folder), folder))


def check_geometry(config: ModelConfig, stored: ModelConfig, folder: Path) -> None:
    """ValueError if the folder's weights, of a model `stored`, do not fit `config`."""
    for name in SHAPE:
        ours, theirs = getattr(config, name), getattr(stored, name)
        if theirs != ours:
            raise ValueError(
                f"{folder} has {name}={theirs} and this model {ours}: "
                "choose the model size and overrides of the folder"
            )


def read_config(folder: Path) -> dict[str, Any]:
    """Fields of ModelConfig from config.json, in the spelling of transformers 4 or of 5."""
    refuse_pickle(folder)
    mismatch.refuse_adapter(folder)
    path = folder / "config.json"
    config = _read_known_config(path)
    _check_settings(config, FIXED, path)
    if set(config.get("layer_types") or ()) - {"full_attention"}:
        raise ValueError(
            f"{path}: layer_types other than 'full_attention' are not supported: "
            "use a model with full attention"
        )

    family = FAMILIES[config["model_type"]]
    config = _implied_sizes(config, path) | config
    fields = {ours: _number(config, theirs, path, kind=int) for ours, theirs in GEOMETRY.items()}
    fields |= dict(qk_norm=family.qk_norm, qkv_bias=family.qkv_bias)
    fields["tie_embeddings"] = config.get("tie_word_embeddings") is True
    fields["norm_eps"] = _number(config, "rms_norm_eps", path, 1e-6)
    fields["init_std"] = _number(config, "initializer_range", path, 0.02)
    return fields | _read_rope(config, path)


def _implied_sizes(config: dict, path: Path) -> dict[str, int]:
    """The sizes that Llama and Qwen2.5 may leave out."""
    width = _number(config, "hidden_size", path, kind=int)
    heads = _number(config, "num_attention_heads", path, kind=int)
    return dict(num_key_value_heads=heads, head_dim=width // max(heads, 1))


def _read_known_config(path: Path) -> dict[str, Any]:
    try:
        config = read_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} is not readable ({error}): name a folder with a Hugging Face model"
        ) from None

    kind = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(
            f"{path}: model_type is {kind!r}: name a folder with a dense model of Qwen3, Qwen2.5 "
            f"or Llama 3 (model_type {', '.join(FAMILIES)})"
        )
    return {key: value for key, value in config.items() if value is not None}


def _check_settings(settings: dict, allowed: dict, path: Path) -> None:
    """ValueError for a setting that has another value than the allowed one; None is the default."""
    for key in settings.keys() & allowed.keys():
        value = settings[key]
        if value is None or value == allowed[key] or _is_near(value, allowed[key]):
            continue
        raise ValueError(
            f"{path}: {key}={value!r} is not supported: "
            f"this decoder computes {key}={allowed[key]!r} only"
        )


def _is_near(value: Any, allowed: Any) -> bool:
    """Whether a float of a file equals the allowed number up to rounding."""
    if not isinstance(value, float) or not isinstance(allowed, int | float):
        return False
    return math.isclose(value, allowed, rel_tol=1e-6)


def _number(
    source: dict,
    key: str,
    path: Path,
    default: Any = None,
    kind: type = float,
) -> Any:
    value = source.get(key, default)
    is_number = isinstance(value, int | kind) and not isinstance(value, bool)
    if not is_number or not abs(value) < LARGEST:
        wanted = "a whole number" if kind is int else "a number"
        raise ValueError(f"{path}: {key}={repr(value)[:80]}: give {wanted}")
    return kind(value)


def _read_rope(config: dict, path: Path) -> dict[str, Any]:
    """The rotary fields of ModelConfig.

    transformers 4 has rope_theta and rope_scaling, 5 has rope_parameters with both. rope_scaling
    wins, as it does in transformers.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = _rope_kind(rope, path)
    factor = 1.0 if kind == "default" else _number(rope, "factor", path)
    if factor <= 0:
        raise ValueError(f"{path}: factor={factor} of the rotary scaling: give a factor above 1")
    _check_rope_settings(rope, factor, path)

    # The explicit factor counts, as in transformers 5; transformers 4.51 took
    # max_position_embeddings / original instead.
    longest = _number(config, "max_position_embeddings", path, 32_768, kind=int)
    original = round(longest / factor)
    if kind in ("yarn", "llama3"):
        original = _number(rope, "original_max_position_embeddings", path, longest, kind=int)
    reached = 0
    if kind == "llama3" and config.get("max_position_embeddings", 0) != 16 * original:
        reached = longest

    theta = {"rope_theta": config.get("rope_theta", 10_000.0)} | rope
    return dict(
        rope_theta=_number(theta, "rope_theta", path),
        rope_scaling="none" if factor == 1 else kind,
        rope_factor=factor,
        rope_original_context=original,
        rope_context=reached,
    )


def _rope_kind(rope: Any, path: Path) -> str:
    kind = rope
    if isinstance(rope, dict):
        kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(rope, dict) or kind not in ("default", "linear", "yarn", "llama3"):
        raise ValueError(
            f"{path}: rotary scaling {kind!r} is not supported: "
            "this decoder has default, linear, yarn and llama3"
        )
    return kind


def _check_rope_settings(rope: dict, factor: float, path: Path) -> None:
    """ValueError for a rotary setting that this decoder does not read, unless it has no effect."""
    unknown = dict.fromkeys(rope.keys() - ROPE_KEYS)
    without_effect = dict(
        attention_factor=0.1 * math.log(max(factor, 1)) + 1,
        beta_fast=32,
        beta_slow=1,
        low_freq_factor=1,
        high_freq_factor=4,
        truncate=True,
        partial_rotary_factor=1,
    )
    _check_settings(rope, unknown | without_effect, path)


def _stored(folder: Path) -> dict[str, Stored]:
    """Every weight of the folder by its Hugging Face name, from the headers."""
    headers = {}
    for path in _files(folder):
        with opened(path) as source:
            for name in source.keys():  # noqa: SIM118 (a reader of safetensors has no iterator)
                header = source.get_slice(name)
                headers[name] = (path, header.get_shape(), header.get_dtype())
    mismatch.refuse_foreign(folder, headers)

    # transformers takes the names of the body by itself, too
    prefix = "model." if "norm.weight" in headers else ""
    stored = {}
    for name, (path, shape, dtype) in headers.items():
        if mismatch.BUFFER.search(name):
            continue
        if dtype not in WEIGHTS:
            raise ValueError(
                f"{path}: {mismatch.printable(name)} is stored as {dtype}: "
                f"convert it to one of {', '.join(WEIGHTS)}"
            )
        whole = name if name == mismatch.HEAD else f"{prefix}{name}"
        stored[whole] = Stored(path, name, tuple(shape), WEIGHTS[dtype])
    return stored


def _files(folder: Path) -> list[Path]:
    """The files with weights: those that the index names, or the only one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / name for name in _names_in(index)]

    only = folder / "model.safetensors"
    pickles = [path for kind in ("bin", "pt", "pth") for path in folder.glob(f"*.{kind}")]
    if pickles and not only.is_file():
        raise ValueError(
            f"{min(pickles)} is a pickle, which can run code, and was not opened: "
            "convert to safetensors"
        )
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    if others and not only.is_file():
        raise ValueError(
            f"{folder} has {mismatch.some(others)}, and neither {only.name} nor {index.name}, "
            f"which lists the parts: add {index.name}, or rename a single file to {only.name}"
        )
    return [only]


def _names_in(index: Path) -> list[str]:
    """File names of the index; ValueError for one that would lead out of the folder."""
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
        plain = all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", name) for name in names)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is garbled ({error!r}): download the folder again") from None
    if not plain:
        raise ValueError(
            f"{index} names files outside its folder, among {names}: download the folder again"
        )
    return names


def _carried(decoder: Decoder) -> dict[str, torch.nn.Parameter]:
    """The parameters that such a folder holds: all but what the attention kind adds."""
    added = set(attention_kind(decoder.config).starts_fresh)
    return {
        name: parameter
        for name, parameter in decoder.named_parameters()
        if added.isdisjoint(name.split("."))
    }


def _check_size(fields: dict[str, Any], stored: dict[str, Stored], folder: Path) -> None:
    """ValueError for sizes in config.json that the folder's tensors cannot have.

    Checked before a decoder of these sizes is built, which could take all memory.
    """
    largest = dict(num_layers=len(stored), vocab_size=LARGEST_VOCABULARY)
    for ours, theirs in GEOMETRY.items():
        if not 0 < fields[ours] <= largest.get(ours, LARGEST_SIZE):
            mismatch.refuse_size(folder, stored, theirs, fields[ours])


def _check(decoder: Decoder, stored: dict[str, Stored], folder: Path) -> None:
    """ValueError unless the folder has the decoder's tensors, in their shapes, and no others."""
    wanted = {
        hf_name(name): tuple(parameter.shape) for name, parameter in _carried(decoder).items()
    }
    # Many folders of tied models store the head a second time.
    tied = {mismatch.HEAD} if decoder.config.tie_embeddings else set()
    is_body = any(tensor.name == "norm.weight" for tensor in stored.values())
    mismatch.refuse_names(folder, stored, wanted, tied, is_body)
    mismatch.refuse_shapes(folder, {name: stored[name].shape for name in wanted}, wanted)


def _weights(decoder: Decoder, stored: dict[str, Stored], folder: Path) -> dict[str, Later]:
    """The weights of the decoder's parameters, by their names; ValueError unless they fit it."""
    embedding = hf_name("embed.weight")
    both = decoder.config.tie_embeddings and mismatch.HEAD in stored
    if both:
        stored = {embedding: stored[mismatch.HEAD]} | stored  # some hold only the head
    _check(decoder, stored, folder)
    if both and not torch.equal(_read(stored[mismatch.HEAD]), _read(stored[embedding])):
        raise ValueError(
            f"{folder}: lm_head.weight differs from the embedding: "
            "set tie_word_embeddings to false in config.json"
        )

    weights = {}
    for name in _carried(decoder):
        tensor = stored[hf_name(name)]
        weights[name] = Later(tensor.shape, tensor.dtype, functools.partial(_read, tensor))
    return weights


def _read(tensor: Stored) -> torch.Tensor:
    """A tensor in the pages of its file, which is opened for this tensor only, because the pages of
    an open one stay in memory.
    """
    with opened(tensor.path) as source:
        return source.get_tensor(tensor.name)


@torch.no_grad()
def _fill(decoder: Decoder, weights: dict[str, Later]) -> None:
    for name, weight in weights.items():
        parameter = decoder.get_parameter(name)
        parameter.copy_(dist.shard_like(weight.read(), parameter))


def widest(dtypes: Iterable[torch.dtype]) -> str:
    """The name of a dtype that holds the numbers of all."""
    return str(functools.reduce(torch.promote_types, dtypes)).removeprefix("torch.")


# ---- writing


def to_hf(decoder: Decoder, folder: str | Path, **settings: Any) -> None:
    """Write `decoder` (whole, unsharded) as a Hugging Face folder; `settings` as in `write_hf`."""
    weights = {}
    for name, parameter in decoder.named_parameters():
        weights[name] = Later(tuple(parameter.shape), parameter.dtype, parameter.detach)
    write_hf(decoder.config, weights, folder, **settings)


def write_hf(
    config: ModelConfig,
    weights: Mapping[str, Later],
    folder: str | Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    context: int = 0,
    eod_id: int | None = None,
    sampling: Mapping[str, Any] = MappingProxyType({}),
    files: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Write a Hugging Face folder, which appears by a rename. One weight at a time is in memory.

    `weights`: the parameters of a Decoder of `config`, by their names.
    `context`: as in `readable_context`.
    `eod_id`: the end-of-document id, at which generation stops.
    `sampling`: what generation_config.json says besides, such as a temperature. It may name other
    tokens than the end of document to begin and to pad a text.
    `files`: {name: content} of what else belongs into the folder, such as the tokenizer; a
    config.json or generation_config.json among them is written instead of what is described here.
    ValueError if the folder holds anything.
    """
    folder = Path(folder).resolve()
    settings = _settings(config, (weight.dtype for weight in weights.values()), context)
    if eod_id is not None:
        said = generation(eod_id, sampling)
        settings |= {key: said[key] for key in ENDS}
    if folder.is_file() or folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{folder} exists and is not an empty folder: choose another output")

    with durable.building(folder) as temporary:
        named = {hf_name(name): weight for name, weight in weights.items()}
        _write_weights(named, temporary, shard_bytes)
        _write_json(settings, temporary / "config.json")
        if eod_id is not None:
            _write_json(said, temporary / "generation_config.json")
        for name, content in files.items():
            (temporary / name).parent.mkdir(exist_ok=True)
            (temporary / name).write_bytes(content)


def generation(eod_id: int, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json: `eod_id` begins, ends and pads a text unless `sampling` says more."""
    return dict(bos_token_id=eod_id, eos_token_id=eod_id, pad_token_id=eod_id) | dict(sampling)


def _write_json(content: dict, path: Path) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def require_counterpart(config: ModelConfig) -> None:
    """ValueError if no model of Hugging Face computes what this one does."""
    if not attention_kind(config).is_qwen3:
        raise ValueError(
            f"attention_type={config.attention.name!r} has no counterpart in transformers: "
            "export a model of standard attention"
        )
    _family_name(config)


def _family_name(config: ModelConfig) -> str:
    """The `model_type` of the models that compute what this one does."""
    for name, family in FAMILIES.items():
        if (family.qk_norm, family.qkv_bias) == (config.qk_norm, config.qkv_bias):
            return name
    raise ValueError(
        f"qk_norm={config.qk_norm} with qkv_bias={config.qkv_bias} has no counterpart in "
        "transformers: export a model with one of them"
    )


def changed_config(folder: Path, config: ModelConfig, context: int, dtype: str) -> dict[str, Any]:
    """config.json of the folder that a model has come from, with what differs from it by now, each
    key in the folder's spelling.

    `context`: as in `readable_context`. `dtype`: of the weights; empty: as the folder says.
    """
    theirs = read_json(folder / "config.json")
    theirs.pop("auto_map", None)  # code of the folder, which is not copied
    before = _settings(ModelConfig(**read_config(folder)), [config.dtype], 0)
    now = _settings(config, [config.dtype], context)
    changed = {key: value for key, value in now.items() if value != before[key]}
    if dtype:
        changed["dtype" if "dtype" in theirs else "torch_dtype"] = dtype
    rope = {"rope_theta", "rope_scaling"}
    if changed.keys() & rope:
        plain = {key: value for key, value in changed.items() if key not in rope}
        changed = plain | _spelled_rope(theirs, now, "rope_scaling" in changed)
    return theirs | changed


def _spelled_rope(theirs: dict, now: dict, is_scaled_anew: bool) -> dict[str, Any]:
    """The rotary settings of `now` as `theirs` spells them: in two keys, as transformers 4, or all
    in rope_parameters, as 5.
    """
    is_new = "rope_parameters" in theirs and not theirs.get("rope_scaling")
    key = "rope_parameters" if is_new else "rope_scaling"
    before = theirs.get(key) or {}
    rope = (now["rope_scaling"] or {}) if is_scaled_anew else before
    if is_new or "rope_theta" in before:
        rope = {"rope_type": "default"} | rope | {"rope_theta": now["rope_theta"]}

    spelled = {key: rope or None}
    if not is_new or "rope_theta" in theirs:
        spelled["rope_theta"] = now["rope_theta"]
    return spelled


def is_folder(folder: Path) -> bool:
    """Whether a folder is one of Hugging Face, with a model or with an adapter of one."""
    return any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))


def readable_context(config: ModelConfig, context: int) -> int:
    """Tokens that a model can read, as the files of a folder say it: `context`, or what the rotary
    settings say if it is 0 or they are of yarn, because transformers 4.51 takes the factor from it.
    """
    if context and config.rope_scaling != "yarn":
        return context
    return config.rope_reach


def _settings(config: ModelConfig, dtypes: Iterable[torch.dtype], context: int) -> dict:
    require_counterpart(config)
    scaling = None
    if config.rope_scaling != "none":
        scaling = dict(rope_type=config.rope_scaling, factor=config.rope_factor)
    if config.rope_scaling in ("yarn", "llama3"):
        scaling["original_max_position_embeddings"] = config.rope_original_context
    if config.rope_scaling == "llama3":
        scaling |= dict(low_freq_factor=1.0, high_freq_factor=4.0)

    name = _family_name(config)
    return dict(
        architectures=[FAMILIES[name].architecture],
        model_type=name,
        **{theirs: getattr(config, ours) for ours, theirs in GEOMETRY.items()},
        tie_word_embeddings=config.tie_embeddings,
        rms_norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,
        rope_scaling=scaling,
        max_position_embeddings=readable_context(config, context),
        hidden_act="silu",
        **FAMILIES[name].settings,
        attention_dropout=0.0,
        initializer_range=config.init_std,
        torch_dtype=widest(dtypes),
    )


def _write_weights(tensors: dict[str, Later], folder: Path, shard_bytes: int) -> None:
    shards = _shards(tensors, shard_bytes)
    files = ["model.safetensors"]
    if len(shards) > 1:
        count = f"{len(shards):05d}"
        files = [f"model-{i + 1:05d}-of-{count}.safetensors" for i in range(len(shards))]

    weight_map = {}
    for file, names in zip(files, shards, strict=True):
        chosen = {name: tensors[name] for name in names}
        write_tensors(folder / file, chosen, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)

    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = dict(metadata=dict(total_size=total), weight_map=weight_map)
        _write_json(index, folder / "model.safetensors.index.json")


def _shards(tensors: dict[str, Later], shard_bytes: int) -> list[list[str]]:
    """Names of the tensors of each file: as many in turn as fit into `shard_bytes`."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    return shards
