"""Control calls to one engine server: each has a deadline; errors name the URL, the status and the server's words.

Calls go straight to the server (sglang-router does not forward them). One method for each of SGLang's own endpoints,
and `ask` for the actions of the slimx plugin inside the server (`slimx/adapters/sglang/plugin.py`).
"""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
from typing import Literal

import slimx
from slimx.engines.server.answers import Json, message_of, request
from slimx.engines.server.keys import NO_KEYS, Keys, bearer
from slimx.errors import DeadlineError, SlimxError
from slimx.runtime.logs import how_ended, quoted
from slimx.runtime.process import ServerProcess

PROTOCOL = 8
"""Version of the plugin's actions that this file speaks."""
RECEIVER = "slimx.adapters.sglang.weights.receiver.load_staged"
"""The server's custom weight loader, by dotted path."""
NO_TENSORS = base64.b64encode(pickle.dumps([], protocol=4)).decode()
"""The body that /update_weights_from_tensor must carry although our tensors are staged: a pickled empty list."""

REFUSED = (401, 403)
"""HTTP status of a call without the right key."""

PORT_TAKEN = "error while attempting to bind on address"
"""Words of uvicorn in the server's log."""

PauseMode = Literal["retract", "in_place", "abort"]
Tag = Literal["weights", "kv_cache", "cuda_graph"]


class PortTaken(SlimxError):
    """The server's HTTP port was taken between its choice and its use."""


class RanksUnheard(SlimxError):
    """The server does not bring back the answer of each of its ranks."""


