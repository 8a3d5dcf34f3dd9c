"""Types of the hooks that a user writes, and the contexts that are passed to them.

    async def generate(ctx: RolloutContext, prompt: Prompt) -> Trajectory | list[Trajectory]
    async def reward(ctx: RewardContext, trajectory: Trajectory) -> float | dict[str, float]
    async def reward(ctx: RewardContext, group: Group) -> list[float | dict[str, float]]     # reward.scope: group
    def keep(group: Group) -> bool | str

Each may be a plain or an async function (slimx.rollout.hook_loading).

`slimx.rollout.hook_loading` imports and checks the configured hooks before a run starts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from slimx.config.sections.policies import ACTOR
from slimx.data.chat.responses import Response, final_answer
from slimx.data.chat.tokens import PromptIds, encode_turn
from slimx.data.records import Group, Image, Prompt, Trajectory
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
    """Interface through which generate hooks use the run's chat completion server."""

    context: int
    """Maximum length, in tokens, of a trajectory that can be trained on."""

    def session(self, session: object) -> AbstractAsyncContextManager[str]:
        """Serves `session`, the conversations of one rollout, inside the block; yields the base URL for its agent."""

    async def stop(self) -> None: ...


ENGINE_DEADLINE = "engine deadline"
"""Failure reason of a rollout if engines did not respond to a request within `rollout.request_deadline`."""


class GivenUp(SlimxError):
    """Raised by a generate hook to give up its rollout, which is then counted as failed under `reason`."""

    def __init__(self, reason: str, text: str):
        super().__init__(text, code="hooks.given_up", about=reason)
        self.reason = reason


class CompletionStream(Protocol):
    """Interface of a streamed completion: iteration yields its pieces as they arrive; see
    `slimx.rollout.client.stream.TokenStream`."""

    def __aiter__(self) -> AsyncIterator[Completion]: ...

    @property
    def completion(self) -> Completion:
        """The tokens received so far. Raises SlimxError if there are none."""


class Generator(Protocol):
    """Interface of a source of completions: the engine client, or a wrapper around it for one rollout."""

    async def generate(self, request: GenerationRequest) -> Completion: ...

    def stream(self, request: GenerationRequest) -> AbstractAsyncContextManager[CompletionStream]: ...


@dataclass(frozen=True, slots=True)
class RolloutEngine:
    """The engines as one rollout uses them, with the rollout's default sampling parameters and its seed."""

    client: Generator | None
    sampling: Json
    seed: int
    routed_experts: bool
    affinity: str | None = None
    """Affinity key: requests with the same key go to the same engine if `rollout.affinity` is group or rollout."""
    policy: str = ACTOR
    """Name of the policy that the engines sample from."""

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Json | None = None,
        *,
        turn: int = 0,
        images: Sequence[Image] = (),
    ) -> Completion:
        """Samples a continuation of `token_ids`.

        `sampling`: parameters that override the rollout's defaults. `turn`: index of the turn, from which the request's
        seed is derived together with the rollout's seed. `images`: images in the tokens, as in `Draft.images`.
        """
        request = self._request(token_ids, sampling, turn, images)
        del token_ids  # the request may wait for a slot, and this list takes ten times its memory
        return await self._client().generate(request)

    def stream(
        self,
        token_ids: Sequence[int],
        sampling: Json | None = None,
        *,
        turn: int = 0,
        images: Sequence[Image] = (),
    ) -> AbstractAsyncContextManager[CompletionStream]:
        """Samples like `generate`, and returns a stream from which tokens can be read while they are sampled.

        async with ctx.engine.stream(draft.token_ids) as stream:
            async for piece in stream:  # a Completion with the new tokens
                ...
        draft.add_sampled(stream.completion)
        """
        return self._client().stream(self._request(token_ids, sampling, turn, images))

    def _request(
        self, token_ids: Sequence[int], sampling: Json | None, turn: int, images: Sequence[Image]
    ) -> GenerationRequest:
        merged = {**self.sampling, **(sampling or {})}
        seed = seed_of(self.seed, turn)
        shown = tuple(images)
        return GenerationRequest(token_ids, merged, seed, self.routed_experts, self.affinity, self.policy, shown)

    def _client(self) -> Generator:
        if self.client is None:
            raise SlimxError(
                "the generate hook requested a completion, but this run has no engines; add a group to rollout.engines",
                code="hooks.no_engines",
                about="rollout.engines",
            )
        return self.client


