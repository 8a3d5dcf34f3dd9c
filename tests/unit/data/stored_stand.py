"""Trajectories with every kind of column, and stores of groups that count their loads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slimx.data.records import Group, Image, Prompt, Span, Trajectory, Turn
from slimx.data.sampling_support import Support


class HeldColumns:
    """Handle of a group in memory, which counts loads."""

    def __init__(self, group: Group):
        self.group = group
        self.loads = 0
        self.fetched: list[int] = []
        """Number of handles of each call of `fetch`."""

    def load(self) -> Group:
        self.loads += 1
        return self.group

    def fetch(self, handles: Sequence[HeldColumns]) -> None:
        self.fetched.append(len(handles))


class LostColumns:
    """Handle of a group that is lost."""

    def __init__(self, group: Group):
        pass

    def load(self) -> Group:
        raise LookupError("the machine is gone")

    def fetch(self, handles: Sequence[LostColumns]) -> None:
        """Does nothing, because all are lost."""


def full_group(number: int, count: int = 4, *, routes: bool = False) -> Group:
    """Returns a group of `count` rollouts of two turns, sampled by two versions: with rewards, a support, images and a
    teacher's log-probs, and with expert routes if `routes` is true."""
    random = np.random.default_rng(number)
    return Group(
        id=f"g{number}",
        prompt=Prompt(id=f"p{number}", messages=[{"role": "user", "content": "?"}], metadata={"dataset": "d"}),
        trajectories=[_full(number, index, random, routes) for index in range(count)],
    )


def _full(number: int, index: int, random: np.random.Generator, routes: bool) -> Trajectory:
    length = int(random.integers(9, 40))
    middle = length // 2
    spans = [
        Span(start=0, stop=3, source="prompt"),
        Span(start=3, stop=middle, source="sampled", version=1 + index % 2),
        Span(start=middle, stop=middle + 1, source="inserted", turn=1),
        Span(start=middle + 1, stop=length, source="sampled", turn=1, version=2),
    ]
    ids = random.integers(1, 50, length).astype(np.int32)
    sampled = np.zeros(length, bool)
    for span in spans:
        sampled[span.start : span.stop] = span.source == "sampled"
    teacher = np.where(np.arange(length) < 3, np.nan, -random.random(length))
    experts = random.random((length - 1, 4, 8)).argsort(-1)[..., :3]
    return Trajectory(
        id=f"g{number}/{index}",
        rollout_id=f"g{number}/{index}",
        group_id=f"g{number}",
        index=index,
        token_ids=ids,
        loss_mask=(sampled & (random.random(length) < 0.9) | (np.arange(length) == 4)).astype(np.uint8),
        logprobs=np.where(sampled, -random.random(length), np.nan).astype(np.float32),
        spans=spans,
        sampling={"temperature": 0.5 + index, "seed": number},
        support=Support.join([Support(ids=ids[i : i + 1], counts=np.ones(1, np.int32)) for i in range(length)]),
        routed_experts=experts.astype(np.uint8) if routes else None,
        teacher_logprobs=teacher.astype(np.float32),
        images=[Image(start=1, stop=2, grid=(1, 2, 2), digest="d")],
        turns=[Turn(reward=1.0), Turn()],
        reward=float(index % 2),
        reward_parts={"right": float(index % 2)},
        metrics={"steps": float(index)},
        status="truncated" if index == 1 else "completed",
        finish_reason="stop",
        timings={"generate": 0.5},
        metadata={"note": ["x", index]},
    )
