"""Rows of parquet and Arrow files, without nulls and NaNs that only pad the columnar format.

pyarrow is imported on use.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slimx.errors import SlimxError, raised
from slimx.json_types import Json


def table_rows(path: Path, *, stream: bool) -> Iterator[tuple[str, int, Json]]:
    """Yields the rows of a parquet file or an Arrow `stream`, each with location and number as `read_rows` does.

    A struct of a table has the fields of all rows, null if a row lacks them: within lists and in column `template`
    such keys are left out. A struct that is a column itself keeps them, since fields name them by dotted paths. NaN is
    null, as pandas writes it. Raises SlimxError for a file that cannot be read to its end."""
    try:
        import pyarrow
    except ImportError as error:
        raise SlimxError(
            f"{path}: parquet and Arrow files are read by pyarrow, which is not installed; pip install pyarrow",
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
            f"{path}: cannot be read after row {number} ({raised(error)}); is it complete?",
            code="prompts.unreadable",
            about=str(path),
        ) from error


def _unpadded(value: Any, kind: Any, *, is_column: bool = False) -> Any:
    """Returns a value of the Arrow type `kind` without null keys; a struct that is a column keeps them."""
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
    """Returns True for `default: null` of a JSON schema: a field that is null in all rows is not padding."""
    import pyarrow

    return field.name == "default" and pyarrow.types.is_null(field.type)


def _parquet(path: Path) -> Iterator[Any]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        yield from file.iter_batches(batch_size=1024)


def _arrow(path: Path) -> Iterator[Any]:
    """Yields batches of the stream format, in which the `datasets` package saves."""
    import pyarrow

    with pyarrow.OSFile(str(path)) as file, pyarrow.ipc.open_stream(file) as reader:
        yield from reader
