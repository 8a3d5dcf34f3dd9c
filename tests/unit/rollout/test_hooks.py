"""The tools of a hook author: drafts that keep the provenance of every token, and checks before a run starts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slimx.data.records import Prompt, Span
from slimx.rewards.needs import checks_prompts
from slimx.rollout import single_turn
from slimx.rollout.client.generation import Completion
from slimx.rollout.draft import Draft
from slimx.rollout.hook_loading import check_generated, load_hooks
from slimx.rollout.hooks import RolloutContext
from tests.refusals import refused
from tests.unit.rollout.rollout_stand import FakeEngine, config_of, rollout_context, the_tokenizer

# Drafts ---------------------------------------------------------------------------------------------------------------


def draft_of(prompt: list[int]) -> Draft:
    return Draft(prompt, id="g/0", rollout_id="g/0", group_id="g", index=0, seed=7, sampling={"temperature": 0.7})


def completion(ids: list[int], versions: list[tuple[int, int, int]], *, before: int | None = None, **changes: Any):
    """Returns a completion, token i with log-prob -i / 8. `before`: tokens before it, for routes of all positions."""
    routes = None if before is None else np.arange(before + len(ids) - 1, dtype=np.uint8)[:, None, None]
    fields = {
        "token_ids": np.array(ids, np.int32),
        "logprobs": -np.array(ids, np.float32) / 8,
        "versions": versions,
        "finish_reason": "stop",
        "routed_experts": routes,
        "cached_tokens": 0,
        "seconds": 0.5,
        "temperature": 0.7,
    }
    return Completion(**{**fields, **changes})


def logprobs_of(trajectory: Any) -> list[float | None]:
    return [None if np.isnan(x) else x for x in trajectory.logprobs.tolist()]


def test_one_turn_keeps_prompt_and_sampled_tokens_apart():
    draft = draft_of([1, 20, 21])
    draft.add_sampled(completion([4, 6, 3], [(0, 1, 7), (1, 3, 8)], before=3))
    t = draft.finish(metadata={"kept": True})
    assert t.token_ids.tolist() == [1, 20, 21, 4, 6, 3] and t.token_ids.dtype == np.int32
    assert t.loss_mask.tolist() == [0, 0, 0, 1, 1, 1]
    assert logprobs_of(t) == [None, None, None, -0.5, -0.75, -0.375]
    assert t.versions().tolist() == [-1, -1, -1, 7, 8, 8] and t.oldest_version == 7
    assert t.spans == [
        Span(start=0, stop=3, source="prompt"),
        Span(start=3, stop=4, source="sampled", version=7),
        Span(start=4, stop=6, source="sampled", version=8),
    ]
    assert t.routed_experts[:, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert t.sampling == {"temperature": 0.7, "seed": 7}
    assert (t.id, t.rollout_id, t.group_id, t.index) == ("g/0", "g/0", "g", 0)
    assert (t.status, t.finish_reason, t.timings, t.metadata) == (
        "completed",
        "stop",
        {"generate": 0.5},
        {"kept": True},
    )


def test_a_trajectory_has_one_temperature_that_of_its_requests():
    draft = draft_of([1, 20])
    draft.add_sampled(completion([4], [(0, 1, 7)], temperature=0.25))
    assert draft.sampling["temperature"] == 0.25
    with refused("draft.temperature", about="g/0"):
        draft.add_sampled(completion([4], [(0, 1, 7)], temperature=0.5))


def test_a_forgotten_await_is_refused_by_that_word():
    async def generate():
        return completion([4], [(0, 1, 7)])

    draft, coroutine = draft_of([1, 20]), generate()
    with refused("draft.awaitable", about="g/0") as caught:
        draft.add_sampled(coroutine)
    assert "await the completion" in str(caught.value)
    coroutine.close()


def test_two_turns_with_an_inserted_answer_between_them():
    draft = draft_of([1, 20])
    draft.add_sampled(completion([4, 6], [(0, 2, 7)], before=2))
    assert draft.token_ids == [1, 20, 4, 6]
    draft.add_inserted([30, 31])
    draft.add_sampled(completion([8, 3], [(0, 2, 9)], before=6, finish_reason="length"))
    t = draft.finish()
    assert t.token_ids.tolist() == [1, 20, 4, 6, 30, 31, 8, 3]
    assert t.loss_mask.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert logprobs_of(t) == [None, None, -0.5, -0.75, None, None, -1.0, -0.375]
    assert t.versions().tolist() == [-1, -1, 7, 7, -1, -1, 9, 9] and t.oldest_version == 7
    assert [(s.source, s.turn, s.start, s.stop) for s in t.spans] == [
        ("prompt", 0, 0, 2),
        ("sampled", 0, 2, 4),
        ("inserted", 1, 4, 6),
        ("sampled", 1, 6, 8),
    ]
    assert t.sampled_ids().tolist() == [4, 6, 8, 3]
    # The last request saw the whole sequence, so that its routes cover the first turn and the insertion too.
    assert t.routed_experts[:, 0, 0].tolist() == list(range(7))
    assert t.status == "truncated" and t.timings == {"generate": 1.0}


def test_an_inserted_tail_is_left_off_since_nothing_is_learnt_from_it():
    draft = draft_of([1, 20])
    draft.add_sampled(completion([4, 6], [(0, 2, 7)], before=2))
    draft.add_inserted([30, 31])
    draft.add_inserted([32])
    t = draft.finish()
    assert t.token_ids.tolist() == [1, 20, 4, 6] and len(t.loss_mask) == len(t.logprobs) == 4
    assert [span.source for span in t.spans] == ["prompt", "sampled"] and len(t.routed_experts) == 3


def test_sampled_tokens_kept_out_of_the_loss_keep_their_provenance():
    draft = draft_of([1])
    draft.add_sampled(completion([4], [(0, 1, 7)]), train=True)
    draft.add_inserted([])
    draft.add_sampled(completion([6, 3], [(0, 2, 8)]), train=False)
    t = draft.finish()
    assert t.loss_mask.tolist() == [0, 1, 0, 0] and t.versions().tolist() == [-1, 7, 8, 8]
    assert [span.turn for span in t.spans] == [0, 0, 1]


def test_a_demonstration_is_trained_and_has_no_version():
    draft = draft_of([1, 20])
    draft.add_inserted([8, 3], train=True)
    draft.add_inserted([40])
    t = draft.finish()
    assert t.token_ids.tolist() == [1, 20, 8, 3] and t.loss_mask.tolist() == [0, 0, 1, 1]
    assert logprobs_of(t) == [None] * 4 and t.oldest_version is None and t.routed_experts is None
    assert t.status == "completed" and t.finish_reason is None


@pytest.mark.parametrize(("reason", "status"), [("stop", "completed"), ("length", "truncated"), ("abort", "aborted")])
def test_the_status_follows_the_last_completion(reason, status):
    draft = draft_of([1])
    draft.add_sampled(completion([4], [(0, 1, 7)], finish_reason=reason))
    assert (draft.finish().status, draft.finish().finish_reason) == (status, reason)


def test_a_draft_without_a_sampled_or_trained_token_is_refused():
    draft = draft_of([1, 2])
    draft.add_inserted([5])
    with refused("draft.empty", about="g/0"):
        draft.finish()


def test_routes_that_do_not_cover_the_trajectory_are_refused():
    """A trained insertion after the last completion: no engine has seen its tokens."""
    draft = draft_of([1, 2])
    draft.add_sampled(completion([4], [(0, 1, 7)], before=2))
    draft.add_inserted([5], train=True)
    with refused("draft.routes", about="g/0"):
        draft.finish()


def test_versions_that_do_not_cover_a_completion_are_refused():
    draft = draft_of([1, 2])
    draft.add_sampled(completion([4, 5, 6], [(0, 2, 7)]))
    with pytest.raises(ValueError) as caught:
        draft.finish()
    assert "g/0" in str(caught.value) and "4 of 5" in str(caught.value)


# The engine and the context of a rollout ------------------------------------------------------------------------------


def context(engine: FakeEngine | None, **sampling: Any) -> RolloutContext:
    return rollout_context(engine, sampling, group_id="g3", index=1)


async def test_turns_have_different_seeds_and_sampling_overrides():
    engine = FakeEngine()
    ctx = context(engine, temperature=0.7, max_new_tokens=4)
    await ctx.engine.generate([1], turn=0)
    await ctx.engine.generate([1], {"max_new_tokens": 9}, turn=1)
    await ctx.engine.generate([1], turn=0)
    first, second, third = engine.requests
    assert first.seed == third.seed != second.seed
    assert [request.sampling for request in engine.requests] == [
        {"temperature": 0.7, "max_new_tokens": n} for n in (4, 9, 4)
    ]


async def test_a_completion_requested_in_a_run_without_engines_is_refused():
    with refused("hooks.no_engines", about="rollout.engines"):
        await context(None).engine.generate([1])


async def test_single_turn_continues_the_chat_template_of_its_prompt():
    prompt = Prompt(id="p", messages=[{"role": "user", "content": "1+1="}])
    t = await single_turn.generate(context(FakeEngine()), prompt)
    assert the_tokenizer().decode(t.token_ids[:-3].tolist()) == "<user>1+1=<assistant>"
    assert t.loss_mask.tolist() == [0] * 6 + [1] * 3 and (t.id, t.group_id, t.index) == ("g3/1", "g3", 1)


# Loading --------------------------------------------------------------------------------------------------------------

MODULE = """
import functools

