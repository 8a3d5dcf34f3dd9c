"""Publications of a run: engines get the trainers' weights, and engines that were lost catch up."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import cast

from slimx.cluster.waiting import first_line
from slimx.config.schema import Config
from slimx.engines.fleet.group import EngineGroup
from slimx.engines.fleet.membership import Joining, Membership
from slimx.engines.transport import transport_of
from slimx.errors import SlimxError
from slimx.orchestration.engines.shared import SharedEngines, SharedMembers
from slimx.orchestration.ranks.trainers import TrainerGroup
from slimx.orchestration.state.recording import Records
from slimx.reshard.manifest import Encoding, Manifest, Publication
from slimx.reshard.packed import PackedBucket
from slimx.reshard.parties import Delivery, Members, NoReceiverLeft, Source, TransportLost
from slimx.reshard.publish import Publisher
from slimx.rollout.flow.rollouts import GroupMaker
from slimx.runtime.tasks import in_thread, while_served

type Deliver = Callable[[int], Awaitable[Publication]]
"""Publishes the weights of a step."""
type Lasting = Callable[[Callable[[], Awaitable[Publication]]], Awaitable[Publication]]
"""Runs work that needs trainers, and repeats it if they are replaced."""


async def _once(work: Callable[[], Awaitable[Publication]]) -> Publication:
    return await work()


class Publications:
    """Publications of a policy's weights. Without engines: none."""

    lasting: Lasting = staticmethod(_once)
    """Runs work that needs trainers, which may be replaced meanwhile."""

    def renew(self) -> None:
        """Prepares for other trainer ranks, which have replaced lost ones."""

    async def publish(self, step: int) -> Publication | None:
        """Publishes the weights of `step` as the version of that number."""
        return None

    async def publish_metrics(self, step: int) -> dict[str, float]:
        """Publishes the weights of `step`; returns metrics of the publication and of the engines."""
        return {}

    async def watched[T](self, work: Awaitable[T], step: int, *, training: bool = False) -> T:
        """Returns the result of `work`. Raises SlimxError if the run loses all engines meanwhile."""
        return await work

    async def sleep(self) -> None:
        """Releases the devices of colocated engines."""

    async def wake(self) -> None:
        """Restores the memory of colocated engines' weights; a publication must follow."""


class EnginePublications(Publications):
    """Publications of the weights of one policy's trainers to its engines."""

    def __init__(
        self,
        policy: str,
        config: Config,
        engines: EngineGroup,
        maker: GroupMaker,
        trainers: TrainerGroup,
        encoding: Encoding,
        records: Records,
        shared: SharedEngines | None = None,
    ):
        """Connects trainers and engines. `config`: of the policy. `maker` gets each published version. `encoding`: of
        the weights for engines. `shared`: `engines` hold the adapters of other policies, too."""
        self.policy = policy
        self.config = config
        self.engines = engines
        self.trainers = trainers
        self._maker = maker
        self._encoding = encoding
        self._note = records.table.note
        transport = transport_of(config.publish)
        source, self.delivery = transport.connect(config, trainers, engines, WeightSource(trainers, "publish"))
        self._shared = shared
        self._based: dict[str, int] = {}
        """Engine -> incarnation that has received the base of its adapters."""
        self._brought = False
        """True once the base of these trainers was published, and thereby compared with that of other policies."""
        members: Membership | SharedMembers = engines.members
        if shared is not None:
            self._based = shared.based
            members = shared.enter(policy, self._deliver)
        vacate = self._give_turn if config.schedule.colocate else None
        self.publisher = self._publisher(source, members, self.delivery, vacate)
        self.adapters: Publisher | None = None
        """Publisher of the adapters alone."""
        if "adapters" in trainers.plans:
            adapters = WeightSource(trainers, "adapters")
            self.adapters = self._publisher(adapters, members, self.delivery, encoding="adapters")

    def renew(self) -> None:
        self.delivery.renew()

    async def publish(self, step: int) -> Publication:
        """Publishes the weights of `step` as the version of that number; waits for a restart as long as no engine has
        completed the publication."""
        return await self.lasting(lambda: self._publish(step))

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
        """Publishes until at least one engine has completed the publication."""
        self._maker.begun[self.policy] = step
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
        """Publishes only the adapters if every engine has their base and these trainers have published it once, else
        all weights."""
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
        """Wakes colocated engines to receive weights. If none is running, one starts first, on devices that the
        trainers have released."""
        await self.engines.wake()
        while not self.engines.members.run:
            await self._give_turn()
            await self.engines.members.available()
            await self.engines.wake()

    async def _give_turn(self) -> None:
        await self.trainers.offload()
        self.engines.members.turn.begin()

    async def watched[T](self, work: Awaitable[T], step: int, *, training: bool = False) -> T:
        """Returns the result of `work`. Raises SlimxError if the run loses all engines meanwhile.

        If all engines are out and one comes back, it gets the weights of `step`; not while `training`, when the
        trainers' weights are between two versions, nor in the trainers' turn, when engines sleep: then the following
        publication brings the next version. A delivery that keeps versions brings the current one to any engine that
        comes back while engines are awake.
        """
        if self._shared is not None and self._shared.owner != self.policy:
            return await work  # the owner watches engines of several policies
        members = self.engines.members
        awake = members.turn.theirs
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
        """Sends the current version to engines that came back, from where it is kept. Returns False if it is not."""
        members = self.engines.members
        version = self._maker.versions[self.policy]
        try:
            stored = await in_thread(self.delivery.kept, version)
            if stored is None:
                return False
            publisher = self._publisher(stored, Joining(members))
            done = await publisher.publish(version, trainer_step=version)
            for name in done.engines.keys() - done.lost:
                self._note(f"engine {name} has version {version} from {stored}")
        except SlimxError as error:
            # The other engines serve, so the run goes on after any error.
            self._note(first_line(error))
            for engine in members.joining():
                await members.quarantine(engine, error)
        return True

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
            cast(Members, members),  # recipients given to members are engines that came from them
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
    """Returns seconds by stage, tensors, MiB and engines of a publication under the names of a step's metrics."""
    out = {f"publish/{stage}_seconds": seconds for stage, seconds in done.seconds.items()}
    out |= {"publish/tensors_verified": float(done.tensors), "publish/mib": done.nbytes / 2**20}
    if done.wire is not None:
        out["publish/wire_mib"] = done.wire / 2**20
    out["publish/engines_verified"] = float(len(done.engines) - len(done.lost))
    return out


class WeightSource:
    """Source of the tensors of plan `name` of a group of trainers, whose plans and ranks may be replaced."""

    def __init__(self, trainers: TrainerGroup, name: str):
        self.trainers = trainers
        self.name = name

    async def begin(self, manifest: Manifest) -> None:
        """Prepares nothing: weights are gathered as they are."""

    async def forms(self) -> list[dict[str, str]]:
        return self.trainers.plans[self.name].forms()

    async def bucket_count(self) -> int:
        return self.trainers.plans[self.name].plan.count

    async def gather(self, bucket: int) -> PackedBucket:
        return await self.trainers.pack(self.name, bucket)

    async def release(self, bucket: int | None = None) -> None:
        await self.trainers.release(self.name, bucket)
