"""Sampling over the KV cache: filters, prefill, one token at a time. V vocabulary, T tokens."""

from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor

from longhaul.clock import ClockedCache, takes_clock
from longhaul.kinds import attention_kind
from model import Decoder, KVCache, ModelConfig

Step = Callable[[], Tensor]

# How text is sampled unless somebody chooses. An exported folder says the same to other programs.
TEMPERATURE = 0.8
TOP_K = 50
TOP_P = 1.0

NO_TOKEN = -1  # what is chosen from logits that are NaN

# Prompt tokens per forward, which bounds activations. NSA takes a prompt whole.
PREFILL_CHUNK = 4096


class NotANumber(ValueError):
    """A model whose logits are NaN, of which nothing can be sampled."""


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
        sorted_p_V = sorted_p_V.masked_fill(mass_before_V >= top_p, 0.0)
        p_V = p_V.scatter(0, order_V, sorted_p_V)  # an index by a mask would wait for the device
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
    temperature: float = TEMPERATURE,
    top_k: int = TOP_K,
    top_p: float = TOP_P,
    seed: int = 0,
    stop_ids: Collection[int] = (),
    vocab_size: int | None = None,
    captured: bool = False,
) -> Iterator[int]:
    """Yield sampled token ids one by one, ending before any of `stop_ids`; NotANumber if the
    model's logits are. Equal seeds give equal tokens on equal devices.

    `vocab_size`: only ids below it, since a model's vocabulary may be larger than its tokenizer's.
    `captured`: on CUDA a step is a CUDA graph, if the attention can decode at fixed shapes. It is
    for a plain model on one device.
    """
    check_sampling(temperature, top_k, top_p)
    if not prompt or max_new_tokens < 1:
        raise ValueError(
            f"a prompt of {len(prompt)} tokens and max_new_tokens {max_new_tokens}: give at least "
            "1 of each"
        )
    device = model.embed.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    capacity = len(prompt) + max_new_tokens
    cache = model.new_cache(1, capacity)

    def next_logits(token_11: Tensor) -> Tensor:
        return model(token_11, cache=cache)[0, -1]

    prompt_1T = torch.tensor([prompt], device=device)
    if len(prompt) > 1:
        prefill(model, prompt_1T[:, :-1], cache)
    if captured and device.type == "cuda" and takes_clock(cache, model.config):
        next_logits = CapturedSteps(model, ClockedCache(cache, 1, capacity, device), cuda_graph)

    logits_V = next_logits(prompt_1T[:, -1:])
    for number in range(1, max_new_tokens + 1):
        token_1 = _choose(logits_V[:vocab_size], temperature, top_k, top_p, generator)
        token = int(token_1)  # the only synchronisation of a step
        if token == NO_TOKEN:
            raise NotANumber(
                f"the logits of new token {number} are NaN or infinite, so the model has diverged: "
                "use an earlier checkpoint"
            )
        if token in stop_ids:
            return
        yield token
        if number < max_new_tokens:
            logits_V = next_logits(token_1.view(1, 1))


@torch.no_grad()
def cast_matrices(model: Decoder):
    """Matrices to the compute dtype, in which each step would cast them again; no result changes.

    Vectors stay, because some are used in fp32.
    """
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data = parameter.data.to(model.config.dtype)


def prefill(model: Decoder, tokens_1T: Tensor, cache: KVCache):
    """Fill the cache with a prompt, without computing logits."""
    for part_1T in tokens_1T.split(prompt_part(model.config, tokens_1T.shape[1]), dim=1):
        model.hidden(part_1T, cache=cache)


def prompt_part(config: ModelConfig, length: int) -> int:
    """Tokens of a prompt of `length` that a forward takes at most."""
    in_parts = attention_kind(config).prompt_in_parts
    return min(PREFILL_CHUNK, length) if in_parts else length


def _choose(
    logits_V: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    generator: torch.Generator,
) -> Tensor:
    """The next token [1], on the device; NO_TOKEN if there are no probabilities. Drawn from NaN, a
    token would end the process on CUDA.
    """
    if temperature == 0:
        return logits_V.argmax(-1, keepdim=True).where(~logits_V.isnan().any(), NO_TOKEN)
    p_V = filtered(logits_V, temperature, top_k, top_p)
    token_1 = torch.multinomial(p_V.nan_to_num(1.0), 1, generator=generator)
    return token_1.where(~p_V.isnan().any(), NO_TOKEN)


# ---- steps as CUDA graphs


class CapturedSteps:
    """logits [V] of the token after `token_11`, by steps that are captured when first needed.

    The launches of a layer take the host longer than the device; a graph has one launch. With
    sparse attention, every 16th token completes a compressed block; such steps are a second graph.
    `capture(step, device)` runs `step` once or more, and returns what repeats it: `cuda_graph`.
    """

    def __init__(
        self, model: Decoder, cache: ClockedCache, capture: Callable[[Step, torch.device], Step]
    ):
        self.model = model
        self.cache = cache
        self.capture = capture
        self.clock = cache.clock
        self.position = cache.first
        self.token_11 = torch.zeros_like(self.clock.position)[None]
        self.steps: dict[bool, Step] = {}

    def __call__(self, token_11: Tensor) -> Tensor:
        self.token_11.copy_(token_11)
        variants = [layer.variant(self.position) for layer in self.cache.layers]
        variant = variants[0]
        if variant not in self.steps:
            self.steps[variant] = self.capture(self._step, self.token_11.device)
            self.clock.set(self.position)  # what ran meanwhile is overwritten by the repetition

        logits_V = self.steps[variant]()
        self.position += 1
        return logits_V

    def _step(self) -> Tensor:
        logits_V = self.model(self.token_11, cache=self.cache)[0, -1]
        self.clock.tick()
        return logits_V


def cuda_graph(step: Step, device: torch.device) -> Step:
    """The step as a CUDA graph of the device. Its result is overwritten by the next repetition."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()  # compiles kernels and makes tables, which a capture cannot
        torch.cuda.current_stream().wait_stream(stream)

        graph = torch.cuda.CUDAGraph()
        # by default, every capture takes a stream of the device of the first one
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            result = step()

    def repeat() -> Tensor:
        with torch.cuda.device(device):
            graph.replay()
        return result

    return repeat
