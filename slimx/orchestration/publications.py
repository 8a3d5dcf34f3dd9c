"""The publications of a run: the trainers' weights become the engines', and engines that were lost catch up."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from slimx.cluster.waiting import first_line
from slimx.config.schema import Config
from slimx.engines.fleet.group import EngineGroup
from slimx.engines.fleet.membership import Joining
from slimx.engines.transport import transport_of
from slimx.errors import SlimxError
from slimx.orchestration.engines.shared import SharedEngines
from slimx.orchestration.ranks.trainers import TrainerGroup
from slimx.orchestration.state.recording import Records
from slimx.reshard.manifest import Encoding, Manifest, Publication
from slimx.reshard.packed import PackedBucket
from slimx.reshard.parties import Delivery, Members, NoReceiverLeft, Source, TransportLost
from slimx.reshard.publish import Publisher
from slimx.rollout.flow.rollouts import GroupMaker
from slimx.runtime.tasks import in_thread, while_served

Lasting = Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]


async def _once(work: Callable[[], Awaitable[Any]]) -> Any:
    return await work()


class Publications:
    """Publishes the weights of one policy's trainers to its engines."""

    def __init__(
        self,
        policy: str,
        config: Config,
        engines: EngineGroup | None,
        maker: GroupMaker,
        trainers: TrainerGroup,
        encoding: Encoding,
        records: Records,
        shared: SharedEngines | None = None,
    ):
        """`config`: of the policy. `engines`: None where nothing is sampled. `maker` gets each version that is
        published. `encoding`: how engines receive weights. `shared`: `engines` hold the adapters of other policies,
        too."""
        self.policy, self.config, self.engines, self.trainers = policy, config, engines, trainers
        self.lasting: Lasting = _once
        """Waits for work that needs trainers, which may be replaced meanwhile."""
        self._maker, self._encoding, self._note = maker, encoding, records.table.note
        transport = transport_of(config.publish)
        source, self.delivery = transport.connect(config, trainers, engines, WeightSource(trainers, "publish"))
        self.publisher = self.adapters = None
        self._shared = shared
        self._based: dict[str, int] = {} if shared is None else shared.based
        """By engine the incarnation that was given the base of its adapters."""
        self._brought = False
        """True once the base of these trainers was published, and thereby compared with that of other policies."""
        if self.engines is not None:
            members = self.engines.members if shared is None else shared.enter(policy, self._deliver)
            vacate = self._give_turn if self.config.schedule.colocate else None
            self.publisher = self._publisher(source, members, self.delivery, vacate)
            if "adapters" in trainers.plans:
                source = WeightSource(trainers, "adapters")
                self.adapters = self._publisher(source, members, self.delivery, encoding="adapters")

    async def publish(self, step: int) -> Publication:
        """Publish the weights of `step` as the version of that number, until at least one engine has taken part to the
        end: while there is none, this waits for a restart."""
        return await self.lasting(lambda: self._publish(step))

    async def _publish(self, step: int) -> Publication:
        deliver = self._deliver if self._shared is None else partial(self._shared.publish, self.policy)
        return await deliver(step)

    async def _deliver(self, step: int) -> Publication:
        """Publish until at least one engine has taken part to the end."""
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
        """Publish the adapters alone if every engine holds their base, which these trainers have brought once, else all
        weights to every engine."""
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
        """Have colocated engines hold what a publication writes into, and no more. If none runs, one starts first, on
        devices that the trainers have left."""
        await self.engines.wake()
        while not self.engines.members.run:
            await self._give_turn()
            await self.engines.members.available()
            await self.engines.wake()

    async def _give_turn(self) -> None:
        await self.trainers.offload()
        self.engines.members.turn.begin()

    async def watched[T](self, work: Awaitable[T], step: int, *, training: bool = False) -> T:
        """Wait for `work`, but not beyond the moment when the run has lost its engines for good.

        Where engines are all out and one of them comes back, it gets the weights of `step`; not while `training`, when
        the trainers' weights are between two versions, nor in the trainers' turn, when engines sleep: then the
        publication that follows brings the next one. A delivery that keeps versions brings the present one to whichever
        engine comes back, at any time when engines are awake.
        """
        if self.engines is None or (self._shared is not None and self._shared.owner != self.policy):
            return await work  # engines of several policies are watched by their owner's
        members = self.engines.members
        awake = members.turn.theirs
        training, kept = training or not awake, self.delivery.keeps and awake

        def needed() -> Awaitable[None]:
            return members.back() if kept else members.failed() if training else members.starved()

        async def supply() -> None:
            nonlocal kept
            if kept:
                kept = await self.catch_up()
            else:
                await self.publish(step)

        return await while_served(work, needed, supply)

    async def catch_up(self) -> bool:
        """Bring the present version to engines that came back, from where it is kept; False if it is not."""
        members, version = self.engines.members, self._maker.versions[self.policy]
        try:
            stored = await in_thread(self.delivery.kept, version)
            if stored is None:
                return False
            publisher = self._publisher(stored, Joining(members))
            done = await publisher.publish(version, trainer_step=version)
            for name in done.engines.keys() - done.lost:
                self._note(f"engine {name} has version {version} from {stored}")
        except SlimxError as error:
            # Whatever it is, it is no reason to end a run whose other engines serve.
            self._note(first_line(error))
            for engine in members.joining():
                await members.quarantine(engine, error)
        return True

    def _publisher(
        self,
        source: Source,
        members: Members,
        delivery: Delivery | None = None,
        vacate: Callable[[], Awaitable[None]] | None = None,
        *,
        encoding: Encoding | None = None,
    ) -> Publisher:
        options = self.config.publish
        return Publisher(
            source,
            members,
            delivery,
            deadline_s=options.deadline,
            step_deadline_s=options.engine_deadline,
            staging=options.staging,
            policy=self.policy,
            encoding=encoding or self._encoding,
            rule=options.quantise or "none",
            vacate=vacate,
        )


def publication_metrics(done: Publication) -> dict[str, float]:
    """Seconds by stage, tensors, MiB and engines of a publication, as a step's metrics name them."""
    out = {f"publish/{stage}_seconds": seconds for stage, seconds in done.seconds.items()}
    out |= {"publish/tensors_verified": float(done.tensors), "publish/mib": done.nbytes / 2**20}
    if done.wire is not None:
        out["publish/wire_mib"] = done.wire / 2**20
    out["publish/engines_verified"] = float(len(done.engines) - len(done.lost))
    return out


class WeightSource:
    """The tensors of plan `name` of a group of trainers, whose plans and ranks may be replaced."""

    def __init__(self, trainers: TrainerGroup, name: str):
        self.trainers, self.name = trainers, name

    async def begin(self, manifest: Manifest) -> None:
        """Nothing to prepare: weights are gathered as they are."""

    async def forms(self) -> list[dict[str, str]]:
        return self.trainers.plans[self.name].forms()

    async def bucket_count(self) -> int:
        return self.trainers.plans[self.name].plan.count

    async def gather(self, bucket: int) -> PackedBucket:
        return await self.trainers.pack(self.name, bucket)

    async def release(self, bucket: int | None = None) -> None:
        await self.trainers.release(self.name, bucket)
