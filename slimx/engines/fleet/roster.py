"""RUN/engines.json: every engine of a run, where it is and what it is to the run now, for `slimx status`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slimx.cluster.restarts import Restarts
from slimx.durable import write_atomic
from slimx.engines.fleet.group import EngineGroup

KEPT = 5
"""Restarts of each part that are told."""


class Roster:
    """The file, written anew with every change."""

    def __init__(self, path: Path):
        self.path = path
        self._groups: list[EngineGroup] = []

    def add(self, groups: Sequence[EngineGroup]) -> None:
        """Follow these groups from now on."""
        for group in groups:
            self._groups.append(group)
            group.members.on_change = self.write
        self.write()

    def write(self) -> None:
        engines = [
            {
                "name": engine.name,
                "role": engine.role,
                "frozen": group.frozen,
                "nodes": engine.nodes,
                "url": engine.url,
                "standing": str(engine.standing),
                **_restarts(group.members.restarts[engine.name]),
            }
            for group in self._groups
            for engine in group.engines
        ]
        routers = [
            {
                "name": group.router.process.name,
                "url": group.router.url,
                "up": group.members.keeper.up,
                **_restarts(group.members.keeper.restarts),
            }
            for group in self._groups
        ]
        text = json.dumps({"engines": engines, "routers": routers}, indent=1)
        write_atomic(self.path, text.encode(), sync=False)


def _restarts(restarts: Restarts) -> dict[str, Any]:
    """Number of a part's restarts, and the last of them."""
    return {"restarts": len(restarts.history), "history": [asdict(each) for each in restarts.history[-KEPT:]]}
