"""What post-training brings to the decoder: prompts that several responses share, a cache behind
them, a cache that gradients pass through, and mixtures of tokens.

Letters: C prompts, P tokens of one, Q query heads that read one KV head; the others are those of
model.py.
"""

import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from longhaul.kinds import attention_kind
from longhaul.parallel.parts import (
    attention_kernel,
    attention_part,
    attention_part_backward,
    merge_parts,
)
from model import (
    Attention,
    Decoder,
    KVCache,
    LayerCache,
    ModelConfig,
    Rope,
    RotaryCache,
    StandardAttention,
    wide,
)


# Not a tuple and not frozen, as Documents.
@dataclass(eq=False)
class SharedPrompts:
    """What the B*T flattened tokens hold: each prompt once, with all responses to it behind it,

        prompt | response | ... | response | next prompt | response | ...

    A response attends to its prompt and causally to itself, and its positions continue the
    prompt's. So it is computed as if it stood behind its prompt in a row of its own.

    lengths  for each prompt, its number of tokens and those of its responses: at least one
             response, and at least one token of each. Padding at the end of a row belongs to its
             last response, whose own tokens do not see it.
    """

    lengths: Sequence[Sequence[int]]

    def __post_init__(self):
        if not self.lengths:
            raise ValueError("shared prompts without a prompt: give the lengths of at least one")
        for index, (prompt, *responses) in enumerate(self.lengths):
            if not responses:
                raise ValueError(
                    f"prompt {index} of {prompt} tokens has no response: give at least one, or "
                    "leave the prompt out"
                )
            if min(prompt, *responses) < 1:
                raise ValueError(
                    f"prompt {index} of {prompt} tokens with responses of {responses}: each needs "
                    "at least one token: leave out what is empty"
                )

    @property
    def tokens(self) -> int:
        """Tokens of all prompts and responses."""
        return sum(sum(group) for group in self.lengths)

    def positions(self, shape: tuple[int, int]) -> Tensor:
        """[B, T] on the host: each response continues its prompt."""
        parts = []
        for prompt, *responses in self.lengths:
            parts.append(torch.arange(prompt))
            parts += [torch.arange(prompt, prompt + response) for response in responses]
        return torch.cat(parts).view(shape)

    def scored(self) -> tuple[Tensor, Tensor]:
        """For every token of the responses, in order: the flattened position whose logits score it,
        and its own. Both are on the host.

        The logits of a prompt's last token score the first token of each of its responses.
        """
        scoring = []
        own = []
        for prompt, *responses in self.spans():
            last = torch.tensor([prompt.stop - 1])
            for response in responses:
                tokens = torch.arange(response.start, response.stop)
                scoring += [last, tokens[:-1]]
                own.append(tokens)
        return torch.cat(scoring), torch.cat(own)

    def attend(
        self,
        layer: Attention,
        inputs: Sequence[Tensor],
        rope: Rope,
    ) -> Tensor:
        """o [B, T, H, K] of the layer; ValueError if it is not full causal attention, or has other
        tokens.
        """
        _check_attention(layer)
        tokens = math.prod(inputs[0].shape[:2])
        if self.tokens != tokens:
            raise ValueError(
                f"prompts and responses have {self.tokens} tokens, and {tokens} are given: give "
                f"lengths that add up to {tokens}"
            )
        return shared_prompt_attention(*inputs, self)

    def spans(self) -> Iterator[list[slice]]:
        """For each prompt, where it and its responses are among the flattened tokens."""
        start = 0
        for group in self.lengths:
            ends = list(itertools.accumulate(group, initial=start))
            yield [slice(*pair) for pair in itertools.pairwise(ends)]
            start = ends[-1]


def _check_attention(layer: Attention) -> None:
    """ValueError if responses cannot share a prompt under this attention."""
    if not isinstance(layer, StandardAttention):
        raise ValueError(
            f"responses cannot share a prompt under {type(layer).__name__}: choose "
            "attention_type standard"
        )


def shared_prompt_attention(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGK: Tensor,
    prompts: SharedPrompts,
) -> Tensor:
    """Full causal attention of every prompt and response, each response behind its prompt.

    A prompt's keys are read by all of its responses in one call. It saves nothing of the size of a
    prompt for each response.
    """
    flat = [x.flatten(0, 1)[None] for x in (q_BTHK, k_BTGK, v_BTGK)]
    return _SharedPromptAttention.apply(*flat, prompts).view_as(q_BTHK)


