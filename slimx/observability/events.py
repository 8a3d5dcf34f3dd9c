"""Events of a run, which a receiver may forward to users."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Literal

from slimx import entry_points
from slimx.errors import SlimxError
from slimx.json_types import Json

Kind = Literal[
    "stalled",  # a phase takes too long (track.stall)
    "went_on",  # the stalled phase has ended
    "engine_lost",
    "restarted",  # an engine or the router was restarted
    "restart_failed",
    "trainers_replaced",  # all trainer ranks were restarted after the loss of one (recovery.trainers)
    "trainers_shrunk",  # fewer data-parallel ranks replace the lost ones (recovery.shrink_after)
    "step_skipped",  # the optimizer skipped a step: a gradient was infinite or NaN
    "no_signal",  # a policy learned nothing in several consecutive steps
    "stopped",  # by SIGUSR1, SIGTERM or Ctrl-C
    "failed",
    "finished",
]


class Events:
    """Receiver of the events of one run; this base class ignores them."""

    step: int | None = None
    """Step in progress; None before the first."""

    def tell(self, kind: Kind, what: str, *, about: str = "") -> None:
        """Receives an event. `what`: a sentence without the run's name; `about`: the phase, part or error code, "" for
        the whole run."""

    def look(self, activity: Json) -> None:
        """Receives the current activity (`slimx.observability.live.activity`) every few seconds."""

    def recorded(self, metrics: Mapping[str, float]) -> None:
        """Receives the metrics of a step."""


def open_events(config: object, note: Callable[[str], None]) -> AbstractContextManager[Events]:
    """Returns the receiver of a run's events as a context manager for the run's duration. The entry point of
    `slimx.event_receivers` creates it from the same arguments. `note`: shows a line to the user.

    Raises SlimxError if there are several entry points."""
    name, *others = entry_points.find("slimx.event_receivers")
    if others:
        raise SlimxError(
            f"a run's events can have only one receiver, but there are {name} and {', '.join(others)} (entry points of "
            "slimx.event_receivers); uninstall the packages of all but one",
            code="entry_point.twice",
            about=others[0],
        )
    return entry_points.load("slimx.event_receivers", name)(config, note)
