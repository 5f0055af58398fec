"""One operator at a time against the allocator's record: a sample of the generated table."""

import pytest
import torch
from torch import nn

from benchmarks import operators
from footprint import Refused, predict

SAMPLE = [
    *("gather", "index", "sort by row", "topk by row", "max by row", "kthvalue by row"),
    *("argmax", "count_nonzero by row", "prod", "max", "multi_margin_loss", "cross_entropy"),
    *("flatten", "complex product", "group_norm", "attention"),
    *("layer_norm", "layer_norm with weights", "batch_norm", "nll_loss"),
]
# whose copies and unreduced losses are known, so that nothing is left out
KNOWN = [
    *("attention in float64", "add and torch.float64", "mul and torch.int32"),
    *("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy"),
]


def test_the_table_has_about_250_operators():
    assert len(operators.operators()) >= 250


@pytest.mark.parametrize("name", SAMPLE + KNOWN)
@pytest.mark.parametrize("form", ["", "turned"])
def test_no_operator_is_wrong_without_a_word(name, form):
    found = operators.compare(name, form)
    assert not found.reason and not found.is_silent, found.text
    assert not (name in KNOWN and found.named)


def test_lbfgs_is_refused_by_its_name_at_the_line_of_its_step():
    def build():
        model = nn.Linear(64, 64)
        return model, torch.optim.LBFGS(model.parameters())

    def step(state):
        model, optimizer = state
        optimizer.step(lambda: model(torch.randn(8, 64)).square().mean())

    with pytest.raises(Refused, match=r"test_operators.py:\d+: LBFGS decides"):
        predict(build, step, "cpu")


def test_an_answer_of_another_kind_is_refused():
    def step(model):
        if model(torch.ones(2, 64)).sum() > 0:
            model.zero_grad()

    with pytest.raises(Refused) as refused:
        predict(lambda: nn.Linear(64, 64), step, "cpu")
    line = str(refused.value).split("answers={'")[1].split("'")[0]
    with pytest.raises(Refused, match="the answer 'no' is no bool"):
        predict(lambda: nn.Linear(64, 64), step, "cpu", answers={line: "no"})
