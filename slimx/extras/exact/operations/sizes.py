"""Sizes that determine the order of operations of exact mode. `docs/numerics.md` has the contract in words."""

from slimx.errors import SlimxError

CONTRACT_VERSION = 3
"""Version of the order of operations, rounding points and constants below: both sides must have the same."""

LANES = 16
"""Number of partial sums of a row reduction, and of a dot product of query and key."""
SUM_BLOCK = 1024
"""Elements of a row that are summed before the result is added to the total."""
KEY_BLOCK = 128
"""Keys whose values are summed before the result is added to the total."""


def check_leaves(leaves: int, columns: int | None = None) -> None:
    """Raises SlimxError unless `leaves` is a power of two that divides `columns` (if not None)."""
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
