"""footprint's oracle: operators one at a time, the peak that is predicted for a CPU against the
allocator's own record. The whole table:

    bash scripts/test.sh --all tests/test_operators.py
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from footprint import Refused, measure, predict
from tests.operators import FORMS, SUMMED, N, operators
from tests.tiers import slow

BOUND = 1e-3
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


def build() -> Tensor:
    return torch.rand(N, N, requires_grad=True)


def step_of(name: str, form: str) -> Callable[[Tensor], None]:
    """A step of one operator: forward, and backward from its first result with a gradient."""

    def step(x: Tensor):
        x.grad = None
        result = operators()[name](FORMS[form](x))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor) and value.requires_grad:
                one = torch.ones(()) if form == SUMMED else torch.ones_like(value)
                value.backward(one.expand(value.shape))
                return

    return step


def is_silent(recorded: int, report) -> bool:
    """Whether a prediction is wrong and names nothing that it leaves out."""
    return abs(report.peak - recorded) > BOUND * recorded and not report.not_modelled


@pytest.mark.parametrize("name", SAMPLE + KNOWN)
@pytest.mark.parametrize("form", ["", "turned"])
def test_an_operator_is_predicted_to_a_thousandth_or_named(name, form):
    step = step_of(name, form)
    report = predict(build, step, "cpu")
    assert not is_silent(measure(build, step), report)
    assert not (name in KNOWN and report.not_modelled)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", map(slow, operators()))
def test_no_operator_is_wrong_without_a_word_in_any_form(name):
    silent = {}
    for form in FORMS:
        step = step_of(name, form)
        try:
            recorded = measure(build, step)
        except (RuntimeError, TypeError):  # most often, there is none for bf16
            continue
        try:
            report = predict(build, step, "cpu")
        except Refused:
            continue
        if is_silent(recorded, report):
            silent[form] = (report.peak, recorded)
    assert not silent


def test_the_table_has_430_operators():
    assert len(operators()) == 430


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
