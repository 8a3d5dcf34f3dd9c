"""One rank of a model of SGLang's own with the draft of its speculative decoding, published to by slimx.

    python -m tests.unit.adapters.drafting_rank MODEL [fused]

MODEL has a checkpoint with one layer of multi-token prediction. SGLang's classes load it on rank 1 of an engine of two,
share embedding and output layer, and then get other weights from a publication under the engine's own names. Prints one
JSON object: parameters that are not what slimx's table says after SGLang's own `load_weights` ("loaded") and after the
publication ("published"), and what `verify` said before and after one number of the draft was changed ("verified",
"spoilt"). Process groups are torch's fakes: nothing is computed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from slimx.adapters.sglang.weights.draft_model import take_draft
from slimx.adapters.sglang.weights.places import weights_of
from slimx.adapters.sglang.weights.receiver import receiver_of
from slimx.extras.cpu.adapters import absent
from slimx.layout.engine import DRAFT, EngineLayout
from slimx.layout.ranks import EngineSizes
from slimx.models.families import read_model
from tests.unit.adapters.engine_model import Weights, rank_local
from tests.unit.adapters.receiver_stand import publish

SIZES, RANK = EngineSizes(tensor=2, expert=2), 1
SPOILT = "draft.model.decoder.mlp.experts.w2_weight"


def loaded(path: str, *, fused: bool) -> tuple[nn.Module, nn.Module]:
    """Target and draft with the weights of `path`, as a server that drafts has them before its first request."""
    from sglang.srt import runtime_context as context
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe.utils import resolve_shared_experts_config
    from sglang.srt.model_loader.utils import get_model_architecture
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(
        model_path=path,
        device="cpu",
        tp_size=SIZES.tensor,
        ep_size=SIZES.expert,
        skip_tokenizer_init=True,
        attention_backend="torch_native",
        disable_custom_all_reduce=True,
        disable_shared_experts_fusion=not fused,
        enforce_shared_experts_fusion=fused,
    )
    context.publish(arguments, role="scheduler", ranks=context.SpawnRanks(world_rank=RANK))
    torch.distributed.init_process_group("fake", rank=RANK, world_size=SIZES.tensor, store=FakeStore())
    parallel_state.init_distributed_environment(world_size=SIZES.tensor, rank=RANK, local_rank=RANK, backend="gloo")
    parallel_state.initialize_model_parallel(backend="gloo")
    initialize_dp_attention(arguments)
    models = []
    for is_draft in (False, True):
        config = ModelConfig.from_server_args(arguments, is_draft_model=is_draft)
        hf, (kind, _) = config.hf_config, get_model_architecture(config)
        with context.get_model().override(shared_experts=resolve_shared_experts_config(kind, hf, None)):
            models.append(kind(config=hf))
        for held in models[-1].parameters():
            held.data.fill_(torch.nan)
        models[-1].load_weights(load_file(Path(path) / "model.safetensors").items())
    target, draft = models
    draft.set_embed_and_head(*target.get_embed_and_head())
    return target, draft


def wrong(target: nn.Module, wanted: Weights) -> list[str]:
    """Names of parameters of target and draft that are not the wanted ones, or that only one side has."""
    held = weights_of(receiver_of(target).model)
    same = {name for name, tensor in wanted.items() if name in held and torch.equal(held[name].data, tensor)}
    return sorted((held.keys() | wanted.keys()) - same)


def main() -> None:
    path, *options = sys.argv[1:]
    os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "0"}
    absent.install()
    from sglang.srt.distributed.device_communicators import pynccl

    new_group = torch.distributed.new_group
    torch.distributed.new_group = lambda *ranks, **how: new_group(*ranks, **{**how, "backend": "fake"})
    pynccl.PyNcclCommunicator = lambda **_: None
    torch.cuda.synchronize = lambda: None  # as the plugin does on a server without CUDA
    target, draft = loaded(path, fused="fused" in options)
    runner = SimpleNamespace(model=draft)
    scheduler = SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=target)),
        draft_worker=SimpleNamespace(weight_update_runners=lambda: [("draft", runner)]),
    )
    take_draft(None, scheduler)
    table = read_model(path, mtp_layers=1).engine_table(draft=True, fused_shared_experts="fused" in options)
    layout = EngineLayout(table, SIZES)
    before = load_file(Path(path) / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    after = {name: tensor + torch.randn(tensor.shape, generator=generator) for name, tensor in before.items()}
    told: dict[str, Any] = {"loaded": wrong(target, rank_local(layout, before, RANK))}
    local = rank_local(layout, after, RANK)
    publish(target, local, encoding="local")
    told |= {"published": wrong(target, local), "verified": receiver_of(target).verify()}
    told["kinds"] = [type(target).__name__, type(draft).__name__]
    told["drafted"] = sum(name.startswith(DRAFT) for name in local)
    told["shared"] = draft.lm_head.weight is target.lm_head.weight
    draft.get_parameter(SPOILT.removeprefix(DRAFT)).data.view(-1)[0] += 1
    told["spoilt"] = receiver_of(target).verify()["differ"]
    print(json.dumps(told))


if __name__ == "__main__":
    main()
