"""Names under which SGLang looks up, in config.json, the matrices that it keeps unquantized."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from slimx.errors import SlimxError
from slimx.layout.table import Row
from slimx.models.families import ModelSpec

_SHARDS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Last component of a fused matrix's name -> last components under which SGLang 0.5.23 looks up its shards
(`sglang.srt.layers.quantization.utils.is_layer_skipped`)."""


def served_plain(spec: ModelSpec, quantized: Callable[[Row], bool]) -> Iterator[str]:
    """Yields the names of the matrices in engine-table rows for which `quantized` returns False. A matrix that SGLang
    fuses appears under its name in SGLang, followed by those of its shards. Yields nothing if SGLang does not serve the
    model."""
    try:
        table = spec.engine_table()
    except SlimxError:
        return
    for entry in table.entries():
        if quantized(entry.row) or all(len(shape) == 1 for _, shape in entry.row.sources):
            continue
        name = entry.row.name.format(layer=entry.layer, expert=entry.expert).removesuffix(".weight")
        yield name
        module, _, projection = name.rpartition(".")
        for shard in _SHARDS.get(projection, ()):
            yield f"{module}.{shard}"
