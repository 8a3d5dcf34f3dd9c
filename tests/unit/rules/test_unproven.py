"""The table of combinations that were never proven: its rows are refused, and its keys are in the schema."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest

from slimx import entry_points
from slimx.config.rule import all_rules, broken
from slimx.config.schema import Config
from slimx.config.sections.critic import Critic
from slimx.config.sections.engines import ServedEngines
from slimx.rules.unproven import CONDITIONS, is_set, key_of, layer_tables

MODULES = entry_points.load_all("slimx.rules").values()
UNPROVEN, ARCHITECTURES = (
    [*chain.from_iterable(vars(module).get(table, {}).items() for module in MODULES)]
    for table in ("UNPROVEN", "ARCHITECTURES")
)
ENTRIES = {
    *chain.from_iterable((feature, *entries) for feature, entries in UNPROVEN),
    *chain.from_iterable(layer_tables().values()),
    *(feature for feature, _ in ARCHITECTURES),
}
PLAIN = {"run": {"dir": "r"}, "model": {"path": "m"}, "rollout": {"prompts": "p"}}
FROZEN = {"name": "judge", "frozen": True, "model": "j", "tensor": 2}
DICTIONARIES = ("megatron", "sglang")


def sections(**changes: Any) -> dict[str, Any]:
    return Config.model_validate(PLAIN | changes).facts


def having(facts: dict[str, Any], entry: str) -> dict[str, Any]:
    """Sections with the key of `entry` at its value, or at one that is not its default."""
    key, _, value = entry.partition("=")
    section, *names = key.split(".")
    if not names:
        return facts | {section: Critic()}
    changed = {"false": False}.get(value, value or "another")
    facts = facts | {section: _changed(facts[section] or Critic(), names, changed)}
    return facts | {"served": ServedEngines(facts["rollout"].engines)}


def _changed(owner: Any, names: list[str], value: Any) -> Any:
    name, *rest = names
    if isinstance(owner, tuple):
        return tuple(_changed(group, names, value) for group in owner)
    if isinstance(owner, dict):
        return owner | {name: value}
    return owner.model_copy(update={name: _changed(getattr(owner, name), rest, value) if rest else value})


def rows() -> Iterator[tuple[str, str]]:
    """Pairs of the table whose values need no condition."""
    for feature, entries in UNPROVEN:
        yield from ((feature, entry) for entry in entries if not {feature, entry} & CONDITIONS.keys())


@pytest.mark.parametrize("entry", sorted(ENTRIES))
def test_every_entry_is_a_key_of_the_schema_and_is_not_set_by_default(entry: str) -> None:
    model, names = Config, key_of(entry).split(".")
    for name in names:
        field = model.model_fields[name]
        if name in DICTIONARIES or name == names[-1]:
            break
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        model = next(kind for kind in kinds if hasattr(kind, "model_fields"))
    assert not is_set(entry, sections())


@pytest.mark.parametrize(("feature", "entry"), [*rows()])
def test_every_row_is_refused(feature: str, entry: str) -> None:
    facts = having(having(sections(), feature), entry)
    rules = [rule for rule in all_rules() if rule.code == "unproven"]
    assert key_of(entry) in [problem.about for problem in broken(rules, facts)]
    assert broken(rules, having(sections(), feature)) == []


def test_conditions_are_those_of_the_table() -> None:
    assert {entry for entry in ENTRIES if "(" in entry} == CONDITIONS.keys()


@pytest.mark.parametrize(
    ("entry", "changes", "found"),
    [
        ("trainer.lora", {"trainer": {"lora": {"rank": 1, "alpha": 1}}}, True),
        ("trainer.megatron.mtp_num_layers", {"trainer": {"megatron": {"mtp_num_layers": 0}}}, False),
        ("trainer.megatron.mtp_num_layers", {"trainer": {"megatron": {"mtp_num_layers": 1}}}, True),
        ("trainer.distributed_optimizer", {"trainer": {"distributed_optimizer": False}}, True),
        ("trainer.overlap_grad_reduce=false", {"trainer": {"overlap_grad_reduce": True}}, False),
        ("trainer.overlap_grad_reduce=false", {"trainer": {"overlap_grad_reduce": False}}, True),
        ("publish.encoding=local", {"publish": {"encoding": "hf"}}, False),
        ("critic.optimizer.kind", {}, False),
        ("rollout.engines.tensor", {"rollout": {"engines": [{"name": "a"}, {"name": "b", "tensor": 2}]}}, True),
        ("rollout.engines.tensor", {"rollout": {"engines": [{"name": "b"}, FROZEN]}}, False),
    ],
)
def test_a_key_is_set_where_it_differs_from_its_default_or_has_the_value(
    entry: str, changes: dict[str, Any], found: bool
) -> None:
    changes = {name: PLAIN.get(name, {}) | section for name, section in changes.items()}
    assert is_set(entry, sections(**changes)) == found
