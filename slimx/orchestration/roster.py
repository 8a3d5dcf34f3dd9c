"""RUN/engines.json: every engine of a run, where it is and what it is to the run now, for `slimx status`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from slimx.orchestration.engines import EngineGroup


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
                "restarts": engine.restarts,
            }
            for group in self._groups
            for engine in group.engines
        ]
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text(json.dumps({"engines": engines}, indent=1))
        os.replace(partial, self.path)
