"""Plays episodes of one environment of the package verifiers for slimx, in the Python environment that has the package.

    python verifiers_server.py ENV --prompts prompts.jsonl [--tasks 1000]     # writes its tasks as prompts
    python verifiers_server.py ENV --port 8000 [--episodes 64]                # POST /episode {"task", "base_url"}
    TOKEN=... python verifiers_server.py ENV --host 0.0.0.0 --token-env TOKEN # for other machines

ENV is the table [env] of a verifiers configuration as JSON, or the path of a file with it: {"taskset": {"id":
"gsm8k-v1"}, "agent": {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}}. The client is
slimx/extras/agents/hubs/verifiers.py. slimx is not installed in that environment: this program imports modules of this
checkout that need only aiohttp. Written for verifiers 0.4.
"""

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
"""Name of an environment variable that is unset. verifiers looks for its API key there, and so sends no key of another
service to the proxy. The proxy needs no key, because its URL is secret."""
MAX_BODY = 64 * 2**20
CONNECTIONS = 1024
"""Maximum number of open connections; at the maximum, a new connection closes the one that has been idle longest."""
IDLE_S = 120.0
"""Seconds after which a connection without complete request headers is closed."""


class EpisodeServer:
    """HTTP handler that plays episodes of one environment, at most `most` at a time."""

    def __init__(self, env: vf.Env, most: int, token: str | None = None) -> None:
        self.env = env
        self._token = token
        self._slots = asyncio.Semaphore(most)
        self._task_type = type(env.taskset).task_type()

    async def episode(self, request: web.Request) -> web.Response:
        """Plays one episode and responds with its rewards or its error. A disconnect cancels the episode."""
        if not permitted(request.headers.get("Authorization", ""), self._token):
            return web.json_response({"error": "the request lacks the server's token; set token_env"}, status=401)
        try:
            body = json.loads(await request.read())  # always UTF-8, because a header could name a slow codec
            data = self._task_type.data_type().model_validate(body["task"])
            client = vf.EvalClientConfig(base_url=body["base_url"], api_key_var=NO_KEY)
        except (ValueError, LookupError, TypeError, RecursionError) as error:  # ValueError includes pydantic's
            return web.json_response({"error": f"{type(error).__name__}: {error}"}, status=400)
        task = self._task_type(data, self.env.config.taskset.task)
        async with self._slots:
            ctx = vf.ModelContext(client=client, model="policy", sampling=SamplingConfig())
            return web.json_response(verdict(await self.env.run_episode(task, ctx)))


def verdict(episode: vf.Episode) -> dict[str, Any]:
    """Returns the response for an episode: its weighted rewards, metrics and number of turns, or its error."""
    if not episode.ok:
        errors = [*episode.errors]
        for trace in episode.traces:
            errors += trace.errors
        return {"error": "; ".join(f"{error.type}: {error.message}" for error in errors) or "it was not completed"}
    if len(episode.traces) != 1:
        return {"error": f"{len(episode.traces)} agents took part, but slimx trains on episodes of one agent"}
    (trace,) = episode.traces
    unjudged = [name for name, reward in trace.rewards.items() if reward is None]
    if unjudged:
        return {"error": f"reward {unjudged[0]} was not computed"}
    return {
        "rewards": {name: reward.value for name, reward in trace.rewards.items()},
        "metrics": {name: value for name, value in trace.metrics.items() if value is not None},
        "turns": trace.num_turns,
        "stop": trace.stop_condition,
    }


def to_prompt(index: int, task: vf.Task) -> dict[str, Any]:
    """Converts a task to a line of a prompt file.

    The prompt's messages are only informative, because the environment sends its own.
    """
    data = task.data.model_dump(mode="json")
    messages = []
    if data.get("system_prompt"):
        messages.append({"role": "system", "content": data["system_prompt"]})
    question = task.data.prompt_text or data.get("name") or f"task {index}"  # a task may have no prompt
    messages.append({"role": "user", "content": question})
    return {"id": f"task-{index}", "messages": messages, "metadata": {"verifiers": data}}


async def serve(env: vf.Env, host: str, port: int, most: int, token: str | None) -> None:
    """Serves episodes until the program is stopped. `most`: maximum number of concurrent episodes."""
    app = web.Application(client_max_size=MAX_BODY)
    app.router.add_post("/episode", EpisodeServer(env, most, token).episode)
    async with env.serving():
        connections = Connections(most=CONNECTIONS, idle=IDLE_S)
        server = await connections.listen(app, host, port, handler_cancellation=True)
        try:
            print(f"episodes of {env.config.env_id} at http://{host}:{port}", flush=True)
            await asyncio.Event().wait()
        finally:
            await server.close()


def main() -> int:
    parser = argparse.ArgumentParser(description="Plays episodes of a verifiers environment for slimx.")
    parser.add_argument("env", help="table [env] of a verifiers configuration, as JSON or as the path of a JSON file")
    parser.add_argument("--prompts", type=Path, help="file to write the tasks to as prompts; the program then exits")
    parser.add_argument("--tasks", type=int, help="maximum number of tasks; required for an infinite taskset")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--episodes", type=int, default=64, help="maximum number of concurrent episodes")
    parser.add_argument(
        "--token-env",
        help="environment variable with the token that clients must send; required unless --host is a loopback address",
    )
    arguments = parser.parse_args()
    token = token_of(parser, arguments)
    # verifiers starts programs with uv, which may be in the directory of this Python.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    table = arguments.env if arguments.env.lstrip().startswith("{") else Path(arguments.env).read_text()
    env = load_environment(resolve_env_config(json.loads(table)))
    if arguments.prompts is None:
        asyncio.run(serve(env, arguments.host, arguments.port, arguments.episodes, token))
        return 0
    if arguments.tasks is None and not env.taskset.bounded:
        parser.error(f"{env.config.taskset.id} is infinite; set --tasks")
    with arguments.prompts.open("w") as file:
        for index, task in enumerate(islice(env.taskset, arguments.tasks)):
            file.write(json.dumps(to_prompt(index, task)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
