"""Rows of a table, as a list of dicts that notebooks show and data frames read."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any, overload

from slimx.errors import counted
from slimx.json_types import Json

SHOWN = 40
"""Maximum number of rows that a notebook shows, half of them from the end."""

NAMED = 8
"""Maximum number of columns that the text of a table names."""


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
        columns = self.columns
        names = ", ".join(columns[:NAMED]) + (", ..." if len(columns) > NAMED else "")
        return f"{counted(len(self), 'row')}, {counted(len(columns), 'column')}: {names}"

    def _check(self, names: Iterable[str]) -> None:
        """Raises KeyError for a column that no row has."""
        columns = self.columns
        for name in names:
            if name not in columns:
                raise KeyError(f"{name!r} is not a column; the columns are {', '.join(columns)}")

    def _repr_html_(self) -> str:
        """Returns the table as HTML, with `SHOWN` rows at most."""
        columns = self.columns
        shown: list[Json | None] = [*self]
        if len(self) > SHOWN:
            shown = [*self[: SHOWN // 2], None, *self[-SHOWN // 2 :]]
        head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
        lines = []
        for row in shown:
            cells = f'<td colspan="{len(columns)}">{counted(len(self) - SHOWN, "more row")}</td>'
            if row is not None:
                cells = "".join(f"<td>{html.escape(_text(row.get(name)))}</td>" for name in columns)
            lines.append(f"<tr>{cells}</tr>")
        return (
            f'<div style="overflow: auto; max-height: 30em"><table><thead><tr>{head}</tr></thead>'
            f"<tbody>{''.join(lines)}</tbody></table></div>"
        )


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
