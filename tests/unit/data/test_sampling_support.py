"""The tokens that top-k and top-p kept travel from a completion to a rank's part of a micro-batch."""

from __future__ import annotations

import numpy as np
import pytest

from slimx.data.batch import make_rows
from slimx.data.loss_weights import loss_weights
from slimx.data.packing import pack
from slimx.data.records import Trajectory
from slimx.data.sampling_support import Support
from slimx.data.saved.codec import decode, encode
from slimx.rollout.client.generation import Completion
from slimx.rollout.draft import Draft
from slimx.trainer.context import ContextShard


def test_positions_of_a_support_are_split_and_joined_with_their_tokens():
    support = Support(ids=np.array([5, 6, 7, 8, 9], np.int32), counts=np.array([0, 2, 3, 0], np.int32))
    taken = support.take(np.array([2, 0, 1, 2]))
    assert taken.counts.tolist() == [3, 0, 2, 3] and taken.ids.tolist() == [7, 8, 9, 5, 6, 7, 8, 9]
    joined = Support.join([Support.everything(2), support])
    assert joined.counts.tolist() == [0, 0, 0, 2, 3, 0] and joined.positions().tolist() == [3, 3, 4, 4, 4]
    assert support.missing(np.array([1, 6, 9, 1])).tolist() == []
    assert support.missing(np.array([1, 7, 6, 1])).tolist() == [1, 2]
    with pytest.raises(ValueError):
        Support(ids=np.zeros(2, np.int32), counts=np.array([3], np.int32))


def completion(tokens: list[int], kept: list[list[int]] | None) -> Completion:
    support = None
    if kept is not None:
        ids = np.array([token for row in kept for token in row], np.int32)
        support = Support(ids=ids, counts=np.array([len(row) for row in kept], np.int32))
    return Completion(
        token_ids=np.array(tokens, np.int32),
        logprobs=np.zeros(len(tokens), np.float32),
        versions=[(0, len(tokens), 1)],
        finish_reason="stop",
        routed_experts=None,
        cached_tokens=0,
        seconds=0.0,
        support=support,
    )


def draft(name: str = "a") -> Draft:
    return Draft([9, 9], id=name, rollout_id=name, group_id="g", index=0, seed=0, sampling={"temperature": 1.0})


def two_turns() -> Trajectory:
    """Returns tokens 9 9 | 4 5 | 8 | 6, of which 4, 5 were sampled from two and three tokens and 6 from all."""
    out = draft()
    out.add_sampled(completion([4, 5], [[4, 1], [2, 5, 3]]))
    out.add_inserted([8])
    out.add_sampled(completion([6], None))
    return out.finish()


def split_support(support: Support) -> list[list[int]]:
    return [part.tolist() for part in np.split(support.ids, np.cumsum(support.counts)[:-1])]


def test_a_trajectorys_support_survives_a_checkpoint():
    trajectory = two_turns()
    assert split_support(trajectory.support) == [[], [], [4, 1], [2, 5, 3], [], []]
    back = decode(Trajectory, encode(trajectory)).support
    assert split_support(back) == split_support(trajectory.support) and back.ids.dtype == back.counts.dtype == np.int32
    whole = draft()
    whole.add_sampled(completion([4], None))
    assert whole.finish().support is None


def test_a_token_outside_its_support_is_an_error_that_names_it():
    wrong = draft("g/7")
    wrong.add_sampled(completion([4, 5], [[4, 1], [2, 3]]))
    with pytest.raises(ValueError) as caught:
        wrong.finish()
    assert all(named in str(caught.value) for named in ("g/7", "token 3", "id 5", "support"))


@pytest.mark.parametrize("size", [1, 2])
def test_packed_and_split_micro_batches_keep_the_support_of_each_label(size):
    """By label: a label of the two-turn trajectory has its tokens, everything else (padding too) has none."""
    free = draft("b")
    free.add_sampled(completion([7, 7, 7], None))
    batch = [two_turns(), free.finish()]
    rows = make_rows(batch, [1.0, 1.0], loss_weights(batch, "token"))
    packed = pack(rows, data_size=1, max_tokens=64, multiple_of=8, sequence_multiple=4)
    (whole,) = packed.shards[0]
    assert len(whole.support) == len(whole.labels) == 16
    expected = {4: [4, 1], 5: [2, 5, 3]}
    seen = []
    for rank in range(size):
        part = ContextShard(size, rank, None).take(whole)
        assert len(part.support) == len(part.labels) == 16 // size
        for label, tokens in zip(part.labels.tolist(), split_support(part.support), strict=True):
            assert tokens == expected.get(label, []), label
            seen.append(label)
    assert sorted(seen) == sorted(whole.labels.tolist())


def test_a_batch_without_any_support_carries_none():
    free = draft()
    free.add_sampled(completion([7, 7], None))
    batch = [free.finish()]
    rows = make_rows(batch, [1.0], loss_weights(batch, "token"))
    (whole,) = pack(rows, data_size=1, max_tokens=64).shards[0]
    assert whole.support is None
