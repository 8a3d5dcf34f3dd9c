"""Marks in the logs of a run's processes: the lines behind one belong to its step and phase."""

from __future__ import annotations

from datetime import UTC, datetime


def marked(text: str) -> str:
    """A line that is found by its first four characters, with the time in UTC."""
    return f"==== {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC, {text}"
