"""An event of a run as its webhook posts it."""

from __future__ import annotations

from dataclasses import dataclass

from slimx.observability.events import Kind


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
