"""Schema of per-token columns: the fields of `LossColumns` and `TokenColumns` are all per-token values that are passed
from a trajectory to the loss.

A trajectory of L tokens has n = L - 1 positions: position t reads token t and predicts token t+1, and all columns are
aligned with the predicted token. A field's metadata is its `Column`, which determines how the column is aligned with
the tokens (`slimx.data.batch`), packed (`slimx.data.packing`), moved to the device and passed to the loss.
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
    """Description of a column, which is an array with one entry per predicted token: its type, fill value and
    source."""

    dtype: type[np.generic] = np.float32
    fill: float = 0
    """Value of the column at padding positions, and in place of NaN."""
    source: str | None = None
    """Field of `Trajectory` with L entries, from which the column is copied without the first entry, because the first
    token is not predicted. None: the column is computed."""
    needed: Callable[[Algorithm], Shape | None] | None = None
    """For an optional `source`, a function that returns the shape of a token's entry if an algorithm needs the column,
    else None. Without a function, the column exists if all trajectories of an update have the `source`."""


def column(
    dtype: type[np.generic] = np.float32,
    fill: float = 0,
    source: str | None = None,
    needed: Callable[[Algorithm], Shape | None] | None = None,
) -> dict[str, Column]:
    """Returns dataclass metadata that marks a field as a column. The parameters are the fields of `Column`."""
    return {"column": Column(dtype, fill, source, needed)}


def _top(algorithm: Algorithm) -> Shape | None:
    return (algorithm.teacher_top_k,) if algorithm.teacher_top_k else None


@dataclass(kw_only=True, slots=True)
class LossColumns[Array]:
    """Columns that the loss reads, as NumPy arrays or as tensors. An optional column is None either in all rows of a
    batch or in none of them."""

    weight: Array = field(metadata=column())
    """float32 [n]: loss weights, already divided by the denominator of the update (`slimx.data.loss_weights`); 0 at
    tokens that are not trained on."""
    advantages: Array = field(metadata=column())
    """float32 [n]: advantage of each predicted token."""
    rollout_logprobs: Array = field(metadata=column(source="logprobs"))
    """float32 [n]: log-probs that the inference engine reported for the predicted tokens; 0 at tokens that were not
    sampled."""
    values: Array | None = field(default=None, metadata=column())
    """float32 [n]: the critic's value estimates before the step's first update; None without a critic."""
    returns: Array | None = field(default=None, metadata=column())
    """float32 [n]: regression targets for the critic's values; 0 at tokens that are not trained on."""
    selected: Array | None = field(default=None, metadata=column())
    """float32 [n]: 1 at the tokens that the losses clip_cov and kl_cov select by the covariance of log-prob and
    advantage, else 0; None for other losses."""
    teacher_logprobs: Array | None = field(
        default=None,
        metadata=column(source="teacher_logprobs", needed=lambda algorithm: () if algorithm.served_teachers else None),
    )
    """float32 [n]: log-probs that the teacher (algorithm.teacher, algorithm.teacher_engine, algorithm.teacher_engines)
    assigns to the predicted tokens; 0 at tokens that it did not score."""


@dataclass(kw_only=True, slots=True)
class TokenColumns(LossColumns[np.ndarray]):
    """All columns of the n predicted tokens of a trajectory, or of the T positions of a micro-batch."""

    tokens: np.ndarray = field(metadata=column(np.int64))
    """int64 [n]: input tokens of the model."""
    labels: np.ndarray = field(metadata=column(np.int64, source="token_ids"))
    """int64 [n]: the predicted tokens; each follows the input token with the same index."""
    versions: np.ndarray = field(metadata=column(np.int64, -1))
    """int64 [n]: version of the weights that sampled the label; -1 at labels that were not sampled."""
    temperature: np.ndarray = field(metadata=column(fill=1))
    """float32 [n]: temperature at which the trajectory was sampled; 1 for trajectories without one."""
    teacher_top_ids: np.ndarray | None = field(
        default=None, metadata=column(np.int64, source="teacher_top_ids", needed=_top)
    )
    """int64 [n, k]: the teacher's top-k token ids at the label's position."""
    teacher_top_logprobs: np.ndarray | None = field(
        default=None, metadata=column(source="teacher_top_logprobs", needed=_top)
    )
    """float32 [n, k]: the teacher's log-probs of `teacher_top_ids`; 0 at tokens that the teacher did not score."""
    routed_experts: np.ndarray | None = None
    """uint8 or uint16 [n, layers, k]: the experts to which the engine routed the input token, for every decoder layer;
    in a micro-batch, only for the layers in its `route_layers`, if that is set."""
    support: Support | None = None
    """For n positions, the tokens that top-k and top-p left for sampling the label; None: the whole vocabulary at all
    positions."""


COLUMNS: dict[str, Column] = {item.name: item.metadata["column"] for item in fields(TokenColumns) if item.metadata}
LOSS_COLUMNS = tuple(item.name for item in fields(LossColumns))
