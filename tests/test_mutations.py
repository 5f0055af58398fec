"""selfcheck.mutations: every fault fits the code as it is, and the verdicts are right."""

import subprocess
import sys
from pathlib import Path

import pytest

from selfcheck import mutations
from selfcheck.faulty_lines import FAULTS, Fault

ROOT = Path(__file__).parent.parent
CODE = """
def double(x):
    return 2 * x

def unused(x):
    return x + 1
"""
TESTS = """
from code_under_test import double

def test_double():
    assert double(3) == 6

def test_that_always_fails():
    assert False
"""


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_old_text_of_a_fault_occurs_once_and_its_tests_exist(fault):
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    assert text.count(fault.old) == 1, f"update {fault.name} in selfcheck/faulty_lines.py"
    assert fault.old != fault.new
    for argument in fault.tests:
        if argument.startswith("tests/"):
            assert (ROOT / argument.split("::")[0]).is_file()


def test_a_fault_leaves_no_name_undefined(tmp_path):
    """A NameError is caught by any test that reaches it, which says nothing about the test."""
    for index, fault in enumerate(FAULTS):
        text = (ROOT / fault.file).read_text(encoding="utf-8")
        (tmp_path / f"fault_{index}.py").write_text(text.replace(fault.old, fault.new))
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_names_are_unique_and_at_most_three_faults_survive():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert len([fault for fault in FAULTS if fault.survives]) <= 3


@pytest.fixture
def tree(tmp_path):
    """A folder with code, a test that notices what `double` does, and one that always fails."""
    (tmp_path / "code_under_test.py").write_text(CODE)
    (tmp_path / "test_it.py").write_text(TESTS)
    return tmp_path


def fault(old: str, new: str, *tests: str, survives: str = "") -> Fault:
    return Fault("example", "code_under_test.py", old, new, tests, survives)


def verdict(tree, *args, **options) -> str:
    (outcome,) = mutations.run_all(tree, [fault(*args, **options)])
    assert (tree / "code_under_test.py").read_text() == CODE
    return outcome.verdict


def test_a_fault_that_a_test_notices_is_caught(tree):
    assert verdict(tree, "2 * x", "3 * x", "-k", "double") == "caught"


def test_a_fault_that_no_test_notices_has_survived(tree):
    assert verdict(tree, "x + 1", "x + 2", "-k", "double") == "survived"


@pytest.mark.slow
def test_a_test_that_also_fails_without_the_fault_has_noticed_nothing(tree):
    assert verdict(tree, "x + 1", "x + 2", "-k", "always") == "fails without the fault"


def test_text_that_is_missing_or_ambiguous_is_not_caught(tree):
    assert verdict(tree, "4 * x", "3 * x") == "the old text occurs 0 times in code_under_test.py"
    assert verdict(tree, "(x)", "(y)") == "the old text occurs 2 times in code_under_test.py"


@pytest.mark.slow
def test_a_fault_that_keeps_the_tests_from_running_is_not_caught(tree):
    assert verdict(tree, "2 * x", "2 * (x", "-k", "double").startswith("pytest ended with code ")
    assert verdict(tree, "2 * x", "3 * x", "-k", "nothing").startswith("pytest ended with code 5")


def test_the_exit_code_is_1_if_an_unexpected_fault_survives():
    def code(verdict: str, survives: str = "") -> int:
        return mutations.report([mutations.Outcome(fault("", "", survives=survives), verdict)])

    assert code("caught") == 0
    assert code("survived") == 1
    assert code("survived", survives="a known reason") == 0
    assert code("the old text occurs 0 times", survives="a known reason") == 1


def test_an_unknown_name_is_bad_input(capsys):
    with pytest.raises(SystemExit) as stop:
        mutations.main(["--only", "no-such-fault"])
    assert stop.value.code == 2
    assert "no fault has 'no-such-fault' in its name: see --list" in capsys.readouterr().err
