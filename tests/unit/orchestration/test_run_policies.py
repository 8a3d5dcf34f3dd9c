"""The loop with two policies in one process: both train, publish and save in the same steps, or none does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

from slimx.data.records import Prompt, Trajectory
from slimx.errors import DeadlineError, SlimxError
from slimx.orchestration.loop import train
from slimx.orchestration.policies import metrics_of
from slimx.orchestration.state.resume import check_resume
from slimx.orchestration.state.saves import Saves, read_state
from slimx.rollout.hooks import RolloutContext
from tests.refusals import refused
from tests.unit.orchestration.run_stand import LIMIT_S, Parts, lines, run_of, stopped


class Silent(Parts):
    """Trainers that never report what they have saved."""

    async def save(self, path: Path, *, step: int) -> None:
        self.done.append(f"save {step}")


async def spoken_to_both(ctx: RolloutContext, prompt: Prompt) -> list[Trajectory]:
    """A trajectory of each policy."""
    drafts = [view.draft(prompt, suffix=f"-{name}") for name, view in ctx.policies.items()]
    for draft in drafts:
        draft.add_sampled(await ctx.policies[draft.policy].engine.generate(draft.token_ids))
    return [draft.finish() for draft in drafts]


async def test_two_policies_train_publish_and_save_in_the_same_steps(tmp_path, parts):
    judge = Parts()
    both = {"further": {"judge": judge}, "generate": spoken_to_both, "policies__judge": {}}
    run = run_of(tmp_path, parts, schedule__steps=2, checkpoint__every=2, **both)
    await asyncio.wait_for(train(run), LIMIT_S)
    await stopped(run)
    trained = ["publish 0", "train 0 at version 0", "publish 1", "train 1 at version 1", "publish 2", "save 2"]
    assert parts.done == judge.done == trained
    # Batches of a step: as many rows for each, those of its own trajectories.
    assert [len(rows) for rows in parts.rows] == [len(rows) for rows in judge.rows] == [8, 8]
    assert all(actor != other for actor, other in zip(parts.rows, judge.rows, strict=True))
    metrics = lines(tmp_path / "metrics.jsonl")[0]["metrics"]
    for name in ("gap/tokens", "reward/mean", "publish/mib", "engines/serving", "batch/microbatches"):
        assert metrics[name] == metrics[f"policy/judge/{name}"], name
    assert "policy/judge/dropped/total" not in metrics and metrics["dropped/total"] == 0
    newest = Saves(tmp_path / "checkpoints", keep=2).newest()
    state = read_state(newest)
    assert [*state.policies] == ["actor", "judge"] and (newest / "policies" / "judge").is_dir()
    assert not list(newest.rglob("reports"))

    parts.done.clear()
    judge.done.clear()
    again = run_of(tmp_path, parts, schedule__steps=3, **both)
    check_resume(newest, state, again.policies)
    with refused("resume.policies", about="policies"):
        check_resume(newest, state, {"actor": again.policies["actor"]})
    await again.restore(newest, state)
    assert again.maker.versions == {"actor": 2, "judge": 2}
    await asyncio.wait_for(train(again), LIMIT_S)
    await stopped(again)
    assert parts.done == ["restore iter_0000002", "publish 2", "train 2 at version 2", "publish 3", "save 3"]
    assert judge.done == ["restore judge", *parts.done[1:]]


async def test_a_checkpoint_is_complete_when_every_policy_has_written_its_part(tmp_path, parts):
    judge = Silent()
    both = {"further": {"judge": judge}, "generate": spoken_to_both, "policies__judge": {}}
    run = run_of(tmp_path, parts, checkpoint__deadline=0.5, **both)
    await run.save()
    with refused("deadline", about=None, kind=DeadlineError) as error:
        await run.finish_save()
    assert error.value.holder == "trainer-judge rank 0"
    assert Saves(tmp_path / "checkpoints", keep=2).newest() is None
    await stopped(run)


async def test_a_failure_of_one_policy_cancels_the_others():
    waiting = asyncio.Event()
    left = []

    async def measure(policy: SimpleNamespace) -> dict[str, float]:
        if policy.name == "actor":
            await waiting.wait()
            raise SlimxError("no metrics", code="policies.measure")
        try:
            waiting.set()
            await asyncio.Event().wait()
        finally:
            left.append(policy.name)

    with refused("policies.measure"):
        await metrics_of({name: SimpleNamespace(name=name) for name in ("actor", "judge")}, measure)
    await asyncio.sleep(0)
    assert left == ["judge"]


async def test_a_step_without_a_trajectory_of_a_policy_ends_the_run(tmp_path, parts):
    judge = Parts()
    run = run_of(tmp_path, parts, further={"judge": judge}, policies__judge={})
    with refused("policies.idle", about="judge"):
        await asyncio.wait_for(train(run), LIMIT_S)
    assert judge.done == ["publish 0"]
    await stopped(run)
