"""Longer names of keys, by which Megatron and others know the same sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slimx.errors import SlimxError

_SIZES = {
    "tensor_parallel_size": "tensor",
    "pipeline_parallel_size": "pipeline",
    "virtual_pipeline_parallel_size": "virtual_pipeline",
    "context_parallel_size": "context",
    "data_parallel_size": "data",
    "expert_parallel_size": "expert",
    "expert_tensor_parallel_size": "expert_tensor",
}
ALIASES = {
    **{f"{section}.{long}": short for section in ("trainer", "critic.layout") for long, short in _SIZES.items()},
    **{
        f"rollout.engines.*.{long}": _SIZES[long]
        for long in ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size")
    },
}
"""Longer names that stay; `*` stands for each entry of a list."""


def to_known_names(tree: Any, where: str) -> None:
    """Give the keys in a tree of plain values, that of a file or an override, the names that the schema knows.

    Raises SlimxError, naming `where`, for a key that is given twice."""
    for old, name in ALIASES.items():
        *path, last = old.split(".")
        new = ".".join([*path, name])
        for section in _sections(tree, path):
            if last not in section:
                continue
            if name in section:
                raise SlimxError(
                    f"{where}: {old} and {new} are one key; leave {old} out", code="config.two_names", about=old
                )
            section[name] = section.pop(last)


def _sections(tree: Any, path: list[str]) -> Iterator[dict[str, Any]]:
    """Mappings that stand at `path`."""
    if not path:
        if isinstance(tree, dict):
            yield tree
        return
    first, *rest = path
    if first == "*":
        entries = tree if isinstance(tree, list) else tree.values() if isinstance(tree, dict) else ()
        for entry in entries:
            yield from _sections(entry, rest)
    elif isinstance(tree, dict) and first in tree:
        yield from _sections(tree[first], rest)
