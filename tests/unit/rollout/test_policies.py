"""Rollouts that speak to several trained policies: each samples with its own engines, and trains its own tokens."""

from __future__ import annotations

import numpy as np
import pytest

from slimx.data.records import Prompt, Trajectory
from slimx.data.saved.codec import decode, encode
from slimx.rollout.client.completion import Completion
from slimx.rollout.client.request import GenerationRequest
from slimx.rollout.flow.progress import GroupProgress, Journal, Recorded
from slimx.rollout.flow.rollouts import GroupMaker
from slimx.rollout.hook_loading import Hooks
from slimx.rollout.hooks import Generate, RolloutContext
from slimx.rollout.policy import PolicyClient
from tests.unit.rollout.rollout_stand import FakeEngine, config_of, one, the_tokenizer

PROMPT = Prompt(id="p", messages=[{"role": "user", "content": "1+2="}], answer="3")


def maker_of(generate: Generate) -> tuple[GroupMaker, FakeEngine, FakeEngine]:
    actor, judge = FakeEngine(), FakeEngine()
    maker = GroupMaker(
        config_of(policies__judge={}, policies__solver={"shares": "actor"}),
        Hooks(generate, one, None),
        {"actor": PolicyClient(actor, the_tokenizer()), "judge": PolicyClient(judge, the_tokenizer())},
    )
    return maker, actor, judge


async def both(ctx: RolloutContext, prompt: Prompt) -> list[Trajectory]:
    out = []
    for role in ("solver", "judge"):
        view = ctx.policies[role]
        draft = view.draft(prompt, suffix=f"-{role}")
        draft.add_sampled(await view.engine.generate(draft.token_ids))
        view.log(f"seen_{role}", view.version)
        out.append(draft.finish())
    return out


async def test_each_trajectory_is_of_the_policy_whose_engines_sampled_it() -> None:
    maker, actor, judge = maker_of(both)
    maker.versions = {"actor": 5, "judge": 4}
    actor.version, judge.version = 5, 4
    assert maker.version == 4, "a ticket is as old as the oldest policy"
    outcome = await maker.make(PROMPT, group_id="g0", number=0)
    assert outcome.reason is None, outcome.detail
    trajectories = outcome.group.trajectories
    assert [t.policy for t in trajectories] == ["actor", "judge"] * 2
    assert [t.oldest_version for t in trajectories] == [5, 4] * 2
    assert {span.policy for span in trajectories[1].spans if span.source == "sampled"} == {"judge"}
    assert trajectories[0].metrics == {"seen_solver": 5, "seen_judge": 4}
    assert len(actor.requests) == len(judge.requests) == 2
    # The same prompt and turn: were the seeds the same, an answer of one would stand for the other's in a resumed run.
    assert not {request.seed for request in actor.requests} & {request.seed for request in judge.requests}
    maker.close()


async def test_every_view_of_a_rollout_knows_all_others() -> None:
    async def around(ctx: RolloutContext, prompt: Prompt) -> list[Trajectory]:
        for view in ctx.policies.values():
            assert view.policies.keys() == {"actor", "judge", "solver"}
            assert view.policies["actor"] is view.policies["solver"] is ctx
        return await both(ctx.policies["judge"].policies["actor"], prompt)

    maker, *_ = maker_of(around)
    outcome = await maker.make(PROMPT, group_id="g0", number=0)
    assert outcome.reason is None, outcome.detail
    maker.close()


def completion(tokens: list[int], routes: np.ndarray | None, reason: str = "stop", policy: str = "actor") -> Completion:
    return Completion(
        np.array(tokens, np.int32), np.zeros(len(tokens), np.float32), [(0, len(tokens), 0)], reason, routes, 0, 0.0,
        policy=policy,
    )  # fmt: skip


