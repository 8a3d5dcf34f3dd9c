"""A pytest plugin that writes the outcomes of a session by file, and how many slow tests it left out.

    python -m pytest -p tools.rings.counting --counts=FILE ...

FILE is JSON: `files` has passed, failed, skipped and seconds by file, where a test that did not run has failed;
`left_out` has the number of slow tests by directory.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--counts", type=Path, help="file for the counts of tools/rings")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("counts")
    if path is not None:
        config.pluginmanager.register(Counting(config, path))


class Counting:
    """Hooks that count; workers of pytest-xdist send what they left out to the session's process."""

    def __init__(self, config: pytest.Config, path: Path):
        self._config, self._path = config, path
        self.files: dict[str, Counter[str]] = defaultdict(Counter)
        self.left_out: Counter[str] = Counter()
        self._waiting: set[str] = set()
        """Tests that have not run, by their ids."""

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        slow = [item.nodeid for item in items if item.get_closest_marker("slow")]
        self.left_out.update(str(PurePosixPath(nodeid.split("::")[0]).parent) for nodeid in slow)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._count(report, "failed")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._waiting.update(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self._waiting.update(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._waiting.discard(report.nodeid)
        if report.failed or report.skipped or report.when == "call":
            self._count(report, report.outcome)
        self.files[report.nodeid.split("::")[0]]["seconds"] += report.duration

    def _count(self, report: pytest.CollectReport | pytest.TestReport, outcome: str) -> None:
        self.files[report.nodeid.split("::")[0]][outcome] += 1

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        # Every worker collects all tests, so the counts of two are the same.
        self.left_out |= Counter(getattr(node, "workeroutput", {}).get("left_out", {}))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["left_out"] = dict(self.left_out)
        else:
            for nodeid in self._waiting:  # a worker died, and with it the session
                self.files[nodeid.split("::")[0]]["failed"] += 1
            self._path.write_text(json.dumps({"files": self.files, "left_out": self.left_out}))
