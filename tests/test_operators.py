"""One operator at a time against the allocator's record: a sample of the generated table."""

from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import operators
from footprint import Refused, predict

SAMPLE = [
    *("gather", "index", "index_select", "sort by row", "topk by row", "max by row", "take"),
    *("cummax by row", "kthvalue by row", "argmax", "count_nonzero by row", "prod", "max"),
    *("multi_margin_loss", "cross_entropy", "flatten", "softmax by row", "linalg cholesky"),
    *("complex product", "group_norm", "attention", "add and torch.float64", "linalg qr"),
]


@pytest.fixture(autouse=True)
def single_thread():
    torch.set_num_threads(1)


def test_the_table_has_about_250_operators():
    assert len(operators.operators()) >= 250


@pytest.mark.parametrize("name", SAMPLE)
@pytest.mark.parametrize("form", ["", "turned"])
def test_no_operator_is_wrong_without_a_word(name, form):
    found = operators.compare(name, form)
    assert not found.reason and not found.is_silent, found.text


def lbfgs() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(64, 64)
    return model, torch.optim.LBFGS(model.parameters(), max_iter=4)


def search(state) -> None:
    model, optimizer = state
    x = torch.randn(8, 64)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def test_lbfgs_is_refused_by_the_line_that_reads_until_all_are_answered():
    """The lines are those of torch/optim/lbfgs.py, which the refusals name one after another."""
    given: dict[str, object] = {}
    for _ in range(12):
        try:
            report = predict(lbfgs, search, "cpu", answers=given)
            break
        except Refused as error:
            line = str(error).split("answers={'")[1].split("'")[0]
            assert line.startswith("lbfgs.py:") and line not in given
            given[line] = an_answer(line)
    assert report.stages["optimizer"]["optimizer"] > 6 * 64 * 65 * 4  # pairs of vectors are kept


def an_answer(line: str) -> object:
    """A loss that falls where one is read; else that the search goes on."""
    number = int(line.partition(":")[2])
    text = Path(torch.optim.__file__).with_name("lbfgs.py").read_text().splitlines()[number - 1]
    if "float(orig" in text:
        return 1.0
    return [0.9, 0.8, 0.7] if "float(" in text else "ys >" in text


def test_an_answer_of_another_kind_is_refused():
    def step(model):
        if model(torch.ones(2, 64)).sum() > 0:
            model.zero_grad()

    with pytest.raises(Refused) as refused:
        predict(lambda: nn.Linear(64, 64), step, "cpu")
    line = str(refused.value).split("answers={'")[1].split("'")[0]
    with pytest.raises(Refused, match="the answer 'no' is no bool"):
        predict(lambda: nn.Linear(64, 64), step, "cpu", answers={line: "no"})
