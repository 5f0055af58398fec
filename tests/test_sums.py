"""Documents of sums: worked responses are right, guesses are near, and both share their prompts."""

import numpy as np
import pytest

from data import sums
from data.dataset import open_dataset
from data.prompts import read_prompt
from data.sums import ANSWER, END, WORK


def number(digits) -> int:
    return int("".join(str(digit) for digit in digits))


def test_a_worked_response_writes_ones_tens_and_the_answer():
    document = sums.document(47, 38, sums.worked_out(47, 38))
    expected = [4, 7, sums.PLUS, 3, 8, sums.EQUALS, WORK, 1, 5, 0, 8, ANSWER, 0, 8, 5, END]
    assert document.tokens.tolist() == expected
    assert document.learned.tolist() == [False] * 6 + [True] * 10


@pytest.mark.parametrize("worked", [0.0, 0.5, 1.0])
def test_every_sum_is_there_once_and_guesses_are_near(worked):
    seen = set()
    right = []
    for tokens, _, learned, *_ in sums.documents(worked, seed=3):
        assert len(tokens) == len(learned) == 16 and tokens[learned][-1] == END
        first, second = number(tokens[:2]), number(tokens[3:5])
        seen.add((first, second))
        response = tokens[learned].tolist()
        answer = number(response[-4:-1])
        assert abs(answer - first - second) <= 5
        if response[0] == WORK:
            assert number(response[1:3]) == first % 10 + second % 10
            assert answer == first + second
            right.append(True)
        else:
            assert len(response) == 5
            right.append(False)
    assert len(seen) == 10_000 and abs(np.mean(right) - worked) < 0.02


def test_both_datasets_hold_out_the_same_sums_and_name_the_marker(tmp_path):
    for name, share in (("base", "0.5"), ("asked", "1")):
        assert sums.main(["--output", str(tmp_path / name), "--worked", share]) == 0
    base, asked = (open_dataset(tmp_path / name) for name in ("base", "asked"))
    assert base.manifest.answer_id == asked.manifest.answer_id == ANSWER
    assert base.split("val").num_documents > 400
    for index in range(50):
        one = read_prompt(base, base.split("val"), index, index)
        other = read_prompt(asked, asked.split("val"), index, index)
        assert one.tokens.tolist() == other.tokens.tolist() and other.answer[0] == WORK
