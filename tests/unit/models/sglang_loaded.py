"""Loads a checkpoint into SGLang's own model on one rank of engines of several sizes, and writes what it then holds.

    python -m tests.unit.models.sglang_loaded MODEL OUT TENSOR,EXPERT,RANK...

Per engine OUT/TENSOR,EXPERT,RANK.safetensors has the parameters, and one JSON object on the last line says by the same
names which parameters slimx's account of the model does not explain. Groups of ranks are torch's fakes: nothing is
computed, and the other ranks need not run.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from slimx.extras.cpu.adapters import absent


def loaded(path: str, tensor: int, expert: int, rank: int) -> nn.Module:
    """The model of the checkpoint in `path` on rank `rank` of an engine of these sizes."""
    from sglang.srt import runtime_context as context
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe.utils import resolve_shared_experts_config
    from sglang.srt.models.bailing_moe import BailingMoeV2ForCausalLM as kind
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(
        model_path=path,
        device="cpu",
        tp_size=tensor,
        ep_size=expert,
        skip_tokenizer_init=True,
        attention_backend="torch_native",
        trust_remote_code=True,
        disable_custom_all_reduce=True,
    )
    context.publish(arguments, role="scheduler", ranks=context.SpawnRanks(world_rank=rank))
    torch.distributed.init_process_group("fake", rank=rank, world_size=tensor, store=FakeStore())
    parallel_state.init_distributed_environment(world_size=tensor, rank=rank, local_rank=rank, backend="gloo")
    parallel_state.initialize_model_parallel(backend="gloo")
    initialize_dp_attention(arguments)
    hf = ModelConfig.from_server_args(arguments).hf_config
    with context.get_model().override(shared_experts=resolve_shared_experts_config(kind, hf, None)):
        model = kind(config=hf)
    for held in model.parameters():
        held.data.fill_(torch.nan)
    model.load_weights(load_file(Path(path) / "model.safetensors").items())
    return model


def leave() -> None:
    from sglang.srt import runtime_context as context
    from sglang.srt.distributed import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    context.reset_context()


def fake_groups() -> None:
    """Has SGLang's groups need no other process."""
    from sglang.srt.distributed.device_communicators import pynccl

    new_group = torch.distributed.new_group
    torch.distributed.new_group = lambda *ranks, **how: new_group(*ranks, **{**how, "backend": "fake"})
    pynccl.PyNcclCommunicator = lambda **_: None


def main() -> None:
    model, out, *engines = sys.argv[1:]
    os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "0"}
    absent.install()
    fake_groups()
    from slimx.adapters.sglang.weights.layout import hf_layout

    found: dict[str, Any] = {}
    for engine in engines:
        rank = loaded(model, *map(int, engine.split(",")))
        save_file({name: held.data for name, held in rank.named_parameters()}, f"{out}/{engine}.safetensors")
        found[engine] = hf_layout(rank).uncovered
        leave()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
