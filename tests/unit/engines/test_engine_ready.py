"""The wait for a server: it dies, it never comes, or it is made ready."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slimx.engines.server import control
from slimx.engines.server.engine import Engine, State
from slimx.engines.server.spec import EngineSpec
from slimx.errors import DeadlineError
from tests.refusals import refused

CPU = EngineSpec("e", "/model", "float32", "cpu", 31000)


async def test_a_server_that_dies_is_reported_with_its_log(tmp_path: Path) -> None:
    engine = Engine(CPU, tmp_path / "log")
    engine.process.argv = [sys.executable, "-c", "raise SystemExit('no such model')"]
    engine.start()
    with refused("engine.died", about="e") as told:
        await engine.wait_ready(20)
    assert engine.process.tail() == str(told.value).splitlines()[-1].strip() == "no such model"
    assert engine.state is State.DEAD


@pytest.mark.parametrize("external", [False, True])
async def test_the_collector_of_a_server_that_slimx_starts_is_frozen_when_it_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, external: bool
) -> None:
    called = []

    async def record(method: str, path: str, *_: Any, **__: Any) -> dict[str, Any]:
        called.append(path)
        return {}

    async def ready(*_: Any) -> list[dict[str, Any]]:
        return []

    engine = Engine(replace(CPU, external=external, frozen=external), tmp_path / "log")
    monkeypatch.setattr(engine.control, "_call", record)
    monkeypatch.setattr(engine.control, "wait_ready", ready)
    monkeypatch.setattr("slimx.engines.server.engine.attested", ready)
    engine.state = State.STARTING
    await engine.wait_ready(1)
    assert engine.state is State.READY and called == ([] if external else ["/freeze_gc"])


async def test_waiting_for_a_server_has_a_deadline(tmp_path: Path) -> None:
    with refused("deadline", about="engine e at http://127.0.0.1:9 to become ready", kind=DeadlineError):
        await control.EngineControl("http://127.0.0.1:9", "e").wait_ready(1)
