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
    """Records processes instead of killing them, and makes Ray report deaths soon; returns the recorded ones."""
    killed: list[Any] = []

    async def kill_on_nodes(pids: Any, about: str) -> None:
        killed.append({node: list(node_pids) for node, node_pids in pids.items()})

    async def kill(actors: Any) -> None:
        ended.extend(actors)

    monkeypatch.setattr(recovering, "kill_on_nodes", kill_on_nodes)
    monkeypatch.setattr(recovering, "kill", kill)
    monkeypatch.setattr(waiting, "DEATH_S", 0.1)
    monkeypatch.setattr(watch, "LOOK_S", 0.01)
    monkeypatch.setattr(watch, "PING_S", 0.01)
    return killed
