"""Plays episodes of one environment of verifiers for slimx, in the environment that has the package:

    python verifiers_server.py ENV --prompts prompts.jsonl [--tasks 1000]     # its tasks as prompts
    python verifiers_server.py ENV --port 8000 [--episodes 64]                # POST /episode {"task", "base_url"}
    TOKEN=... python verifiers_server.py ENV --host 0.0.0.0 --token-env TOKEN # for other machines

ENV is the table [env] of verifiers' configuration as JSON, or a file with it: {"taskset": {"id": "gsm8k-v1"}, "agent":
{"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}}. slimx/extras/agents/hubs/verifiers.py is the other
end. That environment does not have slimx: of the checkout that this file is in, only what needs nothing but aiohttp is
imported. It was written for verifiers 0.4."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from aiohttp import web
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

sys.path.append(str(Path(__file__).parents[5]))
from slimx.extras.http.access import permitted, token_of  # noqa: E402
from slimx.extras.http.connections import Connections  # noqa: E402

NO_KEY = "SLIMX_HAS_NO_KEY"
"""Name of a variable that is not set: the key of no other service goes to the proxy, whose URL is the secret."""
MAX_BODY = 64 * 2**20
CONNECTIONS = 1024
"""Connections that may be open at the same time; one more ends the one that has asked nothing for longest."""
IDLE_S = 120.0
"""Seconds that a connection may be open without a whole request's headers."""


class Server:
    """The episodes of one environment, `most` of them at once."""

    def __init__(self, env: vf.Env, most: int, token: str | None = None) -> None:
        self.env, self._token = env, token
        self._places = asyncio.Semaphore(most)
        self._task_type = type(env.taskset).task_type()

    async def episode(self, request: web.Request) -> web.Response:
        """The verdict on one episode. Whoever hangs up ends it."""
        if not permitted(request.headers.get("Authorization", ""), self._token):
            return web.json_response({"error": "the token is wrong or missing"}, status=401)
        try:
            body = json.loads(await request.read())  # in Unicode: a header could name a codec that takes minutes
            data = self._task_type.data_type().model_validate(body["task"])
            client = vf.EvalClientConfig(base_url=body["base_url"], api_key_var=NO_KEY)
        except (ValueError, LookupError, TypeError, RecursionError) as error:  # pydantic's are ValueErrors
            return web.json_response({"error": f"{type(error).__name__}: {error}"}, status=400)
        task = self._task_type(data, self.env.config.taskset.task)
        async with self._places:
            ctx = vf.ModelContext(client=client, model="policy", sampling=SamplingConfig())
            return web.json_response(verdict(await self.env.run_episode(task, ctx)))


def verdict(episode: vf.Episode) -> dict[str, Any]:
    """The verdict on an episode: its rewards, each by its weight, or its error."""
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        return {"error": "; ".join(f"{each.type}: {each.message}" for each in errors) or "it was not completed"}
    if len(episode.traces) != 1:
        return {"error": f"{len(episode.traces)} agents took part, and slimx trains the rollout of one"}
    (trace,) = episode.traces
    if unjudged := [name for name, each in trace.rewards.items() if each is None]:
        return {"error": f"its reward {unjudged[0]} was not judged"}
    return {
        "rewards": {name: each.value for name, each in trace.rewards.items()},
        "metrics": {name: value for name, value in trace.metrics.items() if value is not None},
        "turns": trace.num_turns,
        "stop": trace.stop_condition,
    }


def to_prompt(number: int, task: vf.Task) -> dict[str, Any]:
    """A task as a line of a prompt file. The messages are for those who read it: the environment sends its own."""
    data = task.data.model_dump(mode="json")
    system = [{"role": "system", "content": data["system_prompt"]}] if data.get("system_prompt") else []
    asked = task.data.prompt_text or data.get("name") or f"task {number}"  # an environment may begin by itself
    messages = [*system, {"role": "user", "content": asked}]
    return {"id": f"task-{number}", "messages": messages, "metadata": {"verifiers": data}}


async def serve(env: vf.Env, host: str, port: int, most: int, token: str | None) -> None:
    """Listen until the program is ended."""
    app = web.Application(client_max_size=MAX_BODY)
    app.router.add_post("/episode", Server(env, most, token).episode)
    async with env.serving():
        connections = Connections(most=CONNECTIONS, idle=IDLE_S)
        server = await connections.listen(app, host, port, handler_cancellation=True)
        try:
            print(f"episodes of {env.config.env_id} at http://{host}:{port}", flush=True)
            await asyncio.Event().wait()
        finally:
            await server.close()


def main() -> int:
    parser = argparse.ArgumentParser(description="episodes of an environment of verifiers")
    parser.add_argument("env", help="table [env] of verifiers' configuration: JSON, or a file with it")
    parser.add_argument("--prompts", type=Path, help="write the tasks here as prompts, and end")
    parser.add_argument("--tasks", type=int, help="how many, at most; needed for a taskset without an end")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--episodes", type=int, default=64, help="episodes at once: each may have processes of its own")
    parser.add_argument("--token-env", help="variable that holds the token; needed on other addresses than loopback")
    arguments = parser.parse_args()
    token = token_of(parser, arguments)
    # Its programs are started by uv, which may be installed beside it.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    given = arguments.env if arguments.env.lstrip().startswith("{") else Path(arguments.env).read_text()
    env = load_environment(resolve_env_config(json.loads(given)))
    if arguments.prompts is None:
        asyncio.run(serve(env, arguments.host, arguments.port, arguments.episodes, token))
        return 0
    if arguments.tasks is None and not env.taskset.bounded:
        parser.error(f"{env.config.taskset.id} has no end: say how many --tasks")
    with arguments.prompts.open("w") as file:
        for number, task in enumerate(islice(env.taskset, arguments.tasks)):
            file.write(json.dumps(to_prompt(number, task)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
