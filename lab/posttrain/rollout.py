"""Responses sampled from a policy, with what the policy said of their tokens when it drew them.

Letters: B prompts, G responses of each, R = B*G rows, P tokens of a prompt, T response tokens,
D model width, V vocabulary.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from base import machine
from data.prompts import Prompt
from lab.posttrain import policy
from lab.posttrain.prompts import CacheBehindPrompts
from longhaul import dist
from longhaul.exits import NumericalHalt
from longhaul.generate import prompt_part
from longhaul.kinds import attention_kind
from longhaul.parallel import apply
from longhaul.sampling import check_sampling, decode, draw, uniforms
from longhaul.vocab import vocab_stats
from model import Decoder, KVCache, wide


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn: from the whole distribution, so that what trains is what sampled."""

    group_size: int
    max_response_length: int  # tokens, the end of the document included
    eod_id: int
    temperature: float = 1.0  # 0 is greedy; the statistics are then those at temperature 1
    vocab_size: int | None = None  # only ids below it are drawn; None: all
    seed: int = 0
    prompts: int = 8  # that are answered at once, at most
    stop_ids: tuple[int, ...] = ()  # tokens that end a response, besides the end of a document

    def __post_init__(self):
        check_sampling(self.temperature, top_k=0, top_p=1.0)
        if min(self.group_size, self.max_response_length, self.prompts) < 1:
            raise ValueError(
                f"group_size={self.group_size}, max_response_length={self.max_response_length}, "
                f"prompts={self.prompts}: "
                "give at least 1 of each"
            )

    def ends(self, tokens: Tensor) -> Tensor:
        """Whether each of the tokens ends a response."""
        ends = tokens == self.eod_id
        for index in self.stop_ids:
            ends = ends | (tokens == index)
        return ends


class Sample(NamedTuple):
    """A sampled response, on the host: its tokens with the one that ends it, which a truncated
    one lacks, and the statistics of each (longhaul/vocab/) when it was drawn, in float32.
    """

    tokens_T: Tensor
    logprob_T: Tensor
    self_certainty_T: Tensor
    truncated: bool

    @property
    def empty(self) -> bool:
        """Whether its end is all of it."""
        return len(self.tokens_T) == 1 and not self.truncated


class Fault(NamedTuple):
    """A token whose logits are not finite, and the hidden state that they come from."""

    where: str
    hidden_1D: Tensor


def largest_logit(hidden_1D: Tensor, weight_VD: Tensor) -> Tensor:
    """The largest finite |logit| of a token, 0 if none is finite."""
    logits_1V = policy.exact(hidden_1D) @ weight_VD.to(wide(hidden_1D.dtype)).t()
    return logits_1V.abs().where(logits_1V.isfinite(), 0).amax()


# ---- sampling


@torch.no_grad()
def sample(
    model: Decoder,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    step: int = 0,
    world: dist.World | None = None,
    occasion: str = "",
) -> list[list[Sample]]:
    """A group of responses to each prompt of this rank.

    Under FSDP2 each forward is a collective, so all ranks call it together, and a rank that has
    fewer prompts, or shorter ones, runs as many forwards as the others. Raises ValueError for an
    empty prompt and, on all ranks, NumericalHalt if the logits of a token are not finite; its words
    begin with the occasion, which is the step unless another is given.
    """
    for prompt in prompts:
        if not len(prompt.tokens):
            raise ValueError(f"prompt {prompt.position} is empty: give it at least one token")

    sampler = _Sampler(model, sampling, step, world or dist.World())
    sampler.occasion = occasion or f"step {step + 1}"
    batches = list(_batches(prompts, sampling.prompts))
    found: dict[int, list[Sample]] = {}
    with apply.eager(model):
        for index in range(sampler.most(len(batches))):
            batch = batches[index] if index < len(batches) else []
            found |= sampler.run(batch)
    apply.reshard(model)
    return [found[prompt.position] for prompt in prompts]


@torch.no_grad()
def rehearse(
    model: Decoder,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    made: Callable[[KVCache], None],
) -> Tensor:
    """The forwards of `sample` that take most memory: those of the prompts that are answered first,
    and that of the last token. `made` is called with the cache.

    Returns what is kept of all tokens. No value of a tensor is read, so they may be fake.
    """
    batch = next(_batches(prompts, sampling.prompts))
    sampler = _Sampler(model, sampling, 0, dist.World())
    with apply.eager(model):
        prompts_BP = sampler.tokens(batch)
        cache = sampler.filled(prompts_BP, batch, largest_parts)
        made(cache)
        _leave_out(cache, cache.layers[0].k_BSGK.shape[1] - 1)

        last_R1 = prompts_BP[:, -1:].repeat_interleave(sampling.group_size, dim=0)
        T = sampling.max_response_length
        uniform_RT = torch.zeros(len(last_R1), T, dtype=torch.float64, device=sampler.device)
        head = functools.partial(sampler.drawn, uniform_RT[:, -1])
        figures_SR = model(last_R1, cache=cache, head=head)
        figures_STR = figures_SR[:, None].expand(-1, T, -1)
        kept = figures_STR.clone()  # the figures of each token, before they are joined
        joined_STR = kept.clone()
    apply.reshard(model)
    return joined_STR


