"""Schema of per-token columns: each per-token value, from the trajectory to the loss, is a field here.

A trajectory of L tokens has n = L - 1 positions: position t reads token t and predicts token t+1, and all columns are
aligned with the predicted token. A field's metadata is its `Column`, by which rows are aligned (`slimx.data.batch`),
packed (`slimx.data.packing`), moved to the device and passed to the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields

import numpy as np

from slimx.config.sections.algorithm import Algorithm
from slimx.data.sampling_support import Support

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Column:
    """Type and source of a column, an array with one entry per token."""

    dtype: type[np.generic] = np.float32
    fill: float = 0
    """Value for padding and for NaN."""
    source: str | None = None
    """Field of `Trajectory` with L entries, of which the first is not predicted; None: the column is computed."""
    needed: Callable[[Algorithm], Shape | None] | None = None
    """Function that returns the shape per token that an algorithm needs of an optional `source`, or None if it does not
    need it. Without a function the column exists if all trajectories of an update have the `source`."""


def column(
    dtype: type[np.generic] = np.float32,
    fill: float = 0,
    source: str | None = None,
    needed: Callable[[Algorithm], Shape | None] | None = None,
) -> dict[str, Column]:
    """Returns the metadata of a field that is a column, with the arguments of `Column`."""
    return {"column": Column(dtype, fill, source, needed)}


def _top(algorithm: Algorithm) -> Shape | None:
    return (algorithm.teacher_top_k,) if algorithm.teacher_top_k else None


@dataclass(kw_only=True, slots=True)
class LossColumns[Array]:
    """Columns for the loss, as arrays or as tensors. An optional column is None in all rows of a batch or in none."""

    weight: Array = field(metadata=column())
    """float32 [n]: loss weights, which include the denominators of the update (`slimx.data.loss_weights`); 0 at tokens
    that are not trained."""
    advantages: Array = field(metadata=column())
    """float32 [n]."""
    rollout_logprobs: Array = field(metadata=column(source="logprobs"))
    """float32 [n]: log-probs of the engine; 0 at tokens that were not sampled."""
    values: Array | None = field(default=None, metadata=column())
    """float32 [n]: values of the critic before the step's first update; None without a critic."""
    returns: Array | None = field(default=None, metadata=column())
    """float32 [n]: targets of the critic's values; 0 at tokens that are not trained."""
    selected: Array | None = field(default=None, metadata=column())
    """float32 [n]: 1 at the tokens that clip_cov and kl_cov select by their covariance, else 0; None for other
    losses."""
    teacher_logprobs: Array | None = field(
        default=None,
        metadata=column(source="teacher_logprobs", needed=lambda algorithm: () if algorithm.served_teachers else None),
    )
    """float32 [n]: log-probs of the teacher (algorithm.teacher, algorithm.teacher_engine, algorithm.teacher_engines); 0
    at tokens that it did not score."""


@dataclass(kw_only=True, slots=True)
class TokenColumns(LossColumns[np.ndarray]):
    """All columns of the n predicted tokens of a trajectory or a micro-batch."""

    tokens: np.ndarray = field(metadata=column(np.int64))
    """int64 [n]: the model's input."""
    labels: np.ndarray = field(metadata=column(np.int64, source="token_ids"))
    """int64 [n]: the predicted tokens."""
    versions: np.ndarray = field(metadata=column(np.int64, -1))
    """int64 [n]: weight version that sampled the label; -1 at tokens that were not sampled."""
    temperature: np.ndarray = field(metadata=column(fill=1))
    """float32 [n]: sampling temperature."""
    teacher_top_ids: np.ndarray | None = field(
        default=None, metadata=column(np.int64, source="teacher_top_ids", needed=_top)
    )
    """int64 [n, k]: the teacher's top-k token ids at the label's position."""
    teacher_top_logprobs: np.ndarray | None = field(
        default=None, metadata=column(source="teacher_top_logprobs", needed=_top)
    )
    """float32 [n, k]: their log-probs; 0 at tokens that the teacher did not score."""
    routed_experts: np.ndarray | None = None
    """uint8 or uint16 [n, moe_layers, k]: the engine's expert ids for the input token."""
    support: Support | None = None
    """n positions: the tokens from which each label was sampled; None: the whole vocabulary at all positions."""


COLUMNS: dict[str, Column] = {item.name: item.metadata["column"] for item in fields(TokenColumns) if item.metadata}
LOSS_COLUMNS = tuple(item.name for item in fields(LossColumns))
