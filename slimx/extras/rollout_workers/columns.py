"""Groups that a worker has generated, in Ray's object store on the worker's machine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import ray

from slimx.data.records import Group
from slimx.data.saved.codec import decode, encode
from slimx.data.stored import Columns
from slimx.errors import one_line

FETCH_S = 600.0
"""Seconds within which Ray must bring groups to this machine; later they count as lost."""


class ReportColumns(Columns):
    """Handle of an encoded group in the object that accompanies a worker's report. The driver owns the object, so it
    outlives the worker."""

    def __init__(self, index: int = 0, reference: Any = None):
        """Creates the handle of group `index` of an object. `reference`: Ray's reference to the object; None in the
        worker, which does not know it."""
        self.index = index
        self.reference = reference
        self._group: Group | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.index, self.reference)

    def load(self) -> Group:
        if self._group is None:
            try:
                self._read(ray.get(self.reference, timeout=FETCH_S))
            except ray.exceptions.RayError as error:
                raise LookupError(one_line(error)) from error
        assert self._group is not None
        return self._group

    def fetch(self, handles: Sequence[Columns]) -> None:
        missing = [handle for handle in handles if isinstance(handle, ReportColumns) and handle._group is None]
        references = list({handle.reference: None for handle in missing})
        with suppress(ray.exceptions.RayError):  # `load` reads the others one by one, and raises it for the lost ones
            objects = dict(zip(references, ray.get(references, timeout=FETCH_S), strict=True))
            for handle in missing:
                handle._read(objects[handle.reference])

    def _read(self, groups: Sequence[np.ndarray]) -> None:
        self._group = decode(Group, groups[self.index].tobytes())


class ReportStore:
    """Groups that wait for a worker's next report."""

    def __init__(self) -> None:
        self.parts: list[tuple[ReportColumns, np.ndarray]] = []
        """Handles of the groups, and the encoded groups, uint8 [bytes]."""

    def store(self, group: Group) -> ReportColumns:
        """Encodes `group` and returns its handle."""
        columns = ReportColumns()
        self.parts.append((columns, np.frombuffer(encode(group), np.uint8)))
        return columns

    @property
    def nbytes(self) -> int:
        return sum(len(data) for _, data in self.parts)

    def move_to(self, groups: list[np.ndarray]) -> None:
        """Moves the groups to the end of `groups`, the object of a report."""
        for columns, data in self.parts:
            columns.index = len(groups)
            groups.append(data)
