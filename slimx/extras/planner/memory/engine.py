"""Memory of an engine rank: its weights, counted with the engine's weight table, and the KV cache that fits in the
remaining memory."""

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
from slimx.layout.number_formats import ITEMSIZE, Quantization, published_format
from slimx.layout.parts import matrix
from slimx.layout.ranks import EngineSizes, engine_sizes
from slimx.layout.table import Table
from slimx.models.families import ModelSpec
from slimx.models.fields import HfConfig
from slimx.models.layer_kind import LayerKind
from slimx.preflight.hardware import OVERHEAD, Machine

MIB = 2**20
WORK = 2 * 2**30
"""Assumed minimum number of bytes that an engine rank needs for activations."""
_FP8_CACHE = ("fp8_e4m3", "fp8_e5m2")
_EMBEDDING_CACHE = 100 * MIB
"""Default value of SGLang's environment variable SGLANG_VLM_CACHE_SIZE_MB, in bytes."""
_PIXEL_POOL = 1024 * MIB
"""Default value of SGLang's environment variable SGLANG_MM_FEATURE_CACHE_MB, in bytes."""


def engine_memory(
    config: Config,
    spec: ModelSpec,
    group: Engines,
    machine: Machine,
    *,
    staged: int,
    registered: int = 0,
    occupied: int = 0,
    table: Table | None = None,
) -> EngineMemory:
    """Returns the memory of the fullest rank of a server of `group`.

    `staged`: bytes that a publication needs in addition to the weights; `registered`: those that it keeps. `occupied`:
    bytes that a trainer rank still uses on the GPU when the server starts. `table`: the result of `engine_table`; None:
    compute it."""
    sizes = engine_sizes(group)
    number_format = published_format(config.publish.quantize)
    rule = config.publish.quantize
    quantization = None
    if rule is not None:
        quantization = number_format.quantization(rule)
    chosen = number_format.chosen(table or engine_table(spec, group))
    itemsize = ITEMSIZE[config.numerics.dtype]
    weights = engine_weights(chosen, config.numerics.dtype, sizes, quantization)
    if not group.frozen:
        weights += adapter_slots(config, spec)
    graphs = 0
    if machine.memory is not None:
        graphs = graph_bytes(group, sizes, machine.memory)
    images, vision_factor = image_memory(spec.hf, group, machine)
    record = EngineMemory(
        group=group.name,
        count=group.servers,
        ranks=sizes.world,
        weights=weights,
        images=images,
        vision_factor=vision_factor,
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
        registered=registered,
        overhead=OVERHEAD,
        dispatcher=engine_buffers(group, spec, sizes),
        graphs=graphs,
        work=WORK,
    )
    return with_occupied(record, config, group, machine, occupied)


def with_occupied(
    record: EngineMemory, config: Config, group: Engines, machine: Machine, occupied: int
) -> EngineMemory:
    """Returns `record` adjusted for a GPU on which other processes use `occupied` bytes when the server starts.

    SGLang 0.5.23 measures the free memory after its ranks have connected and before it loads weights. Weights and KV
    cache together take the fraction mem_fraction_static of this free memory (`kv_cache_configurator.py`,
    `_profile_available_bytes`)."""
    sizes = engine_sizes(group)
    fields: dict[str, int | float | None] = {"static_fraction": None, "static": None, "kv_room": None}
    tokens = None
    states = None
    if machine.memory is not None:
        fraction = group.sglang.get("mem_fraction_static")
        if not fraction:
            fraction = static_fraction(group, sizes, machine.memory) * record.vision_factor
        static = int(fraction * max(0, machine.memory - record.overhead - occupied))
        room = max(0, static - record.weights - record.images)
        state = record.state_per_request
        if state:
            states = state_slots(group, sizes, room, state)
            room = max(0, room - (states + 1) * state)  # SGLang adds one for padding
        tokens = room // record.kv_per_token
        fields = {"static_fraction": fraction, "static": static, "kv_room": room}
    if group.max_total_tokens is not None:
        tokens = group.max_total_tokens if tokens is None else min(tokens, group.max_total_tokens)
    concurrency = None
    if tokens is not None:
        rollouts = tokens // config.rollout.longest
        if states is not None:
            rollouts = min(rollouts, states)
        concurrency = sizes.attention_data * rollouts
        limit = group.sglang.get("max_running_requests")
        if limit:
            concurrency = min(concurrency, limit)
    return record.model_copy(update={**fields, "kv_tokens": tokens, "concurrency": concurrency})


