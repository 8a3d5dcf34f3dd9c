"""One table of rules: each is asked when all that it needs is known, and never twice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slimx.config.rule import FACTS, NEEDS, broken, refuse, rule
from slimx.config.rules import RULES as LOADED
from slimx.config.schema import Config
from slimx.config.sections.run import Track
from slimx.config.sections.trainer import Trainer
from slimx.errors import SlimxError
from slimx.extras.planner.rules import PLAN_RULES as CHECKED
from slimx.extras.watch.rules import has_trackers
from slimx.preflight.checks.machine import has_muon
from tests.refusals import refused

EVERY = LOADED + CHECKED


@rule("test.small", about="steps")
def small(steps: int) -> Iterator[str]:
    if steps > 2:
        yield f"{steps} steps are too many"


@rule("test.machine", about="machine")
def raises(steps: int, machine: str) -> Iterator[str | tuple[str, str]]:
    yield "disk", f"{steps} steps on {machine}"
    raise SlimxError("the machine is gone", code="machine.gone")


def told(problems: list[SlimxError]) -> list[tuple[str, str]]:
    return [(problem.code, problem.about) for problem in problems]


def test_a_rule_is_asked_when_its_facts_are_known_and_not_again() -> None:
    facts = {"steps": 3}
    assert told(broken([small, raises], facts)) == [("test.small", "steps")]
    later = facts | {"machine": "m"}
    assert told(broken([small, raises], later, before=facts)) == [("test.machine", "disk"), ("machine.gone", "machine")]


def test_problems_are_refused_together_under_the_first_ones_code() -> None:
    refuse([])
    problems = broken([small, raises], {"steps": 3, "machine": "m"})
    with refused("test.small", about="steps") as caught:
        refuse(problems, "run.yaml: ")
    assert caught.value.problems == tuple(problems)
    assert all(str(problem) in str(caught.value) for problem in problems)


def test_rules_have_codes_of_their_own_and_need_nothing_unheard_of() -> None:
    assert len({each.code for each in EVERY}) == len(EVERY)
    assert {name for each in EVERY for name in each.facts} <= FACTS.keys() | Config.model_fields.keys()


@pytest.mark.parametrize("each", LOADED, ids=lambda each: each.code)
def test_rules_between_sections_are_asked_when_a_configuration_is_loaded(each) -> None:
    assert {*each.facts} <= {*Config.model_fields} and each.needs == NEEDS[0]


def test_a_tracker_without_its_package_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"wandb": None, "tensorboard": object(), "mlflow": None}
    monkeypatch.setattr("importlib.util.find_spec", found.__getitem__)
    facts = {"track": Track(wandb=True, mlflow="http://m:5000"), "local_device": "cpu"}
    asked = [(each.code, each.about) for each in broken([has_trackers], facts)]
    assert asked == [("track.package", "track.wandb"), ("track.package", "track.mlflow")]
    assert broken([has_trackers], facts | {"track": Track()}) == []


def test_muon_without_its_package_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", {"emerging_optimizers": None}.__getitem__)
    trainer = Trainer(distributed_optimizer=False, optimizer={"kind": "muon"})
    (told,) = broken([has_muon], {"trainer": trainer, "local_device": "cpu"})
    assert (told.code, told.about) == ("muon.package", "trainer.optimizer.kind")
    assert broken([has_muon], {"trainer": Trainer(), "local_device": "cpu"}) == []
