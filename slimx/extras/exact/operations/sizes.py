"""The sizes that the order of operations of exact mode depends on. `docs/numerics.md` has the contract in words."""

from slimx.errors import SlimxError

CONTRACT_VERSION = 3
"""Changes with any order of operations, rounding point or constant below: the two sides must have the same."""

LANES = 16
"""Partial sums of a reduction over a row, and of the dot product of a query with a key."""
SUM_BLOCK = 1024
"""Elements of a row that are reduced by themselves before their sum joins the total."""
KEY_BLOCK = 128
"""Keys whose values are summed by themselves before their sum joins the total."""


def check_leaves(leaves: int, columns: int | None = None) -> None:
    """Raises SlimxError unless `leaves` is a power of two that cuts `columns`, where given, into equal parts."""
    if leaves < 1 or leaves & (leaves - 1):
        raise SlimxError(
            f"{leaves} leaves do not make a binary tree: set a power of two", code="exact.leaves", about=str(leaves)
        )
    if columns is not None and columns % leaves:
        raise SlimxError(
            f"a dot product over {columns} elements cannot be cut into {leaves} equal leaves: use fewer",
            code="exact.leaves",
            about=str(leaves),
        )
