"""Transformer Engine's layers have the names and shapes of the weight table, at the sizes of shipped configurations."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from slimx.trainer.process import prepare_process
from tests.function_call import call_in_process
from tests.needed import missing

pytestmark = pytest.mark.slow("needs .venv/transformer-engine, imports the whole of it")

GROUPED = {"TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"}
NORMED = {"TELayerNormColumnParallelLinear"}
EXPECTED = {
    "mimo-7b-sft": NORMED,
    "qwen3-30b-a3b": NORMED | GROUPED,
    "deepseek-v3": NORMED | GROUPED | {"TELinear"},
}
"""Classes of layers by configuration. Mamba-2 layers are not here: they ask for a GPU's generator."""


def trainer_stages(file: str) -> list[dict[str, Any]]:
    """Builds the trainers of a shipped configuration on the meta device, of Transformer Engine's own classes.

    Each is built at its published sizes, as the first rank of every pipeline stage has it; its groups are torch's fake
    ones, which have no other ranks. Returns, by stage, the tensors that the weight table or the model has alone, those
    of which they have different shapes, and the classes that the model is made of.
    """
    prepare_process("cuda", shares_layers=True, local=True)
    from tests.integration import transformer_engine_stand  # which imports torch

    transformer_engine_stand.install()
    import torch

    from slimx.config.load import load_config
    from slimx.layout.ranks import sizes_of
    from slimx.models.families import configured_model
    from slimx.trainer.device.backends import choose_backends
    from slimx.trainer.model.transformer import transformer_config

    torch.cuda.current_device = lambda: "meta"  # where megatron-core makes parameters
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
    built: dict[str, list[int]] = {}
    kinds: set[str] = set()
    for chunk in range(sizes.virtual):
        number, prefix = (chunk, f"{chunk}.") if sizes.virtual > 1 else (None, "")
        with torch.device("meta"):
            make = partial(build_chunk, spec.layer_kind.model_class(PolicyModel, sizes), spec, transformer, number)
            model = unwrap(make(torch.device("meta"), mode=NumericsMode(), rounding=Rounding()))
        kinds |= {type(module).__name__ for module in model.modules()}
        built |= {prefix + name: list(value.shape) for name, value in model.named_parameters()}
        buffers = {prefix + name: list(value.shape) for name, value in model.named_buffers()}
        built |= {name: shape for name, shape in buffers.items() if name in table}
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return {
        "alone": sorted(table.keys() ^ built.keys()),
        "shapes": [name for name in table.keys() & built.keys() if table[name] != built[name]],
        "kinds": sorted(kinds),
    }


def test_layers_have_the_weight_tables_names_and_shapes() -> None:
    from tests.integration import transformer_engine_stand

    if not transformer_engine_stand.PACKAGE.is_dir():
        missing(f"needs {transformer_engine_stand.PACKAGE}: `make .venv/transformer-engine` installs it")
    for name, expected in EXPECTED.items():
        kinds: set[str] = set()
        for found in call_in_process(trainer_stages, f"configs/moe/{name}.yaml"):
            assert (found["alone"], found["shapes"]) == ([], [])
            kinds |= set(found["kinds"])
        assert kinds >= expected | {"TEDotProductAttention"}
        assert not kinds & {"NormColumnParallelLinear", "PackedAttention", "RowParallelLinear"}
