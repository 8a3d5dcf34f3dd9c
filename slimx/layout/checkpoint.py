"""The checkpoint itself as a layout: every tensor whole, on one rank, under its Hugging Face name."""

from __future__ import annotations

from collections.abc import Iterator

from slimx.layout.maps import Rect
from slimx.layout.parts import Part, matrix
from slimx.layout.stored import stored
from slimx.layout.table import Table


def checkpoint_parts(table: Table, *, mtp: bool = True, served: Table | None = None) -> Iterator[Part]:
    """The checkpoint itself as a target of one rank: every tensor whole, under its Hugging Face name.

    A stack comes as its matrices one below the other, those that it holds transposed not yet so: `Table.checkpoint` has
    its own shape. `mtp`: with the layers of multi-token prediction, which only a draft model loads. `served`: the table
    of an engine that takes them, which may hold one in a dtype of its own (a router's weight in fp32), or never in
    fp8."""
    kept = {name: entry.row for entry in (served.entries() if served else ()) for name in entry.sources}
    dtypes = {name: row.dtype for name, row in kept.items() if row.dtype}
    for entry in table.entries():
        if entry.row.stage == "mtp" and not mtp:
            continue
        for name, (_, shape) in zip(entry.sources, entry.row.sources, strict=True):
            place, (rows, cols), dtype = stored(name), matrix(shape), dtypes.get(name, entry.row.dtype)
            if place.index is None:
                whole = (Rect(0, 0, 0, rows, cols, 0, 0),)
                quantised = entry.row.quantised and kept.get(name, entry.row).quantised
                yield Part(name, tuple(shape), (0,), (name,), whole, dtype, quantised)
            elif place.index == 0:
                names = tuple(name.replace("[0]", f"[{k}]") for k in range(table.experts))
                rects = tuple(Rect(k, 0, 0, rows, cols, k * rows, 0) for k in range(table.experts))
                yield Part(place.name, (len(names), *shape), (0,), names, rects, dtype, column=len(shape) == 1)
