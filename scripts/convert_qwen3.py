"""Hugging Face Qwen3 weights to a longhaul checkpoint, and a longhaul checkpoint to Hugging Face.

    python -m scripts.convert_qwen3 --input HF_DIR --output DIR           # writes DIR/step-00000000
    python -m scripts.convert_qwen3 --checkpoint RUN_OR_STEP --output HF_DIR

Training needs no conversion first: `train.py --init_from HF_DIR` reads the folder itself. Bad input
ends with one line and exit code 2; an existing output is never overwritten.
"""

import shutil
from pathlib import Path

import torch

from data.dataset import open_dataset
from data.hugging_face import SETTINGS, TOKENIZER
from data.load_tokenizer import find_tokenizer, load_tokenizer
from data.manifest import MANIFEST
from flags import Parser
from longhaul import qwen3
from longhaul.checkpoint.format import Checkpoint
from longhaul.checkpoint.load import load_model, newest, verified
from longhaul.checkpoint.save import save
from longhaul.config import TrainConfig
from longhaul.dist import World
from longhaul.run import start
from longhaul.step import TrainState
from model import Decoder

DTYPES = ("keep", "float32", "bfloat16", "float16")


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(
        prog="convert_qwen3",
        description="Convert between Hugging Face Qwen3 folders and longhaul checkpoints.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--input", "--from_hf", metavar="HF_DIR", help="Hugging Face Qwen3 folder to import"
    )
    source.add_argument(
        "--checkpoint",
        metavar="DIR",
        help="step-* folder to export, or a run's folder, whose newest checkpoint is taken",
    )
    parser.add_argument(
        "--output", required=True, metavar="DIR", help="folder to write; must be new or empty"
    )
    parser.add_argument(
        "--dtype", default="keep", choices=DTYPES, help="dtype of the written weights"
    )
    return parser


def main(args: list[str] | None = None):
    """Convert and print what was written."""
    parser = build_parser()
    given = parser.parse_args(args)
    try:
        path = convert(given.input, given.checkpoint, Path(given.output), given.dtype)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"wrote {path}")


def convert(source: str | None, checkpoint: str | None, output: Path, dtype: str = "keep") -> Path:
    """Import `source` or export `checkpoint` into `output`; returns what was written."""
    empty = output.is_dir() and not any(output.iterdir())
    if output.exists() and not empty:
        raise ValueError(f"--output {output} exists and is not an empty folder: choose another")
    if source is not None:
        return import_hf(Path(source), output, dtype)
    return export_hf(Path(checkpoint), output, dtype)


def import_hf(source: Path, output: Path, dtype: str) -> Path:
    """Write step-00000000, a checkpoint without optimizer state, to generate, evaluate, export."""
    model = with_dtype(qwen3.from_hf(source), dtype)
    cfg = TrainConfig(**start.completed({"init_from": str(source)}))
    state = TrainState(cfg, model, None, torch.device("cpu"), World())
    written = save(state, output, extra={"imported_from": str(source)})
    copy_tokenizer(source, output)
    return written


def export_hf(source: Path, output: Path, dtype: str) -> Path:
    """Write a Hugging Face folder of a checkpoint, or of a run's newest, whose hashes are verified
    first.
    """
    checkpoint = verified(newest(source))
    qwen3.to_hf(
        with_dtype(load_model(checkpoint), dtype),
        output,
        context=start.trained_context(checkpoint),
        eod_id=end_of_document(checkpoint),
    )
    copy_tokenizer(checkpoint.folder.parent, output)
    return output


def copy_tokenizer(source: Path, target: Path):
    """Copy the Hugging Face tokenizer of a folder, if it has one."""
    for name in (TOKENIZER, SETTINGS):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def end_of_document(checkpoint: Checkpoint) -> int | None:
    """The id that ends a document, from the run's tokenizer or from its data if they are still
    there; None if neither is.
    """
    tokenizer = find_tokenizer(checkpoint.folder.parent)
    if tokenizer is not None:
        return load_tokenizer(tokenizer).eod_id

    data = Path(str(checkpoint.config.get("data")))
    if not checkpoint.identity or not (data / MANIFEST).is_file():
        return None
    dataset = open_dataset(data)
    same_data = dataset.fingerprint == checkpoint.identity.get("dataset")
    return dataset.eod_id if same_data else None


def with_dtype(model: Decoder, dtype: str) -> Decoder:
    """The model with weights of this dtype, or as it is for "keep"."""
    return model if dtype == "keep" else model.to(getattr(torch, dtype))


if __name__ == "__main__":
    main()