def engine_table(spec: ModelSpec, group: Engines) -> Table:
    """Returns the weight table for servers of `group`; it maps every checkpoint tensor to an engine parameter."""
    fused = bool(group.sglang.get("enforce_shared_experts_fusion"))
    # A server that drafts loads the draft layer even if it is not trained.
    return spec.engine_table(fused_shared_experts=fused, draft=group.drafts and spec.has_draft_table)


def engine_weights(table: Table, dtype: str, sizes: EngineSizes, quantization: Quantization | None) -> int:
    """Returns the size in bytes of the weights on the rank that has the most, including block scales of quantized
    weights. `dtype`: data type of weights that are not quantized."""
    by_rank = np.zeros(sizes.world, dtype=np.int64)
    for shard in EngineLayout(table, sizes).shards():
        rows, cols = matrix(shard.shape)
        nbytes = rows * cols * ITEMSIZE[shard.row.dtype or dtype]
        if shard.row.quantized and quantization is not None:
            codes, scales = (math.prod(shape) for shape in quantization.shapes((rows, cols)))
            nbytes = codes * ITEMSIZE[quantization.code_dtype] + scales * ITEMSIZE[quantization.scale_dtype]
        for stage, layers in enumerate(shard.layers):
            ranks = [stage * sizes.tensor + rank for rank in shard.ranks]
            by_rank[ranks] += nbytes * layers
    return int(by_rank.max())


def adapter_slots(config: Config, spec: ModelSpec) -> int:
    """Returns the number of bytes that adapters take on an engine with `publish.adapters: alone`, in addition to the
    weights: one set for each policy that the engine serves, and one empty set that SGLang keeps. An engine that
    computes with adapters has a single rank."""
    lora = config.trainer.lora
    if lora is None or not config.serves_adapters:
        return 0
    parts = adapter_targets(spec.table, lora.targets, lora.rank)
    slots = 2 + len(config.served_by_actor)
    return slots * ITEMSIZE[config.numerics.dtype] * sum(math.prod(part.shape) for part in parts)


