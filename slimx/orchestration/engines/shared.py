"""Engines that generate for several policies: publications alternate, and requests wait for all policies' weights.

    actor --the base, its adapters--> engine (JOINING) <--its adapters-- judge      both loaded --> router (MEMBER)

Each policy has a publisher with its own versions. The first publication of each also brings the base, which the engine
compares with its own. A restarted engine has no weights: the first policy to publish brings the base, and the others,
whose current version is published already, publish again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from slimx.engines.fleet.handle import EngineHandle
from slimx.engines.fleet.membership import Membership
from slimx.errors import SlimxError
from slimx.reshard.manifest import Publication
from slimx.reshard.parties import ReceiverLost

Deliver = Callable[[int], Awaitable[Publication]]
"""Publishes the weights of a step until an engine has them."""


class SharedEngines:
    """The engines of several policies, and the weights that each engine has received."""

    def __init__(self, members: Membership, policies: Sequence[str]):
        """Starts without weights. `policies`: the first is the owner of the engines."""
        self.membership = members
        self.owner = policies[0]
        self.based: dict[str, int] = {}
        """Engine -> incarnation that has received the base of all adapters."""
        self._loaded: dict[str, dict[str, int]] = {policy: {} for policy in policies}
        """Policy -> engine -> incarnation that has loaded the policy's adapters."""
        self._newest: dict[str, int] = {}
        """Policy -> step that was published last."""
        self._deliver: dict[str, Deliver] = {}
        self._turn = asyncio.Lock()

    def enter(self, policy: str, deliver: Deliver) -> SharedMembers:
        """Returns the engines as members for a publisher of `policy`; `deliver` publishes its weights."""
        self._deliver[policy] = deliver
        return SharedMembers(self, policy)

    async def publish(self, policy: str, step: int) -> Publication:
        """Publishes the weights of `policy` when it is its turn, and again those of other policies' `step` that a
        restarted engine lacks."""
        async with self._turn:
            done = await self._deliver[policy](step)
            self._newest[policy] = step
            while (behind := self._behind(step)) is not None:
                await self._deliver[behind](step)
            return done

    def gave(self, policy: str, engine: EngineHandle) -> bool:
        """Records that `engine` has the adapters of `policy`; returns True if it has those of every policy."""
        self._loaded[policy][engine.name] = engine.incarnation
        return all(loaded.get(engine.name) == engine.incarnation for loaded in self._loaded.values())

    def _behind(self, step: int) -> str | None:
        """Returns a policy whose version of `step` is published, but missing on a running engine."""
        running = {engine.name: engine.incarnation for engine in self.membership.candidates()}
        for policy, newest in self._newest.items():
            if newest == step and not running.items() <= self._loaded[policy].items():
                return policy
        return None


class SharedMembers:
    """The engines as members for the publisher of one policy (`slimx.reshard.parties.Members`)."""

    def __init__(self, shared: SharedEngines, policy: str):
        self._shared = shared
        self._policy = policy
        self._members = shared.membership

    @property
    def epoch(self) -> int:
        return self._members.epoch

    def candidates(self) -> list[EngineHandle]:
        """Returns the running engines."""
        return self._members.candidates()

    async def quarantine(self, engine: EngineHandle, error: SlimxError) -> None:
        """Takes `engine` out of service because of `error`, for all policies."""
        await self._members.quarantine(engine, error)

    async def admit(self, engine: EngineHandle) -> None:
        """Records that `engine` has a verified version of this policy; with one of each policy it gets requests. Raises
        ReceiverLost if it was lost meanwhile."""
        if self._shared.gave(self._policy, engine):
            await self._members.admit(engine)
        elif not engine.standing.runs:
            raise ReceiverLost(
                f"engine {engine.name} was lost before it could serve", code="engine.lost", about=engine.name
            )
