"""Sampling over the KV cache: filters, prefill, one token at a time. V vocabulary, T tokens."""

from collections.abc import Iterator

import torch
from torch import Tensor

from model import Decoder, KVCache, ModelConfig, attention_kind

# Prompt tokens per forward, which bounds activations. NSA takes a prompt whole.
PREFILL_CHUNK = 4096


def filtered(logits_V: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Probabilities [V] in fp32 after temperature, top-k and nucleus filtering (Holtzman et al.
    2020), in this order.

    top_k 0 and top_p 1 filter nothing. The nucleus is the smallest set of the most probable tokens
    whose probabilities add up to top_p or more.
    """
    logits_V = logits_V.float() / temperature
    if top_k:
        smallest = logits_V.topk(min(top_k, len(logits_V))).values[-1]
        logits_V = logits_V.masked_fill(logits_V < smallest, -torch.inf)

    p_V = logits_V.softmax(-1)
    if top_p < 1:
        sorted_p_V, order_V = p_V.sort(descending=True)
        mass_before_V = sorted_p_V.cumsum(-1) - sorted_p_V
        outside = order_V[mass_before_V >= top_p]
        p_V = p_V.index_fill(0, outside, 0.0)
    return p_V / p_V.sum()


# Temperatures that can be sampled with. Below, logits overflow; above, all tokens are alike.
COLDEST = 1e-6
HOTTEST = 1e3


def check_sampling(temperature: float, top_k: int, top_p: float):
    """ValueError for settings that cannot be sampled with; temperature 0 is greedy."""
    if temperature != 0 and not COLDEST <= temperature <= HOTTEST:
        raise ValueError(
            f"temperature {temperature:g} is out of range: give 0 for the most probable token, or "
            f"{COLDEST:g} to {HOTTEST:g}"
        )
    if top_k < 0:
        raise ValueError(f"top_k {top_k} is out of range: give at least 1, or 0 for all tokens")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p {top_p} is out of range: give a number above 0 and at most 1")


def cache_bytes(config: ModelConfig, tokens: int) -> int:
    """Bytes that decoding so many tokens keeps, at least: keys and values of every layer."""
    elements = 2 * config.num_layers * tokens * config.num_kv_heads * config.head_dim
    return elements * config.dtype.itemsize


@torch.no_grad()
def generate(
    model: Decoder,
    prompt: list[int],
    max_new_tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int = 50,
    top_p: float = 1.0,
    seed: int = 0,
    stop_id: int | None = None,
    vocab_size: int | None = None,
) -> Iterator[int]:
    """Yield sampled token ids one by one, ending before `stop_id`. Equal seeds give equal tokens on
    equal devices.

    `vocab_size`: only ids below it, since a model's vocabulary may be larger than its tokenizer's.
    """
    check_sampling(temperature, top_k, top_p)
    if not prompt or max_new_tokens < 1:
        raise ValueError(
            f"a prompt of {len(prompt)} tokens and max_new_tokens {max_new_tokens}: give at least "
            "1 of each"
        )
    device = model.embed.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    cache = KVCache(model.config, 1, len(prompt) + max_new_tokens, device)

    def next_logits(token: int) -> Tensor:
        return model(torch.tensor([[token]], device=device), cache=cache)[0, -1]

    if len(prompt) > 1:
        prefill(model, torch.tensor([prompt[:-1]], device=device), cache)
    logits_V = next_logits(prompt[-1])
    for number in range(1, max_new_tokens + 1):
        token = _choose(logits_V[:vocab_size], temperature, top_k, top_p, generator)
        if token == stop_id:
            return
        yield token
        if number < max_new_tokens:
            logits_V = next_logits(token)


def prefill(model: Decoder, tokens_1T: Tensor, cache: KVCache):
    """Fill the cache with a prompt, without computing logits."""
    in_parts = attention_kind(model.config).prompt_in_parts
    chunk = PREFILL_CHUNK if in_parts else tokens_1T.shape[1]
    for part_1T in tokens_1T.split(chunk, dim=1):
        model.hidden(part_1T, cache=cache)


def _choose(
    logits_V: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator
) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    p_V = filtered(logits_V, temperature, top_k, top_p)
    return int(torch.multinomial(p_V, 1, generator=generator))
