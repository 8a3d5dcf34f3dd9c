"""One engine: an SGLang server with a state machine that prevents it from serving unverified weights.

STARTING --ready, attested--> READY <--resume/pause--> PAUSED --load--> DIRTY --verified--> PAUSED
                                                         |  ^             ^
                                                    sleep|  |wake         |wake of weights (their values are lost)
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
"""Request body for SGLang's /update_weights_from_tensor, which requires a list of tensors; the list is empty, because
the tensors are already staged."""


class State(StrEnum):
    STARTING = "STARTING"
    READY = "READY"
    PAUSED = "PAUSED"
    DIRTY = "DIRTY"
    """Copying into the model has begun, and the weights have not been verified since; the engine must not serve until
    they have been."""
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
    """A server with a state machine, in a Ray actor that the driver calls through `slimx.engines.fleet.handle`."""

    state = State.DEAD
    epoch = -1
    """Membership epoch of the publication that most recently began at this engine; -1 before the first."""

    def reset(self, spec: EngineSpec) -> None:
        """Clears the state that belongs to one start of the server; the next start uses `spec`."""
        super().reset(spec)
        self.asleep: set[Tag] = set()
        """Parts of the server's memory that are released (SGLang's tags)."""
        self.pause_mode: PauseMode = "retract"
        self.versions: dict[str, int] = {}
        """Policy -> version of its verified weights or adapters."""
        self.publication: Manifest | None = None
        """The publication that has begun and has not yet been committed or aborted; None if there is none."""
        self.staging: Staging = "model"
        self.updating = False
        """True while SGLang's weight update is open: from the first load of a publication until its verification."""

    def move(self, to: State) -> None:
        """Changes the state to `to`. Raises SlimxError if `TRANSITIONS` does not contain this transition."""
        if to not in TRANSITIONS[self.state]:
            raise SlimxError(
                f"engine {self.spec.name} is {self.state} and cannot become {to}; choose one of the states "
                f"{', '.join(sorted(TRANSITIONS[self.state]))}",
                code="engine.transition",
                about=str(to),
            )
        self.state = to

    def require(self, operation: str, *states: State) -> None:
        """Raises SlimxError, naming `operation`, unless the engine is in one of `states`."""
        if self.state not in states:
            raise SlimxError(
                f"engine {self.spec.name} is {self.state}, but {operation} requires the state {' or '.join(states)}; "
                "first bring the engine into that state",
                code="engine.state",
                about=operation,
            )

    # Life -----------------------------------------------------------------------------------------------------------

    async def start(self, deadline_s: float) -> tuple[EngineSpec, list[Json]]:
        """Starts the server within `deadline_s` seconds; returns its specification, with address, and each rank's
        attestation.

        If the start fails, the server is stopped."""
        self.move(State.STARTING)
        try:
            await self.while_running(self.launch(deadline_s))
        except ReceiverLost:
            raise  # the server was stopped meanwhile, and the next start may have begun already
        except BaseException:
            await self.stop()
            raise
        self.move(State.READY)
        return self.spec, self.attestation

    async def stop(self, grace_s: float = 10.0) -> None:
        """Stops the server with its process tree and sets the state to DEAD. Allowed in any state. An external server
        keeps running."""
        before = self.state
        self.state = State.DEAD
        for task in self.pending:
            task.cancel()
        if before is not State.DEAD:
            await self.release(paused=before is State.PAUSED)
        await self.end_processes(grace_s)

    async def check_health(self, deadline_s: float) -> None:
        """Raises SlimxError if the server has ended, or if it is READY but does not generate within `deadline_s`
        seconds.

        A paused or sleeping server cannot respond to /health_generate (and would report itself unhealthy), so only its
        process is checked. The state does not change, because the caller counts failures."""
        if self.state is State.READY:
            await self.check_generation(deadline_s)
            return
        end = await self.ended()
        if end is not None:
            raise SlimxError(end, code="engine.ended", about=self.spec.name)

    async def serves(self) -> bool:
        """Returns True if the server can generate: it is neither paused nor asleep nor loading weights."""
        return self.state is State.READY

    # Calls ------------------------------------------------------------------------------------------------------------

    async def perform(self, verb: str, epoch: int | None, deadline_s: float, *arguments: object) -> object:
        """Calls the engine's method `verb` within `deadline_s` seconds and returns its result.

        `epoch`: membership epoch of the publication to which the call belongs; None for calls outside of publications.
        Raises SlimxError if the engine takes part in another publication."""
        if epoch is not None:
            self._enter(verb, epoch)
        try:
            async with asyncio.timeout(deadline_s):
                return await self.while_running(getattr(self, verb)(*arguments))
        except TimeoutError:
            raise DeadlineError(verb, deadline_s, f"engine {self.spec.name}") from None

    def _enter(self, verb: str, epoch: int) -> None:
        if epoch < self.epoch or (epoch > self.epoch and verb not in BEFORE_BEGIN):
            raise SlimxError(
                f"engine {self.spec.name}: the call `{verb}` belongs to epoch {epoch}, but the current publication "
                f"has epoch {self.epoch}; publish the weights again",
                code="engine.late",
                about=verb,
            )
        if verb == "begin":
            self.epoch = epoch

    # Generation -----------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Pauses generation, unless it is paused already.

        `mode`: "retract" drops the KV cache of running requests, which is computed again later; "in_place" keeps it;
        "abort" ends the requests."""
        if self.state in (State.PAUSED, State.DIRTY, State.ASLEEP):
            return
        self.require("pause", State.READY)
        await self.call("/pause_generation", {"mode": mode})
        self.pause_mode = mode
        self.move(State.PAUSED)

    async def resume(self) -> None:
        """Reallocates the released memory, and resumes generation."""
        self.require("resume", State.PAUSED)
        if self.asleep:
            await self.wake()
        await self.call("/continue_generation", {})
        self.move(State.READY)

    async def interrupt(self) -> None:
        """Aborts all requests; each returns the tokens generated so far, with finish reason "abort"."""
        await self.call("/abort_request", {"abort_all": True})

    async def sleep(self, tags: tuple[Tag, ...] = ("kv_cache", "weights", "cuda_graph")) -> None:
        """Pauses generation and releases the memory of the parts in `tags`.

        CUDA graphs are copied to host memory if SGLang can release them. Without SGLang's memory saver (on the CPU) no
        memory is freed."""
        await self.pause()
        self.require("sleep", State.PAUSED)
        await self.call("/release_memory_occupation", {"tags": list(tags)})
        self.asleep |= set(tags)
        self.move(State.ASLEEP)

    async def hold_weights(self) -> None:
        """Allocates the memory of the weights, without values, for the next publication; the engine's other memory
        remains released. Does nothing if the engine is PAUSED or DIRTY, because that memory is then already
        allocated."""
        if self.state is State.READY:  # the server was started after the last publication
            await self.sleep()
        if self.state is State.ASLEEP:
            await self.wake(("weights",))

    async def wake(self, tags: tuple[Tag, ...] | None = None) -> None:
        """Reallocates the released memory of the parts in `tags`, or of all released parts if `tags` is None. If the
        weights are among these parts, the engine becomes DIRTY, because the weights' values are lost. Raises SlimxError
        if none of the parts is released."""
        asleep = set(self.asleep) if tags is None else self.asleep & set(tags)
        if not asleep:
            raise SlimxError(
                f"engine {self.spec.name} has released {sorted(self.asleep) or 'no memory'}, so it cannot restore "
                f"{tags or 'memory'}; call `sleep` first",
            )
        await self.call("/resume_memory_occupation", {"tags": sorted(asleep)})
        self.asleep -= asleep
        if "weights" in asleep:
            self.move(State.DIRTY)
        elif not self.asleep and self.state is State.ASLEEP:
            self.move(State.PAUSED)

    # Publication (methods of slimx.reshard.parties.Receiver) ----------------------------------------------------------

    async def inventory(self, encoding: Encoding = "hf") -> list[dict[str, str]]:
        """Returns the tensors that a publication must contain, each as name -> "dtype:d0,d1". The list has one dict per
        rank for the encoding "local", and otherwise a single dict for all ranks."""
        return forms_of(self.spec.name, await self.request_ranks("inventory", encoding=encoding), encoding)

    async def begin(self, manifest: Manifest, staging: Staging = "model") -> None:
        """Begins a publication, without changing the model. Raises SlimxError if another publication of the same
        membership epoch has begun.

        `staging`: "model" if `load` is called once, after all buckets are staged; "bucket" if it is called after each
        bucket."""
        self.require("begin", State.READY, State.PAUSED, State.DIRTY)
        await self.request_ranks("begin", manifest=manifest.to_json(), staging=staging)
        self.publication = manifest
        self.staging = staging

    async def transport(self, method: str, *arguments: object) -> object:
        """Calls `method` of the transport's receiver at this engine and returns the result."""
        return await getattr(self.end, method)(*arguments)

    async def receive(self, packed: PackedBucket, bucket: int) -> None:
        """Assembles a bucket in memory that the server can open, and stages it."""
        if self.end is None:
            raise TypeError("the transport has no receiver at the engine, so its buckets can only be staged")
        async with self.end.landed(packed) as landed:
            await self.stage(landed, bucket)

    async def stage(self, packed: PackedBucket, bucket: int) -> None:
        """Makes each rank map its part of a bucket and verify the checksums of its tensors.

        Allowed while the engine serves, because the model does not change. An error, such as a wrong checksum or an
        unknown tensor, ends the publication."""
        self.require("stage", State.READY, State.PAUSED, State.DIRTY)
        async with self._ending_on_error():
            manifest = self._open("stage")
            await self.request_ranks(
                "stage",
                policy=manifest.policy,
                version=manifest.version,
                epoch=manifest.membership_epoch,
                bucket=bucket,
                ranks=packed.parts(manifest.encoding, self.spec.sizes.world),
            )

    async def abort(self) -> None:
        """Aborts the publication. An engine that has not begun to copy into the model is unchanged; otherwise it
        remains DIRTY."""
        self.publication = None
        await self.request_ranks("abort")

    async def load(self) -> None:
        """Copies all staged tensors into the model. The engine becomes DIRTY before the first copy; an error ends the
        publication."""
        self.require("load", State.PAUSED, State.DIRTY)
        manifest = self._open("load")
        if self.staging == "model":
            check_staged(self.spec.name, await self.request_ranks("status"))
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
            check_copied(self.spec.name, await self.request_ranks("status"))

    async def _open_update(self) -> None:
        """Opens SGLang's weight update, which converts the model's weights to the layout that model loaders expect.
        When the update is closed, SGLang converts the weights back."""
        body = {"selector": "all" if self.spec.draft else "target"}
        try:
            await self.call("/begin_weight_update", body)
        except SlimxError as error:
            if error.code != "http.refused":
                raise
            # A publisher that died may have left its update open, so that update is closed first.
            await self.call("/end_weight_update", {})
            await self.call("/begin_weight_update", body)

    async def verify(self) -> Json:
        """Verifies that every rank has all weights of the publication; a DIRTY engine becomes PAUSED.

        Returns {checked: number of verified tensors, derived: [names of tensors that the model computed from verified
        ones]} over all ranks."""
        self.require("verify", State.READY, State.PAUSED, State.DIRTY)
        if self.updating:
            await self.call("/end_weight_update", {})
            self.updating = False
        verified = verified_by(self.spec.name, await self.request_ranks("verify"))
        if self.state is State.DIRTY:
            self.move(State.PAUSED)
        return verified

    async def commit(self, version: int) -> None:
        """Ends the publication: empties the KV cache, whose values were computed with older weights, and labels new
        tokens with `version`.

        The engine stays paused until `resume`. If it was paused "in_place", the cache is kept, because SGLang refuses
        to empty it while requests are running; those requests then mix versions."""
        self.require("commit", State.PAUSED)
        policy = self._open("commit").policy
        await self.request_ranks("commit", version=version)
        self.publication = None
        if self.pause_mode != "in_place" and "kv_cache" not in self.asleep:
            await self.call("/flush_cache")
        versions = self.versions | {policy: version}
        await self.stamp(stamp(versions) if len(self.spec.form.policies) > 1 else str(version))
        self.versions = versions

    async def stamp(self, version: str) -> None:
        """Makes SGLang attach the string `version`, in the format of `slimx.engines.server.http_calls.stamp`, to all
        tokens sampled from now on. Running requests continue."""
        await self.call("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    def _open(self, operation: str) -> Manifest:
        if self.publication is None:
            raise SlimxError(
                f"engine {self.spec.name}: no publication is open, but `{operation}` requires one; call `begin` first",
                code="engine.not_open",
                about=operation,
            )
        return self.publication

    @contextlib.asynccontextmanager
    async def _ending_on_error(self) -> AsyncIterator[None]:
        """Aborts the publication on all ranks if the block raises an error, because the error may have occurred on only
        some of them."""
        try:
            yield
        except ReceiverLost:
            raise  # the server does not respond, so a call to abort would time out as well
        except SlimxError:
            with contextlib.suppress(SlimxError):
                await self.abort()
            raise
