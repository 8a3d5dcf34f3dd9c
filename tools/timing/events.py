"""A pytest plugin that writes when each fixture, call and teardown began and ended.

    python -m pytest -p tools.timing.events --events=DIRECTORY ...

Each process of the session (the workers of pytest-xdist too) writes DIRECTORY/PID.jsonl, one event a line. Times are
those of time.time(), which all processes of a machine share.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, TextIO

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--events", type=Path, help="directory for the times of tools/suite.py")


def pytest_configure(config: pytest.Config) -> None:
    directory = config.getoption("events")
    if directory is not None:
        config.pluginmanager.register(Events((directory / f"{os.getpid()}.jsonl").open("a", buffering=1)))


class Events:
    """Hooks that write an event at the end of each phase."""

    def __init__(self, file: TextIO):
        self._file = file
        self._test = ""

    def _write(self, phase: str, name: str, began: float, test: str) -> None:
        event = {"phase": phase, "name": name, "test": test, "began": began, "ended": time.time()}
        self._file.write(json.dumps(event) + "\n")

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Generator[None, Any, Any]:
        began = time.time()
        try:
            return (yield)
        finally:
            if isinstance(collector, pytest.File):
                self._write("collect", "", began, collector.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._test, began = item.nodeid, time.time()
        try:
            return (yield)
        finally:
            self._write("test", "", began, item.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        began = time.time()
        try:
            return (yield)
        finally:
            self._write("fixture", fixturedef.argname, began, self._test)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        began = time.time()
        try:
            return (yield)
        finally:
            self._write("call", "", began, item.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        began = time.time()
        try:
            return (yield)
        finally:
            self._write("teardown", "", began, item.nodeid)
