"""Which text of a record is the document: a column, a dotted path, or a template of these.

text                      a column or field
meta.body                 a field of an object in it; a number picks from a list
{title}\n\n{meta.body}    text with fields in braces; {{ and }} are braces
"""

import string
from collections.abc import Mapping


class FieldError(ValueError):
    """A record that lacks the field, or has no text in it."""


class TextField:
    """What `--text_field` or another flag asks for.

    Raises ValueError for a template without a field, or with unequal braces.
    """

    def __init__(self, spelled: str, flag: str = "--text_field"):
        self.spelled = spelled
        self.flag = flag
        self._is_template = "{" in spelled
        # pieces of text, each with the field that follows it
        self._parts = _parse(spelled, flag) if self._is_template else [("", spelled)]

    def columns(self, known: list[str]) -> list[str]:
        """The columns of a table that are read. FieldError if one of them is missing."""
        columns = []
        for _, field in self._parts:
            if field is None:
                continue
            column = field if field in known else field.split(".")[0]
            if column not in known:
                raise self._missing("column", column, known)
            columns.append(column)
        return columns

    def text_of(self, record: object) -> str:
        """The text of a record. A null is no text; a template also takes numbers.

        Raises FieldError if there is no such field, or no text in it.
        """
        pieces = []
        for literal, field in self._parts:
            pieces.append(literal)
            if field is not None:
                pieces.append(self._text(record, field))
        return "".join(pieces)

    def _text(self, record: object, field: str) -> str:
        try:
            value = _value(record, field)
        except (KeyError, IndexError, ValueError, TypeError):
            value = ()  # no text
        if value is None:
            return ""
        is_number = isinstance(value, int | float) and self._is_template
        if isinstance(value, str) or is_number:
            return str(value)
        found = list(record) if isinstance(record, Mapping) else [type(record).__name__]
        raise self._missing("string field", field, found)

    def _missing(self, what: str, name: str, found: list[str]) -> FieldError:
        words = f"there is no {what} {name!r} (found: {', '.join(found[:8])}); set {self.flag}"
        return FieldError(words)


def _parse(template: str, flag: str) -> list[tuple[str, str | None]]:
    """The template as pieces of text, each with the field that follows it."""
    spelled = template.replace("\\n", "\n").replace("\\t", "\t")
    try:
        parts = [(text, field) for text, field, _, _ in string.Formatter().parse(spelled)]
    except ValueError:
        parts = []
    fields = [field for _, field in parts if field is not None]
    if not fields or "" in fields:
        raise ValueError(
            f"{flag} {template!r} is no template with a field: give fields in braces, such as "
            "'{title}\\n\\n{text}', and write other braces twice"
        )
    return parts


def _value(record: object, field: str) -> object:
    """The value of a field. KeyError, IndexError, ValueError or TypeError if there is none."""
    if isinstance(record, Mapping) and field in record:
        return record[field]
    for name in field.split("."):
        record = record[int(name) if isinstance(record, list) else name]
    return record
