"""Engines that generate for several policies, each with its own LoRA adapters on the same base weights.

    actor --the base, its adapters--> engine (JOINING) <--its adapters-- judge      both loaded --> router (MEMBER)

Publications of the policies alternate, and an engine receives requests once it has the adapters of all policies. Each
policy has a publisher with its own versions. The first publication of each policy also contains the base weights, which
the engine compares with the base weights that it already has. A restarted engine has no weights: the first policy to
publish sends the base weights, and policies that have already published their current version publish it again.
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
"""Function that publishes the weights of a step, and retries until at least one engine has received the weights."""


class SharedEngines:
    """Engines that serve the adapters of several policies, and a record of the weights that each engine has
    received."""

    def __init__(self, members: Membership, policies: Sequence[str]):
        """Creates an empty record. `members`: engines of the group. `policies`: names of the policies; the first one
        owns the engines."""
        self.membership = members
        self.owner = policies[0]
        self.based: dict[str, int] = {}
        """Incarnation (number of starts) that each engine had when it received the base weights, by the engine's name.
        A restarted engine has a higher one and needs the weights again."""
        self._loaded: dict[str, dict[str, int]] = {policy: {} for policy in policies}
        """Incarnation (number of starts) that each engine had when it loaded a policy's adapters, by the policy's and
        the engine's name. A restarted engine has a higher one and needs the adapters again."""
        self._newest: dict[str, int] = {}
        """Step of the last publication of each policy, by the policy's name."""
        self._deliver: dict[str, Deliver] = {}
        self._turn = asyncio.Lock()

    def enter(self, policy: str, deliver: Deliver) -> SharedMembers:
        """Registers `deliver`, which publishes the weights of `policy`, and returns the view of the engines that the
        policy's publisher must use."""
        self._deliver[policy] = deliver
        return SharedMembers(self, policy)

    async def publish(self, policy: str, step: int) -> Publication:
        """Publishes the weights of `policy` for `step`. If a restarted engine then lacks the weights of other policies
        for the same step, publishes those again. Concurrent calls wait for each other."""
        async with self._turn:
            done = await self._deliver[policy](step)
            self._newest[policy] = step
            while (behind := self._behind(step)) is not None:
                await self._deliver[behind](step)
            return done

    def record_adapters(self, policy: str, engine: EngineHandle) -> bool:
        """Records that `engine` has the adapters of `policy`. Returns True if the engine now has the adapters of every
        policy."""
        self._loaded[policy][engine.name] = engine.incarnation
        return all(loaded.get(engine.name) == engine.incarnation for loaded in self._loaded.values())

    def _behind(self, step: int) -> str | None:
        """Returns a policy that has published its weights of `step`, but not to every running engine; None if there is
        no such policy."""
        running = {engine.name: engine.incarnation for engine in self.membership.candidates()}
        for policy, newest in self._newest.items():
            if newest == step and not running.items() <= self._loaded[policy].items():
                return policy
        return None


class SharedMembers:
    """View of the shared engines for the publisher of one policy; implements `slimx.reshard.parties.Members`."""

    def __init__(self, shared: SharedEngines, policy: str):
        self._shared = shared
        self._policy = policy
        self._members = shared.membership

    @property
    def epoch(self) -> int:
        return self._members.epoch

    def candidates(self) -> list[EngineHandle]:
        """Returns the running engines, to which weights can be published."""
        return self._members.candidates()

    async def quarantine(self, engine: EngineHandle, error: SlimxError) -> None:
        """Takes `engine` out of service for all policies because of `error`."""
        await self._members.quarantine(engine, error)

    async def admit(self, engine: EngineHandle) -> None:
        """Records that `engine` has a verified version of this policy's adapters, and adds the engine to the router if
        it has the adapters of every policy. Raises ReceiverLost if the engine has been lost in the meantime."""
        if self._shared.record_adapters(self._policy, engine):
            await self._members.admit(engine)
        elif not engine.state.runs:
            raise ReceiverLost(
                f"engine {engine.name} was lost before it could serve requests; see the engine's log for the cause",
                code="engine.lost",
                about=engine.name,
            )