class _SharedPromptAttention(torch.autograd.Function):
    """All inputs are [1, N, heads, K]. Prompts and responses attend to themselves; then what the
    responses read of their prompt is merged into that.
    """

    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prompts: SharedPrompts,
    ) -> Tensor:
        kernel = attention_kernel(q)
        _, N, H, _ = q.shape
        o = torch.empty_like(q)
        lse = q.new_empty((1, H, N), dtype=wide(q.dtype))

        for spans in prompts.spans():
            prompt, *responses = spans
            for span in spans:
                parts = attention_part(kernel, q[:, span], k[:, span], v[:, span], causal=True)
                o[:, span], lse[:, :, span] = parts

            behind = slice(prompt.stop, responses[-1].stop)
            past, past_lse = attention_part(
                kernel, q[:, behind], k[:, prompt], v[:, prompt], causal=False
            )
            lengths = [span.stop - span.start for span in responses]
            pasts = zip(past.split(lengths, 1), past_lse.split(lengths, 2), strict=True)
            for span, part in zip(responses, pasts, strict=True):
                o[:, span], lse[:, :, span] = merge_parts(o[:, span], lse[:, :, span], *part)

        ctx.save_for_backward(q, k, v, o, lse)
        ctx.prompts = prompts
        ctx.kernel = kernel
        return o

    @staticmethod
    def backward(ctx, grad: Tensor):
        saved = ctx.saved_tensors
        grad = grad.contiguous()
        gradients = []
        for spans in ctx.prompts.spans():
            gradients += _gradients_of_group(ctx.kernel, grad, saved, spans)
        dq, dk, dv = (torch.cat(parts, dim=1) for parts in zip(*gradients, strict=True))
        return dq, dk, dv, None


