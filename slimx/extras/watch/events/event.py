"""An event of a run, as posted by its webhook."""

from __future__ import annotations

from dataclasses import dataclass

from slimx.observability.events import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event as posted by the webhook."""

    event: Kind
    text: str
    """One line for people, with the run's name; chat services show the field with this name."""
    run: str
    """run.name."""
    directory: str
    """run.dir, absolute."""
    host: str
    """Machine of the driver."""
    step: int | None
    """The step in progress; None before the first."""
    about: str
    """Phase, part or error code that the event is about; "" for the complete run."""
    time: float
    """Unix seconds."""
