"""Validation loss of a checkpoint: `python -m scripts.evaluate --checkpoint runs/quickstart`.

It prints loss, perplexity and bits per byte, compared with the unigram entropy, which is the loss
of a model that knows only how frequent each token is.
"""

import argparse
import dataclasses
import math
from fractions import Fraction
from pathlib import Path

from data.corpus import prepare_embedded
from data.dataset import Dataset, Split
from data.loader import Loader
from data.mixture import EMBEDDED, Corpus, open_corpora
from flags import Parser
from longhaul import dist, step
from longhaul.checkpoint.format import Checkpoint
from longhaul.checkpoint.load import check_tokenizer, load_model, newest, verified
from longhaul.config import TrainConfig
from longhaul.dist import named_device
from longhaul.run.log import perplexity


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(description=__doc__.splitlines()[0], prog="python -m scripts.evaluate")
    parser.add_argument(
        "--checkpoint",
        required=True,
        help="a step-* folder, or a run's folder, whose newest checkpoint is taken",
    )
    parser.add_argument(
        "--data",
        default=None,
        help="folder made by data.prepare, or several with their shares; by default the run's own",
    )
    parser.add_argument(
        "--context_length", type=int, default=0, help="tokens of a row; 0: as in training"
    )
    parser.add_argument(
        "--batches", type=int, default=32, help="rows of the validation split, at most"
    )
    parser.add_argument(
        "--device", default="auto", help="where to compute: auto, cpu, cuda or cuda:N"
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
    device = named_device(given.device)
    checkpoint = verified(newest(Path(given.checkpoint)))
    # one process evaluates, so nobody shares its rows
    cfg = dataclasses.replace(recorded_settings(checkpoint), context_parallel_size=1)
    corpora = open_data(cfg, given.data)
    for corpus in corpora:
        dataset = corpus.dataset
        check_tokenizer(checkpoint, dataset.tokenizer_sha256, f"--data {dataset.path}")
        check_context(given.context_length, dataset)

    context = given.context_length or cfg.context_length
    model = load_model(checkpoint, device)
    state = step.TrainState(cfg, model, None, device, dist.World())
    for corpus in corpora:
        loader = Loader(corpus.dataset, context, 1, seed=cfg.seed, split="val")
        rows = min(given.batches, loader.rows_per_epoch)
        batches = (step.micro_batches(loader.batch(index), 1, device) for index in range(rows))
        loss, count = step.evaluate(state, batches)

        name = f" of {corpus.name}" if len(corpora) > 1 else ""
        print(f"{checkpoint.folder}: validation{name} over {count:,} tokens at context {context:,}")
        show(loader.split, loss)


def show(split: Split, loss: float):
    """Print the loss of a split, with what to compare it with."""
    print(f"  loss             {loss:.4f} nats per token (perplexity {perplexity(loss):.1f})")
    print(
        f"  unigram entropy  {split.unigram_entropy:.4f} nats per token: the loss from token "
        "frequencies only"
    )
    print(f"  bits per byte    {bits_per_byte(split, loss)}")


def recorded_settings(checkpoint: Checkpoint) -> TrainConfig:
    """The settings of the run that wrote the checkpoint; JSON has made lists of its tuples."""
    values = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in checkpoint.config.items()
    }
    return TrainConfig(**values)


def open_data(cfg: TrainConfig, path: str | None) -> tuple[Corpus, ...]:
    """The corpora of --data, else of the run, else the embedded corpus."""
    if path or cfg.data:
        return open_corpora(path or cfg.data)
    embedded = prepare_embedded(documents=cfg.documents, report=lambda *line: None)
    return (Corpus(EMBEDDED, embedded, Fraction(1)),)


def check_context(given: int, dataset: Dataset):
    """ValueError for a --context_length that cannot be evaluated; 0 is that of training."""
    tokens = dataset.split("val").num_tokens
    if given and not 2 <= given <= tokens:
        raise ValueError(
            f"--context_length {given} is out of range: give 2 to {tokens}, the tokens of the "
            "validation split, or 0 for the context of training"
        )


def bits_per_byte(split: Split, loss: float) -> str:
    """The loss in bits per byte, if the data says how many bytes its tokens are."""
    bits = split.bits_per_byte(loss)
    if math.isnan(bits):
        return "unknown: the data does not say how many bytes of text its tokens are"
    return f"{bits:.4f}"


if __name__ == "__main__":
    main()
