"""Text of one model: a prompt is filled into the KV cache, and tokens follow one at a time. V
vocabulary, T tokens.
"""

from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor

from longhaul.clock import ClockedCache, takes_clock
from longhaul.kinds import attention_kind
from longhaul.sampling import check_sampling, decode, draw, uniforms
from model import Decoder, KVCache, ModelConfig

Step = Callable[[], Tensor]

# How text is sampled unless somebody chooses. An exported folder says the same to other programs.
TEMPERATURE = 0.8
TOP_K = 50
TOP_P = 1.0

NO_TOKEN = -1  # in place of one that is drawn from logits that are NaN or infinite

# Prompt tokens per forward, which bounds activations. NSA takes a prompt whole.
PREFILL_CHUNK = 4096


class NotANumber(ValueError):
    """A model whose logits are NaN, of which nothing can be sampled."""


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
    model's logits are. It draws as a rollout does the first response to its prompt 0 in step 0.

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
    uniform_T = torch.from_numpy(uniforms(seed, 0, [0], 1, max_new_tokens)[0, 0]).to(device)
    capacity = len(prompt) + max_new_tokens
    cache = model.new_cache(1, capacity)

    def next_logits(token_11: Tensor) -> Tensor:
        return model(token_11, cache=cache)[0, -1]

    prompt_1T = torch.tensor([prompt], device=device)
    if len(prompt) > 1:
        prefill(model, prompt_1T[:, :-1], cache)
    if captured and device.type == "cuda" and takes_clock(cache, model.config):
        next_logits = CapturedSteps(model, ClockedCache(cache, 1, capacity, device), cuda_graph)

    def next_token(position: int, token_11: Tensor) -> Tensor:
        logits_1V = next_logits(token_11)[None, :vocab_size]
        uniform_1 = uniform_T[position : position + 1]
        token_1 = draw(logits_1V, uniform_1, temperature, top_k, top_p)
        return token_1.where(logits_1V.amax(-1).isfinite(), NO_TOKEN)

    tokens = decode(next_token, prompt_1T[:, -1:], lambda token_1: token_1[None], max_new_tokens)
    for number, token_1 in enumerate(tokens, 1):
        token = int(token_1)  # the only synchronisation of a step
        if token == NO_TOKEN:
            raise NotANumber(
                f"the logits of new token {number} are NaN or infinite, so the model has diverged: "
                "use an earlier checkpoint"
            )
        if token in stop_ids:
            return
        yield token


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
