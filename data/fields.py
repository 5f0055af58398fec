"""Which text of a record is the document: a column, or a dotted path.

text         a column or field
meta.body    a field of an object in it; a number picks from a list
"""

from collections.abc import Mapping


class FieldError(ValueError):
    """A record that lacks the field, or has no text in it."""


class TextField:
    """What `--text_field` or another flag asks for."""

    def __init__(self, spelled: str, flag: str = "--text_field"):
        self.spelled = spelled
        self.flag = flag

    def column(self, known: list[str]) -> str:
        """The column of a table that is read. FieldError if it is missing."""
        column = self.spelled if self.spelled in known else self.spelled.split(".")[0]
        if column not in known:
            raise self._missing("column", column, known)
        return column

    def text_of(self, record: object) -> str:
        """The text of a record; a null is no text. FieldError if there is no such field, or no text
        in it.
        """
        try:
            value = _value(record, self.spelled)
        except (KeyError, IndexError, ValueError, TypeError):
            value = ()  # no text
        if value is None:
            return ""
        if isinstance(value, str):
            return value
        found = list(record) if isinstance(record, Mapping) else [type(record).__name__]
        raise self._missing("string field", self.spelled, found)

    def _missing(self, what: str, name: str, found: list[str]) -> FieldError:
        words = f"there is no {what} {name!r} (found: {', '.join(found[:8])}); set {self.flag}"
        return FieldError(words)


def _value(record: object, field: str) -> object:
    """The value of a field. KeyError, IndexError, ValueError or TypeError if there is none."""
    if isinstance(record, Mapping) and field in record:
        return record[field]
    for name in field.split("."):
        record = record[int(name) if isinstance(record, list) else name]
    return record
