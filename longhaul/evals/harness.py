"""A longhaul model as a model of EleutherAI's lm-evaluation-harness (the optional extra lm_eval):
for attention that no Hugging Face folder can hold.

Requests are packed as documents of a row, and only the log-likelihoods of their continuations are
computed. The conventions are those of the harness's own HFLM, so that both give the same numbers:

    prefix        the token that ends a document precedes a text without a context
    continuation  spaces at the end of its context belong to it, and its ids are those that follow
                  the context's in the ids of both together
    rolling       a text longer than the window is scored in disjoint windows of its length
    generation    ends at the end of a document, and is cut before each stop string in turn

Two things differ. A prompt that is longer than the window is refused, not cut from the left. A
special token that is spelled in a text is text, as in training.
"""

from collections.abc import Collection, Iterator

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
from longhaul.generate import generate
from longhaul.sampling import check_sampling
from model import IGNORE, Decoder

Request = tuple[object, list[int], list[int]]  # a name, ids of a context and of what follows it
Answer = tuple[float, bool]  # log-likelihood in nats; whether greedy decoding gives these tokens

# A forward takes at least so many tokens if there are as many.
ROW_TOKENS = 8192
MAX_NEW_TOKENS = 256  # if a task does not say

# Settings of generation: those that longhaul has, and others at which they do nothing.
SAMPLING = {"temperature": 0.0, "top_k": 50, "top_p": 1.0}
WITHOUT_EFFECT = {"num_beams": 1, "repetition_penalty": 1.0, "length_penalty": 1.0}


