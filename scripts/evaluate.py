"""Validation loss of a checkpoint: `python -m scripts.evaluate --checkpoint runs/quickstart`.

It prints loss, perplexity and bits per byte, compared with the unigram entropy, which is the loss
of a model that knows only how frequent each token is.
"""

import argparse
import dataclasses
import math
from pathlib import Path

import torch

from data.corpus import prepare_embedded
from data.dataset import Dataset, open_dataset
from data.loader import Loader
from flags import Parser
from longhaul import dist, step
from longhaul.checkpoint.format import Checkpoint, CheckpointError
from longhaul.checkpoint.load import load_model, newest, verified
from longhaul.config import TrainConfig


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(description=__doc__.splitlines()[0], prog="python -m scripts.evaluate")
    parser.add_argument(
        "--checkpoint",
        required=True,
        help="a step-* folder, or a run's folder, whose newest checkpoint is taken",
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
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="device to compute on",
    )
    return parser


def main(args: list[str] | None = None):
    """Evaluate; bad input ends with one line and exit code 2."""
    parser = build_parser()
    given = parser.parse_args(args)
    try:
        evaluate(given)
    except ValueError as error:
        parser.error(str(error))


def evaluate(given: argparse.Namespace):
    """Compute the loss over rows of the validation split and print it."""
    if given.batches < 1:
        raise ValueError(f"--batches {given.batches} is out of range: give at least 1")
    checkpoint = verified(newest(Path(given.checkpoint)))
    # one process evaluates, so nobody shares its rows
    cfg = dataclasses.replace(recorded_settings(checkpoint), context_parallel_size=1)
    dataset = open_data(cfg, given.data)
    check_tokenizer(dataset, checkpoint)

    context = given.context_length or cfg.context_length
    loader = Loader(dataset, context, 1, seed=cfg.seed, split="val")
    rows = min(given.batches, loader.rows_per_epoch)

    device = torch.device(given.device)
    model = load_model(checkpoint, device)
    state = step.TrainState(cfg, model, None, device, dist.World())
    batches = (step.micro_batches(loader.batch(index), 1, device) for index in range(rows))
    loss, count = step.evaluate(state, batches)

    split = loader.split
    print(f"{checkpoint.folder}: validation over {count:,} tokens at context {context:,}")
    print(f"  loss             {loss:.4f} nats per token (perplexity {math.exp(loss):.1f})")
    print(
        f"  unigram entropy  {split.unigram_entropy:.4f} nats per token: the loss from token "
        "frequencies only"
    )
    if split.source_bytes:
        print(f"  bits per byte    {split.bits_per_byte(loss):.4f}")


def recorded_settings(checkpoint: Checkpoint) -> TrainConfig:
    """The settings of the run that wrote the checkpoint; JSON has made lists of its tuples."""
    values = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in checkpoint.config.items()
    }
    return TrainConfig(**values)


def open_data(cfg: TrainConfig, path: str | None) -> Dataset:
    """The dataset of --data, else of the run, else the embedded corpus."""
    if path or cfg.data:
        return open_dataset(path or cfg.data)
    return prepare_embedded(documents=cfg.documents, report=lambda *line: None)


def check_tokenizer(dataset: Dataset, checkpoint: Checkpoint):
    """CheckpointError if the data's ids are not those that the model was trained on. A converted
    checkpoint does not know its tokenizer.
    """
    trained_on = (checkpoint.identity or {}).get("tokenizer")
    if trained_on and dataset.tokenizer_sha256 != trained_on:
        raise CheckpointError(
            f"{dataset.path} was tokenized with a different tokenizer from the data of "
            f"{checkpoint.folder}: prepare the data with --tokenizer "
            f"{checkpoint.folder.parent / 'tokenizer.model'}"
        )


if __name__ == "__main__":
    main()