def kv_bytes(
    model: dict[str, Any], kind: LayerKind, sizes: EngineSizes, itemsize: int, cache: str | None, *, drafting: int = 0
) -> int:
    """Returns the number of bytes that one token takes in a rank's KV cache.

    Every attention layer stores keys and values of the rank's query groups (at least one). With latent attention, every
    rank instead stores the complete latent and rotary key, and any further data that this kind of layer caches.
    `cache`: dtype of the cache. `drafting`: number of layers of a draft model whose attention has the target's
    shape."""
    if cache in _FP8_CACHE:
        itemsize = 1
    attending = drafting + sum(layer.mixer == "attention" for layer in kind.layers(model))
    if model.get("multi_latent_attention"):
        latent = (model["kv_lora_rank"] + model["qk_pos_emb_head_dim"]) * itemsize
        return attending * (latent + kind.cache_bytes(model))
    groups = max(1, model["num_query_groups"] // sizes.attention_tensor)
    return 2 * attending * groups * model["kv_channels"] * itemsize


def state_bytes(model: dict[str, Any], kind: LayerKind, sizes: EngineSizes, dtype: str, states: str | None) -> int:
    """Returns the number of bytes that one request's recurrent states take on a rank, whatever the request's length.

    They are the last inputs of the convolutions, in bf16 unless the model is float32, and the states of the recurrence.
    `states`: dtype of the latter (SGLang's mamba_ssm_dtype); None: float32."""
    inputs, elements = kind.state_elements(model)
    return (inputs * ITEMSIZE[dtype] + elements * ITEMSIZE[states or "float32"]) // sizes.attention_tensor


def state_slots(group: Engines, sizes: EngineSizes, room: int, state: int) -> int:
    """Returns the number of requests for which SGLang 0.5.23 allocates recurrent states if its prefix cache is off
    (`_handle_max_mamba_cache` in `srt/mem_cache/kv_cache_configurator.py`).

    `room`: bytes available on a rank; `state`: bytes of one request's states."""
    slots = group.sglang.get("max_mamba_cache_size") or group.sglang.get("max_running_requests")
    if slots is not None:
        return max(1, slots // sizes.attention_data)
    ratio = group.sglang.get("mamba_full_memory_ratio") or 0.9
    return max(0, int(room * ratio / (1 + ratio)) // state - 1)


def static_fraction(group: Engines, sizes: EngineSizes, memory: int) -> float:
    """Returns the fraction of a GPU's memory that SGLang 0.5.23 uses for weights and KV cache if `mem_fraction_static`
    is unset.

    The fraction is computed by SGLang's formula (`srt/arg_groups/memory_hook.py`) from `memory`, the size of the GPU's
    memory. The actual fraction may be larger, because SGLang increases it after graph capture."""
    mib = memory / MIB
    chunk, batch = _prefill_and_decode(group, memory, sizes.tensor)
    reserved = 512 + 1.5 * max(chunk, 2048) + sizes.world / 8 * 1024
    if not group.sglang.get("disable_cuda_graph"):
        reserved += 2 * batch
        if sizes.attention_data > 1:
            per_request = 4.5 if batch > 300 else 3
            reserved += batch * sizes.attention_data * per_request
    if mib > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    if group.sglang.get("moe_a2a_backend") == "deepep":
        reserved += 2048
    return round((mib - reserved) / mib, 3)


def image_memory(hf: HfConfig, group: Engines, machine: Machine) -> tuple[int, float]:
    """Returns the memory that SGLang 0.5.23 reserves on each rank if a model has a vision tower, whether or not prompts
    have images: the number of bytes that it takes from the KV cache (`mm_runtime_reservation_gb` in
    `srt/mem_cache/kv_cache_configurator.py`), and the factor by which it reduces its choice of `mem_fraction_static`
    (`adjust_mem_fraction_for_vlm` in `srt/arg_groups/memory_hook.py`). Without a tower they are 0 and 1.

    `hf`: contents of config.json. For Qwen3-VL on Hopper GPUs, SGLang replaces the cache of embeddings by a pool of
    pixels, which is three times as large from 400 concurrent requests per server."""
    vision = hf.get("vision_config")
    if vision is None:
        return 0, 1.0
    nbytes = _EMBEDDING_CACHE
    hopper = machine.gpu is not None and machine.gpu.name.startswith("H")
    if hopper and hf["model_type"].startswith("qwen3_vl") and group.nodes == 1:
        nbytes = _PIXEL_POOL * (3 if group.sglang.get("max_running_requests", 0) >= 400 else 1)
    factor = 1.0
    if group.role != "decode":
        # Relative to a tower of 24 layers and 1,024 dimensions. SGLang takes the number of layers from a field that all
        # but Kimi-K2.5 lack.
        hidden = vision.get("vt_hidden_size", vision.get("hidden_size", 1024))
        size = vision.get("vt_num_hidden_layers", 24) / 24 * (hidden / 1024) ** 2
        factor = 0.95 * max(0.8, min(1.05, 1 - 0.1 * (size - 1)))
    return nbytes, factor


def graph_bytes(group: Engines, sizes: EngineSizes, memory: int) -> int:
    """Returns the number of bytes that SGLang reserves for CUDA graphs: 2 MiB per request of the largest decode
    batch."""
    if group.sglang.get("disable_cuda_graph"):
        return 0
    _, batch = _prefill_and_decode(group, memory, sizes.tensor)
    return 2 * MIB * batch


def _prefill_and_decode(group: Engines, memory: int, tensor: int) -> tuple[int, int]:
    """Returns the number of tokens in a prefill chunk and the number of requests in a decode batch, as configured or as
    SGLang chooses them. `memory`: GPU memory in bytes; `tensor`: tensor-parallel size."""
    chunk = 16384
    batch = 512
    # (upper bound of GPU memory in GiB; prefill chunk; decode batch; decode batch with 4 or more tensor-parallel ranks)
    steps = ((20, 2048, 8, 8), (35, 4096, 48, 160), (60, 4096, 32, 160), (160, 8192, 256, 512))
    for below, step_chunk, few, many in steps:
        if memory / MIB < below * 1024:
            chunk = step_chunk
            batch = few if tensor < 4 else many
            break
    requests = group.sglang.get("max_running_requests")
    if requests:
        batch = min(batch, requests)
    return group.sglang.get("chunked_prefill_size") or chunk, batch
