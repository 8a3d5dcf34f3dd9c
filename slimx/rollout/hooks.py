"""The hooks that a user writes, and their contexts.

    async def generate(ctx: RolloutContext, prompt: Prompt) -> Trajectory | list[Trajectory]
    async def reward(ctx: RewardContext, trajectory: Trajectory) -> float | dict[str, float]
    async def reward(ctx: RewardContext, group: Group) -> list[float | dict[str, float]]     # reward.scope: group
    def keep(group: Group) -> bool | str

`slimx.rollout.hook_loading` imports and checks them before a run starts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from slimx.config.sections.policies import ACTOR
from slimx.data.chat.responses import Response, final_answer
from slimx.data.chat.tokens import PromptIds, encode_turn
from slimx.data.records import Group, Prompt, Trajectory
from slimx.environments.processes import Environments
from slimx.errors import SlimxError
from slimx.json_types import Json
from slimx.observability.tracking.metrics import as_number
from slimx.observability.tracking.names import check_hook_name
from slimx.rewards.context import Engines
from slimx.rollout.client.completion import Completion
from slimx.rollout.client.request import GenerationRequest
from slimx.rollout.draft import Draft

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class AgentServer(Protocol):
    """The run's chat completion server, as a generate hook sees it."""

    context: int
    """Maximum number of tokens of a trajectory that can be trained."""

    def session(self, session: object) -> AbstractAsyncContextManager[str]:
        """Serves the session of one rollout inside the block; yields its base URL."""
        ...

    async def stop(self) -> None: ...


ENGINE_DEADLINE = "engine deadline"
"""Failure reason of a rollout if engines did not respond to a request within `rollout.request_deadline`."""


class GivenUp(SlimxError):
    """Raised by a generate hook to give up its rollout, which is counted under `reason`."""

    def __init__(self, reason: str, text: str):
        super().__init__(text, code="hooks.given_up", about=reason)
        self.reason = reason


class CompletionStream(Protocol):
    """The pieces of one completion, such as `slimx.rollout.client.stream.TokenStream`."""

    def __aiter__(self) -> AsyncIterator[Completion]: ...

    @property
    def completion(self) -> Completion:
        """The tokens received so far. Raises SlimxError if there are none."""
        ...


class Generator(Protocol):
    """A source of completions: the client, or a wrapper of it for one rollout."""

    async def generate(self, request: GenerationRequest) -> Completion: ...

    def stream(self, request: GenerationRequest) -> AbstractAsyncContextManager[CompletionStream]: ...


@dataclass(frozen=True, slots=True)
class RolloutEngine:
    """The engines as one rollout sees them: sampling parameters and seed are filled in."""

    client: Generator | None
    sampling: Json
    seed: int
    routed_experts: bool
    affinity: str | None = None
    """As in `GenerationRequest`."""
    policy: str = ACTOR
    """Name of the policy that they serve."""

    async def generate(self, token_ids: Sequence[int], sampling: Json | None = None, *, turn: int = 0) -> Completion:
        """Continues `token_ids`. `sampling` overrides single parameters. `turn`: index of the turn, which changes the
        seed."""
        request = self._request(token_ids, sampling, turn)
        del token_ids  # a list takes ten times the memory of the request, which may wait for a slot
        return await self._client().generate(request)

    def stream(
        self, token_ids: Sequence[int], sampling: Json | None = None, *, turn: int = 0
    ) -> AbstractAsyncContextManager[CompletionStream]:
        """Samples like `generate`; tokens can be read while they are sampled:

        async with ctx.engine.stream(draft.token_ids) as stream:
            async for piece in stream:  # a Completion of the new tokens
                ...
        draft.add_sampled(stream.completion)
        """
        return self._client().stream(self._request(token_ids, sampling, turn))

    def _request(self, token_ids: Sequence[int], sampling: Json | None, turn: int) -> GenerationRequest:
        merged = {**self.sampling, **(sampling or {})}
        seed = seed_of(self.seed, turn)
        return GenerationRequest(token_ids, merged, seed, self.routed_experts, self.affinity, self.policy)

    def _client(self) -> Generator:
        if self.client is None:
            raise SlimxError(
                "this run has no engines (rollout.engines is empty), but its generate hook requested a completion",
                code="hooks.no_engines",
                about="rollout.engines",
            )
        return self.client


class _Logging:
    """The part of a context with which a hook logs numbers."""

    __slots__ = ()
    metrics: dict[str, float]

    def log(self, name: str, value: float) -> None:
        """Logs a number of this call, once per name; docs/metrics.md describes how the numbers of a step are
        aggregated.

        Raises SlimxError for a reserved or malformed name, a name that was logged before, and a value that is not a
        number.
        """
        check_hook_name(name)
        if name in self.metrics:
            raise logged_twice(name)
        self.metrics[name] = as_number(name, value)

    def add(self, name: str, value: float) -> None:
        """Adds to a number of this call, which starts at 0, e.g. a count over several parts of a rollout. Raises like
        `log`."""
        check_hook_name(name)
        self.metrics[name] = self.metrics.get(name, 0.0) + as_number(name, value)


