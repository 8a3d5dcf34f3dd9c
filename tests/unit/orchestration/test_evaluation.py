"""An evaluation's figures: means of all answers, unbiased pass@k, by set."""

from __future__ import annotations

import json
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest

from slimx.config.sections.eval import Eval
from slimx.data.records import Group
from slimx.observability.tracking.names import find
from slimx.orchestration.start.prompts import heldout_prompts
from slimx.orchestration.step.evaluation import answer_all, answers, eval_metrics, score
from slimx.rollout.flow.rollouts import GroupOutcome
from tests.extras.rewards.reward_stand import trajectory
from tests.refusals import invalid, refused
from tests.unit.rollout.rollout_stand import Stand, config_of, one, prompts, the_tokenizer


def test_pass_at_k_is_the_fraction_of_choices_with_a_right_answer():
    rewards = [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.5], [1.0, 1.0, 1.0, 1.0]]
    found = score({"": rewards}, 1.0, {"": (2, 4, 8)})
    for k in (2, 4):
        chosen = [[max(some) >= 1.0 for some in combinations(prompt, k)] for prompt in rewards]
        assert found[f"eval/pass@{k}"] == pytest.approx(np.mean([np.mean(values) for values in chosen]))
    assert found["eval/accuracy"] == pytest.approx(np.mean(rewards))
    assert found.keys() == {"eval/accuracy", "eval/pass@2", "eval/pass@4"}
    assert score({"": rewards}, 0.5, {"": (4,)})["eval/pass@4"] == 1.0


def test_one_answer_gives_the_accuracy_alone():
    assert score({"": [[1.0], [0.0]]}, 1.0, {"": Eval().ks}) == {"eval/accuracy": 0.5}


def test_named_sets_have_separate_figures():
    found = score(
        {"easy": [[1.0, 1.0]], "hard": [[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]]}, 1.0, {"easy": (2,), "hard": (2,)}
    )
    assert found["eval/accuracy"] == pytest.approx(3 / 8) and found["eval/pass@2"] == pytest.approx(2 / 4)
    assert found["eval/easy/accuracy"] == 1.0 and found["eval/hard/pass@2"] == pytest.approx(1 / 3)


def test_a_rollout_of_several_trajectories_is_one_answer():
    several = [trajectory() for _ in range(3)]
    for answer, rollout, reward in zip(several, ("a", "a", "b"), (1.0, 0.0, 1.0), strict=True):
        answer.rollout_id, answer.reward = rollout, reward
    assert answers(Group(id="g", prompt=prompts()[0], trajectories=several)) == [0.5, 1.0]


def test_a_failed_prompt_is_wrong_in_every_k():
    group = Group(id="g", prompt=prompts()[0], trajectories=[trajectory() for _ in range(3)])
    for number, answer in enumerate(group.trajectories):
        answer.rollout_id, answer.reward = str(number), float(number == 0)
    outcomes = [GroupOutcome(group), GroupOutcome(None, "generate failed", "detail")]
    options = Eval(prompts={"aime": "a", "gpqa": "g"}, samples=3, temperature=1.0, pass_at=(1, 3))
    found = eval_metrics(options, {"aime": prompts()[:1], "gpqa": prompts()[:1]}, outcomes)
    assert found["eval/aime/pass@1"] == pytest.approx(1 / 3) and found["eval/aime/pass@3"] == 1.0
    assert found["eval/gpqa/accuracy"] == found["eval/gpqa/pass@3"] == 0.0 and found["eval/failed"] == 1.0
    assert found["eval/accuracy"] == pytest.approx(1 / 6) and found["eval/pass@3"] == 0.5
    assert "eval/pass@2" not in found
    assert [name for name in found if find(name) is None] == []


def test_prompts_take_the_name_of_their_file_by_default(tmp_path):
    rows = [{"token_ids": [1], "answer": "A"}, {"token_ids": [2], "answer": "B", "metadata": {"dataset": "mine"}}]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = SimpleNamespace(vocab_size=100)
    named = heldout_prompts(config_of(eval__prompts={"gpqa": str(path)}), "gpqa", str(path), the_tokenizer(), spec)
    assert [prompt.metadata.get("dataset") for prompt in named] == ["gpqa", "mine"]
    alone = heldout_prompts(config_of(eval__prompts=str(path)), "", str(path), the_tokenizer(), spec)
    assert [prompt.metadata.get("dataset") for prompt in alone] == [None, "mine"]


def to_prompt(row):
    return {"token_ids": [row["token"]], "answer": row["right"]}


def test_rows_of_another_form_are_mapped_by_the_evaluation_hook(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"token": 3, "right": "C"}\n')
    mapped = config_of(eval__prompts=str(path), eval__map=f"{__name__}.to_prompt")
    (read,) = heldout_prompts(mapped, "", str(path), the_tokenizer(), SimpleNamespace(vocab_size=100))
    assert (read.token_ids, read.answer) == ([3], "C")
    with refused("dotted.missing", about="eval.map"):
        wrong = config_of(eval__prompts=str(path), eval__map=f"{__name__}.to_prmpt")
        heldout_prompts(wrong, "", str(path), the_tokenizer(), SimpleNamespace(vocab_size=100))


SET = "eval.prompts.a"
GREEDY, BEYOND, NUCLEUS = (("eval.samples",) * 2, ("eval.pass_at",) * 2, ("eval.top_p",) * 2)
"""Code and key of settings of section `eval` that contradict those of a set."""


