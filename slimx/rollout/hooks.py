"""The hooks that a user writes, and what they receive.

async def generate(ctx: RolloutContext, prompt: Prompt) -> Trajectory | list[Trajectory]
async def reward(ctx: RewardContext, trajectory: Trajectory) -> float | dict[str, float]
async def reward(ctx: RewardContext, group: Group) -> list[float | dict[str, float]]     # reward.scope: group
def keep(group: Group) -> bool | str

`slimx.rollout.hook_loading` imports and checks them before a run starts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from slimx.config.sections.policies import ACTOR
from slimx.data.chat.responses import Response, final_answer
from slimx.data.chat.tokens import PromptIds, encode_turn
from slimx.data.records import Group, Prompt, Trajectory
from slimx.environments.processes import Environments
from slimx.errors import SlimxError
from slimx.observability.tracking.metrics import as_number
from slimx.observability.tracking.names import check_hook_name
from slimx.rollout.client.completion import Completion
from slimx.rollout.client.request import GenerationRequest
from slimx.rollout.client.stream import TokenStream
from slimx.rollout.draft import Draft


class AgentServer(Protocol):
    """The run's server of chat completions, as a generate hook sees it."""

    context: int
    """Tokens of a trajectory that can be trained, at most."""

    def session(self, session: Any) -> AbstractAsyncContextManager[str]:
        """Serve the session of one rollout inside the block; gives its base URL."""
        ...

    async def stop(self) -> None: ...


ENGINE_DEADLINE = "engine deadline"
"""Reason of a rollout one of whose requests the engines did not answer within `rollout.request_deadline`."""


class GivenUp(SlimxError):
    """Raised by a generate hook that gives its rollout up: counted under `reason`."""

    def __init__(self, reason: str, text: str):
        super().__init__(text, code="hooks.given_up", about=reason)
        self.reason = reason


class Generator(Protocol):
    """A source of completions: the client, or one rollout's way to it."""

    async def generate(self, request: GenerationRequest) -> Completion: ...

    def stream(self, request: GenerationRequest) -> AbstractAsyncContextManager[TokenStream]: ...


@dataclass(frozen=True, slots=True)
class RolloutEngine:
    """The engines as one rollout sees them: its own sampling parameters and seed are filled in."""

    client: Generator | None
    sampling: dict[str, Any]
    seed: int
    routed_experts: bool
    affinity: str | None = None
    """As in `GenerationRequest`."""
    policy: str = ACTOR
    """Name of the policy that they serve."""

    async def generate(
        self, token_ids: Sequence[int], sampling: dict[str, Any] | None = None, *, turn: int = 0
    ) -> Completion:
        """Continue `token_ids`. `sampling` overrides single parameters; give each turn its number, so that its seed
        differs."""
        request = self._request(token_ids, sampling, turn)
        del token_ids  # a list takes ten times what the request keeps, and it waits for its turn
        return await self._client().generate(request)

    def stream(
        self, token_ids: Sequence[int], sampling: dict[str, Any] | None = None, *, turn: int = 0
    ) -> AbstractAsyncContextManager[TokenStream]:
        """Sample as `generate` does, with tokens that can be read while they are sampled:

        async with ctx.engine.stream(draft.token_ids) as stream:
            async for piece in stream:  # a Completion of the new tokens
                ...
        draft.add_sampled(stream.completion)
        """
        return self._client().stream(self._request(token_ids, sampling, turn))

    def _request(self, token_ids: Sequence[int], sampling: dict[str, Any] | None, turn: int) -> GenerationRequest:
        merged, seed = {**self.sampling, **(sampling or {})}, seed_of(self.seed, turn)
        return GenerationRequest(token_ids, merged, seed, self.routed_experts, self.affinity, self.policy)

    def _client(self) -> Generator:
        if self.client is None:
            raise SlimxError(
                "this run has no engines (rollout.engines is empty), but its generate hook asked for a completion",
                code="hooks.no_engines",
                about="rollout.engines",
            )
        return self.client


class _Logging:
    """The part of a context by which a hook logs numbers."""

    __slots__ = ()
    metrics: dict[str, float]

    def log(self, name: str, value: float) -> None:
        """Log a number of this call, once per name; docs/metrics.md says how a step's are put together.

        Raises SlimxError for a name of slimx's own or of another form, for one logged before, and for no number."""
        check_hook_name(name)
        if name in self.metrics:
            raise logged_twice(name)
        self.metrics[name] = as_number(name, value)

    def add(self, name: str, value: float) -> None:
        """Add to a number of this call, which begins at 0: for what several parts of a rollout count. Raises as `log`
        does."""
        check_hook_name(name)
        self.metrics[name] = self.metrics.get(name, 0.0) + as_number(name, value)


