"""Language models that are a part of a vision-language model: config.json describes the language model in
`text_config`, and checkpoints store its tensors under `model.language_model.`."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Literal

from slimx.layout.maps import Fused
from slimx.layout.table import Row, Sources, Table
from slimx.models.fields import HfConfig

Stack = Literal["stacked", "transposed"]
"""Storage of a layer's experts in one tensor for all gate and up projections, one below the other, and one for all down
projections: the projections as they are, or their transposes."""
_BARE = "model."
_NESTED = "model.language_model."
_TIED = "tie_word_embeddings"


def text_config(hf: HfConfig, defaults: Mapping[str, object], *, flat: bool = False) -> HfConfig:
    """Returns the fields of config.json `hf` that describe the language model, in the form that the family of the bare
    language model reads. `defaults`: values of fields that config.json lacks. `flat`: True if these fields are at the
    top level of a config.json without `text_config`. If both levels say whether embeddings are tied, the top level
    prevails, as in transformers and SGLang."""
    text: Any = hf if flat and "text_config" not in hf else hf["text_config"]
    tied = hf.get(_TIED, text.get(_TIED, False))
    return ChainMap[str, Any]({_TIED: tied}, text, dict(defaults))


def nested_name(name: str) -> str:
    """Returns the name in a vision-language checkpoint of the tensor `name` of the bare language model."""
    return _NESTED + name.removeprefix(_BARE) if name.startswith(_BARE) else name


def nested_table(
    table: Table,
    tower: Collection[Row],
    stack: Stack | None = None,
    *,
    nested: Callable[[str], str] = nested_name,
) -> Table:
    """Returns the weight table of a vision-language model. `table`: table of its bare language model; `tower`: rows of
    the vision tower; `stack`: how the checkpoint stacks experts, None if it does not. `nested`: function that returns
    the checkpoint's name of a tensor of the bare language model."""
    rows = [_nested_row(row, nested) for row in table.rows]
    if stack is not None:
        rows = [_stacked_row(row, stack) for row in rows]
    return replace(
        table,
        rows=(*rows, *tower),
        aliases={nested(name): nested(original) for name, original in table.aliases.items()},
        frozen={nested(name): shape for name, shape in table.frozen.items()},
    )


def _nested_row(row: Row, nested: Callable[[str], str]) -> Row:
    def renamed(sources: Sources) -> Sources:
        return tuple((nested(name), shape) for name, shape in sources)

    return replace(row, sources=renamed(row.sources), appended=tuple(map(renamed, row.appended)))


def _stacked_row(row: Row, kind: Stack) -> Row:
    """Returns `row` with one stack of experts as its source, if the row describes experts; otherwise `row`."""
    sources = row.sources
    name, shape = sources[0]
    if "{expert}" not in name:
        return row
    turned = ".T" if kind == "transposed" else ""
    module, _, projection = name.partition("{expert}.")
    if len(sources) == 1:
        stack = module + projection.removesuffix(".weight")
        return replace(row, sources=((f"{stack}[{{expert}}]{turned}", shape),))
    inner, hidden = shape
    fused = ((f"{module}gate_up_proj[{{expert}}]{turned}", (2 * inner, hidden)),)
    return replace(row, sources=fused, map=Fused(row.map, (inner, inner)))


def separate_experts(table: Table) -> Table:
    """Returns `table`, in which experts are stacked as by `nested_table`, with a tensor for each projection of an
    expert."""
    return replace(table, rows=tuple(_separate_row(row) for row in table.rows))


def _separate_row(row: Row) -> Row:
    name, shape = row.sources[0]
    stack, marker, _ = name.partition("[{expert}]")
    if not marker:
        return row
    module, _, projection = stack.rpartition(".")
    if not isinstance(row.map, Fused):
        return replace(row, sources=((f"{module}.{{expert}}.{projection}.weight", shape),))
    halves = zip(("gate_proj", "up_proj"), row.map.rows, strict=True)
    sources = tuple((f"{module}.{{expert}}.{half}.weight", (rows, shape[1])) for half, rows in halves)
    return replace(row, sources=sources, map=row.map.map)


def stacked_experts(shapes: Mapping[str, tuple[int, ...]], experts: int) -> dict[str, tuple[int, ...]]:
    """Returns names and shapes of the stacks that a checkpoint may contain instead of the single experts' tensors in
    `shapes`. `experts`: number of experts."""
    stacks: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        module, marker, projection = name.partition(".experts.0.")
        if marker and projection.startswith("down_proj"):
            hidden, inner = shape
            stacks[f"{module}.experts.down_proj"] = (experts, hidden, inner)
            stacks[f"{module}.experts.gate_up_proj"] = (experts, 2 * inner, hidden)
    return stacks
