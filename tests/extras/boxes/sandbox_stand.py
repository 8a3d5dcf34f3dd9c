"""A sandbox whose processes a test finds again, on a machine where others run some too."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

import psutil

from slimx.extras.boxes.programs.sandbox import Limits, Sandbox


class Marked(Sandbox):
    """A sandbox whose first process inside, with which the kernel ends all others, has a mark in its command line."""

    def __init__(self, limits: Limits):
        super().__init__(limits)
        self.mark = uuid.uuid4().hex

    def _enclosed(self, named: Mapping[str, int]) -> list[str]:
        return [*super()._enclosed(named), "--setenv", "MARK", self.mark]

    def processes(self) -> list[int]:
        return [
            process.pid for process in psutil.process_iter(["cmdline"]) if self.mark in (process.info["cmdline"] or ())
        ]
