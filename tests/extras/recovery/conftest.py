"""Shared by the tests of recovery."""

from __future__ import annotations

from typing import Any

import pytest

from slimx.cluster import waiting
from slimx.extras.recovery import trainers as recovering
from slimx.orchestration.ranks import watch


@pytest.fixture
def ended() -> list[Any]:
    """Actors that Ray would have been asked to end, under `quick`."""
    return []


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, ended: list[Any]) -> list[Any]:
    """Nobody is killed, and Ray knows of a death soon; returns what would have been fenced."""
    fenced: list[Any] = []

    async def fence(pids: Any, what: str) -> None:
        fenced.append({node: list(own) for node, own in pids.items()})

    async def kill(actors: Any) -> None:
        ended.extend(actors)

    monkeypatch.setattr(recovering, "fence", fence)
    monkeypatch.setattr(recovering, "kill", kill)
    monkeypatch.setattr(waiting, "DEATH_S", 0.1)
    monkeypatch.setattr(watch, "LOOK_S", 0.01)
    monkeypatch.setattr(watch, "PING_S", 0.01)
    return fenced
