"""Descriptions of a bucket that several engines receive, each from different ranks."""

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
"""Prefix of the path of a bucket in flight; indices of its transfer and of the bucket follow."""


class SentBucket(NamedTuple):
    """One trainer rank's part of a bucket, packed and in flight."""

    contribution: Contribution
    failed: dict[int, str]
    """Engine -> why it could not be written to."""
    nbytes: int
    """Bytes in flight to all engines together."""


def describe_copies(
    form: BucketForm, contributions: Sequence[Contribution], *, engines: int, transfer: int, bucket: int
) -> PackedBucket:
    """Returns the bucket of `form`, one engine's, to which `contributions` were packed for `engines` engines.

    Raises SlimxError naming a tensor that is not finite, or that differs between engines: the ranks that sent it do not
    hold the same weights."""
    count = len(form.tensors)
    both = total(contributions)
    sums = both.sums.reshape(engines, count)
    flags = both.flags.reshape(engines, count)
    # Flags first: values that are not finite need not be equal.
    packed = describe(form, [f"{IN_FLIGHT}{transfer}/{bucket}"], [Contribution(sums[0], np.bitwise_or.reduce(flags))])
    different = np.flatnonzero((sums != sums[0]).any(axis=0))
    if len(different):
        name = form.tensors[different[0]].name
        raise SlimxError(
            f"trainer ranks that should hold the same weights packed different bytes of {name} for different engines; "
            "their data-parallel replicas have diverged: restart from the last checkpoint",
            code="direct.copies",
            about=name,
        )
    return packed


def in_flight(packed: PackedBucket) -> tuple[int, int]:
    """Returns the indices of the transfer of a bucket in flight, and of the bucket."""
    transfer, bucket = packed.path.removeprefix(IN_FLIGHT).split("/")
    return int(transfer), int(bucket)


def shares_of(packed: PackedBucket, count: int) -> list[PackedBucket]:
    """Splits a bucket among an engine's `count` receivers: the same number of targets each, or the only one for all."""
    if len(packed.targets) == 1:
        return [packed] * count
    size = len(packed.targets) // count
    return [replace(packed, targets=packed.targets[start : start + size]) for start in range(0, count * size, size)]


def together(packed: PackedBucket, landed: Sequence[PackedBucket]) -> PackedBucket:
    """Returns a bucket as an engine's server opens it, from the parts that its receivers have `landed`."""
    paths: list[str] = []
    targets: list[tuple[PackedTensor, ...]] = []
    for part in landed:
        paths += [part.path, *part.others]
        targets += part.targets
    if len(packed.targets) == 1:
        targets = list(landed[0].targets)
    return PackedBucket(paths[0], packed.size, tuple(targets), tuple(paths[1:]))
