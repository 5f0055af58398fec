"""Continue a prompt: `python -m scripts.generate --checkpoint runs/quickstart --prompt "def f("`.

The model is a checkpoint of longhaul or a Hugging Face folder. The text appears on
standard output as it is sampled; the rate goes to standard error. With `--ids` instead of
`--prompt`, token ids go in and come out, so that a model is sampled without a tokenizer.
"""

import argparse
import dataclasses
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from base.flags import PRECISIONS, Parser, precision
from base.untrusted import refuse_pickle
from data.hugging_face import hash_of_folder
from data.load_tokenizer import AnyTokenizer, find_tokenizer, hash_of_ids, load_tokenizer
from longhaul import qwen3
from longhaul.checkpoint.format import Checkpoint, model_config
from longhaul.checkpoint.load import check_tokenizer, load_model, newest, verified
from longhaul.checkpoint.start import trained_context
from longhaul.dist import World, named_device
from longhaul.generate import (
    TEMPERATURE,
    TOP_K,
    TOP_P,
    cache_bytes,
    cast_matrices,
    check_sampling,
    generate,
)
from longhaul.kinds import add_attention, attention_kind, read_with
from longhaul.memory.plan import available_gib
from model import GIB, Decoder, ModelConfig


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(description=__doc__.splitlines()[0], prog="python -m scripts.generate")
    parser.add_argument(
        "--checkpoint",
        required=True,
        help="a step-* folder, a run's folder, whose newest checkpoint is taken, or a Hugging Face "
        "folder",
    )
    parser.add_argument(
        "--tokenizer",
        default=None,
        help="sentencepiece model, tokenizer.json or a folder with one; default: the run's own",
    )
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="text to continue")
    prompt.add_argument(
        "--ids", type=int, nargs="+", metavar="ID", help="token ids to continue; ids are printed"
    )
    parser.add_argument(
        "--max_new_tokens",
        type=int,
        default=128,
        help="most new tokens; with --prompt, fewer if the document ends earlier",
    )
    parser.add_argument(
        "--temperature", type=float, default=TEMPERATURE, help="0: always the most probable token"
    )
    parser.add_argument(
        "--top_k", type=int, default=TOP_K, help="sample among the k most probable tokens; 0: all"
    )
    parser.add_argument(
        "--top_p",
        type=float,
        default=TOP_P,
        help="sample among the most probable tokens whose probabilities add up to this; 1: all",
    )
    parser.add_argument("--seed", type=int, default=0, help="equal seeds give equal text")
    parser.add_argument(
        "--device", default="auto", help="where to compute: auto, cpu, cuda or cuda:N"
    )
    parser.add_argument(
        "--dtype",
        type=precision,
        choices=("fp32", "bf16"),
        default="fp32",
        help="compute precision",
    )
    add_attention(parser)
    return parser


def main(args: list[str] | None = None):
    """Print the prompt and its continuation; bad input ends with one line and exit code 2."""
    parser = build_parser()
    given = parser.parse_args(args)
    try:
        run(given)
    except (ValueError, OSError) as error:
        parser.refuse(error)


def run(given: argparse.Namespace):
    """Load the model, and print what it generates."""
    check_sampling(given.temperature, given.top_k, given.top_p)
    device = named_device(given.device)
    source = opened(Path(given.checkpoint))
    config = read_with(source.config, given.attention_type, given.blocks)
    source = dataclasses.replace(source, config=config)

    if given.ids is not None:
        check_ids(given, source.config.vocab_size)
        ids = sampled(given, source, device, given.ids)
        stream(" ".join(map(str, given.ids)), ids, lambda token: f" {token}", lambda: "")
        return

    tokenizer = tokenizer_of(source, given.tokenizer, ", or --ids instead of --prompt")
    prompt = tokenizer.encode(given.prompt) or [tokenizer.eod_id]
    stop = {"stop_id": tokenizer.eod_id, "vocab_size": tokenizer.vocab_size}
    ids = sampled(given, source, device, prompt, **stop)
    text = tokenizer.stream()
    stream(given.prompt, ids, text.push, text.finish)


def check_ids(given: argparse.Namespace, vocab_size: int):
    """ValueError for ids that the model does not have, and for a tokenizer next to ids."""
    if given.tokenizer:
        raise ValueError("--tokenizer is not used with --ids: drop one of them")
    for token in given.ids:
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"--ids {token} is no id of this model: give ids from 0 to {vocab_size - 1}"
            )


@dataclass(frozen=True)
class Source:
    """A model that was checked; its weights are not read yet."""

    folder: Path  # where its tokenizer is
    config: ModelConfig
    checkpoint: Checkpoint | None  # None for a Hugging Face folder

    @property
    def reach(self) -> int:
        """Tokens that the positions of its weights were trained for."""
        return trained_context(self.checkpoint) if self.checkpoint else self.config.rope_reach

    def load(self, device: torch.device, dtype: str) -> Decoder:
        """The model on `device`, computing in this precision by its name in torch."""
        if self.checkpoint is None:
            stored = getattr(torch, dtype)
            fields = dict(compute_dtype=dtype, attention=self.config.attention)
            return qwen3.from_hf(self.folder, device, stored, **fields)
        return load_model(self.checkpoint, device, dtype, attention=self.config.attention)


def opened(folder: Path) -> Source:
    """ValueError or CheckpointError for a folder without a sound model."""
    refuse_pickle(folder)
    if (folder / "config.json").is_file():
        return Source(folder, ModelConfig(**qwen3.read_config(folder)), None)
    checkpoint = verified(newest(folder))
    return Source(checkpoint.folder.parent, model_config(checkpoint), checkpoint)


def tokenizer_of(source: Source, path: str | None, otherwise: str = "") -> AnyTokenizer:
    """The tokenizer that the model was trained with, from `path` or from its folder; ValueError if
    it is another one, or if there is none, which says `otherwise`, too.
    """
    path = path or find_tokenizer(source.folder)
    if path is None:
        raise ValueError(f"{source.folder} has no tokenizer: give --tokenizer PATH{otherwise}")
    tokenizer = load_tokenizer(path)
    if source.checkpoint is not None:
        check_tokenizer(source.checkpoint, tokenizer.sha256, tokenizer.path, str(tokenizer.path))
        return tokenizer

    theirs = hash_of_folder(source.folder)
    is_other = theirs is not None and theirs != hash_of_ids(tokenizer.path)
    if is_other or tokenizer.vocab_size > source.config.vocab_size:
        raise ValueError(
            f"--tokenizer {path} is not the one of {source.folder}, whose ids the model knows: "
            "drop --tokenizer"
        )
    return tokenizer


def sampled(
    given: argparse.Namespace,
    source: Source,
    device: torch.device,
    prompt: list[int],
    stop_id: int | None = None,
    vocab_size: int | None = None,
) -> Iterator[int]:
    """Load the model, and yield the ids that continue the prompt; ValueError if there are none, or
    if their keys and values do not fit.
    """
    if given.max_new_tokens < 1:
        raise ValueError(f"--max_new_tokens {given.max_new_tokens} is no text: give at least 1")
    config = source.config
    check_length(config, len(prompt) + given.max_new_tokens, device)
    slow = attention_kind(config).warning(config, device)
    if slow:
        print(f"warning: {slow}", file=sys.stderr)
    notice = attention_kind(config).notice(config)
    if notice:
        print(f"attention: {notice}", file=sys.stderr)
    model = source.load(device, PRECISIONS[given.dtype])
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
        stop_id=stop_id,
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