async def generate(ctx, prompt): ...
async def generate_with_options(ctx, prompt, *, retries=3): ...
async def generate_one(ctx): ...
def generate_plain(ctx, prompt): ...
async def reward(ctx, trajectory): ...
def reward_plain(ctx, trajectory, *, bonus=0): return len(trajectory) + bonus
async def needs_more(ctx, trajectory, judge): ...
judged = functools.partial(needs_more, judge=1)
def keep(group): ...
async def keep_async(group): ...
limit = 3

class Judge:
    async def __call__(self, ctx, trajectory): ...

judge = Judge()
"""


@pytest.fixture
def hooks_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_hooks.py").write_text(MODULE)
    (tmp_path / "my_broken_hooks.py").write_text("raise ValueError('no judge configured')\n")
    (tmp_path / "my_syntax.py").write_text("def reward(ctx trajectory):\n")
    (tmp_path / "my_needy_hooks.py").write_text("import a_package_that_nobody_has\n")
    (tmp_path / "my_script.py").write_text("import sys\nsys.exit(2)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("generate", "reward", "keep"),
    [
        ("generate", "reward", "keep"),
        ("generate_with_options", "judge", "keep"),
        ("generate", "judged", "keep_async"),
    ],
)
def test_hooks_of_the_right_shape_are_loaded(hooks_on_path, generate, reward, keep):
    hooks = load_hooks(
        config_of(generate=f"my_hooks.{generate}", filter=f"my_hooks.{keep}", reward__function=f"my_hooks.{reward}")
    )
    import my_hooks

    assert hooks.generate is getattr(my_hooks, generate)
    assert hooks.reward is getattr(my_hooks, reward) and hooks.keep is getattr(my_hooks, keep)


def test_hooks_that_are_not_configured_are_none(hooks_on_path):
    hooks = load_hooks(config_of(engines=[], algorithm__name="sft", reward__function=None))
    assert hooks.generate is single_turn.generate and hooks.reward is None and hooks.keep is None


REFUSED = [
    ("generate", "generate", "dotted.name"),
    ("generate", "my_hooks:generate.now", "dotted.path"),
    ("generate", "no_such_package.hooks.generate", "dotted.import"),
    ("generate", "my_hooks.generat", "dotted.missing"),
    ("generate", "my_hooks.limit", "dotted.callable"),
    ("generate", "my_hooks.generate_one", "dotted.signature"),
    ("reward__function", "my_hooks.needs_more", "dotted.signature"),
    ("reward__function", "my_broken_hooks.reward", "dotted.raised"),
    ("reward__function", "my_syntax.reward", "dotted.raised"),
    ("reward__function", "my_needy_hooks.reward", "dotted.import"),
    ("filter", "my_hooks.generate_plain", "dotted.signature"),
]


@pytest.mark.parametrize(("key", "path", "code"), REFUSED, ids=[f"{path}" for _, path, _ in REFUSED])
def test_a_hook_that_cannot_work_is_refused_with_its_key_and_what_is_wrong(hooks_on_path, key, path, code):
    about = "reward.function" if key == "reward__function" else f"rollout.{key}"
    with refused(code, about=about) as caught:
        load_hooks(config_of(**{key: path}))
    assert path.partition(":")[0].split(".")[0] in str(caught.value) and "\n" not in str(caught.value)


def test_a_script_in_place_of_a_module_is_refused_with_its_key(hooks_on_path):
    with refused("dotted.raised", about="reward.function"):
        load_hooks(config_of(reward__function="my_script.reward"))


@pytest.mark.parametrize("wants_tokenizer", [True, False])
def test_a_check_of_prompts_gets_options_and_the_tokenizer_if_it_takes_one(wants_tokenizer: bool):
    found: list[tuple[Any, ...]] = []

    def plain(prompts: Any, *, depth: int = 1) -> None:
        found.append((prompts, depth))

    def with_tokenizer(prompts: Any, *, tokenizer: Any, depth: int = 1) -> None:
        found.append((prompts, depth, tokenizer))

    @checks_prompts(with_tokenizer if wants_tokenizer else plain)
    async def generate(ctx: Any, prompt: Any, *, depth: int = 1) -> list[Any]:
        return []

    check_generated(partial(generate, depth=3), ["prompt"], "tokenizer")
    assert found == [(["prompt"], 3, *(["tokenizer"] if wants_tokenizer else []))]


def test_a_function_of_the_script_that_started_a_run_is_missed_by_that_name():
    with refused("dotted.script", about="reward.function"):
        load_hooks(config_of(reward__function="__main__.no_such_reward"))
