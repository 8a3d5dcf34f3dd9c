"""Rules about training on rollouts that another run saved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from slimx.config.rule import rule
from slimx.config.sections.rollout import Rollout
from slimx.config.sections.run import RunSection
from slimx.config.sections.schedule import Schedule


@rule("replay.colocate", about="schedule.colocate")
def no_turns(rollout: Rollout, schedule: Schedule) -> Iterator[str]:
    if rollout.replay is not None and schedule.colocate:
        yield (
            "rollout.replay and schedule.colocate exclude each other: a replay has no engines to take turns with; set "
            "schedule.colocate=false"
        )


@rule("replay.own_directory", about="rollout.replay")
def another_run(rollout: Rollout, run: RunSection) -> Iterator[str]:
    if rollout.replay is not None and Path(rollout.replay).resolve() == Path(run.dir).resolve():
        yield f"rollout.replay is run.dir itself ({run.dir}); choose another run.dir for what is trained again"
