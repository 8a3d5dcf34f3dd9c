"""Engines of benchmarks/rollout_scale.py: processes that answer SGLang's /generate at an exact rate, without a model.

All engines share one port (SO_REUSEPORT), so the clients need no router; the kernel deals connections out to them. The
first line of a process's output is a JSON object with the shared port and a private one, at which GET /done returns
the number of its answers. A process ends when its standard input closes."""

from __future__ import annotations

import argparse
import asyncio
import base64
import heapq
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from aiohttp import web

FIRST = 1000
"""Smallest token id of an answer: ids are as large as those of real vocabularies, because Python shares small
integers."""


def answer_of(tokens: int) -> tuple[str, str]:
    """Returns the parts of the JSON object that SGLang returns for an answer of `tokens` tokens, before and after the
    number of prompt tokens."""
    ids = [FIRST + (7 * number) % 90 for number in range(tokens)]
    meta = {
        "id": "6f1d0f3cb7d94c0e8a55c8d9b2a1e0f4",
        "finish_reason": {"type": "stop", "matched": ids[-1]},
        "weight_version": "0",
        "total_retractions": 0,
        "input_token_logprobs": [],
        "output_token_logprobs": [[-0.0123456 - number % 97 / 31, id_, None] for number, id_ in enumerate(ids)],
        "completion_tokens": tokens,
        "cached_tokens": 0,
        "e2e_latency": 1.2803151607513428,
    }
    text = json.dumps({"text": "." * tokens, "output_ids": ids, "meta_info": meta})
    return text[:-2] + ', "prompt_tokens": ', "}}"


TOP_K = 8
"""Experts to which every layer routes a token."""
ROUTES = base64.b64encode(bytes(range(0, 96)))
"""Base64 text that is repeated as the experts of tokens."""


def routes_of(tokens: int, layers: int) -> str:
    """Returns the experts of `tokens` tokens in `layers` layers, int32 in base64 as SGLang returns them."""
    length = tokens * layers * TOP_K * 16 // 3  # 4 bytes each, of which 3 make 4 characters
    return (ROUTES * (length // len(ROUTES) + 1))[:length].decode()


class TimedEngine:
    """A server that samples `slots` requests concurrently, each for `seconds`; the others wait in order. The end of a
    request is computed on arrival, so the rate is slots / seconds even if the server is woken late."""

    def __init__(self, slots: int, seconds: float, layers: int):
        self._seconds = seconds
        self._layers = layers
        self._free = [0.0] * slots
        """Times at which the slots become free."""
        self._first = slots
        """Number of slots that have sampled nothing yet. They start in the middle of a request, each at another place,
        so that answers do not come in bursts."""
        self._answers: dict[int, tuple[str, str]] = {}
        self.done = 0
        """Number of answers."""

    async def generate(self, request: web.Request) -> web.Response:
        """Returns an answer of `max_new_tokens` tokens once a slot has sampled it."""
        loop = asyncio.get_running_loop()
        body = await request.json()
        seconds = self._seconds
        if self._first:
            seconds *= self._first / len(self._free)
            self._first -= 1
        ends = max(loop.time(), heapq.heappop(self._free)) + seconds
        heapq.heappush(self._free, ends)
        tokens = body["sampling_params"]["max_new_tokens"]
        if tokens not in self._answers:
            self._answers[tokens] = answer_of(tokens)
        before, after = self._answers[tokens]
        await asyncio.sleep(ends - loop.time())
        self.done += 1
        prompt = len(body["input_ids"])
        routes = ""
        if self._layers:
            routes = f', "routed_experts": "{routes_of(prompt + tokens - 1, self._layers)}"'
        return web.Response(text=f"{before}{prompt}{routes}{after}", content_type="application/json")

    async def count(self, _: web.Request) -> web.Response:
        """Returns the number of answers."""
        return web.Response(text=str(self.done))

    async def serve(self, port: int) -> None:
        """Serves at the shared port and at a private one until standard input closes."""
        shared, private = web.Application(client_max_size=2**26), web.Application()
        shared.router.add_post("/generate", self.generate)
        private.router.add_get("/done", self.count)
        runners = [web.AppRunner(app, access_log=None, shutdown_timeout=0.1) for app in (shared, private)]
        for runner, at in zip(runners, (port, 0), strict=True):
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", at, backlog=4096, reuse_port=runner is runners[0]).start()
        ports = [runner.addresses[0][1] for runner in runners]
        print(json.dumps({"shared": ports[0], "private": ports[1]}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        for runner in runners:
            await runner.cleanup()


class EnginePool:
    """Running engine processes."""

    def __init__(self, url: str, ports: Sequence[int], pids: Sequence[int]):
        self.url = url
        self.pids = set(pids)
        self._ports = ports

    def done(self) -> int:
        """Returns the number of answers of all engines so far."""
        total = 0
        for port in self._ports:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/done", timeout=60) as response:
                total += int(response.read())
        return total


@contextmanager
def engine_processes(count: int, slots: int, seconds: float, layers: int) -> Iterator[EnginePool]:
    """Runs `count` engines inside the block, each with `slots` slots; yields them. `layers`: number of layers whose
    experts they return; 0 for none."""
    with ExitStack() as stack:
        port = 0
        private: list[int] = []
        pids: list[int] = []
        for _ in range(count):
            words = ["--port", str(port), "--slots", str(slots), "--seconds", str(seconds)]
            words += ["--layers", str(layers)]
            process = subprocess.Popen(
                [sys.executable, "-c", "import rollout_scale_engine; rollout_scale_engine.main()", *words],
                cwd=Path(__file__).parent,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)  # closes its standard input and waits for its end
            assert process.stdout is not None
            ports = json.loads(process.stdout.readline())
            port = ports["shared"]
            private.append(ports["private"])
            pids.append(process.pid)
        yield EnginePool(f"http://127.0.0.1:{port}", private, pids)


def main() -> None:
    """Serves as one engine, with the arguments of the command line."""
    parser = argparse.ArgumentParser(description="an engine of an exact rate")
    parser.add_argument("--port", type=int, default=0, help="shared port; 0: any free one")
    parser.add_argument("--slots", type=int, required=True, help="concurrent requests")
    parser.add_argument("--seconds", type=float, required=True, help="duration of a request")
    parser.add_argument("--layers", type=int, default=0, help="layers whose experts are returned, a multiple of 3")
    arguments = parser.parse_args()
    asyncio.run(TimedEngine(arguments.slots, arguments.seconds, arguments.layers).serve(arguments.port))
