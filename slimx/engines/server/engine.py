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
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from slimx.cluster.place import Placement
from slimx.engines.server.nodes import DirectEnd, FilesEnd, Nodes
from slimx.engines.server.ranks import check_copied, check_staged, forms_of, verified_by
from slimx.engines.server.server import ENDING_S, PortTaken, Server
from slimx.engines.server.spec import EngineSpec
from slimx.engines.server.wire import RECEIVER, Json, stamp
from slimx.errors import DeadlineError, SlimxError
from slimx.reshard.manifest import Encoding, Manifest
from slimx.reshard.packed import PackedBucket
from slimx.reshard.parties import BEFORE_BEGIN, ReceiverLost, Staging
from slimx.runtime.logs import marked
from slimx.runtime.ports import LOOPBACK, claimed_port, own_address

PauseMode = Literal["retract", "in_place", "abort"]
Tag = Literal["weights", "kv_cache", "cuda_graph"]

PORTS = 3
"""Ports that a start tries when other programs take them."""
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


class Engine:
    """One server through all its starts, in a process on the server's own (first) machine, so that it can start, watch
    and end it: a Ray actor that the driver calls through `slimx.engines.fleet.handle`."""

    def __init__(
        self,
        spec: EngineSpec,
        log_path: Path,
        deadline_s: float = 60.0,
        *,
        network: str | None = LOOPBACK,
        places: Sequence[Placement] = (),
        end: DirectEnd | FilesEnd | None = None,
    ) -> None:
        """`spec`: without what differs between starts. `deadline_s`: seconds for one call to the server. `network`: in
        which it takes its address (`slimx.runtime.ports.own_address`). `places`: of a server on several machines, all
        but the first. `end`: at which buckets arrive; None: the server opens them where they are."""
        self.planned, self.log_path, self.deadline_s = spec, log_path, deadline_s
        self.network, self.host, self.places, self.end = network, own_address(network), places, end
        self.state = State.DEAD
        self.server: Server | None = None
        """The last start."""
        self.epoch = -1
        """Membership epoch of the publication that was begun last."""
        self._claims: list[socket.socket] = []
        """Claims on the ports of the present server; those of the one before are given back."""
        self._begin_afresh()

    def _begin_afresh(self) -> None:
        """Know nothing of what a server holds."""
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

    @property
    def spec(self) -> EngineSpec:
        """The specification of the last start."""
        return self.planned if self.server is None else self.server.spec

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

    async def start(self, deadline_s: float) -> dict[str, Any]:
        """Start a server and wait until it attests the plugin; its URL and attestation. On any failure it is stopped.

        Each start takes a port of its own: what was sent to an earlier server cannot reach the new one. Another program
        may take that port while the server imports its modules: up to `PORTS` are tried.
        """
        for left in reversed(range(PORTS)):
            try:
                await self._start(deadline_s)
                break
            except PortTaken:
                await self.stop(ENDING_S)
                if not left:
                    raise
            except BaseException:
                await self.stop()
                raise
        spec = self.spec
        return {"url": spec.url, "bootstrap_port": spec.bootstrap_port, "attestation": self.server.attestation}

    async def _start(self, deadline_s: float) -> None:
        self.move(State.STARTING)
        self._begin_afresh()
        nodes = None
        if self.places:
            nodes = Nodes(self.planned, self.log_path, self.network, self.places, self.end, self.deadline_s)
        self.server = Server(self._placed(), self.log_path, self.deadline_s, nodes)
        await self.server.start(deadline_s)
        if self.end is not None:
            await self.end.prepare()
        await self.server.wait_ready(deadline_s)
        self.move(State.READY)

    def _placed(self) -> EngineSpec:
        """The specification of the next server, with ports of its own."""
        if self.planned.external:
            return self.planned
        prefill = self.planned.role == "prefill"
        before, claimed = self._claims, [claimed_port(self.host) for _ in range(1 + prefill)]
        self._claims = [claim for _, claim in claimed]
        for claim in before:
            claim.close()
        (port, *others) = (port for port, _ in claimed)
        return replace(self.planned, port=port, host=self.host, bootstrap_port=others[0] if prefill else None)

    async def stop(self, grace_s: float = 10.0) -> None:
        """End the server with its whole process tree; DEAD afterwards. May be called in any state.

        Somebody else's server is not ended, but left.
        """
        before, self.state = self.state, State.DEAD
        if self.server is None:
            return
        if before is not State.DEAD:
            await self.server.release(paused=before is State.PAUSED)
        await self.server.stop(grace_s)

    def mark(self, text: str) -> None:
        """Write into the server's log what the lines that follow belong to."""
        with self.log_path.open("a") as log:
            print(marked(f"engine {self.spec.name}, {text}"), file=log)

    async def ended(self) -> str | None:
        """The end of the server in words; None while it runs."""
        return await self.server.ended()

    async def check_health(self, deadline_s: float) -> None:
        """Raise SlimxError if the server has ended or, while READY, does not generate. The state stays: the owner
        counts failures.

        A paused or sleeping server cannot answer /health_generate (and would call itself unhealthy).
        """
        if self.state is State.READY:
            await self.server.check_generation(deadline_s)
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
                return await getattr(self, verb)(*arguments)
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
        await self.server.call("/pause_generation", {"mode": mode})
        self.pause_mode = mode
        self.move(State.PAUSED)

    async def resume(self) -> None:
        """Take back memory that is still released, and generate."""
        self.require("resume", State.PAUSED)
        if self.asleep:
            await self.wake()
        await self.server.call("/continue_generation", {})
        self.move(State.READY)

    async def interrupt(self) -> None:
        """End every request now; each brings what it has, with finish reason "abort"."""
        await self.server.call("/abort_request", {"abort_all": True})

    async def sleep(self, tags: tuple[Tag, ...] = ("kv_cache", "weights", "cuda_graph")) -> None:
        """Release the memory of `tags`; that of CUDA graphs is copied to host memory, if it can be released. Without a
        memory saver (CPU) nothing is freed."""
        await self.pause()
        self.require("sleep", State.PAUSED)
        await self.server.call("/release_memory_occupation", {"tags": list(tags)})
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
                code="engine.awake",
                about=self.spec.name,
            )
        await self.server.call("/resume_memory_occupation", {"tags": list(wanted)})
        self.asleep -= set(wanted)
        if "weights" in wanted:
            self.move(State.DIRTY)
        elif not self.asleep and self.state is State.ASLEEP:
            self.move(State.PAUSED)

    async def trace(self, on: bool) -> dict[str, list[str]]:
        """Begin (`on`) or end noting digests of the residual stream; at the end the first rank's, by point."""
        self.require("trace", State.READY)
        return (await self.server.ask("trace", on=on))[0]

    # Publication (the verbs of slimx.reshard.parties.Receiver) --------------------------------------------------------

    async def inventory(self, encoding: Encoding = "hf") -> list[dict[str, str]]:
        """Names and forms of all that a publication must bring: one list per rank for "local", else one for all."""
        return forms_of(self.spec.name, await self.server.ask("inventory", encoding=encoding), encoding)

    async def begin(self, manifest: Manifest, staging: Staging = "model") -> None:
        """Open a publication; refused while another of the same membership epoch is open. Nothing changes yet.

        `staging`: "model" for one load when everything is staged, "bucket" for a load after each bucket.
        """
        self.require("begin", State.READY, State.PAUSED, State.DIRTY)
        await self.server.ask("begin", manifest=manifest.to_json(), staging=staging)
        self.publication, self.staging = manifest, staging

    async def join(self, invitations: Sequence[Any]) -> list[Any]:
        """Offer memory to the trainer ranks, as each `Invitation` of slimx.reshard.direct.receiver asks."""
        return await self._ends.join(invitations, self.host)

    async def bases(self) -> list[list[int]]:
        """By receiver and bucket the transfer whose bytes are held beside the server."""
        return await self._ends.bases()

    async def receive(self, packed: PackedBucket, bucket: int) -> None:
        """Take a bucket into memory that the server opens, and have it staged."""
        async with self._ends.landed(packed) as landed:
            await self.stage(landed, bucket)

    @property
    def _ends(self) -> Any:
        """The end at which buckets arrive, or those of all machines."""
        return self.end if self.server.nodes is None else self.server.nodes

    async def stage(self, packed: PackedBucket, bucket: int) -> None:
        """Have each rank map its part of a bucket and prove its bytes. Allowed while it serves: the model is not
        touched. An error, a wrong byte or an unknown tensor, ends the publication.
        """
        self.require("stage", State.READY, State.PAUSED, State.DIRTY)
        async with self._ending_on_error():
            manifest = self._open("stage")
            await self.server.ask(
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
        await self.server.ask("abort")

    async def load(self) -> None:
        """Copy all staged tensors in place. DIRTY from before the first copy, and an error ends the publication."""
        self.require("load", State.PAUSED, State.DIRTY)
        manifest = self._open("load")
        if self.staging == "model":
            check_staged(self.spec.name, await self.server.ask("status"))
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
            await self.server.call("/update_weights_from_tensor", update)
            check_copied(self.spec.name, await self.server.ask("status"))

    async def _open_update(self) -> None:
        """Open SGLang's weight update, in which weights stand as loaders want them; its end packs them again."""
        body = {"selector": "all" if self.spec.draft else "target"}
        try:
            await self.server.call("/begin_weight_update", body)
        except ReceiverLost:
            raise
        except SlimxError:
            # A publisher that died after opening left its update open: close it, then ours must open.
            await self.server.call("/end_weight_update", {})
            await self.server.call("/begin_weight_update", body)

    async def verify(self) -> Json:
        """Prove that every rank holds all of what was copied last. DIRTY becomes PAUSED.

        Answer: {checked: tensors, derived: [names of tensors that the model computed from them]}, of all ranks.
        """
        self.require("verify", State.READY, State.PAUSED, State.DIRTY)
        if self.updating:
            await self.server.call("/end_weight_update", {})
            self.updating = False
        verified = verified_by(self.spec.name, await self.server.ask("verify"))
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
        await self.server.ask("commit", version=version)
        self.publication = None
        if self.pause_mode != "in_place" and "kv_cache" not in self.asleep:
            await self.server.call("/flush_cache")
        held = self.versions | {policy: version}
        several = self.spec.adapters is not None and len(self.spec.adapters.alphas) > 1
        await self.stamp(stamp(held) if several else str(version))
        self.versions = held

    async def stamp(self, version: str) -> None:
        """Have tokens that are sampled from now on carry `version`, a text as `slimx.engines.server.wire.stamp` makes
        it; running requests go on."""
        await self.server.call("/update_weight_version", {"new_version": version, "abort_all_requests": False})

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
