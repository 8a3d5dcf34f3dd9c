"""Saved steps come back as batches in their order, and what could not be trained again is named before anything starts;
that losses are the same to the last bit is shown by tests/integration/test_replay.py."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

from slimx.config.schema import Config
from slimx.data.records import Group, Prompt
from slimx.data.saved.codec import encode_groups
from slimx.data.saved.step_files import Origin, StepFiles
from slimx.layout.ranks import Sizes
from slimx.orchestration.state.directory import resume_point
from slimx.orchestration.state.resume import check_resume, trainer_state
from slimx.orchestration.state.saves import RunState, Saves
from slimx.rollout.flow.replay import Replay, check_replay
from tests.extras.rewards.reward_stand import trajectory
from tests.refusals import invalid, refused
from tests.unit.orchestration.checkpointing_stand import trained
from tests.unit.rollout.rollout_stand import config_of

ORIGIN = Origin(
    model={"hidden_size": 8}, vocabulary="v", prompts_per_step=1, group_size=2, max_staleness=0, routes=False
)


def saved(run: Path, steps: int, origin: Origin = ORIGIN) -> list[Group]:
    files = StepFiles(run / "rollouts", origin, every=1, keep=0, resume_step=0)
    groups = [
        Group(id=f"g{step}", prompt=Prompt(id=f"p{step}", token_ids=[1]), trajectories=[trajectory(2), trajectory(3)])
        for step in range(1, steps + 1)
    ]
    for step, group in enumerate(groups, start=1):
        files.write(step, step - 1, [group], {"filter": step})
    return groups


async def test_batches_come_in_the_order_of_steps_from_any_of_them(tmp_path):
    groups = saved(tmp_path, 3)
    replay = Replay(tmp_path)
    for step, group in enumerate(groups, start=1):
        batch = await replay.next_batch()
        assert encode_groups(batch.groups) == encode_groups([group]) and batch.dropped == Counter(filter=step)
    with refused("replay.step", about="4"):
        await replay.next_batch()
    replay.seek(1)
    assert [group.id for group in (await replay.next_batch()).groups] == ["g2"]


def test_steps_that_fit_are_accepted_and_others_named(tmp_path):
    saved(tmp_path, 4)
    check_replay(tmp_path, ORIGIN, first=1, last=4, routes=False)
    check_replay(tmp_path, ORIGIN, first=5, last=4, routes=True)  # nothing is left to train
    (tmp_path / "rollouts" / "step-0000003.groups").unlink()
    check_replay(tmp_path, ORIGIN, first=4, last=4, routes=False)
    for origin, routes, code, about in (
        (ORIGIN, False, "replay.step", "3"),
        (replace(ORIGIN, model={"hidden_size": 9}), False, "replay.origin", "config.json"),
        (replace(ORIGIN, vocabulary="w"), False, "replay.origin", "vocabulary"),
        (replace(ORIGIN, group_size=4), False, "replay.origin", "rollout.group_size"),
        (replace(ORIGIN, prompts_per_step=2), False, "replay.origin", "rollout.prompts_per_step"),
        (replace(ORIGIN, max_staleness=1), False, "replay.origin", "schedule.max_staleness"),
        (replace(ORIGIN, policies=["actor", "judge"]), False, "replay.origin", "policies"),
        (ORIGIN, True, "replay.routes", "trainer.moe.routing_replay"),
    ):
        with refused(code, about=about) as caught:
            check_replay(tmp_path, origin, first=1, last=4, routes=routes)
        assert code == "replay.step" or "step-0000001.groups" in str(caught.value), "the file is named"
    with refused("replay.step", about="5"):
        check_replay(tmp_path, ORIGIN, first=4, last=5, routes=False)
    with refused("replay.empty", about="rollout.replay"):
        check_replay(tmp_path / "nowhere", ORIGIN, first=1, last=1, routes=False)


def test_settings_that_exclude_a_replay_are_refused():
    assert config_of(replay="there").served.policy == ()
    assert config_of(replay="there").rollout.sampled
    # Without engines of its own a run may replay what other engines sampled.
    assert not config_of(replay="there", engines=[]).rollout.sampled
    with invalid("replay.colocate", about="schedule.colocate"):
        config_of(replay="there", schedule__colocate=True)
    with invalid("replay.own_directory", about="rollout.replay"):
        config_of(replay="./d")


def test_a_fork_starts_at_another_runs_checkpoint(tmp_path):
    def checkpoint(directory: Path, step: int) -> Path:
        saves = Saves(directory, keep=9)
        return saves.commit(saves.begin(step), RunState(step, step, policies={}, rollouts={}).files(), {})

    there, saves = checkpoint(tmp_path / "there", 4), Saves(tmp_path / "own", keep=9)

    def point(resume: str, fork: Path | None) -> Path | None:
        config = config_of(run__dir=str(tmp_path / "run"), run__resume=resume, run__fork=fork and str(fork))
        return resume_point(config, tmp_path / "run", saves)

    assert point("auto", None) is None
    assert point("auto", there) == point("must", there) == point("never", there) == there
    with refused("run.fork"):
        point("auto", tmp_path / "there")
    newest = checkpoint(tmp_path / "own", 6)
    assert point("auto", there) == point("must", there) == newest and point("never", there) == there


def test_a_replays_checkpoint_is_continued_by_a_replay_alone(tmp_path):
    saves = Saves(tmp_path, keep=1)
    config, sizes = config_of(checkpoint__load_optimizer=False), Sizes()
    policies = {"actor": trainer_state(config, sizes)}
    state = RunState(1, 1, policies, rollouts=Replay(Path("there")).state())
    path = saves.commit(saves.begin(1), state.files(), {})
    with refused("resume.replay"):
        check_resume(path, state, trained(config, sizes))
    replaying = config.model_copy(update={"rollout": config.rollout.model_copy(update={"replay": "there"})})
    assert isinstance(replaying, Config)
    check_resume(path, state, trained(replaying, sizes))
