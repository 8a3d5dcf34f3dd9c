"""Records of the training loop: prompts, trajectories with the provenance of every token, and groups.

Durable records have a `schema_version`, because they are written to checkpoints and read by later releases. L is the
number of tokens of a trajectory, including the prompt.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field, fields, replace
from typing import Literal

import numpy as np

from slimx.data.sampling_support import Support
from slimx.json_types import Json

SCHEMA_VERSION = 1


Source = Literal["prompt", "sampled", "inserted"]
Status = Literal["completed", "truncated", "aborted", "failed"]


@dataclass(kw_only=True, slots=True)
class Prompt:
    """One task, with either `messages` (to which the tokenizer's chat template is applied) or `token_ids`."""

    id: str
    """Identifier that is unique in the prompt's source and stable across runs."""
    messages: list[Json] | None = None
    """Chat messages, each `{"role": ..., "content": ...}`."""
    token_ids: list[int] | None = None
    """Token ids that are passed to the engine unchanged, instead of `messages`."""
    answer: str | None = None
    """Reference answer with which a verifier compares responses; in supervised fine-tuning, the demonstration to learn
    from."""
    metadata: Json = field(default_factory=dict)
    """Arbitrary values for hooks. The key `dataset` contains the name of the prompt's data set."""
    schema_version: int = SCHEMA_VERSION
    tools: list[Json] | None = None
    """Tools that the chat template renders, as JSON schemas."""
    template: Json = field(default_factory=dict)
    """Arguments of the chat template for this prompt, which override those of `rollout.template`."""

    @property
    def source(self) -> str | None:
        """Name of the prompt's data set: `metadata.dataset`, or None if that is not set."""
        name = self.metadata.get("dataset")
        return None if name is None else str(name)


@dataclass(kw_only=True, slots=True)
class Span:
    """Consecutive tokens `[start, stop)` of a trajectory that have the same origin."""

    start: int
    stop: int
    source: Source
    """Origin of the tokens: the prompt (`prompt`), an engine (`sampled`), or a tool, a template or a demonstration
    (`inserted`)."""
    turn: int = 0
    """Index of the turn to which the tokens belong."""
    policy: str = "actor"
    """Name of the policy that sampled the tokens."""
    version: int | None = None
    """Version of the weights that sampled the tokens; None if they were not sampled."""


@dataclass(kw_only=True, slots=True)
class Turn:
    """Reward and state of one turn, which a generate hook sets so that advantages can be computed per turn."""

    reward: float = 0.0
    """Reward of this turn alone; the trajectory's `reward` covers all turns."""
    state_key: str | None = None
    """Key shared by all turns of a group that began in the same environment state; None if no state was reported."""


@dataclass(kw_only=True, slots=True)
class Image:
    """An image in a trajectory, as the processor of the model prepared it."""

    start: int
    """Index of the first of its placeholder tokens in the trajectory."""
    stop: int
    """Index after the last of these tokens."""
    grid: tuple[int, int, int]
    """Numbers of the image's patches along time, height and width."""
    digest: str
    """Digest of the prepared pixels, which is their name in the run's image store."""


@dataclass(kw_only=True, slots=True)
class Trajectory:
    """A sequence of tokens for training, with the origin of each token."""

    id: str
    rollout_id: str
    """Id shared by all trajectories that one call of the generate hook returns."""
    group_id: str
    index: int
    """Index of the rollout in its group."""
    policy: str = "actor"
    token_ids: np.ndarray
    """int32 [L]: ids of all tokens, including the prompt's."""
    loss_mask: np.ndarray
    """uint8 [L]: 1 at trained tokens, else 0."""
    logprobs: np.ndarray
    """float32 [L]: the engine's log-probs of sampled tokens; NaN at other tokens."""
    spans: list[Span]
    """Spans that cover [0, L) without gaps, in order."""
    sampling: Json = field(default_factory=dict)
    """Sampling parameters: temperature, top_p, top_k, seed."""
    support: Support | None = None
    """For L positions, the tokens that top-k and top-p left for sampling, over which `logprobs` are normalized; the
    whole vocabulary at positions that were not sampled. None: the whole vocabulary at all positions."""
    routed_experts: np.ndarray | None = None
    """uint8 or uint16 [L-1, layers, k]: the engine's logical expert ids for each input position and decoder layer."""
    teacher_logprobs: np.ndarray | None = None
    """float32 [L]: log-probs of the tokens under a served teacher, from the first trained token on; NaN before it. None
    if they were not requested."""
    teacher_top_ids: np.ndarray | None = None
    """int32 [L, k]: the teacher's top-k token ids at each position from the first trained token on, 0 before it. None,
    like `teacher_top_logprobs`, if they were not requested."""
    teacher_top_logprobs: np.ndarray | None = None
    """float32 [L, k]: the teacher's log-probs of `teacher_top_ids`; NaN before the first trained token."""
    images: list[Image] = field(default_factory=list)
    """Images of the trajectory, in the order of their placeholder tokens."""
    turns: list[Turn] = field(default_factory=list)
    """Data about each of the trajectory's turns, in order; empty if the hook provides none."""
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    """Values that hooks logged for the trajectory, by name; may be NaN or infinite."""
    status: Status = "completed"
    finish_reason: str | None = None
    """Reason why generation ended: stop, length or abort. For a failed trajectory, the text of the exception."""
    timings: dict[str, float] = field(default_factory=dict)
    """Durations in seconds by name; for example, `generate` is the time spent on the engines' completions."""
    metadata: Json = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        for name in PER_TOKEN:
            values = getattr(self, name)
            count = length - 1 if name == "routed_experts" else length
            if values is not None and len(values) != count:
                raise ValueError(
                    f"trajectory {self.id}: {name} has {len(values)} entries instead of {count} (tokens: {length})"
                )
        if self.support is not None:
            self._check_support(self.support)
        position = 0
        for span in self.spans:
            if span.start != position or span.stop <= span.start:
                raise ValueError(f"trajectory {self.id}: spans are not contiguous at token {position} ({span})")
            if (span.version is None) == (span.source == "sampled"):
                raise ValueError(f"trajectory {self.id}: a span has a version if and only if it was sampled ({span})")
            position = span.stop
        if position != length:
            raise ValueError(f"trajectory {self.id}: spans cover {position} of {length} tokens")

    def _check_support(self, support: Support) -> None:
        missing = support.missing(self.token_ids)
        if len(missing):
            index = int(missing[0])
            raise ValueError(
                f"trajectory {self.id}: support lacks the id {self.token_ids[index]} of token {index} (number of "
                f"ids left there by top-k and top-p: {support.counts[index]})"
            )

    @property
    def length(self) -> int:
        """Number of tokens, including the prompt's."""
        return len(self.token_ids)

    @property
    def sampled_tokens(self) -> int:
        return sum(span.stop - span.start for span in self._sampled())

    @property
    def trained_tokens(self) -> int:
        """Number of trained tokens, without the first token, which is not predicted."""
        return int(np.count_nonzero(self.loss_mask[1:]))

    @property
    def turn_count(self) -> int:
        """Number of turns in which tokens were sampled."""
        return len({span.turn for span in self._sampled()})

    @property
    def oldest_version(self) -> int | None:
        """Version of the oldest weights that sampled a token; None if nothing was sampled."""
        return min((span.version for span in self.spans if span.version is not None), default=None)

    @property
    def mixed(self) -> bool:
        """True if more than one version of the weights sampled tokens."""
        return len({span.version for span in self._sampled()}) > 1

    def _sampled(self) -> list[Span]:
        return [span for span in self.spans if span.source == "sampled"]

    def versions(self) -> np.ndarray:
        """Returns the version of the weights that sampled each token, int64 [L]; -1 at tokens that were not sampled."""
        out = np.full(len(self.token_ids), -1, dtype=np.int64)
        for span in self.spans:
            if span.version is not None:
                out[span.start : span.stop] = span.version
        return out

    def newest_only(self) -> Trajectory:
        """Returns a copy whose loss mask excludes tokens sampled by weights older than the trajectory's newest version,
        or the trajectory itself if there are none. Trained tokens that were not sampled remain in the mask. Loads all
        columns of a stored trajectory."""
        if not self.mixed:
            return self
        versions = self.versions()
        stale = (versions >= 0) & (versions < versions.max(initial=-1))
        return replace(self, loss_mask=np.where(stale, 0, self.loss_mask).astype(np.uint8))

    def bare(self) -> Trajectory:
        """Returns a copy with only what a trainer rank needs of the trajectory."""
        bare = copy(self)
        bare.metadata = bare.metrics = bare.timings = {}
        return bare

    def sampled_ids(self) -> np.ndarray:
        """Returns the ids of the sampled tokens in order, int32."""
        return np.concatenate(
            [self.token_ids[:0], *(self.token_ids[span.start : span.stop] for span in self._sampled())]
        )


PER_TOKEN = [item.name for item in fields(Trajectory) if str(item.type).startswith(("np.ndarray", "Support"))]
"""Fields of a trajectory with one entry for each token, or for each token but the last (`routed_experts`)."""


@dataclass(kw_only=True, slots=True)
class Group:
    """All trajectories of one prompt in one step: the unit for which advantages are computed and which the buffer
    stores."""

    id: str
    prompt: Prompt
    trajectories: list[Trajectory]
    baseline: float | None = None
    """Reward of a greedy rollout of the prompt, a rollout that is not trained on; None if the algorithm does not need
    it."""
    schema_version: int = SCHEMA_VERSION

    def newest_only(self) -> Group:
        """Returns a copy in which no trajectory trains on tokens sampled by weights older than its newest version
        (`Trajectory.newest_only`)."""
        return replace(self, trajectories=[trajectory.newest_only() for trajectory in self.trajectories])
