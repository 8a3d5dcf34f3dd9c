"""Events of a run that somebody is told of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "stalled",  # a phase has lasted too long (track.stall)
    "went_on",  # the phase that was told as stalled has ended
    "engine_lost",
    "restarted",  # an engine or the router was started again
    "restart_failed",
    "trainers_replaced",  # all trainer ranks were started again in place of a lost one (recovery.trainers)
    "trainers_shrunk",  # fewer data-parallel ranks take the place of lost ones (recovery.shrink_after)
    "step_skipped",  # the optimizer skipped a step: a gradient was infinite or not a number
    "no_signal",  # several steps in a row taught a policy nothing
    "stopped",  # by SIGUSR1, SIGTERM or Ctrl-C
    "failed",
    "finished",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event as the webhook posts it."""

    event: Kind
    text: str
    """One line for people, with the run's name; chat services show the field of this name."""
    run: str
    """run.name."""
    directory: str
    """run.dir, absolute."""
    host: str
    """Machine of the driver."""
    step: int | None
    """The step in progress; None before the first."""
    about: str
    """The phase, part or error code that the event is about; "" where it is the whole run."""
    time: float
    """Unix seconds."""
