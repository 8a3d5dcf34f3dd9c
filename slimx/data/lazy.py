"""Records whose fields are computed when one of them is first read, such as trajectories whose columns are stored
elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, ClassVar, Self, cast


class Lazy:
    """First base of a class whose second base is a slotted dataclass. Fields that are not set are computed together,
    when one of them is first read; fields that are set keep their values. A copy, also one by pickle, has only the
    fields that are set.

    The constructor, which `dataclasses.replace` calls, creates a record of the second base instead."""

    __slots__ = ()
    complete: ClassVar[Callable[..., object]]
    """The second base."""
    names: set[str]
    """Names of the fields that are set."""
    computed: object
    """Record of class `complete` with all fields."""

    def __new__(cls, **values: object) -> Self:
        return cast(Self, cls.complete(**values))

    @classmethod
    def holding(cls, values: Mapping[str, object]) -> Self:
        """Creates a record in which only the fields in `values` are set."""
        record = object.__new__(cls)
        object.__setattr__(record, "names", set(values))
        for name, value in values.items():
            object.__setattr__(record, name, value)
        return record

    def compute(self) -> object:
        """Returns a record of class `complete`, from whose fields those that are not set are read."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> object:
        # Python calls this method only for an attribute that is not set.
        if name == "computed":
            object.__setattr__(self, name, self.compute())
        elif not hasattr(self.complete, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        else:
            return getattr(self.computed, name)
        return self.computed

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        self.names.add(name)

    def __reduce__(self) -> tuple[object, ...]:
        return _holding, (type(self), set_fields(self))


def _holding(kind: type[Lazy], values: Mapping[str, object]) -> Lazy:
    return kind.holding(values)


def lacks(record: object, name: str) -> bool:
    """Returns True if the field `name` of a record is set to None. Computes no field."""
    return (not isinstance(record, Lazy) or name in record.names) and getattr(record, name) is None


def set_fields(record: object) -> dict[str, Any]:
    """Returns the fields of a record that are set, by name. Computes no field."""
    if isinstance(record, Lazy):
        return {name: getattr(record, name) for name in record.names}
    return {item.name: getattr(record, item.name) for item in fields(record)}  # type: ignore[arg-type]
