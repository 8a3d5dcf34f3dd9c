"""One engine: a SGLang server with a state machine that prevents it from serving unverified weights.

STARTING --ready, attested--> READY <--resume/pause--> PAUSED --load--> DIRTY --verified--> PAUSED
                                                         |  ^             ^
                                                    sleep|  |wake         |wake of weights (their values are gone)
                                                         v  |             |
                                                        ASLEEP -----------+            any --ended, failed--> DEAD
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import pickle
from collections.abc import AsyncIterator
from enum import StrEnum
from typing import Literal

from slimx.engines.server.attestation import check_copied, check_staged, forms_of, verified_by
from slimx.engines.server.http_calls import RECEIVER, stamp
from slimx.engines.server.server import EngineServer
from slimx.engines.server.spec import EngineSpec
from slimx.errors import DeadlineError, SlimxError
from slimx.json_types import Json
from slimx.reshard.manifest import Encoding, Manifest
from slimx.reshard.packed import PackedBucket
from slimx.reshard.parties import BEFORE_BEGIN, ReceiverLost, Staging

PauseMode = Literal["retract", "in_place", "abort"]
Tag = Literal["weights", "kv_cache", "cuda_graph"]

NO_TENSORS = base64.b64encode(pickle.dumps([], protocol=4)).decode()
"""Required body of /update_weights_from_tensor, a pickled empty list: the tensors are already staged."""


class State(StrEnum):
    STARTING = "STARTING"
    READY = "READY"
    PAUSED = "PAUSED"
    DIRTY = "DIRTY"
    """Copying has begun and no verification has passed since: it may serve only after one."""
    ASLEEP = "ASLEEP"
    DEAD = "DEAD"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.STARTING: frozenset({State.READY, State.DEAD}),
    State.READY: frozenset({State.PAUSED, State.DEAD}),
    State.PAUSED: frozenset({State.READY, State.DIRTY, State.ASLEEP, State.DEAD}),
    State.DIRTY: frozenset({State.DIRTY, State.PAUSED, State.DEAD}),
    State.ASLEEP: frozenset({State.PAUSED, State.DIRTY, State.DEAD}),
    State.DEAD: frozenset({State.STARTING}),
}


class Engine(EngineServer):
    """A server with a state: a Ray actor that the driver calls through `slimx.engines.fleet.handle`."""

    state = State.DEAD
    epoch = -1
    """Membership epoch of the last publication that was begun."""

    def reset(self, spec: EngineSpec) -> None:
        """Resets everything that belongs to one start; the next one uses `spec`."""
        super().reset(spec)
        self.asleep: set[Tag] = set()
        """Tags of released memory."""
        self.pause_mode: PauseMode = "retract"
        self.versions: dict[str, int] = {}
        """Version of the verified weights, or adapters, of each published policy."""
        self.publication: Manifest | None = None
        """The open publication."""
        self.staging: Staging = "model"
        self.updating = False
        """True while SGLang's weight update is open: from the first load of a publication to its verification."""

    def move(self, to: State) -> None:
        """Changes the state. Raises SlimxError for a transition that is not in `TRANSITIONS`."""
        if to not in TRANSITIONS[self.state]:
            allowed = ", ".join(sorted(TRANSITIONS[self.state]))
            raise SlimxError(
                f"engine {self.spec.name} is {self.state} and cannot become {to}; from here it can become {allowed}",
                code="engine.transition",
                about=str(to),
            )
        self.state = to

    def require(self, operation: str, *states: State) -> None:
        """Raises SlimxError unless the engine is in one of the `states` of `operation`."""
        if self.state not in states:
            raise SlimxError(
                f"engine {self.spec.name} is {self.state}; {operation} needs {' or '.join(states)}",
                code="engine.state",
                about=operation,
            )

    # Life -----------------------------------------------------------------------------------------------------------

    async def start(self, deadline_s: float) -> tuple[EngineSpec, list[Json]]:
        """Starts the server. Returns its specification and the attestation of its ranks. Stops it on any failure."""
        self.move(State.STARTING)
        try:
            await self.lasting(self.launch(deadline_s))
        except ReceiverLost:
            raise  # it was stopped, and the next start may have begun
        except BaseException:
            await self.stop()
            raise
        self.move(State.READY)
        return self.spec, self.attestation

    async def stop(self, grace_s: float = 10.0) -> None:
        """Ends the server with its process tree, in any state; DEAD afterwards. An external server keeps running."""
        before = self.state
        self.state = State.DEAD
        for task in self.pending:
            task.cancel()
        if before is not State.DEAD:
            await self.release(paused=before is State.PAUSED)
        await self.end_processes(grace_s)

    async def check_health(self, deadline_s: float) -> None:
        """Raises SlimxError if the server has ended or, while READY, does not generate. Keeps the state: the owner
        counts failures.

        A paused or sleeping server cannot respond to /health_generate (and would report itself unhealthy).
        """
        if self.state is State.READY:
            await self.check_generation(deadline_s)
            return
        end = await self.ended()
        if end is not None:
            raise SlimxError(end, code="engine.ended", about=self.spec.name)

    async def serves(self) -> bool:
        """Returns True if the server generates: it is not paused, asleep or in the middle of a publication."""
        return self.state is State.READY

    # Calls ------------------------------------------------------------------------------------------------------------

    async def perform(self, verb: str, epoch: int | None, deadline_s: float, *arguments: object) -> object:
        """Calls a verb of `slimx.reshard.parties.Receiver` as a step of the publication of membership `epoch`, or any
        method if `epoch` is None. Raises SlimxError for a step of an outdated publication."""
        if epoch is not None:
            self._enter(verb, epoch)
        try:
            async with asyncio.timeout(deadline_s):
                return await self.lasting(getattr(self, verb)(*arguments))
        except TimeoutError:
            raise DeadlineError(verb, deadline_s, f"engine {self.spec.name}") from None

    def _enter(self, verb: str, epoch: int) -> None:
        if epoch < self.epoch or (epoch > self.epoch and verb not in BEFORE_BEGIN):
            raise SlimxError(
                f"engine {self.spec.name}: {verb} of epoch {epoch} is late; a publication of epoch {self.epoch} "
                "has begun",
                code="engine.late",
                about=verb,
            )
        if verb == "begin":
            self.epoch = epoch

    # Generation -----------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Stops generating; does nothing if already stopped. `retract` drops the KV cache of running requests, which is
        recomputed later; `in_place` keeps it."""
        if self.state in (State.PAUSED, State.DIRTY, State.ASLEEP):
            return
        self.require("pause", State.READY)
        await self.call("/pause_generation", {"mode": mode})
        self.pause_mode = mode
        self.move(State.PAUSED)

    async def resume(self) -> None:
        """Restores released memory and generates again."""
        self.require("resume", State.PAUSED)
        if self.asleep:
            await self.wake()
        await self.call("/continue_generation", {})
        self.move(State.READY)

    async def interrupt(self) -> None:
        """Aborts all requests; each returns its tokens so far, with finish reason "abort"."""
        await self.call("/abort_request", {"abort_all": True})

    async def sleep(self, tags: tuple[Tag, ...] = ("kv_cache", "weights", "cuda_graph")) -> None:
        """Releases the memory of `tags`. CUDA graphs are copied to host memory if they can be released. Without a
        memory saver (on the CPU) nothing is freed."""
        await self.pause()
        self.require("sleep", State.PAUSED)
        await self.call("/release_memory_occupation", {"tags": list(tags)})
        self.asleep |= set(tags)
        self.move(State.ASLEEP)

    async def hold_weights(self) -> None:
        """Restores the memory of the weights, without their values, for the next publication. A paused or DIRTY engine
        has it already."""
        if self.state is State.READY:  # it started after the last publication
            await self.sleep()
        if self.state is State.ASLEEP:
            await self.wake(("weights",))

    async def wake(self, tags: tuple[Tag, ...] | None = None) -> None:
        """Restores memory of all tags or of `tags`. After the weights' memory returns, the engine is DIRTY until a
        publication is verified."""
        asleep = set(self.asleep) if tags is None else self.asleep & set(tags)
        if not asleep:
            raise SlimxError(
                f"engine {self.spec.name}: none of {tags or 'its memory'} is released "
                f"(released: {sorted(self.asleep) or 'none'})",
            )
        await self.call("/resume_memory_occupation", {"tags": sorted(asleep)})
        self.asleep -= asleep
        if "weights" in asleep:
            self.move(State.DIRTY)
        elif not self.asleep and self.state is State.ASLEEP:
            self.move(State.PAUSED)

    # Publication (the verbs of slimx.reshard.parties.Receiver) --------------------------------------------------------

    async def inventory(self, encoding: Encoding = "hf") -> list[dict[str, str]]:
        """Returns names and forms of all tensors that a publication must include: one dict per rank for "local", else
        one for all."""
        return forms_of(self.spec.name, await self.ask("inventory", encoding=encoding), encoding)

    async def begin(self, manifest: Manifest, staging: Staging = "model") -> None:
        """Opens a publication; refused while another of the same membership epoch is open. Nothing changes yet.

        `staging`: "model" for one load after all buckets are staged, "bucket" for a load after each bucket.
        """
        self.require("begin", State.READY, State.PAUSED, State.DIRTY)
        await self.ask("begin", manifest=manifest.to_json(), staging=staging)
        self.publication = manifest
        self.staging = staging

    async def transport(self, method: str, *arguments: object) -> object:
        """Calls a method of the transport's local end."""
        return await getattr(self.end, method)(*arguments)

    async def receive(self, packed: PackedBucket, bucket: int) -> None:
        """Receives a bucket into memory that the server can open, and stages it."""
        if self.end is None:
            raise TypeError("the transport has no end at the engine")
        async with self.end.landed(packed) as landed:
            await self.stage(landed, bucket)

    async def stage(self, packed: PackedBucket, bucket: int) -> None:
        """Has each rank map its part of a bucket and verify its bytes. Allowed while serving: the model is not touched.
        An error (a wrong byte, an unknown tensor) ends the publication."""
        self.require("stage", State.READY, State.PAUSED, State.DIRTY)
        async with self._ending_on_error():
            manifest = self._open("stage")
            await self.ask(
                "stage",
                policy=manifest.policy,
                version=manifest.version,
                epoch=manifest.membership_epoch,
                bucket=bucket,
                ranks=packed.parts(manifest.encoding, self.spec.sizes.world),
            )

    async def abort(self) -> None:
        """Aborts the publication. Before the first copy nothing has changed; a DIRTY engine stays DIRTY."""
        self.publication = None
        await self.ask("abort")

    async def load(self) -> None:
        """Copies all staged tensors in place. DIRTY from before the first copy; an error ends the publication."""
        self.require("load", State.PAUSED, State.DIRTY)
        manifest = self._open("load")
        if self.staging == "model":
            check_staged(self.spec.name, await self.ask("status"))
        self.move(State.DIRTY)
        self.versions.pop(manifest.policy, None)
        async with self._ending_on_error():
            if not self.updating:
                await self._open_update()
                self.updating = True
            update = {
                "serialized_named_tensors": [NO_TENSORS] * self.spec.sizes.tensor,
                "load_format": RECEIVER,
                "flush_cache": False,
                "selector": "target",
            }
            await self.call("/update_weights_from_tensor", update)
            check_copied(self.spec.name, await self.ask("status"))

    async def _open_update(self) -> None:
        """Opens SGLang's weight update, which unpacks weights into the layout of loaders; closing it packs them
        again."""
        body = {"selector": "all" if self.spec.draft else "target"}
        try:
            await self.call("/begin_weight_update", body)
        except SlimxError as error:
            if error.code != "http.refused":
                raise
            # A publisher that died left its update open: close that one first.
            await self.call("/end_weight_update", {})
            await self.call("/begin_weight_update", body)

    async def verify(self) -> Json:
        """Verifies that every rank holds the complete publication. DIRTY becomes PAUSED.

        Returns {checked: number of tensors, derived: [names of tensors computed by the model from them]} over all
        ranks.
        """
        self.require("verify", State.READY, State.PAUSED, State.DIRTY)
        if self.updating:
            await self.call("/end_weight_update", {})
            self.updating = False
        verified = verified_by(self.spec.name, await self.ask("verify"))
        if self.state is State.DIRTY:
            self.move(State.PAUSED)
        return verified

    async def commit(self, version: int) -> None:
        """Closes the publication, drops KV caches of older weights and stamps the verified weights. `resume` follows.

        If paused `in_place`, running requests keep their KV cache (and SGLang would refuse to flush): the caller chose
        to mix versions.
        """
        self.require("commit", State.PAUSED)
        policy = self._open("commit").policy
        await self.ask("commit", version=version)
        self.publication = None
        if self.pause_mode != "in_place" and "kv_cache" not in self.asleep:
            await self.call("/flush_cache")
        versions = self.versions | {policy: version}
        await self.stamp(stamp(versions) if len(self.spec.form.policies) > 1 else str(version))
        self.versions = versions

    async def stamp(self, version: str) -> None:
        """Attaches `version`, a text of `slimx.engines.server.http_calls.stamp`, to all tokens sampled from now on.

        Running requests continue."""
        await self.call("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    def _open(self, operation: str) -> Manifest:
        if self.publication is None:
            raise SlimxError(
                f"engine {self.spec.name}: {operation} needs an open publication; begin one first",
                code="engine.not_open",
                about=operation,
            )
        return self.publication

    @contextlib.asynccontextmanager
    async def _ending_on_error(self) -> AsyncIterator[None]:
        """Aborts the publication on all ranks if one rank failed, to keep them in step."""
        try:
            yield
        except ReceiverLost:
            raise  # another call would only time out again
        except SlimxError:
            with contextlib.suppress(SlimxError):
                await self.abort()
            raise
