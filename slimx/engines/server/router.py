"""sglang-router in front of the engines: started as a supervised process, told which engines may serve.

An engine stays registered while a publication has it paused, DIRTY too: its requests wait in it and go on after the
verification. One that fails is taken out before anything else happens to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from slimx.data.whole import Json
from slimx.engines.server.keys import STDIN, Keys
from slimx.engines.server.wire import Wire
from slimx.errors import DeadlineError, SlimxError
from slimx.runtime.children import python_argv
from slimx.runtime.process import SupervisedProcess
from slimx.runtime.tasks import in_thread

HOST = "127.0.0.1"
CALL_S = 30.0
"""Seconds that one call to the router may take."""
JOIN_S, LEAVE_S = 60.0, 30.0
"""Seconds in which it sends to a worker that was added, and no more to one that was removed."""


class Router:
    """The router process and its list of workers."""

    def __init__(
        self,
        port: int,
        metrics_port: int,
        log_path: Path | str,
        *,
        request_deadline_s: float = 600.0,
        disaggregated: bool = False,
        by_key: bool = False,
        keys: Keys | None = None,
    ) -> None:
        """`request_deadline_s`: seconds that one generation request may take. `disaggregated`: workers are prefill and
        decode servers, and each request goes to one of either. `by_key`: requests of one key (`requests.KEY_HEADER`) go
        to one worker, the least busy one when the first of them came; else those that share a prefix do, unless it is
        far busier than others. `keys`: its workers', whose `api_key` it asks for itself."""
        options = {
            "--host": HOST,
            "--port": port,
            "--prometheus-host": HOST,
            # Its default port is fixed: two routers on a machine would fail on it.
            "--prometheus-port": metrics_port,
            "--policy": "manual" if by_key else "cache_aware",
            "--assignment-mode": "min_load",
            "--request-timeout-secs": int(request_deadline_s) + 1,
            # No limit of its own: a request beyond it would be refused, not queued.
            "--max-concurrent-requests": -1,
            "--log-level": "warn",
        }
        # Engines are watched by their owner, and lost requests are repeated by the client, because here
        # - the health check would ask a paused server, which cannot answer, and drop it;
        # - the circuit breaker counts a client's mistakes (status 400): a few prompts too long would close healthy
        #   engines;
        # - a retry goes to the same engine again (cache affinity) unless the circuit breaker is on.
        flags = ["--disable-health-check", "--disable-circuit-breaker", "--disable-retries"]
        if disaggregated:
            flags.append("--pd-disaggregation")
        argv = python_argv(
            "slimx.engines.server.router_launch",
            "--keys",
            STDIN,
            "--",
            *[str(x) for pair in options.items() for x in pair],
            *flags,
        )
        self.url = f"http://{HOST}:{port}"
        self.keys = Keys.random() if keys is None else keys
        api_key = Keys(self.keys.api_key)  # it generates, and changes nothing
        self.wire = Wire(self.url, "the router", api_key, CALL_S)
        self.process = SupervisedProcess("router", argv, log_path, stdin=api_key.to_bytes())

    def start(self) -> None:
        self.process.start()

    async def stop(self, grace_s: float = 5.0) -> None:
        await in_thread(self.process.stop, grace_s)

    def ended(self) -> str | None:
        """The end of its process in words; None while it runs."""
        return self.process.ended()

    async def wait_ready(self, deadline_s: float) -> None:
        """Wait until the router answers; it has no workers yet."""
        await self._until(lambda workers: True, deadline_s, f"the router at {self.url} to answer")

    async def restart(self, deadline_s: float) -> None:
        """End it, whatever it is at, and start it at the same address, without workers."""
        await self.stop(grace_s=0)
        self.start()
        await self.wait_ready(deadline_s)

    async def workers(self, deadline_s: float = CALL_S) -> list[Json]:
        """The registered workers: {id, url, is_healthy, load, ...}."""
        return (await self.wire.call("/workers", method="GET", deadline_s=deadline_s)).get("workers", [])

    async def add(
        self,
        url: str,
        *,
        role: str = "regular",
        bootstrap_port: int | None = None,
        keys: Keys | None = None,
    ) -> None:
        """Register a worker and wait until the router sends to it. (/health of the router is 200 before that.)

        What the router knew of this URL is forgotten first: the engine behind it may be a new one. `bootstrap_port`: of
        a prefill server, which the router tells the decode server of each request. `keys`: that the worker asks for, if
        not those of the router.
        """
        await self.remove(url)
        optional = {
            "worker_type": None if role == "regular" else role,
            "bootstrap_port": bootstrap_port,
            "api_key": (keys or self.keys).api_key,
        }
        worker = {"url": url} | {name: value for name, value in optional.items() if value is not None}
        await self.wire.call("/workers", worker)
        await self._until(
            lambda workers: any(worker["url"] == url and worker["is_healthy"] for worker in workers),
            JOIN_S,
            f"worker {url} to become healthy in the router",
        )

    async def remove(self, url: str) -> None:
        """Send no new request to a worker. Removing one that is not registered is no error."""
        for worker in await self.workers():
            if worker["url"] == url:
                await self.wire.call(f"/workers/{worker['id']}", method="DELETE")
        await self._until(
            lambda workers: all(worker["url"] != url for worker in workers),
            LEAVE_S,
            f"worker {url} to leave the router",
        )

    async def _until(self, arrived: Callable[[list[Json]], bool], deadline_s: float, awaited: str) -> None:
        """Look at the workers until they are as `arrived` says."""
        start = asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() - start < deadline_s:
            if (end := self.ended()) is not None:
                raise SlimxError(end)
            try:
                if arrived(await self.workers()):
                    return
            except SlimxError as error:
                awaited = f"{awaited.partition(' (')[0]} ({error})"
            await asyncio.sleep(0.1)
        raise DeadlineError(awaited, deadline_s, f"the router, log {self.process.log_path}")
