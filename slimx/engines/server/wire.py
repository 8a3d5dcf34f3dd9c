"""HTTP calls to servers and routers: each has a deadline; errors name the URL, the status and the server's words.

Control calls go straight to a server (sglang-router does not forward them): to SGLang's own endpoints by `Wire.call`,
to the slimx plugin inside the server (`slimx/adapters/sglang/plugin.py`) by `Wire.ask`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from slimx.data.whole import Json
from slimx.engines.server.keys import NO_KEYS, Keys, bearer
from slimx.errors import DeadlineError, SlimxError

RECEIVER = "slimx.adapters.sglang.weights.receiver.load_staged"
"""The server's custom weight loader, by dotted path."""
REFUSED = (401, 403)
"""HTTP status of a call without the right key."""


async def request(
    method: str, url: str, body: Json | None = None, *, deadline_s: float, headers: Mapping[str, str], who: str
) -> tuple[int, Json]:
    """Status and body of the answer to one request. Raises DeadlineError, or SlimxError where nothing answers, naming
    `who` is asked."""
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
    """A JSON object as it is; anything else under "text". By msgspec, as an answer brings a few numbers for every
    token."""
    try:
        value = msgspec.json.decode(body)
    except ValueError:  # msgspec's own errors are among these, and bytes that are no UTF-8
        value = None
    if isinstance(value, dict):
        return value
    return {"text": body if isinstance(body, str) else body.decode(errors="replace")}


def message_of(answer: Json) -> str:
    """The server's words in a failed answer, wherever it put them."""
    error = answer.get("error", answer.get("message", answer.get("text", "")))
    if isinstance(error, dict):
        error = error.get("message", error)
    return str(error or "no message")[:2000]


# SGLang notes with each token one text, the version of the weights that it was sampled with: a number, "7", of the one
# policy that a server serves, or one for each policy whose adapters it has, "actor=7,judge=6" (docs/policies.md).


def stamp(versions: Mapping[str, int]) -> str:
    """The text that stands for the versions of several policies."""
    return ",".join(f"{policy}={version}" for policy, version in versions.items())


def stamped(text: str, policy: str | None) -> str:
    """The version of `policy` in a text that stands for several, "" if nothing of it was published; with None, `text`
    itself, which then stands for one."""
    if policy is None:
        return text
    return dict(each.split("=", 1) for each in text.split(",") if "=" in each).get(policy, "")


class Wire:
    """The control calls of one server, or router. Holds no connection: calls are rare, and any event loop may make
    them."""

    def __init__(self, url: str, who: str = "engine", keys: Keys = NO_KEYS, deadline_s: float = 60.0) -> None:
        """`url`: "http://host:port". `who`: its name in messages. `keys`: that it asks for. `deadline_s`: seconds that
        one call may take unless it says otherwise."""
        self.url, self.who, self.keys, self.deadline_s = url.rstrip("/"), who, keys, deadline_s

    async def call(
        self,
        path: str,
        body: Json | None = None,
        *,
        method: str = "POST",
        deadline_s: float | None = None,
        key: str | None = None,
    ) -> Json:
        """The answer of an endpoint, asked with the key of control calls or with `key`. Raises SlimxError for a status
        of an error, and where SGLang sends `success` as false."""
        status, answer = await request(
            method,
            self.url + path,
            body,
            deadline_s=self.deadline_s if deadline_s is None else deadline_s,
            headers=bearer(key or self.keys.control),
            who=self.who,
        )
        where = f"{self.who}: {method} {self.url}{path} answered {status}"
        if status in REFUSED:
            raise SlimxError(
                f"{where}: {message_of(answer)}; it asks for another key: name the variables that hold its keys in "
                "api_key_env and admin_api_key_env of its group in rollout.engines",
                code="engine.key",
                about=path,
            )
        if status >= 300 or answer.get("success") is False:
            raise SlimxError(f"{where}: {message_of(answer)}", code="http.refused", about=path)
        return answer

    async def ask(self, verb: str, *, deadline_s: float | None = None, **arguments: Any) -> list[Json]:
        """The answers of all ranks to one verb of the plugin, in the order of ranks."""
        action = f"slimx.{verb}"
        body = {"action": action, "selector": "target", "skip_tensor_list": [json.dumps(arguments)]}
        answer = await self.call("/weights_checker", body, deadline_s=deadline_s)
        ranks = self._by_rank(action, answer.get("ranks", []))
        for number, rank in enumerate(ranks):
            if "error" in rank:
                raise SlimxError(
                    f"{self.who} rank {number}, {action}: {rank['error']}",
                    code=rank.get("code", ""),
                    about=rank.get("about", ""),
                )
        return [json.loads(rank["slimx"]) for rank in ranks]

    def _by_rank(self, action: str, answers: list[Json]) -> list[Json]:
        """One answer per rank, or an error. With DP-attention every scheduler brings the answers of all ranks."""
        if not answers or any("pid" not in entry["checksums"] for entry in answers):
            raise SlimxError(
                f"{self.who} at {self.url}: {action} was not answered by the slimx plugin",
                code="engine.no_plugin",
                about=self.who,
            )
        found: dict[int, Json] = {}
        size = 0
        for entry in answers:
            (place,), answer = entry["parallelism_info"], entry["checksums"]
            rank, size = place["rank"], place["size"]
            if found.setdefault(rank, answer)["pid"] != answer["pid"]:
                raise SlimxError(
                    f"{self.who}: two processes answer as rank {rank}, replicas of one model (dp_size without "
                    "enable_dp_attention); start one engine per replica",
                    code="engine.replicas",
                    about=self.who,
                )
        if sorted(found) != list(range(size)):
            raise SlimxError(
                f"{self.who}: ranks {sorted(found)} of {size} answered {action}; with pp_size above 1 SGLang "
                "brings back the first stage's answers only: use tensor and expert parallelism",
                code="engine.ranks_missing",
                about=self.who,
            )
        return [found[rank] for rank in range(size)]
