"""Publications of a run: they send the trainers' weights to the engines, including engines that were lost and
restarted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import cast

from slimx.config.schema import Config
from slimx.engines.fleet.group import EngineGroup
from slimx.engines.fleet.membership import Joining, Membership
from slimx.engines.transport import transport_of
from slimx.errors import SlimxError, first_line
from slimx.orchestration.engines.shared import SharedEngines, SharedMembers
from slimx.orchestration.ranks.trainers import TrainerGroup
from slimx.reshard.manifest import Encoding, Manifest, Publication
from slimx.reshard.packed import PackedBucket
from slimx.reshard.parties import Delivery, Members, NoReceiverLeft, Source, TransportLost
from slimx.reshard.publish import Publisher
from slimx.rollout.flow.rollouts import GroupMaker
from slimx.runtime.tasks import in_thread, while_served

type Deliver = Callable[[int], Awaitable[Publication]]
"""Function that publishes the weights of a step, and retries until at least one engine has received the weights."""
type WithRetry = Callable[[Callable[[], Awaitable[Publication]]], Awaitable[Publication]]
"""Function that calls a coroutine function whose work needs trainer ranks, and returns the result. If ranks are lost
and replaced in the meantime, it calls the coroutine function again."""


async def _once(work: Callable[[], Awaitable[Publication]]) -> Publication:
    return await work()


class Publications:
    """Publications of a policy's weights. This base class is used without engines and publishes nothing."""

    with_retry: WithRetry = staticmethod(_once)
    """Function that calls a coroutine function whose work needs trainer ranks. The default calls it once;
    `RankLossHandler.with_retry`, which may be set instead, calls it again if ranks were lost and replaced in the
    meantime."""

    def renew(self) -> None:
        """Prepares to publish from new trainer ranks that have replaced lost ones."""

    async def publish(self, step: int) -> Publication | None:
        """Publishes the weights after `step` steps as version `step`. Returns None without engines."""
        return None

    async def publish_metrics(self, step: int) -> dict[str, float]:
        """Publishes the weights after `step` steps; returns metrics of the publication and of the engines."""
        return {}

    async def watched[T](self, work: Awaitable[T], step: int, *, training: bool = False) -> T:
        """Awaits `work` and returns its result. Raises SlimxError if all engines of the run are lost in the meantime.
        `step`: number of completed steps. `training`: True if `work` changes the trainers' weights."""
        return await work

    async def sleep(self) -> None:
        """Releases the device memory of colocated engines."""

    async def wake(self) -> None:
        """Allocates device memory for the weights of colocated engines again. The memory's contents are undefined until
        the next publication, which must follow."""


