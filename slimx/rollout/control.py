"""Control calls to one engine server: each has a deadline; errors name the URL, the status and the server's words.

Calls go straight to the server (sglang-router does not forward them). Weights are staged and verified by the slimx
plugin inside the server (`slimx/adapters/sglang_plugin.py`); this file is the other end of its protocol.
"""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import time
from typing import Any, Literal

import aiohttp

import slimx
from slimx.errors import DeadlineError, SlimxError
from slimx.reshard.packed import PackedTensor
from slimx.rollout.process import SupervisedProcess

PROTOCOL = 1
"""Version of the plugin's actions that this file speaks."""
RECEIVER = "slimx.adapters.sglang_receiver.load_staged"
"""The server's custom weight loader, by dotted path."""
NO_TENSORS = base64.b64encode(pickle.dumps([], protocol=4)).decode()
"""What /update_weights_from_tensor must carry although our tensors are staged already: a pickled empty list."""

PORT_TAKEN = "error while attempting to bind on address"
"""What uvicorn writes into the server's log."""

Json = dict[str, Any]
PauseMode = Literal["retract", "in_place", "abort"]
Tag = Literal["weights", "kv_cache", "cuda_graph"]


class EngineControl:
    """The control client of one server. Holds no connection: calls are rare, and any event loop may make them."""

    def __init__(self, url: str, name: str = "engine", deadline_s: float = 60.0) -> None:
        """`url`: "http://host:port". `deadline_s`: seconds that one call may take unless it says otherwise."""
        self.url, self.name, self.deadline_s = url.rstrip("/"), name, deadline_s

    # Health and identity --------------------------------------------------------------------------------------------

    async def wait_ready(self, deadline_s: float, process: SupervisedProcess | None = None) -> None:
        """Wait until the server generates. A server that dies meanwhile is reported with the last lines of its log."""
        start = time.monotonic()
        while (waited := time.monotonic() - start) < deadline_s:
            if process is not None and (status := process.poll()) is not None:
                raise SlimxError(
                    f"engine {self.name} ended with status {status} before it was ready; "
                    f"the end of {process.log_path}:\n{process.tail(20)}"
                )
            if process is not None and PORT_TAKEN in process.tail(20):
                # SGLang's process stays when its HTTP server could not start.
                raise SlimxError(f"engine {self.name} cannot listen at {self.url}: the port is taken; start again")
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
        """What each rank really runs, or a SlimxError: SGLang swallows plugin failures, so silence is a refusal."""
        try:
            ranks = await self._ask("slimx.attest")
        except DeadlineError:
            raise
        except SlimxError as error:
            raise SlimxError(
                f"engine {self.name} at {self.url} does not attest the slimx plugin; start it with "
                f"python -m slimx.rollout.server in an environment where slimx is installed ({error})"
            ) from None
        for rank in ranks:
            self._check(rank)
        return ranks

    def _check(self, rank: Json) -> None:
        if (rank["protocol"], rank["slimx"]) != (PROTOCOL, slimx.__version__):
            raise SlimxError(
                f"engine {self.name} runs slimx {rank['slimx']} (protocol {rank['protocol']}), the trainer "
                f"{slimx.__version__} (protocol {PROTOCOL}); install the same version on both sides"
            )
        parts = rank["hooks"] | (rank["cpu"] or {})
        if failed := [part for part, in_force in parts.items() if not in_force]:
            raise SlimxError(
                f"engine {self.name}: parts of the slimx plugin are not in force in process {rank['pid']}: "
                f"{', '.join(failed)}; SGLang's log says why (search for 'plugin')"
            )

    # Generation -----------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Stop generating. `retract` drops the KV of running requests and recomputes it later; `in_place` keeps it."""
        await self._call("POST", "/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._call("POST", "/continue_generation", {})

    async def abort_all(self) -> None:
        """End every request now; each returns what it has, with finish reason "abort"."""
        await self._call("POST", "/abort_request", {"abort_all": True})

    async def flush_cache(self) -> None:
        """Forget all KV. SGLang refuses while requests run; paused by `retract` it accepts."""
        await self._call("POST", "/flush_cache")

    async def sleep(self, tags: tuple[Tag, ...]) -> None:
        """Release the memory of `tags`; the server must be paused. Without a memory saver (CPU) nothing is freed."""
        await self._call("POST", "/release_memory_occupation", {"tags": list(tags)})

    async def wake(self, tags: tuple[Tag, ...]) -> None:
        """Take the memory of `tags` back. Weights come back undefined, KV empty."""
        await self._call("POST", "/resume_memory_occupation", {"tags": list(tags)})

    # Weights --------------------------------------------------------------------------------------------------------

    async def inventory(self) -> dict[str, str]:
        """Every Hugging Face tensor that the model loads -> "dtype:d0,d1"; a parameter without a name is an error."""
        (rank,) = await self._ask("slimx.inventory")
        if uncovered := rank["uncovered"]:
            name, why = next(iter(uncovered.items()))
            raise SlimxError(
                f"engine {self.name} holds {len(uncovered)} parameters that slimx cannot publish, first {name}: {why}; "
                "add a row to slimx/adapters/sglang_layout.py"
            )
        return rank["tensors"]

    async def stage(
        self, fd_path: str, tensors: list[PackedTensor], bucket: int, size: int, deadline_s: float | None = None
    ) -> Json:
        """Have the server map one bucket of `size` bytes and prove its bytes. Changes nothing of the model.

        Answer: {staged, bytes, missing, outcome}. A wrong byte or an unknown tensor is an error and drops all that is
        staged.
        """
        argument = {"fd_path": fd_path, "tensors": [t.to_json() for t in tensors], "bucket": bucket, "size": size}
        return (await self._ask("slimx.stage", argument, deadline_s))[0]

    async def abort_staging(self) -> Json:
        """Drop what is staged. May be called at any time."""
        return (await self._ask("slimx.abort"))[0]

    async def status(self) -> Json:
        """{staged, bytes, missing: [names], outcome: {loaded, error?}} of the receiver."""
        return (await self._ask("slimx.status"))[0]

    async def check_staged(self) -> None:
        """Refuse if a tensor of the model is not staged: the last look before the first copy."""
        if missing := (await self.status())["missing"]:
            raise SlimxError(
                f"engine {self.name}: {len(missing)} tensors of the model are not staged, first {missing[0]}; "
                "stage every tensor before loading"
            )

    async def load(self, deadline_s: float | None = None) -> int:
        """Copy what is staged into the model and return the number of tensors. After an error the weights are mixed."""
        begin = {"selector": "target"}
        try:
            await self._call("POST", "/begin_weight_update", begin, deadline_s=deadline_s)
        except DeadlineError:
            raise
        except SlimxError:
            # A publisher that died between begin and end left its session open: close it, then ours must open.
            await self._call("POST", "/end_weight_update", {}, deadline_s=deadline_s)
            await self._call("POST", "/begin_weight_update", begin, deadline_s=deadline_s)
        try:
            update = {
                "serialized_named_tensors": [NO_TENSORS],
                "load_format": RECEIVER,
                "flush_cache": False,
                "selector": "target",
            }
            await self._call("POST", "/update_weights_from_tensor", update, deadline_s=deadline_s)
        finally:
            await self._call("POST", "/end_weight_update", {}, deadline_s=deadline_s)
        outcome = (await self.status())["outcome"]
        if "error" in outcome:
            raise SlimxError(
                f"engine {self.name}: the copy ended after {outcome['loaded']} tensors: {outcome['error']}; "
                "publish again"
            )
        return outcome["loaded"]

    async def verify(self, checksums: dict[str, int] | None = None, deadline_s: float | None = None) -> Json:
        """Recompute, from what the model holds, the checksum of every tensor given (or of all that was ever loaded).

        Answer: {checked: count, differ: [names], unverified: [names that the model holds and nobody vouched for]}.
        """
        argument = {}
        if checksums is not None:
            argument = {"tensors": [{"name": name, "checksum": f"{value:016x}"} for name, value in checksums.items()]}
        return (await self._ask("slimx.verify", argument, deadline_s))[0]

    async def set_version(self, version: int) -> None:
        """Stamp the weights: tokens sampled from now on carry `version`. Running requests go on."""
        await self._call("POST", "/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    # Wire -----------------------------------------------------------------------------------------------------------

    async def _ask(self, action: str, argument: Json | None = None, deadline_s: float | None = None) -> list[Json]:
        """The answer of every rank to one action of the plugin."""
        body = {"action": action, "selector": "target", "skip_tensor_list": [json.dumps(argument or {})]}
        answer = await self._call("POST", "/weights_checker", body, deadline_s=deadline_s)
        ranks = [rank["checksums"] for rank in answer.get("ranks", [])]
        for number, rank in enumerate(ranks):
            if "error" in rank:
                raise SlimxError(f"engine {self.name} rank {number}, {action}: {rank['error']}")
        if not ranks or any("slimx" not in rank for rank in ranks):
            raise SlimxError(f"engine {self.name} at {self.url}: {action} was not answered by the slimx plugin")
        return [json.loads(rank["slimx"]) for rank in ranks]

    async def _call(self, method: str, path: str, body: Json | None = None, *, deadline_s: float | None = None) -> Json:
        """One HTTP call. Anything but status 200 (and `success`, where SGLang sends it) is a SlimxError."""
        deadline_s, url = self.deadline_s if deadline_s is None else deadline_s, self.url + path
        try:
            timeout = aiohttp.ClientTimeout(total=deadline_s)
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.request(method, url, json=body) as response,
            ):
                status, text = response.status, await response.text()
        except TimeoutError:
            raise DeadlineError(f"{method} {url}", deadline_s, f"engine {self.name}") from None
        except aiohttp.ClientError as error:
            raise SlimxError(f"engine {self.name}: {method} {url} failed: {type(error).__name__}: {error}") from None
        answer = parse_body(text)
        if status != 200 or answer.get("success") is False:
            raise SlimxError(f"engine {self.name}: {method} {url} answered {status}: {message_of(answer)}")
        return answer


def parse_body(text: str) -> Json:
    """A JSON object as it is; anything else under "text"."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"text": text}


def message_of(answer: Json) -> str:
    """The server's words in a failed answer, wherever it put them."""
    error = answer.get("error", answer.get("message", answer.get("text", "")))
    if isinstance(error, dict):
        error = error.get("message", error)
    return str(error or "no message")[:2000]
