"""Runs sglang-router in front of the engines as a supervised process, and registers the engines that may serve.

An engine stays registered while a publication pauses it, even while it is DIRTY: requests wait in the engine's queue
and continue after the verification. A failed engine is removed from the router before anything else is done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from slimx.engines.server.http_calls import ControlClient
from slimx.engines.server.keys import STDIN, Keys
from slimx.errors import DeadlineError, SlimxError
from slimx.json_types import Json
from slimx.runtime.children import python_argv
from slimx.runtime.process import SupervisedProcess
from slimx.runtime.tasks import in_thread

HOST = "127.0.0.1"
CALL_S = 30.0
"""Deadline for one call to the router, in seconds."""
JOIN_S = 60.0
"""Time limit in seconds for the router to start sending requests to a newly added worker."""
LEAVE_S = 30.0
"""Time limit in seconds for the router to stop sending requests to a removed worker."""


class Router:
    """The router's process, and the engines that are registered with it as workers."""

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
        """Prepares the process without starting it.

        `request_deadline_s`: deadline for one generation request, in seconds. `disaggregated`: True if workers are
        prefill and decode servers, so that each request goes to a pair of one prefill and one decode server. `by_key`:
        True to send all requests with the same key (`slimx.rollout.client.sending.KEY_HEADER`) to one worker, the least
        loaded one when the first of them arrives; False to route requests by shared prefix unless loads are too
        unequal. `keys`: keys of the workers, whose `api_key` requests to the router need as well; None to use new
        random keys."""
        options = {
            "--host": HOST,
            "--port": port,
            "--prometheus-host": HOST,
            # The default is a fixed port, on which a second router on the machine would fail.
            "--prometheus-port": metrics_port,
            "--policy": "manual" if by_key else "cache_aware",
            "--assignment-mode": "min_load",
            "--request-timeout-secs": int(request_deadline_s) + 1,
            # No limit, because the router would refuse requests beyond it instead of queueing them.
            "--max-concurrent-requests": -1,
            "--log-level": "warn",
        }
        # slimx monitors engines, and its clients repeat lost requests, because in the router
        # - the health check would drop a paused server, which cannot respond;
        # - the circuit breaker counts errors of clients (status 400): a few prompts that are too long would shut out
        #   healthy engines;
        # - a retry goes to the same engine again (cache affinity) unless the circuit breaker is on.
        flags = ["--disable-health-check", "--disable-circuit-breaker", "--disable-retries"]
        if disaggregated:
            flags.append("--pd-disaggregation")
        argv = python_argv(
            "slimx.engines.server.router_launch",
            "--keys",
            STDIN,
            "--",
            *(str(item) for pair in options.items() for item in pair),
            *flags,
        )
        self.url = f"http://{HOST}:{port}"
        self.keys = Keys.random() if keys is None else keys
        api_key = Keys(self.keys.api_key)  # the router forwards only generation, which needs no other key
        self.wire = ControlClient(self.url, "the router", api_key, CALL_S)
        self.process = SupervisedProcess("router", argv, log_path, stdin=api_key.to_bytes())

    def start(self) -> None:
        self.process.start()

    async def stop(self, grace_s: float = 5.0) -> None:
        await in_thread(self.process.stop, grace_s)

    def ended(self) -> str | None:
        """Returns a description of how the router's process ended; None while it runs."""
        return self.process.ended()

    async def wait_ready(self, deadline_s: float) -> None:
        """Waits until the router responds; workers are registered with it only afterwards."""
        await self._until(lambda workers: True, deadline_s, f"the router at {self.url} to respond")

    async def restart(self, deadline_s: float) -> None:
        """Kills the process and starts it again at the same address; the new process has no workers."""
        await self.stop(grace_s=0)
        self.start()
        await self.wait_ready(deadline_s)

    async def workers(self, deadline_s: float = CALL_S) -> list[Json]:
        """Returns the registered workers, each as {id, url, is_healthy, load, ...}."""
        return (await self.wire.call("/workers", method="GET", deadline_s=deadline_s)).get("workers", [])

    async def add(
        self,
        url: str,
        *,
        role: str = "regular",
        bootstrap_port: int | None = None,
        keys: Keys | None = None,
    ) -> None:
        """Registers the engine at `url` as a worker, and waits until the router sends requests to it.

        The router's /health returns 200 before the worker is ready, so the list of workers is polled instead. A worker
        with the same URL is removed first, because the engine at that URL may be a new one. `bootstrap_port`: port of a
        prefill server, which the router passes to decode servers. `keys`: the worker's keys; None if they are the same
        as the router's."""
        await self.remove(url)
        optional = {
            "worker_type": None if role == "regular" else role,
            "bootstrap_port": bootstrap_port,
            "api_key": (keys or self.keys).api_key,
        }
        present = {name: value for name, value in optional.items() if value is not None}
        worker = {"url": url} | present
        await self.wire.call("/workers", worker)
        await self._until(
            lambda workers: any(worker["url"] == url and worker["is_healthy"] for worker in workers),
            JOIN_S,
            f"worker {url} to become healthy in the router",
        )

    async def remove(self, url: str) -> None:
        """Removes the worker at `url`, so that it receives no new requests. Does nothing if it is not registered."""
        for worker in await self.workers():
            if worker["url"] == url:
                await self.wire.call(f"/workers/{worker['id']}", method="DELETE")
        await self._until(
            lambda workers: all(worker["url"] != url for worker in workers),
            LEAVE_S,
            f"worker {url} to leave the router",
        )

    async def _until(self, arrived: Callable[[list[Json]], bool], deadline_s: float, awaited: str) -> None:
        """Polls the router's list of workers until `arrived(workers)` is True.

        `awaited`: description of that condition for the DeadlineError that is raised after `deadline_s` seconds. Raises
        SlimxError if the router ends."""
        start = asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() - start < deadline_s:
            end = self.ended()
            if end is not None:
                raise SlimxError(end)
            try:
                if arrived(await self.workers()):
                    return
            except SlimxError as error:
                awaited = f"{awaited.partition(' (')[0]} ({error})"
            await asyncio.sleep(0.1)
        raise DeadlineError(awaited, deadline_s, f"the router, log {self.process.log_path}")
