"""The other machines of a server are started, watched and ended together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slimx import entry_points
from slimx.cluster.place import Placement
from slimx.engines.server.server import MACHINES
from slimx.engines.server.spec import EngineSpec, NodeShare
from slimx.errors import SlimxError
from slimx.extras.multi_node import nodes
from slimx.extras.multi_node.nodes import Nodes
from slimx.layout.ranks import EngineSizes

SPEC = EngineSpec("e", "/model", "float32", "cpu", 31000, sizes=EngineSizes(tensor=3))


class FakeActors:
    """Stands for Ray's actors on machines, and notes the calls of each."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[Any, ...]]] = []
        self.killed: list[Any] = []
        self.answers: dict[str, Callable[[int], Any]] = {"address": lambda number: f"10.0.0.{number + 2}"}

    def remote(self, kind: type) -> SimpleNamespace:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self.actor))

    def actor(self, spec: EngineSpec, log: Path, network: str | None, make_end: Any) -> SimpleNamespace:
        calls: list[tuple[Any, ...]] = []
        self.calls.append(calls)
        number = len(self.calls) - 1

        def method(name: str) -> SimpleNamespace:
            async def call(*arguments: Any) -> Any:
                calls.append((name, *arguments))
                answer = self.answers.get(name, lambda number: None)(number)
                if isinstance(answer, Exception):
                    raise answer
                return answer

            return SimpleNamespace(remote=call)

        return SimpleNamespace(**{name: method(name) for name in ("address", "start", "ended", "stop", "transport")})


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> FakeActors:
    found = FakeActors()
    monkeypatch.setattr(nodes.ray, "remote", found.remote)
    monkeypatch.setattr(nodes.ray, "kill", found.killed.append)
    monkeypatch.setattr(nodes, "free_port", lambda host: 5000)
    return found


def machines(tmp_path: Path) -> Nodes:
    make = entry_points.load(MACHINES, "ray")
    return make(SPEC, tmp_path / "engine.log", None, [Placement(), Placement()], None, 5.0)


async def test_every_machine_starts_with_its_share(actors: FakeActors, tmp_path: Path) -> None:
    hosts = ("10.0.0.1", "10.0.0.2", "10.0.0.3")
    first = await machines(tmp_path).start(hosts[0], 5.0)
    shares = [NodeShare(rank, 3, "10.0.0.1:5000", hosts) for rank in range(3)]
    assert first == shares[0]
    assert [calls[-1] for calls in actors.calls] == [("start", shares[1]), ("start", shares[2])]


async def test_the_first_end_of_a_machine_is_reported(actors: FakeActors, tmp_path: Path) -> None:
    found = machines(tmp_path)
    assert await found.ended(5.0) is None
    actors.answers["ended"] = lambda number: "it ended" if number == 1 else None
    assert await found.ended(5.0) == "it ended"
    actors.answers["ended"] = lambda number: SlimxError("gone", code="actor.died")
    assert "gone" in await found.ended(5.0)


async def test_the_end_of_one_that_fails_does_not_keep_the_others(actors: FakeActors, tmp_path: Path) -> None:
    found = machines(tmp_path)
    actors.answers["stop"] = lambda number: SlimxError("no", code="x") if number == 0 else None
    await found.stop(1.0, 5.0)
    assert len(actors.killed) == 2 and found.count == 0
    assert [calls[-1] for calls in actors.calls] == [("stop", 1.0)] * 2


async def test_ends_of_a_transport_get_their_messages(actors: FakeActors, tmp_path: Path) -> None:
    found = machines(tmp_path)
    actors.answers["transport"] = lambda number: number
    assert await found.transport("landed", ["a", "b"]) == [0, 1]
    assert [calls[-1] for calls in actors.calls] == [("transport", "landed", "a"), ("transport", "landed", "b")]