@pytest.mark.parametrize(
    ("options", "code", "about"),
    [
        ({"map": "m.f", "fields": {"prompt": "q"}}, "prompts.map", "eval.map"),
        ({"samples": 4}, "eval.samples", "eval.samples"),
        ({"top_p": 0.9}, "eval.top_p", "eval.top_p"),
        ({"samples": 4, "temperature": 1.0, "pass_at": (4, 8)}, "eval.pass_at", "eval.pass_at"),
        ({"prompts": {"a/b": "f"}}, "eval.name", "eval.prompts"),
        ({"prompts": {"": "f", "b": "g"}}, "eval.name", "eval.prompts"),
        ({"prompts": {"": {"path": "f", "temperature": 0.5}}}, "eval.name", "eval.prompts"),
        ({"samples": 4, "temperature": 1, "prompts": {"a": {"path": "f", "temperature": 0}}}, *GREEDY),
        ({"prompts": {"a": {"path": "f", "samples": 4}}}, "eval.samples", f"{SET}.samples"),
        ({"pass_at": (4,), "prompts": {"a": {"path": "f", "samples": 2, "temperature": 1}}}, *BEYOND),
        ({"top_p": 0.9, "temperature": 1, "prompts": {"a": {"path": "f", "temperature": 0}}}, *NUCLEUS),
        ({"prompts": {"a": {"path": "f", "map": "m.f", "fields": {"prompt": "q"}}}}, "prompts.map", f"{SET}.map"),
        ({"prompts": {"a": {"path": "f", "pass_at": (2,)}}}, "eval.pass_at", f"{SET}.pass_at"),
        ({"prompts": {"a": {"path": "f", "top_p": 0.9}}}, "eval.top_p", f"{SET}.top_p"),
    ],
)
def test_an_evaluation_that_would_say_nothing_is_refused(options, code, about):
    with invalid(code, about=about):
        config_of(**{f"eval__{key}": value for key, value in options.items()})


def test_a_set_without_a_name_is_refused_under_no_other_key():
    with invalid("eval.name", about="eval.prompts") as caught:
        config_of(eval__prompts={"": {"path": "f", "samples": 4}})
    (item,) = caught.value.errors()
    assert [problem.about for problem in item["ctx"]["error"].problems] == ["eval.prompts"]


def test_a_value_of_several_sets_is_refused_once():
    sets = {name: {"path": "f", "max_new_tokens": length} for name, length in (("a", 3), ("b", 4))}
    with invalid("eval.top_p", about="eval.top_p") as caught:
        config_of(eval__top_p=0.9, eval__prompts=sets)
    (item,) = caught.value.errors()
    assert len(item["ctx"]["error"].problems) == 1


def test_k_defaults_to_powers_of_two_up_to_the_samples():
    assert Eval().ks == () and Eval(samples=12, temperature=1.0).ks == (2, 4, 8)
    options = Eval(samples=12, temperature=1.0, pass_at=(5, 1, 5))
    assert options.ks == (1, 5)
    assert score({"": [[1.0, 0.0, 0.0, 0.0, 0.0]]}, 1.0, {"": options.ks})["eval/pass@1"] == pytest.approx(0.2)


def test_the_settings_of_a_set_replace_those_of_the_section():
    own = {"path": "a", "samples": 16, "max_new_tokens": 64, "fields": {"prompt": "q"}}
    options = Eval(prompts={"aime": own, "math": "m"}, samples=2, temperature=0.6, map="m.f")
    aime, math = options.sets["aime"], options.sets["math"]
    assert (aime.samples, aime.temperature, aime.max_new_tokens, aime.map) == (16, 0.6, 64, None)
    assert aime.fields is not None and aime.ks == (2, 4, 8, 16)
    assert (math.samples, math.temperature, math.max_new_tokens, math.map) == (2, 0.6, None, "m.f")
    saved = Eval.model_validate(options.model_dump(mode="json"))
    assert saved == options and saved.sets == options.sets


async def test_every_set_is_answered_with_its_own_settings():
    own = {"path": "a", "samples": 4, "temperature": 0.6, "top_p": 0.95, "max_new_tokens": 7}
    config = config_of(eval__prompts={"aime": own, "math": "m"}, sampling={"max_new_tokens": 5})
    async with Stand(config, reward=one) as stand:
        sets = {"aime": prompts()[:1], "math": prompts()[1:2]}
        outcomes = await answer_all(stand.maker, sets)
        sampled = [request.sampling for request in stand.engine.requests]
    assert sorted(sampling["temperature"] for sampling in sampled) == [0.0, 0.6, 0.6, 0.6, 0.6]
    for sampling in sampled:
        expected = {"temperature": 0.6, "top_p": 0.95, "max_new_tokens": 7}
        assert sampling == (expected if sampling["temperature"] else {"temperature": 0.0, "max_new_tokens": 5})
    found = eval_metrics(config.eval, sets, outcomes)
    assert found["eval/aime/pass@4"] == found["eval/math/accuracy"] == 1.0
    assert "eval/math/pass@2" not in found and "eval/pass@2" not in found


def test_files_have_names():
    assert Eval().files == {} and Eval(prompts="a").files == {"": "a"}
    assert Eval(prompts={"x": "a", "y": "b"}).files == {"x": "a", "y": "b"}
