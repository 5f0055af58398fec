"""Continue a prompt: `python -m scripts.generate --checkpoint runs/quickstart --prompt "def f("`.

The model is a checkpoint of longhaul or a Hugging Face folder. The text appears on
standard output as it is sampled; the rate goes to standard error. With `--ids` instead of
`--prompt`, token ids go in and come out, so that a model is sampled without a tokenizer.
"""

import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

import torch

from longhaul import cli
from longhaul.cli import flag
from longhaul.dist import World, named_device
from longhaul.generate import (
    TEMPERATURE,
    TOP_K,
    TOP_P,
    cache_bytes,
    cast_matrices,
    generate,
)
from longhaul.kinds import attention_kind
from longhaul.planner.plan import available_gib
from longhaul.sampling import check_sampling
from model import GIB, ModelConfig
from scripts.source import Source, SourceConfig, tokenizer_of


@dataclass(frozen=True)
class GenerateConfig(SourceConfig):
    """The flags."""

    tokenizer: str = flag(
        "", "sentencepiece model, tokenizer.json or a folder with one; empty: the run's own"
    )
    prompt: str | None = flag(None, "text to continue")
    ids: tuple[str, ...] = flag((), "token ids to continue; ids are printed", many=True)
    max_new_tokens: int = flag(
        128, "most new tokens; with --prompt, fewer if the text ends earlier", at_least=1
    )
    temperature: float = flag(TEMPERATURE, "0: always the most probable token")
    top_k: int = flag(TOP_K, "sample among the k most probable tokens; 0: all")
    top_p: float = flag(
        TOP_P, "sample among the most probable tokens whose probabilities add up to this; 1: all"
    )
    seed: int = flag(0, "equal seeds give equal text")

    def __post_init__(self):
        super().__post_init__()
        check_sampling(self.temperature, self.top_k, self.top_p)
        if self.prompt is None and not self.ids:
            raise ValueError("there is nothing to continue: give --prompt or --ids")
        if self.ids and self.prompt is not None:
            raise ValueError("--prompt and --ids exclude each other: keep one")
        if self.ids and self.tokenizer:
            raise ValueError("--tokenizer is not used with --ids: drop one of them")


def main(args: list[str] | None = None):
    """Print the prompt and its continuation; bad input ends with one line and exit code 2."""
    cli.run(GenerateConfig, run, args, "scripts.generate", __doc__.splitlines()[0])


def run(given: GenerateConfig):
    """Load the model, and print what it generates."""
    device = named_device(given.device)
    source = Source.open(given.checkpoint).read_with(given.attention_type, given.blocks)

    if given.ids:
        prompt = known_ids(given.ids, source.config.vocab_size)
        ids = sampled(given, source, device, prompt)
        stream(" ".join(given.ids), ids, lambda token: f" {token}", lambda: "")
        return

    tokenizer = tokenizer_of(source, given.tokenizer, ", or --ids instead of --prompt")
    prompt = tokenizer.encode(given.prompt) or [tokenizer.eod_id]
    stops = source.stop_ids(tokenizer)
    ids = sampled(given, source, device, prompt, stops, tokenizer.vocab_size)
    text = tokenizer.stream()
    stream(given.prompt, ids, text.push, text.finish)


def known_ids(words: Iterable[str], vocab_size: int) -> list[int]:
    """The ids of --ids; ValueError for one that the model does not have."""
    for word in words:
        if not word.isdecimal() or int(word) >= vocab_size:
            raise ValueError(
                f"--ids {word[:40]} is no id of this model: give ids from 0 to {vocab_size - 1}"
            )
    return [int(word) for word in words]


def sampled(
    given: GenerateConfig,
    source: Source,
    device: torch.device,
    prompt: list[int],
    stop_ids: Collection[int] = (),
    vocab_size: int | None = None,
) -> Iterator[int]:
    """Load the model, and yield the ids that continue the prompt; ValueError if their keys and
    values do not fit.
    """
    config = source.config
    check_length(config, len(prompt) + given.max_new_tokens, device)
    slow = attention_kind(config).warning(config, device)
    if slow:
        print(f"warning: {slow}", file=sys.stderr)
    notice = attention_kind(config).notice(config)
    if notice:
        print(f"attention: {notice}", file=sys.stderr)
    model = source.load_in(device, given.dtype)
    if device.type == "cuda":
        cast_matrices(model)
    return generate(
        model,
        prompt,
        given.max_new_tokens,
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
        seed=given.seed,
        stop_ids=stop_ids,
        vocab_size=vocab_size,
        captured=True,
    )


def check_length(config: ModelConfig, tokens: int, device: torch.device):
    """ValueError if the keys and values of so many tokens do not fit in memory."""
    needed = cache_bytes(config, tokens) / GIB
    available = available_gib(device, World())
    if needed > available:
        raise ValueError(
            f"the keys and values of {tokens:,} tokens need {needed:,.1f} GiB, and {available:.1f} "
            "are available: give fewer --max_new_tokens"
        )


def stream(prompt: str, ids: Iterable[int], spell: Callable[[int], str], finish: Callable[[], str]):
    """Write the prompt, and each id as it is sampled; `finish` gives what is left at the end."""
    start = time.perf_counter()
    count = 0
    sys.stdout.write(prompt)
    for token in ids:
        sys.stdout.write(spell(token))
        sys.stdout.flush()
        count += 1
    print(finish())
    seconds = time.perf_counter() - start
    print(f"[{count} tokens, {count / seconds:.1f} tokens/s]", file=sys.stderr)


if __name__ == "__main__":
    # end quietly if the reader of a pipe has had enough
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    main()
