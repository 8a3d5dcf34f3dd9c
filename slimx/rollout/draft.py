"""Builds trajectories in generate hooks, token by token, and records whether each token was sampled or inserted."""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from slimx.config.sections.policies import ACTOR
from slimx.data.records import Image, Span, Status, Trajectory, Turn
from slimx.data.sampling_support import Support
from slimx.errors import SlimxError
from slimx.json_types import Json
from slimx.rollout.client.completion import Completion
from slimx.rollout.client.request import compact

_STATUS: dict[str, Status] = {"stop": "completed", "length": "truncated", "abort": "aborted"}


class Draft:
    """A trajectory under construction, for generate hooks.

    `add_sampled` appends a completion from an engine; `add_inserted` appends other tokens, such as the output of a tool
    or the text of a chat template.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        *,
        id: str,
        rollout_id: str,
        group_id: str,
        index: int,
        seed: int,
        sampling: Json,
        policy: str = ACTOR,
        images: Sequence[Image] = (),
    ):
        self.id = id
        self.rollout_id = rollout_id
        self.group_id = group_id
        self.index = index
        self.sampling = {**sampling, "seed": seed}
        self.policy = policy
        self.images = list(images)
        """Images so far, which requests need together with `token_ids`."""
        self.turn = 0
        self.timings = {"generate": 0.0}
        # Thousands of rollouts wait for tools at once: arrays take 9 bytes per token, lists of numbers 90.
        self._ids = compact(prompt_ids)[:]  # a copy, because it grows
        self._logprobs = array("f", [float("nan")]) * len(self._ids)
        self._trained = bytearray(len(self._ids))
        self._spans = [Span(start=0, stop=len(self._ids), source="prompt")]
        self._supports: list[Support | int] = [len(self._ids)]
        """For each part of the trajectory, in order: the candidate sets from which its tokens were sampled, or the
        number of its tokens if their sampling was not restricted."""
        self._routes: np.ndarray | None = None
        self._finish: str | None = None
        self._turns: dict[int, Turn] = {}

    @property
    def token_ids(self) -> list[int]:
        """All tokens so far, which form the prompt of the next request."""
        return list(self._ids)

    def add_sampled(self, completion: Completion, *, train: bool = True) -> None:
        """Appends the tokens of a completion. `train=False` excludes them from the loss."""
        if inspect.isawaitable(completion):
            raise SlimxError(
                f"trajectory {self.id}: add_sampled received a value of type {type(completion).__name__}; await the "
                "completion, as in draft.add_sampled(await ctx.engine.generate(draft.token_ids))",
                code="draft.awaitable",
                about=self.id,
            )
        if completion.policy != self.policy:
            raise SlimxError(
                f"trajectory {self.id} belongs to policy {self.policy}, but policy {completion.policy} sampled these "
                "tokens; add these tokens with add_inserted, which excludes tokens from the loss, or to a draft of the "
                "policy that sampled them (ctx.policies[NAME].draft)",
                code="draft.policy",
                about=self.id,
            )
        if self.turn and completion.temperature != self.sampling["temperature"]:
            raise SlimxError(
                f"trajectory {self.id} was sampled at temperatures {self.sampling['temperature']} and "
                f"{completion.temperature}; use the same temperature for all turns, or return one trajectory per turn",
                code="draft.temperature",
                about=self.id,
            )
        # The trainer divides its logits by this temperature, which a hook may choose, not by the configured one.
        self.sampling["temperature"] = completion.temperature
        start = len(self._ids)
        self._ids.extend(compact(completion.token_ids.tolist()))
        self._logprobs.frombytes(completion.logprobs.astype(np.float32).tobytes())
        self._trained += bytes([train]) * len(completion.token_ids)
        for first, last, version in completion.versions:
            self._spans.append(
                Span(
                    start=start + first,
                    stop=start + last,
                    source="sampled",
                    turn=self.turn,
                    policy=self.policy,
                    version=version,
                )
            )
        self._supports.append(len(completion.token_ids) if completion.support is None else completion.support)
        # A completion contains the experts of its whole input, so the last one covers all earlier turns.
        self._routes = completion.routed_experts
        self._finish = completion.finish_reason
        self.timings["generate"] += completion.seconds
        self.turn += 1

    def describe_turn(self, *, state_key: str | None = None, reward: float = 0.0) -> None:
        """Sets the state key and the reward of the last sampled turn.

        `state_key`: identifies the state in which the turn began. `reward`: reward of the turn alone.
        """
        if not self.turn:
            raise SlimxError(
                f"describe_turn was called for trajectory {self.id} before its first sampled turn; call add_sampled "
                "first",
                code="draft.turn",
                about=self.id,
            )
        self._turns[self.turn - 1] = Turn(reward=reward, state_key=state_key)

    def add_inserted(self, token_ids: Sequence[int], *, train: bool = False, images: Sequence[Image] = ()) -> None:
        """Appends tokens that no engine sampled, such as a tool's output or the next user turn.

        `train`: True to include them in the loss, as for a demonstration. `images`: images whose placeholder tokens are
        among the tokens, with indices counted from the first of these tokens.
        """
        if len(token_ids) == 0:
            return
        start = len(self._ids)
        for image in images:
            self.images.append(replace(image, start=start + image.start, stop=start + image.stop))
        self._ids.extend(compact(token_ids))
        self._logprobs.extend(array("f", [float("nan")]) * len(token_ids))
        self._trained += bytes([train]) * len(token_ids)
        self._supports.append(len(token_ids))
        self._spans.append(Span(start=start, stop=len(self._ids), source="inserted", turn=self.turn))

    def _support(self, end: int) -> Support | None:
        """Returns the candidate sets from which the first `end` tokens were sampled; None if no token's sampling was
        restricted."""
        if not any(isinstance(part, Support) and len(part.ids) for part in self._supports):
            return None
        parts = [part if isinstance(part, Support) else Support.everything(part) for part in self._supports]
        return Support.join(parts).take(np.arange(end))

    def finish(self, *, metadata: Json | None = None) -> Trajectory:
        """Returns the trajectory with `metadata`.

        Drops the tokens after the last one that was sampled or is trained on, because they have neither a loss nor
        routed experts.
        """
        end = self._trained.rfind(1) + 1
        for span in self._spans:
            if span.source == "sampled":
                end = max(end, span.stop)
        if end == 0:
            raise SlimxError(
                f"trajectory {self.id} has neither a sampled nor a trained token; call add_sampled before finish",
                code="draft.empty",
                about=self.id,
            )
        spans = [span for span in self._spans if span.start < end]
        if self._routes is not None and len(self._routes) != end - 1:
            raise SlimxError(
                f"trajectory {self.id} has routed experts for {len(self._routes)} positions instead of {end - 1}; "
                "pass draft.token_ids unchanged to every request",
                code="draft.routes",
                about=self.id,
            )
        return Trajectory(
            id=self.id,
            rollout_id=self.rollout_id,
            group_id=self.group_id,
            index=self.index,
            policy=self.policy,
            token_ids=np.frombuffer(self._ids[:end], np.int32),
            loss_mask=np.frombuffer(self._trained[:end], np.uint8),
            logprobs=np.frombuffer(self._logprobs[:end], np.float32),
            spans=spans,
            sampling=self.sampling,
            support=self._support(end),
            routed_experts=self._routes,
            images=[image for image in self.images if image.stop <= end],
            turns=[self._turns.get(index, Turn()) for index in range(self.turn)] if self._turns else [],
            status=_STATUS.get(self._finish or "stop", "completed"),
            finish_reason=self._finish,
            timings=self.timings,
            metadata=metadata or {},
        )
