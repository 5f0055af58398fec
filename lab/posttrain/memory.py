"""The tables of `--memory_table` of lab.intuitor and lab.grade.

They have the sizes of a step that makes whole logits, computed from its shapes, and what longhaul's
own step needs, which is simulated: the real step on fake tensors. GB = 10^9 bytes.
"""

import functools
import sys
from collections.abc import Callable, Sequence

from base.flags import RaisingParser
from lab.posttrain.config import IntuitorConfig
from longhaul.planner.simulate import Profile, profile
from model import ModelConfig

# bytes of an element
BF16 = 2
FP32 = 4
INT64 = 8

GROUP = 8  # responses to a prompt
LONGEST_PROMPT = 2048  # tokens
SHARE = 3  # of a short row, its prompt is the third part

FLAG = "--memory_table"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# ---- shapes

# sizes of models by which memory goes; no weights are read
SIZES = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_size")
SHAPES = {
    "Qwen2.5-0.5B": (896, 24, 14, 2, 64, 4864),
    "Qwen2.5-1.5B": (1536, 28, 12, 2, 128, 8960),
    "Qwen2.5-3B": (2048, 36, 16, 2, 128, 11_008),
}


def of_shape(name: str, **settings) -> IntuitorConfig:
    """The settings of longhaul that train a model of that shape, with the vocabulary and the tied
    embeddings of the 4B.
    """
    sizes = zip(SIZES, SHAPES[name], strict=True)
    overrides = tuple(f"{size}={value}" for size, value in sizes)
    return IntuitorConfig(model_size="4B", model_overrides=overrides, **settings)


# ---- Intuitor and PPO


def memory_table(words: Sequence[str]) -> str:
    """The table of `lab.intuitor --memory_table`, from its other words. ValueError for words
    that make none.
    """
    parser = RaisingParser(prog="lab.intuitor --memory_table")
    parser.add_argument("--model", default="Qwen2.5-1.5B", choices=list(SHAPES))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tokens", default="2048,4096,6144,8192,18432,131072")
    given = parser.parse_args(list(words))

    lengths = given.tokens.split(",")
    if not all(length.isdigit() and int(length) >= GROUP for length in lengths):
        raise ValueError(
            f"--tokens {given.tokens}: give numbers of tokens from {GROUP} on, with commas"
        )
    if given.batch < GROUP or given.batch % GROUP:
        raise ValueError(
            f"--batch {given.batch} responses are not whole groups: give a multiple of {GROUP}"
        )
    return intuitor_table(given.model, given.batch, [int(length) for length in lengths])


def intuitor_table(shape: str, batch: int, lengths: Sequence[int]) -> str:
    """Rows of `batch` responses with their prompts, of so many tokens each."""
    config = of_shape(shape).model()
    rows = []
    for tokens in lengths:
        logits = FP32 * batch * tokens * config.vocab_size
        ppo = with_whole_logits(config, batch, tokens)
        figures = [f"{size / 1e9:,.1f}" for size in (logits, ppo, ppo + reward(batch, tokens))]
        at_once, by_group = of_longhaul(shape, tokens, batch), of_longhaul(shape, tokens, GROUP)
        rows.append([f"{tokens:,}", *figures, in_gb(at_once), in_gb(by_group)])

    head = [
        "tokens of a row",
        "fp32 logits",
        "PPO with its logits",
        "Intuitor",
        f"longhaul, {batch} responses at once",
        f"longhaul, {GROUP} responses at once",
    ]
    return table(head, rows)


def with_whole_logits(config: ModelConfig, batch: int, tokens: int) -> int:
    """Bytes of a policy update that makes whole logits: 8 bytes for each parameter (weight,
    gradient and two moments in bf16), the inputs of all layers (checkpointing), and the
    fp32 logits with their gradient.
    """
    states = 4 * BF16 * config.num_params()
    inputs = BF16 * config.num_layers * batch * tokens * config.hidden_size
    logits = FP32 * batch * tokens * config.vocab_size
    return states + inputs + 2 * logits


def reward(batch: int, tokens: int) -> int:
    """Bytes that self-certainty adds: three fp32 numbers for each token. It carries no gradient, so
    its logits are gone before the update makes its own.
    """
    return 3 * FP32 * batch * tokens


@functools.cache
def of_longhaul(shape: str, tokens: int, responses: int) -> Profile:
    """The profile of longhaul's own step: micro-batches of so many responses in groups of eight,
    the exact KL, bf16 activations, fp32 weights, gradients, moments and reference.
    """
    prompt = min(LONGEST_PROMPT, tokens // SHARE)
    cfg = of_shape(
        shape,
        context_length=tokens,
        max_response_length=tokens - prompt,
        group_size=GROUP,
        batch_size=responses // GROUP,
        gradient_checkpointing="full",
        mlp_tiles=0,
    )
    return profile(cfg)


def in_gb(found: Profile) -> str:
    """The peak, and the stage that it is in."""
    return f"{found.peak / 1e9:,.1f} ({found.peak_stage})"


# ---- GRADE


TOKENS, TOPK = 64, 256  # of a response and of a mixture
VOCABULARY, WIDTH = 32_000, 4096


def grade_table(words: Sequence[str]) -> str:
    """The table of `lab.grade --memory_table`. ValueError for other words."""
    RaisingParser(prog="lab.grade --memory_table").parse_args(list(words))
    return soft_tokens()


def soft_tokens() -> str:
    """The sizes of a response's tensors."""
    full = FP32 * TOKENS * VOCABULARY
    one = FP32 * VOCABULARY
    mixtures = (FP32 + INT64) * TOKENS * TOPK
    embedded = FP32 * TOKENS * WIDTH
    gathered = FP32 * TOKENS * TOPK * WIDTH
    rows = [
        ["soft tokens [T, V], or 256 weights and indices", in_mb(full), in_mb(mixtures)],
        ["logits of the reference, or those of one token", in_mb(full), in_mb(one)],
        ["embeddings of the reward [T, D]", in_mb(embedded), in_mb(embedded)],
        ["gathered embeddings [T, K, D], which a weighted bag leaves out", "-", in_mb(gathered)],
    ]
    return table(["tensor", "whole", "256 tokens"], rows)


def in_mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def asked(words: Sequence[str], make: Callable[[Sequence[str]], str]) -> bool:
    """Print a table if a command line asks for it, and say whether it did; exit code 2 and one
    line for words that make none.
    """
    if FLAG not in words:
        return False
    try:
        print(make([word for word in words if word != FLAG]))
    except ValueError as error:
        print(f"{FLAG}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    return True
