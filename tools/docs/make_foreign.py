"""Write the tables at the end of docs/guides/coming-from.md: other programs' names, and the keys that say the same.

    python -m tools.docs.make_foreign

A unit test compares the page with slimx/config/foreign.py.
"""

from __future__ import annotations

from pathlib import Path

from slimx.config.foreign import MEGATRON, SLIME, TRL, VERL

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "coming-from.md"
TITLE = "## Every name\n"
HEAD = """
These tables are made from `slimx/config/foreign.py` by `python -m tools.docs.make_foreign`. `slimx train` and
`slimx plan` answer each of these names with its key, on the command line and in the file. A flag that is called as its
key is, such as `--lr` or `--seed`, is answered too, and left out here. `[]` is an entry of a list. Where the last
column is empty, the value stays as it was.
"""


def tables() -> str:
    """The tables of all programs, with their headings."""
    parts = [TITLE, HEAD]
    for program, names, dashes in (
        ("slime", SLIME, True),
        ("Megatron-LM, also in scripts of slime", MEGATRON, True),
        ("verl", VERL, False),
        ("TRL", TRL, False),
    ):
        parts.append(f"\n### {program}\n\n| name | key | value |\n| --- | --- | --- |\n")
        parts += [_row(f"--{name.replace('_', '-')}" if dashes else name, told) for name, told in names.items()]
    return "".join(parts)


def page() -> str:
    """The whole page: what is written by hand, and the tables."""
    written, _, _ = PAGE.read_text().partition(TITLE)
    return written + tables()


def _row(name: str, told: str) -> str:
    key, _, note = told.partition(" ")
    return f"| `{name}` | `{key.replace('.*', '[]')}` | {note} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
