"""Why the tensors of a Hugging Face folder are not those of its config.json, and what mends it.

transformers leaves out tensors that it does not know, and draws those that it lacks at random, with
a warning. Here both are refused, with the cause if the names show it.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

HEAD = "lm_head.weight"
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")

# Buffers that are computed anew, so that nothing depends on what is stored: frequencies of rotary
# positions, causal masks, indices of positions.
BUFFER = re.compile(r"(^|\.)(rotary_emb\.\w+|(self_)?attn\.(bias|masked_bias)|position_ids)$")

LEAVE_OUT = "save what AutoModelForCausalLM of transformers reads of it, which leaves them out"
# What such names mean, and the remedy. No tensor of a decoder here has one of them.
FOREIGN = (
    (
        r"\.lora_|\.base_layer\.",
        "holds a LoRA that is not merged",
        "merge it with merge_and_unload() of peft, then save_pretrained()",
    ),
    (
        r"scales?(_\w+)?$|\.qweight$|zeros$|g_idx$|absmax$|\.quant_|SCB$|_packed$|zero_point$",
        "is quantised",
        "name the folder of the model before it was quantised",
    ),
    (
        r"(^|\.)mtp\w*\.|\.(eh_proj|enorm|hnorm|shared_head)\.",
        "holds layers that predict several tokens (MTP), which this decoder does not have",
        LEAVE_OUT,
    ),
    (
        r"(^|\.)(scores?|classifier|qa_outputs|(?!lm_)\w+_head|regressor)\.",
        "holds a model that judges or classifies texts, as its head says",
        "name the folder of the language model that it was made from",
    ),
)
# What puts such words into the names.
WRAPPERS = {
    "_orig_mod": "torch.compile",
    "module": "DistributedDataParallel",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "checkpointing",
    "base_model.model": "PEFT",
    "language_model": "a model of images and text",
}


def printable(name: str) -> str:
    """A name from a file, fit for a message."""
    return name[:200].encode("unicode_escape").decode()


def refuse_foreign(folder: Path, names: Collection[str]) -> None:
    """ValueError if a name shows that the folder holds another kind of model."""
    for pattern, meaning, remedy in FOREIGN:
        found = sorted(name for name in names if re.search(pattern, name))
        if found:
            raise ValueError(f"{folder} {meaning} ({some(found)}): {remedy}")


def refuse_adapter(folder: Path) -> None:
    """ValueError for the folder of a LoRA, with or without its base model."""
    if (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"{folder} holds an adapter of peft (adapter_config.json), which is not read: load it "
            "with AutoPeftModelForCausalLM, and save what merge_and_unload() returns"
        )


def refuse_names(
    folder: Path,
    stored: Collection[str],
    wanted: Collection[str],
    also: Collection[str],
    is_body: bool,
) -> None:
    """ValueError unless the folder holds the wanted tensors and no others but `also`.

    `is_body`: the names have no `model.` before them in the folder.
    """
    lacking = sorted(set(wanted) - set(stored))
    extra = sorted(set(stored) - set(wanted) - set(also))
    if lacking:
        _refuse_wrapped(folder, stored, lacking)
        _refuse_lacking(folder, lacking, _layers(stored), _layers(wanted), is_body)
    if extra:
        _refuse_extra(folder, extra, _layers(stored), _layers(wanted))


def _refuse_wrapped(folder: Path, stored: Collection[str], lacking: list[str]) -> None:
    """ValueError if words in front of the lacking names, or in them, are all that is wrong."""
    known = re.compile(rf"\b({'|'.join(WRAPPERS)})\.")
    wanted = set(lacking)
    for name in sorted(stored):
        words = [match.group(1) for match in known.finditer(name)]
        makers = " and ".join(WRAPPERS[word] for word in words)
        plain = known.sub("", name)
        if plain not in wanted:
            plain = next((end for end in _ends(name) if end in wanted), "")
            words = [name.removesuffix(f".{plain}")]
            makers = "a module around the model"
        if plain:
            raise ValueError(
                f"{folder} calls {plain} {printable(name)}, as {makers} does: save the model that "
                f"is inside, or take {printable('. and '.join(words))}. out of the names with "
                "load_file and save_file of safetensors.torch"
            )


def _ends(name: str) -> Iterator[str]:
    """What is behind each dot of a name."""
    while "." in name:
        name = name.partition(".")[2]
        yield name


def _refuse_lacking(
    folder: Path, lacking: list[str], layers: int, wanted_layers: int, is_body: bool
) -> NoReturn:
    if lacking == [HEAD]:
        cause = "it was saved without the output weight"
        if is_body:
            cause = "its names have no model. before them, so the body was saved by itself"
        raise ValueError(
            f"{folder} lacks {HEAD}, and tie_word_embeddings is not true in config.json; {cause}: "
            "set it to true if the embedding is the output weight, else name the folder of the "
            "whole language model"
        )
    if layers < wanted_layers and all(_number(name) >= layers for name in lacking):
        _refuse_layers(folder, f"lacks {some(lacking)}", layers, wanted_layers)
    raise ValueError(
        f"{folder} lacks {some(lacking)}, which a model of its config.json has: put config.json "
        "and all weights of one model there"
    )


def _refuse_extra(folder: Path, extra: list[str], layers: int, wanted_layers: int) -> NoReturn:
    if layers > wanted_layers and all(_number(name) >= wanted_layers for name in extra):
        _refuse_layers(folder, f"also holds {some(extra)}", layers, wanted_layers)
    raise ValueError(
        f"{folder} also holds {some(extra)}, which a model of its model_type does not have: if "
        f"it works without them, {LEAVE_OUT}"
    )


def _refuse_layers(folder: Path, found: str, layers: int, wanted_layers: int) -> NoReturn:
    raise ValueError(
        f"{folder} {found}: its weights have {layers} layers, and config.json says "
        f"num_hidden_layers={wanted_layers}: set it to {layers}, or get the weights of that model"
    )


def refuse_shapes(
    folder: Path,
    stored: Mapping[str, tuple[int, ...]],
    wanted: Mapping[str, tuple[int, ...]],
) -> None:
    """ValueError unless the tensors have the wanted shapes."""
    for name, shape in wanted.items():
        if stored[name] != shape:
            remedy = "put the config.json there that was saved with these weights"
            if _is_table(name) and stored[name][1:] == shape[1:]:
                remedy = _vocabulary_remedy(stored)
            raise ValueError(
                f"{folder}: {name} has shape {stored[name]} and config.json says {shape}: {remedy}"
            )


def _vocabulary_remedy(stored: Mapping[str, tuple[int, ...]]) -> str:
    rows = {shape[0] for name, shape in stored.items() if _is_table(name)}
    if len(rows) == 1:
        return f"set vocab_size to {rows.pop()} in config.json"
    return "give the embedding and the output weight as many rows, and vocab_size that number"


def _is_table(name: str) -> bool:
    return name in (HEAD, "model.embed_tokens.weight")


def refuse_size(folder: Path, stored: Collection[str], key: str, size: int) -> NoReturn:
    """ValueError for a size in config.json that no tensor of the folder can have."""
    if key == "num_hidden_layers" and size > 0:
        _refuse_layers(folder, f"holds {len(stored)} tensors", _layers(stored), size)
    raise ValueError(
        f"{folder} holds {len(stored)} tensors, and config.json says {key}={size}, which they "
        "cannot have: put the config.json there that was saved with these weights"
    )


def _layers(names: Collection[str]) -> int:
    """One more than the largest number of a layer in the names."""
    return max(map(_number, names), default=-1) + 1


def _number(name: str) -> int:
    """The number of the layer that a tensor belongs to; -1 for none."""
    found = LAYER.search(name)
    return int(found.group(1)[:9]) if found else -1


def some(names: list[str]) -> str:
    """The first name, and how many more there are."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return printable(names[0]) + more
