"""Rows of a parquet file, through pyarrow (an optional extra), a few at a time."""

from collections.abc import Iterator
from typing import BinaryIO

from data.fields import FieldError, TextField

# Rows that are in memory at once. So few, because the size of a row is not known before it is
# read: a dictionary of some KiB may stand for GiB. Reading takes 1.1 us a row, and with 64 rows at
# once 0.2 (measured). Besides the rows, pyarrow holds a page of the file, expanded.
ROWS = 8
BUFFER = 1 << 20  # compressed bytes of a column that are read ahead


class BadParquet(ValueError):
    """A file that pyarrow cannot read."""


def texts(file: BinaryIO, field: TextField) -> Iterator[tuple[int, bytes | str | FieldError]]:
    """Each row's number from 1, and its text, as bytes where the encoding is not checked yet, or
    what is wrong with it.

    Raises FieldError if the table lacks the column, BadParquet if the file cannot be read.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        # no `pre_buffer`: it would read whole row groups
        table = parquet.ParquetFile(file, pre_buffer=False, buffer_size=BUFFER)
        columns = field.columns(table.schema_arrow.names)
        number = 0
        for batch in table.iter_batches(ROWS, columns=columns, use_threads=False):
            for text in _of_batch(batch, field, columns):
                number += 1
                yield number, text
    except (pyarrow.ArrowException, OSError) as error:
        raise BadParquet(" ".join(str(error).split())[:200]) from None


def _of_batch(batch, field: TextField, columns: list[str]) -> Iterator[bytes | str | FieldError]:
    """The text of each row of a batch."""
    import pyarrow

    if columns == [field.spelled]:
        column = batch.column(0)
        is_large = pyarrow.types.is_large_string(column.type)
        if is_large or pyarrow.types.is_string(column.type):
            binary = pyarrow.large_binary() if is_large else pyarrow.binary()
            for content in column.cast(binary).to_pylist():
                yield content or b""
            return

    for row in range(batch.num_rows):
        try:
            [record] = batch.slice(row, 1).to_pylist()
            yield field.text_of(record)
        except UnicodeDecodeError as error:
            yield FieldError(f"a byte 0x{error.object[error.start]:02x} is not UTF-8")
        except FieldError as error:
            yield error
