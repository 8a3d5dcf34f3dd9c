"""A teacher that an engine serves scores finished rollouts: for which tokens it is asked, what becomes of a rollout
that it cannot score, and what is refused before a run."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from slimx.config.sections.eval import Eval
from slimx.data.batch import make_rows
from slimx.data.loss_weights import loss_weights
from slimx.data.packing import pack
from slimx.data.records import Prompt, Span, Trajectory
from slimx.data.saved.codec import decode_groups, encode_groups
from slimx.errors import DeadlineError, SlimxError
from slimx.extras.doctor.effects.effects import effects
from slimx.extras.served_models.client import FrozenEngine
from slimx.extras.served_models.teacher import Teacher, check_taught, check_vocabulary, make_scorer
from slimx.rollout import single_turn
from slimx.rollout.client.sending import input_top_logprobs
from slimx.rollout.flow.rollouts import GroupMaker
from slimx.rollout.hook_loading import Hooks
from slimx.rollout.hooks import Generate, RolloutContext
from slimx.rollout.policy import PolicyClient
from tests.refusals import invalid, numbers, refused
from tests.unit.rollout.rollout_stand import FakeEngine, config_of, one, prompts, the_tokenizer

ACTOR, TEACHER = {"name": "actor"}, {"name": "wise", "frozen": True, "model": "t"}
SERVED = {"algorithm__name": "distillation", "algorithm__teacher_engine": "wise", "engines": [ACTOR, TEACHER]}


class FakeTeacher:
    """Each token's log-prob is its position over -8."""

    name = "wise"

    def __init__(self, error: SlimxError | None = None) -> None:
        self.error = error
        self.requests: list[tuple[list[int], int]] = []

    async def logprobs(self, token_ids: Sequence[int], *, start: int = 1) -> list[float]:
        self.requests.append(([int(token) for token in token_ids], start))
        if self.error is not None:
            raise self.error
        return [-position / 8 for position in range(start, len(token_ids))]

    async def top_logprobs(self, token_ids: Sequence[int], *, top: int, start: int) -> tuple[Any, ...]:
        """Returns candidates: the likeliest token of position p is p, then p + 1 and so on."""
        ids = np.arange(start, len(token_ids))[:, None] + np.arange(top)
        return await self.logprobs(token_ids, start=start), ids, -ids / 8


def maker(teacher: FakeTeacher, generate: Generate = single_turn.generate, **changes: Any) -> GroupMaker:
    config = config_of(**{**SERVED, "reward__function": None, **changes})
    policies, score = {"actor": PolicyClient(FakeEngine(), the_tokenizer())}, make_scorer(config, {"wise": teacher})
    return GroupMaker(config, Hooks(generate, one, None), policies, score=score)


def trajectory(mask: Sequence[int], **changes: Any) -> Trajectory:
    """Returns a trajectory of one prompt token and sampled ones."""
    length = len(mask)
    fields = {
        "id": "g/0",
        "rollout_id": "g/0",
        "group_id": "g",
        "index": 0,
        "token_ids": np.arange(10, 10 + length, dtype=np.int32),
        "loss_mask": np.array(mask, np.uint8),
        "logprobs": np.array([np.nan] + [-1.0] * (length - 1), np.float32),
        "spans": [Span(start=0, stop=1, source="prompt"), Span(start=1, stop=length, source="sampled", version=0)],
    }
    return Trajectory(**{**fields, **changes})


# In the flow ----------------------------------------------------------------------------------------------------------


async def test_rollouts_are_scored_from_their_first_trained_token():
    teacher = FakeTeacher()
    outcome = await maker(teacher).make(prompts()[0], group_id="g", number=0)
    assert outcome.reason is None and len(teacher.requests) == 2
    for scored in decode_groups(encode_groups([outcome.group]))[0].trajectories:
        (position,) = [start for ids, start in teacher.requests if ids == scored.token_ids.tolist()]
        first = int(np.flatnonzero(scored.loss_mask)[0])
        assert position == first and np.isnan(scored.teacher_logprobs[:first]).all()
        assert scored.teacher_logprobs[first:].tolist() == [-n / 8 for n in range(first, len(scored.token_ids))]
        assert scored.timings["teacher"] >= 0


LIKELIEST = {"algorithm__teacher_top_k": 3, "algorithm__teacher_kl_coef": 0.5, "algorithm__teacher_coef": 0.0}


