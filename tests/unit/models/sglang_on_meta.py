"""Builds models of SGLang on the meta device, as it would for CUDA, and prints their parameters as JSON.

    python -m tests.unit.models.sglang_on_meta MODEL...

Per model directory one object of parameters: {name: [shape, dtype]}, and under "uncovered" what slimx's account of the
loaded model does not explain. No GPU is needed: SGLang asks for its generation and is told Hopper's.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from slimx.adapters.sglang import absent
from slimx.runtime.ports import free_port


def built(path: str) -> torch.nn.Module:
    """The model of the checkpoint in `path`, one rank, in bf16."""
    from sglang.srt import runtime_context as context
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.attention.dsa import dsa_indexer
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe.utils import resolve_shared_experts_config
    from sglang.srt.models.deepseek_v2 import DeepseekV32ForCausalLM
    from sglang.srt.models.glm4_moe import GlmMoeDsaForCausalLM
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(
        model_path=path,
        device="cpu",
        skip_tokenizer_init=True,
        attention_backend="torch_native",
        disable_shared_experts_fusion=True,
    )
    context.publish(arguments, role="scheduler", ranks=context.SpawnRanks(world_rank=0))
    if not torch.distributed.is_initialized():
        address = f"tcp://127.0.0.1:{free_port()}"
        parallel_state.init_distributed_environment(
            world_size=1, rank=0, local_rank=0, distributed_init_method=address, backend="gloo"
        )
        parallel_state.initialize_model_parallel(backend="gloo")
    initialize_dp_attention(arguments)
    # It then holds the two projections of an indexer in one tensor, as on CUDA.
    dsa_indexer._is_cuda, dsa_indexer.resolve_num_sms = True, lambda: 132
    hf = ModelConfig.from_server_args(arguments).hf_config
    kind = {kind.__name__: kind for kind in (DeepseekV32ForCausalLM, GlmMoeDsaForCausalLM)}[hf.architectures[0]]
    shared = resolve_shared_experts_config(kind, hf, None)
    with torch.device("meta"), context.get_model().override(shared_experts=shared):
        return kind(config=hf)


def described(model: torch.nn.Module) -> dict[str, Any]:
    from slimx.adapters.sglang.weights.layout import hf_layout

    found: dict[str, Any] = {
        name: [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
        for name, tensor in model.named_parameters()
    }
    layout = hf_layout(model)
    return {
        "parameters": found,
        "uncovered": layout.uncovered,
        "places": {name: list(place.shape) for name, place in layout.places.items()},
    }


def main() -> None:
    absent.install()
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.set_default_dtype(torch.bfloat16)
    print(json.dumps([described(built(path)) for path in sys.argv[1:]]))


if __name__ == "__main__":
    main()
