"""Texts in a column of a Parquet file. Needs the extra `parquet`."""

import io
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from heinsen_jax.errors import UserError

ROWS = 1024  # rows that are decoded in one call


def read_texts(file: io.BufferedReader, name: str, column: str) -> Iterator[str]:
    """Stream the texts of a column, row group by row group.

    Args:
      file: the content, read only where it is needed.
      name: name of the file, for messages.
      column: name of the column, of type string.

    Raises:
      UserError: the file is damaged, or a row of the column has no text.
    """
    row = 0
    try:
        _check_column(pq.read_schema(file), name, column)
        # As a dictionary, a batch with one long text in many rows holds it once.
        content = pq.ParquetFile(file, page_checksum_verification=True, read_dictionary=[column])
        for batch in content.iter_batches(ROWS, columns=[column]):
            for value in batch.column(0):
                row += 1
                text = value.as_py()
                if text is None:
                    raise UserError(
                        f"{name}, row {row}: column {column!r} has no text; remove the row"
                    )
                yield text
    except UnicodeDecodeError:
        raise UserError(
            f"{name}, row {row}: column {column!r} is not UTF-8 text; fix the row"
        ) from None
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # a failed read
            raise
        raise UserError(f"{name} is damaged ({error}); get the file again") from error


def _check_column(schema: pa.Schema, name: str, column: str) -> None:
    texts = [field.name for field in schema if _is_text(field.type)]
    known = f"its columns of texts are {', '.join(texts)}" if texts else "it has none of texts"
    if column not in schema.names:
        raise UserError(
            f"{name} has no column {column!r}: {known}, of {', '.join(schema.names)}; choose one "
            "with text_column"
        )
    if column not in texts:
        kind = schema.field(column).type
        raise UserError(
            f"{name}: column {column!r} is {kind}, not text ({known}); choose one with text_column"
        )


def _is_text(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return _is_text(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    tests = pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view
    return any(is_kind(kind) for is_kind in tests)
