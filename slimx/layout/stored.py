"""Storage of the tensors that a weight table names: each alone in a checkpoint, or all experts' in one stack.

A source of a table may be named `stack[3]` or `stack[3].T`: what stands at 3 of the checkpoint's tensor `stack`, and
the same transposed. So the rows of a family that stacks its experts look like those of any other. The stack is taken
apart where a checkpoint is read and put together where one is written; in between nobody knows of it. That is also the
place for a transposition: the kernels write rows, and of a matrix that is interleaved and transposed no two neighbours
are neighbours anywhere else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_INDEXED = re.compile(r"(?P<name>[^\[\]]+)\[(?P<index>\d+)\](?P<turned>\.T)?")


@dataclass(frozen=True, slots=True)
class Stored:
    """The place of a table's source in its checkpoint."""

    name: str
    """Name of the checkpoint's tensor."""
    index: int | None = None
    """Place in the stack; None: the tensor is the source itself."""
    turned: bool = False
    """True if the stack holds it transposed."""

    def shape(self, source: tuple[int, ...], count: int) -> tuple[int, ...]:
        """Shape of the checkpoint's tensor for a source of shape `source`, of which a stack holds `count`."""
        if self.index is None:
            return tuple(source)
        return (count, *(reversed(source) if self.turned else source))


def stored(source: str) -> Stored:
    """The place of the source named `source` in a table."""
    match = _INDEXED.fullmatch(source) if "[" in source else None
    if match is None:
        return Stored(source)
    return Stored(match["name"], int(match["index"]), match["turned"] is not None)
