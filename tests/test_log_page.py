"""docs/LOG.md stays short: one line an entry, with its date, verdict, figure and commit."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "LOG.md"
WORDS_OF_THE_PAGE = 2500
WORDS_OF_AN_ENTRY = 25
ENTRY = re.compile(r"- (\d{4}-\d\d-\d\d) [A-Z][^:]+: .+ `[0-9a-f]{7,}`")


def faults(text: str) -> list[str]:
    """What breaks the rules of the page, in words."""
    found = []
    if len(text.split()) > WORDS_OF_THE_PAGE:
        found.append(
            f"the page has {len(text.split())} words: drop what no longer binds a decision"
        )

    *_, entries = text.partition("\n- ")
    lines = f"- {entries}".splitlines()
    matches = [ENTRY.fullmatch(line) for line in lines]
    found += [f"no entry: {line}" for line, match in zip(lines, matches) if match is None]
    found += [f"too long: {line}" for line in lines if len(line.split()) > WORDS_OF_AN_ENTRY + 1]

    dates = [match[1] for match in matches if match]
    if dates != sorted(dates, reverse=True):
        found.append("the newest entry does not come first")
    return found


def test_the_log_has_one_short_line_for_each_entry():
    assert not faults(PAGE.read_text(encoding="utf-8"))


GOOD = "- 2026-11-25 Worked: a thing, 3.7x. `abcdef0`"


@pytest.mark.parametrize(
    "entries, words",
    [
        (["- 2026-11-25 a thing without a verdict. `abcdef0`"], "no entry"),
        (["- 2026-11-25 Worked: a thing without a commit."], "no entry"),
        ([GOOD, "and its second line"], "no entry"),
        ([GOOD.replace("thing", "thing " * 25)], "too long"),
        (["- 2026-11-24 Failed: it. `abcdef0`", GOOD], "newest"),
        ([GOOD] * 400, "the page has"),
    ],
)
def test_what_breaks_a_rule_is_found(entries, words):
    assert not faults(f"# Log\n\n{GOOD}\n")
    found = faults("\n".join(["# Log", "", *entries, ""]))
    assert any(words in fault for fault in found)