def test_a_journal_gives_every_answer_with_the_routes_that_it_came_with() -> None:
    """Those of a turn are held once, by the last one; another policy's or version's begin with none of them."""
    routes = np.arange(24, dtype=np.uint8).reshape(12, 2, 1)

    def request_of(tokens: list[int], seed: int = 0, policy: str = "actor") -> GenerationRequest:
        return GenerationRequest(tokens, {}, seed, routed_experts=True, policy=policy)

    exchanges = [
        (request_of([1, 2]), completion([3, 4], routes[:3])),
        (request_of([1, 2, 3, 4], 7, "judge"), completion([9], 90 + routes[:4], policy="judge")),
        (request_of([1, 2, 3, 4, 5]), completion([6], routes[:5])),
        (request_of([1, 2, 3, 4, 5, 6, 7]), completion([8], 50 + routes[:7], "abort")),
        (request_of([1, 2, 3, 4, 5, 6, 7]), completion([8, 8], routes[:8])),
    ]
    journal = Journal()
    for request, answer in exchanges:
        journal.record(request, answer)
    entries = decode(list[Recorded], encode(journal.entries()))
    assert [len(entry.completion.routed_experts) for entry in entries if entry.routes_of is None] == [4, 8]
    for resumed in (Journal(entries), Journal(Journal(entries).entries())):
        for request, answer in [*exchanges[:3], exchanges[4]]:
            assert np.array_equal(resumed.replay(request).routed_experts, answer.routed_experts)


async def test_a_resumed_group_replays_the_answers_of_each_policy() -> None:
    maker, *_ = maker_of(both)
    progress = GroupProgress()
    first = await maker.make(PROMPT, group_id="g0", number=0, progress=progress)
    journals = {index: journal.entries() for index, journal in progress.journals.items()}
    assert not journals, "what is complete needs no journal"

    async def cut(ctx: RolloutContext, prompt: Prompt) -> list[Trajectory]:
        await both(ctx, prompt)
        raise RuntimeError("the run ends here")

    broken, *_ = maker_of(cut)
    progress = GroupProgress()
    journal = progress.journal(0)
    await broken.make(PROMPT, group_id="g0", number=0, progress=progress)
    again, actor, judge = maker_of(both)
    resumed = GroupProgress()
    resumed.journals[0] = type(journal)(journal.entries())
    outcome = await again.make(PROMPT, group_id="g0", number=0, progress=resumed)
    assert [t.token_ids.tolist() for t in outcome.group.trajectories] == [
        t.token_ids.tolist() for t in first.group.trajectories
    ]
    assert [t.policy for t in outcome.group.trajectories] == ["actor", "judge"] * 2
    assert len(actor.requests) == len(judge.requests) == 1, "rollout 0 was not sampled again"
    for instance in (maker, broken, again):
        instance.close()


async def test_a_role_that_shares_weights_equals_one_policy_byte_for_byte() -> None:
    """Whatever comes behind groups (advantages, batches, trainers, publications) knows no roles."""

    async def by_roles(ctx: RolloutContext, prompt: Prompt) -> list[Trajectory]:
        return await twice(ctx.policies["actor"], ctx.policies["solver"], prompt)

    async def alone(ctx: RolloutContext, prompt: Prompt) -> list[Trajectory]:
        return await twice(ctx, ctx, prompt)

    async def twice(one: RolloutContext, other: RolloutContext, prompt: Prompt) -> list[Trajectory]:
        drafts = [one.draft(prompt), other.draft(prompt, suffix="-2")]
        for turn, (view, draft) in enumerate(zip((one, other), drafts, strict=True)):
            draft.add_sampled(await view.engine.generate(draft.token_ids, turn=turn))
            view.add("asked", turn)
        return [draft.finish() for draft in drafts]

    made = []
    for config, hook in ((config_of(policies__solver={"shares": "actor"}), by_roles), (config_of(), alone)):
        assert config.trained == ["actor"]
        maker = GroupMaker(config, Hooks(hook, one, None), {"actor": PolicyClient(FakeEngine(), the_tokenizer())})
        made.append(encode((await maker.make(PROMPT, group_id="g0", number=0)).group))
        maker.close()
    assert made[0] == made[1]


async def mixed(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    """Mixes the actor's draft with the judge's tokens."""
    draft = ctx.draft(prompt)
    draft.add_sampled(await ctx.policies["judge"].engine.generate(draft.token_ids))
    return draft.finish()


async def unknown(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    draft = ctx.draft(prompt)
    draft.add_sampled(await ctx.engine.generate(draft.token_ids))
    trajectory = draft.finish()
    trajectory.policy = "writer"
    return trajectory


@pytest.mark.parametrize(("hook", "named"), [(mixed, "judge"), (unknown, "writer")])
async def test_foreign_tokens_and_orphaned_trajectories_are_dropped(hook: Generate, named: str) -> None:
    maker, *_ = maker_of(hook)
    outcome = await maker.make(PROMPT, group_id="g0", number=0)
    assert outcome.reason == "generate failed" and named in outcome.detail
    maker.close()
