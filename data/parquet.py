"""Rows of a parquet file, through pyarrow (an optional extra), a few at a time."""

import itertools
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from data.fields import FieldError, TextField

# Rows that are in memory at once. So few, because the size of a row is not known before it is
# read: a dictionary of some KiB may stand for GiB. Reading takes 1.1 us a row, and with 64 rows at
# once 0.2 (measured). Besides the rows, pyarrow holds a page of the file, expanded.
ROWS = 8
BUFFER = 1 << 20  # compressed bytes of a column that are read ahead


class BadParquet(ValueError):
    """A file that pyarrow cannot read."""


Found = bytes | str | FieldError


def texts(file: BinaryIO, fields: Sequence[TextField]) -> Iterator[tuple[int, tuple[Found, ...]]]:
    """Each row's number from 1, and its text for each of the fields, as bytes where the encoding is
    not checked yet, or what is wrong with it.

    Raises FieldError if the table lacks a column, BadParquet if the file cannot be read.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        # no `pre_buffer`: it would read whole row groups
        table = parquet.ParquetFile(file, pre_buffer=False, buffer_size=BUFFER)
        columns = [field.columns(table.schema_arrow.names) for field in fields]
        every = list(dict.fromkeys(itertools.chain(*columns)))
        number = 0
        for batch in table.iter_batches(ROWS, columns=every, use_threads=False):
            found = [
                _of_batch(_select(batch, names), field, names)
                for field, names in zip(fields, columns, strict=True)
            ]
            for row in zip(*found, strict=True):
                number += 1
                yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        raise BadParquet(" ".join(str(error).split())[:200]) from None


def _select(batch, names: list[str]):
    """The batch with these columns only; of several with one name, the first."""
    found = batch.schema.names
    if set(found) == set(names):
        return batch
    return batch.select([found.index(name) for name in names])


def _of_batch(batch, field: TextField, columns: list[str]) -> Iterator[Found]:
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
