"""Weights beside which low-rank adapters can stand, by the names that Megatron gives them."""

from __future__ import annotations

import re
from collections.abc import Collection

from slimx.layout.table import Table

_LAYER = r"decoder\.layers\.[^.]+\."
_TARGETS = {
    "attention": re.compile(_LAYER + r"self_attention\.linear_(qkv|proj|q_proj|(q|kv)_(down|up)_proj)\.weight"),
    "mlp": re.compile(_LAYER + r"mlp\.linear_fc[12]\.weight"),
    "shared_experts": re.compile(_LAYER + r"mlp\.shared_experts\.linear_fc[12]\.weight"),
    "experts": re.compile(_LAYER + r"mlp\.experts\.linear_fc[12]\.weight[^.]*"),
    "router": re.compile(_LAYER + r"mlp\.router\.weight"),
}
_UNASKED = tuple(target for target in _TARGETS if target != "router")


def adapts(targets: Collection[str] | None, name: str) -> bool:
    """True if the weight `name` belongs to one of `targets` (`trainer.lora.targets`); None: to any but the router."""
    return any(_TARGETS[target].fullmatch(name) for target in (_UNASKED if targets is None else targets))


def absent(targets: Collection[str], table: Table) -> list[str]:
    """Those of `targets` to which no weight of the model belongs."""
    return [target for target in targets if not any(adapts((target,), row.name) for row in table.rows)]
