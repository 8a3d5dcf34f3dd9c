"""Rows of parquet and Arrow files, without the nulls and NaNs that only pad the columnar format.

pyarrow is imported only when it is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slimx.errors import SlimxError, raised
from slimx.json_types import Json


def table_rows(path: Path, *, stream: bool) -> Iterator[tuple[str, int, Json]]:
    """Yields the rows of a parquet file, or, with `stream`, of an Arrow file in the stream format: for each row its
    location, number and values, as `slimx.data.prompts.rows.read_rows` does.

    In such a table, a struct has the fields of all rows, which are null where a row lacks them. Within lists and in the
    column `template`, null fields are omitted. A struct that is a column itself keeps them, because rollout.fields
    names them by dotted paths. NaN becomes None, because pandas writes null as NaN. Raises SlimxError for a file that
    cannot be read to its end.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise SlimxError(
            f"{path}: reading parquet and Arrow files needs pyarrow, which cannot be imported ({error}); run pip "
            "install pyarrow",
        ) from error
    number = 0
    try:
        batches = _arrow(path) if stream else _parquet(path)
        for batch in batches:
            schema = batch.schema
            for row in batch.to_pylist():
                number += 1
                values = {}
                for name, value in row.items():
                    values[name] = _unpadded(value, schema.field(name).type, is_column=name != "template")
                yield f"{path}, row {number}", number, values
    except (pyarrow.ArrowException, OSError) as error:
        raise SlimxError(
            f"{path}: the file cannot be read after row {number} ({raised(error)}); replace the file with an "
            "intact copy",
            code="prompts.unreadable",
            about=str(path),
        ) from error


def _unpadded(value: Any, kind: Any, *, is_column: bool = False) -> Any:
    """Returns a value of the Arrow type `kind` without the null fields of its structs. With `is_column`, only structs
    within lists lose their null fields."""
    if isinstance(value, dict):
        out = {}
        for field in kind:
            entry = value[field.name]
            if is_column or entry is not None or _is_null_default(field):
                out[field.name] = _unpadded(entry, field.type, is_column=is_column)
        return out
    if isinstance(value, list) and hasattr(kind, "value_type"):
        return [_unpadded(entry, kind.value_type) for entry in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _is_null_default(field: Any) -> bool:
    """Returns True if an Arrow field is `default: null` of a JSON schema, which is null in all rows but is not
    padding."""
    import pyarrow

    return field.name == "default" and pyarrow.types.is_null(field.type)


def _parquet(path: Path) -> Iterator[Any]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        binary = "binary" in str(file.schema_arrow)  # images, of which a thousand may need gigabytes
        yield from file.iter_batches(batch_size=32 if binary else 1024)


def _arrow(path: Path) -> Iterator[Any]:
    """Yields the record batches of a file in Arrow's stream format, which the `datasets` package writes."""
    import pyarrow

    with pyarrow.OSFile(str(path)) as file, pyarrow.ipc.open_stream(file) as reader:
        yield from reader
