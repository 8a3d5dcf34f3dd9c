"""Groups in Ray's object store."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import ray

from slimx.data.records import Group
from slimx.data.stored import Columns
from slimx.errors import one_line


class RayColumns(Columns):
    """Handle of a group in Ray's object store. The processes of a machine share one copy of the group's arrays."""

    def __init__(self, reference: ray.ObjectRef):
        self.reference = reference
        self._group: Group | None = None

    @classmethod
    def store(cls, group: Group) -> RayColumns:
        """Stores `group` on this machine. It is lost when this process ends."""
        return cls(ray.put(group))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.reference,)

    def load(self) -> Group:
        if self._group is None:
            try:
                self._group = ray.get(self.reference)
            except ray.exceptions.RayError as error:
                raise LookupError(one_line(error)) from error
        return self._group

    def fetch(self, handles: Sequence[Columns]) -> None:
        missing = [handle for handle in handles if isinstance(handle, RayColumns) and handle._group is None]
        with suppress(ray.exceptions.RayError):  # `load` raises it for the groups that are lost
            for handle, group in zip(missing, ray.get([handle.reference for handle in missing]), strict=True):
                handle._group = group
