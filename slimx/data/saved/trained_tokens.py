"""Values that training computed for every token of a step, in a file next to the step's groups:
`RUN/rollouts/step-0000012.tokens`.

The file is in the safetensors format. `lengths` int64 [trajectories] contains the lengths of the groups' trajectories,
in order; every other tensor has one number per token, with the trajectories concatenated. The file is written after the
step's training; a failed step has none.
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
    """Values that training computed for the L tokens of a trajectory. The first token is not predicted and has no
    values."""

    logprobs: np.ndarray
    """float32 [L]: log-probs of the tokens under the trainers' weights, from the forward pass of the training step; NaN
    for the first token."""
    advantages: np.ndarray
    """float32 [L]: advantages of the tokens; NaN for the first token."""
    other_experts: np.ndarray | None = None
    """bool [L]: True if, to predict this token, at least one layer used different experts in training than the engine
    did; None if the engine returned no experts."""

    @classmethod
    def of_row(cls, row: TrainingRow, logprobs: np.ndarray, other_experts: np.ndarray) -> TrainedTokens:
        """Creates the values of a trajectory's tokens from its `row`, `logprobs` and `other_experts`, which contain L -
        1 entries because the first token is not predicted: entry t belongs to token t + 1."""
        by_token = np.concatenate([[False], other_experts]) if row.routed else None
        return cls(logprobs=_after_nan(logprobs), advantages=_after_nan(row.advantages), other_experts=by_token)


def _after_nan(values: np.ndarray) -> np.ndarray:
    return np.concatenate([[np.nan], values]).astype(np.float32)


def write_trained(groups_file: Path, tokens: Sequence[TrainedTokens]) -> Path:
    """Writes the values of all trajectories of the step in `groups_file`, in their order, and returns the path of the
    new file. Raises OSError if it cannot be written."""
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
    """Returns the values of a step's tokens by trajectory id; {} if there is no file. `groups`: all groups of
    `groups_file`.

    Raises SlimxError naming the file if it is damaged or belongs to another step."""
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
            f"{path}: the file of a step's trained tokens is damaged ({error}); remove the file (`slimx rollouts` "
            "then shows no training values for this step)",
            code="data.trained",
            about=str(path),
        ) from error
    by_trajectory = {}
    for trajectory, (logprobs, advantages, other) in zip(trajectories, values, strict=True):
        by_trajectory[trajectory.id] = TrainedTokens(logprobs=logprobs, advantages=advantages, other_experts=other)
    return by_trajectory
