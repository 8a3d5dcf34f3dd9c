"""The tables of docs/suite.md: the last runs of ring one, and the last result of each part of `make test-all`."""

from __future__ import annotations

from collections.abc import Sequence

from tools.rings.parts import NAMES
from tools.rings.results import RING_ONE, Result

RUNS = 10
"""Runs of ring one that the page keeps."""
RUN_HEAD = "| date | commit | load | order | result |"
PART_HEAD = "| part | date | commit | passed | failed | seconds |"
NEVER = "never"


def recorded(page: str, results: Sequence[Result]) -> str:
    """Returns the page with new results in its tables. Results that it already contains change nothing."""
    runs = {row[0]: row for row in rows(page, RUN_HEAD)}
    runs |= {result.date: _run_row(result) for result in results if result.run == RING_ONE}
    page = _replaced(page, RUN_HEAD, [runs[date] for date in sorted(runs)[-RUNS:]])
    parts = last_parts(page, results)
    return _replaced(page, PART_HEAD, [parts.get(name, [name, NEVER, "", "", "", ""]) for name in NAMES])


def last_parts(page: str, results: Sequence[Result]) -> dict[str, list[str]]:
    """Returns the newest row of each part that ever ran, from the page and `results`."""
    newest: dict[str, list[str]] = {}
    new = [_part_row(result) for result in results if result.run != RING_ONE]
    for row in [*rows(page, PART_HEAD), *new]:
        if row[1] != NEVER and (row[0] not in newest or newest[row[0]][1] <= row[1]):
            newest[row[0]] = row
    return newest


def rows(page: str, head: str) -> list[list[str]]:
    """Returns the cells of the table under `head`."""
    lines = page.splitlines()
    first = lines.index(head) + 2
    last = next((at for at in range(first, len(lines)) if not lines[at].startswith("|")), len(lines))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[first:last]]


def _replaced(page: str, head: str, cells: Sequence[Sequence[str]]) -> str:
    lines = page.splitlines()
    first = lines.index(head) + 2
    lines[first : first + len(rows(page, head))] = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join(lines) + "\n"


def _run_row(result: Result) -> list[str]:
    load = ", ".join(f"{average:.1f}" for average in result.load)
    outcome = f"{result.passed} passed, {result.failed} failed, {result.seconds} s on a machine of {result.factor}"
    return [result.date, result.commit, load, str(result.seed), outcome]


def _part_row(result: Result) -> list[str]:
    return [result.run, result.date, result.commit, *map(str, (result.passed, result.failed, result.seconds))]
