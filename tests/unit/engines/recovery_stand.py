"""Shared by the tests of recovery: a membership over engines and a router in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from slimx.cluster.restarts import Restart
from slimx.config.sections.engines import Health
from slimx.engines.fleet.handle import MemberState
from slimx.engines.fleet.membership import Membership
from slimx.engines.server.keys import NO_KEYS, Keys
from slimx.errors import SlimxError
from slimx.reshard.parties import ReceiverLost


class FakeEngine:
    """An engine whose starts are the outcomes in `starts`: None, or the error that it ends with."""

    def __init__(self, name: str, log: list[str], starts: list[SlimxError | None]):
        self.name, self.log, self.starts = name, log, starts
        self.state, self.incarnation = MemberState.JOINING, 1
        self.url, self.role = f"http://{name}/0", "regular"
        self.end: str | None = None
        self.sick: SlimxError | None = None
        self.ready = True

    @property
    def spec(self) -> SimpleNamespace:
        return SimpleNamespace(url=self.url, role=self.role, bootstrap_port=None, keys=NO_KEYS)

    def lose(self, error: SlimxError) -> None:
        self.state = MemberState.OUT

    async def stop(self, grace_s: float = 10.0) -> None:
        assert grace_s == 0, "a half-updated server gets no time to answer"
        self.log.append(f"stop {self.url}")

    async def start(self, deadline_s: float) -> None:
        self.log.append(f"start {self.name}")
        await asyncio.sleep(0.01)
        if (problem := self.starts.pop(0)) is not None:
            raise problem
        self.incarnation += 1
        self.end = self.sick = None
        self.url, self.state = f"http://{self.name}/{self.incarnation}", MemberState.JOINING

    async def ended(self) -> str | None:
        return self.end

    async def perform(self, verb: str, epoch: int | None, *arguments: Any, deadline_s: float | None = None) -> Any:
        if verb == "serves":
            return self.ready
        assert verb == "check_health"
        await self.check_health(*arguments)

    async def check_health(self, deadline_s: float) -> None:
        if self.end or self.sick:
            raise self.sick or SlimxError("no answer")


class FakeRouter:
    """A router that has ended while `end` is set and does not answer while `silent` is; `starts` are the outcomes of
    its restarts, like those of FakeEngine, and None for ever after them."""

    def __init__(self, log: list[str]):
        self.log, self.urls, self.end = log, set(), None
        self.silent: SlimxError | None = None
        self.starts: list[SlimxError | None] = []
        self.slow = asyncio.Event()
        self.slow.set()

    async def workers(self, deadline_s: float = 1) -> list[dict[str, str]]:
        self._answer()
        return [{"url": url} for url in self.urls]

    async def restart(self, deadline_s: float) -> None:
        self.log.append("restart")
        self.urls.clear()
        await asyncio.sleep(0.01)
        if self.starts and (problem := self.starts.pop(0)) is not None:
            raise problem
        self.end = self.silent = None

    def _answer(self) -> None:
        if self.end or self.silent:
            raise self.silent or SlimxError(self.end)

    async def add(self, url: str, *, role: str, bootstrap_port: int | None, keys: Keys) -> None:
        await self.slow.wait()
        self._answer()
        self.log.append(f"add {url}")
        self.urls.add(url)

    async def remove(self, url: str) -> None:
        self._answer()
        self.log.append(f"remove {url}")
        self.urls.discard(url)

    def ended(self) -> str | None:
        return self.end


class Stand:
    """Two engines in the router of a membership that looks at them every 10 ms."""

    def __init__(
        self,
        restarts: int = 2,
        starts: list[SlimxError | None] | None = None,
        count: int = 2,
        kind: type[FakeEngine] = FakeEngine,
        **health: float,
    ):
        self.log: list[str] = []
        self.router = FakeRouter(self.log)
        self.engines = [kind(f"e{n}", self.log, list(starts or [None] * 9)) for n in range(count)]
        self.notes: list[str] = []
        self.restarts: list[Restart] = []
        self.members = Membership(
            self.engines,
            self.router,
            health=Health(**{"interval": 0.01, "threshold": 3, "restarts": restarts} | health),
            start_deadline_s=5,
            note=self.notes.append,
            record=self.restarts.append,
            pause_s=0.0,
        )

    async def __aenter__(self) -> Stand:
        for engine in self.engines:
            await self.members.admit(engine)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.members.stop()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.001)


def gone(name: str = "e0") -> ReceiverLost:
    return ReceiverLost(f"engine {name} ended with status 137; the end of its log:\nKilled")
