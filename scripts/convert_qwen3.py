"""Hugging Face weights to a longhaul checkpoint, and a longhaul checkpoint to Hugging Face.

    python -m scripts.convert_qwen3 --input HF_DIR --output DIR           # writes DIR/step-00000000
    python -m scripts.convert_qwen3 --checkpoint RUN_OR_STEP --output HF_DIR

What is exported is complete: configuration, weights, generation settings and the run's tokenizer.
A model that came from a Hugging Face folder keeps all that the folder says and training has not
changed.
Training needs no conversion first: `train.py --init_from HF_DIR` reads the folder itself. Bad input
ends with one line and exit code 2; an existing output is never overwritten.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from base import durable
from base.flags import PRECISIONS, precision, spellings
from base.tensors import Later
from data import origin
from data.export_tokenizer import exported
from data.hugging_face import (
    SETTINGS,
    TOKENIZER,
    HuggingFaceTokenizer,
    is_json,
    named_token,
    read_settings,
)
from data.load_tokenizer import AnyTokenizer, find_tokenizer, load_tokenizer
from data.writer import require_new
from longhaul import cli, qwen3
from longhaul.checkpoint import start
from longhaul.checkpoint.format import Checkpoint, model_config
from longhaul.checkpoint.load import check_ids, newest, stored_weights, verified
from longhaul.checkpoint.save import save_weights
from longhaul.cli import flag
from longhaul.config import TrainConfig
from longhaul.dist import World
from longhaul.generate import TEMPERATURE, TOP_K, TOP_P
from longhaul.step import TrainState

KEEP = "keep"  # as --dtype
NONE = "none"  # as --tokenizer


@dataclass(frozen=True)
class ConvertConfig:
    """The flags."""

    input: str = flag("", "Hugging Face folder to import", aliases=("from_hf",))
    checkpoint: str = flag(
        "", "step-* folder to export, or a run's folder, whose newest checkpoint is taken"
    )
    output: str = flag("", "folder to write; must be new or empty")
    dtype: str = flag(KEEP, "dtype of the written weights", choices=(KEEP, *spellings(*PRECISIONS)))
    tokenizer: str = flag(
        "",
        "of an export: sentencepiece model, tokenizer.json or a folder with one; empty: the run's "
        f"own; {NONE}: weights only",
    )
    eod: str = flag(
        "",
        "of an export: the token that ends a document, if the tokenizer's folder does not say",
    )

    def __post_init__(self):
        cli.require(self, "output")
        if self.input and self.checkpoint:
            raise ValueError("--input and --checkpoint exclude each other: keep one")
        if not self.input and not self.checkpoint:
            raise ValueError("nothing is converted: give --input or --checkpoint")
        require_new(Path(self.output))
        for name in ("tokenizer", "eod"):
            if self.input and getattr(self, name):
                raise ValueError(
                    f"--{name} is for an export, and --input is an import: drop --{name}"
                )


def main(args: list[str] | None = None):
    """Convert and print what was written."""
    cli.run(ConvertConfig, convert, args, "scripts.convert_qwen3", __doc__.splitlines()[0])


def convert(given: ConvertConfig):
    """Import or export as the flags say."""
    output = Path(given.output)
    if given.input:
        path = import_hf(Path(given.input), output, given.dtype)
    else:
        source = Path(given.checkpoint)
        path = export_hf(source, output, given.dtype, given.tokenizer, given.eod)
    print(f"wrote {path}")


# ---- from Hugging Face


def import_hf(source: Path, output: Path, dtype: str) -> Path:
    """Write step-00000000, a checkpoint without optimizer state, to generate, evaluate, export.

    One weight at a time is in memory. The folder appears by a rename, so it never lacks its
    tokenizer.
    """
    model, weights = qwen3.stored_model(source)
    weights = {name: cast(weight, dtype) for name, weight in weights.items()}
    cfg = TrainConfig(**start.completed({"init_from": str(source)}))
    state = TrainState(cfg, model, None, torch.device("cpu"), World())
    with durable.building(output) as folder:
        written = save_weights(state, weights, folder, extra={"imported_from": str(source)})
        for path in origin.found(source, (TOKENIZER, SETTINGS)):
            shutil.copyfile(path, folder / path.name)
        origin.keep(source, folder)
    return output / written.name


# ---- to Hugging Face


def export_hf(source: Path, output: Path, dtype: str, tokenizer: str = "", eod: str = "") -> Path:
    """Write a Hugging Face folder of a checkpoint, or of a run's newest, whose hashes are verified
    first.

    tokenizer: its path, if not the run's own, or "none". eod: the token that ends a document, if
    nothing next to the tokenizer says it.
    """
    checkpoint = verified(newest(source))
    config = model_config(checkpoint)
    qwen3.require_counterpart(config)
    if config.attention.name != "standard":
        print(f"attention_type={config.attention.name} is exported as full attention")

    context = qwen3.readable_context(config, start.trained_context(checkpoint))
    stored = stored_weights(checkpoint, config)
    weights = {name: cast(weight, dtype) for name, weight in stored.items()}
    found = tokenizer_of(checkpoint, tokenizer, eod)
    usual = sampling(found, config.vocab_size)
    ending = found or own_tokenizer(checkpoint, eod)
    files = {}
    folder = origin.kept(checkpoint.folder.parent)
    if (folder / origin.CONFIG).is_file():
        stored = qwen3.widest(weight.dtype for weight in weights.values())
        is_as_read = not checkpoint.identity and stored == config.compute_dtype
        settings = qwen3.changed_config(folder, config, context, "" if is_as_read else stored)
        context = settings.get("max_position_embeddings", context)
        files |= files_of_origin(folder, settings, ending, usual)
        ending = None  # as those files say
    if found is not None:
        files |= exported(found, config.vocab_size, context)
    qwen3.write_hf(
        config,
        weights,
        output,
        context=context,
        eod_id=None if ending is None else ending.eod_id,
        sampling=usual,
        files=files,
    )
    return output


def files_of_origin(
    folder: Path, settings: dict, ending: AnyTokenizer | None, usual: dict
) -> dict[str, bytes]:
    """config.json with these settings of the model, and generation_config.json, both with what ends
    a text now; what the folder that the model has come from says of generation stays.
    """
    said = read_settings(folder / origin.GENERATION)
    stops = origin.stop_ids(folder)
    if ending is not None and not stops:
        ends = qwen3.generation(ending.eod_id, usual)
        said = ends | {key: value for key, value in said.items() if value is not None}
        settings |= {key: ends[key] for key in qwen3.ENDS if settings.get(key) is None}
    elif ending is not None and not stops_there(ending, folder):
        settings["eos_token_id"] = [ending.eod_id, *stops]
        said |= {"eos_token_id": settings["eos_token_id"]} if said else {}

    files = origin.contents(folder, ("LICENSE*", "NOTICE*"))
    for name, content in ((origin.CONFIG, settings), (origin.GENERATION, said)):
        if content:
            files[name] = origin.rewritten(folder / name, content)
    return files


def stops_there(tokenizer: AnyTokenizer, folder: Path) -> bool:
    """Whether the token that ends a document is one that the folder names to end a text."""
    if tokenizer.eod_id in origin.stop_ids(folder):
        return True
    named = named_token(folder, "eos_token")
    return isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer.eod_token == named


def sampling(tokenizer: AnyTokenizer | None, vocab_size: int) -> dict:
    """How scripts.generate samples, for generation_config.json: only ids of the tokenizer. With the
    tokens that the folder of a Hugging Face tokenizer names to begin and to pad a text.
    """
    usual = dict(do_sample=True, temperature=TEMPERATURE, top_k=TOP_K, top_p=TOP_P)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        usual |= tokenizer.begin_and_pad()
    if tokenizer is None or tokenizer.vocab_size == vocab_size:
        return usual
    return usual | dict(suppress_tokens=list(range(tokenizer.vocab_size, vocab_size)))


def cast(weight: Later, dtype: str) -> Later:
    """The weight in this precision, or as it is for KEEP."""
    if dtype == KEEP:
        return weight
    wanted = getattr(torch, PRECISIONS[precision(dtype)])
    return Later(weight.shape, wanted, lambda: weight.read().to(wanted))


def tokenizer_of(checkpoint: Checkpoint, given: str, eod: str) -> AnyTokenizer | None:
    """The tokenizer that is given, or else the run's; None for "none".

    ValueError if there is none, or not the one that the model was trained with.
    """
    if given == NONE:
        return None
    run = checkpoint.folder.parent
    kept = origin.kept(run) / TOKENIZER
    path = given or (kept if kept.is_file() else find_tokenizer(run))
    if path is None:
        raise ValueError(
            f"{run} has no tokenizer: give --tokenizer PATH, or --tokenizer {NONE} to export the "
            "weights only"
        )
    tokenizer = load_tokenizer(path, eod or end_token(run, Path(path)))
    check_ids(checkpoint.folder, checkpoint, tokenizer, f"--tokenizer {path}")
    return tokenizer


def end_token(run: Path, tokenizer: Path) -> str | None:
    """The token that ended the documents of the run, if it says so and the tokenizer is of Hugging
    Face, whose folder may name another.
    """
    is_hugging_face = is_json(tokenizer) or (tokenizer / TOKENIZER).is_file()
    named = read_settings(run / SETTINGS).get("eos_token")
    return named if is_hugging_face and isinstance(named, str) else None


def own_tokenizer(checkpoint: Checkpoint, eod: str = "") -> AnyTokenizer | None:
    """The run's tokenizer, whose documents end with `eod` if it is given; None without."""
    run = checkpoint.folder.parent
    path = find_tokenizer(run)
    if path is None and eod:
        raise ValueError(
            f"--eod {eod} is a token, and {run} has no tokenizer that knows its id: drop --eod"
        )
    return load_tokenizer(path, eod or None) if path else None


if __name__ == "__main__":
    main()
