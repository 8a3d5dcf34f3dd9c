"""Descriptions of a bucket in flight, which several engines receive, each from different ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from slimx.errors import SlimxError
from slimx.reshard.pack.packer import Contribution, describe, total
from slimx.reshard.pack.pieces import PlannedBuckets
from slimx.reshard.packed import PackedBucket, PackedTensor

IN_FLIGHT = "nixl:"
"""Prefix of a path that identifies a bucket in flight; the transfer index and the bucket index follow it."""


class SentBucket(NamedTuple):
    """One trainer rank's part of a bucket, which the rank has packed and is writing to engines."""

    contribution: Contribution
    failed: dict[int, str]
    """Receiver -> the reason why this rank could not write to it."""
    nbytes: int
    """Total number of bytes that the rank is writing to all engines."""


def describe_copies(
    buckets: PlannedBuckets,
    turns: Sequence[int],
    contributions: Sequence[Contribution],
    known: dict[int, np.ndarray],
    *,
    transfer: int,
    bucket: int,
) -> dict[int, PackedBucket]:
    """Returns the description of bucket number `bucket` of a dealt plan for each turn: the bucket that replicas of an
    engine with this turn receive now.

    `buckets`: layouts of the plan for one replica. `turns`: turn of every replica (`slimx.extras.direct.dealing`).
    `contributions`: contributions of all trainer ranks, each to the tensors of all replicas. `known`: bucket of the
    plan -> sums of its tensors in this publication; extended here. Raises SlimxError naming a tensor that contains an
    infinite or NaN value, or whose checksum differs between replicas, which means that data-parallel replicas of the
    trainer have diverged."""
    both = total(contributions)
    described: dict[int, PackedBucket] = {}
    ends = np.cumsum([len(buckets.form((bucket + turn) % buckets.plan.count).tensors) for turn in turns])
    # Flags are checked first, because values that are not finite may differ between ranks.
    packed = zip(turns, np.split(both.sums, ends[:-1]), np.split(both.flags, ends[:-1]), strict=True)
    for turn, sums, flags in sorted(packed, key=lambda replica: not replica[2].any()):
        index = (bucket + turn) % buckets.plan.count
        form = buckets.form(index)
        if turn not in described or flags.any():
            path = f"{IN_FLIGHT}{transfer}/{bucket}"
            described[turn] = describe(form, [path], [Contribution(sums, flags)])
        different = np.flatnonzero(known.setdefault(index, sums) != sums)
        if len(different):
            name = form.tensors[different[0]].name
            raise SlimxError(
                f"trainer ranks packed different bytes of tensor {name} for different engines, so data-parallel "
                "replicas of the trainer have diverged; restart the run from the last checkpoint",
                code="direct.copies",
                about=name,
            )
    return described


def in_flight(packed: PackedBucket) -> tuple[int, int]:
    """Returns the transfer index and the bucket index that the path of a bucket in flight encodes."""
    transfer, bucket = packed.path.removeprefix(IN_FLIGHT).split("/")
    return int(transfer), int(bucket)


def shares_of(packed: PackedBucket, count: int) -> list[PackedBucket]:
    """Returns the parts of a bucket for an engine's `count` receivers: an equal number of targets for each receiver, or
    the same target for all if there is only one."""
    if len(packed.targets) == 1:
        return [packed] * count
    size = len(packed.targets) // count
    return [replace(packed, targets=packed.targets[start : start + size]) for start in range(0, count * size, size)]


def together(packed: PackedBucket, landed: Sequence[PackedBucket]) -> PackedBucket:
    """Returns the description with which an engine's server opens a bucket. `landed`: parts of the bucket that the
    engine's receivers have assembled, in order."""
    paths: list[str] = []
    targets: list[tuple[PackedTensor, ...]] = []
    for part in landed:
        paths += [part.path, *part.others]
        targets += part.targets
    if len(packed.targets) == 1:
        targets = list(landed[0].targets)
    return PackedBucket(paths[0], packed.size, tuple(targets), tuple(paths[1:]))
