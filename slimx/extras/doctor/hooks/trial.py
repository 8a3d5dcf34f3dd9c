"""The rollouts in which `slimx doctor --hooks` tries hooks, in an event loop that is checked for blocking calls."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slimx.config.schema import Config
from slimx.config.sections.rollout import Proxy
from slimx.data.chat.tokens import PromptIds
from slimx.data.records import Prompt
from slimx.errors import SlimxError
from slimx.extras.doctor.hooks.scripted_server import VERSION, ScriptedServer
from slimx.extras.served_models.client import FrozenEngine, image_placeholder
from slimx.extras.served_models.teacher import make_scorer
from slimx.models.families import ModelSpec
from slimx.rollout.client.completion import ModelShape
from slimx.rollout.client.generation import GenerationClient
from slimx.rollout.flow.rollouts import GroupMaker, GroupOutcome
from slimx.rollout.hook_loading import Hooks
from slimx.rollout.policy import PolicyClient, make_agent_server

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LIMIT_S = 60.0
"""Maximum time in seconds for one rollout, and for one reward, if the run's deadlines are longer."""
BEAT_S = 0.05
STUCK_S = 20.0
"""Seconds for which a hook may block the event loop before the trial is ended."""
ELSE = "I do not know that."
"""Text that the scripted server returns in rollouts that do not receive the prompt's answer."""


@dataclass(slots=True)
class TrialRollout:
    """One rollout with the scripted server, and its results."""

    says: str
    outcome: GroupOutcome
    requests: int
    same_seed: bool
    frozen: int
    """Number of requests to frozen models."""
    blocked: float
    """Longest time for which a hook blocked the event loop, in seconds."""
    seconds: float


class HookTrial:
    """Rollouts of a trial, which run in an event loop of a separate thread."""

    def __init__(
        self,
        config: Config,
        hooks: Hooks,
        spec: ModelSpec,
        tokenizer: Any,
        prompt: Prompt,
        server: ScriptedServer,
        texts: Sequence[str] = (),
        encode: Callable[[PreTrainedTokenizerBase], PromptIds] = PromptIds,
    ) -> None:
        """Stores the arguments and prepares the rollouts. `texts`: responses of the scripted server in an additional
        first rollout, one per request. After the last one, the server returns the prompt's answer. `encode`: function
        that returns the encoder of one group's prompt."""
        rollout = {"group_size": 1, "rollout_deadline": min(config.rollout.rollout_deadline, LIMIT_S)}
        reward = {"deadline": min(config.reward.deadline, LIMIT_S), "workers": 1}
        self.config = config.model_copy(
            update={
                "rollout": config.rollout.model_copy(update=rollout),
                "reward": config.reward.model_copy(update=reward),
            }
        )
        self.hooks = hooks
        self.spec = spec
        self.tokenizer = tokenizer
        self.prompt = prompt
        self.server = server
        self.texts = texts
        self.encode = encode
        self.beat = time.monotonic()
        self.blocked = 0.0
        """Longest time for which a hook has blocked the event loop in the current rollout, in seconds."""
        self._result: Future[list[TrialRollout]] = Future()

    def watch(self) -> list[TrialRollout]:
        """Runs the rollouts and returns them. Raises SlimxError if a hook blocks the event loop for longer than
        `STUCK_S`."""
        self.beat = time.monotonic()
        threading.Thread(target=self._run, name="slimx-trial", daemon=True).start()
        while not wait([self._result], timeout=0.2).done:
            if time.monotonic() - self.beat > STUCK_S:
                raise SlimxError(
                    f"rollout.generate: {self.config.rollout.generate} has blocked the event loop, which all rollouts "
                    f"share, for {STUCK_S:.0f} s; use await in the hook, or move blocking calls to asyncio.to_thread",
                    code="hooks.blocking",
                    about=self.config.rollout.generate,
                )
        return self._result.result()

    def _run(self) -> None:
        try:
            self._result.set_result(asyncio.run(self._all()))
        except BaseException as error:
            self._result.set_exception(error)

    async def _all(self) -> list[TrialRollout]:
        heart = asyncio.create_task(self._beat())
        url = self.server.url
        shape = ModelShape.of(self.spec)
        sampled = bool(self.config.served.policy)
        frozen: dict[str, FrozenEngine] = {}
        for group in self.config.served.frozen:
            frozen[group.name] = FrozenEngine(
                group.name, url, deadline_s=LIMIT_S, retries=0, placeholder=image_placeholder(self.config)
            )
        proxy = make_agent_server(Proxy(), self.spec.gpt["max_sequence_length"])
        hooks = Hooks(self.hooks.generate, self.hooks.reward, None)
        async with GenerationClient(url, shape, LIMIT_S, retry_s=0, retries=0) as client:
            scripts = self._scripts()
            generation: GenerationClient | None = client
            if not sampled:
                scripts = scripts[:1]
                generation = None
            # The scripted server serves every policy, with the tokenizer of `actor`.
            policy = PolicyClient(generation, self.tokenizer, self.spec.vocab_size, self.encode)
            policies = dict.fromkeys(self.config.trained, policy)
            maker = GroupMaker(self.config, hooks, policies, frozen, proxy, score=make_scorer(self.config, frozen))
            maker.version = VERSION
            try:
                rollouts: list[TrialRollout] = []
                for number, script in enumerate(scripts):
                    rollouts.append(await self._one(maker, number, *script))
                    if (rollouts[-1].outcome.reason or "").endswith("deadline"):
                        break  # other rollouts would take as long
                return rollouts
            finally:
                heart.cancel()
                maker.close()
                await proxy.stop()

    def _scripts(self) -> list[tuple[str, list[list[int]], bool]]:
        """Returns, for each rollout, its name, the token ids of its scripted responses in order, and True if the model
        stops after the last response, False if that response is cut off."""
        end = self.tokenizer.eos_token_id

        def ids(text: str) -> list[int]:
            return list(self.tokenizer(text, add_special_tokens=False).input_ids)

        right = ids(self.prompt.answer or "The answer is 42.")
        other = ids(ELSE)
        closing = [] if end is None else [end]
        name = "the answer" if self.prompt.answer is not None else '"The answer is 42."'
        scripts = [
            (name, [right + closing], True),
            ("else", [other + closing], True),
            ("else, cut off", [other], False),
        ]
        if self.texts:
            answers = [ids(text) + closing for text in self.texts]
            scripts.insert(0, ("--say", [*answers, right + closing], True))
        return scripts

    async def _one(
        self, maker: GroupMaker, number: int, says: str, answers: list[list[int]], ends: bool
    ) -> TrialRollout:
        self.server.say(*answers, ends=ends)
        self.blocked = 0.0
        began = time.monotonic()
        outcome = await maker.make(self.prompt, group_id=str(number), number=number)
        seeds = self.server.seeds
        return TrialRollout(
            says=says,
            outcome=outcome,
            requests=seeds.total(),
            same_seed=max(seeds.values(), default=0) > 1,
            frozen=self.server.requests.total() - seeds.total(),
            blocked=self.blocked,
            seconds=time.monotonic() - began,
        )

    async def _beat(self) -> None:
        while True:
            now = time.monotonic()
            self.blocked = max(self.blocked, now - self.beat - BEAT_S)
            self.beat = now
            await asyncio.sleep(BEAT_S)
