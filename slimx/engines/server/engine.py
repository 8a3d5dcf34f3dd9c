"""One engine: a SGLang server with a state, so that it never serves weights that were not verified.

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
from typing import Any, Literal

from slimx.data.whole import Json
from slimx.engines.server.attestation import check_copied, check_staged, forms_of, verified_by
from slimx.engines.server.server import Server
from slimx.engines.server.spec import EngineSpec
from slimx.engines.server.wire import RECEIVER, stamp
from slimx.errors import DeadlineError, SlimxError
from slimx.reshard.manifest import Encoding, Manifest
from slimx.reshard.packed import PackedBucket
from slimx.reshard.parties import BEFORE_BEGIN, ReceiverLost, Staging

PauseMode = Literal["retract", "in_place", "abort"]
Tag = Literal["weights", "kv_cache", "cuda_graph"]

NO_TENSORS = base64.b64encode(pickle.dumps([], protocol=4)).decode()
"""The body that /update_weights_from_tensor must carry although our tensors are staged: a pickled empty list."""


class State(StrEnum):
    STARTING = "STARTING"
    READY = "READY"
    PAUSED = "PAUSED"
    DIRTY = "DIRTY"
    """A copy has begun and no verification has passed since: serves only after one."""
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


class Engine(Server):
    """A server with a state: a Ray actor that the driver calls through `slimx.engines.fleet.handle`."""

    state = State.DEAD
    epoch = -1
    """Membership epoch of the publication that was begun last."""

    def reset(self, spec: EngineSpec) -> None:
        """Begin a start by `spec`, of which nothing is known yet."""
        super().reset(spec)
        self.asleep: set[Tag] = set()
        """Tags whose memory is released."""
        self.pause_mode: PauseMode = "retract"
        self.versions: dict[str, int] = {}
        """Version of the verified weights, or adapters, of each policy that was published here."""
        self.publication: Manifest | None = None
        """The publication that is open."""
        self.staging: Staging = "model"
        self.updating = False
        """True while SGLang's weight update is open: from the first load of a publication to its verification."""

    def move(self, to: State) -> None:
        """Change the state, or refuse a change that the table does not allow."""
        if to not in TRANSITIONS[self.state]:
            allowed = ", ".join(sorted(TRANSITIONS[self.state]))
            raise SlimxError(
                f"engine {self.spec.name} is {self.state} and cannot become {to}; from here it can become {allowed}",
                code="engine.transition",
                about=str(to),
            )
        self.state = to

    def require(self, what: str, *states: State) -> None:
        """Refuse `what` unless the engine is in one of `states`."""
        if self.state not in states:
            raise SlimxError(
                f"engine {self.spec.name} is {self.state}; {what} needs {' or '.join(states)}",
                code="engine.state",
                about=what,
            )

    # Life -----------------------------------------------------------------------------------------------------------

    async def start(self, deadline_s: float) -> tuple[EngineSpec, list[Json]]:
        """Start the server; its specification and the attestation of its ranks. On any failure it is stopped."""
        self.move(State.STARTING)
        try:
            await self.lasting(self.launch(deadline_s))
        except ReceiverLost:
            raise  # it was stopped, and another start may have begun
        except BaseException:
            await self.stop()
            raise
        self.move(State.READY)
        return self.spec, self.attestation

    async def stop(self, grace_s: float = 10.0) -> None:
        """End the server with its whole process tree; DEAD afterwards. May be called in any state.

        Somebody else's server is not ended, but left.
        """
        before, self.state = self.state, State.DEAD
        for task in self.under_way:
            task.cancel()
        if before is not State.DEAD:
            await self.release(paused=before is State.PAUSED)
        await self.end_processes(grace_s)

    async def check_health(self, deadline_s: float) -> None:
        """Raise SlimxError if the server has ended or, while READY, does not generate. The state stays: the owner
        counts failures.

        A paused or sleeping server cannot answer /health_generate (and would call itself unhealthy).
        """
        if self.state is State.READY:
            await self.check_generation(deadline_s)
        elif (end := await self.ended()) is not None:
            raise SlimxError(end, code="engine.ended", about=self.spec.name)

    async def serves(self) -> bool:
        """True if the server generates: it is neither paused nor asleep, nor in the middle of a publication."""
        return self.state is State.READY

    # Calls ------------------------------------------------------------------------------------------------------------

    async def perform(self, verb: str, epoch: int | None, deadline_s: float, *arguments: Any) -> Any:
        """Do a verb of `slimx.reshard.parties.Receiver`, as a step of the publication of membership `epoch`, or, with
        epoch None, any method. Refuses steps of an older publication than the newest."""
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
        """Stop generating, unless that has been done. `retract` drops the KV of running requests, which is computed
        again later; `in_place` keeps it."""
        if self.state in (State.PAUSED, State.DIRTY, State.ASLEEP):
            return
        self.require("pause", State.READY)
        await self.call("/pause_generation", {"mode": mode})
        self.pause_mode = mode
        self.move(State.PAUSED)

    async def resume(self) -> None:
        """Take back memory that is still released, and generate."""
        self.require("resume", State.PAUSED)
        if self.asleep:
            await self.wake()
        await self.call("/continue_generation", {})
        self.move(State.READY)

    async def interrupt(self) -> None:
        """End every request now; each brings what it has, with finish reason "abort"."""
        await self.call("/abort_request", {"abort_all": True})

    async def sleep(self, tags: tuple[Tag, ...] = ("kv_cache", "weights", "cuda_graph")) -> None:
        """Release the memory of `tags`; that of CUDA graphs is copied to host memory, if it can be released. Without a
        memory saver (CPU) nothing is freed."""
        await self.pause()
        self.require("sleep", State.PAUSED)
        await self.call("/release_memory_occupation", {"tags": list(tags)})
        self.asleep |= set(tags)
        self.move(State.ASLEEP)

    async def hold_weights(self) -> None:
        """Take back the memory of the weights alone, without their values, for the publication that follows. An engine
        that is paused, or DIRTY, has it."""
        if self.state is State.READY:  # it has started since the publication before
            await self.sleep()
        if self.state is State.ASLEEP:
            await self.wake(("weights",))

    async def wake(self, tags: tuple[Tag, ...] | None = None) -> None:
        """Take memory back, all or `tags`. With weights back the engine is DIRTY until a publication is verified."""
        wanted = tuple(sorted(self.asleep if tags is None else self.asleep & set(tags)))
        if not wanted:
            raise SlimxError(
                f"engine {self.spec.name}: nothing of {tags or 'it'} is asleep ({sorted(self.asleep) or 'all awake'})",
            )
        await self.call("/resume_memory_occupation", {"tags": list(wanted)})
        self.asleep -= set(wanted)
        if "weights" in wanted:
            self.move(State.DIRTY)
        elif not self.asleep and self.state is State.ASLEEP:
            self.move(State.PAUSED)

    # Publication (the verbs of slimx.reshard.parties.Receiver) --------------------------------------------------------

    async def inventory(self, encoding: Encoding = "hf") -> list[dict[str, str]]:
        """Names and forms of all that a publication must bring: one list per rank for "local", else one for all."""
        return forms_of(self.spec.name, await self.ask("inventory", encoding=encoding), encoding)

    async def begin(self, manifest: Manifest, staging: Staging = "model") -> None:
        """Open a publication; refused while another of the same membership epoch is open. Nothing changes yet.

        `staging`: "model" for one load when everything is staged, "bucket" for a load after each bucket.
        """
        self.require("begin", State.READY, State.PAUSED, State.DIRTY)
        await self.ask("begin", manifest=manifest.to_json(), staging=staging)
        self.publication, self.staging = manifest, staging

    async def transport(self, method: str, *arguments: Any) -> Any:
        """Call a method of the transport's end here."""
        return await getattr(self.end, method)(*arguments)

    async def receive(self, packed: PackedBucket, bucket: int) -> None:
        """Take a bucket into memory that the server opens, and have it staged."""
        async with self.end.landed(packed) as landed:
            await self.stage(landed, bucket)

    async def stage(self, packed: PackedBucket, bucket: int) -> None:
        """Have each rank map its part of a bucket and prove its bytes. Allowed while it serves: the model is not
        touched. An error, a wrong byte or an unknown tensor, ends the publication.
        """
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
        """Give the publication up. Before the first copy nothing has changed; a DIRTY engine stays DIRTY."""
        self.publication = None
        await self.ask("abort")

    async def load(self) -> None:
        """Copy all staged tensors in place. DIRTY from before the first copy, and an error ends the publication."""
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
        """Open SGLang's weight update, in which weights stand as loaders want them; its end packs them again."""
        body = {"selector": "all" if self.spec.draft else "target"}
        try:
            await self.call("/begin_weight_update", body)
        except SlimxError as error:
            if error.code != "http.refused":
                raise
            # A publisher that died after opening left its update open: close it, then ours must open.
            await self.call("/end_weight_update", {})
            await self.call("/begin_weight_update", body)

    async def verify(self) -> Json:
        """Prove that every rank holds all of what was copied last. DIRTY becomes PAUSED.

        Answer: {checked: tensors, derived: [names of tensors that the model computed from them]}, of all ranks.
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
        """Close the publication, forget KV of older weights and stamp the verified weights; `resume` next.

        Paused `in_place`, running requests keep their KV (and SGLang would refuse to flush): the caller chose to mix
        versions.
        """
        self.require("commit", State.PAUSED)
        policy = self._open("commit").policy
        await self.ask("commit", version=version)
        self.publication = None
        if self.pause_mode != "in_place" and "kv_cache" not in self.asleep:
            await self.call("/flush_cache")
        held = self.versions | {policy: version}
        await self.stamp(stamp(held) if len(self.spec.form.policies) > 1 else str(version))
        self.versions = held

    async def stamp(self, version: str) -> None:
        """Have tokens that are sampled from now on carry `version`, a text as `slimx.engines.server.wire.stamp` makes
        it; running requests go on."""
        await self.call("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    def _open(self, what: str) -> Manifest:
        if self.publication is None:
            raise SlimxError(
                f"engine {self.spec.name}: {what} needs an open publication; begin one first",
                code="engine.not_open",
                about=what,
            )
        return self.publication

    @contextlib.asynccontextmanager
    async def _ending_on_error(self) -> AsyncIterator[None]:
        """A rank that fails has ended the publication for itself: end it on all, so that they stay in step."""
        try:
            yield
        except ReceiverLost:
            raise  # a second call would only wait again
        except SlimxError:
            with contextlib.suppress(SlimxError):
                await self.abort()
            raise
