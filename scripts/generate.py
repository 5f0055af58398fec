"""Continue a prompt with a trained checkpoint: `python -m scripts.generate --checkpoint
runs/quickstart --prompt "def f("`.
"""

import sys
import time
from pathlib import Path

import torch

from data.tokenizer import Tokenizer
from longhaul.checkpoint.load import load_model, newest, verified
from longhaul.cli import Parser
from longhaul.generate import check_sampling, generate


def arguments(args: list[str] | None = None):
    parser = Parser(description=__doc__.splitlines()[0], prog="python -m scripts.generate")
    parser.add_argument(
        "--checkpoint",
        required=True,
        help="a step-* folder, or a run's folder: its newest checkpoint",
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
        help="tokens at most; ends earlier at the end of the document",
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
        help="sample among the most probable tokens of this mass",
    )
    parser.add_argument("--seed", type=int, default=0, help="equal seeds give equal text")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to run"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="compute precision"
    )
    return parser, parser.parse_args(args)


def main(args: list[str] | None = None):
    """Print the prompt and its continuation as it comes."""
    parser, given = arguments(args)
    try:
        check_sampling(given.temperature, given.top_k, given.top_p)
        folder = newest(Path(given.checkpoint))
        tokenizer = Tokenizer(given.tokenizer or folder.parent / "tokenizer.model")
        prompt = tokenizer.encode(given.prompt) or [tokenizer.eod_id]
        model = load_model(verified(folder), given.device, given.dtype)
        ids = generate(
            model,
            prompt,
            given.max_new_tokens,
            temperature=given.temperature,
            top_k=given.top_k,
            top_p=given.top_p,
            seed=given.seed,
            stop_id=tokenizer.eod_id,
            vocab_size=tokenizer.vocab_size,
        )
        stream(given.prompt, ids, tokenizer)
    except ValueError as error:
        parser.error(str(error))


def stream(prompt: str, ids, tokenizer: Tokenizer):
    """Write text as soon as its bytes are whole characters; the rate goes to standard error."""
    start, count, decoder = time.perf_counter(), 0, tokenizer.stream()
    sys.stdout.write(prompt)
    for token in ids:
        sys.stdout.write(decoder.push(token))
        sys.stdout.flush()
        count += 1
    print(decoder.finish())
    print(
        f"[{count} tokens, {count / (time.perf_counter() - start):.1f} tokens/s]", file=sys.stderr
    )


if __name__ == "__main__":
    main()