class EnginePublications(Publications):
    """Publications that send the weights of one policy's trainers to the policy's engines."""

    def __init__(
        self,
        policy: str,
        config: Config,
        engines: EngineGroup,
        maker: GroupMaker,
        trainers: TrainerGroup,
        encoding: Encoding,
        note: Callable[[str], None],
        shared: SharedEngines | None = None,
    ):
        """Connects trainers and engines. `config`: configuration of the policy. `maker`: group maker that is notified
        of each published version. `encoding`: encoding in which engines receive the weights. `note`: function that is
        called with a message about each failure that a publication survives. `shared`: if set, the engines also serve
        the adapters of other policies."""
        self.policy = policy
        self.config = config
        self.engines = engines
        self.trainers = trainers
        self._maker = maker
        self._encoding = encoding
        self._note = note
        transport = transport_of(config.publish)
        source, self.delivery = transport.connect(config, trainers, engines, WeightSource(trainers, "publish"))
        self._shared = shared
        self._based: dict[str, int] = {}
        """Incarnation (number of starts) that each engine had when it received the base weights of the adapters, by the
        engine's name. A restarted engine has a higher one and needs the base weights again."""
        self._brought = False
        """True once these trainers have published their base weights. Every policy must do so once, because engines
        verify that all policies that they serve have the same base weights."""
        members: Membership | SharedMembers = engines.members
        if shared is not None:
            self._based = shared.based
            members = shared.enter(policy, self._deliver)
        vacate = self._give_turn if config.schedule.colocate else None
        self.publisher = self._publisher(source, members, self.delivery, vacate)
        self.adapters: Publisher | None = None
        """Publisher that sends only the adapters; None if complete weights are always published."""
        if "adapters" in trainers.plans:
            adapters = WeightSource(trainers, "adapters")
            self.adapters = self._publisher(adapters, members, self.delivery, encoding="adapters")

    def renew(self) -> None:
        self.delivery.renew()

    async def publish(self, step: int) -> Publication:
        """Publishes the weights after `step` steps as version `step`. If no engine can complete the publication, waits
        for engines to restart and publishes again."""
        return await self.with_retry(lambda: self._publish(step))

    async def publish_metrics(self, step: int) -> dict[str, float]:
        return publication_metrics(await self.publish(step)) | self.engines.members.metrics()

    async def sleep(self) -> None:
        await self.engines.sleep()

    async def wake(self) -> None:
        await self.engines.wake()

    async def _publish(self, step: int) -> Publication:
        if self._shared is None:
            return await self._deliver(step)
        return await self._shared.publish(self.policy, step)

    async def _deliver(self, step: int) -> Publication:
        """Publishes the weights of step `step`, and retries until at least one engine has received and verified
        them."""
        await self._maker.begin(self.policy, step)
        while True:
            if self.config.schedule.colocate:
                await self._seat()
            await self.engines.members.available()
            try:
                done = await self._publish_once(step)
            except (NoReceiverLeft, TransportLost) as error:
                self._note(first_line(error))
                continue
            self._maker.versions[self.policy] = done.manifest.version
            return done

    async def _publish_once(self, step: int) -> Publication:
        """Publishes only the adapters if every engine has the base weights and these trainers have published the base
        weights before; else publishes all weights."""
        if self.adapters is None:
            return await self.publisher.publish(step, trainer_step=step)
        present = {engine.name: engine.incarnation for engine in self.engines.members.candidates()}
        if self._brought and present.items() <= self._based.items():
            return await self.adapters.publish(step, trainer_step=step)
        done = await self.publisher.publish(step, trainer_step=step)
        self._brought = True
        self._based |= {name: present[name] for name in done.engines.keys() - done.lost}
        return done

    async def _seat(self) -> None:
        """Wakes colocated engines so that they can receive weights. If none is running, the trainers first release
        their devices so that an engine can start."""
        await self.engines.wake()
        while not self.engines.members.run:
            await self._give_turn()
            await self.engines.members.available()
            await self.engines.wake()

    async def _give_turn(self) -> None:
        await self.trainers.offload()
        self.engines.members.engine_phase.begin()

    async def watched[T](self, work: Awaitable[T], step: int, *, training: bool = False) -> T:
        """Awaits `work` and returns its result. Raises SlimxError if all engines of the run are lost in the meantime
        and none can be restarted.

        If no engine is serving when one restarts, the weights of `step` are published to it, except in two cases in
        which a publication follows anyway: if `training` is True, because the trainers' weights are then between two
        versions, and while colocated engines sleep. If the transport stores published versions, for example on disk,
        and the engines are awake, every engine that restarts receives the current version from this store."""
        if self._shared is not None and self._shared.owner != self.policy:
            return await work  # shared engines are watched by the policy that owns them
        members = self.engines.members
        awake = members.engine_phase.active
        training = training or not awake
        kept = self.delivery.keeps and awake

        def needed() -> Awaitable[None]:
            if kept:
                return members.back()
            if training:
                return members.failed()
            return members.starved()

        async def supply() -> None:
            nonlocal kept
            if kept:
                kept = await self.catch_up()
            else:
                await self.publish(step)

        return await while_served(work, needed, supply)

    async def catch_up(self) -> bool:
        """Sends the current version of the weights to restarted engines from a copy that the transport has stored, for
        example on disk. Returns False if the transport has no copy of this version."""
        members = self.engines.members
        version = self._maker.versions[self.policy]
        try:
            stored = await in_thread(self.delivery.kept, version)
            if stored is None:
                return False
            publisher = self._publisher(stored, Joining(members))
            done = await publisher.publish(version, trainer_step=version)
            for name in done.engines.keys() - done.lost:
                self._note(f"engine {name} received version {version} from {stored}")
        except SlimxError as error:
            # The other engines serve, so the run continues after any error.
            self._note(first_line(error))
            for engine in members.joining():
                await members.quarantine(engine, error)
        return True

    async def publish_to(self, members: Membership, step: int) -> Publication:
        """Publishes the weights after `step` steps to other engines that the transport reaches, such as those that
        evaluate during training. Raises NoReceiverLeft if none of them received the weights."""

        async def once() -> Publication:
            stored = await in_thread(self.delivery.kept, step)
            publisher = self._publisher(stored or self.publisher.source, members, None if stored else self.delivery)
            return await publisher.publish(step, trainer_step=step)

        return await self.with_retry(once)

    def _publisher(
        self,
        source: Source,
        members: Membership | SharedMembers | Joining,
        delivery: Delivery | None = None,
        vacate: Callable[[], Awaitable[None]] | None = None,
        *,
        encoding: Encoding | None = None,
    ) -> Publisher:
        options = self.config.publish
        return Publisher(
            source,
            cast(Members, members),  # Publisher passes only engines that the members object returned
            delivery,
            deadline_s=options.deadline,
            step_deadline_s=options.engine_deadline,
            staging=options.staging,
            policy=self.policy,
            encoding=encoding or self._encoding,
            rule=options.quantize or "none",
            vacate=vacate,
        )


def publication_metrics(done: Publication) -> dict[str, float]:
    """Returns the metrics of a publication under their names in metrics.jsonl: the seconds that each stage took, the
    number of tensors, their size in MiB, and the number of engines that verified the weights."""
    out = {f"publish/{stage}_seconds": seconds for stage, seconds in done.seconds.items()}
    out |= {"publish/tensors_verified": float(done.tensors), "publish/mib": done.nbytes / 2**20}
    if done.wire is not None:
        out["publish/wire_mib"] = done.wire / 2**20
    out["publish/engines_verified"] = float(len(done.engines) - len(done.lost))
    return out


class WeightSource:
    """Source of the weights of a publication: the buckets of plan `name`, packed by the ranks of `trainers`. Both ranks
    and plans may be replaced during the run."""

    def __init__(self, trainers: TrainerGroup, name: str):
        self.trainers = trainers
        self.name = name

    async def begin(self, manifest: Manifest) -> None:
        """Does nothing, because this source needs no preparation: ranks pack their current weights."""

    async def forms(self) -> list[dict[str, str]]:
        return self.trainers.plans[self.name].forms()

    async def bucket_count(self) -> int:
        return self.trainers.plans[self.name].plan.count

    async def gather(self, bucket: int) -> PackedBucket:
        return await self.trainers.pack(self.name, bucket)

    async def release(self, bucket: int | None = None) -> None:
        await self.trainers.release(self.name, bucket)
