"""Names under which SGLang looks up, in config.json, the matrices that it keeps unquantized."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from slimx.errors import SlimxError
from slimx.layout.table import Entry, Row
from slimx.models.families import ModelSpec

_SHARDS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Last component of a fused matrix's name -> last components under which SGLang 0.5.23 looks up its shards
(`sglang.srt.layers.quantization.utils.is_layer_skipped`)."""


def plain_entries(spec: ModelSpec, quantized: Callable[[Row], bool]) -> Iterator[Entry]:
    """Yields the entries of the engine table that contain matrices and for whose rows `quantized` returns False. Yields
    nothing if SGLang does not serve the model."""
    try:
        table = spec.engine_table()
    except SlimxError:
        return
    for entry in table.entries():
        if not quantized(entry.row) and any(len(shape) > 1 for _, shape in entry.row.sources):
            yield entry


def served_plain(spec: ModelSpec, quantized: Callable[[Row], bool]) -> Iterator[str]:
    """Yields the names of the matrices in `plain_entries`. A matrix that SGLang fuses appears under its name in SGLang,
    followed by those of its shards."""
    for entry in plain_entries(spec, quantized):
        name = entry.row.name.format(layer=entry.layer, expert=entry.expert).removesuffix(".weight")
        # SGLang looks up the layers of Kimi-K2.5's language model without the prefix of their parameters.
        name = name.removeprefix("language_model.")
        yield name
        module, _, projection = name.rpartition(".")
        for shard in _SHARDS.get(projection, ()):
            yield f"{module}.{shard}"
