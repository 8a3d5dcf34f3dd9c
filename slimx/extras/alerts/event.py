"""Event of a run, as the webhook posts it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slimx.extras.alerts.log import Alert
from slimx.observability.events import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Event of a run; the webhook posts its fields as a JSON object."""

    event: Kind | Literal["alert", "alert_over"]
    text: str
    """One-line, human-readable description that includes the run's name. Chat services display the field `text`."""
    run: str
    """Name of the run (`run.name`)."""
    directory: str
    """Absolute path of the run's directory (`run.dir`)."""
    host: str
    """Host name of the driver's machine."""
    step: int | None
    """Step in progress; None before the first step."""
    about: str
    """Phase, part of the run (such as an engine), error code or alert that the event concerns; "" for the whole run."""
    time: float
    """Unix time of the event in seconds."""
    alert: Alert | None = None
    """The alert that has opened or closed; None for other events."""
