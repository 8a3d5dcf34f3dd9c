"""Descriptions of a bucket that several engines get, each from other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from slimx.errors import SlimxError
from slimx.reshard.pack.packer import Contribution, describe
from slimx.reshard.pack.pieces import BucketForm
from slimx.reshard.packed import PackedBucket

IN_FLIGHT = "nixl:"
"""Prefix of the path of a bucket on its way to engines; the numbers of its publication and the bucket follow."""


class SentBucket(NamedTuple):
    """One trainer rank's part of a bucket, packed and on its way."""

    share: Contribution
    failed: dict[int, str]
    """By engine why it could not be written to."""
    nbytes: int
    """Bytes on their way, to all engines together."""


def describe_copies(
    form: BucketForm, shares: Sequence[Contribution], *, engines: int, transfer: int, bucket: int
) -> PackedBucket:
    """The bucket of `form`, one engine's, of which `shares` were packed for `engines` engines.

    Raises SlimxError naming a tensor that is not finite, or that two engines would get differently: the ranks that sent
    it do not hold the same weights.
    """
    count = len(form.tensors)
    sums = sum((share.sums for share in shares), np.zeros(engines * count, np.uint64)).reshape(engines, count)
    flags = np.bitwise_or.reduce([share.flags for share in shares]).reshape(engines, count)
    # Flags first: what is not finite need not be equal.
    packed = describe(form, [f"{IN_FLIGHT}{transfer}/{bucket}"], [Contribution(sums[0], np.bitwise_or.reduce(flags))])
    if len(odd := np.flatnonzero((sums != sums[0]).any(axis=0))):
        name = form.tensors[odd[0]].name
        raise SlimxError(
            f"trainer ranks that should hold the same weights packed different bytes of {name} for different engines; "
            "their data-parallel copies have come apart: restart from the last checkpoint",
            code="direct.copies",
            about=name,
        )
    return packed


def in_flight(packed: PackedBucket) -> tuple[int, int]:
    """Numbers of the publication in which a bucket is on its way, and of the bucket."""
    transfer, bucket = packed.path.removeprefix(IN_FLIGHT).split("/")
    return int(transfer), int(bucket)


def shares_of(packed: PackedBucket, count: int) -> list[PackedBucket]:
    """Split a bucket among an engine's `count` receivers: as many targets each, or the only one for all."""
    if len(packed.targets) == 1:
        return [packed] * count
    each = len(packed.targets) // count
    return [replace(packed, targets=packed.targets[at * each : (at + 1) * each]) for at in range(count)]


def together(packed: PackedBucket, landed: Sequence[PackedBucket]) -> PackedBucket:
    """A bucket as an engine's server opens it, of which its receivers have `landed` their shares."""
    first, *_ = paths = [path for part in landed for path in (part.path, *part.others)]
    whole = len(packed.targets) == 1
    targets = landed[0].targets if whole else tuple(target for part in landed for target in part.targets)
    return PackedBucket(first, packed.size, targets, tuple(paths[1:]))
