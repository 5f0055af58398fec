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
    """What `--text_field` or another flag asks for; `columns` are the top-level fields that it
    reads.

    Raises ValueError for a template without a field, or with unequal braces.
    """

    def __init__(self, spelled: str, flag: str = "--text_field"):
        self.spelled = spelled
        self.flag = flag
        self._is_template = "{" in spelled
        self._parts = _parse(spelled, flag) if self._is_template else [("", spelled)]
        self.fields = [field for _, field in self._parts if field is not None]

    def columns(self, known: list[str]) -> list[str]:
        """The columns of a table that are read. FieldError if one of them is missing."""
        columns = []
        for field in self.fields:
            column = field if field in known else field.split(".")[0]
            if column not in known:
                found = ", ".join(known[:8])
                raise FieldError(f"there is no column {column!r} (found: {found}); set {self.flag}")
            columns.append(column)
        return list(dict.fromkeys(columns))

    def text_of(self, record: object) -> str:
        """The text of a record. A null is no text; a template also takes numbers.

        Raises FieldError if there is no such field, or no text in it.
        """
        if not self._is_template:
            return self._text(record, self.spelled)
        pieces = []
        for literal, field in self._parts:
            pieces.append(literal)
            if field is not None:
                pieces.append(self._text(record, field))
        return "".join(pieces)

    def _text(self, record: object, field: str) -> str:
        try:
            value = _value(record, field)
        except (KeyError, IndexError, ValueError):
            raise self._missing(record, field) from None
        if value is None:
            return ""
        is_number = isinstance(value, int | float) and self._is_template
        if isinstance(value, str) or is_number:
            return str(value)
        raise self._missing(record, field)

    def _missing(self, record: object, field: str) -> FieldError:
        found = _describe(record)
        return FieldError(f"there is no string field {field!r} (found: {found}); set {self.flag}")


def _parse(template: str, flag: str) -> list[tuple[str, str | None]]:
    """The template as pieces of text, each with the field that follows it."""
    spelled = template.replace("\\n", "\n").replace("\\t", "\t")
    try:
        parts = [(text, field) for text, field, _, _ in string.Formatter().parse(spelled)]
    except ValueError as error:
        raise ValueError(
            f"{flag} {template!r} is no template ({error}): give fields in braces, such as "
            "'{title}\\n\\n{text}', and write other braces twice"
        ) from None
    if not any(field for _, field in parts) or any(field == "" for _, field in parts):
        raise ValueError(
            f"{flag} {template!r} names no field: give fields in braces, such as "
            "'{title}\\n\\n{text}'"
        )
    return parts


def _value(record: object, field: str) -> object:
    """The value of a field. KeyError, IndexError or ValueError if there is none."""
    if isinstance(record, Mapping) and field in record:
        return record[field]
    for name in field.split("."):
        if isinstance(record, list):
            record = record[int(name)]
        elif isinstance(record, Mapping):
            record = record[name]
        else:
            raise KeyError(name)
    return record


def _describe(record: object) -> str:
    """The first fields of an object, or the type of another value."""
    if not isinstance(record, Mapping):
        return type(record).__name__
    return ", ".join(list(record)[:8])