class _Logging:
    """Base class of hook contexts; provides the methods with which a hook logs metrics."""

    __slots__ = ()
    metrics: dict[str, float]

    def log(self, name: str, value: float) -> None:
        """Logs a number for this call of the hook, at most once per name; docs/metrics.md describes how the numbers of
        a step are aggregated.

        Raises SlimxError for a reserved or malformed name, a name that was logged before, and a value that is not a
        number.
        """
        check_hook_name(name)
        if name in self.metrics:
            raise logged_twice(name)
        self.metrics[name] = as_number(name, value)

    def add(self, name: str, value: float) -> None:
        """Adds `value` to a number that is logged for this call of the hook and starts at 0, e.g. to count events of a
        rollout.

        Raises SlimxError for a reserved or malformed name, and for a value that is not a number.
        """
        check_hook_name(name)
        self.metrics[name] = self.metrics.get(name, 0.0) + as_number(name, value)


def logged_twice(name: str) -> SlimxError:
    """Returns the error for a second value of the metric `name` for one trajectory."""
    return SlimxError(
        f"metric {name} was logged twice for one trajectory; add up the values with ctx.add, or use different names",
        code="metrics.twice",
        about=name,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutContext(_Logging):
    """Context of one rollout of one prompt, passed to the generate hook."""

    engine: RolloutEngine
    """Engines of the policy `policy`, with the sampling parameters and the seed of this rollout."""
    tokenizer: PreTrainedTokenizerBase
    """Hugging Face tokenizer of the policy's model."""
    version: int
    """Newest weight version of the policy when the rollout started."""
    evaluation: bool
    """True in an evaluation, whose rollouts are not trained on and are sampled greedily by default."""
    seed: int
    """Seed of this rollout, different from those of all other rollouts and the same in a resumed run."""
    group_id: str
    index: int
    """Index of the rollout in its group."""
    engines: Engines = field(default_factory=dict)
    """Clients of the engine groups in `rollout.engines` that serve frozen models, by group name."""
    address: str = ""
    """URL of the policy's router, or "" without a router. Tokens that are to be trained on must come from `engine`."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """HTTP headers that requests to `address` must contain."""
    proxy: AgentServer | None = None
    """The run's OpenAI-compatible server, through which agents call the policy `actor`; None if nothing is sampled, and
    for policies other than `actor`."""
    environments: Environments = field(default_factory=Environments)
    """Factory of environments, which run in the driver or in separate processes."""
    prompt_ids: PromptIds | None = None
    """Token ids of the group's prompt, which is encoded once for all rollouts."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics logged by the hook, which are added to the metrics of the rollout's first trajectory."""
    policy: str = ACTOR
    """Name of the policy that `engine` samples from and whose trajectories `draft` creates."""
    policies: Mapping[str, RolloutContext] = field(default_factory=dict)
    """Contexts of the same rollout for all trained policies, by policy name or role (configuration section
    policies)."""

    def draft(self, prompt: Prompt | Sequence[int], *, suffix: str = "") -> Draft:
        """Creates a trajectory that starts with the prompt's tokens.

        `suffix`: end of the trajectory's id, which distinguishes several trajectories of one rollout.
        """
        images: list[Image] = []
        if isinstance(prompt, Prompt):
            encoded = self.prompt_ids or PromptIds(self.tokenizer)
            prompt = encoded.of(prompt)
            images = encoded.images
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
            images=images,
        )

    def turn(self, content: str, *, after: Sequence[int], role: str = "user") -> list[int]:
        """Returns the token ids of a turn that the model does not sample, up to the start of the model's next turn.

        `content`: text of the turn. `after`: all tokens before the turn.
        """
        return encode_turn(self.tokenizer, content, role=role, after=after)

    async def turn_with_images(
        self, content: Sequence[Json], *, after: Sequence[int], role: str = "user"
    ) -> tuple[list[int], list[Image]]:
        """Returns the token ids of a turn as `turn` does, and the images in it, which `Draft.add_inserted` needs.

        `content`: parts of the turn, {"type": "text", "text": TEXT} and {"type": "image", "image": IMAGE}. An image is
        a PIL image, a uint8 array [height, width, channels], the bytes of an image file, a data URI or a path.
        """
        return await (self.prompt_ids or PromptIds(self.tokenizer)).turn(content, role, after)


class _Decoding(_Logging):
    """Base class of `RewardContext`; decodes the responses when a hook first reads their text, because many never
    do."""

    __slots__ = ("_reads",)
    _reads: Sequence[Callable[[], Response]]

    def read_later(self, reads: Sequence[Callable[[], Response]]) -> None:
        """Replaces the responses by those that `reads` return. They are called when a hook first needs a text."""
        object.__setattr__(self, "_reads", reads)
        object.__delattr__(self, "text")
        object.__delattr__(self, "responses")

    def __getattr__(self, name: str) -> object:
        if name not in ("text", "responses"):
            raise AttributeError(name)
        responses = [read() for read in self._reads]
        object.__setattr__(self, "responses", responses)
        object.__setattr__(self, "text", responses[0].text)
        return getattr(self, name)


@dataclass(frozen=True, slots=True)
class RewardContext(_Decoding):
    """Context of one call of a reward hook, which computes the reward of one trajectory or one group."""

    prompt: Prompt
    tokenizer: PreTrainedTokenizerBase
    text: str
    """Text of the sampled tokens, without special tokens and with a line break between turns. For a group, the text of
    its first trajectory."""
    evaluation: bool
    engines: Engines = field(default_factory=dict)
    """Clients of the engine groups in `rollout.engines` that serve frozen models, such as a judge or a reward model, by
    group name."""
    responses: list[Response] = field(default_factory=list)
    """Turns and final answer of each trajectory; defaults to a single turn with `text`."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics logged by the hook. They are added to the metrics of the scored trajectory; if `reward.scope` is group,
    to those of the group's first trajectory."""

    def __post_init__(self) -> None:
        if not self.responses:
            self.responses.append(Response((self.text,), final_answer(self.text)))

    @property
    def turns(self) -> tuple[str, ...]:
        """Text of each sampled turn. For a group, the turns of its first trajectory."""
        return self.responses[0].turns

    @property
    def final_answer(self) -> str:
        """Text of the last turn after the thinking block; "" if that block was not closed."""
        return self.responses[0].final_answer

    @property
    def texts(self) -> list[str]:
        """Text of each trajectory's sampled tokens, in the order of the group."""
        return [response.text for response in self.responses]

    @property
    def final_answers(self) -> list[str]:
        """Final answer of each trajectory (the text of its last turn after the thinking block), in the order of the
        group."""
        return [response.final_answer for response in self.responses]


Generate = Callable[[RolloutContext, Prompt], Coroutine[None, None, Trajectory | list[Trajectory]]]
Value = float | Mapping[str, float]  # covariant, like Sequence below: also matches list[float] and dict[str, int]
Reward = Callable[[RewardContext, Any], Coroutine[None, None, Value | Sequence[Value]]]
Keep = Callable[[Group], bool | str | Awaitable[bool | str]]


def seed_of(*parts: int) -> int:
    """Returns a sampling seed in [0, 2^31) that is derived from `parts`, the same on every machine."""
    pool = np.random.SeedSequence(np.array([part & 0xFFFFFFFF for part in parts], np.uint32)).pool
    # The first word of `generate_state`, whose call takes as long as the rest.
    word = (int(pool[0]) ^ 0x8B51F9DD) * (0x8B51F9DD * 0x58F38DED & 0xFFFFFFFF) & 0xFFFFFFFF
    return (word ^ word >> 16) >> 1