async def test_top_tokens_of_each_position_reach_the_trainers():
    outcome = await maker(FakeTeacher(), **LIKELIEST).make(prompts()[0], group_id="g", number=0)
    assert outcome.reason is None
    trajectories = decode_groups(encode_groups([outcome.group]))[0].trajectories
    for scored in trajectories:
        first, length = int(np.flatnonzero(scored.loss_mask)[0]), len(scored.token_ids)
        ids = np.arange(first, length)[:, None] + np.arange(3)
        assert scored.teacher_top_ids.dtype == np.int32 and scored.teacher_top_ids[first:].tolist() == ids.tolist()
        assert np.isnan(scored.teacher_top_logprobs[:first]).all()
        assert scored.teacher_top_logprobs[first:].tolist() == (-ids / 8).tolist()
    weights = loss_weights(trajectories, "token")
    algorithm = config_of(**{**SERVED, **LIKELIEST}).algorithm
    rows = make_rows(trajectories, [0.0] * 2, weights, algorithm)
    lone = pack(rows[:1], data_size=1, max_tokens=64, count_multiple=2).shards[0]
    assert lone[1].teacher_top_ids.shape == lone[1].teacher_top_logprobs.shape == (1, 3), "padding alone"
    assert lone[0].teacher_top_ids.tolist() == trajectories[0].teacher_top_ids[1:].tolist()
    assert np.isfinite(lone[0].teacher_top_logprobs).all()
    with refused("data.column", about=trajectories[0].id):
        make_rows(trajectories, [0.0] * 2, weights, algorithm.model_copy(update={"teacher_top_k": 4}))


@pytest.mark.parametrize(
    ("changes", "code", "about"),
    [
        ({"algorithm__teacher_top_k": 0}, "algorithm.teacher_kl", "algorithm.teacher_top_k"),
        ({"algorithm__teacher_engine": None}, "algorithm.teacher_kl", "algorithm.teacher_engine"),
        (
            {"algorithm__teacher_kl_coef": 0.0, "algorithm__teacher_coef": 1.0},
            "algorithm.unused",
            "algorithm.teacher_top_k",
        ),
    ],
)
def test_a_kl_without_likeliest_tokens_and_they_without_a_kl_are_refused(changes, code, about):
    config_of(**SERVED, **LIKELIEST)
    with invalid(code, about=about):
        config_of(**{**SERVED, **LIKELIEST, **changes})


def test_the_kl_is_looked_at_by_the_effect_check():
    found = effects(config_of(**{**SERVED, **LIKELIEST, "reward__function": None}))
    shares = {effect.key: effect.share for effect in found}
    assert shares["algorithm.teacher_kl_coef"] == 1.0 and 0 < shares["algorithm.teacher_kl"] < 2


async def test_untrained_rollouts_are_not_scored():
    """Answers of an evaluation, and the greedy rollout that is a baseline."""
    teacher = FakeTeacher()
    await maker(teacher).make(prompts()[0], group_id="g", number=0, evaluation=Eval())
    assert not teacher.requests
    remax = {
        "algorithm__name": "remax",
        "algorithm__teacher_coef": 0.1,
        "reward__function": "slimx.extras.rewards.exact",
    }
    outcome = await maker(teacher, **remax).make(prompts()[0], group_id="g", number=0)
    assert outcome.group.baseline == 1.0 and len(teacher.requests) == 2
    untrained = trajectory([0, 0, 0])
    await Teacher(teacher, 1).score(untrained)
    assert len(teacher.requests) == 2 and np.isnan(untrained.teacher_logprobs).all()


async def test_no_more_requests_are_sent_at_once_than_the_run_allows():
    class Slow(FakeTeacher):
        busy = busiest = 0

        async def logprobs(self, token_ids: Sequence[int], *, start: int = 1) -> list[float]:
            self.busy += 1
            self.busiest = max(self.busiest, self.busy)
            await asyncio.sleep(0.01)
            self.busy -= 1
            return await super().logprobs(token_ids, start=start)

    teacher = Slow()
    outcome = await maker(teacher, group_size=8, concurrency=3).make(prompts()[0], group_id="g", number=0)
    assert outcome.reason is None and len(teacher.requests) == 8 and teacher.busiest == 3


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (SlimxError("frozen engines wise: no engine is left"), "teacher failed"),
        (DeadlineError("a generation request", 600, "http://router"), "engine deadline"),
    ],
)
async def test_a_teacher_that_does_not_answer_fails_the_group_with_its_reason(error, reason):
    outcome = await maker(FakeTeacher(error)).make(prompts()[0], group_id="g", number=0)
    assert outcome.failed and outcome.reason == reason and outcome.detail == str(error)


class Unable(FakeTeacher):
    """A teacher that cannot say the token before the last one at all."""

    async def logprobs(self, token_ids: Sequence[int], *, start: int = 1) -> list[float]:
        values = await super().logprobs(token_ids, start=start)
        return [-math.inf if position == len(token_ids) - 2 else value for position, value in enumerate(values, start)]


