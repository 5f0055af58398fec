"""Continue a prompt: `python -m scripts.generate --checkpoint runs/quickstart --prompt "def f("`.

The text appears on standard output as it is sampled; the rate goes to standard error.
"""

import argparse
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from data.tokenizer import Tokenizer
from flags import Parser
from longhaul.checkpoint.load import load_model, newest, verified
from longhaul.generate import check_sampling, generate


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(description=__doc__.splitlines()[0], prog="python -m scripts.generate")
    parser.add_argument(
        "--checkpoint",
        required=True,
        help="a step-* folder, or a run's folder, whose newest checkpoint is taken",
    )
    parser.add_argument(
        "--tokenizer",
        default=None,
        help="sentencepiece model; by default the run's own tokenizer.model",
    )
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument(
        "--max_new_tokens",
        type=int,
        default=128,
        help="maximum number of new tokens; sampling stops earlier if the document ends",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0: always the most probable token"
    )
    parser.add_argument(
        "--top_k", type=int, default=50, help="sample among the k most probable tokens; 0: all"
    )
    parser.add_argument(
        "--top_p",
        type=float,
        default=1.0,
        help="sample among the most probable tokens whose probabilities add up to this; 1: all",
    )
    parser.add_argument("--seed", type=int, default=0, help="equal seeds give equal text")
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="device to compute on",
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="compute precision"
    )
    return parser


def main(args: list[str] | None = None):
    """Print the prompt and its continuation; bad input ends with one line and exit code 2."""
    parser = build_parser()
    given = parser.parse_args(args)
    try:
        run(given)
    except ValueError as error:
        parser.error(str(error))


def run(given: argparse.Namespace):
    """Load tokenizer and model, and print what they generate."""
    check_sampling(given.temperature, given.top_k, given.top_p)
    folder = newest(Path(given.checkpoint))
    tokenizer = Tokenizer(given.tokenizer or folder.parent / "tokenizer.model")
    model = load_model(verified(folder), given.device, given.dtype)

    ids = generate(
        model,
        tokenizer.encode(given.prompt) or [tokenizer.eod_id],
        given.max_new_tokens,
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
        seed=given.seed,
        stop_id=tokenizer.eod_id,
        vocab_size=tokenizer.vocab_size,
    )
    stream(given.prompt, ids, tokenizer)


def stream(prompt: str, ids: Iterable[int], tokenizer: Tokenizer):
    """Write text as soon as its bytes form whole characters."""
    start = time.perf_counter()
    count = 0
    decoder = tokenizer.stream()
    sys.stdout.write(prompt)
    for token in ids:
        sys.stdout.write(decoder.push(token))
        sys.stdout.flush()
        count += 1
    print(decoder.finish())
    seconds = time.perf_counter() - start
    print(f"[{count} tokens, {count / seconds:.1f} tokens/s]", file=sys.stderr)


if __name__ == "__main__":
    main()
