"""Replays the batches that an earlier run saved, step by step: training without engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from slimx.data.records import Prompt, Trajectory
from slimx.data.saved.step_files import DIRECTORY, Origin, read_step, read_step_about, step_files
from slimx.errors import SlimxError
from slimx.json_types import Json
from slimx.rollout.flow.tickets import Batch
from slimx.rollout.hook_loading import Hooks
from slimx.rollout.hooks import RolloutContext
from slimx.runtime.tasks import in_thread


class Replay:
    """Replaces a run's `RolloutManager`."""

    def __init__(self, run: Path):
        """Begins before the first step. `run`: directory of the run that saved the batches."""
        self.run = run
        self.done = 0

    def seek(self, done: int) -> None:
        """Continues after step `done`."""
        self.done = done

    async def next_batch(self) -> Batch:
        """Returns the groups of the next step, in training order, and its dropped groups. Raises SlimxError for a
        missing or damaged file."""
        about, groups = await in_thread(read_step, step_path(self.run, self.done + 1))
        self.done += 1
        return Batch(groups, Counter(about.dropped))

    def status(self) -> None:
        """Returns None: no request is in flight."""

    async def rest(self) -> None:
        """Does nothing: no request is in flight."""

    async def stop(self) -> None:
        """Does nothing: no request is in flight."""

    def state(self) -> Json:
        """Returns the state for a checkpoint, without cursor and waiting groups: the position is the step."""
        return {"replay": str(self.run), "tickets": []}


def step_path(run: Path, step: int) -> Path:
    """Returns the file of one step. Raises SlimxError if there is none."""
    files = step_files(run / DIRECTORY)
    if step not in files:
        raise SlimxError(
            f"rollout.replay: {run / DIRECTORY} has no step {step}; it has {_words(list(files))}",
            code="replay.step",
            about=str(step),
        )
    return files[step]


def check_replay(run: Path, origin: Origin, *, first: int, last: int, routes: bool) -> None:
    """Raises SlimxError for the first of the steps `first` to `last` of `run` that is missing or does not match this
    run's `origin`.

    `routes`: True if the experts of each token are required.
    """
    files = step_files(run / DIRECTORY)
    if not files:
        raise SlimxError(
            f"rollout.replay: {run / DIRECTORY} holds no saved step; use the directory of a run "
            "with engines and track.rollouts.every=1",
            code="replay.empty",
            about="rollout.replay",
        )
    for step in range(first, last + 1):
        if step not in files:
            raise SlimxError(
                f"rollout.replay: {run / DIRECTORY} has no step {step}, but this run trains {first} to {last}; "
                f"it has {_words(list(files))}: set schedule.steps, begin after a checkpoint (run.fork), or save "
                "more steps in that run (track.rollouts)",
                code="replay.step",
                about=str(step),
            )
        saved = read_step_about(files[step]).origin
        differences = saved.differences(origin)
        if differences:
            raise SlimxError(
                f"rollout.replay: {files[step]} does not match this run: {'; '.join(differences.values())}",
                code="replay.origin",
                about=", ".join(differences),
            )
        if routes and not saved.routes:
            raise SlimxError(
                f"rollout.replay: {files[step]} has no experts of tokens, which trainer.moe.routing_replay=R3 needs; "
                "set it to none, or save with track.rollouts.routes=true",
                code="replay.routes",
                about="trainer.moe.routing_replay",
            )


async def _nothing(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    raise SlimxError("a run with rollout.replay generates nothing")


NO_HOOKS = Hooks(generate=_nothing, reward=None, keep=None)
"""Hooks of a replay: rewards and filters were applied before saving."""


def _words(steps: Sequence[int]) -> str:
    """Describes ascending steps."""
    if not steps:
        return "none"
    if len(steps) == 1:
        return f"step {steps[0]}"
    return f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
