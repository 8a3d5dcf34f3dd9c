"""Descriptions of a bucket in flight, which several engines receive, each from different ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from slimx.errors import SlimxError
from slimx.reshard.pack.packer import Contribution, describe, total
from slimx.reshard.pack.pieces import BucketForm
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
    form: BucketForm, contributions: Sequence[Contribution], *, engines: int, transfer: int, bucket: int
) -> PackedBucket:
    """Returns the description of a bucket that was packed for `engines` engines, as each of them receives it.

    `form`: layout of the bucket for one engine. `contributions`: contributions of all trainer ranks, each to the
    tensors of all engines. Raises SlimxError naming a tensor that contains an infinite or NaN value, or whose checksum
    differs between engines, which means that data-parallel replicas of the trainer have diverged."""
    count = len(form.tensors)
    both = total(contributions)
    sums = both.sums.reshape(engines, count)
    flags = both.flags.reshape(engines, count)
    # Flags are checked first, because values that are not finite may differ between ranks.
    packed = describe(form, [f"{IN_FLIGHT}{transfer}/{bucket}"], [Contribution(sums[0], np.bitwise_or.reduce(flags))])
    different = np.flatnonzero((sums != sums[0]).any(axis=0))
    if len(different):
        name = form.tensors[different[0]].name
        raise SlimxError(
            f"trainer ranks packed different bytes of tensor {name} for different engines, so data-parallel replicas "
            "of the trainer have diverged; restart the run from the last checkpoint",
            code="direct.copies",
            about=name,
        )
    return packed


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
