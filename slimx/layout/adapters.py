"""Weights beside which low-rank adapters can stand, by the names that Megatron gives them."""

from __future__ import annotations

import re
from collections.abc import Collection

from slimx.layout.table import Table

_TARGETS = {
    "attention": re.compile(r"decoder\.layers\.[^.]+\.self_attention\.linear_(qkv|proj)\.weight"),
    "mlp": re.compile(r"decoder\.layers\.[^.]+\.mlp\.linear_fc[12]\.weight"),
    "experts": re.compile(r"decoder\.layers\.[^.]+\.mlp\.experts\.linear_fc[12]\.weight[^.]*"),
}


def adapts(targets: Collection[str] | None, name: str) -> bool:
    """True if the weight `name` belongs to one of `targets` (`trainer.lora.targets`); None: to any there is."""
    return any(_TARGETS[target].fullmatch(name) for target in (_TARGETS if targets is None else targets))


def absent(targets: Collection[str], table: Table) -> list[str]:
    """Those of `targets` to which no weight of the model belongs."""
    return [target for target in targets if not any(adapts((target,), row.name) for row in table.rows)]
