"""Each reward that comes with slimx pays what its page says, and refuses prompts and options that cannot work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from slimx.config.sections.reward import Reward as RewardConfig
from slimx.data.records import Prompt
from slimx.extras.http.responses import MAX_RESPONSE
from slimx.extras.rewards import choice, f1, judge, math, overlong, pattern, remote
from slimx.extras.rewards.shared import http
from slimx.extras.served_models.client import FrozenEngine
from slimx.rollout.hook_loading import check_answers
from tests.extras.rewards.reward_stand import context, hooks_of, judged, trajectory
from tests.refusals import invalid, refused

GSM8K = Path(__file__).resolve().parents[4] / "shared" / "data" / "gsm8k"


# Mathematics ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "text", "value"),
    [
        ("18", "She has 9 eggs and sells them for $18.", 1.0),
        ("18", "So the answer is \\boxed{18}", 1.0),
        ("18", "The answer is 18.0", 1.0),
        ("70000", "a profit of $70,000", 1.0),
        ("\\frac{1}{2}", "The answer is $0.5$", 1.0),
        ("(x+1)^2", "$x^2 + 2x + 1$", 1.0),
        ("18", "The answer is 17", 0.0),
        ("18", "18 is wrong, so \\boxed{20}", 0.0),
        ("18", "", 0.0),
        ("18", "I do not know", 0.0),
    ],
)
def test_math_pays_for_the_value_that_a_response_ends_in(answer, text, value):
    assert judged(math.reward, text, answer) == value


def test_math_refuses_an_answer_without_a_value():
    with refused("reward.answer", about="p7"):
        judged(math.reward, "18", "as you like")


@pytest.mark.skipif(not GSM8K.is_dir(), reason="needs the GSM8K files next to the repository")
@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow("every answer of GSM8K"))])
def test_math_agrees_with_the_graders_of_gsm8k_and_pays_every_gold_answer(every):
    agreed = seen = 0
    for line in (GSM8K / "example_model_solutions.jsonl").read_text().splitlines()[::every]:
        record = json.loads(line)
        answer = record["ground_truth"].rpartition("A: ")[2]
        for solution in (value for value in record.values() if isinstance(value, dict)):
            seen += 1
            agreed += judged(math.reward, solution["solution"], answer) == solution["is_correct"]
    assert seen > 5000 // every and agreed / seen >= 0.99
    solutions = [
        json.loads(line)["answer"]
        for name in ("test.jsonl", "train.jsonl")
        for line in (GSM8K / name).read_text().splitlines()[::every]
    ]
    answers = [solution.rpartition("#### ")[2] for solution in solutions]
    assert len(answers) > 8000 // every
    assert [answer for answer in answers if judged(math.reward, answer, answer) != 1.0] == []
    # A whole solution may state another number in a way that looks more final: "33.333...%, rounded down #### 33".
    whole = [judged(math.reward, *pair) for pair in zip(solutions[: 2000 // every], answers, strict=False)]
    assert sum(whole) / len(whole) >= 0.995


# Choice, F1, form, length ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is B.", "B"),
        ("Answer: (C)", "C"),
        ("**Answer:** D", "D"),
        ("The answer is A. No, the answer is B", "B"),
        ("the answer is A, hence \\boxed{\\text{C}}", "C"),
        ("Because of gravity.\nD", "D"),
        ("It must be\n(B) the second", "B"),
        ("**A**", "A"),
        ("A train leaves", None),
        ("The answer is Berlin", None),
        ("No idea", None),
        ("", None),
    ],
)
def test_choice_reads_the_letter_that_a_response_decides_for(text, letter):
    assert choice.chosen(text) == letter
    assert judged(choice.reward, text, "(b)") == float(letter == "B")


def test_choice_refuses_an_answer_that_is_no_letter():
    with refused("reward.answer", about="p7"):
        judged(choice.reward, "E", "E", letters="ABCD")


@pytest.mark.parametrize(
    ("text", "answer", "value"),
    [
        ("The Eiffel Tower!", "eiffel tower", 1.0),
        ("the tower of Paris", "Eiffel Tower", 2 / 5),  # one word of three and of two
        ("tower tower", "tower", 2 / 3),  # a word counts as often as it is there
        ("London", "Paris", 0.0),
        ("", "Paris", 0.0),
        ("the", "a", 1.0),
    ],
)
def test_f1_counts_shared_words(text, answer, value):
    assert judged(f1.reward, text, answer) == pytest.approx(value)


async def test_f1_takes_the_best_of_several_answers():
    assert await f1.reward(context("big apple", answers=["New York", "The Big Apple"]), trajectory()) == 1.0


@pytest.mark.parametrize(
    ("options", "text", "value"),
    [
        ({"pattern": r"<think>.*</think>"}, "<think>a\nb</think> 4", 1.0),
        ({"pattern": r"<think>.*</think>"}, "4", 0.0),
        ({"pattern": r"<think>.*</think>", "whole": True}, "<think>a</think> 4", 0.0),
        ({"pattern": r"= (?P<answer>\d+)"}, "2 = 2, 1 + 3 = 4", 1.0),
        ({"pattern": r"= (?P<answer>\d+)"}, "4 = 4, 1 + 3 = 5", 0.0),
    ],
)
def test_pattern_pays_for_a_form_and_for_the_answer_in_it(options, text, value):
    assert judged(pattern.reward, text, "4", **options) == value


def test_pattern_says_what_is_wrong_with_an_expression():
    with refused("reward.option", about="pattern"):
        judged(pattern.reward, "4", pattern="(")


@pytest.mark.parametrize(("sampled", "value"), [(1, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (130, -1.0)])
def test_overlong_falls_from_the_buffer_on(sampled, value):
    assert judged(overlong.reward, "", sampled=sampled, limit=100, buffer=20) == pytest.approx(value)


@pytest.mark.parametrize("buffer", [0, 101])
def test_overlong_refuses_a_buffer_that_does_not_fit(buffer):
    with refused("reward.option", about="buffer"):
        judged(overlong.reward, "", limit=100, buffer=buffer)


# Over HTTP ------------------------------------------------------------------------------------------------------------


class Server:
    """Answers every POST with the next of `answers` (the last for ever): a status and a body."""

    def __init__(self, *answers: tuple[int, Any], location: str = ""):
        self.answers, self.received, self._headers = list(answers), [], {"Location": location}

    async def __aenter__(self) -> Server:
        app = web.Application()
        app.router.add_post("/{path:.*}", self._answer)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        self.received.append((request.path, await request.json()))
        status, body = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(status=status, text=text, headers=self._headers)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(http, "FIRST_PAUSE_S", 0.01)


async def test_a_remote_reward_is_retried_while_its_server_is_busy():
    async with Server((503, "busy"), (429, "slower"), (200, {"reward": 0.5})) as server:
        assert await remote.reward(context("hi", "4", level=2), trajectory(), url=server.url) == 0.5
    assert len(server.received) == 3
    messages = [{"role": "user", "content": "Why?"}]
    request = {
        "id": "t",
        "prompt": messages,
        "text": "hi",
        "final_answer": "hi",
        "answer": "4",
        "metadata": {"level": 2},
    }
    assert server.received[-1][1] == request


async def test_responses_of_a_reward_server_are_bounded_and_not_redirected():
    async with Server((200, "1" + " " * (MAX_RESPONSE // 2)), (200, "1" + " " * MAX_RESPONSE)) as server:
        assert await remote.reward(context(), trajectory(), url=server.url, retries=0) == 1
        with refused("reward.server", about=server.url) as caught:
            await remote.reward(context(), trajectory(), url=server.url, retries=0)
        assert str(MAX_RESPONSE) in str(caught.value)
    async with Server((200, 1)) as elsewhere, Server((307, 1), location=elsewhere.url) as server:
        with refused("reward.server", about=server.url):
            await remote.reward(context(), trajectory(), url=server.url)
        assert elsewhere.received == []


async def test_a_remote_reward_may_have_parts():
    async with Server((200, {"form": 1, "value": 0.25})) as server:
        assert await remote.reward(context(), trajectory(), url=server.url) == {"form": 1, "value": 0.25}


@pytest.mark.parametrize(
    ("answer", "requests", "code", "message"),
    [
        ((404, "who?"), 1, "reward.server", "404: who?"),
        ((500, "oh"), 3, "reward.server", "500: oh"),
        ((200, "<html>"), 1, "reward.server", ""),
        ((200, {"reward": "high"}), 1, "reward.verdict", "high"),
        ((200, {}), 1, "reward.verdict", "{}"),
        ((200, True), 1, "reward.verdict", "True"),
    ],
)
async def test_a_remote_reward_without_a_value_is_refused_with_its_response(answer, requests, code, message):
    async with Server(answer) as server:
        with refused(code, about=server.url) as caught:
            await remote.reward(context(), trajectory(), url=server.url, retries=2)
    assert message in str(caught.value) and server.url in str(caught.value) and len(server.received) == requests


async def test_a_server_that_is_not_there_is_named():
    with refused("reward.server", about="http://127.0.0.1:9"):
        await remote.reward(context(), trajectory(), url="http://127.0.0.1:9", retries=1)


def chat(text: str) -> tuple[int, Any]:
    return 200, {"choices": [{"message": {"content": text}}]}


async def test_a_judge_reads_question_answer_and_response_and_scores_last():
    async with Server(chat("Score: 3? No. Score: 7.5")) as server:
        value = await judge.reward(context("{answer} is {x}", "4"), trajectory(), url=server.url)
    assert value == 0.75
    path, body = server.received[0]
    assert path == "/v1/chat/completions" and body["temperature"] == 0.0
    content = body["messages"][0]["content"]
    assert "Why?" in content and "Reference answer:\n4\n" in content and "judged:\n{answer} is {x}\n" in content


async def test_a_judge_without_a_score_is_an_error_and_not_a_zero():
    async with Server(chat("I like it")) as server:
        with refused("reward.verdict", about=server.url):
            await judge.reward(context("x"), trajectory(), url=server.url)


async def test_a_reward_model_scores_the_whole_conversation():
    class Tokenizer:
        def decode(self, ids, skip_special_tokens):
            return " ".join(map(str, ids))

    ctx = context("x")
    object.__setattr__(ctx, "tokenizer", Tokenizer())
    async with Server((200, [{"embedding": [1.25]}])) as server:
        assert await judge.score(ctx, trajectory(2), url=server.url) == 1.25
        assert await judge.score(ctx, trajectory(2), url=server.url, ids=True) == 1.25
        with refused("reward.engine", about="nobody"):
            await judge.score(ctx, trajectory(2), engine="nobody")
    assert server.received == [("/classify", {"text": ["1 2 3"]}), ("/classify", {"input_ids": [[1, 2, 3]]})]
    async with Server((200, [{"embedding": [1.0, 2.0]}])) as server:
        with refused("reward.verdict", about=server.url):
            await judge.score(ctx, trajectory(), url=server.url)
    async with Server((200, {"data": [{"embedding": [0.5]}]})) as server:
        object.__setattr__(ctx, "engines", {"judge": FrozenEngine("judge", server.url, deadline_s=300, retries=0)})
        assert await judge.score(ctx, trajectory(2), engine="judge", ids=True) == 0.5
    assert server.received == [("/v1/embeddings", {"model": "judge", "input": [[1, 2, 3]]})]


# Parts ----------------------------------------------------------------------------------------------------------------


PARTS = [
    {"name": "right", "function": "exact", "where": {"dataset": "sums"}},
    {"name": "words", "function": "f1", "where": {"dataset": "trivia"}, "weight": 2.0},
    {
        "name": "length",
        "function": "overlong",
        "weight": 0.5,
        "options": {"limit": 4, "buffer": 2},
    },
]


async def test_each_prompt_gets_the_weighted_parts_that_fit_it():
    reward = hooks_of(parts=PARTS).reward
    assert await reward(context("4", "4", dataset="sums"), trajectory(3)) == {"right": 1.0, "length": -0.25}
    trivia = await reward(context("big apple", "The Apple", dataset="trivia"), trajectory(1))
    assert trivia == {"words": pytest.approx(4 / 3), "length": 0.0}
    assert await reward(context("4", "4"), trajectory(1)) == {"length": 0.0}


def test_a_prompt_that_no_part_fits_is_named_before_the_run():
    reward = hooks_of(parts=PARTS[:2]).reward
    reward.check([context(dataset="sums").prompt])
    with refused("reward.parts", about="p7"):
        reward.check([context(dataset="sums").prompt, context(dataset="maps").prompt])


async def test_a_hook_with_several_numbers_keeps_their_names_inside_its_part():
    part = {"name": "server", "function": "remote", "weight": 0.5}
    async with Server((200, {"form": 1, "value": 3})) as server:
        reward = hooks_of(parts=[{**part, "options": {"url": server.url}}]).reward
        assert await reward(context(), trajectory()) == {"server/form": 0.5, "server/value": 1.5}


@pytest.mark.parametrize(
    ("reward", "code", "about", "named"),
    [
        ({"function": "pattern"}, "dotted.signature", "reward.function", "'pattern'"),
        ({"options": {"weight": 2}}, "dotted.options", "reward.options", "'weight'"),
        (
            {"parts": [{"name": "a", "function": "maths"}]},
            "dotted.name",
            "reward.parts.0.function",
            "'maths'",
        ),
        (
            {"function": "math", "isolation": "thread"},
            "hooks.isolation",
            "reward.isolation",
            "reward.isolation=auto",
        ),
    ],
)
def test_a_reward_that_cannot_be_called_is_refused_before_the_run(reward, code, about, named):
    with refused(code, about=about) as caught:
        hooks_of(**reward)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("reward", "code", "about"),
    [
        ({"parts": PARTS, "function": "a.b"}, "reward.parts_and_function", "reward.function"),
        ({"parts": [PARTS[0], PARTS[0]]}, "reward.name_twice", "reward.parts"),
        ({"function": None, "options": {"a": 1}}, "reward.options", "reward.options"),
    ],
)
def test_a_section_of_rewards_that_contradicts_itself_is_refused(reward, code, about):
    with invalid(code, about=about):
        hooks_of(**reward)


@pytest.mark.parametrize(
    ("reward", "share", "lacking"),
    [
        ({}, 0.4, None),
        ({}, 0.1, "b"),
        ({"function": "overlong", "options": {"limit": 9, "buffer": 3}}, 0.0, None),
        (
            {"parts": [{"name": "right", "function": "math", "where": {"set": "sums"}}]},
            0.0,
            None,
        ),
        (
            {"parts": [{"name": "right", "function": "math", "where": {"set": "free"}}]},
            0.0,
            "b",
        ),
    ],
)
def test_many_prompts_without_answers_are_refused(reward, share, lacking):
    rows = [("a", "1", "sums"), ("b", None, "free"), ("c", "3", "sums")]
    prompts = [Prompt(id=name, token_ids=[1], answer=answer, metadata={"set": of}) for name, answer, of in rows]
    hook, config = hooks_of(**reward).reward, RewardConfig(**reward)
    if lacking is None:
        check_answers(config, hook, prompts, share)
    else:
        with refused("reward.answer", about=lacking):
            check_answers(config, hook, prompts, share)
