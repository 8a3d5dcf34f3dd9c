"""Records that travel through the loop: prompts, trajectories with the provenance of every token, groups.

Durable records carry `schema_version`: they are written into checkpoints and read back by later releases.
L is the number of tokens of a trajectory, prompt included.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np

from slimx.data.support import Support

SCHEMA_VERSION = 1


Source = Literal["prompt", "sampled", "inserted"]
Status = Literal["completed", "truncated", "aborted", "failed"]


@dataclass(kw_only=True, slots=True)
class Prompt:
    """One task. Either `messages` (the tokenizer's chat template is applied) or `token_ids`."""

    id: str
    """Unique in its source; stable between runs."""
    messages: list[dict[str, Any]] | None = None
    """Chat turns, `{"role": ..., "content": ...}`."""
    token_ids: list[int] | None = None
    """Ids that are used as they are."""
    answer: str | None = None
    """The text that a verifier compares with; the demonstration itself in supervised fine-tuning."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Anything a hook wants to find again."""
    schema_version: int = SCHEMA_VERSION
    tools: list[dict[str, Any]] | None = None
    """Tools that the chat template shows the model, as JSON schemas."""
    template: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template for this prompt, which go before those of `rollout.template`."""

    @property
    def source(self) -> str | None:
        """Name of the data set that the prompt is from: `metadata.dataset`."""
        name = self.metadata.get("dataset")
        return None if name is None else str(name)


@dataclass(kw_only=True, slots=True)
class Span:
    """A run of tokens `[start, stop)` of one trajectory with one origin."""

    start: int
    stop: int
    source: Source
    """prompt: given; sampled: from an engine; inserted: by a tool, a template or a demonstration."""
    turn: int = 0
    """Number of the turn, from 0."""
    policy: str = "actor"
    """Name of the policy that sampled it."""
    version: int | None = None
    """Weight version that sampled it; None unless sampled."""


@dataclass(kw_only=True, slots=True)
class Turn:
    """A generate hook's account of one turn, for advantages that go by turns."""

    reward: float = 0.0
    """Reward of this turn alone; a trajectory's `reward` is that of the whole."""
    state_key: str | None = None
    """Equal for turns of a group that began in the same state of the environment."""


@dataclass(kw_only=True, slots=True)
class Trajectory:
    """One sequence of tokens that may be trained on, and where each token came from."""

    id: str
    rollout_id: str
    """Shared by all trajectories that one call of the generate hook returned."""
    group_id: str
    index: int
    """Number of the rollout in its group."""
    policy: str = "actor"
    token_ids: np.ndarray
    """int32 [L]."""
    loss_mask: np.ndarray
    """uint8 [L]: 1 where the token is trained."""
    logprobs: np.ndarray
    """float32 [L]: the engine's log-prob of each sampled token; NaN elsewhere."""
    spans: list[Span]
    """Cover [0, L) without gaps, in order."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """temperature, top_p, top_k, seed."""
    support: Support | None = None
    """L positions: the tokens that top-k and top-p kept where a token was sampled under them; `logprobs` are over
    these. None: nothing was ever cut away."""
    routed_experts: np.ndarray | None = None
    """uint8 or uint16 [L-1, moe_layers, k]: logical expert ids by the engine, per input position."""
    teacher_logprobs: np.ndarray | None = None
    """float32 [L]: of the tokens from the first trained one on, under the teacher that an engine serves; NaN elsewhere.
    None: none was asked."""
    teacher_top_ids: np.ndarray | None = None
    """int32 [L, k]: the teacher's likeliest tokens in the place of each token from the first trained one on; 0 before.
    None: none were asked for, as of `teacher_top_logprobs`."""
    teacher_top_logprobs: np.ndarray | None = None
    """float32 [L, k]: their log-probs under the teacher; NaN before the first trained token."""
    turns: list[Turn] = field(default_factory=list)
    """By the number of the turn; empty where the hook says nothing of them."""
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers that hooks logged of it, by name; may be NaN or infinite."""
    status: Status = "completed"
    finish_reason: str | None = None
    """stop, length, abort; for failed: the exception's text."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds by name."""
    metadata: dict[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        for item in fields(self):
            values, count = getattr(self, item.name), length - (item.name == "routed_experts")
            if item.type.startswith(("np.ndarray", "Support")) and values is not None and len(values) != count:
                raise ValueError(
                    f"trajectory {self.id}: {item.name} has {len(values)} entries for {length} tokens, expected {count}"
                )
        if self.support is not None:
            self._check_support(self.support)
        position = 0
        for span in self.spans:
            if span.start != position or span.stop <= span.start:
                raise ValueError(f"trajectory {self.id}: spans do not follow each other at token {position} ({span})")
            if (span.version is None) == (span.source == "sampled"):
                raise ValueError(f"trajectory {self.id}: a span has a version if and only if it was sampled ({span})")
            position = span.stop
        if position != length:
            raise ValueError(f"trajectory {self.id}: spans cover {position} of {length} tokens")

    def _check_support(self, support: Support) -> None:
        missing = support.missing(self.token_ids)
        if len(missing):
            at = int(missing[0])
            raise ValueError(
                f"trajectory {self.id}: token {at} (id {self.token_ids[at]}) is not among the {support.counts[at]} "
                "tokens that top-k and top-p kept there (support)"
            )

    @property
    def oldest_version(self) -> int | None:
        """Weight version of the oldest sampled span; None where nothing was sampled."""
        return min((span.version for span in self.spans if span.version is not None), default=None)

    def versions(self) -> np.ndarray:
        """int64 [L]: the version that sampled each token, -1 elsewhere."""
        out = np.full(len(self.token_ids), -1, dtype=np.int64)
        for span in self.spans:
            if span.version is not None:
                out[span.start : span.stop] = span.version
        return out

    def newest_only(self) -> Trajectory:
        """A copy in which only those sampled tokens are trained that the newest of its versions sampled. Trained tokens
        that no engine sampled stay so."""
        versions = self.versions()
        stale = (versions >= 0) & (versions < versions.max(initial=-1))
        return replace(self, loss_mask=np.where(stale, 0, self.loss_mask).astype(np.uint8))

    def sampled_ids(self) -> np.ndarray:
        """int32: the sampled tokens, in order."""
        return np.concatenate(
            [self.token_ids[s.start : s.stop] for s in self.spans if s.source == "sampled"] or [self.token_ids[:0]]
        )


@dataclass(kw_only=True, slots=True)
class Group:
    """All trajectories of one prompt in one step: the unit of advantages and of the buffer."""

    id: str
    prompt: Prompt
    trajectories: list[Trajectory]
    baseline: float | None = None
    """Reward of a greedy rollout of the same prompt, which is not trained; None where the algorithm wants none."""
    schema_version: int = SCHEMA_VERSION

    def newest_only(self) -> Group:
        """A copy with `newest_only` of each trajectory."""
        return replace(self, trajectories=[trajectory.newest_only() for trajectory in self.trajectories])