async def test_a_token_outside_the_teachers_vocabulary_fails_its_rollout_alone():
    teacher = Teacher(Unable(), 1)
    tool = trajectory([0, 1, 0, 1])
    await teacher.score(tool)
    assert tool.teacher_logprobs[[1, 3]].tolist() == [-1 / 8, -3 / 8], "what a tool said is not trained"
    with pytest.raises(SlimxError) as refused:
        await teacher.score(trajectory([0, 1, 1, 1]))
    assert (refused.value.code, refused.value.about) == ("teacher.logprob", "g/0")
    outcome = await maker(Unable()).make(prompts()[0], group_id="g0", number=0)
    assert outcome.reason == "teacher failed"


async def test_a_rollout_that_its_hook_sampled_otherwise_is_not_scored():
    async def cooler(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
        draft = ctx.draft(prompt)
        completion = await ctx.engine.generate(draft.token_ids, {"temperature": 0.5})
        draft.add_sampled(replace(completion, temperature=0.5))
        return draft.finish()

    teacher = FakeTeacher()
    outcome = await maker(teacher, cooler).make(prompts()[0], group_id="g", number=0)
    assert outcome.reason == "teacher failed" and not teacher.requests
    assert "g/0" in outcome.detail and "temperature 0.5" in outcome.detail


# Several --------------------------------------------------------------------------------------------------------------

TWO = {
    "algorithm__teacher_engine": None,
    "algorithm__teacher_engines": {"sums": "wise", "primes": "other"},
    "engines": [ACTOR, TEACHER, TEACHER | {"name": "other"}],
}
"""Sections in addition to `SERVED`: two teachers by the prompt's data set, and none for others."""


def prompt_of(name: str, field: str = "dataset") -> Prompt:
    return replace(prompts()[0], id=name, metadata={field: name})


@pytest.mark.parametrize("field", ["dataset", "kind"])
async def test_metadata_selects_the_teacher_of_a_prompt(field):
    teachers = {name: FakeTeacher() for name in ("wise", "other", "common")}
    engines = [ACTOR, *(TEACHER | {"name": name} for name in teachers)]
    changes = {**SERVED, **TWO, "algorithm__teacher_field": field, "algorithm__teacher_engine": "common"}
    config = config_of(**{**changes, "engines": engines, "reward__function": None})
    policies, score = {"actor": PolicyClient(FakeEngine(), the_tokenizer())}, make_scorer(config, teachers)
    make = GroupMaker(config, Hooks(single_turn.generate, one, None), policies, score=score).make
    for number, (name, teacher) in enumerate({"sums": "wise", "primes": "other", "knots": "common"}.items()):
        outcome = await make(prompt_of(name, field), group_id=f"g{number}", number=number)
        assert outcome.reason is None
        counts = {name: len(teachers[name].requests) for name in teachers}
        assert counts == {name: 2 if name == teacher else 0 for name in teachers}
        teachers[teacher].requests.clear()
    (other,) = {*("dataset", "kind")} - {field}
    await make(prompt_of("sums", other), group_id="g9", number=9)
    assert len(teachers["common"].requests) == 2


def test_prompts_without_teachers_and_teachers_without_prompts_are_refused():
    both = [prompt_of("sums"), prompt_of("primes")]
    algorithm = config_of(**{**SERVED, **TWO}).algorithm
    check_taught(algorithm, both)
    with refused("teacher.prompt", about="knots"):
        check_taught(algorithm, [*both, prompt_of("knots")])
    with refused("teacher.prompt", about="primes"):
        check_taught(algorithm, [prompt_of("sums"), prompt_of("primes", "kind")])
    with refused("teacher.unused", about="algorithm.teacher_engines.primes"):
        check_taught(algorithm.model_copy(update={"teacher_engine": "wise"}), [prompt_of("sums"), prompt_of("knots")])
    check_taught(config_of(**SERVED).algorithm, [prompt_of("knots")])


@pytest.mark.parametrize(
    ("changes", "code", "about"),
    [
        ({"engines": [ACTOR, TEACHER]}, "algorithm.teacher_engine", "algorithm.teacher_engines.primes"),
        ({"sampling": {"top_k": 20}}, "algorithm.teacher_engine", "algorithm.teacher_engines"),
        ({"algorithm__teacher": "t"}, "algorithm.two_teachers", "algorithm.teacher_engines"),
        ({"algorithm__name": "sft"}, "algorithm.unused", "algorithm.teacher_engines"),
        (
            {"algorithm__teacher_engines": {}, "algorithm__teacher_engine": "wise", "algorithm__teacher_field": "kind"},
            "algorithm.unused",
            "algorithm.teacher_field",
        ),
    ],
)
def test_teachers_that_do_not_fit_are_refused_by_their_entry(changes, code, about):
    config_of(**{**SERVED, **TWO})
    with invalid(code, about=about):
        config_of(**{**SERVED, **TWO, **changes})


# To the trainers ------------------------------------------------------------------------------------------------------


def test_scores_are_aligned_with_predicted_tokens_and_required():
    scored = trajectory([0, 1, 0, 1], teacher_logprobs=np.array([np.nan, -1, np.nan, -3], np.float32))
    weights = loss_weights([scored], "token")
    algorithm = config_of(**SERVED).algorithm
    (row,) = make_rows([scored], [0.0], weights, algorithm)
    assert row.teacher_logprobs.tolist() == [-1, 0, -3] and row.teacher_logprobs.dtype == np.float32
    assert make_rows([scored], [0.0], weights)[0].teacher_logprobs is None
    ((batch,),) = pack([row], data_size=1, max_tokens=8, multiple_of=4).shards
    assert batch.teacher_logprobs.tolist() == [-1, 0, -3, 0]
    for lost in (None, np.array([np.nan, -1, -2, np.nan], np.float32)):
        scored.teacher_logprobs = lost
        with refused("data.column", about="g/0"):
            make_rows([scored], [0.0], weights, algorithm)
    with pytest.raises(ValueError) as caught:
        trajectory([0, 1, 1, 1], teacher_logprobs=np.zeros(2, np.float32))
    assert "teacher_logprobs" in str(caught.value) and numbers(caught.value)[-3:] == [2, 4, 4]


def test_its_term_is_looked_at_by_the_effect_check():
    shares = {effect.key: effect.share for effect in effects(config_of(**SERVED, reward__function=None))}
    assert shares["algorithm.teacher_coef"] == 1.0, "there is no other advantage"


def test_rollouts_that_are_replayed_have_their_scores():
    assert make_scorer(config_of(**SERVED), {"wise": FakeTeacher()}) is not None
    assert make_scorer(config_of(**SERVED, replay="runs/before"), {}) is None
    assert make_scorer(config_of(), {}) is None


# The request ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def server(texts: Sequence[str] = ()) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """Answers as SGLang does; the bodies of what it was asked."""
    bodies: list[dict[str, Any]] = []

    async def generate(request: web.Request) -> web.Response:
        bodies.append(body := await request.json())
        ids = body["input_ids"][body["logprob_start_len"] :]
        scored = [[None if not n else -float(token), token, None] for n, token in enumerate(ids)]
        top = range(body.get("top_logprobs_num", 0))
        likeliest = [None if not n else [[-n - k / 4, 10 * n + k, None] for k in top] for n in range(len(ids))]
        answer = {"input_token_logprobs": scored, "input_top_logprobs": likeliest}
        return web.json_response({"meta_info": answer})

    async def detokenize(request: web.Request) -> web.Response:
        bodies.append(body := await request.json())
        return web.json_response({"text": [texts[token] for (token,) in body["tokens"]]})

    app = web.Application()
    app.add_routes([web.post("/generate", generate), web.post("/v1/detokenize", detokenize)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}", bodies
    finally:
        await runner.cleanup()


async def test_logits_before_the_first_requested_token_are_not_computed():
    async with server() as (url, bodies):
        engine = FrozenEngine("wise", url, deadline_s=300, retries=0)
        assert await engine.logprobs([5, 6, 7, 8], start=3) == [-8.0]
        assert await engine.logprobs([5, 6, 7, 8]) == [-6.0, -7.0, -8.0]
    assert [body["logprob_start_len"] for body in bodies] == [2, 0]
    assert all(body["sampling_params"]["max_new_tokens"] == 0 for body in bodies)


async def test_the_most_likely_tokens_are_requested_with_the_log_probs():
    async with server() as (url, bodies):
        engine = FrozenEngine("wise", url, deadline_s=300, retries=0)
        values, ids, logprobs = await engine.top_logprobs([5, 6, 7, 8], top=2, start=2)
    assert values == [-7.0, -8.0] and ids.tolist() == [[10, 11], [20, 21]]
    assert logprobs.tolist() == [[-1.0, -1.25], [-2.0, -2.25]]
    (body,) = bodies
    assert body["top_logprobs_num"] == 2 and body["logprob_start_len"] == 1
    for rows in (None, [None, [[0.0, 1, None]] * 2], [None, [[0.0, 1, None]], [[0.0, 1, None]] * 2]):
        with refused("answer.top_scores", about="wise"):
            input_top_logprobs({"input_top_logprobs": rows}, 2, 2, "wise")


async def test_running_servers_must_have_the_students_vocabulary():
    tokenizer = the_tokenizer()
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    for wrong in (None, 9):
        vocabulary = [f"{text}?" if token == wrong else text for token, text in enumerate(texts)]
        async with server(vocabulary) as (url, bodies):
            checking = check_vocabulary(FrozenEngine("wise", url, deadline_s=300, retries=0), tokenizer)
            if wrong is None:
                await checking
            else:
                with refused("teacher.vocabulary", about="9"):
                    await checking
        assert bodies[0]["skip_special_tokens"] is False
