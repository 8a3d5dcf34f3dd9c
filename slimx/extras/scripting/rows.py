"""Rows of a table, as a list of dicts that scripts print, notebooks show and data frames read."""

from __future__ import annotations

import difflib
import html
from collections.abc import Iterable
from typing import Any, overload

from slimx.errors import counted
from slimx.json_types import Json
from slimx.observability.live.safe_text import one_line

SHOWN = 40
"""Maximum number of rows that are shown, half of them from the end."""

WIDTH = 120
"""Maximum number of characters in a line of a table's text."""
CELL = 40
"""Maximum number of characters of a value in a table's text."""


class Rows(list[Json]):
    """Rows of a table. `rows[0]` is the first row, `rows["step"]` the values of a column (None where a row lacks it),
    and `rows[["step", "reward/mean"]]` the table with these columns. `pandas.DataFrame(rows)` makes a data frame."""

    @property
    def columns(self) -> list[str]:
        """Names of the columns, in the order in which the rows introduce them."""
        return list(dict.fromkeys(name for row in self for name in row))

    @overload  # type: ignore[override]
    def __getitem__(self, key: int) -> Json: ...
    @overload
    def __getitem__(self, key: str) -> list[Any]: ...
    @overload
    def __getitem__(self, key: slice | list[str]) -> Rows: ...

    def __getitem__(self, key: int | str | slice | list[str]) -> Json | list[Any] | Rows:
        if isinstance(key, slice):
            return Rows(super().__getitem__(key))
        if isinstance(key, str):
            self._check([key])
            return [row.get(key) for row in self]
        if isinstance(key, list):
            self._check(key)
            return Rows({name: row.get(name) for name in key} for row in self)
        return super().__getitem__(key)

    def __repr__(self) -> str:
        """Returns the table as text: as many columns as fit into `WIDTH` characters, and at most `SHOWN` rows."""
        columns = self.columns
        shown = self._shown()
        lines = [""] * (len(shown) + 1)
        written = 0
        for name in columns:
            cells = [name, *("..." if row is None else _cut(_text(row.get(name))) for row in shown)]
            width = max(map(len, cells)) + 2 * bool(written)
            if written and len(lines[0]) + width > WIDTH:
                break
            written += 1
            lines = [line + cell.rjust(width) for line, cell in zip(lines, cells, strict=True)]
        last = f"{counted(len(self), 'row')}, {counted(len(columns), 'column')}"
        if not columns:
            return last
        if written < len(columns):
            last += f"; further columns: {_cut(', '.join(columns[written:]), WIDTH)}"
        return "\n".join([*lines, last])

    def _check(self, names: Iterable[str]) -> None:
        """Raises KeyError for a column that no row has."""
        columns = self.columns
        for name in names:
            if name not in columns:
                near = difflib.get_close_matches(name, columns, n=3)
                hint = f"did you mean {' or '.join(near)}?" if near else f"the columns are {', '.join(columns)}"
                raise KeyError(f"{name!r} is not a column; {hint}")

    def _shown(self) -> list[Json | None]:
        """Returns the rows to show, `SHOWN` at most, with None in place of those left out."""
        if len(self) <= SHOWN:
            return [*self]
        return [*self[: SHOWN // 2], None, *self[-SHOWN // 2 :]]

    def _repr_html_(self) -> str:
        """Returns the table as HTML, with `SHOWN` rows at most."""
        columns = self.columns
        head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
        lines = []
        for row in self._shown():
            cells = f'<td colspan="{len(columns)}">{counted(len(self) - SHOWN, "more row")}</td>'
            if row is not None:
                cells = "".join(f"<td>{html.escape(_text(row.get(name)))}</td>" for name in columns)
            lines.append(f"<tr>{cells}</tr>")
        return (
            f'<div style="overflow: auto; max-height: 30em"><table><thead><tr>{head}</tr></thead>'
            f"<tbody>{''.join(lines)}</tbody></table></div>"
        )


def _cut(text: str, length: int = CELL) -> str:
    """Returns `text` on one line, with at most `length` characters."""
    text = one_line(text)
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if 1e6 <= abs(value) < 1e15 else f"{value:.6g}"  # such as a time in seconds
    return str(value)