class LonghaulLM(TemplateLM):
    """A decoder and its tokenizer, with what the harness asks of a model.

    `window`: tokens that the model can read. `batch_size`: texts that pass at once, at most.
    `stop_ids`: tokens that end a generated text, besides the end of a document.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: AnyTokenizer,
        window: int,
        device: torch.device | str = "cpu",
        batch_size: int = 64,
        stop_ids: Collection[int] = (),
    ):
        super().__init__()
        self.model = model
        self.own_tokenizer = tokenizer  # the harness reads `tokenizer` as one of transformers
        self.window = window
        self.batch_size = batch_size
        self.stop_ids = {tokenizer.eod_id, *stop_ids}
        self.scorer = ModelScorer(model, device)

    @property
    def eot_token_id(self) -> int:
        """The id that ends a document."""
        return self.own_tokenizer.eod_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        """The ids of a text; none is added, as in training."""
        return self.own_tokenizer.encode(string)

    def check_length(self, tokens: int):
        """ValueError if a request needs more tokens than the window has."""
        if tokens > self.window:
            raise ValueError(
                f"a request needs {tokens:,} tokens, and the model's window is {self.window:,}; it "
                "is not cut, because its answer would be another one: lower --num_fewshot, choose "
                "other --tasks, or raise --max_length if the model was trained for it"
            )

    # ---- log-likelihoods

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-likelihood of each text, of all its tokens."""
        texts = [list(self._windows(request.args[0])) for request in requests]
        windows = [window for text in texts for window in text]
        found = iter(self._loglikelihood_tokens(windows, disable_tqdm))
        return [sum(next(found)[0] for _ in text) for text in texts]

    def _windows(self, text: str) -> Iterator[Request]:
        ids = self.tok_encode(text)
        for pair in get_rolling_token_windows(ids, self.prefix_token_id, self.window, 1):
            yield None, *make_disjoint_window(pair)

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, **_
    ) -> list[Answer]:
        for request in requests:
            self.check_length(len(inputs(request)))
            if not request[2]:
                raise ValueError(
                    "a continuation adds no token to its context: let the two meet at a space"
                )
        found: dict[int, Answer] = {}
        with tqdm(total=len(requests), desc="log-likelihoods", disable=disable_tqdm) as bar:
            for row in self._rows(requests):
                found |= zip(row, self._answers([requests[index] for index in row]), strict=True)
                bar.update(len(row))
        return [found[index] for index in range(len(requests))]

    def _rows(self, requests: list[Request]) -> Iterator[list[int]]:
        """The requests of each row, longest first, so that what does not fit fails at once."""
        sizes = [len(inputs(request)) for request in requests]
        most = max(self.window, ROW_TOKENS)
        row: list[int] = []
        for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
            tokens = sum(sizes[other] for other in row) + sizes[index]
            if row and (tokens > most or len(row) == self.batch_size):
                yield row
                row = []
            row.append(index)
        if row:
            yield row

    def _answers(self, requests: list[Request]) -> list[Answer]:
        """Answers to the requests of a row."""
        tokens: list[int] = []
        doc_ids: list[int] = []
        places: list[int] = []
        for number, request in enumerate(requests):
            tokens += inputs(request)
            doc_ids += [number] * len(inputs(request))
            places += range(len(tokens) - len(request[2]), len(tokens))
        label_n = torch.tensor([label for request in requests for label in request[2]])

        def asked(hidden_ND: Tensor, weight_VD: Tensor, _labels_N: Tensor) -> Tensor:
            return answers(hidden_ND[places], weight_VD, label_n.to(hidden_ND.device))

        tokens_1T = torch.tensor([tokens])
        unasked_1T = torch.full_like(tokens_1T, IGNORE)
        row = Item(tokens_1T, unasked_1T, doc_ids=torch.tensor([doc_ids]))
        figures_2n = self.scorer.figures(row, asked).double().cpu()
        parts = figures_2n.split([len(request[2]) for request in requests], dim=1)
        return [(-float(nll_n.sum()), bool(hit_n.all())) for nll_n, hit_n in parts]

    # ---- generation

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text that follows each context, without the stop string that ended it."""
        asked = [self._asked(*request.args) for request in requests]
        bar = tqdm(asked, desc="generation", disable=disable_tqdm)
        return [self._text(*one, seed) for seed, one in enumerate(bar)]

    def _asked(self, context: str, settings: dict) -> tuple[list[int], int, list[str], dict]:
        """Prompt, most tokens, stop strings and sampling; ValueError for what longhaul lacks."""
        settings = normalize_gen_kwargs(settings, MAX_NEW_TOKENS)
        prompt = self.tok_encode(context) or [self.prefix_token_id]
        tokens = settings.pop("max_gen_toks")
        end = self.own_tokenizer.spell([self.eot_token_id])
        stops = handle_stop_sequences(settings.pop("until"), end)

        draws = settings.pop("do_sample")
        sampling = {name: settings.pop(name, usual) for name, usual in SAMPLING.items()}
        check_sampling(**sampling)
        given = settings.items()
        others = {name: value for name, value in given if WITHOUT_EFFECT.get(name) != value}
        if others or (draws and not sampling["temperature"]):
            raise ValueError(
                f"a task generates with {others or 'do_sample and no temperature'}, which longhaul "
                f"does not have: choose other --tasks, or give it {', '.join(SAMPLING)}"
            )
        self.check_length(len(prompt) + tokens)
        return prompt, tokens, stops, sampling

    def _text(
        self, prompt: list[int], tokens: int, stops: list[str], sampling: dict, seed: int
    ) -> str:
        """What the model writes, cut as HFLM cuts it."""
        longest = max(len(stop.encode()) for stop in stops)  # a token has at least one byte
        written: list[int] = []
        for token in generate(
            self.model,
            prompt,
            tokens,
            **sampling,
            seed=seed,
            stop_ids=self.stop_ids,
            vocab_size=self.own_tokenizer.vocab_size,
            captured=True,
        ):
            written.append(token)
            tail = self.own_tokenizer.spell(written[-longest - 1 :])
            if any(stop and stop in tail for stop in stops):
                break
        text = self.own_tokenizer.decode(written)
        return postprocess_generated_text(text, stops, think_end_token=None)


def inputs(request: Request) -> list[int]:
    """What the model reads: the last token of a continuation is not."""
    _, context, continuation = request
    return context + continuation[:-1]
