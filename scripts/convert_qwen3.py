"""Hugging Face Qwen3 weights to a longhaul checkpoint, and a longhaul checkpoint to Hugging Face.

    python -m scripts.convert_qwen3 --input HF_DIR --output DIR             # writes DIR/step-00000000
    python -m scripts.convert_qwen3 --checkpoint RUN_OR_STEP --output HF_DIR

Training needs no conversion first: `train.py --init_from HF_DIR` reads the folder itself. Bad input
ends with one line and exit code 2; an existing output is never overwritten.
"""

from pathlib import Path

from longhaul.cli import Parser

DTYPES = ("keep", "float32", "bfloat16", "float16")


def main(args: list[str] | None = None):
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
        help="step-* folder, or the run that holds it (its newest is taken), to export",
    )
    parser.add_argument(
        "--output", required=True, metavar="DIR", help="folder to write; must be new or empty"
    )
    parser.add_argument(
        "--dtype", default="keep", choices=DTYPES, help="dtype of the written weights"
    )
    given = parser.parse_args(args)
    try:
        path = convert(given.input, given.checkpoint, Path(given.output), given.dtype)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"wrote {path}")


def convert(
    source: str | None, checkpoint_folder: str | None, output: Path, dtype: str = "keep"
) -> Path:
    """Import `source` or export `checkpoint_folder` into `output`; returns what was written."""
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ValueError(f"--output {output} exists and is not an empty folder: choose another")
    if source is not None:
        return import_hf(Path(source), output, dtype)
    return export_hf(Path(checkpoint_folder), output, dtype)


def import_hf(source: Path, output: Path, dtype: str) -> Path:
    """A step-00000000 checkpoint without optimizer state, for generate, evaluate and export."""
    import torch

    from longhaul import qwen3
    from longhaul.checkpoint import save
    from longhaul.config import TrainConfig
    from longhaul.dist import World
    from longhaul.step import TrainState

    decoder = _cast(qwen3.from_hf(source), dtype)
    state = TrainState(
        TrainConfig(init_from=str(source)), decoder, None, torch.device("cpu"), World()
    )
    return save.save(state, output, extra={"imported_from": str(source)})


def export_hf(source: Path, output: Path, dtype: str) -> Path:
    """A Hugging Face folder of a checkpoint (or of a run's newest), whose hashes are verified
    first.
    """
    from longhaul import qwen3
    from longhaul.checkpoint import load

    qwen3.to_hf(_cast(load.load_model(load.verified(load.newest(source))), dtype), output)
    return output


def _cast(decoder, dtype: str):
    import torch

    return decoder if dtype == "keep" else decoder.to(getattr(torch, dtype))


if __name__ == "__main__":
    main()
