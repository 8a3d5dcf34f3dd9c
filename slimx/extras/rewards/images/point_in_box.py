"""Reward for pointing and clicking: 1 if the point in the final answer lies in the reference box, else 0."""

from __future__ import annotations

from slimx.data.records import Trajectory
from slimx.extras.rewards.images.coordinates import Scale, check_scales, factors, points_in, reference_boxes
from slimx.extras.rewards.shared.boxes import stated
from slimx.rewards.context import Context, answer_of
from slimx.rewards.needs import checked_by, needs_answer


def check(*, scale: Scale = "pixels", answer_scale: Scale | None = None) -> None:
    """Raises SlimxError if a scale is unknown."""
    check_scales(__name__, scale, answer_scale)


@checked_by(check)
@needs_answer
async def reward(
    ctx: Context, trajectory: Trajectory, *, scale: Scale = "pixels", answer_scale: Scale | None = None
) -> float:
    """Returns 1.0 if the final answer contains exactly one point, perhaps repeatedly, and that point lies in the box of
    the prompt's answer (in one of them, if there are several) or on its edge, else 0.0.

    `scale`: unit of the response's coordinates; `answer_scale`: unit of the prompt's answer (None: the same). Raises
    SlimxError if the prompt's answer is not a box or several, or if pixels must be converted and the prompt lacks
    `metadata.image_size`."""
    references = reference_boxes(ctx, answer_of(ctx, __name__))
    wide, high = factors(ctx, scale, answer_scale)
    points = set(points_in(stated(ctx.final_answer)))
    if len(points) != 1:
        return 0.0
    ((x, y),) = points
    return float(any(x1 <= x * wide <= x2 and y1 <= y * high <= y2 for x1, y1, x2, y2 in references))
