"""docs/LOG.md stays short: one line an entry, with its date, verdict, figure and commit."""

import re
from pathlib import Path

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
