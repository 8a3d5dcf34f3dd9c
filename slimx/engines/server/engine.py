"""One engine: a supervised SGLang server with a state, so that it never serves weights that were not verified.

    STARTING --ready, attested--> READY <--resume/pause--> PAUSED --load--> DIRTY --verified--> PAUSED
                                                             |  ^             ^
                                                        sleep|  |wake         |wake of weights (their values are gone)
                                                             v  |             |
                                                            ASLEEP -----------+            any --ended, failed--> DEAD

No Ray in here: the actor that owns an Engine is `slimx.engines.fleet.actor.EngineActor`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from enum import StrEnum
from pathlib import Path

from slimx.engines.server.answers import Json
from slimx.engines.server.attestation import attested
from slimx.engines.server.control import EngineControl, PauseMode, Tag
from slimx.engines.server.external import ForeignProcess, close_open
from slimx.engines.server.spec import EngineSpec, server_argv, server_env
from slimx.engines.server.stamp import stamp
from slimx.errors import DeadlineError, SlimxError
from slimx.reshard.manifest import Encoding, Manifest
from slimx.reshard.packed import PackedBucket
from slimx.reshard.parties import Staging
from slimx.runtime.logs import how_ended, quoted
from slimx.runtime.process import ServerProcess, SupervisedProcess


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
    """A server process, its control client and its state. One owner calls it, one call at a time."""

    def __init__(self, spec: EngineSpec, log_path: Path | str) -> None:
        self.spec = spec
        self.process: ServerProcess = (
            ForeignProcess(spec.url)
            if spec.external
            else SupervisedProcess(
                f"engine {spec.name}", server_argv(spec), log_path, server_env(spec), spec.keys.to_bytes()
            )
        )
        self.control = EngineControl(spec.url, spec.name, spec.keys)
        self.state = State.DEAD
        self.asleep: set[Tag] = set()
        """Tags whose memory is released."""
        self.attestation: list[Json] = []
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

    def start(self) -> None:
        """Start the server process; `wait_ready` next."""
        self.move(State.STARTING)
        self.asleep.clear()
        self.versions, self.publication = {}, None
        self.updating = False
        self.process.start()

    async def wait_ready(self, deadline_s: float) -> None:
        """Wait until the server generates and attests the plugin. On any failure it is stopped and DEAD.

        A frozen model of somebody else's server need not attest anything: nothing is published to it.
        """
        self.require("wait_ready", State.STARTING)
        try:
            if self.spec.external and not self.spec.frozen:
                await close_open(self.control, paused=True)
            await self.control.wait_ready(deadline_s, self.process)
            if not (self.spec.external and self.spec.frozen):
                self.attestation = await attested(self.control, self.spec, self.process)
            if not self.spec.external:
                await self.control.freeze_gc()
        except BaseException:
            await self.stop()
            raise
        self.move(State.READY)

    async def stop(self, grace_s: float = 10.0) -> None:
        """End the server with its whole process tree; DEAD afterwards. May be called in any state.

        Somebody else's server is not ended, but left.
        """
        before, self.state = self.state, State.DEAD
        if self.spec.external and not self.spec.frozen and before is not State.DEAD:
            await close_open(self.control, paused=before is State.PAUSED)
        await asyncio.to_thread(self.process.stop, grace_s)

    async def check_health(self, deadline_s: float) -> None:
        """Raise if the process ended or, while READY, does not generate. The state stays: the owner counts failures.

        A paused or sleeping server cannot answer /health_generate (and would call itself unhealthy), so only its
        process is looked at.
        """
        if (status := self.process.poll()) is not None:
            raise SlimxError(
                f"engine {self.spec.name} {how_ended(status)}; {quoted(self.process.log_path, self.process.tail())}",
                code="engine.ended",
                about=self.spec.name,
            )
        if self.state is State.READY:
            await self.control.health(deadline_s)

    async def trace(self, on: bool) -> dict[str, list[str]]:
        """Begin or end noting what goes through the model (`EngineControl.trace`)."""
        self.require("trace", State.READY)
        return await self.control.trace(on)

    # Generation -----------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Stop generating, unless that has been done."""
        if self.state in (State.PAUSED, State.DIRTY, State.ASLEEP):
            return
        self.require("pause", State.READY)
        await self.control.pause(mode)
        self.pause_mode = mode
        self.move(State.PAUSED)

    async def resume(self) -> None:
        """Take back memory that is still released, and generate."""
        self.require("resume", State.PAUSED)
        if self.asleep:
            await self.wake()
        await self.control.resume()
        self.move(State.READY)

    async def interrupt(self) -> None:
        """End every request now; each brings what it has, with finish reason "abort"."""
        await self.control.abort_all()

    async def sleep(self, tags: tuple[Tag, ...] = ("kv_cache", "weights", "cuda_graph")) -> None:
        """Release the memory of `tags`; that of CUDA graphs is copied to host memory, if it can be released."""
        self.require("sleep", State.PAUSED)
        await self.control.sleep(tags)
        self.asleep |= set(tags)
        self.move(State.ASLEEP)

    async def wake(self, tags: tuple[Tag, ...] | None = None) -> None:
        """Take memory back, all or `tags`. With weights back the engine is DIRTY until a publication is verified."""
        wanted = tuple(sorted(self.asleep if tags is None else self.asleep & set(tags)))
        if not wanted:
            raise SlimxError(
                f"engine {self.spec.name}: nothing of {tags or 'it'} is asleep ({sorted(self.asleep) or 'all awake'})",
                code="engine.awake",
                about=self.spec.name,
            )
        await self.control.wake(wanted)
        self.asleep -= set(wanted)
        if "weights" in wanted:
            self.move(State.DIRTY)
        elif not self.asleep and self.state is State.ASLEEP:
            self.move(State.PAUSED)

    # Publication (the verbs of slimx.reshard.parties.Receiver) --------------------------------------------------------

    async def inventory(self, encoding: Encoding = "hf") -> list[dict[str, str]]:
        """Names and forms of all that a publication must bring: one list per rank for "local", else one for all."""
        name, ranks = self.spec.name, await self.control.ask("slimx.inventory", {"encoding": encoding})
        for number, rank in enumerate(ranks):
            if uncovered := rank["uncovered"]:
                parameter, why = next(iter(uncovered.items()))
                raise SlimxError(
                    f"engine {name} rank {number} holds {len(uncovered)} parameters that slimx cannot publish, "
                    f"first {parameter}: {why}; add a row to slimx/adapters/sglang/weights/layout.py",
                    code="engine.uncovered",
                    about=parameter,
                )
        if encoding == "local":
            return [rank["forms"] for rank in ranks]
        tensors: dict[str, str] = {}
        for number, rank in enumerate(ranks):
            for tensor, form in rank["forms"].items():
                if tensors.setdefault(tensor, form) != form:
                    raise SlimxError(
                        f"engine {name}: ranks disagree on {tensor}: {tensors[tensor]}, but {form} on rank {number}",
                        code="engine.ranks_differ",
                        about=tensor,
                    )
        return [tensors]

    async def begin(self, manifest: Manifest, staging: Staging = "model") -> None:
        """Open a publication; refused while another of the same membership epoch is open. Nothing changes yet.

        `staging`: "model" for one load when everything is staged, "bucket" for a load after each bucket.
        """
        self.require("begin", State.READY, State.PAUSED, State.DIRTY)
        await self.control.ask("slimx.begin", {"manifest": manifest.to_json(), "staging": staging})
        self.publication, self.staging = manifest, staging

    async def stage(self, packed: PackedBucket, bucket: int) -> None:
        """Have each rank map its part of a bucket and prove its bytes. Allowed while it serves: the model is not
        touched. An error, a wrong byte or an unknown tensor, ends the publication.
        """
        self.require("stage", State.READY, State.PAUSED, State.DIRTY)
        async with self._ending_on_error():
            manifest = self._open("stage")
            argument = {
                "policy": manifest.policy,
                "version": manifest.version,
                "epoch": manifest.membership_epoch,
                "bucket": bucket,
                "ranks": packed.parts(manifest.encoding, self.spec.sizes.world),
            }
            await self.control.ask("slimx.stage", argument)

    async def abort(self) -> None:
        """Give the publication up. Before the first copy nothing has changed; a DIRTY engine stays DIRTY."""
        self.publication = None
        await self.control.ask("slimx.abort")

    async def load(self) -> None:
        """Copy all staged tensors in place. DIRTY from before the first copy, and an error ends the publication."""
        self.require("load", State.PAUSED, State.DIRTY)
        manifest = self._open("load")
        if self.staging == "model":
            await self._check_staged()
        self.move(State.DIRTY)
        self.versions.pop(manifest.policy, None)
        async with self._ending_on_error():
            if not self.updating:
                await self.control.open_update(draft=self.spec.draft)
                self.updating = True
            await self.control.copy_staged(self.spec.sizes.tensor)
            for number, rank in enumerate(await self.control.status()):
                if error := rank["outcome"].get("error"):
                    raise SlimxError(
                        f"engine {self.spec.name} rank {number}: the copy ended after {rank['outcome']['loaded']} "
                        f"tensors: {error}; publish again",
                        code="engine.copy",
                        about=self.spec.name,
                    )

    async def _check_staged(self) -> None:
        """Refuse if a rank lacks a tensor of its model: the last look before the first copy."""
        for number, rank in enumerate(await self.control.status()):
            if rank["missing"]:
                raise SlimxError(
                    f"engine {self.spec.name} rank {number}: {rank['missing']} tensors of the model are not staged, "
                    f"first {rank['first_missing']}; stage every tensor before loading",
                    code="engine.not_staged",
                    about=rank["first_missing"],
                )

    async def verify(self) -> Json:
        """Prove that every rank holds all of what was copied last. DIRTY becomes PAUSED.

        Answer: {checked: tensors, derived: [names of tensors that the model computed from them]}, of all ranks.
        """
        self.require("verify", State.READY, State.PAUSED, State.DIRTY)
        if self.updating:
            await self.control.close_update()
            self.updating = False
        ranks = await self.control.ask("slimx.verify")
        counts = [rank["tensors"] for rank in ranks]
        same_for_all = ranks[0]["encoding"] != "local"
        if same_for_all and len(set(counts)) > 1:
            raise SlimxError(
                f"engine {self.spec.name}: ranks got {counts} tensors of one publication; publish again",
                code="engine.counts",
                about=self.spec.name,
            )
        for key, how in (("differ", "differ from the published ones"), ("missing", "were never published")):
            if wrong := _of_all(ranks, key):
                raise SlimxError(
                    f"engine {self.spec.name}: {len(wrong)} tensors {how}, first {wrong[0]}; "
                    "publish again or restart the engine",
                    code="engine.unverified",
                    about=wrong[0],
                )
        if self.state is State.DIRTY:
            self.move(State.PAUSED)
        return {"checked": counts[0] if same_for_all else sum(counts), "derived": _of_all(ranks, "derived")}

    async def commit(self, version: int) -> None:
        """Close the publication, forget KV of older weights and stamp the verified weights; `resume` next.

        Paused `in_place`, running requests keep their KV (and SGLang would refuse to flush): the caller chose to mix
        versions.
        """
        self.require("commit", State.PAUSED)
        policy = self._open("commit").policy
        await self.control.ask("slimx.commit", {"version": version})
        self.publication = None
        if self.pause_mode != "in_place" and "kv_cache" not in self.asleep:
            await self.control.flush_cache()
        held = self.versions | {policy: version}
        several = self.spec.adapters is not None and len(self.spec.adapters.alphas) > 1
        await self.control.set_version(stamp(held) if several else version)
        self.versions = held

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
        except DeadlineError:
            raise  # the engine is silent: a second call would only wait again
        except SlimxError:
            with contextlib.suppress(SlimxError):
                await self.abort()
            raise


def _of_all(ranks: list[Json], key: str) -> list[str]:
    """The names that ranks list under `key`, each once."""
    return sorted({name for rank in ranks for name in rank[key]})
