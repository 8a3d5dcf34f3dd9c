"""Shared by the tests of the loop and of recovery."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from slimx.cluster import waiting
from slimx.orchestration import publications
from slimx.orchestration.ranks import watch
from slimx.orchestration.ranks.weight_source import WeightSource
from slimx.orchestration.recovery import trainers as recovering
from tests.unit.orchestration.run_stand import Parts


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


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    """Parts of the trained policy; its publisher is themselves."""
    parts = Parts()

    def publisher(source: WeightSource, *_: Any, vacate: Callable[[], Awaitable[None]] | None, **__: Any) -> Parts:
        source.trainers.vacate = vacate
        return source.trainers

    monkeypatch.setattr(publications, "Publisher", publisher)
    return parts
