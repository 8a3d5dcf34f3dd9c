"""The schema of per-token columns: every number of a predicted token, from its trajectory to the loss, is a field here.

A trajectory of L tokens gives n = L - 1 positions: position t reads token t and predicts token t+1, so all columns are
aligned with the predicted token. A field's metadata is its `Column`: rows are aligned (`slimx.data.batch`), packed
(`slimx.data.packing`), moved to the device and passed to the loss by it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields

import numpy as np

from slimx.config.sections.algorithm import Algorithm
from slimx.data.support import Support

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Column:
    """Type and origin of a column that is an array with an entry per token."""

    dtype: type = np.float32
    fill: float = 0
    """Value in padding, and in place of NaN."""
    source: str | None = None
    """Field of `Trajectory` with L entries, of which the first predicts nothing; None: computed."""
    needed: Callable[[Algorithm], Shape | None] | None = None
    """Shape per token that an algorithm needs of an optional `source`, or None if it needs none; no function: the
    column is there if all trajectories of an update have a `source`."""


def column(*args: object, **kwargs: object) -> dict[str, Column]:
    """Return the metadata of a field that is a column; the arguments are those of `Column`."""
    return {"column": Column(*args, **kwargs)}


def _top(algorithm: Algorithm) -> Shape | None:
    return (algorithm.teacher_top_k,) if algorithm.teacher_top_k else None


@dataclass(kw_only=True, slots=True)
class LossColumns[Array]:
    """Columns that the loss receives, as arrays or as tensors. An optional column is None in all rows of a batch or in
    none."""

    weight: Array = field(metadata=column())
    """float32 [n]: the loss weight, with the denominators of the whole update inside (`slimx.data.loss_weights`); 0
    where not trained."""
    advantages: Array = field(metadata=column())
    """float32 [n]."""
    rollout_logprobs: Array = field(metadata=column(source="logprobs"))
    """float32 [n]: the engine's log-probs; 0 where nothing was sampled."""
    values: Array | None = field(default=None, metadata=column())
    """float32 [n]: a critic's, before the step's first update; None without a critic."""
    returns: Array | None = field(default=None, metadata=column())
    """float32 [n]: targets of the critic's values; 0 where not trained."""
    selected: Array | None = field(default=None, metadata=column())
    """float32 [n]: 1 at the tokens that clip_cov and kl_cov choose by their covariance, else 0; None where the loss
    chooses none."""
    teacher_logprobs: Array | None = field(
        default=None,
        metadata=column(source="teacher_logprobs", needed=lambda algorithm: () if algorithm.served_teachers else None),
    )
    """float32 [n]: of the teacher (algorithm.teacher, algorithm.teacher_engine, algorithm.teacher_engines); 0 where it
    scored nothing."""


@dataclass(kw_only=True, slots=True)
class TokenColumns(LossColumns[np.ndarray]):
    """All columns of n predicted tokens: of a trajectory, or of a micro-batch."""

    tokens: np.ndarray = field(metadata=column(np.int64))
    """int64 [n]: the model's input."""
    labels: np.ndarray = field(metadata=column(np.int64, source="token_ids"))
    """int64 [n]: the predicted tokens."""
    versions: np.ndarray = field(metadata=column(np.int64, -1))
    """int64 [n]: weight version that sampled the label; -1 where nothing was sampled."""
    temperature: np.ndarray = field(metadata=column(fill=1))
    """float32 [n]: sampling temperature."""
    teacher_top_ids: np.ndarray | None = field(
        default=None, metadata=column(np.int64, source="teacher_top_ids", needed=_top)
    )
    """int64 [n, k]: the teacher's likeliest tokens in the label's place."""
    teacher_top_logprobs: np.ndarray | None = field(
        default=None, metadata=column(source="teacher_top_logprobs", needed=_top)
    )
    """float32 [n, k]: their log-probs; 0 where the teacher scored nothing."""
    routed_experts: np.ndarray | None = None
    """uint8 or uint16 [n, moe_layers, k]: expert ids by the engine, of the input token."""
    support: Support | None = None
    """n positions: the tokens from which each label was sampled; None: all of them, everywhere."""


COLUMNS: dict[str, Column] = {item.name: item.metadata["column"] for item in fields(TokenColumns) if item.metadata}
LOSS_COLUMNS = tuple(item.name for item in fields(LossColumns))
