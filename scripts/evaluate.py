"""Validation loss of a checkpoint: `python -m scripts.evaluate --checkpoint runs/quickstart`.

Imports longhaul.checkpoint.store, longhaul.config, longhaul.dist, longhaul.step, longhaul.cli and data of
ours.
"""

import math
from pathlib import Path

import torch

from data.corpus import prepare_embedded
from data.dataset import open_dataset
from data.loader import Loader
from longhaul import dist, step
from longhaul.checkpoint.format import Checkpoint, CheckpointError
from longhaul.checkpoint.load import load_model, newest, verified
from longhaul.cli import Parser
from longhaul.config import TrainConfig


def arguments(args: list[str] | None = None):
    parser = Parser(description=__doc__.splitlines()[0], prog="python -m scripts.evaluate")
    parser.add_argument(
        "--checkpoint",
        required=True,
        help="a step-* folder, or a run's folder: its newest checkpoint",
    )
    parser.add_argument(
        "--data", default=None, help="folder made by data.prepare; by default the run's own data"
    )
    parser.add_argument(
        "--context_length", type=int, default=0, help="tokens of a row; 0: as in training"
    )
    parser.add_argument(
        "--batches", type=int, default=32, help="rows of the validation split, at most"
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to run"
    )
    return parser, parser.parse_args(args)


def main(args: list[str] | None = None):
    """Print loss, perplexity and bits per byte beside the entropy of single tokens."""
    parser, given = arguments(args)
    try:
        if given.batches < 1:
            raise ValueError(f"--batches {given.batches} is out of range: give at least 1")
        checkpoint = verified(newest(Path(given.checkpoint)))
        folder = checkpoint.folder
        cfg = TrainConfig(
            **{
                **checkpoint.config,
                "model_overrides": tuple(checkpoint.config["model_overrides"]),
            }
        )
        dataset = open_data(cfg, given.data)
        trained_on = (checkpoint.identity or {}).get(
            "tokenizer"
        )  # a converted checkpoint does not know
        if trained_on and dataset.tokenizer_sha256 != trained_on:
            raise CheckpointError(
                f"{dataset.path} was tokenized by another tokenizer than {folder}'s: prepare the data with "
                f"--tokenizer {folder.parent / 'tokenizer.model'}"
            )
        report(checkpoint, cfg, dataset, given)
    except ValueError as error:
        parser.error(str(error))


def open_data(cfg: TrainConfig, path: str | None):
    """The dataset of --data, of the run, or the embedded corpus."""
    return (
        open_dataset(path or cfg.data)
        if path or cfg.data
        else prepare_embedded(documents=cfg.documents, report=lambda *line: None)
    )


def report(checkpoint: Checkpoint, cfg: TrainConfig, dataset, given):
    """Evaluate over rows of the validation split and print."""
    context = given.context_length or cfg.context_length
    loader = Loader(dataset, context, 1, seed=cfg.seed, split="val")
    model = load_model(checkpoint, given.device)
    state = step.TrainState(cfg, model, None, torch.device(given.device), dist.World())
    rows = min(given.batches, loader.rows_per_epoch)
    batches = (step.micro_batches(loader.batch(index), 1, state.device) for index in range(rows))
    loss, count = step.evaluate(state, batches)
    split = loader.split
    print(f"{checkpoint.folder}: validation over {count:,} tokens at context {context:,}")
    print(f"  loss             {loss:.4f} nats per token (perplexity {math.exp(loss):.1f})")
    print(
        f"  unigram entropy  {split.unigram_entropy:.4f} nats per token: what knowing only the frequencies gives"
    )
    print(f"  bits per byte    {split.bits_per_byte(loss):.4f}")


if __name__ == "__main__":
    main()
