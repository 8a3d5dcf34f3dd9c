"""The rollouts with which `slimx doctor --hooks` tries hooks, in an event loop that is watched."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from slimx.config.schema import Config
from slimx.config.sections.rollout import Proxy
from slimx.data.records import Prompt
from slimx.errors import SlimxError
from slimx.extras.doctor.hooks.scripted_server import VERSION, ScriptedServer
from slimx.extras.served_models.client import FrozenEngine
from slimx.extras.served_models.teacher import make_scorer
from slimx.models.families import ModelSpec
from slimx.orchestration.engines.service import make_agent_server
from slimx.rollout.client.completion import ModelShape
from slimx.rollout.client.generation import GenerationClient
from slimx.rollout.flow.rollouts import GroupMaker, GroupOutcome, Speaker
from slimx.rollout.hook_loading import Hooks

LIMIT_S = 60.0
"""For one rollout, and for one reward, where the run's own deadlines are longer."""
BEAT_S = 0.05
STUCK_S = 20.0
"""An event loop that stands still for so long is given up."""
ELSE = "I do not know that."
"""Words of the stand-in besides the answer."""


@dataclass(slots=True)
class Tried:
    """One of the stand-in's rollouts."""

    says: str
    outcome: GroupOutcome
    requests: int
    same_seed: bool
    frozen: int
    """Requests to frozen models."""
    held: float
    """Longest time for which the event loop stood still, seconds."""
    seconds: float


class HookTrial:
    """The rollouts, in an event loop of a thread of their own."""

    def __init__(
        self,
        config: Config,
        hooks: Hooks,
        spec: ModelSpec,
        tokenizer: Any,
        prompt: Prompt,
        server: ScriptedServer,
        texts: Sequence[str] = (),
    ) -> None:
        """`texts`: what the stand-in says in one more rollout, the first, request by request; then it answers."""
        rollout = {"group_size": 1, "rollout_deadline": min(config.rollout.rollout_deadline, LIMIT_S)}
        reward = {"deadline": min(config.reward.deadline, LIMIT_S), "workers": 1}
        self.config = config.model_copy(
            update={
                "rollout": config.rollout.model_copy(update=rollout),
                "reward": config.reward.model_copy(update=reward),
            }
        )
        self.hooks, self.spec, self.tokenizer, self.prompt, self.server = hooks, spec, tokenizer, prompt, server
        self.texts = texts
        self.beat = time.monotonic()
        self.held = 0.0
        """Longest time for which the event loop stood still in this rollout, seconds."""
        self._result: Future[list[Tried]] = Future()

    def watch(self) -> list[Tried]:
        """Run them. Raises SlimxError if a hook holds the event loop for good."""
        self.beat = time.monotonic()
        threading.Thread(target=self._run, name="slimx-trial", daemon=True).start()
        while not wait([self._result], timeout=0.2).done:
            if time.monotonic() - self.beat > STUCK_S:
                raise SlimxError(
                    f"rollout.generate: {self.config.rollout.generate} has held the event loop for {STUCK_S:.0f} s; "
                    "all rollouts share it: await, or move what blocks to asyncio.to_thread",
                    code="hooks.blocking",
                    about=self.config.rollout.generate,
                )
        return self._result.result()

    def _run(self) -> None:
        try:
            self._result.set_result(asyncio.run(self._all()))
        except BaseException as error:
            self._result.set_exception(error)

    async def _all(self) -> list[Tried]:
        heart = asyncio.create_task(self._beat())
        url, shape = self.server.url, ModelShape.of(self.spec)
        sampled = bool(self.config.rollout.policy_engines)
        frozen = {
            group.name: FrozenEngine(group.name, url, deadline_s=LIMIT_S, retries=0)
            for group in self.config.rollout.frozen_engines
        }
        proxy = make_agent_server(Proxy(), self.spec.gpt["max_sequence_length"])
        hooks = Hooks(self.hooks.generate, self.hooks.reward, None)
        async with GenerationClient(url, shape, LIMIT_S, retry_s=0, retries=0) as client:
            # Every policy is the stand-in, in the words of the actor's tokenizer.
            speaker = Speaker(client if sampled else None, self.tokenizer, self.spec.vocab_size)
            speakers = dict.fromkeys(self.config.trained, speaker)
            maker = GroupMaker(self.config, hooks, speakers, frozen, proxy, score=make_scorer(self.config, frozen))
            maker.version = VERSION
            try:
                tried: list[Tried] = []
                scripts = self._scripts()
                for number, script in enumerate(scripts if sampled else scripts[:1]):
                    tried.append(await self._one(maker, number, *script))
                    if (tried[-1].outcome.reason or "").endswith("deadline"):
                        break  # it would only take as long again
                return tried
            finally:
                heart.cancel()
                maker.close()
                await proxy.stop()

    def _scripts(self) -> list[tuple[str, list[list[int]], bool]]:
        """(name, token ids of one answer after the other, True if the model ends there)."""
        end = self.tokenizer.eos_token_id

        def ids(text: str) -> list[int]:
            return list(self.tokenizer(text, add_special_tokens=False).input_ids)

        right, other = ids(self.prompt.answer or "The answer is 42."), ids(ELSE)
        closing = [] if end is None else [end]
        name = "the answer" if self.prompt.answer is not None else '"The answer is 42."'
        given = [ids(text) + closing for text in self.texts]
        return [
            *([("--say", [*given, right + closing], True)] if given else []),
            (name, [right + closing], True),
            ("else", [other + closing], True),
            ("else, cut off", [other], False),
        ]

    async def _one(self, maker: GroupMaker, number: int, says: str, answers: list[list[int]], ends: bool) -> Tried:
        self.server.say(*answers, ends=ends)
        began, self.held = time.monotonic(), 0.0
        outcome = await maker.make(self.prompt, group_id=str(number), number=number)
        asked, seeds = self.server.asked, self.server.seeds
        frozen = sum(asked.values()) - seeds.total()
        twice = max(seeds.values(), default=0) > 1
        return Tried(says, outcome, seeds.total(), twice, frozen, self.held, time.monotonic() - began)

    async def _beat(self) -> None:
        while True:
            now = time.monotonic()
            self.held, self.beat = max(self.held, now - self.beat - BEAT_S), now
            await asyncio.sleep(BEAT_S)
