"""Teachers that engines serve fit the policy."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from slimx.config.rule import broken
from slimx.config.sections.algorithm import Algorithm
from slimx.config.sections.engines import Engines, ServedEngines
from slimx.data.chat.tokens import load_tokenizer
from slimx.data.records import Prompt
from slimx.errors import SlimxError
from slimx.extras.served_models import rules
from slimx.models.families import read_model
from tests.extras.served_models.test_served_teacher import ACTOR, SERVED, TEACHER
from tests.refusals import invalid
from tests.unit.rollout.rollout_stand import config_of, the_tokenizer

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("policy")
    runpy.run_path(str(ROOT / "slimx/extras/quickstart/make_model.py"))["make_model"](out, seed=1)
    return out


@pytest.mark.parametrize(("top", "fits"), [(128, True), (129, False)])
def test_more_likeliest_tokens_than_the_vocabulary_has_are_refused(policy, top, fits):
    algorithm = Algorithm(name="distillation", teacher_engine="wise", teacher_top_k=top, teacher_kl_coef=1.0)
    problems = broken([rules.within_vocabulary], {"spec": read_model(str(policy)), "algorithm": algorithm})
    expected = [] if fits else [("teacher.top_k", "algorithm.teacher_top_k")]
    assert [(problem.code, problem.about) for problem in problems] == expected


@pytest.mark.parametrize(
    ("dataset", "codes"), [("sums", []), ("knots", ["teacher.prompt"])], ids=["taught", "no teacher"]
)
def test_a_prompt_without_a_teacher_is_refused(dataset, codes):
    algorithm = Algorithm(name="distillation", teacher_engines={"sums": "wise"})
    prompts = [Prompt(id=name, token_ids=[1], metadata={"dataset": name}) for name in ("sums", dataset)]
    problems = broken([rules.taught], {"algorithm": algorithm, "prompts": prompts})
    assert [problem.code for problem in problems] == codes


@pytest.mark.parametrize(
    ("changes", "code", "named"),
    [
        ({"engines": [ACTOR]}, "algorithm.teacher_engine", "wise"),
        ({"engines": [ACTOR, TEACHER | {"name": "judge"}]}, "algorithm.teacher_engine", "judge"),
        ({"algorithm__teacher_engine": "actor"}, "algorithm.teacher_engine", "actor"),
        ({"sampling": {"temperature": 0.7}}, "algorithm.teacher_engine", "rollout.sampling.temperature=0.7"),
        ({"sampling": {"top_p": 0.9}}, "algorithm.teacher_engine", "rollout.sampling.top_p=0.9"),
        ({"sampling": {"top_k": 20}}, "algorithm.teacher_engine", "rollout.sampling.top_k=20"),
        ({"algorithm__teacher": "t"}, "algorithm.two_teachers", "algorithm.teacher "),
        ({"algorithm__name": "sft"}, "algorithm.unused", "algorithm.teacher_engine"),
    ],
)
def test_a_teacher_that_cannot_score_the_samples_is_refused(changes, code, named):
    config_of(**SERVED)
    with invalid(code, about="algorithm.teacher_engine") as caught:
        config_of(**{**SERVED, **changes})
    (error,) = caught.value.errors()
    assert named in error["msg"]


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Returns directories of the quickstart's tokenizer, and of one in which a token has another id."""
    same, other = (tmp_path_factory.mktemp(name) for name in ("same", "other"))
    the_tokenizer().save_pretrained(same)
    shutil.copytree(same, other, dirs_exist_ok=True)
    text = Tokenizer.from_file(str(same / "tokenizer.json")).to_str()
    swapped = text.replace('"7":', '"seven":')
    assert swapped != text
    (other / "tokenizer.json").write_text(swapped)
    return same, other


def test_a_teacher_with_another_vocabulary_is_refused_by_token(vocabularies):
    same, other = vocabularies
    tokenizer = load_tokenizer(same)

    def problems(model: Path) -> list[SlimxError]:
        facts = {
            "algorithm": Algorithm(name="distillation", teacher_engine="wise"),
            "served": ServedEngines((Engines(name="wise", frozen=True, model=str(model)),), ()),
            "tokenizer": tokenizer,
        }
        return broken([rules.same_vocabulary], facts)

    assert problems(same) == []
    (problem,) = problems(other)
    assert (problem.code, problem.about) == ("teacher.vocabulary", "algorithm.teacher_engine")
    assert str(other) in str(problem) and "'7'" in str(problem) and "None" in str(problem)
