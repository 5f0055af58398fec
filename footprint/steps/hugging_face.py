"""The training step of a model that a Hugging Face config.json describes: no weights are read, and
no code that lies in its folder.
"""

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from footprint.python.refusal import PACKAGES, TORCH, Refused
from footprint.python.users_file import described, lines_of
from footprint.steps.eight_bit import EightBitAdamW
from footprint.steps.search import TooLong

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
OPTIMIZERS = ("adamw", "adamw_fused", "adamw_8bit", "sgd")
RATE = 1e-4  # the learning rate, on which no memory depends
ELSEWISE = "write build() and step(state) into a file and give --step FILE.py"
# endings of the classes that are trained on what follows a token, or on what stands in its place
LANGUAGE = ("CausalLM", "MaskedLM", "ConditionalGeneration", "LMHeadModel")

# in the names of tables of learned positions
POSITIONS = ("position", "pos_emb", "wpe")
# in the entries of a configuration that describe what a model reads next to text
SENSES = ("vision", "audio", "speech", "image", "video")
# in what transformers says about a configuration -> what to do
REMEDIES = {
    "FlashAttention2": 'set "attn_implementation" to "sdpa", which takes FlashAttention, too',
    "padding token": 'give config.json a "pad_token_id", or --batch 1',
    "decoder_start_token_id": 'give config.json a "decoder_start_token_id", such as 0',
    "'image_size'": 'give config.json an "image_size", such as 224',
}


def spellings(precision: str) -> tuple[str, str, str]:
    """A precision as it is spelled here, in torch, and as torch prints it."""
    printed = str(PRECISIONS[precision])
    return precision, printed.removeprefix("torch."), printed


DTYPES = {spelling: PRECISIONS[name] for name in PRECISIONS for spelling in spellings(name)}


class Unusable(ValueError):
    """A configuration whose training step cannot be made."""


@contextlib.contextmanager
def told_in_one_line(folder: str) -> Iterator[None]:
    """Inside the `with` block, an error of transformers becomes an `Unusable` that names its line.
    Refusals, and errors in which transformers has no part, stay what they are.
    """
    try:
        yield
    except (Refused, Unusable, TooLong):
        raise
    except Exception as error:  # of whatever kind transformers raises; any other is raised again
        remedy = next((REMEDIES[part] for part in REMEDIES if part in str(error)), "mend it")
        lines = lines_of(error.__traceback__, _is_theirs)
        if lines:
            raise Unusable(
                f"--hf {folder}: transformers cannot use config.json ({lines[0]}: "
                f"{described(error)}): {remedy}, or {ELSEWISE}"
            ) from error
        raise


def _is_theirs(file: str) -> bool:
    """Whether it is a file of an installed package other than PyTorch."""
    return file.startswith(PACKAGES) and not file.startswith(TORCH)


def functions(folder: str, training: Any, device: str = "cpu") -> tuple[Callable, Callable]:
    """build() and step(state) of a folder's model, as footprint.predict takes them on the CPU;
    `training` has the flags of the profiler's door. ValueError if the model cannot be made, or if
    it is not known what it is trained on.
    """
    config = configuration(folder)
    model_class = _model_class(config)
    make = functools.partial(_batch, model_class, config, training, device)
    is_cast = training.autocast != "none"
    cast = functools.partial(torch.autocast, device, torch.bfloat16, enabled=is_cast)
    return (
        functools.partial(_build, model_class, config, training, device),
        functools.partial(_step, make, cast),
    )


def configuration(folder: str):
    """What transformers reads from config.json; Unusable if that is none, or if the model needs
    what is not predicted.
    """
    if importlib.util.find_spec("transformers") is None:
        raise Unusable("--hf needs transformers: pip install transformers")
    if not (Path(folder) / "config.json").is_file():
        raise Unusable(
            f"--hf {folder}: there is no config.json: give the folder of a model, or its "
            "name on the hub, such as Qwen/Qwen3-8B"
        )
    transformers = importlib.import_module("transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise Unusable(
            f"--hf {folder}: transformers cannot use config.json ({str(error).splitlines()[0]}): "
            f"mend it, or {ELSEWISE}"
        ) from None
    _check_modelled(config)
    return config


def _check_modelled(config) -> None:
    """Unusable for weights or kernels that the step here would not have."""
    for part in (config, config.get_text_config()):
        settings = getattr(part, "quantization_config", None)
        if settings:
            raise Unusable(
                f"--hf: config.json has a quantization_config ({_method(settings)}), and neither "
                "packed weights nor their scales are predicted, only weights in --dtype: give a "
                "folder with a config.json without the entry to predict the model unpacked, or "
                f"{ELSEWISE}"
            )
    parts = [name for name, value in vars(config).items() if name.endswith("_config") and value]
    senses = [name for name in parts if name.startswith(SENSES)]
    if senses:
        raise Unusable(
            f"--hf: the model does not only read text (config.json has a {senses[0]}), and what it "
            f"is trained on is not known here: {ELSEWISE}"
        )


