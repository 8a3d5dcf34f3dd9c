"""Reward for grounding: overlap (intersection over union, IoU) of the boxes in the final answer with the reference."""

from __future__ import annotations

import math
from collections.abc import Sequence

from slimx.data.records import Trajectory
from slimx.errors import SlimxError
from slimx.extras.rewards.images.coordinates import Box, Scale, boxes_in, check_scales, factors, is_box, reference_boxes
from slimx.extras.rewards.shared.boxes import stated
from slimx.rewards.context import Context, answer_of
from slimx.rewards.needs import checked_by, needs_answer

MOST_EXTRA = 256
"""Limit on how many more boxes a response may have than its reference; a longer list of boxes earns 0."""


def check(*, scale: Scale = "pixels", answer_scale: Scale | None = None, threshold: float | None = None) -> None:
    """Raises SlimxError if a scale is unknown or `threshold` is not above 0 and at most 1."""
    check_scales(__name__, scale, answer_scale)
    if threshold is not None and not 0 < threshold <= 1:
        raise SlimxError(
            f"{__name__}: reward.options.threshold={threshold} is not an IoU above 0; set it to a number above 0 and "
            "at most 1, such as 0.5",
            code="reward.option",
            about="threshold",
        )


@checked_by(check)
@needs_answer
async def reward(
    ctx: Context,
    trajectory: Trajectory,
    *,
    scale: Scale = "pixels",
    answer_scale: Scale | None = None,
    threshold: float | None = None,
) -> float:
    """Returns the IoU of the box in the final answer and the prompt's answer or, with `threshold`, 1.0 if it is at
    least `threshold`, else 0.0. For several boxes, returns the `agreement` of both sets. A malformed box counts as one
    that overlaps nothing.

    `scale`: unit of the response's coordinates; `answer_scale`: unit of the prompt's answer (None: the same). Raises
    SlimxError if the prompt's answer is not a box or several, or if pixels must be converted and the prompt lacks
    `metadata.image_size`."""
    references = reference_boxes(ctx, answer_of(ctx, __name__))
    x, y = factors(ctx, scale, answer_scale)
    predicted = boxes_in(stated(ctx.final_answer))
    if len(predicted) > len(references) + MOST_EXTRA:
        return 0.0
    return agreement([(x1 * x, y1 * y, x2 * x, y2 * y) for x1, y1, x2, y2 in predicted], references, threshold)


def agreement(predicted: Sequence[Box], references: Sequence[Box], threshold: float | None = None) -> float:
    """Returns 2 * sum / (number of predicted boxes + number of references), from 0 to 1: the F1 score if `threshold` is
    given. The sum is over the IoUs of matched boxes, each of which counts as 1 or 0 with `threshold`.

    Boxes are matched greedily: the pair with the greatest IoU first, of equal pairs the one whose boxes are first in
    the order of their coordinates. So the order of the boxes does not matter."""
    valid = [(box, index) for index, box in enumerate(predicted) if is_box(box)]
    pairs = sorted(
        (-overlap, box, reference, row, column)
        for box, row in valid
        for column, reference in enumerate(references)
        if (overlap := iou(box, reference))
    )
    rows: set[int] = set()
    columns: set[int] = set()
    scores: list[float] = []
    for negative, _, _, row, column in pairs:
        if row not in rows and column not in columns:
            rows.add(row)
            columns.add(column)
            scores.append(-negative if threshold is None else float(-negative >= threshold))
    return 2 * math.fsum(scores) / (len(predicted) + len(references))


def iou(one: Box, other: Box) -> float:
    """Returns the area of the intersection of two boxes divided by that of their union, from 0 to 1."""
    wide = min(one[2], other[2]) - max(one[0], other[0])
    high = min(one[3], other[3]) - max(one[1], other[1])
    if wide <= 0 or high <= 0:
        return 0.0
    intersection = wide * high
    union = _area(one) + _area(other) - intersection
    return min(intersection / union, 1.0) if union > 0 else 0.0


def _area(box: Box) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])