class EngineControl:
    """The control client of one server. Holds no connection: calls are rare, and any event loop may make them."""

    def __init__(self, url: str, name: str = "engine", keys: Keys = NO_KEYS, deadline_s: float = 60.0) -> None:
        """`url`: "http://host:port". `keys`: that the server asks for. `deadline_s`: seconds that one call may take
        unless it says otherwise."""
        self.url, self.name, self.keys, self.deadline_s = url.rstrip("/"), name, keys, deadline_s

    # Health and identity --------------------------------------------------------------------------------------------

    async def wait_ready(self, deadline_s: float, process: ServerProcess | None = None) -> None:
        """Wait until the server generates. A server that dies meanwhile is reported with the last lines of its log."""
        start = asyncio.get_running_loop().time()
        while (waited := asyncio.get_running_loop().time() - start) < deadline_s:
            if process is not None and (status := process.poll()) is not None:
                raise SlimxError(
                    f"engine {self.name} {how_ended(status)} before it was ready; "
                    f"{quoted(process.log_path, process.tail())}",
                    code="engine.died",
                    about=self.name,
                )
            if process is not None and PORT_TAKEN in process.tail():
                # SGLang's process stays when its HTTP server could not start.
                raise PortTaken(
                    f"engine {self.name} cannot listen at {self.url}: the port is taken; end what listens there",
                    code="engine.port",
                    about=self.url,
                )
            try:
                await self.health(min(30.0, deadline_s - waited))
                return
            except SlimxError:
                await asyncio.sleep(0.25)
        raise DeadlineError(
            f"engine {self.name} at {self.url} to become ready", deadline_s, f"log {process and process.log_path}"
        )

    async def health(self, deadline_s: float = 30.0) -> None:
        """Returns if the server generates (SGLang needs 1 s to tell). A paused server never answers: do not ask it."""
        await self._call("GET", "/health_generate", deadline_s=deadline_s)

    async def attest(self) -> list[Json]:
        """The attestation of each rank, or a SlimxError: SGLang swallows plugin failures, so silence is a refusal."""
        try:
            ranks = await self.ask("slimx.attest")
        except (DeadlineError, RanksUnheard):
            raise
        except SlimxError as error:
            raise SlimxError(
                f"engine {self.name} at {self.url} does not attest the slimx plugin; start it with "
                f"python -m slimx.engines.server.launch in an environment where slimx is installed ({error})",
                code="engine.unattested",
                about=self.name,
            ) from None
        for rank in ranks:
            self._check(rank)
        return ranks

    def _check(self, rank: Json) -> None:
        if (rank["protocol"], rank["slimx"]) != (PROTOCOL, slimx.__version__):
            raise SlimxError(
                f"engine {self.name} runs slimx {rank['slimx']} (protocol {rank['protocol']}), the trainer "
                f"{slimx.__version__} (protocol {PROTOCOL}); install the same version on both sides",
                code="engine.protocol",
                about=self.name,
            )
        parts = rank["hooks"] | (rank["cpu"] or {})
        if failed := [part for part, in_force in parts.items() if not in_force]:
            raise SlimxError(
                f"engine {self.name}: parts of the slimx plugin are not in force in process {rank['pid']}: "
                f"{', '.join(failed)}; SGLang's log says why (search for 'plugin')",
                code="engine.plugin_part",
                about=", ".join(failed),
            )

    async def trace(self, on: bool) -> dict[str, list[str]]:
        """Begin (`on`) or end noting digests of the residual stream; at the end the first rank's, by point."""
        return (await self.ask("slimx.trace", {"on": on}))[0]

    async def server_info(self) -> Json:
        """The arguments that the server runs with, by the names of SGLang's ServerArgs, and more."""
        return await self._call("GET", "/server_info", key=self.keys.api_key)

    async def check_guarded(self) -> None:
        """Refuse a server that answers whoever asks: its keys must be in force for generation and for control."""
        for method, path in (("GET", "/model_info"), ("POST", "/weights_checker")):
            status, _ = await self._request(method, path, {"action": "slimx.status"}, self.deadline_s, key=None)
            if status not in REFUSED:
                raise SlimxError(
                    f"engine {self.name} answers {method} {self.url}{path} with {status} to whoever asks, without a "
                    "key; leave the arguments out of rollout.engines.sglang that have it do so",
                    code="engine.unguarded",
                    about=path,
                )

    # Generation -----------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Stop generating. `retract` drops the KV of running requests and recomputes it later; `in_place` keeps it."""
        await self._call("POST", "/pause_generation", {"mode": mode})

    async def resume(self, deadline_s: float | None = None) -> None:
        await self._call("POST", "/continue_generation", {}, deadline_s=deadline_s)

    async def abort_all(self) -> None:
        """End every request now; each returns what it has, with finish reason "abort"."""
        await self._call("POST", "/abort_request", {"abort_all": True})

    async def flush_cache(self) -> None:
        """Forget all KV. SGLang refuses while requests run; paused by `retract` it accepts."""
        await self._call("POST", "/flush_cache")

    async def freeze_gc(self) -> None:
        """Have garbage collections leave out what a start has made: on a CPU each `flush_cache` is a full one."""
        await self._call("POST", "/freeze_gc")

    async def sleep(self, tags: tuple[Tag, ...]) -> None:
        """Release the memory of `tags`; the server must be paused. Without a memory saver (CPU) nothing is freed."""
        await self._call("POST", "/release_memory_occupation", {"tags": list(tags)})

    async def wake(self, tags: tuple[Tag, ...]) -> None:
        """Take the memory of `tags` back. Weights come back undefined, KV empty."""
        await self._call("POST", "/resume_memory_occupation", {"tags": list(tags)})

    # Weights --------------------------------------------------------------------------------------------------------

    async def open_update(self, *, draft: bool = False) -> None:
        """Open SGLang's weight update, in which weights stand as loaders want them; `close_update` packs them again.
        `draft`: those of the draft model, too."""
        body = {"selector": "all" if draft else "target"}
        try:
            await self._call("POST", "/begin_weight_update", body)
        except DeadlineError:
            raise
        except SlimxError:
            # A publisher that died after opening left its update open: close it, then ours must open.
            await self.close_update()
            await self._call("POST", "/begin_weight_update", body)

    async def close_update(self) -> None:
        await self._call("POST", "/end_weight_update", {})

    async def copy_staged(self, ranks: int) -> None:
        """Have SGLang copy what is staged into the model of each of `ranks`; their `status` tells how that ended."""
        update = {
            "serialized_named_tensors": [NO_TENSORS] * ranks,
            "load_format": RECEIVER,
            "flush_cache": False,
            "selector": "target",
        }
        await self._call("POST", "/update_weights_from_tensor", update)

    async def status(self) -> list[Json]:
        """By rank {open, version, staged, bytes, missing, first_missing, outcome: {loaded, error?}} of its receiver."""
        return await self.ask("slimx.status")

    async def set_version(self, version: int | str) -> None:
        """Stamp the weights: tokens sampled from now on carry `version` (slimx.engines.server.stamp). Running requests
        go on."""
        await self._call("POST", "/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    # Wire -----------------------------------------------------------------------------------------------------------

    async def ask(self, action: str, argument: Json | None = None, deadline_s: float | None = None) -> list[Json]:
        """The answers of all ranks to one action of the plugin, in the order of ranks."""
        body = {"action": action, "selector": "target", "skip_tensor_list": [json.dumps(argument or {})]}
        answer = await self._call("POST", "/weights_checker", body, deadline_s=deadline_s)
        ranks = self._by_rank(action, answer.get("ranks", []))
        for number, rank in enumerate(ranks):
            if "error" in rank:
                raise SlimxError(
                    f"engine {self.name} rank {number}, {action}: {rank['error']}",
                    code=rank.get("code", ""),
                    about=rank.get("about", ""),
                )
        return [json.loads(rank["slimx"]) for rank in ranks]

    def _by_rank(self, action: str, answers: list[Json]) -> list[Json]:
        """One answer per rank, or an error. With DP-attention every scheduler brings the answers of all ranks."""
        if not answers or any("pid" not in entry["checksums"] for entry in answers):
            raise SlimxError(
                f"engine {self.name} at {self.url}: {action} was not answered by the slimx plugin",
                code="engine.no_plugin",
                about=self.name,
            )
        found: dict[int, Json] = {}
        size = 0
        for entry in answers:
            (place,), answer = entry["parallelism_info"], entry["checksums"]
            rank, size = place["rank"], place["size"]
            if found.setdefault(rank, answer)["pid"] != answer["pid"]:
                raise RanksUnheard(
                    f"engine {self.name}: two processes answer as rank {rank}, replicas of one model (dp_size without "
                    "enable_dp_attention); start one engine per replica",
                    code="engine.replicas",
                    about=self.name,
                )
        if sorted(found) != list(range(size)):
            raise RanksUnheard(
                f"engine {self.name}: ranks {sorted(found)} of {size} answered {action}; with pp_size above 1 SGLang "
                "brings back the first stage's answers only: use tensor and expert parallelism",
                code="engine.ranks_missing",
                about=self.name,
            )
        return [found[rank] for rank in range(size)]

    async def _call(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        deadline_s: float | None = None,
        key: str | None = None,
    ) -> Json:
        """One HTTP call, with the key of control calls unless another is given. Anything but status 200 (and `success`,
        where SGLang sends it) is a SlimxError."""
        deadline_s = self.deadline_s if deadline_s is None else deadline_s
        status, answer = await self._request(method, path, body, deadline_s, key=key or self.keys.control)
        where = f"engine {self.name}: {method} {self.url}{path} answered {status}"
        if status in REFUSED:
            raise SlimxError(
                f"{where}: {message_of(answer)}; it asks for another key: name the variables that hold its keys in "
                "api_key_env and admin_api_key_env of its group in rollout.engines",
                code="engine.key",
                about=path,
            )
        if status != 200 or answer.get("success") is False:
            raise SlimxError(f"{where}: {message_of(answer)}", code="engine.call", about=path)
        return answer

    async def _request(
        self, method: str, path: str, body: Json | None, deadline_s: float, *, key: str | None
    ) -> tuple[int, Json]:
        """Status and body of the answer to one HTTP request."""
        return await request(
            method, self.url + path, body, deadline_s=deadline_s, headers=bearer(key), who=f"engine {self.name}"
        )
