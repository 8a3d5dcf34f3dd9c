"""The wait for a server: it dies, it never comes, or it is made ready."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slimx.engines.server import server
from slimx.engines.server.engine import Engine, State
from slimx.engines.server.server import EngineServer
from slimx.engines.server.spec import EngineSpec
from slimx.errors import DeadlineError
from tests.refusals import refused

CPU = EngineSpec("e", "/model", "float32", "cpu", 31000)


async def test_a_server_that_dies_is_reported_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dying = [sys.executable, "-c", "raise SystemExit('no such model')"]
    monkeypatch.setattr(server, "server_argv", lambda spec: dying)
    engine = Engine(CPU, tmp_path / "log")
    with refused("engine.died", about="e") as caught:
        await engine.start(20)
    assert engine.process.tail() == str(caught.value).splitlines()[-1].strip() == "no such model"
    assert engine.state is State.DEAD


@pytest.mark.parametrize("external", [False, True])
async def test_the_garbage_collector_is_frozen_when_a_server_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, external: bool
) -> None:
    called = []

    async def record(path: str, *_: Any, **__: Any) -> dict[str, Any]:
        called.append(path)
        return {}

    async def attested(*_: Any) -> list[dict[str, Any]]:
        return []

    started = EngineServer(replace(CPU, external=external, frozen=external), tmp_path / "log")
    monkeypatch.setattr(started.wire, "call", record)
    monkeypatch.setattr(server, "attested", attested)
    await started.wait_ready(1)
    assert called == ["/health_generate"] + ([] if external else ["/freeze_gc"])


async def test_waiting_for_a_server_has_a_deadline(tmp_path: Path) -> None:
    waiting = EngineServer(replace(CPU, port=9, external=True, frozen=True), tmp_path / "log")
    with refused("deadline", about="engine e at http://127.0.0.1:9 to become ready", kind=DeadlineError):
        await waiting.wait_ready(1)