def all_parts(number: int) -> list[int]:
    """The indices of a prompt's parts that a rollout computes."""
    return list(range(number))


def largest_parts(number: int) -> list[int]:
    """Those that take more memory than all before them: the last, which has most keys, and each at
    which the tables of positions double.
    """
    doubling = {0} | {2**power for power in range(number.bit_length())}
    return sorted({index for index in doubling if index < number} | {number - 1})


def _leave_out(cache: KVCache, end: int) -> None:
    """Go on at position `end`, as if those before it had been computed."""
    for layer in cache.layers:
        layer.length = end


def _batches(prompts: Sequence[Prompt], most: int) -> Iterator[list[Prompt]]:
    """Prompts of one length that are answered at once, `most` of them."""
    by_length: dict[int, list[Prompt]] = {}
    for prompt in prompts:
        by_length.setdefault(len(prompt.tokens), []).append(prompt)
    for same in by_length.values():
        for start in range(0, len(same), most):
            yield same[start : start + most]


def of_all_ranks(own: Any, world: dist.World) -> list:
    """What each rank has; all call it together."""
    if world.size == 1:
        return [own]
    found = [None] * world.size
    torch.distributed.all_gather_object(found, own)
    return found


def padded(samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """Responses as rows [B, T] of tokens, on the host, and 1 for those that count, fp32."""
    tokens_BT = pad_sequence([sample.tokens_T for sample in samples], batch_first=True)
    lengths_B = torch.tensor([len(sample.tokens_T) for sample in samples])
    counts_BT = torch.arange(tokens_BT.shape[1]) < lengths_B[:, None]
    return tokens_BT, counts_BT.float()


def _tokens_drawn(figures_SR: Tensor) -> Tensor:
    """The tokens [R, 1] of figures."""
    return figures_SR[0].long()[:, None]


class _Sampler:
    """Runs batches of prompts, with as many forwards on all ranks."""

    def __init__(
        self,
        model: Decoder,
        sampling: Sampling,
        step: int,
        world: dist.World,
    ):
        self.model = model
        self.sampling = sampling
        self.step = step
        self.world = world
        self.device = model.embed.weight.device
        self.occasion = ""
        self.hidden_RD: Tensor | None = None  # that the latest tokens were drawn from
        self.fault: Fault | None = None

    def most(self, number: int) -> int:
        """The largest of all ranks' numbers."""
        return max(of_all_ranks(number, self.world))

    def run(self, batch: list[Prompt]) -> dict[int, list[Sample]]:
        """The groups of a batch by their prompts' positions; an empty batch only keeps pace."""
        prompts_BP = self._nothing()
        if batch:
            prompts_BP = self.tokens(batch)
        cache = self.filled(prompts_BP, batch)

        last_B1 = prompts_BP[:, -1:]
        if batch:
            last_B1 = last_B1.repeat_interleave(self.sampling.group_size, dim=0)
        figures_STR = self._decode(batch, last_B1, cache)
        return self._groups(batch, figures_STR)

    def tokens(self, batch: list[Prompt]) -> Tensor:
        """Prompts of one length on the device, [B, P]."""
        tokens = np.stack([prompt.tokens for prompt in batch])
        return torch.from_numpy(tokens).to(self.device)

    def _nothing(self) -> Tensor:
        return torch.zeros(1, 1, dtype=torch.int64, device=self.device)

    def filled(
        self,
        prompts_BP: Tensor,
        batch: list[Prompt],
        computed: Callable[[int], list[int]] = all_parts,
    ) -> KVCache | None:
        """A cache for the responses, which continues all tokens of their prompts but the last; None
        for an empty batch. `computed` chooses, of so many parts of a prompt, those that run.

        Each prompt is computed once and its keys are kept once, if the attention allows it.
        """
        config = self.model.config
        B, P = prompts_BP.shape
        G = self.sampling.group_size
        T = self.sampling.max_response_length
        shared = P > 1 and not attention_kind(config).refused_prompts
        before = prompts_BP[:, :-1]
        if not shared:
            before = before.repeat_interleave(G, dim=0)

        # the number of forwards, each of which is a collective, is agreed on before the first one
        size = prompt_part(config, P - 1)
        parts = -(-(P - 1) // size) if P > 1 else 0
        most = self.most(parts)
        if not batch:
            self._keep_pace(most)
            return None

        rows, capacity = (B, P - 1) if shared else (B * G, P + T)
        cache = self.model.new_cache(rows, capacity)
        for index in computed(parts):
            start = index * size
            if cache.length < start:
                _leave_out(cache, start)
            self.model.hidden(before[:, start : start + size], cache=cache)
        self._keep_pace(most - parts)
        return CacheBehindPrompts(cache, B * G, T + 1) if shared else cache

    def _keep_pace(self, forwards: int):
        for _ in range(forwards):
            self.model.hidden(self._nothing())

    def _decode(
        self,
        batch: list[Prompt],
        token_R1: Tensor,
        cache: KVCache | None,
    ) -> Tensor:
        """Figures [S, T, R] of drawn tokens, until every response of all ranks has ended."""
        numbers = [prompt.position for prompt in batch] or [0]
        positions = self.sampling.max_response_length
        shape = (self.sampling.seed, self.step, numbers, len(token_R1) // len(numbers), positions)
        uniform_RT = torch.from_numpy(uniforms(*shape)).flatten(0, 1).to(self.device)

        def next_figures(position: int, token_R1: Tensor) -> Tensor:
            head = functools.partial(self.drawn, uniform_RT[:, position])
            return self.model(token_R1, cache=cache, head=head)

        ended_R = torch.full((len(token_R1),), not batch, device=self.device)
        figures: list[Tensor] = []
        for figures_SR in decode(next_figures, token_R1, _tokens_drawn, positions):
            self._judge(figures_SR, ended_R, batch, position=len(figures))
            figures.append(figures_SR)
            ended_R = ended_R | self.sampling.ends(_tokens_drawn(figures_SR)[:, 0])

            going_on = self.fault is None and not bool(ended_R.all())
            if not dist.any_rank(going_on):
                break
        self._require_finite()
        return torch.stack(figures, dim=1)

    def drawn(
        self,
        uniform_R: Tensor,
        hidden_RD: Tensor,
        weight_VD: Tensor,
    ) -> Tensor:
        """A token of each row, its log-probability and self-certainty: [S, R] in float64."""
        self.hidden_RD = hidden_RD
        logits_RV = hidden_RD.new_empty(len(hidden_RD), len(weight_VD), dtype=wide(hidden_RD.dtype))
        matrix_DV = weight_VD.to(hidden_RD.dtype).t()
        machine.mixed_product(logits_RV, hidden_RD, matrix_DV, beta=0)

        temperature = self.sampling.temperature
        token_R = draw(logits_RV[:, : self.sampling.vocab_size], uniform_R, temperature)
        stats = vocab_stats(
            policy.exact(hidden_RD), weight_VD, token_R, temperature=temperature or 1.0
        )
        return torch.stack([token_R, stats.logprob, stats.self_certainty]).double()

    # ---- logits that are not finite

    def _judge(
        self,
        figures_SR: Tensor,
        ended_R: Tensor,
        batch: list[Prompt],
        position: int,
    ):
        """Remember the first row, of those that had not ended, whose figures are not finite."""
        wrong_R = ~figures_SR[1:].isfinite().all(0) & ~ended_R
        if self.fault is None and bool(wrong_R.any()):
            row = int(wrong_R.nonzero()[0])
            index, response = divmod(row, self.sampling.group_size)
            where = f"token {position} of response {response} to prompt {batch[index].position}"
            self.fault = Fault(where, self.hidden_RD[row : row + 1])

    def _require_finite(self):
        """NumericalHalt, on all ranks, if any of them has found a fault."""
        if not dist.any_rank(self.fault is not None):
            return
        hidden_1D = self.hidden_RD[:1] if self.fault is None else self.fault.hidden_1D
        # the ranks that found nothing take part, because the output weight may be sharded
        largest = float(self.model.apply_head(hidden_1D, largest_logit))
        where = self.fault.where if self.fault else ""
        first = next(words for words in of_all_ranks((where, largest), self.world) if words[0])
        raise NumericalHalt(
            f"{self.occasion}: the logits of {first[0]} are not finite at temperature "
            f"{self.sampling.temperature:g}, with a largest finite |logit| of {first[1]:.3g}, so "
            "the policy has diverged: --resume an earlier checkpoint with a lower --lr "
            "and a new --output_dir"
        )

    def _groups(self, batch: list[Prompt], figures_STR: Tensor) -> dict[int, list[Sample]]:
        G = self.sampling.group_size
        samples = [self._sample(figures_ST) for figures_ST in figures_STR.cpu().unbind(2)]
        return {
            prompt.position: samples[index * G : (index + 1) * G]
            for index, prompt in enumerate(batch)
        }

    def _sample(self, figures_ST: Tensor) -> Sample:
        """The response whose tokens are those up to the first that ends it."""
        tokens_T = figures_ST[0].long()
        ends = self.sampling.ends(tokens_T).nonzero()
        length = int(ends[0]) + 1 if len(ends) else len(tokens_T)
        logprob_T, self_certainty_T = figures_ST[1:, :length].float().unbind(0)
        return Sample(tokens_T[:length], logprob_T, self_certainty_T, truncated=not len(ends))
