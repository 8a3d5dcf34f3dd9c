"""Builds trainers of shipped configurations on the meta device, of Transformer Engine's own classes.

python -m tests.unit.trainer.layers_on_meta FILE.yaml...

Each is built at its published sizes, as the first rank of every pipeline stage has it; its groups are torch's fake
ones, which have no other ranks. For each file it prints a line of JSON: by stage the tensors that the weight table or
the model has alone, those of which they have different shapes, and the classes that the model is made of.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from slimx.trainer.process import prepare_process

ROOT = Path(__file__).parents[3]


def main(files: list[str]) -> None:
    prepare_process("cuda", shares_layers=True, local=True)
    from tests.integration import transformer_engine_stand

    transformer_engine_stand.install()
    import torch

    torch.cuda.current_device = lambda: "meta"  # where megatron-core makes parameters
    os.chdir(ROOT)  # model.path names a directory of this repository
    for file in files:
        print(json.dumps(stages(file)), flush=True)


def stages(file: str) -> list[dict[str, Any]]:
    from slimx.config.load import load_config
    from slimx.layout.ranks import sizes_of
    from slimx.models.families import configured_model
    from slimx.trainer.device.backends import choose_backends
    from slimx.trainer.model.transformer import transformer_config

    # DeepEP's buffers want a GPU; no parameter depends on the dispatcher.
    config = load_config(file, ["trainer.moe.dispatcher=alltoall"])
    spec, sizes = configured_model(config), sizes_of(config.trainer)
    backends = choose_backends(config.trainer, device="cuda", packages={"transformer_engine"}, experts=spec.experts)
    transformer = transformer_config(spec, config, backends, cpu=False)
    transformer.init_model_with_meta_device, transformer.perform_initialization = True, False
    return [stage(spec, sizes, transformer, place * sizes.stage) for place in range(sizes.pipeline)]


def stage(spec: Any, sizes: Any, transformer: Any, rank: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from slimx.layout.megatron import MegatronLayout
    from slimx.numerics.mode import NumericsMode
    from slimx.numerics.rounding import Rounding
    from slimx.trainer.model.build import build_chunk, unwrap
    from slimx.trainer.model.policy_model import PolicyModel

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=sizes.world)
    parallel_state.initialize_model_parallel(
        sizes.tensor,
        sizes.pipeline,
        sizes.virtual if sizes.virtual > 1 else None,
        context_parallel_size=sizes.context,
        expert_model_parallel_size=sizes.expert,
        expert_tensor_parallel_size=sizes.expert_tensor,
        create_gloo_process_groups=False,
    )
    table = {part.name: list(part.shape) for part in MegatronLayout(spec.table, sizes).parts_of(rank)}
    held: dict[str, list[int]] = {}
    kinds: set[str] = set()
    for chunk in range(sizes.virtual):
        number, prefix = (chunk, f"{chunk}.") if sizes.virtual > 1 else (None, "")
        with torch.device("meta"):
            make = partial(build_chunk, spec.layer_kind.model_class(PolicyModel, sizes), spec, transformer, number)
            model = unwrap(make(torch.device("meta"), mode=NumericsMode(), rounding=Rounding()))
        kinds |= {type(each).__name__ for each in model.modules()}
        held |= {prefix + name: list(value.shape) for name, value in model.named_parameters()}
        buffers = {prefix + name: list(value.shape) for name, value in model.named_buffers()}
        held |= {name: shape for name, shape in buffers.items() if name in table}
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return {
        "alone": sorted(table.keys() ^ held.keys()),
        "shapes": [name for name in table.keys() & held.keys() if table[name] != held[name]],
        "kinds": sorted(kinds),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
