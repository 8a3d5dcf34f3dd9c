"""Records whose fields are computed when one of them is first read, such as trajectories whose columns are stored
elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self, cast


class Lazy:
    """First base of a class whose second base is a slotted dataclass. Fields that are not set are computed together,
    when one of them is first read; fields that are set keep their values. A copy, also one by pickle, has only the
    fields that are set.

    The constructor, which `dataclasses.replace` calls, creates a record of the second base instead."""

    __slots__ = ()
    complete: ClassVar[Callable[..., object]]
    """The second base."""
    computed: object
    """Record of class `complete` with all fields."""

    def __new__(cls, **values: object) -> Self:
        return cast(Self, cls.complete(**values))

    @classmethod
    def holding(cls, values: Mapping[str, object]) -> Self:
        """Creates a record in which only the fields in `values` are set."""
        record = object.__new__(cls)
        for name, value in values.items():
            setattr(record, name, value)
        return record

    def compute(self) -> object:
        """Returns a record of class `complete`, from whose fields those that are not set are read."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> object:
        # Python calls this method only for an attribute that is not set.
        if name == "computed":
            computed = self.compute()
            setattr(self, name, computed)
            return computed
        if not hasattr(self.complete, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.computed, name)

    def __reduce__(self) -> tuple[object, ...]:
        values = held(self)
        values.pop("computed", None)
        return self.holding, (values,)


def lacks(record: object, name: str) -> bool:
    """Returns True if the field `name` of a slotted record is set to None; does not compute it."""
    try:
        return object.__getattribute__(record, name) is None
    except AttributeError:
        return False


def held(record: object) -> dict[str, Any]:
    """Returns the fields of a slotted record that are set, by name, without computing others."""
    values = {}
    for kind in type(record).__mro__:
        for name in getattr(kind, "__slots__", ()):
            try:
                values[name] = object.__getattribute__(record, name)
            except AttributeError:
                continue
    return values