def _gradients_of_group(
    kernel: str,
    grad: Tensor,
    saved: tuple[Tensor, ...],
    spans: list[slice],
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(dq, dk, dv) of a prompt and of each of its responses."""
    q, k, v, o, lse = saved

    def gradients(queries: slice, keys: slice, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
        of_queries = (grad[:, queries], q[:, queries], o[:, queries], lse[:, :, queries])
        return attention_part_backward(kernel, *of_queries, k[:, keys], v[:, keys], causal)

    prompt, *responses = spans
    behind = slice(prompt.stop, responses[-1].stop)
    past_dq, past_dk, past_dv = gradients(behind, prompt, causal=False)
    own = [gradients(span, span, causal=True) for span in spans]

    (_, prompt_dk, prompt_dv), *of_responses = own
    prompt_dk += past_dk
    prompt_dv += past_dv
    shares = past_dq.split([span.stop - span.start for span in responses], dim=1)
    for (dq, _, _), share in zip(of_responses, shares, strict=True):
        dq += share
    return own


def attention_behind_prompts(
    q_B1HK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    k_CPGK: Tensor,
    v_CPGK: Tensor,
) -> Tensor:
    """Attention of one token of each row over the row's own keys and those of its prompt. Each of C
    prompts belongs to B/C rows, which are next to each other.

    The query heads of a group, and for a prompt those of all its rows, are queries of one head. So
    all prompts take one call, and no kernel repeats keys.
    """
    B, _, H, K = q_B1HK.shape
    G = k_BSGK.shape[2]
    kernel = attention_kernel(q_B1HK)
    q_BQGK = q_B1HK.reshape(B, G, H // G, K).transpose(1, 2)
    o_BQGK, lse_BGQ = attention_part(kernel, q_BQGK, k_BSGK, v_BSGK, causal=False)

    q_CNGK = q_BQGK.unflatten(0, (len(k_CPGK), -1)).flatten(1, 2)
    past_CNGK, past_CGN = attention_part(kernel, q_CNGK, k_CPGK, v_CPGK, causal=False)
    past_BQGK = past_CNGK.reshape(q_BQGK.shape)
    past_BGQ = past_CGN.unflatten(2, (-1, H // G)).transpose(1, 2).flatten(0, 1)
    o_BQGK, _ = merge_parts(o_BQGK, lse_BGQ, past_BQGK, past_BGQ)
    return o_BQGK.transpose(1, 2).reshape(q_B1HK.shape)


class LayerBehindPrompt(LayerCache):
    """Keys and values of one layer's responses, which continue the rows of a prompt's cache."""

    def __init__(
        self,
        prompt: LayerCache,
        rows: int,
        length: int,
    ):
        shape = (rows, length, *prompt.k_BSGK.shape[2:])
        super().__init__(shape, prompt.k_BSGK.device, prompt.k_BSGK.dtype)
        self.prompt = prompt

    def attend(
        self,
        layer: Attention,
        inputs: Sequence[Tensor],
        rope: Rope,
    ) -> Tensor:
        """o [B, 1, H, K] of one token of each row; ValueError as in `SharedPrompts.attend`."""
        _check_attention(layer)
        q_B1HK, *keys_and_values = inputs
        own = self.append(*keys_and_values)
        return attention_behind_prompts(q_B1HK, *own, *self.prompt.stored())


class CacheBehindPrompts(KVCache):
    """A cache of `rows` rows that continue those of `prompt`, a cache of prompts of one length,
    each by at most `length` tokens of its own: equally many to a prompt, next to each other. The
    prompt's keys and values are read where they are, so it must not change any more.
    """

    def __init__(
        self,
        prompt: KVCache,
        rows: int,
        length: int,
    ):
        kept = type(prompt.layers[0])
        if kept is not LayerCache:
            raise ValueError(
                f"responses cannot share a prompt in a cache of {kept.__name__}: choose "
                "attention_type standard"
            )
        prompts = len(prompt.layers[0].k_BSGK)
        if rows % prompts:
            raise ValueError(
                f"{rows} rows that continue {prompts} prompts: give a multiple of {prompts} rows"
            )
        if prompt.length < 1:
            raise ValueError("a prompt's cache of 0 tokens: fill it with one token or more")
        super().__init__([LayerBehindPrompt(layer, rows, length) for layer in prompt.layers])
        self.prompt_length = prompt.length

    @property
    def length(self) -> int:
        """Positions stored so far, those of the prompt included."""
        return self.prompt_length + self.layers[0].length

    def rope(
        self,
        rotary: RotaryCache,
        tokens: int,
        device: torch.device,
    ) -> Rope:
        """cos and sin of the next token of each row."""
        if tokens > 1:
            raise ValueError(
                f"{tokens} tokens of each row behind a shared prompt: give one token at a time"
            )
        return super().rope(rotary, tokens, device)


class LayerHistory:
    """Keys and values of one layer, one tensor [B, T, G, K] of each for every forward so far."""

    def __init__(self, keys: tuple[Tensor, ...] = (), values: tuple[Tensor, ...] = ()):
        self.keys = keys
        self.values = values
        self.newest: tuple[Tensor, Tensor] | None = None

    @property
    def length(self) -> int:
        """Positions before the newest forward."""
        return sum(k_BTGK.shape[1] for k_BTGK in self.keys)

    attend = LayerCache.attend  # over what `append` returns

    def append(self, k_BTGK: Tensor, v_BTGK: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values, those of the newest forward included."""
        if self.newest is None:  # a checkpoint that runs the layer again makes the same ones
            self.newest = (k_BTGK, v_BTGK)
        return torch.cat([*self.keys, k_BTGK], 1), torch.cat([*self.values, v_BTGK], 1)

    def extended(self) -> "LayerHistory":
        """The history with the newest forward."""
        k_BTGK, v_BTGK = self.newest
        return LayerHistory((*self.keys, k_BTGK), (*self.values, v_BTGK))


class GradientCache(KVCache):
    """A KV cache that gradients pass through: keys and values stay the tensors that the forwards
    made, and attention concatenates them for as long as it needs them.

    A forward does not change what the cache holds, so a checkpoint can run it again. The next
    forward takes `extended()`. ValueError for an attention that keeps more than keys and values of
    single positions.
    """

    def __init__(self, config: ModelConfig):
        if not attention_kind(config).prompt_in_parts:
            raise ValueError(
                f"{config.attention.name} attention keeps more than keys and values, and its cache "
                "passes no gradients: take --attention_type standard"
            )
        super().__init__([LayerHistory() for _ in range(config.num_layers)])

    def extended(self) -> "GradientCache":
        """The cache with the tokens of the newest forward, for the one after it."""
        longer = copy.copy(self)
        longer.layers = [layer.extended() for layer in self.layers]
        return longer


class SoftTokens(NamedTuple):
    """Mixtures of tokens: row [b, t] stands for sum_k weight[b, t, k] * embedding[index[b, t, k]].

    index_BTK None: the weights are those of the whole vocabulary, K = V.
    """

    weight_BTK: Tensor
    index_BTK: Tensor | None = None


def embedded(model: Decoder, tokens: Tensor | SoftTokens) -> Tensor:
    """Embeddings [B, T, D] of token ids [B, T] or of soft tokens, in the compute dtype."""
    return model.apply_embedding(_embed, tokens)


def _embed(embed: nn.Embedding, tokens: Tensor | SoftTokens) -> Tensor:
    if isinstance(tokens, SoftTokens):
        return mix(tokens, embed.weight)
    return embed(tokens)


def mix(soft: SoftTokens, table_VD: Tensor) -> Tensor:
    """The embeddings [B, T, D] of soft tokens, in the dtype of the table; with an index, nothing
    of size [B, T, K, D] exists.
    """
    weight_BTK = soft.weight_BTK.to(table_VD.dtype)
    if soft.index_BTK is None:
        return weight_BTK @ table_VD
    mixed_ND = F.embedding_bag(
        soft.index_BTK.flatten(0, 1),
        table_VD,
        per_sample_weights=weight_BTK.flatten(0, 1),
        mode="sum",
    )
    return mixed_ND.unflatten(0, weight_BTK.shape[:2])
