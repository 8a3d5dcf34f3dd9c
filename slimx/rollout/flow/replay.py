"""Replays the batches that an earlier run saved, step by step, to train without engines."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from slimx.data.records import Prompt, Trajectory
from slimx.data.saved.step_files import DIRECTORY, Origin, described, read_step, read_step_about, step_files
from slimx.errors import SlimxError
from slimx.json_types import Json
from slimx.rollout.flow.tickets import Batch
from slimx.rollout.hook_loading import Hooks
from slimx.rollout.hooks import RolloutContext
from slimx.runtime.tasks import in_thread


class Replay:
    """Stand-in for the `RolloutManager` that returns saved batches, for a run with `rollout.replay` set."""

    def __init__(self, run: Path):
        """Sets the position before the first step. `run`: directory of the run that saved the batches."""
        self.run = run
        self.done = 0

    def seek(self, done: int) -> None:
        """Sets the position to the batch after step `done`."""
        self.done = done

    async def next_batch(self) -> Batch:
        """Returns the groups of the next step, in training order, with the number of groups dropped for that step, by
        reason.

        Raises SlimxError if the file of the step is missing or damaged.
        """
        about, groups = await in_thread(read_step, step_path(self.run, self.done + 1))
        self.done += 1
        return Batch(groups, Counter(about.dropped))

    def status(self) -> None:
        """Returns None, because no request is in flight."""

    async def rest(self) -> None:
        """Does nothing, because no request is in flight."""

    async def stop(self) -> None:
        """Does nothing, because no request is in flight."""

    def state(self) -> Json:
        """Returns the state for a checkpoint. It does not contain the position in the replay, which follows from the
        checkpoint's step."""
        return {"replay": str(self.run), "tickets": []}


def step_path(run: Path, step: int) -> Path:
    """Returns the path of the file with the saved batch of `step`. Raises SlimxError if there is no such file."""
    files = step_files(run / DIRECTORY)
    if step not in files:
        raise SlimxError(
            f"rollout.replay: {run / DIRECTORY} does not contain step {step}, only {described(list(files))}; choose "
            "one of the steps in this directory",
            code="replay.step",
            about=str(step),
        )
    return files[step]


def check_replay(run: Path, origin: Origin, *, first: int, last: int, routes: bool) -> None:
    """Raises SlimxError for the first step between `first` and `last` that is missing in the replayed run `run` or does
    not match `origin`, the settings of the current run that determine its batches.

    `routes`: True if the saved trajectories must contain routed experts.
    """
    files = step_files(run / DIRECTORY)
    if not files:
        raise SlimxError(
            f"rollout.replay: {run / DIRECTORY} contains no saved batches; set rollout.replay to the directory of a "
            "run with engines and track.rollouts.every=1",
            code="replay.empty",
            about="rollout.replay",
        )
    for step in range(first, last + 1):
        if step not in files:
            raise SlimxError(
                f"rollout.replay: {run / DIRECTORY} contains {described(list(files))}, but not step {step} of the "
                f"steps {first} to {last} that this run trains; lower schedule.steps, set run.fork to a later "
                "checkpoint, or replay a run that saved every step (track.rollouts.every=1)",
                code="replay.step",
                about=str(step),
            )
        saved = read_step_about(files[step]).origin
        differences = saved.differences(origin)
        if differences:
            raise SlimxError(
                f"rollout.replay: {files[step]} does not match this run ({'; '.join(differences.values())}); use the "
                "settings of the saved run, or set rollout.replay to another run",
                code="replay.origin",
                about=", ".join(differences),
            )
        if routes and not saved.routes:
            raise SlimxError(
                f"rollout.replay: {files[step]} contains no routed experts, which trainer.moe.routing_replay=R3 needs; "
                "set trainer.moe.routing_replay=none, or replay a run with track.rollouts.routes=true",
                code="replay.routes",
                about="trainer.moe.routing_replay",
            )


async def _nothing(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    raise SlimxError("a run with rollout.replay called the generate hook, which is a bug in slimx; report the bug")


NO_HOOKS = Hooks(generate=_nothing, reward=None, keep=None)
"""Hooks of a replay: never called, because rewards and filters were applied before the batches were saved."""
