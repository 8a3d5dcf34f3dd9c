"""HTTP calls to servers and routers: each has a deadline, and errors contain the URL, the status and the server's
message.

Control calls go directly to a server, because sglang-router does not forward them: to SGLang's endpoints by
`ControlClient.call`, to the slimx plugin inside the server (`slimx/adapters/sglang/plugin.py`) by `ControlClient.ask`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import aiohttp
import msgspec

from slimx.engines.server.keys import NO_KEYS, Keys, bearer
from slimx.errors import DeadlineError, SlimxError
from slimx.json_types import Json

RECEIVER = "slimx.adapters.sglang.weights.receiver.load_staged"
"""Dotted path of the server's custom weight loader."""
REFUSED = (401, 403)
"""HTTP status of a call without the right key."""


async def request(
    method: str, url: str, body: Json | None = None, *, deadline_s: float, headers: Mapping[str, str], who: str
) -> tuple[int, Json]:
    """Returns the status and the body of the response to one request.

    Raises DeadlineError if it is late, SlimxError if the server is unreachable; messages contain `who`, the server's
    name.
    """
    timeout = aiohttp.ClientTimeout(total=deadline_s)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.request(method, url, json=body) as response,
        ):
            return response.status, parse_body(await response.read())
    except TimeoutError:
        raise DeadlineError(f"{method} {url}", deadline_s, who) from None
    except aiohttp.ClientError as error:
        raise SlimxError(
            f"{who}: {method} {url} failed: {type(error).__name__}: {error}", code="http.unreachable", about=url
        ) from None


def parse_body(body: str | bytes) -> Json:
    """Parses a JSON object; any other body is returned under "text". Uses msgspec: responses contain numbers for every
    token."""
    try:
        value = msgspec.json.decode(body)
    except ValueError:  # includes errors of msgspec and of decoding UTF-8
        value = None
    if isinstance(value, dict):
        return value
    if isinstance(body, bytes):
        body = body.decode(errors="replace")
    return {"text": body}


def message_of(response: Json) -> str:
    """Returns the server's message in an error response, from any of its usual fields."""
    error = response.get("error", response.get("message", response.get("text", "")))
    if isinstance(error, dict):
        error = error.get("message", error)
    return str(error or "no message")[:2000]


# SGLang attaches a text to each token, the version of the weights that it was sampled with: "7" if a server serves one
# policy, or one version for each policy whose adapters it has, "actor=7,judge=6" (docs/policies.md).


def stamp(versions: Mapping[str, int]) -> str:
    """Returns the version text for several policies."""
    return ",".join(f"{policy}={version}" for policy, version in versions.items())


def version_in(text: str, policy: str | None) -> str:
    """Returns the version of `policy` in the version text of several policies, "" if it was not published. If `policy`
    is None, `text` is the version of a single policy and is returned unchanged."""
    if policy is None:
        return text
    versions = dict(entry.split("=", 1) for entry in text.split(",") if "=" in entry)
    return versions.get(policy, "")


class ControlClient:
    """Control calls of one server or router. Keeps no connection: calls are rare and come from any event loop."""

    def __init__(self, url: str, who: str = "engine", keys: Keys = NO_KEYS, deadline_s: float = 60.0) -> None:
        """Stores the address. `url`: "http://host:port". `who`: name of the server in messages. `keys`: keys that it
        requires. `deadline_s`: default deadline of one call, in seconds."""
        self.url = url.rstrip("/")
        self.who = who
        self.keys = keys
        self.deadline_s = deadline_s

    async def call(
        self,
        path: str,
        body: Json | None = None,
        *,
        method: str = "POST",
        deadline_s: float | None = None,
        key: str | None = None,
    ) -> Json:
        """Returns the response of an endpoint, called with the control key or with `key`. Raises SlimxError for an
        error status, and if SGLang sends `success` as false."""
        status, response = await request(
            method,
            self.url + path,
            body,
            deadline_s=self.deadline_s if deadline_s is None else deadline_s,
            headers=bearer(key or self.keys.control),
            who=self.who,
        )
        failure = f"{self.who}: {method} {self.url}{path} answered {status}: {message_of(response)}"
        if status in REFUSED:
            raise SlimxError(
                f"{failure}; it requires another key: name the environment variables of its keys in api_key_env and "
                "admin_api_key_env of its group in rollout.engines",
                code="engine.key",
                about=path,
            )
        if status >= 300 or response.get("success") is False:
            raise SlimxError(failure, code="http.refused", about=path)
        return response

    async def ask(self, verb: str, *, deadline_s: float | None = None, **arguments: object) -> list[Json]:
        """Returns the responses of all ranks to a verb of the plugin, in rank order."""
        action = f"slimx.{verb}"
        body = {"action": action, "selector": "target", "skip_tensor_list": [json.dumps(arguments)]}
        response = await self.call("/weights_checker", body, deadline_s=deadline_s)
        ranks = self._by_rank(action, response.get("ranks", []))
        for index, rank in enumerate(ranks):
            if "error" in rank:
                raise SlimxError(
                    f"{self.who} rank {index}, {action}: {rank['error']}",
                    code=rank.get("code", ""),
                    about=rank.get("about", ""),
                )
        return [json.loads(rank["slimx"]) for rank in ranks]

    def _by_rank(self, action: str, responses: list[Json]) -> list[Json]:
        """Returns one response per rank. With DP-attention every scheduler returns the responses of all ranks."""
        if not responses or any("pid" not in entry["checksums"] for entry in responses):
            raise SlimxError(
                f"{self.who} at {self.url}: {action} was not answered by the slimx plugin",
                code="engine.no_plugin",
                about=self.who,
            )
        ranks: dict[int, Json] = {}
        size = 0
        for entry in responses:
            (position,) = entry["parallelism_info"]
            response = entry["checksums"]
            rank = position["rank"]
            size = position["size"]
            if ranks.setdefault(rank, response)["pid"] != response["pid"]:
                raise SlimxError(
                    f"{self.who}: two processes answer as rank {rank}: they are replicas (dp_size without "
                    "enable_dp_attention); start one engine per replica",
                    code="engine.replicas",
                    about=self.who,
                )
        if sorted(ranks) != list(range(size)):
            raise SlimxError(
                f"{self.who}: ranks {sorted(ranks)} of {size} answered {action}; with pp_size above 1 SGLang "
                "returns the responses of the first stage only: use tensor and expert parallelism",
                code="engine.ranks_missing",
                about=self.who,
            )
        return [ranks[rank] for rank in range(size)]
