"""Writes the tables at the end of docs/guides/coming-from.md: other programs' names and the equivalent keys.

    python -m tools.docs.make_foreign

A unit test compares the page with slimx/extras/foreign/.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from slimx.extras.foreign.meaning import Meaning
from slimx.extras.foreign.megatron import MEGATRON
from slimx.extras.foreign.openrlhf import OPENRLHF
from slimx.extras.foreign.slime import SLIME
from slimx.extras.foreign.trl import TRL
from slimx.extras.foreign.verl import VERL

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "coming-from.md"
TITLE = "## Every name\n"
HEAD = """
`python -m tools.docs.make_foreign` generates these tables from `slimx/extras/foreign/`. If one of these names is on the
command line or in the configuration file, `slimx train` and `slimx plan` name the corresponding slimx key. They also
recognize flags with the same name as their key, such as `--lr` and `--seed`, which are not listed here. `[]` stands for
an entry of a list. If the value column is empty, the value stays the same. If the key column is empty, the value column
says why no key is needed, or names the closest alternative. A name that ends in `*` stands for all names that begin
with the part before it, and `{}` in a key stands for the rest of the name.
"""


def tables() -> str:
    """Returns the tables of all programs, with their headings."""
    parts = [TITLE, HEAD]
    for program, names, dashes in (
        ("slime", SLIME, True),
        ("Megatron-LM, also in scripts of slime", MEGATRON, True),
        ("verl", VERL, False),
        ("TRL", TRL, False),
        ("OpenRLHF", OPENRLHF, True),
    ):
        parts.append(f"\n### {program}\n\n| name | key | value |\n| --- | --- | --- |\n")
        parts += [_row(f"--{name.replace('_', '-')}" if dashes else name, entry) for name, entry in names.items()]
    return "".join(parts)


def page() -> str:
    """Returns the whole page: its hand-written part and the tables."""
    written, _, _ = PAGE.read_text().partition(TITLE)
    return written + tables()


def _row(name: str, entry: str | Meaning) -> str:
    found = Meaning(entry) if isinstance(entry, str) else entry
    keys = found.sets or ([found.key] if found.key else [])
    shown = ", ".join(f"`{key.replace('.*', '[]')}`" for key in keys)
    return f"| `{name}` | {shown} | {_value(found)} |\n"


def _value(found: Meaning) -> str:
    if found.note:
        return found.note
    if found.sets:
        return ", ".join(f"`{value}`" for value in found.sets.values())
    if {*found.values} == {"true"} and found.closed:
        return f"`{found.values['true']}`"
    parts = [
        f"`{value}` for `{there}`"
        for there, value in found.values.items()
        if value not in (there, "") and isinstance(value, str)
    ]
    parts += [f"`{there}`: {_meaning(value)}" for there, value in found.values.items() if isinstance(value, Meaning)]
    return "; ".join([*parts, *([f"the same value with the prefix `{found.prefix}`"] if found.prefix else [])])


def _meaning(found: Meaning) -> str:
    keys = ", ".join(f"`{key}={value}`" for key, value in found.sets.items()) or (
        f"`{found.key}`, " if found.key else ""
    )
    return keys + found.note


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    PAGE.write_text(page())
