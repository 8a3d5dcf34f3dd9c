"""Selects the weights that have low-rank adapters, by their Megatron names, and describes the adapters as parts of a
publication (`publish.adapters`)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import Literal

from slimx.layout.maps import Rect
from slimx.layout.parts import Part, matrix
from slimx.layout.table import Table
from slimx.reshard.manifest import ADAPTER_PREFIX

SERVED = {"attention": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}
"""Target (a value in `trainer.lora.targets`) for which adapters can be published alone -> names of the target's modules
in engines."""

_LAYER = r"decoder\.layers\.[^.]+\."
_TARGETS = {
    "attention": re.compile(_LAYER + r"self_attention\.linear_(qkv|proj|q_proj|(q|kv)_(down|up)_proj)\.weight"),
    "mlp": re.compile(_LAYER + r"mlp\.linear_fc[12]\.weight"),
    "shared_experts": re.compile(_LAYER + r"mlp\.shared_experts\.linear_fc[12]\.weight"),
    "experts": re.compile(_LAYER + r"mlp\.experts\.linear_fc[12]\.weight[^.]*"),
    "router": re.compile(_LAYER + r"mlp\.router\.weight"),
}
_DEFAULT = tuple(target for target in _TARGETS if target != "router")


def adapts(targets: Collection[str] | None, name: str) -> bool:
    """Returns True if the weight with the Megatron name `name` belongs to one of `targets` (`trainer.lora.targets`). If
    `targets` is None, the result is True for every weight that can have an adapter, except the router's."""
    return target_of(name) in (_DEFAULT if targets is None else targets)


def target_of(name: str) -> str | None:
    """Returns the target (a value in `trainer.lora.targets`) to which the weight with the Megatron name `name` belongs;
    None if the weight cannot have an adapter."""
    return next((target for target, pattern in _TARGETS.items() if pattern.fullmatch(name)), None)


def absent(targets: Collection[str], table: Table) -> list[str]:
    """Returns the targets in `targets` to which no weight of the model with weight table `table` belongs."""
    return [target for target in targets if not any(adapts((target,), row.name) for row in table.rows)]


def served_modules(targets: Collection[str] | None) -> tuple[str, ...]:
    """Returns the names of the modules to which engines attach adapters if `targets`, keys of `SERVED`, are adapted;
    None stands for all keys."""
    modules: list[str] = []
    for target in SERVED if targets is None else targets:
        modules.extend(SERVED[target])
    return tuple(modules)


def peft_name(source: str, letter: Literal["A", "B"]) -> str:
    """Returns PEFT's name for matrix A or B of the module whose weight is the checkpoint tensor `source`."""
    return f"{ADAPTER_PREFIX}{source.removesuffix('.weight')}.lora_{letter}.weight"


def adapter_parts(weights: Iterable[Part], targets: Collection[str] | None, rank: int) -> list[Part]:
    """Returns a `Part` for each matrix A [rank, in] and B [out, rank] of the adapters of those `weights` that belong to
    `targets`.

    The sources have PEFT's names. Modules that share a weight (such as q, k and v) share its matrix A, which is named
    after the first of these modules. A is split like the weight's columns and B like its rows. Trainer ranks that store
    the same rows and columns of a matrix share one `Part`."""
    adapters: dict[tuple[str, tuple[str, ...], tuple[Rect, ...]], Part] = {}
    for part in weights:
        if part.copy or not adapts(targets, part.name):
            continue
        path = part.name.rpartition(".")[0]
        rows, cols = matrix(part.shape)
        a_rects = (Rect(0, 0, part.rects[0].col, rank, cols, 0, 0),)
        b_rects = tuple(rect._replace(col=0, cols=rank, local_col=0) for rect in part.rects)
        modules = tuple(peft_name(source, "B") for source in part.sources)
        for adapter in (
            Part(f"{path}.lora_a", (rank, cols), part.ranks, (peft_name(part.sources[0], "A"),), a_rects),
            Part(f"{path}.lora_b", (rows, rank), part.ranks, modules, b_rects),
        ):
            key = adapter.name, adapter.sources, adapter.rects
            ranks = set(adapter.ranks)
            if key in adapters:
                ranks.update(adapters[key].ranks)
            adapters[key] = adapter._replace(ranks=tuple(sorted(ranks)))
    return list(adapters.values())


def adapter_targets(table: Table, targets: Collection[str] | None, rank: int) -> Iterator[Part]:
    """Yields a `Part`, named as in PEFT, for each unsplit matrix A and B of every module that belongs to one of
    `targets`. Modules that share a matrix A each get a copy of it."""
    for entry in table.entries():
        if not adapts(targets, entry.row.name):
            continue
        shared = peft_name(entry.sources[0], "A")
        for source, (_, shape) in zip(entry.sources, entry.row.sources, strict=True):
            rows, cols = matrix(shape)
            for name, size, origin in (
                (peft_name(source, "A"), (rank, cols), shared),
                (peft_name(source, "B"), (rows, rank), peft_name(source, "B")),
            ):
                yield Part(name, size, (0,), (origin,), (Rect(0, 0, 0, *size, 0, 0),))
