"""Checks the values that hooks return before they are trained on or written, and marks failed trajectories."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from types import GenericAlias
from typing import Any, get_type_hints

import msgspec
import numpy as np

from slimx.config.sections.rollout import Rollout
from slimx.data.records import SCHEMA_VERSION, Group, Image, Prompt, Span, Trajectory, Turn
from slimx.data.sampling_support import Support
from slimx.data.saved.codec import decode, encode, to_numpy
from slimx.errors import DeadlineError, SlimxError, raised, safe_repr
from slimx.rollout.client.sending import REQUEST
from slimx.rollout.hooks import ENGINE_DEADLINE, Keep, RolloutContext, logged_twice
from slimx.runtime.clocks import Clock
from slimx.runtime.tasks import within

MAX_LOGPROB = 1e-4
"""Largest accepted log-prob. It is above 0 because rounding can make the log-prob of a token with probability 1
slightly positive."""
MAX_ID = 2**31 - 1
"""Number above which ids do not fit into int32."""
ARRAYS = {np.ndarray, np.ndarray | None, Support | None}
"""Types of the trajectory fields that `_check_tokens` checks; the codec checks all other fields."""

_TYPES = {name: kind for name, kind in get_type_hints(Trajectory).items() if kind not in ARRAYS}
_plain_values = attrgetter(*_TYPES)
_DECODER = msgspec.msgpack.Decoder(GenericAlias(tuple, tuple(_TYPES.values())), ext_hook=to_numpy)


class ReturnCheck:
    """Validator of the trajectories of one rollout, for use after a hook has returned them or may have changed them."""

    def __init__(
        self,
        hook: str,
        group_id: str,
        index: int,
        *,
        vocabularies: Mapping[str, int | None],
        versions: Mapping[str, int],
        sampled: bool,
    ):
        """Stores the limits.

        `hook`: name of the hook, for error messages. `index`: index of the rollout in its group. `vocabularies`:
        vocabulary size of every trained policy's model, None where it is unknown. `versions`: for every policy, the
        newest weight version that engines may have. `sampled`: True if engines sample the tokens, whose log-probs must
        then be valid.
        """
        self.hook = hook
        self.group_id = group_id
        self.index = index
        self.sampled = sampled
        self.vocabularies = vocabularies
        self.versions = versions

    def check(self, trajectories: Sequence[object]) -> None:
        """Raises SlimxError for the first value that cannot be trained on or written."""
        rollout = f"{self.group_id}/{self.index}"
        if not trajectories:
            raise self._error("rollout.returned", rollout, f"returned no trajectory for {rollout}")
        names: list[str] = []
        for trajectory in trajectories:
            if not isinstance(trajectory, Trajectory):
                kind = type(trajectory).__name__
                raise self._error(
                    "rollout.returned",
                    rollout,
                    f"returned an object of type {kind}; return a Trajectory, or a list of trajectories",
                )
            self._check_position(trajectory, rollout)
            self._check_fields(trajectory)
            self._check_tokens(trajectory)
            names.append(trajectory.id)
        if len(set(names)) < len(names):
            name = min(name for name in names if names.count(name) > 1)
            raise self._error(
                "rollout.twice",
                name,
                f"returned two trajectories with the id {name}; give ctx.draft a suffix for each",
            )

    def _check_position(self, trajectory: Trajectory, rollout: str) -> None:
        position = (trajectory.group_id, trajectory.index, trajectory.rollout_id)
        name = trajectory.id
        matches = isinstance(name, str) and name.startswith(rollout)
        if position != (self.group_id, self.index, rollout) or not matches:
            about = f"{safe_repr(name)} of group {safe_repr(position[0])}, index {safe_repr(position[1])}"
            raise self._error(
                "rollout.place",
                rollout,
                f"returned trajectory {about} for rollout {rollout}; create every trajectory with ctx.draft",
            )
        if not isinstance(trajectory.policy, str) or trajectory.policy not in self.vocabularies:
            policies = ", ".join(self.vocabularies)
            text = f"returned {name} of policy {safe_repr(trajectory.policy)}, but this run trains {policies}"
            raise self._error("rollout.policy", name, text)

    def _check_fields(self, trajectory: Trajectory) -> None:
        """Checks all fields except arrays: they must survive encoding and decoding, the status must not be `aborted`,
        and rewards must be finite."""
        check_metadata(f"{self.hook} returned {trajectory.id} with", trajectory.metadata)
        try:
            if not _restores(trajectory):
                decode(Trajectory, encode(trajectory))
        except SlimxError as error:
            raise self._error("rollout.field", trajectory.id, f"returned {trajectory.id}: {error}") from None
        if trajectory.status == "aborted":
            raise SlimxError(f"rollout {trajectory.id} was aborted by the engine; see the engine's log")
        rewards = [trajectory.reward or 0.0, *trajectory.reward_parts.values()]
        rewards += [turn.reward for turn in trajectory.turns]
        if not all(map(math.isfinite, rewards)):
            raise self._error(
                "rollout.reward",
                trajectory.id,
                f"returned {trajectory.id} with a reward that is not finite; use finite rewards",
            )

    def _check_tokens(self, trajectory: Trajectory) -> None:
        name = trajectory.id
        kinds = {"token_ids": "iu", "loss_mask": "iub", "logprobs": "f"}
        for field, kind in kinds.items():
            values = getattr(trajectory, field)
            if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in kind:
                text = (
                    f"returned {name} whose {field} is not a one-dimensional NumPy array of the expected type "
                    "(token_ids: integers; loss_mask: integers or bools; logprobs: floats)"
                )
                raise self._error("rollout.array", name, text)
        try:
            trajectory.__post_init__()  # a hook may have changed fields after construction
        except (ValueError, TypeError, IndexError) as error:
            raise self._error("rollout.spans", name, f"returned {error}") from None
        ids = trajectory.token_ids
        vocabulary = self.vocabularies[trajectory.policy]
        highest = (vocabulary or MAX_ID) - 1
        if not _within(ids, highest):
            invalid = ids[((ids < 0) | (ids > highest)).argmax()]
            text = f"returned {name} with token id {invalid}; valid ids are 0 to {highest}"
            raise self._error("rollout.token_id", name, text)
        mask = trajectory.loss_mask
        if not _within(mask, 1):
            invalid = mask[((mask < 0) | (mask > 1)).argmax()]
            text = f"returned {name} with loss_mask value {invalid}; use 1 for trained tokens and 0 for others"
            raise self._error("rollout.loss_mask", name, text)
        for span in trajectory.spans:
            self._check_span(trajectory, span)

    def _check_span(self, trajectory: Trajectory, span: Span) -> None:
        name = trajectory.id
        if span.policy not in self.versions or span.turn < 0:
            raise self._error(
                "rollout.spans",
                name,
                f"returned {name} with an invalid span, {span}; use a policy of this run and a turn of at least 0",
            )
        if span.source != "sampled":
            return
        newest = self.versions[span.policy]
        if span.version is None or not 0 <= span.version <= newest:
            text = f"returned {name} with tokens of weight version {span.version}; use a version from 0 to {newest}"
            raise self._error("rollout.version", name, text)
        if not self.sampled:
            return
        logprobs = trajectory.logprobs[span.start : span.stop]
        if not (_within(logprobs, MAX_LOGPROB) and np.minimum.reduce(logprobs) > -math.inf):
            invalid = logprobs[(~(np.isfinite(logprobs) & (logprobs <= MAX_LOGPROB))).argmax()]
            text = f"returned {name} with a sampled token whose log-prob is {invalid}; it must be finite and at most 0"
            raise self._error("rollout.logprob", name, text)

    def _error(self, code: str, about: str, text: str) -> SlimxError:
        return SlimxError(f"{self.hook} {text}", code=code, about=about)


async def verdict_of(
    keep: Keep, group: Group, before: Sequence[Trajectory], hook: str, deadline_s: float
) -> bool | str:
    """Calls the group filter `keep`, and returns its verdict. Raises SlimxError if the verdict is neither a bool nor a
    string with a reason, or if the filter changed the group's trajectories, and DeadlineError if an async filter takes
    longer than `deadline_s` seconds.

    `before`: trajectories of the group before the call. `hook`: name of the filter.
    """
    verdict = keep(group)
    if inspect.isawaitable(verdict):
        verdict = await within(deadline_s, verdict, f"the verdict on group {group.id}", hook)
    # filters may return NumPy's bool
    if not isinstance(verdict, (bool, np.bool_, str)):
        kind = type(verdict).__name__
        raise SlimxError(
            f"{hook} returned an object of type {kind} for group {group.id}; return True to keep the group, or False "
            "or a reason to drop the group",
        )
    same = [after is old for after, old in zip(group.trajectories, before, strict=False)]
    if len(group.trajectories) != len(before) or not all(same):
        raise SlimxError(
            f"{hook} added, removed or replaced trajectories of group {group.id}; leave the trajectories as they are, "
            "and return False to drop the group",
        )
    return verdict


def check_metadata(whose: str, metadata: object) -> None:
    """Raises SlimxError with the key of the first metadata value that cannot be written into a checkpoint.

    `whose`: start of the error message, which names the owner of the metadata.
    """
    if not isinstance(metadata, dict):
        raise SlimxError(
            f"{whose} metadata of type {type(metadata).__name__}; use a dict", code="rollout.metadata", about="metadata"
        )
    for key, value in metadata.items():
        try:
            decode(dict[str, Any], encode({key: value}))
        except SlimxError as error:
            about = safe_repr(key)
            raise SlimxError(
                f"{whose} metadata in which {about} has an invalid value ({error.__cause__}); use JSON values or "
                "numeric NumPy arrays",
                code="rollout.metadata",
                about=about,
            ) from None


def _within(values: np.ndarray, most: float) -> bool:
    """Returns True if all `values` are at most `most`, and no integer is negative. NaN is greater than any number."""
    if values.dtype.kind == "i":
        values = values.view(values.dtype.str.replace("i", "u"))  # negative numbers become the largest ones
    return len(values) == 0 or bool(np.maximum.reduce(values) <= most)


def _restores(trajectory: Trajectory) -> bool:
    """Returns True if all fields except arrays surely survive encoding and decoding. In the other cases `decode`
    decides, which names the reason, but takes five times as long."""
    values = _plain_values(trajectory)
    try:
        _DECODER.decode(encode(values))
        exact = {*map(type, trajectory.spans)} <= {Span} and {*map(type, trajectory.turns)} <= {Turn}
        return exact and {*map(type, trajectory.images)} <= {Image} and trajectory.schema_version == SCHEMA_VERSION
    except (SlimxError, ValueError, TypeError, OverflowError, RecursionError):  # a ValidationError is a ValueError
        return False


# Failures -----------------------------------------------------------------------------------------------------------

Score = Callable[[Prompt, Trajectory], Awaitable[None]]
"""Function that adds another model's values, such as a teacher's log-probs, to a trajectory for a prompt, or raises
SlimxError."""


async def scored(score: Score, prompt: Prompt, trajectory: Trajectory) -> None:
    """Calls `score` with `trajectory`; marks the trajectory as failed if `score` raises SlimxError."""
    with marking(trajectory, "teacher"):
        await score(prompt, trajectory)


def any_failed(trajectories: Sequence[Trajectory]) -> bool:
    return any(trajectory.status == "failed" for trajectory in trajectories)


@contextmanager
def marking(trajectory: Trajectory, stage: str) -> Iterator[None]:
    """Marks `trajectory` as failed if the block raises SlimxError. `stage`: first word of the failure reason."""
    try:
        yield
    except SlimxError as error:
        cause = "deadline" if isinstance(error, DeadlineError) else "failed"
        _mark(trajectory, reason_of(error, f"{stage} {cause}"), str(error))


def reason_of(error: SlimxError, reason: str) -> str:
    """Returns `reason`, or ENGINE_DEADLINE if `error` means that engines did not respond in time."""
    if isinstance(error, DeadlineError) and error.awaited == REQUEST:
        return ENGINE_DEADLINE
    return reason


def is_cancellation(error: BaseException) -> bool:
    """Returns True if `error` cancels the current task, and is not a CancelledError that a hook raised itself."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError | GeneratorExit) and (task is None or task.cancelling() > 0)


