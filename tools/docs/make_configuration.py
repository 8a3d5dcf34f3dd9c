"""Writes docs/configuration.md from the configuration's schema.

    python tools/docs/make_configuration.py

A unit test compares the page with the schema, so run this after every change of a section in slimx/config/.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from slimx.config.foreign_names import ALIASES
from slimx.config.rule import FACTS, Rule, all_rules
from slimx.extras.keys.catalog import Key, headings

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
HEAD = """\
# Configuration

This page is made from `slimx/config/` by `python tools/docs/make_configuration.py`.

A run is one YAML file of sections. `slimx train FILE section.key=value ...` overrides single keys, in the order given.
A list is overridden as a whole, `'rollout.engines=[{name: actor, count: 2}]'`, or in one entry,
`rollout.engines.0.count=2`, or extended, `'rollout.engines+={name: judge, model: models/judge}'`; `null` or `{}`
empties a mapping, `null` or `[]` a list. In a path, `~` is the home directory. An unknown key is refused with the
nearest known one, and a key or flag of slime, Megatron-LM, verl or TRL with the key that says the same here. Keys are
checked against each other, and against checkpoint, prompts and hooks, before anything starts; `slimx doctor FILE` does
the same checks and starts nothing.

`slimx init` writes such a file for a model, prompts and a machine. `slimx keys WORD` searches this page, and the names
of other frameworks, from a terminal; a shell completes keys after `slimx train FILE `
([completion](operations.md#completion-in-a-shell)). `configs/moe/` holds complete examples.
"""


def page() -> str:
    """Returns the whole page."""
    parts = [HEAD]
    for heading in headings():
        path = heading.path.replace(".*", "")
        text = heading.text
        if heading.like:
            text += f" {'Each entry' if heading.path.endswith('*') else 'It'} has the keys of `{heading.like}`."
        elif heading.path.endswith("*") and "." in path:
            text += " A list; each entry has these keys."
        text = text.replace(".*", "").strip()
        parts.append(f"\n{'###' if '.' in path else '##'} {path}\n" + (f"\n{text}\n" if text else ""))
        parts += _table(heading.keys)
    return "".join([*parts, *_other_names(), *_rules()])


def _other_names() -> Iterator[str]:
    yield "\n## Other names\n\nThese name the same keys. A key that is given under two names is refused.\n"
    yield "\n| section | name | key |\n| --- | --- | --- |\n"
    for old, name in ALIASES.items():
        section, _, last = old.rpartition(".")
        yield f"| `{section.removesuffix('.*')}` | `{last}` | `{name}` |\n"


def _rules() -> Iterator[str]:
    yield "\n## Rules\n\nEach rule is asked as soon as what it needs is at hand: rules that need only the\n"
    yield "configuration, when it is loaded; those that also need the device, the machine, the model or the plan, by\n"
    yield "`slimx plan`; all except those of the machine and the plan by `slimx doctor` and at the start.\n"
    yield "\n| code | about | needs |\n| --- | --- | --- |\n"
    for rule in all_rules():
        yield f"| {rule.code} | {rule.about} | {_needs(rule)} |\n"


def _needs(rule: Rule) -> str:
    """Returns the most expensive input that the rule needs."""
    return next((FACTS[fact] for fact in reversed(FACTS) if fact in rule.facts), "configuration")


def _table(keys: Sequence[Key]) -> Iterator[str]:
    """Yields the rows of a section's keys, with a column of kinds if keys belong to kinds of an objective."""
    kinds = any(key.kinds for key in keys)
    names = ["key", "type", "default", *(["of the kinds"] if kinds else []), "description"]
    if keys:
        yield f"\n| {' | '.join(names)} |\n|{' --- |' * len(names)}\n"
    for key in keys:
        owners = [kind if kind == "all" else f"`{kind}`" for kind in key.kinds]
        cells = [f"`{key.name}`", key.type, key.default, *([", ".join(owners)] if kinds else []), key.text]
        yield f"| {' | '.join(cell.replace('|', '\\|') for cell in cells)} |\n"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
    print(f"{PAGE}: {len(page().splitlines())} lines")
