"""SGLang's models on one rank of an engine whose other ranks do not run: process groups are torch's fake ones.

For functions that `tests.function_call.call_with_sglang` calls.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import torch
import torch.testing._internal.distributed.fake_pg as fake_pg


def pretend_hopper() -> None:
    """Makes SGLang choose what it does on Hopper in bf16. DeepEP and DeepGEMM are packages that need a GPU."""
    from sglang.srt.layers import deep_gemm_wrapper
    from sglang.srt.layers.attention.dsa import dsa_indexer
    from sglang.srt.layers.moe.fused_moe_triton import layer as fused_moe

    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.set_default_dtype(torch.bfloat16)
    deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM = True
    fused_moe.create_moe_dispatcher = lambda *_, **__: Mock(expert_mask_gpu=None)
    # The two projections of an indexer are then in one tensor, as on CUDA.
    dsa_indexer._is_cuda, dsa_indexer.resolve_num_sms = True, lambda: 132


def delta_net_model(path: str, rank: int, world: int, **arguments: Any) -> torch.nn.Module:
    """Returns SGLang's model of `path`, which has gated delta nets, as built for Hopper on one rank."""
    from slimx.extras.recurrent.adapters.sglang import delta_net

    delta_net.add_operators()
    pretend_hopper()
    from sglang.srt.models import qwen3_5, qwen3_5_text, qwen3_next

    qwen3_next._is_cpu = qwen3_5._is_cpu = False  # heads are padded on a CPU
    torch.cuda.current_device = lambda: "meta"  # where norms with a gate are built
    classes = (qwen3_next.Qwen3NextForCausalLM, *qwen3_5_text.EntryClass, *qwen3_5.EntryClass)
    kinds = {kind.__name__: kind for kind in classes}
    arguments = {"disable_radix_cache": True, "mamba_radix_cache_strategy": "no_buffer"} | arguments
    (architecture,) = json.loads((Path(path) / "config.json").read_text())["architectures"]
    return built(join(path, rank, world, **arguments), "meta", kind=kinds[architecture])


def join(path: str, rank: int = 0, world: int = 1, **arguments: Any) -> Any:
    """Makes this process one rank of an engine of `world` ranks that serves `path`; returns the engine's arguments."""
    from sglang.srt import runtime_context as context
    from sglang.srt.distributed import parallel_state
    from sglang.srt.distributed.device_communicators import shm_broadcast
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
    from sglang.srt.server_args import ServerArgs

    server_args = ServerArgs(
        model_path=path,
        device="cpu",
        skip_tokenizer_init=True,
        attention_backend="torch_native",
        tp_size=world,
        **{"disable_shared_experts_fusion": True} | arguments,
    )
    context.publish(server_args, role="scheduler", ranks=context.SpawnRanks(world_rank=rank))
    torch.distributed.init_process_group("fake", store=fake_pg.FakeStore(), rank=rank, world_size=world)
    new_group = torch.distributed.new_group
    torch.distributed.new_group = lambda ranks=None, **_: new_group(ranks, backend="fake")
    shm_broadcast.MessageQueue.create_from_process_group = lambda *_, **__: None  # it would meet the other ranks
    parallel_state.init_distributed_environment(world_size=world, rank=rank, local_rank=0, backend="fake")
    parallel_state.initialize_model_parallel(backend="fake")
    initialize_dp_attention(server_args)
    initialize_moe_config()
    initialize_fp8_gemm_config()
    return server_args


def built(
    arguments: Any, device: str = "cpu", *, draft: bool = False, kind: type[torch.nn.Module] | None = None
) -> torch.nn.Module:
    """Returns the model of this rank, quantized if its configuration says so. `draft`: the one of its speculative
    decoding. `kind`: its class, if SGLang cannot find that on a CPU."""
    from sglang.srt import runtime_context as context
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.moe.utils import resolve_shared_experts_config
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.model_loader.utils import get_model_architecture

    config = ModelConfig.from_server_args(arguments, is_draft_model=draft)
    hf = config.hf_config
    kind = kind or get_model_architecture(config)[0]
    quantized, method = getattr(hf, "quantization_config", None), None
    if quantized is not None:  # as SGLang's loader does before it builds a model
        quantized["packed_modules_mapping"] = getattr(kind, "packed_modules_mapping", {})
        packed = quantized["quant_method"] == "compressed-tensors"
        method = (CompressedTensorsConfig if packed else Fp8Config).from_config(quantized)
    shared = resolve_shared_experts_config(kind, hf, None)
    with torch.device(device), context.get_model().override(shared_experts=shared):
        return kind(config=hf, quant_config=method)


def described(model: torch.nn.Module) -> dict[str, Any]:
    """Returns the "parameters" of a model {name: [shape, dtype]}, and what slimx's account of it says of them: "places"
    {tensor: shape}; "held" [parameter, tensor, and the rectangle's row, col, rows, cols, local_row, local_col]; and
    "uncovered", what it does not explain."""
    from slimx.adapters.sglang.weights.layout import hf_layout

    layout = hf_layout(model)
    return {
        "parameters": {
            name: [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
            for name, tensor in model.named_parameters()
        },
        "uncovered": layout.uncovered,
        "places": {name: list(place.shape) for name, place in layout.places.items()},
        "held": sorted(
            [part.parameter, name, r.row, r.col, r.rows, r.cols, r.local_row, r.local_col]
            for name, place in layout.places.items()
            for part in place.parts
            for r in part.rects
        ),
    }
