"""Tokens of older versions than a trajectory's newest can be left out of training (`algorithm.mask_stale_tokens`)."""

from __future__ import annotations

import numpy as np
import pytest

from slimx.data.records import Group, Prompt, Span, Trajectory
from slimx.orchestration.batches import make_update_rows
from tests.unit.rollout.rollout_stand import config_of


def test_masking_leaves_tokens_of_the_newest_version_and_inserted_ones():
    spans = [
        Span(start=0, stop=2, source="prompt"),
        Span(start=2, stop=4, source="sampled", version=3),
        Span(start=4, stop=5, source="inserted"),
        Span(start=5, stop=6, source="sampled", version=4, turn=1),
        Span(start=6, stop=8, source="sampled", version=5, turn=1),
    ]
    trajectory = trajectory_of(spans, trained=[0, 0, 1, 1, 1, 1, 1, 0])
    masked = trajectory.newest_only()
    assert masked.loss_mask.tolist() == [0, 0, 0, 0, 1, 0, 1, 0]
    assert trajectory.loss_mask.tolist() == [0, 0, 1, 1, 1, 1, 1, 0], "what is recorded stays"
    one = trajectory_of([spans[0], Span(start=2, stop=8, source="sampled", version=3)], trained=[0, 0] + [1] * 6)
    assert one.newest_only().loss_mask.tolist() == one.loss_mask.tolist(), "an old one as a whole is trained"


@pytest.mark.parametrize("masked", [False, True])
def test_masked_tokens_have_no_weight_in_denominators(masked):
    config = config_of(prompts_per_step=1, schedule__max_staleness=1, algorithm__mask_stale_tokens=masked)
    prompt = Span(start=0, stop=2, source="prompt")
    mixed = [
        prompt,
        Span(start=2, stop=6, source="sampled", version=0),
        Span(start=6, stop=8, source="sampled", version=1),
    ]
    trajectories = [trajectory_of(mixed, [0, 0] + [1] * 6), trajectory_of([prompt, *mixed[1:]], [0, 0] + [1] * 6)]
    group = Group(id="g0", prompt=Prompt(id="p", token_ids=[5, 6, 7]), trajectories=trajectories)
    (rows,) = make_update_rows(config, [group], lambda groups: [1.0, -1.0])
    counts = [int((row.weight > 0).sum()) for row in rows]
    assert counts == ([2, 2] if masked else [6, 6])
    assert sum(row.weight.sum() for row in rows) == pytest.approx(1)


def trajectory_of(spans: list[Span], trained: list[int]) -> Trajectory:
    length = spans[-1].stop
    return Trajectory(
        id="g0/0",
        rollout_id="g0/0",
        group_id="g0",
        index=0,
        token_ids=np.arange(length, dtype=np.int32),
        loss_mask=np.array(trained, np.uint8),
        logprobs=np.full(length, -1.0, np.float32),
        spans=spans,
    )
