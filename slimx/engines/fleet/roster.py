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


def follow(groups: Sequence[EngineGroup], path: Path) -> None:
    """Write the file at `path` now, and anew with every change of one of `groups`."""

    def write() -> None:
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
            for group in groups
            for engine in group.engines
        ]
        routers = [
            {
                "name": group.router.process.name,
                "url": group.router.url,
                "up": group.members.keeper.up,
                **_restarts(group.members.keeper.restarts),
            }
            for group in groups
        ]
        text = json.dumps({"engines": engines, "routers": routers}, indent=1)
        write_atomic(path, text.encode(), sync=False)

    for group in groups:
        group.members.on_change = write
    write()


def _restarts(restarts: Restarts) -> dict[str, Any]:
    """Number of a part's restarts, and the last of them."""
    return {"restarts": len(restarts.history), "history": [asdict(each) for each in restarts.history[-KEPT:]]}