def _method(settings: Any) -> str:
    """How weights are quantized, as a configuration names it."""
    is_named = isinstance(settings, dict) and "quant_method" in settings
    return str(settings["quant_method"]) if is_named else "of no named method"


def _model_class(config) -> type[nn.Module]:
    """The class that the configuration names."""
    transformers = importlib.import_module("transformers")
    names = config.architectures or []
    known = [getattr(transformers, str(name), None) for name in names]
    models = [found for found in known if isinstance(found, type) and issubclass(found, nn.Module)]
    if not models:
        raise Unusable(
            f"--hf: config.json names no architecture that transformers has ({names}): set "
            '"architectures", such as ["LlamaForCausalLM"]'
        )
    return models[0]


def reads_tokens(folder: str) -> bool:
    """Whether the model of a folder is trained on rows of tokens."""
    return getattr(_model_class(configuration(folder)), "main_input_name", "") == "input_ids"


# ---- the model and its optimizer


def _build(model_class: type[nn.Module], config, training: Any, device: str):
    on_device = contextlib.nullcontext() if device == "cpu" else torch.device(device)
    with on_device:
        model = model_class(config).to(DTYPES[training.dtype]).train()
    _check_positions(model, config, training.seq)
    if training.checkpointing:
        _checkpoint(model)
    if training.fsdp > 1:
        _shard(model)
    return model, _optimizer(model, training.optimizer)


def _check_positions(model: nn.Module, config, tokens: int) -> None:
    """TooLong if a table of positions has fewer than `tokens`.

    Some tables have rows in front that no position uses: the one of the padding and those before.
    """
    most = getattr(config, "max_position_embeddings", tokens)
    for name, module in model.named_modules():
        is_table = any(part in name.split(".")[-1] for part in POSITIONS)
        if not isinstance(module, nn.Embedding) or not is_table:
            continue
        unused = 0 if module.padding_idx is None else module.padding_idx + 1
        positions = min(module.num_embeddings - unused, most)
        if positions < tokens:
            raise TooLong(
                f"--seq {tokens} is longer than the model's {positions} learned positions: give at "
                f"most --seq {positions}",
                positions,
            )


def _checkpoint(model: nn.Module) -> None:
    model.config.use_cache = False  # the two exclude each other
    # the name since version 5, and before it
    enable = getattr(model, "activation_checkpointing_enable", None)
    try:
        (enable or model.gradient_checkpointing_enable)()
    except ValueError as error:
        raise Unusable(f"--checkpointing: {error} Drop --checkpointing.") from None


def _shard(model: nn.Module) -> None:
    """FSDP2: each layer is a group of its own, as the model's class names its layers."""
    layers = set(getattr(model, "_no_split_modules", None) or ())
    for module in model.modules():
        if type(module).__name__ in layers:
            fully_shard(module)
    fully_shard(model)


def _optimizer(model: nn.Module, name: str) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    if name == "adamw_8bit":
        return EightBitAdamW(model.parameters(), dict(lr=RATE))
    fused = True if name == "adamw_fused" else None
    return torch.optim.AdamW(model.parameters(), fused=fused)


# ---- the step


def _batch(model_class: type[nn.Module], config, training: Any, device: str) -> dict[str, Tensor]:
    """What a model of this class is trained on."""
    integers = functools.partial(torch.randint, device=device)
    name = model_class.__name__
    rows = training.batch
    reads = getattr(model_class, "main_input_name", "")
    if reads == "pixel_values" and name.endswith("ForImageClassification"):
        shape = rows, config.num_channels, config.image_size, config.image_size
        pixels = torch.randn(shape, dtype=DTYPES[training.dtype], device=device)
        return {"pixel_values": pixels, "labels": integers(config.num_labels, (rows,))}

    if reads == "input_ids":
        ids = integers(config.get_text_config().vocab_size, (rows, training.seq))
        if name.endswith(LANGUAGE):
            return {"input_ids": ids, "labels": ids}
        if name.endswith("ForSequenceClassification"):
            return {"input_ids": ids, "labels": _labels_of_rows(config, rows, device)}
        if name.endswith("ForTokenClassification"):
            labels = integers(config.num_labels, (rows, training.seq))
            return {"input_ids": ids, "labels": labels}
    raise Unusable(f"--hf: what {name} is trained on is not known here: {ELSEWISE}")


def _labels_of_rows(config, rows: int, device: str) -> Tensor:
    """One class of each row; or a number for each class if a row may have several."""
    if config.problem_type == "multi_label_classification":
        return torch.rand(rows, config.num_labels, device=device)
    return torch.randint(config.num_labels, (rows,), device=device)


def _step(make: Callable[[], dict[str, Tensor]], cast: Callable[[], torch.autocast], state) -> None:
    model, optimizer = state
    with cast():
        loss = model(**make()).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
