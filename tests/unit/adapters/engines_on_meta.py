"""Builds ranks of SGLang's models on the meta device, as servers of the given arguments hold them on Hopper.

    python -m tests.unit.adapters.engines_on_meta <<< '[{"path": ..., "rank": 0, "world": 8, "arguments": {...}}]'

Prints, per entry, {"hf": {tensor: form}, "local": {parameter: form}, "uncovered": {encoding: {parameter: why}}}. No GPU
and no other rank is needed: process groups are torch's fake ones, and SGLang is told Hopper's generation.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any
from unittest.mock import Mock

import torch
import torch.testing._internal.distributed.fake_pg as fake_pg

from slimx.engines.server.launch import prepare
from slimx.extras.cpu.adapters import absent


def built(path: str, rank: int, world: int, given: dict[str, Any], device: str = "meta") -> torch.nn.Module:
    """The model of `path`/config.json on `rank` of `world`, with weights in block fp8 or INT4 if its config says so."""
    from sglang.srt import runtime_context as context
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import parallel_state
    from sglang.srt.distributed.device_communicators import shm_broadcast
    from sglang.srt.layers import deep_gemm_wrapper
    from sglang.srt.layers.attention.dsa import dsa_indexer
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe.fused_moe_triton import layer as fused_moe
    from sglang.srt.layers.moe.utils import initialize_moe_config, resolve_shared_experts_config
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
    from sglang.srt.model_loader.utils import get_model_architecture
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(
        model_path=path,
        device="cpu",
        skip_tokenizer_init=True,
        attention_backend="torch_native",
        disable_shared_experts_fusion=True,
        tp_size=world,
        **given,
    )
    context.publish(arguments, role="scheduler", ranks=context.SpawnRanks(world_rank=rank))
    torch.distributed.init_process_group("fake", store=fake_pg.FakeStore(), rank=rank, world_size=world)
    new_group = torch.distributed.new_group
    torch.distributed.new_group = lambda ranks=None, **_: new_group(ranks, backend="fake")
    shm_broadcast.MessageQueue.create_from_process_group = lambda *_, **__: None  # it would meet the other ranks
    parallel_state.init_distributed_environment(world_size=world, rank=rank, local_rank=0, backend="fake")
    parallel_state.initialize_model_parallel(backend="fake")
    initialize_dp_attention(arguments)
    initialize_moe_config()
    initialize_fp8_gemm_config()
    # DeepEP and DeepGEMM are packages that need a GPU.
    deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM = True
    fused_moe.create_moe_dispatcher = lambda *_, **__: Mock(expert_mask_gpu=None)
    dsa_indexer._is_cuda, dsa_indexer.resolve_num_sms = True, lambda: 132
    config = ModelConfig.from_server_args(arguments)
    hf = config.hf_config
    kind, _ = get_model_architecture(config)
    shared = resolve_shared_experts_config(kind, hf, None)
    quantized = getattr(hf, "quantization_config", None)
    method = CompressedTensorsConfig if quantized and quantized["quant_method"] == "compressed-tensors" else Fp8Config
    if quantized is not None:  # as SGLang's loader does before it builds a model
        quantized["packed_modules_mapping"] = getattr(kind, "packed_modules_mapping", {})
    with torch.device(device), context.get_model().override(shared_experts=shared):
        return kind(config=hf, quant_config=method.from_config(quantized) if quantized else None)


def described(model: torch.nn.Module) -> dict[str, Any]:
    from slimx.adapters.sglang.weights.layout import hf_layout
    from slimx.adapters.sglang.weights.places import local_layout

    layouts = {"hf": hf_layout(model), "local": local_layout(model)}
    return {
        **{name: {tensor: place.form for tensor, place in layout.places.items()} for name, layout in layouts.items()},
        "uncovered": {name: layout.uncovered for name, layout in layouts.items()},
    }


def main() -> None:
    absent.install()
    prepare(["--device", "cpu"])
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.set_default_dtype(torch.bfloat16)
    import sglang.srt.server_args  # noqa: F401  once for all: each entry is built in a fork

    for entry in json.load(sys.stdin):
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            print(json.dumps(described(built(entry["path"], entry["rank"], entry["world"], entry["arguments"]))))
            sys.stdout.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(f"{entry} could not be built")


if __name__ == "__main__":
    main()
