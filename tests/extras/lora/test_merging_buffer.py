"""Weights merged with adapters when they are read are packed like any other, and take memory for one bucket."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from slimx.extras.lora.attached import MergingBuffer
from slimx.extras.lora.merging_buffer import merging_buffer_bytes
from slimx.layout.engine import EngineLayout
from slimx.layout.megatron import MegatronLayout
from slimx.layout.number_formats import Precision
from slimx.layout.ranks import EngineSizes, Sizes
from slimx.reshard.pack.packer import Packer
from slimx.reshard.plan.copy_plan import Plan, compile_plan
from tests.unit.layout.engine_stand import SERVED
from tests.unit.layout.layout_stand import MODELS, Tensors, trainer_shards
from tests.unit.reshard.packer_stand import VALUES

SIZES = Sizes(tensor=2, expert=2, expert_tensor=1)
BUCKET = 4096


def adapted(name: str) -> bool:
    return ".experts." in name or "linear_proj" in name


@pytest.fixture(scope="module")
def plan() -> Plan:
    parts = EngineLayout(SERVED["qwen"].table, EngineSizes(tensor=2)).parts()
    source = MegatronLayout(MODELS["qwen"].table, SIZES).parts()
    return compile_plan(source, parts, precision=Precision("bfloat16", "bfloat16"), bucket_bytes=BUCKET, ranks=2)


def merging(weights: Tensors, factor: list[float]) -> dict[str, Callable[[], torch.Tensor]]:
    return {name: lambda value=value: value * factor[0] for name, value in weights.items() if adapted(name)}


def packed(packer: Packer) -> list[tuple[bytes, ...]]:
    out = []
    for bucket in range(packer.plan.count):
        memories = [torch.zeros(packer.form(bucket).size, dtype=torch.uint8) for _ in range(packer.parts)]
        share = packer.pack(bucket, *memories)
        runs = [packer.pack_run(bucket, part=part)[1] for part in range(packer.parts)]
        sums = (payload.sums.tobytes() for payload in (share, *runs))
        out.append((*sums, *(memory.numpy().tobytes() for memory in memories)))
    return out


@pytest.mark.parametrize("apart", [False, True])
def test_merged_weights_are_packed_as_if_they_were_the_parameters(plan, apart):
    for rank, tensors in enumerate(trainer_shards(MODELS["qwen"], SIZES)):
        weights, factor = VALUES.dress(tensors, torch.bfloat16), [0.5]
        packer = Packer(
            plan, rank, weights, derived=MergingBuffer(plan, rank, weights, merging(weights, factor)), apart=apart
        )
        before = {name: value.clone() for name, value in weights.items()}
        for factor[0] in (0.5, -2.0):
            whole = {name: value * factor[0] if adapted(name) else value for name, value in weights.items()}
            assert packed(packer) == packed(Packer(plan, rank, whole, apart=apart))
        assert all(torch.equal(weights[name], value) for name, value in before.items())


def test_the_room_is_that_of_the_fullest_bucket(plan):
    rooms = merging_buffer_bytes(plan, adapted)
    for rank, tensors in enumerate(trainer_shards(MODELS["qwen"], SIZES)):
        weights = VALUES.dress(tensors, torch.bfloat16)
        room = MergingBuffer(plan, rank, weights, merging(weights, [1.0]))
        read = [np.unique(plan.moves_of(rank, bucket)["parameter"]) for bucket in range(plan.count)]
        sizes = [sum(-(-weights[n].nbytes // 64) * 64 for n in names_in(plan, numbers)) for numbers in read]
        assert room.nbytes == rooms[rank] == max(sizes)
        assert 0 < rooms[rank] < sum(value.nbytes for name, value in weights.items() if adapted(name)) / 2


def names_in(plan: Plan, numbers: np.ndarray) -> list[str]:
    return [name for number in numbers if adapted(name := plan.parameters[number].name)]
