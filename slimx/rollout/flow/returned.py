"""Checks of what hooks return, before anything is trained on it or written down."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields, make_dataclass
from typing import Any, get_type_hints

import numpy as np

from slimx.data.records import Group, Trajectory
from slimx.data.saved.codec import decode, encode
from slimx.data.support import Support
from slimx.errors import SlimxError, safe_repr

MAX_LOGPROB = 1e-4
"""The largest log-prob that is taken: rounding brings a certain token a little above 0."""
ARRAYS = {np.ndarray, np.ndarray | None, Support | None}
"""Types of the fields of a trajectory that `_check_tokens` looks at; the codec proves the others."""

_HINTS = get_type_hints(Trajectory)
_Fields = make_dataclass(
    "Trajectory", [(each.name, _HINTS[each.name]) for each in fields(Trajectory) if _HINTS[each.name] not in ARRAYS]
)


class Returned:
    """The rules for the trajectories of one rollout."""

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
        """`hook`: the generate hook's name. `vocabularies`: token ids of each trained policy's model, None: unknown.
        `versions`: newest weight version of each that engines may have. `sampled`: whether engines give log-probs."""
        self.hook, self.group_id, self.index, self.sampled = hook, group_id, index, sampled
        self.vocabularies, self.versions = vocabularies, versions

    def check(self, trajectories: Sequence[Any]) -> None:
        """Raise SlimxError for the first value that could not be trained or written."""
        rollout = f"{self.group_id}/{self.index}"
        if not trajectories:
            raise self._wrong("rollout.returned", rollout, f"returned no trajectory for {rollout}")
        for trajectory in trajectories:
            if not isinstance(trajectory, Trajectory):
                kind = type(trajectory).__name__
                raise self._wrong("rollout.returned", rollout, f"returned a {kind}; return a Trajectory")
            self._check_place(trajectory, rollout)
            self._check_fields(trajectory)
            self._check_tokens(trajectory)
        names = [trajectory.id for trajectory in trajectories]
        if twice := {name for name in names if names.count(name) > 1}:
            name = min(twice)
            raise self._wrong("rollout.twice", name, f"returned {name} twice; give ctx.draft a suffix for each")

    def _check_place(self, trajectory: Trajectory, rollout: str) -> None:
        place = (trajectory.group_id, trajectory.index, trajectory.rollout_id)
        name = trajectory.id
        if place != (self.group_id, self.index, rollout) or not isinstance(name, str) or not name.startswith(rollout):
            about = f"{safe_repr(name)} of group {safe_repr(place[0])}, rollout {safe_repr(place[1])}"
            raise self._wrong(
                "rollout.place", rollout, f"returned for {rollout} the trajectory {about}; begin each with ctx.draft"
            )
        if not isinstance(trajectory.policy, str) or trajectory.policy not in self.vocabularies:
            known = ", ".join(self.vocabularies)
            text = f"returned {name} of a policy {safe_repr(trajectory.policy)}; this run trains {known}"
            raise self._wrong("rollout.policy", name, text)

    def _check_fields(self, trajectory: Trajectory) -> None:
        """All but the arrays, by writing and reading them."""
        check_metadata(f"{self.hook} returned {trajectory.id} with", trajectory.metadata)
        values = {each.name: getattr(trajectory, each.name) for each in fields(_Fields)}
        try:
            decode(_Fields, encode(values))
        except SlimxError as error:
            raise self._wrong("rollout.field", trajectory.id, f"returned {trajectory.id}: {error}") from None
        if trajectory.status == "aborted":
            raise SlimxError(f"rollout {trajectory.id} was aborted by the engine")
        numbers = [trajectory.reward or 0.0, *trajectory.reward_parts.values(), *(t.reward for t in trajectory.turns)]
        if not np.isfinite(numbers).all():
            text = f"returned {trajectory.id} with a reward that is not finite"
            raise self._wrong("rollout.reward", trajectory.id, text)

    def _check_tokens(self, trajectory: Trajectory) -> None:
        name, vocabulary = trajectory.id, self.vocabularies[trajectory.policy]
        kinds = {"token_ids": "iu", "loss_mask": "iub", "logprobs": "f"}
        for field, kind in kinds.items():
            values = getattr(trajectory, field)
            if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in kind:
                text = f"returned {name} whose {field} is no array [L] of numbers of its kind"
                raise self._wrong("rollout.array", name, text)
        try:
            trajectory.__post_init__()  # a hook may have changed what was right when it was made
        except (ValueError, TypeError, IndexError) as error:
            raise self._wrong("rollout.spans", name, f"returned {error}") from None
        ids, mask = trajectory.token_ids, trajectory.loss_mask
        if wrong := _first(ids, (ids < 0) | (ids >= (vocabulary or np.iinfo(np.int32).max))):
            text = f"returned {name} with the token id {wrong}; ids are 0 to {(vocabulary or 0) - 1}"
            raise self._wrong("rollout.token_id", name, text)
        if wrong := _first(mask, (mask != 0) & (mask != 1)):
            text = f"returned {name} with the loss_mask {wrong}; it is 1 where a token is trained, and else 0"
            raise self._wrong("rollout.loss_mask", name, text)
        for span in trajectory.spans:
            if span.policy not in self.versions or span.turn < 0:
                raise self._wrong("rollout.spans", name, f"returned {name} with a span of nobody ({span})")
            if span.source != "sampled":
                continue
            if not 0 <= span.version <= self.versions[span.policy]:
                newest = self.versions[span.policy]
                text = f"returned {name} with tokens of version {span.version}; the newest that exists is {newest}"
                raise self._wrong("rollout.version", name, text)
            logprobs = trajectory.logprobs[span.start : span.stop]
            if self.sampled and (wrong := _first(logprobs, ~(np.isfinite(logprobs) & (logprobs <= MAX_LOGPROB)))):
                text = f"returned {name} with a sampled token whose log-prob is {wrong}; it is finite, and 0 at most"
                raise self._wrong("rollout.logprob", name, text)

    def _wrong(self, code: str, about: str, text: str) -> SlimxError:
        return SlimxError(f"{self.hook} {text}", code=code, about=about)


def check_verdict(verdict: Any, group: Group, before: Sequence[Trajectory], hook: str | None) -> None:
    """Raise SlimxError for the verdict of a group filter that is neither a bool nor a reason, and for a filter that
    changed which trajectories the group has (`before`)."""
    if inspect.iscoroutine(verdict):
        verdict.close()
    # numpy's bool is one of the verdicts that filters compute
    if not isinstance(verdict, (bool, np.bool_, str)):
        kind = type(verdict).__name__
        raise SlimxError(
            f"{hook} returned a {kind} for group {group.id}; return True, False or the reason why it is dropped",
        )
    if len(group.trajectories) != len(before) or any(
        a is not b for a, b in zip(group.trajectories, before, strict=True)
    ):
        raise SlimxError(
            f"{hook} changed which trajectories group {group.id} has; return False to drop the group",
        )


def check_metadata(whose: str, metadata: Any) -> None:
    """Raise SlimxError, which names the key, for the first value that cannot be written into a checkpoint."""
    if not isinstance(metadata, dict):
        kind = type(metadata).__name__
        raise SlimxError(f"{whose} metadata that is a {kind}; give a dict", code="rollout.metadata", about="metadata")
    for key, value in metadata.items():
        try:
            decode(dict[str, Any], encode({key: value}))
        except SlimxError as error:
            about = safe_repr(key)
            raise SlimxError(f"{whose} metadata {about}: {error}", code="rollout.metadata", about=about) from None


def _first(values: np.ndarray, wrong: np.ndarray) -> str:
    """The first of `values` that is wrong, as text; "" if none is."""
    return str(values[wrong.argmax()]) if wrong.any() else ""
