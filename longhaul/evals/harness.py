"""A longhaul model as a model of EleutherAI's lm-evaluation-harness (the optional extra lm_eval).

Requests are packed as documents of a row, and only the log-likelihoods of their continuations are
computed: the harness's own HFLM makes logits of every token, 74 GiB at 131,072 tokens of a
vocabulary of 151,936. The conventions are HFLM's, so that both give the same numbers:

    prefix        the token that ends a document precedes a text without a context
    continuation  spaces at the end of its context belong to it, and its ids are those that follow
                  the context's in the ids of both together
    rolling       a text longer than the window is scored in disjoint windows of its length
    generation    takes only ids of the tokenizer, as an exported folder says, ends at the end of a
                  document, and is cut before each stop string in turn

Two things differ. A prompt that is longer than the window is refused, not cut from the left. A
special token that is spelled in a text is text, as in training.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from tqdm import tqdm

from data.load_tokenizer import AnyTokenizer
from longhaul.evals.score import Item, ModelScorer, answers
from longhaul.generate import generate, prefill
from longhaul.kinds import attention_kind
from longhaul.sampling import check_sampling
from model import IGNORE, Decoder, KVCache

Text = list[int]  # indices of requests with the same inputs
Answer = tuple[float, bool]  # log-likelihood in nats; whether greedy decoding gives these tokens

# A forward takes at least so many tokens if there are as many.
ROW_TOKENS = 8192

# A context of so many tokens passes through the model once for all its continuations, which saves
# tokens and costs forwards. On a CPU (the tiny model, 4 continuations) it took half the time at 150
# tokens, the same at 80 and twice at 24. A GPU is idle in short forwards: its number is a guess.
SHARED_FROM = {"cpu": 128, "cuda": 4096}

# Settings of generation that do nothing at these values, and that longhaul does not have.
WITHOUT_EFFECT = {"num_beams": 1, "repetition_penalty": 1.0, "length_penalty": 1.0}
SETTINGS = ("temperature", "do_sample", "top_k", "top_p")
MAX_NEW_TOKENS = 256  # if a task does not say


class Request(NamedTuple):
    """Ids to score, and those that precede them: at least one of each."""

    context: list[int]
    continuation: list[int]

    @property
    def inputs(self) -> list[int]:
        """What the model reads."""
        return self.context + self.continuation[:-1]


class Sampling(NamedTuple):
    """How a task wants its texts generated."""

    stops: list[str]
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float


class LonghaulLM(TemplateLM):
    """A decoder and its tokenizer, with what the harness asks of a model.

    `window`: tokens that the model can read. `batch_size`: texts that pass at once, at most.
    `stop_ids`: tokens that end a generated text, besides the end of a document.
    Requests that do not fit the window raise ValueError before any is computed.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: AnyTokenizer,
        window: int,
        device: torch.device | str = "cpu",
        batch_size: int = 64,
        seed: int = 0,
        stop_ids: Collection[int] = (),
    ):
        super().__init__()
        self.model = model
        self.own_tokenizer = tokenizer  # the harness reads `tokenizer` as one of transformers
        self.window = window
        self.batch_size = batch_size
        self.seed = seed
        self.stop_ids = {tokenizer.eod_id, *stop_ids}
        self.scorer = ModelScorer(model, device)
        self._device = torch.device(device)
        self._asked: Sequence[Instance] = ()

    # ---- tokens

    @property
    def eot_token_id(self) -> int:
        """The id that ends a document."""
        return self.own_tokenizer.eod_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs
    ) -> list[int]:
        """The ids of a text; none is added, as in training."""
        return self.own_tokenizer.encode(string)

    # ---- log-likelihoods

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Answer]:
        """The answers for pairs of a context and a continuation."""
        self._asked = requests
        return super().loglikelihood(requests, disable_tqdm)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-likelihood of each text, of all its tokens."""
        windows = []
        owners = []
        for owner, request in enumerate(requests):
            (text,) = request.args
            for window in self._windows(text):
                windows.append((None, *window))
                owners.append(owner)

        totals = [0.0] * len(requests)
        found = self._loglikelihood_tokens(windows, disable_tqdm)
        for owner, (log_likelihood, _) in zip(owners, found, strict=True):
            totals[owner] += log_likelihood
        return totals

    def _windows(self, text: str) -> Iterator[tuple[list[int], list[int]]]:
        """(context, continuation) of each window of a text."""
        overlapping = get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.window,
            context_len=1,
        )
        return map(make_disjoint_window, overlapping)

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs,
    ) -> list[Answer]:
        """The answers for ids; the texts in `requests` are not read."""
        pairs = [Request(context, continuation) for _, context, continuation in requests]
        for index, pair in enumerate(pairs):
            self._check(index, pair)

        found: dict[int, Answer] = {}
        total = sum(len(pair.inputs) for pair in pairs)
        with tqdm(total=total, unit="token", desc="log-likelihoods", disable=disable_tqdm) as bar:
            for indices, answered in self._answered(pairs):
                found |= zip(indices, answered, strict=True)
                bar.update(sum(len(pairs[index].inputs) for index in indices))
        return [found[index] for index in range(len(pairs))]

    def _answered(self, pairs: list[Request]) -> Iterator[tuple[list[int], list[Answer]]]:
        """Indices of requests, and their answers: shared contexts first, then packed rows."""
        shared, others = self._by_context(pairs)
        for texts in shared:
            yield flat(texts), self._after(requests_of(pairs, texts))
        for texts in self._rows(pairs, others):
            yield flat(texts), self._answers(requests_of(pairs, texts))

    def _by_context(self, pairs: list[Request]) -> tuple[list[list[Text]], list[Text]]:
        """Groups of texts that share a long context, and the texts outside of them."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, pair in enumerate(pairs):
            groups.setdefault(tuple(pair.context), []).append(index)

        least = SHARED_FROM["cuda" if self._device.type == "cuda" else "cpu"]
        in_parts = attention_kind(self.model.config).prompt_in_parts
        shared = []
        others = []
        for context, indices in groups.items():
            texts = same_inputs(pairs, indices)
            if in_parts and len(texts) > 1 and len(context) >= least:
                shared.append(texts)
            else:
                others += texts
        shared.sort(key=lambda texts: -len(pairs[texts[0][0]].context))
        return shared, others

    def _rows(self, pairs: list[Request], texts: list[Text]) -> Iterator[list[Text]]:
        """The texts of each row, longest first, so that what does not fit fails at once."""
        most = max(self.window, ROW_TOKENS)
        row: list[Text] = []
        length = 0
        for text in sorted(texts, key=lambda text: -len(pairs[text[0]].inputs)):
            tokens = len(pairs[text[0]].inputs)
            if row and (length + tokens > most or len(row) == self.batch_size):
                yield row
                row = []
                length = 0
            row.append(text)
            length += tokens
        if row:
            yield row

    @torch.no_grad()
    def _after(self, texts: list[list[Request]]) -> list[Answer]:
        """Answers for texts with one context, which passes through the model once.

        The cache keeps all of it but its last token, and each continuation overwrites the one
        before.
        """
        context = texts[0][0].context
        longest = max(len(text[0].inputs) for text in texts)
        cache = self.model.new_cache(1, longest)
        context_1T = torch.tensor([context[:-1]], device=self._device)
        prefill(self.model, context_1T, cache)

        found = []
        for text in texts:
            rests = [Request(context[-1:], request.continuation) for request in text]
            found += self._answers([rests], cache)
            cache.rewind(len(context) - 1)
        return found

    def _answers(self, texts: list[list[Request]], cache: KVCache | None = None) -> list[Answer]:
        """Answers for the texts of a row; the requests of a text have the same inputs."""
        places: list[int] = []
        labels: list[int] = []
        end = 0
        for text in texts:
            end += len(text[0].inputs)
            for request in text:
                places += range(end - len(request.continuation), end)
                labels += request.continuation
        place_n = torch.tensor(places, device=self._device)
        label_n = torch.tensor(labels, device=self._device)

        def asked(hidden_ND: Tensor, weight_VD: Tensor, _labels_N: Tensor) -> Tensor:
            return answers(hidden_ND[place_n], weight_VD, label_n)

        figures_2n = self.scorer.figures(packed(texts), asked, cache).double().cpu()
        counts = [len(request.continuation) for text in texts for request in text]
        parts = figures_2n.split(counts, dim=1)
        return [(-float(nll_n.sum()), bool(hit_n.all())) for nll_n, hit_n in parts]

    # ---- generation

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text that follows each context, without the stop string that ended it."""
        self._asked = requests
        prompts = []
        samplings = []
        for index, request in enumerate(requests):
            context, settings = request.args
            prompt = self.tok_encode(context) or [self.prefix_token_id]
            sampling = self._sampling(index, settings)
            self._check_length(index, len(prompt) + sampling.max_new_tokens)
            prompts.append(prompt)
            samplings.append(sampling)

        texts = []
        numbered = enumerate(zip(prompts, samplings, strict=True))
        bar = tqdm(numbered, total=len(requests), desc="generation", disable=disable_tqdm)
        for index, (prompt, sampling) in bar:
            texts.append(self._text(prompt, sampling, self.seed + index))
        return texts

    def _text(self, prompt: list[int], sampling: Sampling, seed: int) -> str:
        """What the model writes, cut as HFLM cuts it."""
        tokens = generate(
            self.model,
            prompt,
            sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seed=seed,
            stop_ids=self.stop_ids,
            vocab_size=self.own_tokenizer.vocab_size,
            captured=True,
        )
        written: list[int] = []
        for token in tokens:
            written.append(token)
            if self._is_at_stop(written, sampling.stops):
                break
        text = self.own_tokenizer.decode(written)
        return postprocess_generated_text(text, sampling.stops, think_end_token=None)

    def _is_at_stop(self, written: list[int], stops: list[str]) -> bool:
        """Whether the last tokens, special ones spelled, hold a stop string."""
        longest = max(len(stop.encode()) for stop in stops)  # a token has at least one byte
        tail = self.own_tokenizer.spell(written[-longest - 1 :])
        return any(stop and stop in tail for stop in stops)

    def _sampling(self, index: int, settings: dict) -> Sampling:
        """A task's settings; ValueError for one that longhaul does not have."""
        settings = normalize_gen_kwargs(settings, MAX_NEW_TOKENS)
        end = self.own_tokenizer.spell([self.eot_token_id])
        stops = handle_stop_sequences(settings.pop("until"), end)
        max_new_tokens = settings.pop("max_gen_toks")
        self._check_settings(index, settings)

        temperature = settings.get("temperature", 0.0)
        top_k = settings.get("top_k", 50)
        top_p = settings.get("top_p", 1.0)
        check_sampling(temperature, top_k, top_p)
        return Sampling(stops, max_new_tokens, temperature, top_k, top_p)

    # ---- what is refused

    def _check(self, index: int, pair: Request):
        """ValueError for a request that cannot be answered."""
        if not pair.continuation:
            raise ValueError(
                f"{self._name(index)} has a continuation that adds no token to its context: let "
                "the two meet at a space"
            )
        self._check_length(index, len(pair.inputs))

    def _check_settings(self, index: int, settings: dict):
        """ValueError for settings of generation that longhaul does not have."""
        for name, value in settings.items():
            if name not in SETTINGS and WITHOUT_EFFECT.get(name) != value:
                known = ", ".join(SETTINGS)
                raise ValueError(
                    f"{self._name(index)} generates with {name}={value!r}, which longhaul does not "
                    f"have: choose a task with no more than {known}, until and max_gen_toks"
                )
        if settings["do_sample"] and not settings.get("temperature"):
            raise ValueError(
                f"{self._name(index)} samples without a temperature: give its task a temperature "
                "above 0, or do_sample false"
            )

    def _check_length(self, index: int, tokens: int):
        """ValueError if a request needs more tokens than the window has."""
        if tokens > self.window:
            raise ValueError(
                f"{self._name(index)} needs {tokens:,} tokens, and the model's window is "
                f"{self.window:,}; it is not cut, because its answer would be another one: lower "
                "--num_fewshot, leave out this task, or raise --max_length if the model was "
                "trained for it"
            )

    def _name(self, index: int) -> str:
        request = self._asked[index]
        return f"request {index + 1} (document {request.doc_id} of task {request.task_name})"


# ---- requests as rows


def same_inputs(pairs: list[Request], indices: list[int]) -> list[Text]:
    """The requests of one text each, such as choices of one token, of which it is read once."""
    texts: dict[tuple[int, ...], Text] = {}
    for index in indices:
        texts.setdefault(tuple(pairs[index].inputs), []).append(index)
    return list(texts.values())


def requests_of(pairs: list[Request], texts: list[Text]) -> list[list[Request]]:
    """The requests of each text."""
    return [[pairs[index] for index in text] for text in texts]


def flat(texts: list[Text]) -> list[int]:
    """The indices of all texts."""
    return [index for text in texts for index in text]


def packed(texts: list[list[Request]]) -> Item:
    """The inputs of texts as documents of one row; it has no labels."""
    tokens: list[int] = []
    doc_ids: list[int] = []
    for number, text in enumerate(texts):
        tokens += text[0].inputs
        doc_ids += [number] * len(text[0].inputs)
    tokens_1T = torch.tensor([tokens])
    # a row of one document may continue a cache, which holds no others
    several = torch.tensor([doc_ids]) if len(texts) > 1 else None
    return Item(tokens_1T, torch.full_like(tokens_1T, IGNORE), doc_ids=several)
