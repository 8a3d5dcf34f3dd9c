"""Plays episodes of one environment of the package verifiers for slimx, in the Python environment that has the package.

    python verifiers_server.py ENV --prompts prompts.jsonl [--tasks 1000]     # writes its tasks as prompts
    python verifiers_server.py ENV --port 8000 [--episodes 64]                # POST /episode {"task", "base_url"}
    TOKEN=... python verifiers_server.py ENV --host 0.0.0.0 --token-env TOKEN # for other machines

ENV is the table [env] of a verifiers configuration as JSON, or the path of a file with it: {"taskset": {"id":
"gsm8k-v1"}, "agent": {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}}. For an environment written for
verifiers' first interface, whose package has a function `load_environment`, ENV is {"load_environment":
"reverse-text", "args": {...}}. The client is slimx/extras/agents/hubs/verifiers.py. slimx is not installed in that
environment: this program imports modules of this checkout that need only aiohttp. Written for verifiers 0.4, and for
the first interface in verifiers 0.1.9 to 0.3.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web

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


class Environment(Protocol):
    """An environment of verifiers, of either interface."""

    name: str
    bounded: bool
    """False if the number of tasks is infinite."""

    def prompts(self) -> Iterator[dict[str, Any]]:
        """Returns the tasks as lines of a prompt file."""
        ...

    def serving(self) -> AbstractAsyncContextManager[object]:
        """Returns the context in which episodes can be played."""
        ...

    def task(self, data: Any) -> Any:
        """Returns the task in a prompt's metadata. Raises ValueError, LookupError or TypeError for an invalid one."""
        ...

    async def play(self, task: Any, base_url: str) -> dict[str, Any]:
        """Plays an episode that samples at `base_url`, and returns its rewards, metrics and number of turns, or its
        error."""
        ...


class Tasks:
    """An environment of the interface `verifiers.v1`: a taskset and an agent."""

    def __init__(self, table: dict[str, Any]) -> None:
        import verifiers.v1 as vf  # not every version has both interfaces
        from verifiers.v1.types import SamplingConfig
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        self._env = load_environment(resolve_env_config(table))
        self._vf = vf
        self._sampling = SamplingConfig
        self._task_type = type(self._env.taskset).task_type()
        self.name = self._env.config.env_id
        self.bounded = self._env.taskset.bounded

    def prompts(self) -> Iterator[dict[str, Any]]:
        """Returns the tasks as lines of a prompt file."""
        return (to_prompt(index, task) for index, task in enumerate(self._env.taskset))

    def serving(self) -> AbstractAsyncContextManager[object]:
        """Returns the context in which the servers of the environment run."""
        return self._env.serving()

    def task(self, data: Any) -> Any:
        """Returns the task of a prompt. Raises ValueError (which includes pydantic's errors) for invalid data."""
        validated = self._task_type.data_type().model_validate(data)
        return self._task_type(validated, self._env.config.taskset.task)

    async def play(self, task: Any, base_url: str) -> dict[str, Any]:
        """Plays an episode that samples at `base_url`."""
        client = self._vf.EvalClientConfig(base_url=base_url, api_key_var=NO_KEY)
        ctx = self._vf.ModelContext(client=client, model="policy", sampling=self._sampling())
        return verdict(await self._env.run_episode(task, ctx))


class FirstInterface:
    """An environment of verifiers' first interface: what the function `load_environment` of its package returns."""

    bounded = True

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        import verifiers as vf

        self._env = vf.load_environment(name, **options)
        if getattr(self._env, "requires_group_rollouts", False):
            raise SystemExit(f"{name} scores groups of rollouts, but slimx plays episodes one by one")
        self.name = name
        try:
            from verifiers.clients import resolve_client
            from verifiers.types import ClientConfig
        except ImportError:  # verifiers 0.1
            from openai import AsyncOpenAI

            self._client: Callable[[str], Any] = lambda base_url: AsyncOpenAI(base_url=base_url, api_key="none")
            self._more: dict[str, Any] = {"gen_sem": nullcontext(), "score_sem": nullcontext(), "score": True}
        else:
            self._client = lambda base_url: resolve_client(ClientConfig(api_base_url=base_url, api_key_var=NO_KEY))
            self._more = {}

    def prompts(self) -> Iterator[dict[str, Any]]:
        """Returns the rows of the environment's dataset as lines of a prompt file."""
        for index, row in enumerate(self._env.get_dataset()):
            messages = row["prompt"]
            if isinstance(messages, str):
                messages = [{"role": "user", "content": messages}]
            shown = [{"role": turn["role"], "content": turn["content"]} for turn in messages]
            yield {"id": f"task-{index}", "messages": shown, "metadata": {"verifiers": row}}

    def serving(self) -> AbstractAsyncContextManager[object]:
        """Returns an empty context, because nothing has to be started."""
        return nullcontext()

    def task(self, data: Any) -> Any:
        """Returns the row of a prompt. Raises LookupError or TypeError if it is not a row with a prompt."""
        data["prompt"]
        return data

    async def play(self, task: Any, base_url: str) -> dict[str, Any]:
        """Plays an episode that samples at `base_url`."""
        client = self._client(base_url)
        try:
            output = await self._env.run_rollout(task, client, "policy", {}, **self._more)
        except Exception as error:  # any code of the environment
            return {"error": f"{type(error).__name__}: {error}"}
        finally:
            await client.close()
        failed = output.get("error")
        if failed:
            return {"error": failed["error_chain_str"] if isinstance(failed, dict) else repr(failed)}
        turns = sum(turn["role"] == "assistant" for turn in output["completion"] or [])
        return {
            "rewards": {"reward": output["reward"]},
            "metrics": output["metrics"] or {},
            "turns": turns,
            "stop": output.get("stop_condition"),
        }


