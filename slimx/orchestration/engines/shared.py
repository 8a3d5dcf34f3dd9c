"""Engines that generate for several policies: their publications take turns, and requests wait until all are there.

    actor --the base, its adapters--> engine (JOINING) <--its adapters-- judge       both there --> router (MEMBER)

Each policy has a publisher of its own, whose versions count for it alone. In its first publication each brings the
base, too, which the engine compares with what it holds. An engine that was started again holds nothing of any:
whichever policy comes first brings the base, and all others, whose present version is out already, come again.
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
"""Publishes the weights of a step, until an engine has them."""


class SharedEngines:
    """The engines of `policies`, and what each of them was given."""

    def __init__(self, members: Membership, policies: Sequence[str]):
        """`policies`: first the one whose engines they are."""
        self.membership, self.owner = members, policies[0]
        self.based: dict[str, int] = {}
        """By engine the incarnation that was given the base of all adapters."""
        self._held: dict[str, dict[str, int]] = {policy: {} for policy in policies}
        """By policy and engine the incarnation that holds its adapters."""
        self._newest: dict[str, int] = {}
        """By policy the step that was published last."""
        self._ways: dict[str, Deliver] = {}
        self._turn = asyncio.Lock()

    def enter(self, policy: str, deliver: Deliver) -> SharedMembers:
        """The engines as a publisher of `policy` needs them; `deliver` publishes its weights."""
        self._ways[policy] = deliver
        return SharedMembers(self, policy)

    async def publish(self, policy: str, step: int) -> Publication:
        """Publish the weights of `policy` when it is its turn, and again those of `step` of others that an engine lacks
        since it was started again."""
        async with self._turn:
            done = await self._ways[policy](step)
            self._newest[policy] = step
            while (behind := self._behind(step)) is not None:
                await self._ways[behind](step)
            return done

    def gave(self, policy: str, engine: EngineHandle) -> bool:
        """Note that `engine` holds the adapters of `policy`; returns True if it holds those of every policy."""
        self._held[policy][engine.name] = engine.incarnation
        return all(held.get(engine.name) == engine.incarnation for held in self._held.values())

    def _behind(self, step: int) -> str | None:
        """A policy whose version of `step` is out, and an engine that runs without it."""
        present = {engine.name: engine.incarnation for engine in self.membership.candidates()}
        out = (name for name, at in self._newest.items() if at == step)
        return next((name for name in out if not present.items() <= self._held[name].items()), None)


class SharedMembers:
    """The engines as the publisher of one policy needs them (`slimx.reshard.parties.Members`)."""

    def __init__(self, shared: SharedEngines, policy: str):
        self._shared, self._policy, self._members = shared, policy, shared.membership

    @property
    def epoch(self) -> int:
        return self._members.epoch

    def candidates(self) -> list[EngineHandle]:
        """Engines that run."""
        return self._members.candidates()

    async def quarantine(self, engine: EngineHandle, error: SlimxError) -> None:
        """Take `engine` out because of `error`, for all policies."""
        await self._members.quarantine(engine, error)

    async def admit(self, engine: EngineHandle) -> None:
        """`engine` holds a verified version of this policy: requests may reach it once it holds one of each. Raises
        ReceiverLost if it was lost meanwhile."""
        if self._shared.gave(self._policy, engine):
            await self._members.admit(engine)
        elif not engine.standing.runs:
            raise ReceiverLost(
                f"engine {engine.name} was lost before it could serve", code="engine.lost", about=engine.name
            )
