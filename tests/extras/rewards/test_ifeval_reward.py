"""Instructions are judged as IFEval judges them, and what its checkers would pass over in silence is refused."""

from __future__ import annotations

import sys

import pytest

from slimx.data.records import Prompt
from slimx.extras.rewards import ifeval
from slimx.rollout.hook_loading import check_prompts
from tests.extras.rewards.reward_stand import context, hooks_of, trajectory
from tests.refusals import refused

WORDS = ("length_constraints:number_words", {"relation": "at least", "num_words": 3, "language": None})
NO_COMMA = ("punctuation:no_comma", {})
FINNISH = ("language:response_language", {"language": "fi"})
SENTENCES = ("length_constraints:number_sentences", {"relation": "less than", "num_sentences": 3})
LOGGED = ("prompt_strict", "prompt_loose", "kept_strict", "kept_loose", "instructions")


def metadata(*instructions: tuple[str, dict]) -> dict:
    return {"instruction_id_list": [name for name, _ in instructions], "kwargs": [kwargs for _, kwargs in instructions]}


def prompt(*instructions: tuple[str, dict], **more: object) -> Prompt:
    return Prompt(id="q", messages=[{"role": "user", "content": "?"}], metadata=metadata(*instructions) | more)


@pytest.fixture
def package():
    pytest.importorskip("if_verifiable", reason="the package if-verifiable is not installed")
    ifeval._checkers.cache_clear()


@pytest.mark.parametrize(
    ("text", "logged"),
    [
        ("one two three", (1, 1, 2, 2, 2)),
        ("one, two", (0, 0, 0, 0, 2)),
        ("one, two, three", (0, 0, 1, 1, 2)),
        ("Sure, here:\none two three", (0, 1, 1, 2, 2)),
        ("<think>a, b</think>one two three", (1, 1, 2, 2, 2)),
        ("<think>one two three", (0, 0, 0, 0, 2)),
        ("", (0, 0, 0, 0, 2)),
    ],
)
async def test_strict_and_loose_accuracy_by_prompt_and_by_instruction(package, text, logged):
    ctx = context(text, **metadata(WORDS, NO_COMMA))
    assert await ifeval.reward(ctx, trajectory()) == logged[0]
    assert tuple(ctx.metrics[f"ifeval/{name}"] for name in LOGGED) == logged


async def test_weights_make_a_sum_of_measures_each_a_part(package):
    weights = {"prompt_loose": 0.5, "instructions_strict": 2.0, "prompt_strict": 1.0}
    ctx = context("one, two, three", **metadata(WORDS, NO_COMMA))
    assert await ifeval.reward(ctx, trajectory(), weights=weights) == {
        "prompt_loose": 0.0,
        "instructions_strict": 1.0,
        "prompt_strict": 0.0,
    }


async def test_the_same_text_has_the_same_language_each_time(package):
    kept = set()
    for _ in range(60):  # unseeded, one detection in five says Dutch
        ctx = context("hello", **metadata(FINNISH))
        kept.add(await ifeval.reward(ctx, trajectory()))
    assert len(kept) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"instruction_id_list": ["punctuation:no_comma"]},
        {"instruction_id_list": "punctuation:no_comma", "kwargs": [{}]},
        metadata(NO_COMMA) | {"kwargs": [{}, {}]},
        metadata(("punctuation:no_coma", {})),
        metadata(("length_constraints:number_words", {"relation": "at least"})),
        metadata(("length_constraints:number_words", {"relation": "about", "num_words": 3})),
        metadata(("punctuation:no_comma", {"commas": 0})),
    ],
)
def test_prompts_that_cannot_be_judged_are_refused_before_the_run(package, wrong):
    parts = [
        {"name": "if", "function": "ifeval", "where": {"dataset": "ifeval"}},
        {"name": "rest", "function": "exact", "where": {"dataset": "sums"}},
    ]
    reward = hooks_of(parts=parts).reward
    messages = [{"role": "user", "content": "?"}]
    others = [Prompt(id="other", messages=messages, metadata={"dataset": "sums"}), prompt(NO_COMMA, dataset="ifeval")]
    check_prompts(reward, others)
    with refused("reward.instructions", about="q"):
        check_prompts(reward, [*others, Prompt(id="q", messages=messages, metadata=wrong | {"dataset": "ifeval"})])


def test_missing_data_of_a_checker_is_refused_before_the_run(package, monkeypatch, tmp_path):
    import nltk

    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    ifeval.check_prompts([prompt(WORDS)])
    from if_verifiable.ifeval import instructions_util

    instructions_util._get_sentence_tokenizer.cache_clear()
    with refused("reward.package", about=SENTENCES[0]):
        ifeval.check_prompts([prompt(WORDS, SENTENCES)])


@pytest.mark.parametrize("weights", [{"prompt": 1.0}, {}, {"prompt_strict": float("nan")}, {"prompt_strict": "1"}])
def test_weights_of_no_measure_are_refused(weights):
    with refused("reward.weights"):
        ifeval.check(weights=weights)


def test_a_missing_package_is_refused_before_the_run(monkeypatch):
    for name in [*sys.modules]:
        if name.split(".")[0] == "if_verifiable":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "if_verifiable", None)
    ifeval._checkers.cache_clear()
    with refused("reward.package", about="if-verifiable"):
        hooks_of(function="ifeval")
