"""Values of every token in a step's training, in a file next to the step's groups: `RUN/rollouts/step-0000012.tokens`.

It is a safetensors file. `lengths` int64 [trajectories] has the lengths of the groups' trajectories, in order; every
other tensor has one number per token, with the trajectories concatenated. It is written after the step's training, and
a failed step has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from slimx.data.batch import TrainingRow
from slimx.data.records import Group, Trajectory
from slimx.durable import write_atomic
from slimx.errors import SlimxError

SUFFIX = ".tokens"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedTokens:
    """Values of a trajectory's L tokens in training. The first token is not predicted."""

    logprobs: np.ndarray
    """float32 [L]: log-probs under the trainers' weights, in the forward pass of the token's training; NaN for the
    first."""
    advantages: np.ndarray
    """float32 [L]; NaN for the first."""
    other_experts: np.ndarray | None = None
    """bool [L]: True if a layer used other experts than the engine for this token's prediction; None: the engine did
    not return experts."""

    @classmethod
    def of_row(cls, row: TrainingRow, logprobs: np.ndarray, other_experts: np.ndarray) -> TrainedTokens:
        """Aligns the values of a trajectory's row, all [L - 1], with its tokens: position n predicts token n + 1."""
        by_token = None if row.routed_experts is None else np.concatenate([[False], other_experts])
        return cls(logprobs=_after_nan(logprobs), advantages=_after_nan(row.advantages), other_experts=by_token)


def _after_nan(values: np.ndarray) -> np.ndarray:
    return np.concatenate([[np.nan], values]).astype(np.float32)


def write_trained(groups_file: Path, tokens: Sequence[TrainedTokens]) -> Path:
    """Writes the values of all trajectories of the step in `groups_file`, in their order. Raises OSError."""
    path = groups_file.with_suffix(SUFFIX)
    tensors = {
        "lengths": np.array([len(values.logprobs) for values in tokens], dtype=np.int64),
        "logprobs": np.concatenate([values.logprobs for values in tokens]),
        "advantages": np.concatenate([values.advantages for values in tokens]),
    }
    if any(values.other_experts is not None for values in tokens):
        others = []
        known = []
        for values in tokens:
            length = len(values.logprobs)
            others.append(np.zeros(length, bool) if values.other_experts is None else values.other_experts)
            known.append(np.full(length, values.other_experts is not None))
        tensors["other_experts"] = np.concatenate(others)
        tensors["known_experts"] = np.concatenate(known)
    write_atomic(path, save(tensors), sync=False)
    return path


def read_trained(groups_file: Path, groups: Sequence[Group]) -> dict[str, TrainedTokens]:
    """Returns the values of a step's tokens by trajectory; {} without a file. `groups`: all groups of `groups_file`.

    Raises SlimxError naming a file that is damaged or belongs to another step."""
    path = groups_file.with_suffix(SUFFIX)
    trajectories: list[Trajectory] = []
    for group in groups:
        trajectories += group.trajectories
    try:
        tensors = load(path.read_bytes())
        lengths = tensors["lengths"].tolist()
        del tensors["lengths"]
        fits = lengths == [len(trajectory.token_ids) for trajectory in trajectories]
        if not fits or any(len(values) != sum(lengths) for values in tensors.values()):
            raise ValueError("its tokens are not those of the step's groups")
        starts = np.cumsum(lengths)[:-1]
        parts = {}
        for name, tensor in tensors.items():
            parts[name] = np.split(tensor, starts)
        experts: list[np.ndarray | None] = list(parts.get("other_experts", [None] * len(trajectories)))
        for index, known in enumerate(parts.get("known_experts", [])):
            if not known.all():
                experts[index] = None
        values = zip(parts["logprobs"], parts["advantages"], experts, strict=True)
    except FileNotFoundError:
        return {}
    except (SafetensorError, KeyError, ValueError) as error:
        raise SlimxError(
            f"{path}: the file is damaged ({error}); remove it; the step's groups are not affected",
            code="data.trained",
            about=str(path),
        ) from error
    by_trajectory = {}
    for trajectory, (logprobs, advantages, other) in zip(trajectories, values, strict=True):
        by_trajectory[trajectory.id] = TrainedTokens(logprobs=logprobs, advantages=advantages, other_experts=other)
    return by_trajectory