class EpisodeServer:
    """HTTP handler that plays episodes of one environment, at most `most` at a time."""

    def __init__(self, env: Environment, most: int, token: str | None = None) -> None:
        self._env = env
        self._token = token
        self._slots = asyncio.Semaphore(most)

    async def episode(self, request: web.Request) -> web.Response:
        """Plays one episode and responds with its rewards or its error. A disconnect cancels the episode."""
        if not permitted(request.headers.get("Authorization", ""), self._token):
            return web.json_response({"error": "the request lacks the server's token; set token_env"}, status=401)
        try:
            body = json.loads(await request.read())  # always UTF-8, because a header could name a slow codec
            task = self._env.task(body["task"])
            base_url = str(body["base_url"])
        except (ValueError, LookupError, TypeError, RecursionError) as error:  # ValueError includes pydantic's
            return web.json_response({"error": f"{type(error).__name__}: {error}"}, status=400)
        async with self._slots:
            return web.json_response(await self._env.play(task, base_url))


def verdict(episode: Any) -> dict[str, Any]:
    """Returns the response for an episode of verifiers.v1: its weighted rewards, metrics and number of turns, or its
    error."""
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


def to_prompt(index: int, task: Any) -> dict[str, Any]:
    """Converts a task of verifiers.v1 to a line of a prompt file.

    The prompt's messages are only informative, because the environment sends its own.
    """
    data = task.data.model_dump(mode="json")
    messages = []
    if data.get("system_prompt"):
        messages.append({"role": "system", "content": data["system_prompt"]})
    question = task.data.prompt_text or data.get("name") or f"task {index}"  # a task may have no prompt
    messages.append({"role": "user", "content": question})
    return {"id": f"task-{index}", "messages": messages, "metadata": {"verifiers": data}}


async def serve(env: Environment, host: str, port: int, most: int, token: str | None) -> None:
    """Serves episodes until the program is stopped. `most`: maximum number of concurrent episodes."""
    app = web.Application(client_max_size=MAX_BODY)
    app.router.add_post("/episode", EpisodeServer(env, most, token).episode)
    async with env.serving():
        connections = Connections(most=CONNECTIONS, idle=IDLE_S)
        server = await connections.listen(app, host, port, handler_cancellation=True)
        try:
            print(f"episodes of {env.name} at http://{host}:{port}", flush=True)
            await asyncio.Event().wait()
        finally:
            await server.close()


def load(table: dict[str, Any]) -> Environment:
    """Returns the environment that `table` describes: of the first interface if it names the package for
    `load_environment`."""
    name = table.get("load_environment")
    return Tasks(table) if name is None else FirstInterface(name, table.get("args") or {})


def main() -> int:
    parser = argparse.ArgumentParser(description="Plays episodes of a verifiers environment for slimx.")
    parser.add_argument(
        "env",
        help="table [env] of a verifiers configuration (or load_environment and args), as JSON or the path of a file",
    )
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
    env = load(json.loads(table))
    if arguments.prompts is None:
        asyncio.run(serve(env, arguments.host, arguments.port, arguments.episodes, token))
        return 0
    if arguments.tasks is None and not env.bounded:
        parser.error(f"{env.name} is infinite; set --tasks")
    with arguments.prompts.open("w") as file:
        for prompt in islice(env.prompts(), arguments.tasks):
            file.write(json.dumps(prompt) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
