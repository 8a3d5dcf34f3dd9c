"""Sizes that determine the order of operations in exact mode. The contract of which they are part is in
`docs/numerics.md`."""

from slimx.errors import SlimxError

CONTRACT_VERSION = 3
"""Version of exact mode's contract, which comprises the order of operations, the roundings and the constants in this
file. Trainer and engines must have the same version."""

LANES = 16
"""Number of separate partial sums (lanes) from which the sum of a row, and the dot product of a query and a key, are
computed."""
SUM_BLOCK = 1024
"""Number of elements in each of the blocks into which a row is divided to sum it; the sums of the blocks are added in
order."""
KEY_BLOCK = 128
"""Number of keys in a block of attention; each block's sum of weights and weighted sum of values are added to the
totals in order."""


def check_leaves(leaves: int, columns: int | None = None) -> None:
    """Raises SlimxError unless `leaves`, a number of leaves, is a power of two and divides `columns`, the number of
    elements of a dot product. If `columns` is None, only the first condition is checked."""
    if leaves < 1 or leaves & (leaves - 1):
        raise SlimxError(
            f"row-parallel sums would have {leaves} leaves, which is not a power of two; set numerics.leaves to a "
            "power of two",
            code="exact.leaves",
            about=str(leaves),
        )
    if columns is not None and columns % leaves:
        raise SlimxError(
            f"a dot product over {columns} elements cannot be divided into {leaves} equal leaves; set numerics.leaves "
            f"to a power of two that divides {columns}",
            code="exact.leaves",
            about=str(leaves),
        )
