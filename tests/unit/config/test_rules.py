"""One table of rules: each is asked when all that it needs is known, and never twice."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from slimx.config.rule import FACTS, all_rules, broken, refuse, rule
from slimx.config.schema import CHECKED, Config
from slimx.config.sections.general import Schedule, Track
from slimx.config.sections.trainer import Trainer
from slimx.errors import SlimxError
from slimx.extras.watch.rules import has_trackers
from slimx.rules.trainer import has_muon
from tests.refusals import invalid, refused


@rule("test.small", "steps")
def small(steps: int) -> Iterator[str]:
    if steps > 2:
        yield f"{steps} steps are too many"


@rule("test.machine", "machine")
def raises(steps: int, machine: str) -> Iterator[str | tuple[str, str]]:
    yield "disk", f"{steps} steps on {machine}"
    raise SlimxError("the machine is gone", code="machine.gone")


def codes_and_keys(problems: list[SlimxError]) -> list[tuple[str, str]]:
    return [(problem.code, problem.about) for problem in problems]


def test_a_rule_is_evaluated_once_when_its_facts_are_known() -> None:
    facts = {"steps": 3}
    assert codes_and_keys(broken([small, raises], facts)) == [("test.small", "steps")]
    later = facts | {"machine": "m"}
    assert codes_and_keys(broken([small, raises], later, before=facts)) == [
        ("test.machine", "disk"),
        ("machine.gone", "machine"),
    ]


def test_problems_are_refused_together_under_the_first_ones_code() -> None:
    refuse([])
    problems = broken([small, raises], {"steps": 3, "machine": "m"})
    with refused("test.small", about="steps") as caught:
        refuse(problems, "run.yaml: ")
    assert caught.value.problems == tuple(problems)
    assert all(str(problem) in str(caught.value) for problem in problems)


def test_rules_have_unique_codes_and_need_only_known_facts() -> None:
    rules = all_rules()
    codes = [entry.code for entry in rules if not entry.code.startswith("unproven")]  # of which an extra has its table
    assert len({*codes}) == len(codes)
    known = {*FACTS, *Config.model_fields, "served"}
    assert all(entry.facts <= known for entry in rules)


@pytest.mark.parametrize("left_out", ["served", "trainer", "sizes"])
def test_a_fact_that_a_stage_leaves_out_is_an_error(left_out: str) -> None:
    """A stage lacks inputs, such as the machine, but never a part of the configuration, or of an input that it has."""
    config = Config(run={"dir": "r"}, model={"path": "m"}, rollout={"prompts": "p"})
    facts = {**config.facts, "spec": object(), "sizes": object()}

    @rule("test.whole", "model")
    def whole(served: object, trainer: object, sizes: object) -> Iterator[str]:
        yield "all facts are here"

    @rule("test.machine", "model")
    def elsewhere(served: object, machine: object) -> Iterator[str]:
        yield "the machine is here"

    assert [problem.code for problem in broken([whole, elsewhere], facts)] == ["test.whole"]
    del facts[left_out]
    with pytest.raises(KeyError, match=left_out):
        broken([whole, elsewhere], facts)


def test_loading_a_configuration_evaluates_the_rules_of_all_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the configuration suffices, also those of extras; in a process that gets a checked one, none."""

    @rule("test.steps", "schedule.steps")
    def small_steps(schedule: Schedule) -> Iterator[str]:
        if schedule.steps > 2:
            yield "these are too many"

    module = ModuleType(__name__)
    module.small_steps = small_steps
    monkeypatch.setattr("slimx.config.rule.entry_points.load_all", {"slimx.rules": {"test": module}}.__getitem__)
    values = {"run": {"dir": "r"}, "model": {"path": "m"}, "rollout": {"prompts": "p"}, "schedule": {"steps": 3}}
    all_rules.cache_clear()
    try:
        with invalid("test.steps", about="schedule.steps"):
            Config.model_validate(values)
        assert Config.model_validate(values, context=CHECKED).schedule.steps == 3
    finally:
        all_rules.cache_clear()


def test_loading_a_configuration_imports_nothing_slow() -> None:
    """Rules of models and machines are in the same modules."""
    program = (
        "import sys, slimx.config.schema as schema;"
        "schema.Config(run={'dir': 'r'}, model={'path': 'm'}, rollout={'prompts': 'p'});"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = {*done.stdout.split()}
    assert "slimx.rules.layout" in loaded and "slimx.extras.planner.rules.memory" in loaded
    assert not loaded & {"numpy", "torch", "megatron", "sglang", "transformers", "ray", "slimx.models.families"}


def test_an_already_checked_configuration_skips_the_rules() -> None:
    """Ranks of trainers get one, and have other things to import."""
    program = (
        "import pickle, sys, slimx.config.schema as schema;"
        "values = {'run': {'dir': 'r'}, 'model': {'path': 'm'}, 'rollout': {'prompts': 'p'}};"
        "config = schema.Config.model_validate(values, context=schema.CHECKED);"
        "pickle.loads(pickle.dumps(config));"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "slimx.rules" not in done.stdout.split()


def test_a_tracker_without_its_package_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"wandb": None, "tensorboard": object(), "mlflow": None}
    monkeypatch.setattr("importlib.util.find_spec", found.__getitem__)
    facts = {"track": Track(wandb=True, mlflow="http://m:5000"), "local_device": "cpu"}
    problems = [(problem.code, problem.about) for problem in broken([has_trackers], facts)]
    assert problems == [("track.package", "track.wandb"), ("track.package", "track.mlflow")]
    assert broken([has_trackers], facts | {"track": Track()}) == []


def test_muon_without_its_package_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", {"emerging_optimizers": None}.__getitem__)
    trainer = Trainer(distributed_optimizer=False, optimizer={"kind": "muon"})
    (problem,) = broken([has_muon], {"trainer": trainer, "local_device": "cpu"})
    assert (problem.code, problem.about) == ("muon.package", "trainer.optimizer.kind")
    assert broken([has_muon], {"trainer": Trainer(), "local_device": "cpu"}) == []