def add_metrics(trajectory: Trajectory, logged: Mapping[str, float]) -> None:
    """Adds the metrics in `logged`, which one hook logged, to those of its trajectory.

    Raises SlimxError for a name that another hook has already logged for the same trajectory.
    """
    repeated = sorted(trajectory.metrics.keys() & logged.keys())
    if repeated:
        raise logged_twice(repeated[0])
    trajectory.metrics |= logged


def _mark(trajectory: Trajectory, reason: str, text: str) -> None:
    trajectory.status = "failed"
    trajectory.finish_reason = text
    trajectory.metadata["failed"] = reason


def crashed_trajectory(ctx: RolloutContext, error: BaseException, clock: Clock, config: Rollout) -> Trajectory:
    """Returns a failed trajectory for a rollout whose generate hook raised `error`.

    `clock`: clock of the rollout's deadline; it tells whether a TimeoutError came from this deadline or from a timeout
    inside the hook.
    """
    if isinstance(error, TimeoutError) and clock.expired:  # not a time-out inside the hook
        late = DeadlineError(f"rollout {ctx.group_id}/{ctx.index}", config.rollout_deadline, config.generate)
        return failed_trajectory(ctx, "generate deadline", str(late))
    return failed_trajectory(ctx, "generate failed", f"{config.generate} raised {raised(error)}")


def failed_trajectory(ctx: RolloutContext, reason: str, text: str) -> Trajectory:
    """Returns an empty trajectory that represents a failed rollout in its group.

    `reason`: short reason under which the failure is counted. `text`: message of the failure.
    """
    trajectory = Trajectory(
        id=f"{ctx.group_id}/{ctx.index}",
        rollout_id=f"{ctx.group_id}/{ctx.index}",
        group_id=ctx.group_id,
        index=ctx.index,
        token_ids=np.zeros(0, np.int32),
        loss_mask=np.zeros(0, np.uint8),
        logprobs=np.zeros(0, np.float32),
        spans=[],
    )
    _mark(trajectory, reason, text)
    return trajectory