def logged_twice(name: str) -> SlimxError:
    """The refusal of a second value of `name` for one trajectory."""
    return SlimxError(
        f"ctx.log was given {name} twice for one trajectory; add the values up, or give the second another name",
        code="metrics.twice",
        about=name,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutContext(_Logging):
    """One rollout of one prompt."""

    engine: RolloutEngine
    """Engines of the policy `policy`."""
    tokenizer: Any
    """Hugging Face tokenizer of its model."""
    version: int
    """Newest weight version when the rollout began."""
    evaluation: bool
    """True in an evaluation: sampling is greedy and nothing is trained."""
    seed: int
    """Differs for every rollout, the same in a resumed run."""
    group_id: str
    index: int
    """Number of the rollout in its group."""
    engines: Mapping[str, Any] = field(default_factory=dict)
    """Clients of the frozen groups of `rollout.engines`, by name."""
    address: str = ""
    """URL of the policy's router; "" where there is none. `engine` is the way to tokens that can be trained."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """HTTP headers of requests to `address`, which answers nobody without them."""
    proxy: AgentServer | None = None
    """The run's OpenAI-compatible server, through which agents speak to the policy `actor`; None where nothing is
    sampled, and for further policies."""
    environments: Environments = field(default_factory=Environments)
    """Makes environments, in the driver or in processes."""
    prompt_ids: PromptIds | None = None
    """Token ids of the group's prompt, which is encoded once."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers that the hook logged; they become those of the rollout's first trajectory."""
    policy: str = ACTOR
    """Name of the policy that `engine` samples from, and whose trajectories `draft` begins."""
    policies: Mapping[str, RolloutContext] = field(default_factory=dict)
    """The same rollout as each trained policy sees it, by name of the policy or the role (section policies)."""

    def draft(self, prompt: Prompt | Sequence[int], *, suffix: str = "") -> Draft:
        """Begin a trajectory with the prompt's tokens; `suffix` tells several trajectories of one rollout apart."""
        ids = (self.prompt_ids or PromptIds(self.tokenizer)).of(prompt) if isinstance(prompt, Prompt) else prompt
        rollout = f"{self.group_id}/{self.index}"
        return Draft(
            ids,
            id=rollout + suffix,
            rollout_id=rollout,
            group_id=self.group_id,
            index=self.index,
            seed=self.seed,
            sampling=self.engine.sampling,
            policy=self.policy,
        )

    def turn(self, content: str, *, after: Sequence[int], role: str = "user") -> list[int]:
        """Token ids of a turn that the model did not sample, up to where its next one begins; `after`: all tokens so
        far."""
        return encode_turn(self.tokenizer, content, role=role, after=after)


@dataclass(frozen=True, slots=True)
class RewardContext(_Logging):
    """One trajectory to be judged, or one group."""

    prompt: Prompt
    tokenizer: Any
    text: str
    """The sampled tokens as text, special tokens left out, with a line break between turns; of a group, those of its
    first trajectory."""
    evaluation: bool
    engines: Mapping[str, Any] = field(default_factory=dict)
    """Clients of the frozen groups of `rollout.engines`, by name: a judge, a reward model."""
    responses: list[Response] = field(default_factory=list)
    """Turns and final answer of each trajectory that is judged; of one turn, `text`, where none are given."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers that the hook logged; they become those of the trajectory, of a group those of its first one."""

    def __post_init__(self) -> None:
        if not self.responses:
            self.responses.append(Response((self.text,), final_answer(self.text)))

    @property
    def turns(self) -> tuple[str, ...]:
        """The text of each turn that was sampled; of a group, those of its first trajectory."""
        return self.responses[0].turns

    @property
    def final_answer(self) -> str:
        """The end of the last turn, behind its thinking; "" where the thinking never ended."""
        return self.responses[0].final_answer

    @property
    def texts(self) -> list[str]:
        """`text` of each trajectory that is judged."""
        return [response.text for response in self.responses]

    @property
    def final_answers(self) -> list[str]:
        """`final_answer` of each trajectory that is judged."""
        return [response.final_answer for response in self.responses]


Generate = Callable[[RolloutContext, Prompt], Awaitable[Trajectory | list[Trajectory]]]
Value = float | Mapping[str, float]  # as in Sequence below, so that a type checker takes list[float] and dict[str, int]
Reward = Callable[[RewardContext, Any], Awaitable[Value | Sequence[Value]]]
Keep = Callable[[Group], bool | str]


def seed_of(*parts: int) -> int:
    """A sampling seed in [0, 2^31) from numbers, the same on every machine."""
    return int(np.random.SeedSequence([part & 0xFFFFFFFF for part in parts]).generate_state(1)[0] >> 1)
