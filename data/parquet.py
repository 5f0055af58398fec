"""Records of a parquet file, through pyarrow (an optional extra), a few at a time."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from data.fields import FieldError, TextField

# Rows that are in memory at once. So few, because the size of a row is not known before it is
# read: a dictionary of some KiB may stand for GiB. Besides the rows, pyarrow holds a page of the
# file, expanded.
ROWS = 8
BUFFER = 1 << 20  # compressed bytes of a column that are read ahead


class BadParquet(ValueError):
    """A file that pyarrow cannot read."""


def records(file: Path, fields: Sequence[TextField]) -> Iterator[dict | FieldError]:
    """Each row with the columns that the fields are in, or what is wrong with it.

    Raises FieldError if the table lacks a column, BadParquet if the file cannot be read.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        # no `pre_buffer`: it would read whole row groups
        table = parquet.ParquetFile(file, pre_buffer=False, buffer_size=BUFFER)
        names = table.schema_arrow.names
        columns = {field.column(names) for field in fields}
        for batch in table.iter_batches(ROWS, columns=sorted(columns), use_threads=False):
            for row in range(batch.num_rows):
                yield _record(batch.slice(row, 1))
    except (pyarrow.ArrowException, OSError) as error:
        raise BadParquet(" ".join(str(error).split())[:200]) from None


def _record(row) -> dict | FieldError:
    try:
        [record] = row.to_pylist()
    except UnicodeDecodeError as error:
        return FieldError(f"a byte 0x{error.object[error.start]:02x} is not UTF-8")
    return record