def logged_twice(name: str) -> SlimxError:
    """Returns the error for a second value of `name` for one trajectory."""
    return SlimxError(
        f"ctx.log got {name} twice for one trajectory; add the values up, or use another name for the second",
        code="metrics.twice",
        about=name,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutContext(_Logging):
    """One rollout of one prompt."""

    engine: RolloutEngine
    """Engines of the policy `policy`."""
    tokenizer: PreTrainedTokenizerBase
    """Hugging Face tokenizer of its model."""
    version: int
    """Newest weight version when the rollout began."""
    evaluation: bool
    """True in an evaluation: no training, and sampling is greedy by default."""
    seed: int
    """Unique per rollout, and the same in a resumed run."""
    group_id: str
    index: int
    """Index of the rollout in its group."""
    engines: Engines = field(default_factory=dict)
    """Clients of the frozen groups of `rollout.engines`, by name."""
    address: str = ""
    """URL of the policy's router, "" without one. Use `engine` for tokens that can be trained."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """HTTP headers that requests to `address` need."""
    proxy: AgentServer | None = None
    """The run's OpenAI-compatible server, through which agents call the policy `actor`; None if nothing is sampled, and
    for further policies."""
    environments: Environments = field(default_factory=Environments)
    """Factory of environments, in the driver or in processes."""
    prompt_ids: PromptIds | None = None
    """Token ids of the group's prompt, which is encoded once."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers logged by the hook, which become metrics of the rollout's first trajectory."""
    policy: str = ACTOR
    """Name of the policy that `engine` samples from and whose trajectories `draft` begins."""
    policies: Mapping[str, RolloutContext] = field(default_factory=dict)
    """The same rollout for every trained policy, by the policy's name or role (section policies)."""

    def draft(self, prompt: Prompt | Sequence[int], *, suffix: str = "") -> Draft:
        """Begins a trajectory with the prompt's tokens; `suffix` distinguishes several trajectories of one rollout."""
        if isinstance(prompt, Prompt):
            prompt = (self.prompt_ids or PromptIds(self.tokenizer)).of(prompt)
        rollout = f"{self.group_id}/{self.index}"
        return Draft(
            prompt,
            id=rollout + suffix,
            rollout_id=rollout,
            group_id=self.group_id,
            index=self.index,
            seed=self.seed,
            sampling=self.engine.sampling,
            policy=self.policy,
        )

    def turn(self, content: str, *, after: Sequence[int], role: str = "user") -> list[int]:
        """Returns the token ids of a turn that the model did not sample, up to the start of its next turn; `after`: all
        previous tokens."""
        return encode_turn(self.tokenizer, content, role=role, after=after)


@dataclass(frozen=True, slots=True)
class RewardContext(_Logging):
    """One trajectory, or one group, to be judged."""

    prompt: Prompt
    tokenizer: PreTrainedTokenizerBase
    text: str
    """The sampled tokens as text, without special tokens and with a line break between turns; of a group's first
    trajectory."""
    evaluation: bool
    engines: Engines = field(default_factory=dict)
    """Clients of the frozen groups of `rollout.engines`, by name: a judge, a reward model."""
    responses: list[Response] = field(default_factory=list)
    """Turns and final answer of each judged trajectory; by default one turn, `text`."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers logged by the hook, which become metrics of the trajectory, or of a group's first one."""

    def __post_init__(self) -> None:
        if not self.responses:
            self.responses.append(Response((self.text,), final_answer(self.text)))

    @property
    def turns(self) -> tuple[str, ...]:
        """Text of each sampled turn; of a group's first trajectory."""
        return self.responses[0].turns

    @property
    def final_answer(self) -> str:
        """End of the last turn, after its thinking; "" if the thinking never ended."""
        return self.responses[0].final_answer

    @property
    def texts(self) -> list[str]:
        """`text` of each judged trajectory."""
        return [response.text for response in self.responses]

    @property
    def final_answers(self) -> list[str]:
        """`final_answer` of each judged trajectory."""
        return [response.final_answer for response in self.responses]


Generate = Callable[[RolloutContext, Prompt], Coroutine[None, None, Trajectory | list[Trajectory]]]
Value = float | Mapping[str, float]  # covariant, like Sequence below: accepts list[float] and dict[str, int]
Reward = Callable[[RewardContext, Any], Coroutine[None, None, Value | Sequence[Value]]]
Keep = Callable[[Group], bool | str]


def seed_of(*parts: int) -> int:
    """Returns a sampling seed in [0, 2^31) derived from integers, the same on every machine."""
    return int(np.random.SeedSequence([part & 0xFFFFFFFF for part in parts]).generate_state(1)[0] >> 1)
