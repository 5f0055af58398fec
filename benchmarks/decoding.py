"""Decoding with a whole model after a long prompt, with CUDA graphs and without.

    python -m benchmarks.decoding --model_size 4B --context_length 131072 [--attention_type nsa]
        [--device cuda]

One row, greedily, in bf16 on a GPU, with random weights and a random prompt. The clock is the
caller's: the host reads each token before the next one begins. A token's time is the median.
"""

import statistics
import time
from itertools import pairwise

import torch

from base.flags import Parser
from longhaul import kernels, step
from longhaul.config import TrainConfig
from longhaul.dist import named_device
from longhaul.generate import cast_matrices, generate
from longhaul.kinds import KINDS
from model import Decoder

# All steps of which there are graphs, and every length of the last selected block, come before
# those that are timed.
WARM = 64
TIMED = 64


def decoder(cfg: TrainConfig, device: torch.device) -> Decoder:
    """A model for generation."""
    model = step.frozen(cfg, cfg.model(), device)
    if device.type == "cuda":
        cast_matrices(model)
    return model


def seconds(model: Decoder, prompt: list[int], captured: bool) -> tuple[float, float]:
    """Until the first token, and per token."""
    began = time.perf_counter()
    ends = []
    for _ in generate(model, prompt, WARM + TIMED, temperature=0, captured=captured):
        ends.append(time.perf_counter())
    taken = [after - before for before, after in pairwise(ends[WARM - 1 :])]
    return ends[0] - began, statistics.median(taken)


def main(args: list[str] | None = None) -> None:
    """The command line."""
    parser = Parser(description=__doc__.splitlines()[0], prog="python -m benchmarks.decoding")
    parser.add_argument("--model_size", default="tiny", help="preset of the model's shape")
    parser.add_argument(
        "--attention_type", default="nsa", choices=tuple(KINDS), help="kind of attention"
    )
    parser.add_argument("--context_length", type=int, default=4096, help="tokens of the prompt")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to run"
    )
    given = parser.parse_args(args)
    try:
        device = named_device(given.device)
        cfg = TrainConfig(
            model_size=given.model_size,
            attention_type=given.attention_type,
            context_length=given.context_length,
            device=device.type,
        )
    except ValueError as error:
        parser.refuse(error)

    print(
        f"{given.model_size}, {given.attention_type}, after {given.context_length:,} tokens",
        flush=True,
    )
    print(kernels.chosen_in_words(cfg.model(), device))
    model = decoder(cfg, device)
    make = torch.Generator().manual_seed(0)
    prompt = torch.randint(
        model.config.vocab_size, (given.context_length,), generator=make
    ).tolist()
    print("| steps | prompt | one token | tokens/s |\n|---|---|---|---|")
    steps = {"one by one": False}
    if device.type == "cuda":
        steps = {"CUDA graphs": True} | steps
    for name, captured in steps.items():
        first, token = seconds(model, prompt, captured)
        print(f"| {name} | {first:.2f} s | {1e3 * token:.3f} ms | {1 / token:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
