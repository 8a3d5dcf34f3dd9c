"""Events of a run, such as a lost engine, which a receiver may forward to users."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Literal

from slimx import entry_points
from slimx.errors import SlimxError
from slimx.json_types import Json

Kind = Literal[
    "stalled",  # a phase takes too long (track.stall)
    "went_on",  # the stalled phase has ended after all
    "engine_lost",
    "restarted",  # an engine or the router was restarted
    "restart_failed",
    "trainers_replaced",  # all trainer ranks were restarted after the loss of one (recovery.trainers)
    "trainers_shrunk",  # fewer data-parallel ranks replace the lost ones (recovery.shrink_after)
    "evaluation_lost",  # an evaluation during training ended without a result (eval.engines)
    "step_skipped",  # the optimizer skipped a step: a gradient was infinite or NaN
    "stopped",  # a signal (SIGUSR1, SIGTERM or Ctrl-C) stopped the run
    "failed",
    "finished",
]


class Events:
    """Receiver of a run's events. This base class ignores them."""

    step: int | None = None
    """Number of the step in progress; None before the first step."""

    def tell(self, kind: Kind, what: str, *, about: str = "") -> None:
        """Receives an event. `what`: message about the event, without the name of the run. `about`: phase, part of the
        run or error code that the event concerns; "" for the whole run."""

    def look(self, activity: Json) -> None:
        """Receives the current activity of the run every few seconds. `activity`: dict with the keys that
        `slimx.observability.live.activity.read_activity` describes."""

    def recorded(self, metrics: Mapping[str, float]) -> None:
        """Receives the metrics of a step when the step is logged."""


def open_events(config: object, note: Callable[[str], None]) -> AbstractContextManager[Events]:
    """Returns the receiver of a run's events as a context manager that must be entered for the whole run. The entry
    point of `slimx.event_receivers` creates the receiver from `config` and `note`. `note`: function that shows a
    message to the user. Raises SlimxError if there are several entry points."""
    name, *others = entry_points.find("slimx.event_receivers")
    if others:
        raise SlimxError(
            f"several packages have an entry point of slimx.event_receivers ({name}, {', '.join(others)}); uninstall "
            "all of these packages but one",
            code="entry_point.twice",
            about=others[0],
        )
    return entry_points.load("slimx.event_receivers", name)(config, note)
