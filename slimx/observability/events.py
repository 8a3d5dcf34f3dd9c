"""Events of a run, which a receiver may tell people of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal

from slimx import entry_points
from slimx.errors import SlimxError

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


class Events:
    """The events of one run, of which nothing comes by itself."""

    step: int | None = None
    """The step in progress; None before the first."""

    def tell(self, kind: Kind, what: str, *, about: str = "") -> None:
        """Take an event; `what` is a sentence without the run's name. `about`: the phase, part or error code; "" where
        it is the whole run."""

    def look(self, activity: Mapping[str, Any]) -> None:
        """Take the present phase, as a status has it, every few seconds."""

    def recorded(self, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step."""


def open_events(config: Any, note: Callable[[str], None]) -> AbstractContextManager[Events]:
    """Returns the events of a run of `config`, to be entered as long as it lasts: those of the entry point of
    `slimx.event_receivers`, which is called with the same arguments. `note` shows a line to people.

    Raises SlimxError for a second one."""
    name, *others = entry_points.find("slimx.event_receivers")
    if others:
        raise SlimxError(
            f"a run's events have one receiver, and there are {name} and {', '.join(others)} (entry points of "
            "slimx.event_receivers); uninstall the package of all but one",
            code="entry_point.twice",
            about=others[0],
        )
    return entry_points.load("slimx.event_receivers", name)(config, note)
