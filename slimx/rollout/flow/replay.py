"""Batches that an earlier run has saved, handed out again step by step: training without engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slimx.data.records import Prompt, Trajectory
from slimx.data.saved.step_files import DIRECTORY, Origin, read_step, read_step_about, step_files
from slimx.errors import SlimxError
from slimx.rollout.flow.tickets import Batch
from slimx.rollout.hook_loading import Hooks
from slimx.rollout.hooks import RolloutContext
from slimx.runtime.tasks import in_thread


class Replay:
    """Stands where a run has its `RolloutManager`."""

    def __init__(self, run: Path):
        """`run`: the directory of the run that saved them."""
        self.run, self.done = run, 0

    def seek(self, done: int) -> None:
        """Go on after step `done`."""
        self.done = done

    async def next_batch(self) -> Batch:
        """The groups of the next step, in the order in which they were trained, and what was dropped beside them.
        Raises SlimxError naming a file that is missing or damaged."""
        about, groups = await in_thread(read_step, step_path(self.run, self.done + 1))
        self.done += 1
        return Batch(groups, Counter(about.dropped))

    def status(self) -> None:
        """Nothing is in flight."""

    async def rest(self) -> None:
        """Nothing is in flight."""

    async def stop(self) -> None:
        """Nothing is in flight."""

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, without cursor and waiting groups: the position is the step."""
        return {"replay": str(self.run), "tickets": []}


def step_path(run: Path, step: int) -> Path:
    """The file of one step. Raises SlimxError if there is none."""
    files = step_files(run / DIRECTORY)
    if step not in files:
        raise SlimxError(
            f"rollout.replay: {run / DIRECTORY} has no step {step}; it has {_words(list(files))}",
            code="replay.step",
            about=str(step),
        )
    return files[step]


def check_replay(run: Path, origin: Origin, *, first: int, last: int, routes: bool) -> None:
    """Check that the steps `first` to `last` of `run` are there and were made with what this run has (`origin`).

    `routes`: whether they must hold the experts of each token. Raises SlimxError naming the first step that does not
    fit, before anything is started."""
    files = step_files(run / DIRECTORY)
    if not files:
        raise SlimxError(
            f"rollout.replay: {run / DIRECTORY} holds no saved step; name the directory of a run with engines and "
            "track.rollouts.every=1",
            code="replay.empty",
            about="rollout.replay",
        )
    for step in range(first, last + 1):
        if step not in files:
            raise SlimxError(
                f"rollout.replay: {run / DIRECTORY} has no step {step}, and this run trains {first} to {last}; it has "
                f"{_words(list(files))}: set schedule.steps, begin after a checkpoint (run.fork), or let that run keep "
                "more (track.rollouts)",
                code="replay.step",
                about=str(step),
            )
        there = read_step_about(files[step]).origin
        if differences := there.differences(origin):
            raise SlimxError(
                f"rollout.replay: {files[step]} cannot be trained here: {'; '.join(differences.values())}",
                code="replay.origin",
                about=", ".join(differences),
            )
        if routes and not there.routes:
            raise SlimxError(
                f"rollout.replay: {files[step]} keeps no experts of tokens, which trainer.moe.routing_replay=R3 needs; "
                "set it to none, or save with track.rollouts.routes=true",
                code="replay.routes",
                about="trainer.moe.routing_replay",
            )


async def _nothing(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    raise SlimxError("a run with rollout.replay generates nothing")


NO_HOOKS = Hooks(generate=_nothing, reward=None, keep=None)
"""The hooks of a replay: rewards and filters have spoken."""


def _words(steps: Sequence[int]) -> str:
    """Ascending steps."""
    if not steps:
        return "none"
    return f"{len(steps)} steps from {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
