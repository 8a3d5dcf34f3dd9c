"""A run's events have one receiver, an entry point."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from slimx import entry_points
from slimx.observability.events import open_events
from tests.refusals import refused


def test_a_second_receiver_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch):
    names = ("alerts", "pager")
    points = {name: EntryPoint(name, "json:loads", "slimx.event_receivers") for name in names}
    monkeypatch.setattr(entry_points, "find", {"slimx.event_receivers": points}.__getitem__)
    with refused("entry_point.twice", about="pager"):
        open_events(None, print)
