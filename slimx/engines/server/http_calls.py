"""HTTP calls to servers and routers. Each has a deadline, and errors contain the URL, the status and the server's
message.

Control calls go directly to a server, because sglang-router does not forward them: `ControlClient.call` calls SGLang's
endpoints, and `ControlClient.request_ranks` calls the slimx plugin inside the server
(`slimx/adapters/sglang/plugin.py`)."""

from __future__ import annotations

import json
from collections.abc import Mapping

import aiohttp
import msgspec

from slimx.engines.server.keys import NO_KEYS, Keys, bearer
from slimx.errors import DeadlineError, SlimxError, raised
from slimx.json_types import Json

RECEIVER = "slimx.adapters.sglang.weights.receiver.load_staged"
"""Dotted path of the function that SGLang calls to load staged weights (as a custom weight loader)."""
PACKED = b"\x81"
"""First byte of a packed answer (slimx/adapters/sglang/answers.py), a MessagePack map with one key; JSON has no such
byte there."""
REFUSED = (401, 403)
"""HTTP statuses with which a server refuses a call whose key is missing or wrong."""


async def request(
    method: str, url: str, body: Json | None = None, *, deadline_s: float, headers: Mapping[str, str], server_name: str
) -> tuple[int, Json]:
    """Sends one request with the JSON `body` and returns the status and the JSON body of the response.

    `server_name`: name of the server in messages. Raises DeadlineError if there is no response within `deadline_s`
    seconds, and SlimxError if the server cannot be reached."""
    timeout = aiohttp.ClientTimeout(total=deadline_s)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.request(method, url, json=body) as response,
        ):
            return response.status, parse_body(await response.read())
    except TimeoutError:
        raise DeadlineError(f"{method} {url}", deadline_s, server_name) from None
    except aiohttp.ClientError as error:
        raise SlimxError(
            f"{method} {url} failed ({raised(error)}); check that {server_name} is running and can "
            "be reached from this machine",
            code="http.unreachable",
            about=url,
        ) from None


def parse_body(body: str | bytes) -> Json:
    """Returns the object in a response, in JSON or MessagePack; any other body is returned as {"text": body}.

    Parses with msgspec, because responses contain numbers for every token."""
    try:
        if isinstance(body, bytes) and body.startswith(PACKED):
            value = msgspec.msgpack.decode(body)
        else:
            value = msgspec.json.decode(body)
    except ValueError:  # includes errors of msgspec and of decoding UTF-8
        value = None
    if isinstance(value, dict):
        return value
    if isinstance(body, bytes):
        body = body.decode(errors="replace")
    return {"text": body}


def message_of(response: Json) -> str:
    """Returns the server's message from an error response, whichever of several fields contains it."""
    error = response.get("error", response.get("message", response.get("text", "")))
    if isinstance(error, dict):
        error = error.get("message", error)
    return str(error or "no message")[:2000]


# SGLang attaches to each token a text, the version of the weights from which it was sampled: "7" if a server serves one
# policy, or "actor=7,judge=6" if it has the adapters of several policies (docs/policies.md).


def stamp(versions: Mapping[str, int]) -> str:
    """Returns the text that SGLang attaches to tokens as their version if it serves several policies, such as
    "actor=7,judge=6"."""
    return ",".join(f"{policy}={version}" for policy, version in versions.items())


def version_in(text: str, policy: str | None) -> str:
    """Returns the version of `policy` in `text`, in which `stamp` has written the versions of several policies; "" if
    no version of the policy was published.

    If `policy` is None, `text` is the version of a single policy and is returned unchanged."""
    if policy is None:
        return text
    versions = dict(entry.split("=", 1) for entry in text.split(",") if "=" in entry)
    return versions.get(policy, "")


class ControlClient:
    """Client for control calls to one server or router.

    Each call opens a new connection, because calls are rare and may come from any event loop."""

    def __init__(self, url: str, server_name: str = "engine", keys: Keys = NO_KEYS, deadline_s: float = 60.0) -> None:
        """Stores the address and the keys.

        `url`: "http://host:port". `server_name`: name of the server in messages. `keys`: keys that the server requires.
        `deadline_s`: default deadline for one call in seconds."""
        self.url = url.rstrip("/")
        self.server_name = server_name
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
        """Calls the endpoint `path` with `key`, or with the control key if `key` is None, and returns the JSON
        response.

        `deadline_s`: if None, the client's default applies. Raises SlimxError for an error status, or if SGLang's
        response has `success` false."""
        status, response = await request(
            method,
            self.url + path,
            body,
            deadline_s=self.deadline_s if deadline_s is None else deadline_s,
            headers=bearer(key or self.keys.control),
            server_name=self.server_name,
        )
        failure = f"{self.server_name}: {method} {self.url}{path} returned status {status} ({message_of(response)})"
        if status in REFUSED:
            raise SlimxError(
                f"{failure}, because the server requires a different key; set api_key_env and admin_api_key_env of "
                "the engine's group in rollout.engines to the names of environment variables with the server's keys",
                code="engine.key",
                about=path,
            )
        if status >= 300 or response.get("success") is False:
            raise SlimxError(failure, code="http.refused", about=path)
        return response

    async def request_ranks(self, verb: str, *, deadline_s: float | None = None, **arguments: object) -> list[Json]:
        """Sends the request `verb` to the slimx plugin and returns the responses of all ranks, in rank order. Raises
        SlimxError if any rank reports an error."""
        action = f"slimx.{verb}"
        body = {"action": action, "selector": "target", "skip_tensor_list": [json.dumps(arguments)]}
        response = await self.call("/weights_checker", body, deadline_s=deadline_s)
        ranks = self._by_rank(action, response.get("ranks", []))
        for index, rank in enumerate(ranks):
            if "error" in rank:
                raise SlimxError(
                    f"{action} failed on rank {index} of {self.server_name}: {rank['error']}",
                    code=rank.get("code", ""),
                    about=rank.get("about", ""),
                )
        return [json.loads(rank["slimx"]) for rank in ranks]

    def _by_rank(self, action: str, responses: list[Json]) -> list[Json]:
        """Returns one response per rank, in rank order; with DP attention, every scheduler sends the responses of all
        ranks.

        `action`: the request, for messages. Raises SlimxError if ranks are missing or several processes have the same
        rank."""
        if not responses or any("pid" not in entry["checksums"] for entry in responses):
            raise SlimxError(
                f"{self.server_name} at {self.url} has no slimx plugin that responds to {action}; start the server "
                "with `python -m slimx.engines.server.launch`",
                code="engine.no_plugin",
                about=self.server_name,
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
                    f"{self.server_name}: two processes respond as rank {rank}, because dp_size without "
                    "enable_dp_attention creates replicas; remove dp_size, and start one engine per replica",
                    code="engine.replicas",
                    about=self.server_name,
                )
        if sorted(ranks) != list(range(size)):
            raise SlimxError(
                f"{self.server_name}: only ranks {sorted(ranks)} of {size} responded to {action}, because SGLang "
                "returns responses only from the first pipeline stage; set pp_size to 1, and use tensor or expert "
                "parallelism instead",
                code="engine.ranks_missing",
                about=self.server_name,
            )
        return [ranks[rank] for rank in range(size)]
