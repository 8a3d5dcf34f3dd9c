"""Memory of an engine rank: weights by the engine's own table, and the KV cache that fits beside them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from slimx.config.schema import Config
from slimx.config.sections.engines import Engines
from slimx.extras.lora.targets import adapter_targets
from slimx.extras.planner.memory.deep_ep import engine_buffers
from slimx.extras.planner.memory_record import EngineMemory
from slimx.layout.engine import EngineLayout
from slimx.layout.number_formats import ITEMSIZE, Quantisation, published_format
from slimx.layout.parts import matrix
from slimx.layout.ranks import EngineSizes, engine_sizes
from slimx.layout.table import Table
from slimx.models.families import ModelSpec
from slimx.models.layer_kind import LayerKind
from slimx.preflight.hardware import OVERHEAD, Machine

MIB = 2**20
WORK = 2 * 2**30
"""Bytes that an engine rank needs at least for activations: assumed."""
_FP8_CACHE = ("fp8_e4m3", "fp8_e5m2")


def engine_memory(
    config: Config,
    spec: ModelSpec,
    group: Engines,
    machine: Machine,
    *,
    staged: int,
    beside: int = 0,
    table: Table | None = None,
) -> EngineMemory:
    """Memory of the fullest rank of a server of `group`. `staged`: bytes that a publication needs beside the weights;
    `beside`: bytes that a trainer rank has left on the GPU when the server starts. `table`: as `engine_table` makes it,
    where it is known already."""
    sizes = engine_sizes(group)
    kept = published_format(config.publish.quantise)
    quantisation = kept.quantisation(config.publish.quantise)
    held = kept.chosen(table or engine_table(spec, group))
    itemsize = ITEMSIZE[config.numerics.dtype]
    record = EngineMemory(
        group=group.name,
        count=group.servers,
        ranks=sizes.world,
        weights=engine_weights(held, config.numerics.dtype, sizes, quantisation)
        + (0 if group.frozen else adapter_slots(config, spec)),
        kv_per_token=kv_bytes(
            spec.transformer,
            spec.layer_kind,
            sizes,
            itemsize,
            group.sglang.get("kv_cache_dtype"),
            drafting=int(group.drafts),
        ),
        state_per_request=state_bytes(
            spec.transformer, spec.layer_kind, sizes, config.numerics.dtype, group.sglang.get("mamba_ssm_dtype")
        ),
        staged=staged,
        overhead=OVERHEAD,
        dispatcher=engine_buffers(group, spec, sizes),
        graphs=0 if machine.memory is None else graph_bytes(group, sizes, machine.memory),
        work=WORK,
    )
    return beside_trainer(record, config, group, machine, beside)


def beside_trainer(record: EngineMemory, config: Config, group: Engines, machine: Machine, beside: int) -> EngineMemory:
    """`record` for a GPU on which something else holds `beside` bytes when the server starts.

    SGLang 0.5.23 measures the memory that is free once its ranks have met, before it loads weights; weights and KV
    cache get mem_fraction_static of that (`kv_cache_configurator.py`, `_profile_available_bytes`)."""
    sizes = engine_sizes(group)
    fraction = static = room = tokens = states = concurrency = None
    if machine.memory is not None:
        fraction = group.sglang.get("mem_fraction_static") or static_fraction(group, sizes, machine.memory)
        static = int(fraction * max(0, machine.memory - record.overhead - beside))
        room = max(0, static - record.weights)
        if state := record.state_per_request:
            states = state_slots(group, sizes, room, state)
            room = max(0, room - (states + 1) * state)  # SGLang keeps one more for padding
        tokens = room // record.kv_per_token
    if group.max_total_tokens is not None:
        tokens = group.max_total_tokens if tokens is None else min(tokens, group.max_total_tokens)
    if tokens is not None:
        held = tokens // config.rollout.longest
        concurrency = sizes.attention_data * (held if states is None else min(held, states))
        limit = group.sglang.get("max_running_requests")
        concurrency = min(concurrency, limit) if limit else concurrency
    update = {"static_fraction": fraction, "static": static, "kv_room": room}
    return record.model_copy(update=update | {"kv_tokens": tokens, "concurrency": concurrency})


def engine_table(spec: ModelSpec, group: Engines) -> Table:
    """Weight table of a server of `group`: the place of every checkpoint tensor."""
    fused = bool(group.sglang.get("enforce_shared_experts_fusion"))
    # A server that drafts holds the layer whether or not it is trained.
    return spec.engine_table(fused_shared_experts=fused, draft=group.drafts and spec.has_draft_table)


def engine_weights(table: Table, dtype: str, sizes: EngineSizes, quantisation: Quantisation | None) -> int:
    """Bytes of the weights of the fullest rank; quantised ones with their block scales. `dtype`: of the others."""
    held = np.zeros(sizes.world, dtype=np.int64)
    for shard in EngineLayout(table, sizes).shards():
        rows, cols = matrix(shard.shape)
        nbytes = rows * cols * ITEMSIZE[shard.row.dtype or dtype]
        if shard.row.quantised and quantisation is not None:
            codes, scales = (math.prod(shape) for shape in quantisation.shapes((rows, cols)))
            nbytes = codes * ITEMSIZE[quantisation.code_dtype] + scales * ITEMSIZE[quantisation.scale_dtype]
        for stage, layers in enumerate(shard.layers):
            held[[stage * sizes.tensor + rank for rank in shard.ranks]] += nbytes * layers
    return int(held.max())


def adapter_slots(config: Config, spec: ModelSpec) -> int:
    """Bytes of the adapters beside an engine's weights (`publish.adapters`): those of each policy that it generates
    for, and the slot without any that SGLang keeps. An engine that computes with them has one rank."""
    lora = config.trainer.lora
    if lora is None or not config.serves_adapters:
        return 0
    parts = adapter_targets(spec.table, lora.targets, lora.rank)
    slots = 2 + len(config.served_beside)
    return slots * ITEMSIZE[config.numerics.dtype] * sum(math.prod(part.shape) for part in parts)


def kv_bytes(
    model: dict[str, Any], kind: LayerKind, sizes: EngineSizes, itemsize: int, cache: str | None, *, drafting: int = 0
) -> int:
    """Bytes that one token takes in a rank's KV cache: keys and values of the rank's query groups (each rank has one at
    least) in every layer of attention, or the latent and the rotary key of latent attention, whole on every rank, with
    the additions of the kind of layers. `drafting`: layers of a draft model, which has the target's attention."""
    itemsize = 1 if cache in _FP8_CACHE else itemsize
    attending = drafting + sum(layer.mixer == "attention" for layer in kind.layers(model))
    if model.get("multi_latent_attention"):
        latent = (model["kv_lora_rank"] + model["qk_pos_emb_head_dim"]) * itemsize
        return attending * (latent + kind.cache_bytes(model))
    groups = max(1, model["num_query_groups"] // sizes.attention_tensor)
    return 2 * attending * groups * model["kv_channels"] * itemsize


def state_bytes(model: dict[str, Any], kind: LayerKind, sizes: EngineSizes, dtype: str, states: str | None) -> int:
    """Bytes that one request takes in a rank for its recurrent states, however long it is: inputs that convolutions
    still see, in bf16 but for a model in float32, and states, in `states` (SGLang's mamba_ssm_dtype; None: float32)."""
    inputs, elements = kind.state_elements(model)
    return (inputs * ITEMSIZE[dtype] + elements * ITEMSIZE[states or "float32"]) // sizes.attention_tensor


def state_slots(group: Engines, sizes: EngineSizes, room: int, state: int) -> int:
    """Requests whose recurrent states of `state` bytes SGLang 0.5.23 makes room for in `room` bytes of a rank, without
    a prefix cache (`_handle_max_mamba_cache` in `srt/mem_cache/kv_cache_configurator.py`)."""
    given = group.sglang.get("max_mamba_cache_size") or group.sglang.get("max_running_requests")
    if given is not None:
        return max(1, given // sizes.attention_data)
    ratio = group.sglang.get("mamba_full_memory_ratio") or 0.9
    return max(0, int(room * ratio / (1 + ratio)) // state - 1)


def static_fraction(group: Engines, sizes: EngineSizes, memory: int) -> float:
    """Share of a GPU's memory that weights and KV cache take where `mem_fraction_static` is not set.

    As SGLang 0.5.23 computes it from the GPU's size (`srt/arg_groups/memory_hook.py`), without what it adds where it
    sizes the cache after capturing graphs: the room may turn out larger."""
    mib, tensor = memory / MIB, sizes.tensor
    chunk, batch = _prefill_and_decode(group, memory, tensor)
    reserved = 512 + 1.5 * max(chunk, 2048) + sizes.world / 8 * 1024
    if not group.sglang.get("disable_cuda_graph"):
        reserved += 2 * batch
        if sizes.attention_data > 1:
            reserved += batch * sizes.attention_data * (4.5 if batch > 300 else 3)
    if mib > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    if group.sglang.get("moe_a2a_backend") == "deepep":
        reserved += 2048
    return round((mib - reserved) / mib, 3)


def graph_bytes(group: Engines, sizes: EngineSizes, memory: int) -> int:
    """Bytes of CUDA graphs by SGLang's own reserve, 2 MiB for each request of the largest decode batch."""
    if group.sglang.get("disable_cuda_graph"):
        return 0
    return 2 * MIB * _prefill_and_decode(group, memory, sizes.tensor)[1]


def _prefill_and_decode(group: Engines, memory: int, tensor: int) -> tuple[int, int]:
    """Tokens of a prefill chunk and requests of a decode batch, given or as SGLang chooses them."""
    # (GPU's MiB below, prefill chunk, decode batch, decode batch from 4 tensor-parallel ranks on)
    steps = ((20, 2048, 8, 8), (35, 4096, 48, 160), (60, 4096, 32, 160), (160, 8192, 256, 512))
    chunk, batch = next(
        ((chunk, few if tensor < 4 else many) for below, chunk, few, many in steps if memory / MIB < below * 1024),
        (16384, 512),
    )
    requests = group.sglang.get("max_running_requests")
    return group.sglang.get("chunked_prefill_size") or chunk, min(batch, requests) if requests else batch
