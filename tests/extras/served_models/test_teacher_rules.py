"""Teachers that engines serve fit the policy."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from slimx.config.rule import broken, rules_in
from slimx.config.sections.algorithm import Algorithm
from slimx.data.records import Prompt
from slimx.extras.served_models import rules
from slimx.models.families import read_model

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("policy")
    runpy.run_path(str(ROOT / "tools/quickstart/make_model.py"))["make_model"](out, seed=1)
    return out


@pytest.mark.parametrize(("top", "fits"), [(128, True), (129, False)])
def test_more_likeliest_tokens_than_the_vocabulary_has_are_refused(policy, top, fits):
    algorithm = Algorithm(name="distillation", teacher_engine="wise", teacher_top_k=top, teacher_kl_coef=1.0)
    problems = broken(rules_in(rules), {"spec": read_model(str(policy)), "algorithm": algorithm})
    assert [(each.code, each.about) for each in problems] == [("teacher.top_k", "algorithm.teacher_top_k")] * (not fits)


@pytest.mark.parametrize(
    ("dataset", "codes"), [("sums", []), ("knots", ["teacher.prompt"])], ids=["taught", "no teacher"]
)
def test_a_prompt_without_a_teacher_is_refused(dataset, codes):
    algorithm = Algorithm(name="distillation", teacher_engines={"sums": "wise"})
    prompts = [Prompt(id=name, token_ids=[1], metadata={"dataset": name}) for name in ("sums", dataset)]
    problems = broken(rules_in(rules), {"algorithm": algorithm, "prompts": prompts})
    assert [problem.code for problem in problems] == codes
