"""Values of every token in a step's training, a file beside the step's groups: `RUN/rollouts/step-0000012.tokens`.

It is a safetensors file. `lengths` int64 [trajectories] are those of the groups' trajectories, in order; every other
tensor has one number for each of their tokens, one trajectory behind the other. It is written when the step has been
trained, so a step that failed has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from slimx.data.batch import TrainingRow
from slimx.data.records import Group
from slimx.durable import write_atomic
from slimx.errors import SlimxError

SUFFIX = ".tokens"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedTokens:
    """A trajectory's L tokens as the trainers computed with them. The first one is predicted by nothing."""

    logprobs: np.ndarray
    """float32 [L]: log-prob under the trainers' weights, in the forward pass that the token was trained in; NaN for the
    first."""
    advantages: np.ndarray
    """float32 [L]; NaN for the first."""
    other_experts: np.ndarray | None = None
    """bool [L]: any layer that led to this token's prediction took other experts than the engine did; None: the
    engine did not return its own."""

    @classmethod
    def of_row(cls, row: TrainingRow, logprobs: np.ndarray, other_experts: np.ndarray) -> TrainedTokens:
        """The values of a trajectory's row, all [L - 1]: position n predicts token n + 1."""
        moved = None if row.routed_experts is None else np.concatenate([[False], other_experts])
        return cls(logprobs=_behind_nan(logprobs), advantages=_behind_nan(row.advantages), other_experts=moved)


def _behind_nan(values: np.ndarray) -> np.ndarray:
    return np.concatenate([[np.nan], values]).astype(np.float32)


def write_trained(groups_file: Path, tokens: Sequence[TrainedTokens]) -> Path:
    """Write the values of all trajectories of the step whose groups are in `groups_file`, in their order. Raises
    OSError."""
    path = groups_file.with_suffix(SUFFIX)
    tensors = {
        "lengths": np.array([len(each.logprobs) for each in tokens], dtype=np.int64),
        "logprobs": np.concatenate([each.logprobs for each in tokens]),
        "advantages": np.concatenate([each.advantages for each in tokens]),
    }
    if any(each.other_experts is not None for each in tokens):
        none = [np.zeros(len(each.logprobs), bool) for each in tokens]
        found = [
            own if each.other_experts is None else each.other_experts for each, own in zip(tokens, none, strict=True)
        ]
        tensors["other_experts"] = np.concatenate(found)
        known = [np.full(len(each.logprobs), each.other_experts is not None) for each in tokens]
        tensors["known_experts"] = np.concatenate(known)
    write_atomic(path, save(tensors), sync=False)
    return path


def read_trained(groups_file: Path, groups: Sequence[Group]) -> dict[str, TrainedTokens]:
    """By trajectory the values of a step's tokens; {} where the step has none. `groups`: all of `groups_file`.

    Raises SlimxError naming a file that is damaged, or is another step's."""
    path = groups_file.with_suffix(SUFFIX)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    try:
        tensors = load(path.read_bytes())
        lengths = tensors["lengths"].tolist()
        fits = lengths == [len(each.token_ids) for each in trajectories]
        if not fits or any(len(values) != sum(lengths) for name, values in tensors.items() if name != "lengths"):
            raise ValueError("its tokens are not those of the groups beside it")
        parts = {name: np.split(tensors[name], np.cumsum(lengths)[:-1]) for name in tensors if name != "lengths"}
        experts: list[np.ndarray | None] = list(parts.get("other_experts", [None] * len(trajectories)))
        for number, known in enumerate(parts.get("known_experts", [])):
            experts[number] = experts[number] if known.all() else None
        values = zip(parts["logprobs"], parts["advantages"], experts, strict=True)
    except FileNotFoundError:
        return {}
    except (SafetensorError, KeyError, ValueError) as error:
        raise SlimxError(
            f"{path}: is damaged ({error}); remove it, the groups beside it are whole",
            code="data.trained",
            about=str(path),
        ) from error
    return {
        trajectory.id: TrainedTokens(logprobs=logprobs, advantages=advantages, other_experts=experts)
        for trajectory, (logprobs, advantages, experts) in zip(trajectories, values, strict=True)
    }
