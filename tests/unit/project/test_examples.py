"""The examples that users copy: token provenance through one and two turns, under the quickstart's chat template."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from examples import single_turn, solver_judge, two_turn, varied
from slimx.data.chat.tokens import encode_turn
from slimx.data.records import Group
from slimx.extras.quickstart.make_model import make_tokenizer
from slimx.rollout.hooks import RewardContext
from tests.extras.rewards import reward_stand
from tests.unit.rollout.scripted_engine import END, PROMPT, ScriptedEngine, context, spans


async def test_single_turn_keeps_prompt_and_answer_apart():
    engine = ScriptedEngine("46")
    trajectory = await single_turn.generate(context(engine), PROMPT)
    assert spans(trajectory) == [("prompt", 0, "<user>12+34=<assistant>"), ("sampled", 0, "46<end>")]
    assert trajectory.loss_mask.tolist() == [0] * 8 + [1] * 3


async def test_a_right_answer_gets_no_second_turn():
    engine = ScriptedEngine("46")
    trajectory = await two_turn.generate(context(engine), PROMPT)
    assert len(engine.prompts) == 1 and trajectory.metadata == {"answer": "46", "turns": 1}


async def test_a_wrong_answer_is_followed_by_a_hint_and_a_second_answer():
    engine = ScriptedEngine("56", "46")
    trajectory = await two_turn.generate(context(engine), PROMPT)
    assert spans(trajectory) == [
        ("prompt", 0, "<user>12+34=<assistant>"),
        ("sampled", 0, "56<end>"),
        ("inserted", 1, "<user>Try again.<assistant>"),
        ("sampled", 1, "46<end>"),
    ]
    assert engine.prompts[1] == trajectory.token_ids[:-3].tolist()  # the second request continues the very same ids
    assert engine.seeds[0] != engine.seeds[1]
    trained = "".join(text for (source, _, text) in spans(trajectory) if source == "sampled")
    assert make_tokenizer().decode(trajectory.token_ids[trajectory.loss_mask == 1]) == trained
    assert np.isnan(trajectory.logprobs[trajectory.loss_mask == 0]).all()


async def test_an_answer_that_was_cut_off_gets_no_second_turn():
    trajectory = await two_turn.generate(context(ScriptedEngine("5", finish_reason="length")), PROMPT)
    assert trajectory.metadata["turns"] == 1 and trajectory.status == "truncated"


@pytest.mark.parametrize(("answers", "reward"), [(("46",), 1.0), (("56", "46"), 0.5), (("56", "57"), 0.0)])
async def test_an_answer_that_needed_the_hint_counts_half(answers, reward):
    engine = ScriptedEngine(*answers)
    trajectory = await two_turn.generate(context(engine), PROMPT)
    parts = await two_turn.reward(RewardContext(PROMPT, engine.tokenizer, "", False), trajectory)
    assert sum(parts.values()) == reward


@pytest.mark.parametrize(
    ("answer", "verdict", "rewards"), [("46", "1", [1, 1]), ("47", "0", [0, 1]), ("47", "1", [0, 0])]
)
async def test_solver_and_judge_are_rewarded_apart(answer, verdict, rewards):
    solver, judge = (ScriptedEngine(text) for text in (answer, verdict))
    actor, other = context(solver), context(judge)
    other = replace(other, policy="judge", engine=replace(other.engine, policy="judge"))
    made = await solver_judge.generate(replace(actor, policies={"actor": actor, "judge": other}), PROMPT)
    assert spans(made[1])[0] == ("prompt", 0, f"<user>12+34={answer}=<assistant>")
    texts = [spans(trajectory)[1][2].removesuffix("<end>") for trajectory in made]
    contexts = [RewardContext(PROMPT, solver.tokenizer, text, False) for text in texts]
    assert [await solver_judge.reward(*pair) for pair in zip(contexts, made, strict=True)] == rewards


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        # The two usual shapes: an end token with a line break after it, and a template without one.
        (
            "{% for m in messages %}<user>{{ m.role }}\n{{ m.content }}<end>\n{% endfor %}{{ '<user>assistant\n' }}",
            "\n<user>user\nTry again.<end>\n<user>assistant\n",
        ),
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: ",
            "\nuser: Try again.\nassistant: ",
        ),
    ],
)
def test_the_next_turn_follows_any_chat_template(template, expected):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    assert tokenizer.decode(encode_turn(tokenizer, "Try again.", role="user", after=[END])) == expected


@pytest.mark.parametrize(
    ("parts", "kept"),
    [
        ([{"math": 1.0}, {"math": 0.0}], True),
        ([{"math": 1.0}, {"math": 1.0, "overlong": -0.5}], "all_right"),
        ([{"math": 0.0, "overlong": -0.2}, {"math": 0.0}], "all_wrong"),
        ([{"a": 1.0}, {"a": 0.5}], True),
    ],
)
def test_a_group_whose_answers_differ_in_length_alone_is_not_kept(parts, kept):
    trajectories = [reward_stand.trajectory() for _ in parts]
    for trajectory, values in zip(trajectories, parts, strict=True):
        trajectory.reward_parts, trajectory.reward = values, sum(values.values())
    assert varied.keep(Group(id="g", prompt=PROMPT, trajectories=trajectories)) == kept
