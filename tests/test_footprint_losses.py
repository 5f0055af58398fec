"""footprint.estimate_memory without `loss`: which of a model's results is trained."""

import dataclasses
from collections import OrderedDict, namedtuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from footprint import Refused, estimate_memory

WORDS = 500


@dataclasses.dataclass
class Answer:
    hidden: Tensor
    loss: Tensor | None = None


class Output(OrderedDict):
    """A dict whose items are attributes, as those of transformers."""

    def __getattr__(self, name: str):
        return self[name]


Pair = namedtuple("Pair", "logits loss")


class Model(nn.Module):
    """A small model that returns what `give` makes of its hidden states, logits and loss."""

    def __init__(self, give):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.head = nn.Linear(16, WORDS)
        self.give = give

    def forward(self, tokens: Tensor) -> object:
        hidden = self.embedding(tokens)
        logits = self.head(hidden)
        loss = cross_entropy(logits.flatten(0, 1), tokens.flatten())
        return self.give(hidden, logits, loss)


def estimated(give, loss=None):
    tokens = torch.randint(WORDS, (4, 32))
    return estimate_memory(Model(give), tokens, torch.optim.SGD, loss)


LOSSES = {
    "alone": (lambda h, y, loss: loss, lambda out: out),
    "after logits": (lambda h, y, loss: (y, loss), lambda out: out[1]),
    "in a named tuple": (lambda h, y, loss: Pair(y, loss), lambda out: out.loss),
    "in a dict": (lambda h, y, loss: dict(hidden=h, loss=loss), lambda out: out["loss"]),
    "in a dataclass": (lambda h, y, loss: Answer(h, loss), lambda out: out.loss),
    "in an output": (lambda h, y, loss: Output(hidden=h, loss=loss), lambda out: out.loss),
    "nested": (lambda h, y, loss: ([h], {"all": (y, loss)}), lambda out: out[1]["all"][1]),
    "by its name": (
        lambda h, y, loss: dict(aux=h.mean(), loss=loss, step=3),
        lambda out: out["loss"],
    ),
    "beside a figure": (
        lambda h, y, loss: (y, y.detach().mean(), loss),
        lambda out: out[2],
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_that_a_model_returns_is_found(name):
    give, loss = LOSSES[name]
    found, given = estimated(give), estimated(give, loss)
    assert found.by_stage == given.by_stage
    assert found.assumed == given.assumed == []


MEANS = {
    "logits alone": (lambda h, y, loss: y, lambda out: out.mean(), "output"),
    "a dataclass without a loss": (
        lambda h, y, loss: Answer(h),
        lambda out: out.hidden.mean(),
        "hidden",
    ),
    "two scalars": (lambda h, y, loss: (y, loss, h.mean()), lambda out: out[1].mean(), "[1]"),
    "a loss of each row": (
        lambda h, y, loss: dict(hidden=h, loss=y.mean((1, 2))),
        lambda out: out["loss"].mean(),
        "'loss'",
    ),
}


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_is_taken_where_no_loss_is_found_and_is_said(name):
    give, mean, place = MEANS[name]
    found = estimated(give)
    assert found.by_stage == estimated(give, mean).by_stage
    (words,) = found.assumed
    assert place in words


UNTRAINED = {
    "None": lambda h, y, loss: None,
    "int": lambda h, y, loss: 3,
    "Tensor": lambda h, y, loss: y.argmax(-1),
    "dict": lambda h, y, loss: dict(loss=loss.detach()),
}


@pytest.mark.parametrize("name", UNTRAINED)
def test_an_output_that_trains_nothing_is_refused_with_its_kind_and_the_remedy(name):
    with pytest.raises(Refused) as error:
        estimated(UNTRAINED[name])
    assert name in str(error.value)
    assert "`loss`" in str(error.value)
