"""Builds models of SGLang on the meta device, as it would for CUDA, and prints their parameters as JSON.

    python -m tests.unit.models.sglang_on_meta MODEL[,TENSOR,EXPERT,RANK[,COPIES]]...

Per model directory one object of parameters on rank RANK (0) of an engine of TENSOR ranks with EXPERT groups of experts
(1) and COPIES of the attention (1): {name: [shape, dtype]}. What slimx's account of the loaded model says of them:
"places" {tensor: shape}, "held" [parameter, tensor, and the rectangle's row, col, rows, cols, local_row, local_col],
"uncovered" what it does not explain. No GPU is needed: SGLang asks for its generation and is told Hopper's. Nor is
another rank: none is asked.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from slimx.extras.cpu.adapters import absent
from slimx.extras.recurrent.adapters.sglang import delta_net


def built(path: str, tensor: int, expert: int, rank: int, copies: int = 1) -> torch.nn.Module:
    """The model of the checkpoint in `path` on one rank, in bf16."""
    from sglang.srt import runtime_context as context
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.attention.dsa import dsa_indexer
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe.utils import resolve_shared_experts_config
    from sglang.srt.models import qwen3_5, qwen3_next
    from sglang.srt.models.deepseek_v2 import DeepseekV32ForCausalLM
    from sglang.srt.models.glm4_moe import GlmMoeDsaForCausalLM
    from sglang.srt.models.qwen3_5_text import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(
        model_path=path,
        device="cpu",
        skip_tokenizer_init=True,
        attention_backend="torch_native",
        disable_shared_experts_fusion=True,
        disable_radix_cache=True,
        mamba_radix_cache_strategy="no_buffer",
        tp_size=tensor,
        ep_size=expert,
        dp_size=copies,
        enable_dp_attention=copies > 1,
    )
    part()
    context.publish(arguments, role="scheduler", ranks=context.SpawnRanks(world_rank=rank))
    meet(tensor, rank)
    initialize_dp_attention(arguments)
    # It then holds the two projections of an indexer in one tensor, as on CUDA.
    dsa_indexer._is_cuda, dsa_indexer.resolve_num_sms = True, lambda: 132
    # Nor does it read the heads of a delta net as its CPU path pads them.
    qwen3_next._is_cpu = qwen3_5._is_cpu = False
    hf = ModelConfig.from_server_args(arguments).hf_config
    kinds = (
        DeepseekV32ForCausalLM,
        GlmMoeDsaForCausalLM,
        qwen3_next.Qwen3NextForCausalLM,
        Qwen3_5ForCausalLM,
        Qwen3_5MoeForCausalLM,
    )
    kind = {kind.__name__: kind for kind in kinds}[hf.architectures[0]]
    shared = resolve_shared_experts_config(kind, hf, None)
    with torch.device("meta"), context.get_model().override(shared_experts=shared):
        return kind(config=hf)


def part() -> None:
    """Forget the model before: its arguments and its process groups."""
    from sglang.srt import runtime_context
    from sglang.srt.distributed import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    runtime_context.reset_context()


def meet(world: int, rank: int) -> None:
    """Make the process groups of `world` ranks, of which this is the only one."""
    from sglang.srt.distributed import parallel_state

    def alone(*args: Any, make: Any = parallel_state.GroupCoordinator, **how: Any) -> Any:
        channels = "use_pynccl", "use_custom_allreduce", "use_message_queue_broadcaster"
        return make(*args, **how | dict.fromkeys(channels, False))

    torch.distributed.init_process_group(backend="fake", store=FakeStore(), rank=rank, world_size=world)
    new_group, coordinator = torch.distributed.new_group, parallel_state.GroupCoordinator
    torch.distributed.new_group = lambda ranks=None, **_: new_group(ranks, backend="fake")
    parallel_state.GroupCoordinator = alone
    try:
        parallel_state.init_distributed_environment(world_size=world, rank=rank, local_rank=rank, backend="fake")
        parallel_state.initialize_model_parallel(backend="fake")
    finally:
        torch.distributed.new_group, parallel_state.GroupCoordinator = new_group, coordinator


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
        "held": sorted(
            [held.parameter, name, r.row, r.col, r.rows, r.cols, r.local_row, r.local_col]
            for name, place in layout.places.items()
            for held in place.parts
            for r in held.rects
        ),
    }


def main() -> None:
    absent.install()
    delta_net.add_operators()
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    # Norms with a gate ask where they are built.
    torch.cuda.current_device = lambda: "meta"
    torch.set_default_dtype(torch.bfloat16)
    out = []
    for each in sys.argv[1:]:
        path, *sizes = each.split(",")
        out.append(described(built(path, *map(int, sizes or (1, 1, 0)))))
    print(json.dumps(out))


if __name__ == "__main__":
    main()
