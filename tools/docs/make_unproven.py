"""Writes docs/support.md's table of combinations that were never proven, from slimx/rules/unproven.py.

    python -m tools.docs.make_unproven

A unit test compares the section with the tables.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from slimx import entry_points
from slimx.rules import unproven
from slimx.rules.unproven import layer_tables

PAGE = Path(__file__).parents[2] / "docs" / "support.md"
TITLE = "## Never proven together"
HEAD = """

`python -m tools.docs.make_unproven` generates this section from `slimx/rules/unproven.py` and the corresponding tables
of extras. A configuration that combines a feature of the first column with one of the second column in the same row is
refused before the run starts (codes `unproven`, `unproven.architecture`, `unproven.layers`). A key without a value
stands for every value except its default. A key of `rollout.engines` counts if any engine group of the policy has such
a value.
"""


def section() -> str:
    """Returns the whole section, with its title."""
    return f"{TITLE}{HEAD}{''.join(_lines())}"


def _lines() -> Iterator[str]:
    yield "\n| feature | features that were never tested with it |\n| --- | --- |\n"
    for feature, entries in _rows("UNPROVEN"):
        yield f"| {_cell(feature)} | {', '.join(map(_cell, entries))} |\n"
    for kind, entries in layer_tables().items():
        yield f"| layers: {kind} | {', '.join(map(_cell, entries))} |\n"
    yield "\n| feature | architectures that it was tested with |\n| --- | --- |\n"
    for feature, architectures in _rows("ARCHITECTURES"):
        yield f"| {_cell(feature)} | {', '.join(architectures)} |\n"


def _rows(table: str) -> Iterator[tuple[str, Sequence[str]]]:
    """Yields the rows of the tables called `table`, those of the core first."""
    modules = [module for module in entry_points.load_all("slimx.rules").values() if module is not unproven]
    return chain.from_iterable(vars(module).get(table, {}).items() for module in (unproven, *modules))


def _cell(entry: str) -> str:
    key, _, words = re.sub(r"(megatron|sglang)\.", r"\1`: `", entry).partition(" (")
    return f"`{key}` ({words}" if words else f"`{key}`"


def replaced(text: str) -> str:
    """Returns the page `text` with the section regenerated."""
    text, found = re.subn(rf"{TITLE}\n.*?(?=\n## |\Z)", lambda _: section(), text, flags=re.DOTALL)
    assert found == 1, PAGE
    return text


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    PAGE.write_text(replaced(PAGE.read_text()))
